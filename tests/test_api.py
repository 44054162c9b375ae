"""The verbs in Python."""

from __future__ import annotations

import gc
import importlib
import inspect
import json
import math
import re
import shutil
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.conftest import federation, list_again

import fedgrove as fg
from fedgrove import api, methods
from fedgrove.cli import main
from fedgrove.cli.parameters import typed_options
from fedgrove.cli.run import RunCommand
from fedgrove.config.experiment import Experiment, Federations, with_settings
from fedgrove.config.toml import from_toml
from fedgrove.core import AnyMethod
from fedgrove.data import Federation
from fedgrove.engines import Serial
from fedgrove.errors import DamageError, EngineError, InputError
from fedgrove.parts.group import Bipartition
from fedgrove.parts.local import SGD, Adam, LocalTraining
from fedgrove.problems import CLASSES, Metric
from fedgrove.runs import folder as folder_module
from fedgrove.runs.folder import RunFolder
from fedgrove.runs.memory import Memory, read_tree
from fedgrove.runs.run import Run
from fedgrove.wire.codec import Dense

PROMISED = {
    "method",
    "data",
    "engine",
    "seed",
    "rounds",
    "clients",
    "groups",
    "density",
    "params_mean",
    "seconds",
} | {
    *(f"accuracy_{k}" for k in ("mean", "std", "worst", "worst10", "pooled")),
    *(f"bytes_{k}" for k in ("up", "down", "paper")),
}


def tiny() -> Federation:
    return federation((12,), (20, 13, 24), dtype=torch.float32)


def quick(out: Path, method: Any = "fedavg", **words: Any) -> api.Result:
    return api.run(
        method,
        data=tiny(),
        out=out,
        engine=words.pop("engine", "serial"),
        **({"rounds": 2} | words),
    )


def timeless(summary: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in summary.items() if k not in ("seconds", "engine")}


# ---- names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["data", "engines", "methods", "nets", "parts", "trees"])
def test_a_fresh_import_has_the_modules(name: str) -> None:
    program = f"import fedgrove as fg; print(fg.{name}.__name__)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == f"fedgrove.{name}\n"


def test_a_fresh_import_has_all_parts() -> None:
    script = "import fedgrove as fg; print(fg.parts.objective.Proximal(), dir(fg.parts))"
    shown = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120
    ).stdout
    assert "Proximal(mu=" in shown
    assert "'aggregate', 'allocate'" in shown
    with pytest.raises(AttributeError, match=r"'fedgrove\.parts' has no attribute 'nothing'"):
        _ = fg.parts.nothing


def test_the_verbs_are_there_whatever_was_imported_before() -> None:
    for module in ("api", "runs.rounds", "methods", "engines", "export.make"):
        importlib.import_module(f"fedgrove.{module}")
    assert fg.run is api.run
    assert fg.resume is api.resume


def test_every_public_name_is_there() -> None:
    assert [name for name in fg.__all__ if not hasattr(fg, name)] == []
    assert set(fg.__all__) <= set(dir(fg))


# ---- run -----------------------------------------------------------------------------------------


def test_a_run_leaves_a_whole_folder(tmp_path: Path) -> None:
    seen: list[Any] = []
    result = quick(tmp_path / "run", finetune=(0, 1), watch=seen.append)
    names = {p.name for p in (tmp_path / "run").iterdir()}
    assert names == {
        "config.toml",
        "metrics.jsonl",
        "checkpoint",
        "models",
        "checksums.txt",
        "summary.json",
        "report.html",
    }
    assert result.summary.keys() >= PROMISED
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == result.summary
    assert seen == result.folder.metrics()
    assert [line["round"] for line in seen] == [1, 2]
    assert result.summary["finetune"].keys() == {"0", "1"}
    assert result.summary["accuracy_mean"] == result.summary["finetune"]["0"]["accuracy_mean"]
    after = result.summary["accuracy_mean_after_1"]
    assert after == result.summary["finetune"]["1"]["accuracy_mean"]
    models = json.loads((tmp_path / "run" / "models" / "index.json").read_text())
    assert models.keys() == {"0", "1", "2"}
    assert "fc1.weight" in read_tree(tmp_path / "run" / "models" / models["0"])


