"""Each value in the files of a run folder, replaced by one of another type, with matching checksums.

Every command that reads the folder must give a result or one sentence. A sample of all cases is
tried by ``make test``; all of them: ``pytest -m slow -s tests/faults/test_wrong_types.py``.
"""

from __future__ import annotations

import copy
import io
import json
import shutil
import tomllib
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
from tests.conftest import list_again

from fedgrove import api
from fedgrove.cli import main
from fedgrove.config.experiment import Experiment
from fedgrove.config.sweep import sweep
from fedgrove.errors import FedgroveError, FolderWarning, is_plain_text
from fedgrove.export.source import opened
from fedgrove.methods import Ditto, FedAvg
from fedgrove.runs.files import compute_checksum, read_checksums, seal_json
from fedgrove.runs.follow import Following

MISSING = object()
VALUES: dict[str, Any] = {
    "missing": MISSING,
    "null": None,
    "text": "x",
    "-1": -1,
    "1e999": float("inf"),
    "NaN": float("nan"),
    "[]": [],
    "{}": {},
    "true": True,
    "huge": 10**30,
    "long": "y" * 5000,
    "surrogate": "\ud800",
    "control": "\x1b[2J",
}
"""What stands in place of each value, by name; the first one removes it."""

Place = tuple[str | int, ...]


# ---- where a document has values -----------------------------------------------------------------


def places_in(document: Any, place: Place = ()) -> Iterator[Place]:
    """Yield the place of each value and of each container; of alike entries the first alone."""
    yield place
    if isinstance(document, Mapping):
        numbered = [key for key in document if key.isdecimal()]
        for key, value in document.items():
            if key not in numbered[1:]:
                yield from places_in(value, (*place, key))
    elif isinstance(document, list):
        for number, value in enumerate(document[:1]):
            yield from places_in(value, (*place, number))


def replaced(document: Any, place: Place, value: Any) -> Any:
    """Return a copy of a document with another value at one place."""
    if not place:
        return value
    changed = copy.deepcopy(document)
    inner = changed
    for key in place[:-1]:
        inner = inner[key]
    if value is MISSING:
        del inner[place[-1]]
    else:
        inner[place[-1]] = value
    return changed


# ---- files: how they are read and written, with the checksums that belong to them ------------------


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def read_sealed_json(path: Path) -> Any:
    content = json.loads(path.read_text())
    del content["sha256"]
    return content


def read_lines(path: Path) -> Any:
    return [json.loads(line) for line in path.read_text().splitlines()]


def read_toml(path: Path) -> Any:
    return tomllib.loads(path.read_text())


def read_header(path: Path) -> Any:
    data = path.read_bytes()
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])


def write_listed(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content))
    list_again(path.parent if path.parent.name != "models" else path.parent.parent)


def write_sealed(path: Path, content: Any) -> None:
    # A root that is no object cannot be sealed; it is written as it is.
    is_object = isinstance(content, dict)
    path.write_bytes(seal_json(content) if is_object else json.dumps(content).encode())


def write_lines(path: Path, content: Any) -> None:
    lines = content if isinstance(content, list) else [content]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    manifest = path.parent / "checkpoint" / "latest.json"
    if not (path.parent / "summary.json").exists():
        seal_again(manifest, "metrics", compute_checksum(path.read_bytes()))
    else:
        list_again(path.parent)


def write_toml(path: Path, content: Any) -> None:
    path.write_text(tomli_w.dumps(content))
    list_again(path.parent)
    for name in ("latest.json", "previous.json"):
        checksum = read_checksums(path.parent)["config.toml"]
        seal_again(path.parent / "checkpoint" / name, "config", checksum)


def seal_again(manifest: Path, key: str, checksum: str) -> None:
    if manifest.exists():
        content = read_sealed_json(manifest)
        manifest.write_bytes(seal_json({**content, key: checksum}))


def write_header(path: Path, content: Any) -> None:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.dumps(content).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])
    list_again(path.parent.parent)


# ---- commands that read a folder -------------------------------------------------------------------


class Broken(Exception):
    """A command ended with something else than a result or one sentence."""


