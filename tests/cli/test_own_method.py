"""A method in a file of one's own is a word of the command line like any other."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import fedgrove as fg
from fedgrove import methods
from fedgrove.cli import main
from fedgrove.config.experiment import Experiment
from fedgrove.config.toml import from_toml, named_code, same, to_toml
from fedgrove.engines import Pool
from fedgrove.errors import InputError

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ["--clients", "3", "--cohort", "2", "--rounds", "2", "--evaluate", "0"]
MINE = '''
"""Mine: FedAvg, with a shift that is added to nothing."""
from dataclasses import dataclass
from typing import Protocol

from fedgrove.core import Give, Train
from fedgrove.parts.aggregate import Averaging, WeightedMean
from fedgrove.parts.local import LocalTraining
from fedgrove.parts.objective import CrossEntropy
from fedgrove.parts.one_model import OneModel, average, deliver_model, send_model, train_cohort
from fedgrove.wire.codec import Codec, Dense


class Shift(Protocol):
    def shift(self) -> float: ...


@dataclass(frozen=True)
class Constant:
    value: float = 0.0

    def shift(self) -> float:
        return self.value


@dataclass(frozen=True)
class Twice:
    value: float = 1.0

    def shift(self) -> float:
        return 2 * self.value


@dataclass(frozen=True)
class Mine:
    by: Shift = Constant()
    mean: Averaging = WeightedMean()
    local: LocalTraining | None = None
    codec: Codec = Dense()

    def init(self, start):
        return OneModel(0, start.params)

    def deliver(self, state, client):
        return deliver_model(state)

    def plan(self, state, cohort):
        return train_cohort(state, cohort)

    def fold(self, state, reports):
        return average(state, reports, self.mean)

    def work(self, verb):
        return {"train": (Train(CrossEntropy(), self.local), Give(send_model)), "use": ()}[verb]

    def server_metrics(self, state):
        return {"shift": self.by.shift()}


PRESETS = {"double": Mine(by=Twice(3.0))}
'''


class Stop(Exception):
    """Stands for a kill."""


def stop(line: Mapping[str, Any]) -> None:
    raise Stop


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own").mkdir()
    # Each test has a text of its own: a text that was imported once is not run again.
    (tmp_path / "own/mine.py").write_text(f"{MINE}\n# {tmp_path}\n")
    return tmp_path


def cut(out: Path) -> None:
    with pytest.raises(Stop):
        fg.run(
            "own/mine.py:Mine:double",
            clients=3,
            cohort=2,
            rounds=2,
            engine="serial",
            out=out,
            watch=stop,
            progress=False,
        )


def test_the_example_runs_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(EXAMPLES, tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    words = ["examples/fedgen.py:FedGen", "--rounds", "2", "--set", "weight=0.5"]
    assert main(["run", *words, "--json"]) == 0
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("fedgen")
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["method"] == "fedgen"
    assert summary["rounds"] == 2


def test_the_same_as_the_library_gives(here: Path) -> None:
    """Mine is FedAvg: the same figures by either word."""
    words = {"clients": 3, "cohort": 2, "rounds": 2, "engine": "serial", "progress": False}
    mine = fg.run("own/mine.py:Mine", **words).summary
    fedavg = fg.run("fedavg", **words).summary
    assert mine["accuracy_clients"] == fedavg["accuracy_clients"]
    assert mine["bytes_up"] == fedavg["bytes_up"]


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_pool(start: str, here: Path) -> None:
    words = {"clients": 3, "cohort": 2, "rounds": 1, "progress": False}
    serial = fg.run("own/mine.py:Mine:double", engine="serial", **words).summary
    pool = Pool(workers=1, start=start)
    try:
        other = fg.run("own/mine.py:Mine:double", engine=pool, **words).summary
    finally:
        pool.close()
    assert other["accuracy_clients"] == serial["accuracy_clients"]
    assert other["figures"] == {"shift": 6.0}


def test_settings_reach_parts_of_the_file(here: Path) -> None:
    words = ["--set", "by=Twice", "--set", "value=4", "--set", "mean=Median"]
    assert main(["run", "own/mine.py:Mine", *SMALL, "--engine", "serial", *words, "--json"]) == 0
    summary = json.loads((here / "runs/mine-digits-s0/summary.json").read_text())
    assert summary["figures"] == {"shift": 8.0}
    config = (here / "runs/mine-digits-s0/config.toml").read_text()
    assert named_code(config) == {
        "method.type": "own/mine.py:Mine",
        "method.by.type": "own/mine.py:Twice",
    }
    again = from_toml(config)
    assert from_toml(to_toml(again)) == again
    assert again.method.by.value == 4.0


def test_a_wrong_part_is_a_sentence(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "own/mine.py:Mine", *SMALL, "--set", "by=Thrice"]) == 2
    assert "by is 'Thrice'; it must be one of Constant, Twice." in capsys.readouterr().err


HALF = """
from dataclasses import dataclass

from fedgrove.methods import FedAvg
from fedgrove.parts.objective import Objective