def test_bytes_add_up(tmp_path: Path) -> None:
    result = quick(tmp_path / "run")
    lines, summary = result.folder.metrics(), result.summary
    for way in ("up", "down"):
        assert summary[f"bytes_{way}"] == sum(line[f"bytes_{way}"] for line in lines)
        assert summary[f"bytes_{way}"] == sum(summary[f"bytes_{way}_parts"].values())
    # a cohort of 2 of 3 clients in each of 2 rounds; 5187 float32 parameters each: at least 4 * 4 * 5187 bytes
    assert 4 * 4 * 5187 < summary["bytes_up"] < 4 * 4 * 5187 * 1.1
    assert summary["bytes_paper"] == 8 * 5187 * 2 * 2


@pytest.mark.parametrize(("evaluate", "scored"), [(0, []), (1, [1, 2, 3]), (2, [2, 3])])
def test_clients_are_scored_every_so_many_rounds(
    evaluate: int, scored: list[int], tmp_path: Path
) -> None:
    lines = quick(tmp_path / "run", rounds=3, evaluate=evaluate).folder.metrics()
    assert [line["round"] for line in lines if "accuracy_mean" in line] == scored


def test_the_same_words_give_the_same_result_and_another_seed_another(tmp_path: Path) -> None:
    one, two, other = (
        quick(tmp_path / n, seed=seed).summary for n, seed in (("a", 0), ("b", 0), ("c", 1))
    )
    assert timeless(one) == timeless(two)
    assert timeless(one) != timeless(other)


def test_words_are_checked_before_a_folder_is_made(tmp_path: Path) -> None:
    for words, sentence in (
        ({"rounds": 0}, "rounds is 0"),
        ({"cohort": 9}, "cohort is 9"),
        ({"seed": -1}, "seed is -1"),
        ({"clients": 0}, "clients is 0"),
        ({"evaluate": -1}, "evaluate is -1"),
        ({"net": "mpl"}, "mpl"),
        ({"engine": "poool"}, "there is no engine 'poool'; did you mean 'pool'?"),
    ):
        with pytest.raises(InputError, match=re.escape(sentence)):
            quick(tmp_path / "run", **words)
    with pytest.raises(InputError, match=re.escape("did you mean 'fedavg'?")):
        quick(tmp_path / "run", method="fedavgg")
    with pytest.raises(InputError, match=r"argument 'rouns'; did you mean 'rounds'\?"):
        quick(tmp_path / "run", rouns=3)
    assert not (tmp_path / "run").exists()


def test_a_run_is_never_overwritten(tmp_path: Path) -> None:
    result = quick(tmp_path / "run", rounds=1)
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(InputError, match="never overwritten"):
        quick(tmp_path / "run", rounds=1)
    with pytest.raises(InputError, match="never overwritten"):
        result.save(tmp_path / "run")
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_a_run_without_a_folder_is_kept_under_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words: dict[str, Any] = {"data": tiny(), "rounds": 1, "engine": "serial"}
    first = api.run("fedavg", **words)
    second = api.run(methods.FedAvg(), **words)
    again = api.rerun(tmp_path / "runs/fedavg-tiny-s0", **words)
    names = ["fedavg-tiny-s0", "fedavg-tiny-s0-2", "fedavg-tiny-s0-3"]
    assert [run.folder.path for run in (first, second, again)] == [
        Path("runs", name) for name in names
    ]
    copy = first.save(tmp_path / "deep" / "copy")
    assert copy.summary == first.summary
    # A quick test keeps nothing, and what it used goes away by itself.
    quickly = api.run("fedavg", smoke=True, **words)
    used = quickly.folder.path
    assert used.exists()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        del quickly
        gc.collect()
    assert not used.exists()
    assert [w for w in said if issubclass(w.category, ResourceWarning)] == []
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == names


def test_a_name_that_another_process_takes_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    read = Federations.of

    def take_name(self: Federations, experiment: Any) -> Any:
        # Between the choice of the name and the folder, the first time only.
        (tmp_path / "runs" / "fedavg-tiny-s0").mkdir(parents=True, exist_ok=True)
        return read(self, experiment)

    monkeypatch.setattr(Federations, "of", take_name)
    result = api.run("fedavg", data=tiny(), rounds=1, engine="serial")
    assert result.folder.path == Path("runs/fedavg-tiny-s0-2")