def command(*words: str) -> str:
    """Run a command in this process; return its sentence, or "" if it succeeded."""
    out = io.StringIO()
    err = io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(words)
    if not is_plain_text(out.getvalue()):
        raise Broken(f"not printable: {out.getvalue()[:300]!r}")
    if code == 0:
        return ""
    shown = " ".join(out.getvalue().split())
    if code == 1 and "failed after" in shown and "is damaged" in shown:
        # A sweep goes on without a run whose files are wrong, and its table says why.
        return "failed"
    lines = [line for line in err.getvalue().splitlines() if line.startswith("fedgrove: ")]
    # 1 is for work that could not be finished, such as a resumed run whose clients all fail.
    if code not in (1, 2) or len(lines) != 1:
        raise Broken(f"exit code {code}: {err.getvalue()[-300:]}")
    return lines[0]


def load(folder: Path) -> str:
    result = api.load_run(folder)
    with redirect_stdout(io.StringIO()):
        result.table()
    result.clients()
    result.rounds()
    return ""


def predict(folder: Path) -> str:
    result = api.load_run(folder)
    for model in (result.model(0), result.model("1"), result.model()):
        model.predict(np.zeros((2, *model.shape)))
        model.predict_proba(np.zeros(model.shape))
    return ""


def open_for_export(folder: Path) -> str:
    source = opened(folder)
    number = source.number(0)
    source.tree(number)
    source.takes_raw(number)
    return ""


def compare(folder: Path) -> str:
    compared = api.compare(str(folder))
    with redirect_stdout(io.StringIO()):
        compared.table()
    compared.groups()
    return ""


def watch(folder: Path) -> str:
    Following(folder).read_statuses()
    return ""


COMMANDS: dict[str, Callable[[Path], str]] = {
    "api.compare": compare,
    "Following": watch,
    "compare": lambda folder: command("compare", str(folder)),
    "compare --bytes": lambda folder: command("compare", str(folder), "--bytes", "--json"),
    "compare --time": lambda folder: command("compare", str(folder), "--time", "--to", "0.5"),
    "watch": lambda folder: command("watch", str(folder), "--json"),
    "load_run": load,
    "predict": predict,
    "export": open_for_export,
    "report": lambda folder: command("report", str(folder)),
    "resume": lambda folder: command("resume", str(folder), "--engine", "serial"),
}
FAST = ("api.compare", "Following", "load_run", "predict")
"""What takes a few milliseconds. Each command of the command line takes 20 or more."""


# ---- cases -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class File:
    """A file of one of the folders, and the commands that read it."""

    folder: str
    name: str
    read: Callable[[Path], Any]
    write: Callable[[Path, Any], None]
    commands: tuple[str, ...]


READERS = (*FAST, "compare", "compare --bytes", "compare --time", "watch")
FINISHED = (*READERS, "export", "report")
SWEEPS = ("api.compare", "Following", "load_run", "compare", "watch", "report", "resume")
FILES = (
    File("whole", "summary.json", read_json, write_listed, FINISHED),
    File("whole", "metrics.jsonl", read_lines, write_lines, FINISHED),
    File("whole", "models/index.json", read_json, write_listed, FINISHED),
    File("whole", "models/preparation.json", read_json, write_listed, FINISHED),
    File("whole", "models/client-00000.safetensors", read_header, write_header, FINISHED),
    File("whole", "config.toml", read_toml, write_toml, FINISHED),
    File(
        "cut",
        "config.toml",
        read_toml,
        write_toml,
        ("api.compare", "Following", "compare", "report", "resume"),
    ),
    File("cut", "metrics.jsonl", read_lines, write_lines, (*SWEEPS, "compare --time")),
    File("cut", "checkpoint/latest.json", read_sealed_json, write_sealed, SWEEPS),
    File("sweep", "sweep.json", read_sealed_json, write_sealed, SWEEPS),
    File("sweep", "fedavg-s0/summary.json", read_json, write_listed, SWEEPS),
)


@dataclass(frozen=True)
class Case:
    """One value of one file replaced, and one command."""

    file: File
    place: Place
    value: str
    command: str

    def __str__(self) -> str:
        where = ".".join(map(str, self.place))
        return f"{self.command}: {self.file.folder}/{self.file.name} {where} = {self.value}"


