"""A run folder is never overwritten and never half-written."""

from __future__ import annotations

import json
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
from fedgrove.errors import InputError
from fedgrove.runs.folder import RunFolder, fresh_name
from fedgrove.runs.lockstep import Member, train_alone
from fedgrove.runs.rounds import evaluation, plan
from fedgrove.runs.run import Run
from fedgrove.runs.store import Memory, read_tree


def started(folder: Path, method: Any, rounds: int = 4) -> tuple[RunFolder, Run]:
    """A new run folder, and a run whose clients keep what they remember in it."""
    made = RunFolder.create(folder, "seed = 0\n")
    return made, make_run(method, folder / "checkpoint", dtype=torch.float32, rounds=rounds)


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
        InputError, match=r"exists; runs are never overwritten\. Give another --out, or resume"
    ):
        RunFolder.create(path, "seed = 2\n")
    assert RunFolder.open(path).config == "seed = 1\n"
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
    state = run.method.init(run.start)
    state = run.method.fold(state, reports(run, Serial(), run.method.plan(state, [0, 1])))
    folder.log({"round": 1})
    folder.save(run, state)
    back, attempt = folder.restore(run)
    assert attempt == 0
    assert type(back) is type(state)
    assert (back.round, list(back.model)) == (1, list(state.model))
    assert trees.identical(tensors(back), tensors(state))


def test_only_the_newest_state_is_kept_and_memory_is_committed_with_it(tmp_path: Path) -> None:
    folder, run = started(tmp_path / "run", methods.Ditto())
    state = run.method.init(run.start)
    for t in range(3):
        state = run.method.fold(state, admitted(run, Serial(), plan(run, state)))
        folder.log({"round": t + 1})
        folder.save(run, state)
    names = sorted(p.name for p in (folder.path / "checkpoint").iterdir())
    assert [n for n in names if n.startswith("state.")] == ["state.000003.safetensors"]
    current = sorted(run.memory.path(k, version).name for k, version in run.memory.files.items())
    assert [n for n in names if n.startswith("client-")] == current
    again = replace(run, memory=Memory(folder.path / "checkpoint"))
    folder.restore(again)
    assert again.memory.files == run.memory.files
    assert not any(n.endswith(".part") for n in names)


def test_metrics_that_no_checkpoint_counts_are_cut_off(tmp_path: Path) -> None:
    folder, run = started(tmp_path / "run", methods.FedAvg())
    folder.log({"round": 1})
    folder.save(run, run.method.init(run.start))
    folder.log({"round": 2})
    assert [line["round"] for line in folder.metrics()] == [1, 2]
    folder.restore(run)
    assert [line["round"] for line in folder.metrics()] == [1]


def test_metrics_of_a_killed_run_can_be_looked_at(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", "")
    folder.log({"round": 1})
    with (folder.path / "metrics.jsonl").open("a") as file:
        file.write('{"round": 2, "by')
    assert [line["round"] for line in folder.metrics()] == [1]


# ---- results -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Apart(methods.FedAvg):
    """Delivers to each client a tree of its own, made when it is asked for."""

    def deliver(self, state: Any, client: int) -> Mapping[str, Packet]:
        return {"model": Packet({k: v + client for k, v in state.model.items()})}


def saved(folder: RunFolder) -> dict[int, trees.Tree]:
    index = json.loads((folder.path / "models" / "index.json").read_text())
    return {int(k): read_tree(folder.path / "models" / name) for k, name in index.items()}


def test_a_delivered_model_is_written_once_and_an_own_model_wins(tmp_path: Path) -> None:
    folder, run = started(tmp_path / "run", methods.FedAvg())
    own = {k: v + 1 for k, v in run.params.items()}
    run.memory.accept(2, run.memory.write(2, 0, "finetune", {"own": own}))
    folder.save_models(run, run.method.init(run.start))
    assert sorted(p.name for p in (folder.path / "models").glob("*.safetensors")) == [
        "client-00002.safetensors",
        "group-000.safetensors",
    ]
    found = saved(folder)
    assert list(found) == list(run.infos)
    assert all(trees.identical(tree, own if k == 2 else run.params) for k, tree in found.items())


def test_models_that_differ_are_not_taken_for_one(tmp_path: Path) -> None:
    folder, run = started(tmp_path / "run", Apart())
    folder.save_models(run, run.method.init(run.start))
    for k, tree in saved(folder).items():
        assert trees.identical(tree, {name: v + k for name, v in run.params.items()})


def test_the_summary_is_written_last(tmp_path: Path) -> None:
    folder, run = started(tmp_path / "run", methods.FedAvg(), rounds=1)
    summary = train_alone(Member(run, folder, 0), Serial())
    assert RunFolder.open(folder.path).summary == json.loads(json.dumps(summary))
    state, _ = folder.restore(run)
    assert len(evaluation(run, state)) == summary["clients"]