def test_an_engine_of_the_callers_own_is_not_closed(tmp_path: Path) -> None:
    class Watched(Serial):
        closed = False

        def close(self) -> None:
            self.closed = True

    engine = Watched()
    quick(tmp_path / "run", rounds=1, engine=engine)
    assert not engine.closed


def test_a_failure_says_how_to_go_on(tmp_path: Path) -> None:
    spoilt = LocalTraining(1, 8, SGD(lr=1e30))
    with pytest.raises(
        EngineError,
        match=r"^the exchange of round 1 was abandoned 3 times: 0 of \d clients sent a usable report.*"
        r"0 of 2 rounds are saved; resume from Python with: fedgrove.resume\('.*', data=...\)$",
    ):
        quick(tmp_path / "run", method=methods.FedAvg(local=spoilt))
    assert RunFolder.open(tmp_path / "run").summary is None


def test_a_run_that_saved_nothing_is_started_again(tmp_path: Path) -> None:
    """Its method was corrected, or its process was killed before the first file was whole."""
    file = tmp_path / "own.py"
    text = """
from dataclasses import dataclass
from fedgrove.methods import FedAvg

@dataclass(frozen=True)
class Mine(FedAvg):
    def fold(self, state, reports):
        {line}
"""
    file.write_text(text.format(line="raise ValueError"))
    words: dict[str, Any] = {"data": "digits", "clients": 3, "cohort": 2, "rounds": 1}
    words |= {"engine": "serial", "progress": False}
    out = tmp_path / "run"
    with pytest.raises(EngineError, match="0 of 1 rounds are saved; resume with"):
        api.run(f"{file}:Mine", out=out, **words)
    file.write_text(text.format(line="return super().fold(state, reports)"))
    with pytest.raises(InputError, match=rf"own.py has changed .* again with out={out}\.$"):
        api.resume(out, trust=True)
    result = api.run(f"{file}:Mine", out=out, **words)
    other = api.run("fedavg", out=tmp_path / "other", **words)
    assert result.summary["accuracy_clients"] == other.summary["accuracy_clients"]
    # Something is saved now.
    with pytest.raises(InputError, match="never overwritten"):
        api.run("fedavg", out=out, **words)