def all_cases(folders: Mapping[str, Path]) -> list[Case]:
    cases = []
    for file in FILES:
        document = file.read(folders[file.folder] / file.name)
        for place in places_in(document):
            for value in VALUES:
                # TOML has no null and no surrogates, and its document is a table.
                if file.read is read_toml and (value in ("null", "surrogate") or not place):
                    continue
                if value == "missing" and not place:
                    continue
                for name in file.commands:
                    cases.append(Case(file, place, value, name))
    return cases


def attempt(case: Case, content: Any, folder: Path) -> str:
    """Try a case on a copy of its folder: "result", "sentence", or how it broke."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            sentence = COMMANDS[case.command](folder)
        except FedgroveError as error:
            sentence = str(error)
        except (Exception, SystemExit) as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(frame.filename).name}:{frame.lineno}"
            return f"{type(error).__name__} at {where}: {str(error)[:120]}"
    for warning in warned:
        if issubclass(warning.category, FolderWarning) and "was not written" in str(warning):
            return f"warning: {warning.message}"
    if "\n" in sentence:
        return f"several lines: {sentence[:200]}"
    if "\x1b" in sentence or "\ud800" in sentence:
        return f"not printable: {sentence!r}"
    return "sentence" if sentence else "result"


def attempt_all(
    cases: Sequence[Case], folders: Mapping[str, Path], scratch: Path
) -> dict[Case, str]:
    """Try cases; each begins with the folder as it was."""
    found = {}
    by_change: dict[tuple[File, Place, str], list[Case]] = {}
    for case in cases:
        by_change.setdefault((case.file, case.place, case.value), []).append(case)
    for (file, place, value), alike in by_change.items():
        document = file.read(folders[file.folder] / file.name)
        content = replaced(document, place, VALUES[value])
        folder = scratch / "folder"
        for case in alike:
            # Commands that only read can share a copy.
            if not folder.exists():
                shutil.copytree(folders[file.folder], folder)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    file.write(folder / file.name, content)
            found[case] = attempt(case, content, folder)
            if case.command in ("resume", "report"):
                shutil.rmtree(folder)
        shutil.rmtree(folder, ignore_errors=True)
    return found


# ---- the folders -----------------------------------------------------------------------------------


class Stop(Exception):
    """Stands for a kill."""


def experiment(method: Any, seed: int = 0) -> Experiment:
    return Experiment(
        method, "digits", "mlp:hidden=4", clients=3, cohort=2, rounds=2, finetune=(0, 1), seed=seed
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A finished run, one that was cut short, and a sweep."""
    place = tmp_path_factory.mktemp("folders")

    def stop(line: Mapping[str, Any]) -> None:
        raise Stop

    api.train(experiment(Ditto()), place / "whole", engine="serial")
    with pytest.raises(Stop):
        api.train(experiment(Ditto()), place / "cut", engine="serial", watch=stop)
    grid = {"fedavg-s0": experiment(FedAvg()), "fedavg-s1": experiment(FedAvg(), seed=1)}
    sweep(grid, place / "sweep", engine="serial")
    return {name: place / name for name in ("whole", "cut", "sweep")}


# ---- tests -----------------------------------------------------------------------------------------


def report(found: Mapping[Case, str]) -> list[str]:
    """Return what broke, one line for each kind with an example."""
    examples: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for case, word in found.items():
        if word not in ("result", "sentence"):
            kind = word.partition(": ")[0]
            counts[kind] += 1
            examples.setdefault(kind, f"{case}: {word}")
    return [f"{count} x {examples[kind]}" for kind, count in counts.most_common()]


def test_a_value_of_another_type_is_a_result_or_a_sentence(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    cases = all_cases(folders)
    fast = [case for case in cases if case.command in FAST]
    slow = [case for case in cases if case.command not in FAST]
    # Every so many, so that each file, value and command has its share.
    sample = [*fast[:: len(fast) // 1000], *slow[:: len(slow) // 60]]
    assert len(sample) >= 1000
    found = attempt_all(sample, folders, tmp_path)
    assert report(found) == []
    assert set(found.values()) == {"result", "sentence"}


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_every_value_of_another_type(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = all_cases(folders)
    found = attempt_all(cases, folders, tmp_path)
    broken = report(found)
    with capsys.disabled():
        words = Counter(
            word if word in ("result", "sentence") else "broken" for word in found.values()
        )
        print(f"\n{len(found)} cases: {dict(words)}")
        for line in broken:
            print(line)
    assert broken == []
