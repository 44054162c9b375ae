"""A run folder is never overwritten and never half-written."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import admitted, make_run, reports, tensors

from fedgrove import methods, trees
from fedgrove.core import Packet
from fedgrove.engines import Serial
from fedgrove.errors import DamageError, FolderWarning, InputError
from fedgrove.runs.files import fresh_name, seal_json, write_bytes
from fedgrove.runs.folder import RunFolder
from fedgrove.runs.lockstep import Member, train_alone
from fedgrove.runs.memory import Memory, memory_file_name, read_tree
from fedgrove.runs.rounds import plan, plan_scoring
from fedgrove.runs.run import Run
from fedgrove.runs.summary import Delivery
from fedgrove.wire.known_state import KnownState


def started(folder: Path, method: Any, rounds: int = 4) -> tuple[RunFolder, Run]:
    """A new run folder, and a run whose clients keep what they remember in it."""
    made = RunFolder.create(folder, "seed = 0\n")
    return made, make_run(method, folder / "checkpoint", dtype=torch.float32, rounds=rounds)


def line_of(round: int) -> dict[str, Any]:
    """A line of metrics of a round that sent nothing."""
    sent = {"bytes_up": 0, "bytes_down": 0, "bytes_up_parts": {}, "bytes_down_parts": {}}
    return {"round": round, "counts": True, "seconds": 0.0, **sent}


class Killed(Exception):
    """Stands for a process that ends in the middle of a run."""


def kill_after(lines: int) -> Any:
    def watch(line: Mapping[str, Any]) -> None:
        if line["round"] == lines:
            raise Killed

    return watch


# ---- never overwritten ---------------------------------------------------------------------------


def test_a_folder_that_exists_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "a" / "run"
    RunFolder.create(path, "seed = 1\n")
    with pytest.raises(
        InputError, match=r"exists; runs are never overwritten\. Give a different out, or resume"
    ):
        RunFolder.create(path, "seed = 2\n")
    assert RunFolder.open(path).config == "seed = 1\n"
    # There is nothing to resume in a finished one.
    (path / "summary.json").write_text("{}")
    with pytest.raises(InputError, match=r"has a finished run; .* Give a different out\.$"):
        RunFolder.create(path, "seed = 2\n")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="exists"):
        RunFolder.create(tmp_path / "empty", "")
    assert list((tmp_path / "empty").iterdir()) == []


def test_a_folder_that_cannot_be_made_is_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot be made: .+\.$"):
        RunFolder.create(tmp_path / "file" / "run", "")


def test_what_is_not_a_run_folder_is_not_opened(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not a run folder: it does not exist"):
        RunFolder.open(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"is not a run folder: it has no config\.toml"):
        RunFolder.open(tmp_path)


def test_fresh_names_count_up(tmp_path: Path) -> None:
    assert fresh_name(tmp_path, "fedavg") == tmp_path / "fedavg"
    for name in ("fedavg", "fedavg-2"):
        (tmp_path / name).mkdir()
    assert fresh_name(tmp_path, "fedavg") == tmp_path / "fedavg-3"


# ---- checkpoints ---------------------------------------------------------------------------------


def test_a_new_folder_has_nothing_to_restore(tmp_path: Path) -> None:
    folder, run = started(tmp_path / "run", methods.FedAvg())
    assert folder.restore(run) == (None, 0)
    assert (
        folder.rounds_saved(),
        folder.metrics(),
        folder.summary,
        Memory(folder.path / "checkpoint").files,
    ) == (0, [], None, {})


@pytest.mark.parametrize(
    "method", [methods.FedAvg(), methods.Ditto(), methods.Local()], ids=lambda m: type(m).__name__
)
def test_a_killed_run_goes_on_as_if_nothing_had_happened(method, tmp_path: Path) -> None:
    whole, run = started(tmp_path / "whole", method)
    expected = train_alone(Member(run, whole, 1), Serial())
    cut, run = started(tmp_path / "cut", method)
    with pytest.raises(Killed):
        train_alone(Member(run, cut, 1, kill_after(2)), Serial())
    with (cut.path / "metrics.jsonl").open("a") as file:
        file.write('{"round": 3, "bytes_u')  # a line half written when the power went
    (cut.path / "checkpoint" / "client-00000.2.train.safetensors").write_bytes(b"half a file")

    folder = RunFolder.open(cut.path)
    assert folder.rounds_saved() == 2
    again = make_run(method, tmp_path / "elsewhere", dtype=torch.float32, rounds=4)
    again = Run(
        again.method,
        again.federation,
        again.net,
        Memory(folder.path / "checkpoint"),
        4,
        again.cohort,
        0,
        again.finetune,
    )
    state, attempt = folder.restore(again)
    assert (state.round, attempt) == (2, 0)
    assert [line["round"] for line in folder.metrics()] == [1, 2]
    found = train_alone(Member(again, folder, 1), Serial())

    assert timeless(found) == timeless(expected)
    assert [timeless(line) for line in folder.metrics()] == [
        timeless(line) for line in whole.metrics()
    ]
    for name in json.loads((whole.path / "models" / "index.json").read_text()).values():
        assert trees.identical(
            read_tree(whole.path / "models" / name), read_tree(cut.path / "models" / name)
        )


def timeless(line: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in line.items() if k != "seconds"}


def test_a_state_is_restored_to_the_bit_in_order(tmp_path: Path) -> None:
    folder, run = started(tmp_path / "run", methods.FedAvg())
    state = run.method.init(run.setup)
    state = run.method.fold(state, reports(run, Serial(), run.method.plan(state, [0, 1])))
    folder.log(line_of(1))
    folder.save(run, state)
    back, attempt = folder.restore(run)
    assert attempt == 0
    assert type(back) is type(state)
    assert (back.round, list(back.model)) == (1, list(state.model))
    assert trees.identical(tensors(back), tensors(state))


def three_rounds(path: Path) -> tuple[RunFolder, Run]:
    """A folder after three rounds of a method whose clients remember something."""
    folder, run = started(path, methods.Ditto())
    state = run.method.init(run.setup)
    for t in range(3):
        state = run.method.fold(state, admitted(run, Serial(), plan(run, state)))
        folder.log(line_of(t + 1))
        folder.save(run, state)
    return folder, run


def names_in(folder: RunFolder) -> set[str]:
    return {p.name for p in (folder.path / "checkpoint").iterdir()}


def memory_files(manifest: dict[str, Any]) -> set[str]:
    """The files of what clients remember."""
    return {memory_file_name(client, version) for client, version in manifest["memory"].items()}


def manifest(folder: RunFolder, name: str) -> dict[str, Any]:
    return json.loads((folder.path / "checkpoint" / name).read_text())


def test_a_commit_keeps_the_checkpoint_before_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedgrove.runs.folder.SYNC_EVERY", 0.0)
    folder, run = three_rounds(tmp_path / "run")
    latest, previous = manifest(folder, "latest.json"), manifest(folder, "previous.json")
    assert (previous["round"], latest["round"]) == (2, 3)
    named = {latest["tensors"], previous["tensors"]}
    assert len(named) == 2
    named |= {*memory_files(latest), *memory_files(previous)}
    assert names_in(folder) == named | {"latest.json", "previous.json"}
    again = replace(run, memory=Memory(folder.path / "checkpoint"))
    folder.restore(again)
    assert again.memory.files == run.memory.files


def test_the_checkpoint_before_is_one_that_was_forced_to_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forced: list[str] = []
    real = os.fsync
    monkeypatch.setattr(
        "os.fsync", lambda fd: forced.append(os.readlink(f"/proc/self/fd/{fd}")) or real(fd)
    )
    folder, _ = three_rounds(tmp_path / "run")
    # The first commit is synced; the next two come within ten seconds of it.
    assert (
        manifest(folder, "previous.json")["round"],
        manifest(folder, "latest.json")["round"],
    ) == (1, 3)
    before = manifest(folder, "previous.json")
    for name in (before["tensors"], *memory_files(before)):
        assert str(folder.path / "checkpoint" / name) in forced
    after = manifest(folder, "latest.json")
    assert not any(after["tensors"] in path for path in forced)


def spoil(path: Path, bit: int = 3) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1 << bit
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("which", ["manifest", "state", "memory", "metrics", "missing"])
def test_from_a_damaged_checkpoint_the_one_before_is_taken(which: str, tmp_path: Path) -> None:
    whole, run = started(tmp_path / "whole", methods.Ditto())
    expected = train_alone(Member(run, whole, 1), Serial())
    folder, run = started(tmp_path / "cut", methods.Ditto())
    with pytest.raises(Killed):
        train_alone(Member(run, folder, 1, kill_after(3)), Serial())

    at = folder.path / "checkpoint"
    latest, previous = manifest(folder, "latest.json"), manifest(folder, "previous.json")
    new = sorted(memory_files(latest) - memory_files(previous))
    if which == "manifest":
        path = at / "latest.json"
    elif which == "state":
        path = at / latest["tensors"]
    elif which == "memory":
        path = at / new[0]
    elif which == "metrics":
        path = folder.path / "metrics.jsonl"
    else:
        path = at / "latest.json"
    if which == "metrics":
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(lines[:-1]) + lines[-1].replace(b"3", b"4", 1))
    elif which == "missing":
        path.unlink()
    else:
        spoil(path)

    again = replace(run, memory=Memory(at), known_state=KnownState())
    with pytest.warns(
        FolderWarning, match=rf"{path.name} is (damaged|missing).*continues from .* round 1"
    ):
        found = train_alone(Member(again, RunFolder.open(folder.path), 1), Serial())
    assert timeless(found) == timeless(expected)
    assert [timeless(line) for line in folder.metrics()] == [
        timeless(line) for line in whole.metrics()
    ]
    assert (tmp_path / "cut/models/index.json").read_bytes() == (
        tmp_path / "whole/models/index.json"
    ).read_bytes()
    for client, tree in saved(whole).items():
        assert trees.identical(tree, saved(folder)[client])


def test_where_both_checkpoints_are_damaged_nothing_is_changed(tmp_path: Path) -> None:
    folder, run = three_rounds(tmp_path / "run")
    at = folder.path / "checkpoint"
    for name in ("latest.json", "previous.json"):
        spoil(at / manifest(folder, name)["tensors"])
    (at / "old.part").write_text("")
    before = {p: p.read_bytes() for p in folder.path.rglob("*") if p.is_file()}
    with pytest.raises(
        DamageError, match=r"state\.000003.*previous.*state\.000001.*Nothing was changed"
    ):
        folder.restore(run)
    assert {p: p.read_bytes() for p in folder.path.rglob("*") if p.is_file()} == before


def test_a_kill_between_the_two_manifests_leaves_both_usable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedgrove.runs.folder.SYNC_EVERY", 0.0)
    folder, run = started(tmp_path / "run", methods.FedAvg())
    state = run.method.init(run.setup)
    for t in range(2):
        state = run.method.fold(state, reports(run, Serial(), plan(run, state)))
        folder.log(line_of(t + 1))
        folder.save(run, state)
    state = run.method.fold(state, reports(run, Serial(), plan(run, state)))
    folder.log(line_of(3))

    def killed(path: Path, data: bytes, sync: bool = False) -> None:
        if path.name == "previous.json":
            raise Killed
        write_bytes(path, data, sync)

    with monkeypatch.context() as patched:
        patched.setattr("fedgrove.runs.folder.write_bytes", killed)
        with pytest.raises(Killed):
            folder.save(run, state)
    assert folder.restore(run)[0].round == 3
    spoil(folder.path / "checkpoint" / "latest.json")
    with pytest.warns(FolderWarning):
        assert folder.restore(run)[0].round == 1


def test_a_lost_first_checkpoint_is_not_taken_for_a_new_run(tmp_path: Path) -> None:
    folder, run = three_rounds(tmp_path / "run")
    shutil.rmtree(folder.path / "checkpoint")
    with pytest.raises(DamageError, match=r"latest\.json is missing"):
        folder.restore(run)
    assert len(folder.metrics()) == 3


def test_a_checkpoint_of_before_there_were_checksums_is_refused(tmp_path: Path) -> None:
    folder, run = three_rounds(tmp_path / "run")
    old = {"round": 3, "state": {}, "held": {}, "tensors": "state.000003.safetensors"}
    (folder.path / "checkpoint/latest.json").write_text(
        json.dumps({**old, "memory": {}, "lines": 3})
    )
    with pytest.raises(InputError, match=r"checkpoint of format 1; this version .* reads format 2"):
        folder.restore(run)


def test_a_checkpoint_of_before_trees_had_files_can_be_read(tmp_path: Path) -> None:
    folder, run = three_rounds(tmp_path / "run")
    old = manifest(folder, "latest.json") | {"format": 2}
    for key in ("sha256", "trees"):
        del old[key]
    (folder.path / "checkpoint/latest.json").write_bytes(seal_json(old))
    state, _ = folder.restore(run)
    assert state.round == 3


def test_a_finished_folder_of_before_there_were_checksums_can_be_read(tmp_path: Path) -> None:
    folder, run = started(tmp_path / "run", methods.FedAvg(), rounds=1)
    summary = train_alone(Member(run, folder, 0), Serial())
    (folder.path / "checksums.txt").unlink()
    with pytest.raises(DamageError, match=r"checksums\.txt is missing"):
        _ = folder.summary
    (folder.path / "checkpoint/latest.json").write_text('{"round": 1}')
    assert folder.summary == json.loads(json.dumps(summary))
    assert folder.config == "seed = 0\n"
    assert len(folder.metrics()) == 1


@pytest.mark.parametrize("key", ["tensors", "memory"])
@pytest.mark.parametrize("name", ["../../outside/{}", "{}"])
def test_a_manifest_cannot_name_files_outside(key: str, name: str, tmp_path: Path) -> None:
    folder, run = three_rounds(tmp_path / "run")
    at = folder.path / "checkpoint"
    (at / "previous.json").unlink()
    content = manifest(folder, "latest.json")
    del content["sha256"]
    victim = content["tensors"] if key == "tensors" else content["memory"]["0"]
    shutil.copytree(at, tmp_path / "outside")
    given = name.format(tmp_path / "outside" / victim if name == "{}" else victim)
    if key == "tensors":
        content["tensors"] = given
    else:
        content["memory"]["0"] = given
    (at / "latest.json").write_bytes(seal_json(content))
    sentence = (
        "must be the name of a file in the same folder"
        if key == "tensors"
        else "must be a version such as"
    )
    with pytest.raises(DamageError, match=sentence):
        folder.restore(run)


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoint", "checksums.txt", "config.toml"])
def test_a_link_out_of_the_folder_is_refused(name: str, tmp_path: Path) -> None:
    folder, run = three_rounds(tmp_path / "run")
    (folder.path / name).rename(tmp_path / "outside")
    (folder.path / name).symlink_to(tmp_path / "outside")

    def use() -> None:
        assert folder.config
        folder.restore(run)

    with pytest.raises(DamageError, match="is outside of"):
        use()


def test_what_a_kill_left_behind_goes_with_the_next_commit_or_resume(tmp_path: Path) -> None:
    folder, run = three_rounds(tmp_path / "run")
    at = folder.path / "checkpoint"
    rubbish = [
        folder.path / "metrics.jsonl.77.part",
        at / "latest.json.77.part",
        at / "client-00009.000000.train.0123456789abcdef.safetensors.77.part",
        at / "client-00009.000000.train.0123456789abcdef.safetensors",
        at / "state.000007.0123456789abcdef.safetensors",
    ]
    for action in (lambda: folder.restore(run), lambda: folder.save(run, run.initial_state)):
        for path in rubbish:
            path.write_text("half a")
        action()
        assert not [path.name for path in rubbish if path.exists()]


def test_metrics_that_no_checkpoint_counts_are_cut_off(tmp_path: Path) -> None:
    folder, run = started(tmp_path / "run", methods.FedAvg())
    folder.log(line_of(1))
    folder.save(run, run.method.init(run.setup))
    folder.log(line_of(2))
    assert [line["round"] for line in folder.metrics()] == [1, 2]
    folder.restore(run)
    assert [line["round"] for line in folder.metrics()] == [1]


def test_metrics_of_a_killed_run_can_be_looked_at(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", "")
    folder.log(line_of(1))
    with (folder.path / "metrics.jsonl").open("a") as file:
        file.write('{"round": 2, "by')
    assert [line["round"] for line in folder.metrics()] == [1]


# ---- results -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Apart(methods.FedAvg):
    """Delivers to each client a tree of its own, made when it is asked for."""

    def deliver(self, state: Any, client: int) -> Mapping[str, Packet]:
        return {"model": Packet({k: v + client for k, v in state.model.items()})}


def deliver(run: Run) -> Delivery:
    return Delivery(run.deliver_to(run.initial_state, run.served))


def saved(folder: RunFolder) -> dict[int, trees.Tree]:
    index = json.loads((folder.path / "models" / "index.json").read_text())
    return {int(k): read_tree(folder.path / "models" / name) for k, name in index.items()}


def test_a_delivered_model_is_written_once_and_an_own_model_wins(tmp_path: Path) -> None:
    folder, run = started(tmp_path / "run", methods.FedAvg())
    own = {k: v + 1 for k, v in run.params.items()}
    run.memory.accept(2, run.memory.write(2, 0, "finetune", {"own": own}))
    folder.save_models(run, deliver(run))
    assert sorted(p.name for p in (folder.path / "models").glob("*.safetensors")) == [
        "client-00002.safetensors",
        "group-000.safetensors",
    ]
    found = saved(folder)
    assert list(found) == list(run.infos)
    assert all(trees.identical(tree, own if k == 2 else run.params) for k, tree in found.items())


def test_models_that_differ_are_not_taken_for_one(tmp_path: Path) -> None:
    folder, run = started(tmp_path / "run", Apart())
    folder.save_models(run, deliver(run))
    for k, tree in saved(folder).items():
        assert trees.identical(tree, {name: v + k for name, v in run.params.items()})


def test_the_summary_is_written_last(tmp_path: Path) -> None:
    folder, run = started(tmp_path / "run", methods.FedAvg(), rounds=1)
    summary = train_alone(Member(run, folder, 0), Serial())
    assert RunFolder.open(folder.path).summary == json.loads(json.dumps(summary))
    state, _ = folder.restore(run)
    assert len(plan_scoring(run, state)) == summary["clients"]