@pytest.mark.parametrize("left", [[], ["checksums.txt"], ["checksums.txt", "config.toml.part"]])
def test_a_folder_of_a_process_that_was_killed_at_once_is_used(
    left: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    out.mkdir()
    for name in left:
        (out / name).write_text(f"{'0' * 64}  config.toml\n")
    if left:
        with pytest.raises(InputError, match=rf"start the run again with out={out}\.$"):
            api.resume(out)
    quick(out, rounds=1)
    assert RunFolder.open(out).summary is not None
    assert not list(out.glob("*.part"))


@pytest.mark.parametrize(
    "files",
    [
        # A file of options that a user wrote, sums of other files, and anything else.
        {"config.toml": "[run]"},
        {"checksums.txt": f"{'0' * 64}  photo.jpg\n"},
        {"checksums.txt": f"{'0' * 64}  config.toml\n", "notes.txt": ""},
        {"checksums.txt": f"{'0' * 64}  config.toml\n", "metrics.jsonl": "{}\n{}\n"},
        {"checksums.txt": f"{'0' * 64}  config.toml\n", "checkpoint/latest.json": "{}"},
    ],
)
def test_a_folder_with_anything_else_is_left_alone(files: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "run"
    for name, text in files.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(text)
    with pytest.raises(InputError, match="never overwritten"):
        quick(out, rounds=1)
    for name, text in files.items():
        assert (out / name).read_text() == text


def train_temporarily(method: AnyMethod, rounds: int, **words: Any) -> api.Result:
    return api.train(Experiment(method, data=tiny(), rounds=rounds), engine="serial", **words)


def test_a_failed_temporary_run_leaves_nothing_and_points_to_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    spoilt = methods.FedAvg(local=LocalTraining(1, 8, SGD(lr=1e30)))
    with pytest.raises(EngineError) as caught:
        train_temporarily(spoilt, rounds=1)
    assert str(caught.value).endswith("Nothing was kept: to be able to resume a run, give out=DIR.")
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_temporary_run_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(line: Any) -> None:
        assert list(tmp_path.glob("fedgrove-*/run/checkpoint/latest.json"))
        raise KeyboardInterrupt

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(KeyboardInterrupt, match="Nothing was kept"):
        train_temporarily(methods.FedAvg(), rounds=2, watch=stop)
    assert list(tmp_path.iterdir()) == []


# ---- resume --------------------------------------------------------------------------------------


class Killed(Exception):
    """Stands for a process that ends in the middle of a run."""


def stop_at(round: int) -> Any:
    def watch(line: Any) -> None:
        if line["round"] == round:
            raise Killed

    return watch


@pytest.mark.parametrize("method", ["fedavg", "ditto", "lg-fedavg"])
def test_a_resumed_run_is_the_run_it_would_have_been(method: str, tmp_path: Path) -> None:
    whole = quick(tmp_path / "whole", method=method, rounds=3)
    with pytest.raises(Killed):
        quick(tmp_path / "cut", method=method, rounds=3, watch=stop_at(2))
    resumed = api.resume(tmp_path / "cut", data=tiny(), engine="serial")
    assert timeless(resumed.summary) == timeless(whole.summary)
    assert (resumed.folder.config, len(resumed.folder.metrics())) == (whole.folder.config, 3)


# ---- more rounds ---------------------------------------------------------------------------------


def check_same_run(one: RunFolder, other: RunFolder) -> None:
    """Their files are equal to the bit, but for the seconds."""
    assert one.config == other.config
    assert one.summary is not None
    assert other.summary is not None
    assert timeless(one.summary) == timeless(other.summary)
    for line, its in zip(one.metrics(), other.metrics(), strict=True):
        assert timeless(line) == timeless(its)
    names = sorted(path.name for path in (other.path / "models").iterdir())
    assert sorted(path.name for path in (one.path / "models").iterdir()) == names
    for name in names:
        assert (one.path / "models" / name).read_bytes() == (
            other.path / "models" / name
        ).read_bytes()


@pytest.mark.parametrize("method", ["fedavg", "ditto", "stc"])
def test_more_rounds_are_those_of_a_longer_run(method: str, tmp_path: Path) -> None:
    words: dict[str, Any] = {"method": method, "finetune": (0, 1)}
    whole = quick(tmp_path / "whole", rounds=4, **words)
    # From the end of a finished run, and from the middle of one.
    quick(tmp_path / "finished", rounds=2, **words)
    with pytest.raises(Killed):
        quick(tmp_path / "cut", rounds=3, watch=stop_at(2), **words)
    for name in ("finished", "cut"):
        longer = api.resume(tmp_path / name, rounds=4, data=tiny(), engine="serial")
        check_same_run(longer.folder, whole.folder)
    assert api.load_run(tmp_path / "finished").summary["rounds"] == 4


def test_more_rounds_that_are_interrupted_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = quick(tmp_path / "whole", rounds=4)
    quick(tmp_path / "short", rounds=2)
    words: dict[str, Any] = {"data": tiny(), "engine": "serial", "progress": False}
    # Each file that is written or moved before the first new round, and the round after it.
    for step in range(5):
        cut = tmp_path / f"cut-{step}"
        shutil.copytree(tmp_path / "short", cut)
        with monkeypatch.context() as patched:
            kill_at_step(patched, step)
            with pytest.raises(Killed):
                api.resume(cut, rounds=4, watch=stop_at(3), **words)
        again = tmp_path / f"again-{step}"
        shutil.copytree(cut, again)
        # It is the run that it was, or the longer one; and the same command makes it that.
        plain = api.resume(cut, **words)
        assert plain.summary["rounds"] == (2 if step < 3 else 4)
        if step >= 3:
            check_same_run(plain.folder, whole.folder)
        check_same_run(api.resume(again, rounds=4, **words).folder, whole.folder)


def kill_at_step(patched: pytest.MonkeyPatch, step: int) -> None:
    """Let the process end at a step of ``RunFolder.replace_config``; 4: in a later round."""
    calls = 0

    def before(function: Any, killing: int) -> Any:
        def call(*args: Any, **words: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == killing:
                raise Killed
            return function(*args, **words)

        return call

    if step < 3:
        # The new config.toml, the checkpoint and the checksums.
        patched.setattr(folder_module, "write_bytes", before(folder_module.write_bytes, step + 1))
    elif step == 3:
        # When the folder was opened it was called for the first time.
        patched.setattr(
            RunFolder, "_take_next_config", before(RunFolder._take_next_config, killing=2)
        )


def test_a_schedule_for_fewer_rounds_is_not_stretched(tmp_path: Path) -> None:
    words: dict[str, Any] = {"data": tiny(), "engine": "serial"}
    run = quick(tmp_path / "run", method="ca-afp", rounds=2).folder
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    with pytest.raises(
        InputError, match=r"^ca-afp made its schedule for 2 rounds, and with 4 .* with rerun\.$"
    ):
        api.resume(run.path, rounds=4, **words)
    for rounds in (1, 2):
        with pytest.raises(InputError, match=rf"rounds is {rounds}; it must be above 2, the rou"):
            api.resume(run.path, rounds=rounds, **words)
    plain = quick(tmp_path / "plain", rounds=1).folder
    (plain.path / "checkpoint" / "latest.json").write_text("cut off")
    with pytest.raises(DamageError, match=r"latest\.json"):
        api.resume(plain.path, rounds=3, **words)
    assert plain.summary is not None
    assert {path: path.read_bytes() for path in before} == before


def other_federations() -> list[tuple[str, Federation]]:
    one = federation((12,), (20, 13), dtype=torch.float32)
    shape = federation((11,), (20, 13, 24), dtype=torch.float32)
    classes = federation((12,), (20, 13, 24), classes=2, dtype=torch.float32)
    metric = Metric("mine", lambda o, y: (o.argmax(1) == y).float())
    less = replace(CLASSES.metric, more_is_better=False)
    return [
        ("clients = 3, and data= has 2", one),
        ("shape = [12], and data= has [11]", shape),
        ("outputs = 3, and data= has 2", classes),
        ("problem = classes, and", replace(tiny(), problem=replace(CLASSES, name="other"))),
        ("metric = accuracy, more", replace(tiny(), problem=replace(CLASSES, metric=metric))),
        ("metric = accuracy, more", replace(tiny(), problem=replace(CLASSES, metric=less))),
    ]


def test_a_run_is_resumed_on_its_own_data(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        quick(tmp_path / "cut", rounds=3, watch=stop_at(1))
    for sentence, other in other_federations():
        with pytest.raises(InputError, match=re.escape(sentence)):
            api.resume(tmp_path / "cut", data=other, engine="serial")
    assert api.resume(tmp_path / "cut", data=tiny(), engine="serial").summary["rounds"] == 3


def test_data_that_have_a_name_are_not_given_again(tmp_path: Path) -> None:
    words: dict[str, Any] = {"engine": "serial", "progress": False}
    cut: dict[str, Any] = {"out": tmp_path / "run", "rounds": 2, "watch": stop_at(1)}
    with pytest.raises(Killed):
        api.run("fedavg", data="digits", **cut, **words)
    with pytest.raises(InputError, match="data are digits, which is read again by its name"):
        api.resume(tmp_path / "run", data=tiny(), **words)
    assert api.resume(tmp_path / "run", **words).summary["rounds"] == 2


def test_an_interrupted_run_says_how_to_go_on(tmp_path: Path) -> None:
    with pytest.raises(
        KeyboardInterrupt,
        match=r"^Interrupted\. 1 of 2 rounds are saved; resume from Python with: fedgrove.resume",
    ):
        quick(tmp_path / "run", watch=interrupt)
    assert api.resume(tmp_path / "run", data=tiny(), engine="serial").summary["rounds"] == 2


OWN_METHOD = """
from dataclasses import dataclass

from fedgrove.methods import FedAvg


@dataclass(frozen=True)
class Mine(FedAvg):
    pass
"""


def interrupt(line: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("method", ["fedavg", "mine.py:Mine"])
def test_the_command_that_is_named_resumes_the_run(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(OWN_METHOD)
    words: dict[str, Any] = {"data": "digits", "rounds": 2, "engine": "serial", "progress": False}
    with pytest.raises(KeyboardInterrupt) as caught:
        api.run(method, out="my runs", watch=interrupt, **words)
    trust = ", trust=True" if method.startswith("mine") else ""
    call = str(caught.value).rpartition("resume with: ")[2]
    assert call == f"fedgrove.resume('my runs'{trust})"
    eval(call, {"fedgrove": fg})
    assert RunFolder.open(tmp_path / "my runs").summary is not None


class Elsewhere(methods.FedAvg):
    """A method that is in no file of its own."""


def test_what_was_made_in_python_is_asked_for_in_python(tmp_path: Path) -> None:
    net = torch.nn.Linear(12, 3)
    with pytest.raises(KeyboardInterrupt) as caught:
        quick(tmp_path / "run", method=Elsewhere(), net=net, watch=interrupt)
    call = str(caught.value).rpartition("resume from Python with: ")[2]
    assert call == f"fedgrove.resume('{tmp_path / 'run'}', data=..., net=..., method=...)"
    words: dict[str, Any] = {"data": tiny(), "net": net, "method": Elsewhere()}
    assert api.resume(tmp_path / "run", **words, engine="serial").summary["rounds"] == 2


def test_a_finished_run_and_a_folder_that_is_none_are_not_resumed(tmp_path: Path) -> None:
    quick(tmp_path / "run", rounds=1)
    with pytest.raises(InputError, match="is finished; there is nothing to resume"):
        api.resume(tmp_path / "run", data=tiny())
    with pytest.raises(InputError, match="is not a run folder"):
        api.resume(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "word",
    [
        {"partition": "iid"},
        {"scenario": "noisy"},
        {"split": "blocks"},
        {"validation": 0.3},
        {"clients": 2},
        {"profile": "phones"},
        {"standardise": False},
    ],
)
def test_how_to_deal_out_is_refused_beside_a_federation(
    word: dict[str, Any], tmp_path: Path
) -> None:
    ((name, value),) = word.items()
    with pytest.raises(InputError, match=f"^{name} is {value!r}, and data is a federation that"):
        quick(tmp_path / "run", **word)
    assert not (tmp_path / "run").exists()


def test_what_a_federation_is_may_be_said_again(tmp_path: Path) -> None:
    words: dict[str, Any] = {"partition": "natural", "scenario": "none", "clients": 3}
    assert quick(tmp_path / "run", **words).summary["clients"] == 3


# ---- experiments ---------------------------------------------------------------------------------


def without_validation(data: Federation, clients: set[int]) -> Federation:
    emptied = {}
    for k, client in data.clients.items():
        held = client.validation
        if k in clients:
            held = replace(held, x=held.x[:0], y=held.y[:0])
        emptied[k] = replace(client, validation=held)
    return replace(data, clients=emptied)


@pytest.mark.parametrize("engine", ["serial", "wired", "pool", "batched"])
def test_without_validation_data_nothing_is_said_of_them(engine: str, tmp_path: Path) -> None:
    """It was 0.0, and a ZeroDivisionError on batched."""
    words: dict[str, Any] = {"rounds": 1, "engine": engine, "device": "cpu", "progress": False}
    data = without_validation(tiny(), {0, 1, 2})
    result = api.run("fedavg", data=data, out=tmp_path / "run", **words)
    assert result.summary["validation_mean"] is None
    assert "NaN" not in (tmp_path / "run/summary.json").read_text()
    (line,) = RunFolder(tmp_path / "run").metrics()
    assert line["validation_mean"] is None
    assert result.summary["accuracy_mean"] == line["accuracy_mean"] > 0
    result.table()


@pytest.mark.parametrize("engine", ["serial", "batched"])
def test_the_mean_on_validation_data_is_over_the_clients_that_have_some(engine: str) -> None:
    """A client without counted as 0."""
    words: dict[str, Any] = {"rounds": 1, "engine": engine, "device": "cpu", "progress": False}
    whole = tiny()
    means = []
    # Client 1 alone, then client 2 alone, then both: the last is the mean of the others.
    for emptied in ({0, 2}, {0, 1}, {0}):
        data = without_validation(whole, emptied)
        means.append(api.run("fedavg", data=data, **words).summary["validation_mean"])
    assert means[2] == pytest.approx((means[0] + means[1]) / 2, abs=1e-8)
    assert means[2] > 0


def test_nothing_is_left_open_once_resolved(tmp_path: Path) -> None:
    data = tiny()
    experiment = Experiment(methods.FedAvg(), data)
    run = experiment.build(data, Memory(tmp_path))
    resolved = experiment.resolved(run)
    assert (resolved.net, resolved.rounds, resolved.cohort) == ("mlp", 3, 2)
    assert resolved.method.local == run.method.local
    assert resolved == replace(resolved)
    whole = replace(data, validation=0.0)
    assert experiment.resolved(experiment.build(whole, Memory(tmp_path))).validation == 0
    assert not math.isnan(resolved.rounds or math.nan)


def test_the_table_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = quick(tmp_path / "run", rounds=1)
    result.table()
    said = capsys.readouterr().out
    assert "accuracy" in said
    assert f"{100 * result.summary['accuracy_mean']:.2f}" in said


# ---- the words of the command line ---------------------------------------------------------------


def test_run_takes_every_option_of_the_command_line() -> None:
    names = {field.name for field in typed_options(RunCommand)}
    # What only a command line needs; a run from a file is fedgrove.rerun.
    names -= {"json", "dry_run", "config", "trust"}
    assert names <= set(inspect.signature(api.run).parameters)
    for name in inspect.signature(api.run).parameters:
        assert f"\n    {name}: " in (api.run.__doc__ or "")


def test_epochs_batch_and_lr_change_the_recipe(tmp_path: Path) -> None:
    short = quick(tmp_path / "short", rounds=1, epochs=2, batch=4, lr=0.05, device="cpu")
    recipe = LocalTraining(2, 4, Adam(0.05))
    long = quick(tmp_path / "long", methods.FedAvg(local=recipe), rounds=1)
    assert short.folder.config == long.folder.config
    assert timeless(short.summary) == timeless(long.summary)


@pytest.mark.parametrize("settings", [{"mu": 0.5}, ["mu=0.5"]], ids=["dict", "list"])
def test_settings_by_name(settings: Any, tmp_path: Path) -> None:
    result = quick(tmp_path / "run", "fedprox", rounds=1, set=settings)
    assert "mu = 0.5" in result.folder.config


def test_settings_that_hold_lists(tmp_path: Path) -> None:
    result = quick(tmp_path / "run", "ca-afp", rounds=2, set={"phases": (0, 0, 2), "clusters": 2})
    assert from_toml(result.folder.config, data=tiny()).method.phases == (0, 0, 2)
    with pytest.raises(InputError, match="set is 'mu=1'; it must be a list of texts"):
        quick(tmp_path / "other", set="mu=1")


def test_without_a_method_four_are_compared_as_by_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words: dict[str, Any] = {"rounds": 1, "clients": 4, "cohort": 2, "seed": 1}
    typed = ["--rounds", "1", "--clients", "4", "--cohort", "2", "--seed", "1"]
    monkeypatch.chdir(tmp_path)
    swept = api.run(**words, progress=False)
    assert main(["run", *typed, "--json"]) == 0
    assert swept.path == Path("runs/local-fedavg-ca-afp-grove-motion")
    theirs = Path(f"{swept.path}-2")
    assert list(swept) == ["local-s1", "fedavg-s1", "ca-afp-s1", "grove-s1"]
    for name in swept:
        assert (swept.path / name / "config.toml").read_text() == (
            theirs / name / "config.toml"
        ).read_text()
    with pytest.raises(InputError, match=r"^watch is .* it must be left out without a method"):
        api.run(**words, watch=print)
    with pytest.raises(InputError, match=r"^set takes one value without a method"):
        api.run(**words, set={"lr": [0.1, 0.2]})
    # The quick test is of one method.
    assert api.run(smoke=True, progress=False, **words).summary["method"] == "ca-afp"  # type: ignore[attr-defined]


def test_progress_is_shown_unless_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quick(tmp_path / "shown", rounds=1)
    assert "round 1/1" in capsys.readouterr().err
    quick(tmp_path / "quiet", rounds=1, progress=False)
    assert capsys.readouterr().err == ""


def test_a_run_is_built_and_its_method_started_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[Run] = []
    started: list[Any] = []
    post_init = Run.__post_init__
    init = methods.FedAvg.init
    monkeypatch.setattr(Run, "__post_init__", lambda run: built.append(run) or post_init(run))
    monkeypatch.setattr(
        methods.FedAvg, "init", lambda method, start: started.append(start) or init(method, start)
    )
    quick(tmp_path / "run")
    assert len(built) == len(started) == 1


def test_a_run_folder_of_another_format_is_refused(tmp_path: Path) -> None:
    result = quick(tmp_path / "run", rounds=1)
    config = result.folder.path / "config.toml"
    config.write_text(config.read_text().replace("format = 2\n", ""))
    list_again(result.folder.path)
    (result.folder.path / "summary.json").unlink()
    with pytest.raises(
        InputError, match=r"config.toml of format 1; this version of fedgrove reads format 2"
    ):
        api.resume(tmp_path / "run", data=tiny())


def test_a_checkpoint_of_another_format_is_refused_before_anything_is_built(
    tmp_path: Path,
) -> None:
    result = quick(tmp_path / "run", rounds=1)
    (result.folder.path / "summary.json").unlink()
    latest = result.folder.path / "checkpoint/latest.json"
    old = json.loads(latest.read_text())
    for key in ("sha256", "format", "synced"):
        del old[key]
    latest.write_text(json.dumps(old))
    with pytest.raises(
        InputError, match=r"latest\.json is a checkpoint of format 1.*start it again\.$"
    ):
        api.resume(tmp_path / "run", data=tiny())


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"start": None}, None),
        ({"start": 0.5}, 0.5),
        ({"weights": [0.5, 0.25, 0.25]}, (0.5, 0.25, 0.25)),
        ({"codec": Dense()}, Dense()),
        ({"local": LocalTraining(2, 4)}, LocalTraining(2, 4)),
        ({"grouping": "Bipartition"}, Bipartition()),
    ],
)
def test_settings_take_values_of_python(settings: dict[str, Any], expected: Any) -> None:
    method = with_settings(methods.CAAFP(), settings)
    assert getattr(method, next(iter(settings))) == expected


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"codec": LocalTraining()}, "codec is a LocalTraining; it must be one of"),
        ({"every": "soon"}, "every is 'soon'; it must be a whole number"),
        ([("mu", 0.1)], "it must be a list of texts as mu=0.1"),
        (["density="], "density is ''; it must be a number"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: Any, sentence: str) -> None:
    with pytest.raises(InputError, match=re.escape(sentence)):
        with_settings(methods.CAAFP(), settings)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ({"rounds": 2.5}, "rounds is 2.5; it must be a whole number"),
        ({"finetune": 1}, "finetune is 1; it must be whole numbers"),
        ({"standardise": "perhaps"}, "standardise is 'perhaps'; it must be true or false"),
        ({"seed": None}, "seed is None; it must be a whole number"),
        ({"method": methods.FedAvg}, "method is the class FedAvg; make a method of it: FedAvg()"),
    ],
)
def test_words_of_the_wrong_type_are_refused(words: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=re.escape(sentence)):
        Experiment(**{"method": methods.FedAvg(), **words})


def test_numbers_of_numpy_are_numbers() -> None:
    experiment = Experiment(methods.FedAvg(), rounds=np.int64(3), seed=np.int64(1))
    assert (type(experiment.rounds), experiment.rounds, experiment.seed) == (int, 3, 1)


def test_one_length_of_fine_tuning_is_a_list_of_one(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="finetune is 1; it must be whole numbers"):
        quick(tmp_path / "run", finetune=1)
