"""Each file of a run folder, damaged in each way: a sentence that names it, or the right result.

The whole table: ``pytest -m slow -s tests/faults/test_damage.py``.
"""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedgrove import api
from fedgrove.cli import main
from fedgrove.config.experiment import Experiment
from fedgrove.errors import FolderWarning, InputError
from fedgrove.export.source import opened
from fedgrove.methods import Ditto
from fedgrove.trees import identical

ROUNDS = 4


# ---- damages -------------------------------------------------------------------------------------


def flipped(data: bytes, place: float) -> bytes:
    at = min(int(place * len(data)), len(data) - 1)
    return data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]


def garbage(data: bytes) -> bytes:
    return np.random.default_rng(0).bytes(len(data))


DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {
    "deleted": lambda data: None,
    "emptied": lambda data: b"",
    "half": lambda data: data[: len(data) // 2],
    "one short": lambda data: data[:-1],
    "flip first": lambda data: flipped(data, 0.0),
    "flip 30 %": lambda data: flipped(data, 0.3),
    "flip 70 %": lambda data: flipped(data, 0.7),
    "flip last": lambda data: flipped(data, 1.0),
    "garbage": garbage,
    "no JSON": lambda data: b'{"round": [1, 2',
}


def damage(path: Path, how: str) -> None:
    changed = DAMAGES[how](path.read_bytes())
    if changed is None:
        path.unlink()
    else:
        path.write_bytes(changed)


# ---- a run, whole and cut short ------------------------------------------------------------------


class Stop(Exception):
    """Stands for a kill."""


def experiment() -> Experiment:
    return Experiment(
        Ditto(), "digits", "mlp:hidden=8", clients=3, cohort=2, rounds=ROUNDS, finetune=(0, 1)
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, never disturbed."""
    return api.train(
        experiment(), tmp_path_factory.mktemp("whole") / "run", engine="serial"
    ).folder.path


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, killed after three rounds; every checkpoint was forced to the disk."""
    path = tmp_path_factory.mktemp("cut") / "run"

    def stop(line: Mapping[str, Any]) -> None:
        if line["round"] == ROUNDS - 1:
            raise Stop

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedgrove.runs.folder.SYNC_EVERY", 0.0)
        with pytest.raises(Stop):
            api.train(experiment(), path, engine="serial", watch=stop)
    return path


def result(folder: Path) -> dict[str, Any]:
    """Final weights, and the figures that do not measure time."""
    models = {path.name: path.read_bytes() for path in (folder / "models").iterdir()}
    summary = json.loads((folder / "summary.json").read_text())
    return models | {key: value for key, value in summary.items() if key != "seconds"}


def role(name: str, folder: Path) -> str:
    """What a file is, for the table: checkpoints name their files by what is in them."""
    if not name.startswith("checkpoint/") or name.endswith(".json"):
        return re.sub(r"(client|group)-\d+", r"\1-*", name)
    latest = json.loads((folder / "checkpoint/latest.json").read_text())
    previous = json.loads((folder / "checkpoint/previous.json").read_text())
    kind = "state" if "/state." in name else "memory"
    file = name.removeprefix("checkpoint/")
    is_of = [
        word
        for word, manifest in (("latest", latest), ("previous", previous))
        if file == manifest["tensors"] or file in manifest["memory"].values()
    ]
    return f"checkpoint/ {kind} of {' and '.join(is_of)}"


def files_of(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def command(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """A command of the command line in this process: its code, what it printed, what it said."""
    capsys.readouterr()
    with warnings.catch_warnings():
        # Under pytest a warning is an error; a person reads it.
        warnings.simplefilter("always", FolderWarning)
        code = main(words)
    out, err = capsys.readouterr()
    return code, out, err


def is_a_sentence(err: str, name: str) -> bool:
    lines = [line for line in err.splitlines() if not line.startswith("round ")]
    return len(lines) == 1 and lines[0].startswith("fedgrove: ") and name in lines[0]


# ---- what happens --------------------------------------------------------------------------------


def resumed(
    cut: Path, name: str, how: str, expected: Any, at: Path, capsys: pytest.CaptureFixture[str]
) -> str:
    """Damage one file of an unfinished run and resume it: what happened, in a word."""
    folder = at / "run"
    shutil.copytree(cut, folder)
    damage(folder / name, how)
    before = {file: (folder / file).read_bytes() for file in files_of(folder)}
    code, _, err = command(["resume", str(folder), "--engine", "serial", "--json"], capsys)
    file = Path(name).name
    try:
        if code == 0:
            assert result(folder) == expected, f"{name} {how}: another result"
            assert not [f for f in files_of(folder) if f.endswith(".part") or f == "lock"]
            if not err:
                return "resumed"
            assert is_a_sentence(err, file), f"{name} {how}: {err}"
            assert "continues from the previous checkpoint" in err
            return "from previous"
        assert code == 2, f"{name} {how}: {code}"
        assert is_a_sentence(err, file), f"{name} {how}: {err}"
        after = {f: (folder / f).read_bytes() for f in files_of(folder)}
        assert after == before, f"{name} {how}: something was changed"
        return "sentence"
    finally:
        shutil.rmtree(folder)


def read(
    whole: Path, name: str, how: str, shown: str, at: Path, capsys: pytest.CaptureFixture[str]
) -> str:
    """Damage one file of a finished run, compare and export it: what happened, in a word."""
    folder = at / "run"
    shutil.copytree(whole, folder)
    damage(folder / name, how)
    file = Path(name).name
    is_unfinished = file == "summary.json" and how == "deleted"
    code, out, err = command(["compare", str(folder), "--bytes", "--json"], capsys)
    if is_unfinished:
        # The summary comes last: a folder without one is an unfinished run, which can be resumed.
        assert [row["finished"] for row in json.loads(out)] == [False]
        compared = "unfinished"
    elif code == 0:
        assert out.replace(str(folder), "RUN") == shown, f"{name} {how}: other figures"
        compared = "compared"
    else:
        assert is_a_sentence(err, file), f"{name} {how}: {err}"
        compared = "sentence"
    refusal = ""
    exported = "exported"
    try:
        # What export reads: all but the writing of the files.
        source = opened(folder)
        for client in source.files:
            assert identical(source.tree(client), opened(whole).tree(client)), f"{name} {how}"
    except InputError as error:
        refusal = str(error)
        exported = "sentence"
    assert not refusal or file in refusal or is_unfinished, f"{name} {how}: {refusal}"
    shutil.rmtree(folder)
    return f"{compared} / {exported}"


def show(title: str, rows: Mapping[str, Mapping[str, str]]) -> None:
    """Print what happened, by file and damage."""
    wide = max(len(row) for row in rows)
    print(f"\n\n{title}\n")
    print(f"| {'file':{wide}} | " + " | ".join(DAMAGES) + " |")
    print(f"|{'-' * (wide + 2)}|" + "---|" * len(DAMAGES))
    for row, cells in rows.items():
        print(f"| {row:{wide}} | " + " | ".join(cells[how] for how in DAMAGES) + " |")


# ---- tests ---------------------------------------------------------------------------------------


FAST = ["latest.json", "metrics.jsonl", "config.toml", "checksums.txt", "state of latest"]


@pytest.mark.parametrize("how", ["deleted", "flip 70 %", "half"])
def test_a_damaged_file_is_a_sentence_or_the_same_result(
    how: str, cut: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = result(whole)
    seen = {}
    for name in files_of(cut):
        kind = role(name, cut)
        if any(kind.endswith(word) for word in FAST) and kind not in seen:
            seen[kind] = resumed(cut, name, how, expected, tmp_path, capsys)
    assert len(seen) == len(FAST)
    assert seen["checkpoint/latest.json"] == "from previous"
    assert seen["checkpoint/ state of latest"] == "from previous"
    assert seen["config.toml"] == "sentence"


def test_a_damaged_result_is_a_sentence(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, _ = command(["compare", str(whole), "--bytes", "--json"], capsys)
    shown = out.replace(str(whole), "RUN")
    assert (
        read(whole, "summary.json", "flip 30 %", shown, tmp_path, capsys) == "sentence / sentence"
    )
    model = "models/client-00001.safetensors"
    assert read(whole, model, "flip last", shown, tmp_path, capsys) == "compared / sentence"
    index = read(whole, "models/index.json", "no JSON", shown, tmp_path, capsys)
    assert index == "compared / sentence"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_file_in_every_way(
    cut: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = result(whole)
    cases = 0
    unfinished: dict[str, dict[str, str]] = {}
    for name in files_of(cut):
        for how in DAMAGES:
            word = resumed(cut, name, how, expected, tmp_path, capsys)
            # Several files of one role must fare alike, or the cell says so.
            cell = unfinished.setdefault(role(name, cut), {})
            cell[how] = word if cell.get(how, word) == word else f"{cell[how]}, {word}"
            cases += 1
    _, out, _ = command(["compare", str(whole), "--bytes", "--json"], capsys)
    finished: dict[str, dict[str, str]] = {}
    for name in files_of(whole):
        if not name.startswith("checkpoint/"):
            for how in DAMAGES:
                word = read(whole, name, how, out.replace(str(whole), "RUN"), tmp_path, capsys)
                finished.setdefault(role(name, whole), {})[how] = word
                cases += 1
    with capsys.disabled():
        show("Unfinished run, resume:", unfinished)
        show("Finished run, compare / export:", finished)
        words = Counter(word for row in unfinished.values() for word in row.values())
        print(f"\n{cases} damages; cells of the first table: {dict(words)}")
    assert cases >= 100
    for kind, row in unfinished.items():
        if kind.endswith(("of latest", "latest.json")):
            assert set(row.values()) <= {"from previous", "resumed"}, kind