class Plain(Objective):
    def __call__(self, out, params, batch, carry):
        return 0, {}


@dataclass(frozen=True)
class Unwritten(Objective):
    share: float = 0.1


@dataclass(frozen=True)
class Mine(FedAvg): ...
"""


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("objective=Plain", "'Plain', a class without @dataclass(frozen=True); it must be one of"),
        ("objective=Unwritten", "objective is 'Unwritten', a class without __call__; write it"),
    ],
)
def test_a_class_that_is_no_part_yet_is_a_sentence(
    setting: str, sentence: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "own/half.py").write_text(f"{HALF}\n# {here}\n")
    assert main(["run", "own/half.py:Mine", *SMALL, "--set", setting]) == 2
    assert sentence in capsys.readouterr().err


def test_show_cost_and_compare(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "own/mine.py:Mine:double"]) == 0
    shown = capsys.readouterr().out
    assert "Mine: FedAvg, with a shift" in shown
    assert "Twice  (one of Constant, Twice)" in shown
    assert main(["cost", "own/mine.py:Mine", "--json"]) == 0
    ours = json.loads(capsys.readouterr().out)
    assert main(["cost", "fedavg", "--json"]) == 0
    assert ours["bytes_up"] == json.loads(capsys.readouterr().out)["bytes_up"]
    words = [*SMALL, "--engine", "serial", "--json"]
    assert main(["run", "own/mine.py:Mine", *words, "--out", "one"]) == 0
    assert main(["run", "fedavg", *words, "--out", "two"]) == 0
    capsys.readouterr()
    assert main(["compare", "one", "two"]) == 0
    table = capsys.readouterr().out
    assert "mine" in table
    assert "fedavg" in table


def test_a_sweep_and_its_resume(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SMALL, "--engine", "serial", "--json"]
    grid = ["fedavg", "own/mine.py:Mine", "own/mine.py:Mine:double"]
    assert main(["sweep", *grid, *words, "--out", "all"]) == 0
    names = sorted(path.name for path in (here / "all").iterdir() if path.is_dir())
    assert names == ["fedavg-s0", "mine-double-s0", "mine-s0"]
    (here / "all/mine-s0/summary.json").unlink()
    capsys.readouterr()
    assert main(["resume", "all", "--engine", "serial", "--json"]) == 2
    assert 'method.type = "own/mine.py:Mine"' in capsys.readouterr().err
    assert main(["resume", "all", "--engine", "serial", "--json", "--trust"]) == 0
    # The same sweep by its own words: nothing is named by the folder.
    (here / "all/mine-s0/summary.json").unlink()
    assert main(["sweep", *grid, *words, "--out", "all"]) == 0


def test_classes_of_one_name_are_told_apart_by_their_files(here: Path) -> None:
    (here / "own/other.py").write_text((here / "own/mine.py").read_text().replace("= 1.0", "= 2.0"))
    words = [*SMALL, "--engine", "serial", "--json", "--set", "by=Twice"]
    assert main(["sweep", "own/mine.py:Mine", "own/other.py:Mine", *words, "--out", "all"]) == 0
    figures = {}
    for name in ("mine-mine-s0", "other-mine-s0"):
        summary = json.loads((here / "all" / name / "summary.json").read_text())
        figures[name] = summary["figures"]["shift"]
    assert figures == {"mine-mine-s0": 2.0, "other-mine-s0": 4.0}


def test_resume_needs_trust_and_the_same_file(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = fg.run(
        "own/mine.py:Mine:double",
        clients=3,
        cohort=2,
        rounds=2,
        engine="serial",
        progress=False,
    ).summary
    cut(here / "run")
    resume = ["resume", str(here / "run"), "--engine", "serial", "--json"]
    assert main(resume) == 2
    assert f"the code in {here / 'own/mine.py'} would be run" in capsys.readouterr().err

    text = (here / "own/mine.py").read_text()
    (here / "own/mine.py").write_text(text + "\nraise RuntimeError\n")
    assert main([*resume, "--trust"]) == 2
    sentence = capsys.readouterr().err
    assert "own/mine.py has changed since the run was started" in sentence
    assert "fedgrove.resume(path, method=...)" in sentence

    (here / "own/mine.py").unlink()
    assert main([*resume, "--trust"]) == 2
    assert f"there is no file {here / 'own/mine.py'}; go to the folder" in capsys.readouterr().err

    # Project and run move; the path is resolved where resume is called.
    (here / "elsewhere/own").mkdir(parents=True)
    (here / "elsewhere/own/mine.py").write_text(text)
    shutil.move(here / "run", here / "elsewhere/moved")
    monkeypatch.chdir(here / "elsewhere")
    assert main(["resume", "moved", "--engine", "serial", "--json", "--trust"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["accuracy_clients"] == whole["accuracy_clients"]


def test_a_method_made_in_python_takes_the_place_of_the_code(here: Path) -> None:
    cut(here / "run")
    method = methods.make("own/mine.py:Mine")
    (here / "own/mine.py").unlink()
    summary = fg.resume("run", method=method, engine="serial", progress=False).summary
    assert summary["figures"] == {"shift": 0.0}


def test_a_part_of_a_strangers_file_needs_trust_too(here: Path) -> None:
    """A method of ours with a part that a config.toml names by a file: nothing is run unasked."""
    text = to_toml(Experiment(methods.make("fedavg")))
    text = text.replace('type = "WeightedMean"', 'type = "own/mine.py:Twice"')
    assert named_code(text) == {"method.mean.type": "own/mine.py:Twice"}
    with pytest.raises(InputError, match=r"there is no type for method\.mean in own/mine\.py"):
        from_toml(text)


def test_comparing_configurations_runs_no_code(here: Path) -> None:
    text = to_toml(Experiment(methods.make("own/mine.py:Mine")))
    (here / "own/mine.py").write_text("raise RuntimeError\n")
    assert same(text, text.replace("quorum = 0.0\n", ""))
    assert not same(text, text.replace("value = 0.0", "value = 1.0"))


# ---- what is no method ---------------------------------------------------------------------------

BROKEN = {
    "own/none.py:Mine": "there is no file own/none.py; give the path of a Python file that exists.",
    "own/mine.py:Min": "there is no method in own/mine.py 'Min'; did you mean 'Mine'? "
    "There are: Mine.",
    "own/mine.py": "method 'own/mine.py' names no class; write path/file.py:Class",
    "own/mine.py:Mine:triple": "there is no preset of own/mine.py:Mine 'triple'",
    "own/mine.py:PRESETS": "own/mine.py:PRESETS is not a dataclass",
    "own/mine.py:WeightedMean": "is imported there from fedgrove.parts.aggregate; name the file",
    "own/mine.py:Twice": "own/mine.py:Twice has no init, deliver, plan, fold and work; a method "
    "has the functions",
    "own/thawed.py:Mine": "own/thawed.py:Mine can be changed; write @dataclass(frozen=True)",
    "own/plain.py:Mine": "own/plain.py:Mine is not a dataclass; a method is a class under",
    "own/heir.py:Heir": "own/heir.py:Heir has a field 'by' and is no dataclass itself; "
    "write @dataclass(frozen=True)",
    "own/unfolded.py:Mine": "own/unfolded.py:Mine has no fold; a method has the functions init, "
    "deliver, plan, fold and work",
    "own/homeless.py:Mine": "own/homeless.py:Mine has no field 'local'; write in the class: "
    "local: LocalTraining | None = None",
    "own/wordless.py:Mine": "own/wordless.py:Mine has no field 'codec'",
    "own/needy.py:Mine": "own/needy.py:Mine has no default for mean; give every field one",
    "own/loud.py:Mine": "own/loud.py could not be imported, ZeroDivisionError",
    "own/bad.py:Mine:bad": "PRESETS['bad'] in own/bad.py is 3; it must be a method, as Mine(...)",
    "own/listed.py:Mine:bad": "PRESETS in own/listed.py is a list; it must be a dictionary",
}
CHANGES = {
    "thawed": ("@dataclass(frozen=True)\nclass Mine", "@dataclass\nclass Mine"),
    "plain": ("@dataclass(frozen=True)\nclass Mine", "class Mine"),
    "heir": ("PRESETS =", "class Heir(Mine):\n    by: Shift = Constant(2.0)\n\n\nPRESETS ="),
    "unfolded": ("def fold", "def unfold"),
    "homeless": ("    local: LocalTraining | None = None\n", ""),
    "wordless": ("    codec: Codec = Dense()\n", ""),
    "needy": (
        "    by: Shift = Constant()\n    mean: Averaging = WeightedMean()",
        "    mean: Averaging\n    by: Shift = Constant()",
    ),
    "loud": ("class Shift", "1 / 0\n\n\nclass Shift"),
    "bad": ("PRESETS = {} and {", "PRESETS = {'bad': 3} or {"),
    "listed": ("PRESETS = {} and {", "PRESETS = [1] or {"),
}


@pytest.mark.parametrize("word", BROKEN)
def test_what_is_no_method_is_a_sentence(
    word: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, (old, new) in CHANGES.items():
        text = (here / "own/mine.py").read_text().replace("PRESETS = {", "PRESETS = {} and {")
        assert old in text
        (here / f"own/{name}.py").write_text(text.replace(old, new))
    for command in ("run", "cost", "show"):
        assert main([command, word]) == 2
        (sentence,) = capsys.readouterr().err.splitlines()
        assert BROKEN[word] in sentence
    with pytest.raises(InputError):
        fg.run(word)
    assert not (here / "runs").exists()


def test_a_mistake_in_init_is_a_sentence_with_its_place(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (here / "own/mine.py").read_text()
    (here / "own/bad.py").write_text(text.replace("OneModel(0, start.params)", "start.no_such"))
    assert main(["run", "own/bad.py:Mine", *SMALL]) == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert "mine: init ended with AttributeError" in sentence
    assert re.search(r"\(at bad\.py, line \d+\); see own/bad\.py\. FEDGROVE_DEBUG=1", sentence)
    assert not (here / "runs").exists()
