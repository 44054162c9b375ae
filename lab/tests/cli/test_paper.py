"""``fedgrove paper``, from arguments to folders, table, page and exit code."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.conftest import started

from fedgrove.cli import main
from fedgrove.errors import InputError
from fedgrove_lab import papers
from fedgrove_lab.cli.paper import _folders, find_studies
from fedgrove_lab.papers.tables import print_comparison

PAPER = papers.find("ca-afp")
QUICK = ["paper", "ca-afp", "--figure", "2", "--quick"]
NAMES = ["start=1", "start=0.5", "start=0.2", "P2=0", "P2=2", "P1=0", "P1=2"]


def timeless(found: dict[str, Any]) -> dict[str, Any]:
    """All but what measures time or names the engine."""
    return {k: v for k, v in found.items() if k not in ("seconds", "engines")}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quick figure, never disturbed."""
    folder = tmp_path_factory.mktemp("whole") / "figure2"
    assert main([*QUICK, "--engine", "serial", "--out", str(folder)]) == 0
    return folder


def test_folders_table_and_page(whole: Path) -> None:
    there = {"motion", "table.json", "table.md", "paper.html"}
    assert {p.name for p in whole.iterdir()} == there
    assert {p.name for p in (whole / "motion").iterdir()} == {
        *(f"{n}-s0" for n in NAMES),
        "sweep.json",
        "report.html",
    }
    found = json.loads((whole / "table.json").read_text())
    assert (found["paper"], found["part"], found["quick"]) == ("ca-afp", "figure2", True)
    assert [row["name"] for row in found["rows"]] == NAMES
    by_name = {row["name"]: row["ours"] for row in found["rows"]}
    assert by_name["P2=0"] == by_name["P1=0"] == by_name["start=0.5"]  # the same run thrice
    assert by_name["start=0.2"]["mib_paper"]["mean"] < by_name["start=1"]["mib_paper"]["mean"]
    assert "QUICK" in (whole / "table.md").read_text()
    assert "QUICK" in (whole / "paper.html").read_text()


@pytest.mark.parametrize("width", [80, 100, 120])
def test_the_tables_fit(
    width: int,
    whole: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    print_comparison(json.loads((whole / "table.json").read_text()))
    out = capsys.readouterr().out
    assert "start=0.5" in out
    assert max(len(line) for line in out.splitlines()) <= width


def test_the_same_command_again_trains_nothing(
    whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {p: p.stat().st_mtime_ns for p in whole.glob("motion/*/*")}
    table = json.loads((whole / "table.json").read_text())
    capsys.readouterr()
    assert main([*QUICK, "--out", str(whole), "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == [table]
    assert err == ""
    assert {p: p.stat().st_mtime_ns for p in whole.glob("motion/*/*")} == before
    assert main([*QUICK, "--out", str(whole), "--seeds", "3,"]) == 2
    assert "contains a different sweep" in capsys.readouterr().err


def test_killed_and_called_again_it_is_the_undisturbed_one(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "figure2"
    # Most rows were trained before, so that few are left to be killed.
    for run in whole.glob("motion/P*-s0"):
        shutil.copytree(run, folder / "motion" / run.name)
    process = started(*QUICK, "--engine", "pool", "--out", str(folder))
    latest, end = folder / "motion/start=1-s0/checkpoint/latest.json", time.monotonic() + 100
    while (
        not (latest.is_file() and json.loads(latest.read_text())["round"] >= 1)
        and time.monotonic() < end
    ):
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.02)
    process.kill()
    process.communicate(timeout=60)
    assert not (folder / "table.json").exists()
    assert main([*QUICK, "--engine", "serial", "--out", str(folder)]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("CA-AFP, Figure 2, QUICK: a quick run, not a measurement\n")
    assert "round 18/18" in err
    found, undisturbed = (json.loads((f / "table.json").read_text()) for f in (folder, whole))
    assert timeless(found) == timeless(undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("table", [2, 3])
def test_a_quick_table_of_all_methods(
    table: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["paper", "ca-afp", "--table", str(table), "--quick"]) == 0
    found = json.loads((tmp_path / f"runs/paper-ca-afp-table{table}-quick/table.json").read_text())
    assert not any(row["missing"] for row in found["rows"])
    # 2 rows of ca-afp against 6 others, and against each other, at three lengths of fine-tuning
    assert len(found["paired"]) == (3 * (2 * 6 + 1) if table == 2 else 0)


def test_where_parts_go() -> None:
    assert _folders("ca-afp", ["table2"], None, False) == {
        "table2": Path("runs/paper-ca-afp-table2")
    }
    assert _folders("ca-afp", ["figure3"], None, True) == {
        "figure3": Path("runs/paper-ca-afp-figure3-quick")
    }
    assert _folders("ca-afp", ["table2"], "mine", True) == {"table2": Path("mine")}
    assert list(_folders("ca-afp", ["table2", "figure3"], "mine", False).values()) == [
        Path("mine/table2"),
        Path("mine/figure3"),
    ]


# ---- data that are not found ---------------------------------------------------------------------


def words(**given: Any) -> dict[str, Any]:
    none = dict.fromkeys(("data", "split", "data_dir", "rows", "rounds", "examples", "init"))
    return {**none, "quick": False, **given}


@pytest.fixture
def only_uci(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which UCI-HAR is, in a small likeness, and WISDM is not."""
    monkeypatch.setenv("FEDGROVE_CACHE", str(tmp_path / "cache"))
    rng, n = np.random.default_rng(0), 240
    user, chain = np.arange(n) // 80, np.arange(n) // 4
    y = (np.arange(n) // 4) % 5
    np.savez(
        tmp_path / "uci_har.npz",
        x=rng.normal(size=(n, 128, 9)).astype(np.float32),
        y=y,
        subject=user,
        chain=chain,
    )
    return tmp_path


def test_data_that_are_missing_are_left_out_with_a_sentence(
    only_uci: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = find_studies(PAPER.tables[2], words(data_dir=str(only_uci)))
    assert list(found) == ["uci-har"]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("fedgrove: left out: wisdm was not found")
    assert list(
        find_studies(PAPER.tables[2], words(data_dir=str(only_uci), data="uci-har", split="random"))
    ) == ["uci-har-random"]
    assert list(find_studies(PAPER.figures[3], words(data_dir=str(only_uci), quick=True))) == [
        "motion"
    ]


def test_only_some_rows() -> None:
    (chosen,) = find_studies(PAPER.figures[2], words(quick=True, rows="P2=0, start=*")).values()
    assert [row.name for row in chosen.rows] == ["start=1", "start=0.5", "start=0.2", "P2=0"]
    with pytest.raises(
        InputError, match=r"^--rows is 'P3', which is not a row of CA-AFP, Figure 2; "
    ):
        find_studies(PAPER.figures[2], words(quick=True, rows="P3"))
    with pytest.raises(InputError, match=r"P1=2, or all of 'start\*'\.$"):
        find_studies(PAPER.figures[2], words(quick=True, rows="start"))


def test_rounds_only_where_any_number_will_do() -> None:
    with pytest.raises(InputError, match=r"^--rounds is 5; it must be left out: this part's are "):
        find_studies(PAPER.figures[2], words(quick=True, rounds=5))
    free = papers.find("adfedwcp").tables[3]
    (chosen,) = find_studies(free, words(quick=True, rounds=5)).values()
    assert {row.experiment.rounds for row in chosen.rows} == {5}
    with pytest.raises(InputError, match="--rounds is 0; it must be 1 or more"):
        find_studies(free, words(quick=True, rounds=0))


def test_examples_and_weights_only_where_a_part_takes_them() -> None:
    for word, given in (("examples", 5), ("init", "mine.safetensors")):
        with pytest.raises(InputError, match=f"^--{word} is .*left out: this part has its own"):
            find_studies(papers.find("adfedwcp").tables[3], words(quick=True, **{word: given}))
    free = papers.find("fedapta").tables[6]
    (chosen,) = find_studies(free, words(quick=True, examples=5)).values()
    assert {row.experiment.partition for row in chosen.rows} == {"dirichlet:0.5:5"}
    with pytest.raises(InputError, match="--examples is 0; it must be 1 or more of each class"):
        find_studies(free, words(quick=True, examples=0))


@pytest.fixture
def only_fashion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which Fashion-MNIST is, in a small likeness, and EMNIST is not."""
    monkeypatch.setenv("FEDGROVE_CACHE", str(tmp_path / "cache"))
    rng = np.random.default_rng(0)
    images = {}
    for part, n in (("train", 20_000), ("test", 100)):
        images[f"x_{part}"] = rng.integers(0, 255, size=(n, 28, 28), dtype=np.uint8)
        images[f"y_{part}"] = (np.arange(n) % 10).astype(np.uint8)
    np.savez(tmp_path / "fashion_mnist.npz", **images)
    return tmp_path


def test_other_data_take_the_place_of_those_not_found(
    only_fashion: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    part = papers.find("adfedwcp").tables[8]
    (item,) = find_studies(part, words(data_dir=str(only_fashion))).items()
    folder, study = item
    assert folder == "fashion-mnist"
    assert study.notes[0].startswith("fashion-mnist replaces EMNIST")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("fedgrove: fashion-mnist replaces emnist: ")
    # Who asks for it by name is not given something else.
    with pytest.raises(InputError, match="emnist"):
        find_studies(part, words(data_dir=str(only_fashion), data="emnist"))


def test_what_stands_in_for_data_may_be_replaced_in_turn(
    only_fashion: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    six = papers.find("fedapta").tables[6]
    assert isinstance(six, papers.StudyPart)
    part = replace(
        six,
        data=("fashion-mnist+svhn+emnist",),
        substitutes={
            "fashion-mnist+svhn+emnist": "fashion-mnist+svhn",
            "fashion-mnist+svhn": "fashion-mnist+digits",
        },
    )
    found = find_studies(part, words(data_dir=str(only_fashion), examples=50))
    assert list(found) == ["fashion-mnist+digits"]
    # Both ways miss SVHN, which is said once.
    (line,) = capsys.readouterr().err.splitlines()
    start = "fedgrove: fashion-mnist+digits replaces fashion-mnist+svhn+emnist: svhn was not"
    assert line.startswith(start)
    assert line.count("svhn was not found") == 1


def test_damaged_data_are_not_replaced(
    only_fashion: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(only_fashion)
    (only_fashion / "emnist").mkdir()
    for part in ("train", "test"):
        for kind in ("images-idx3", "labels-idx1"):
            name = f"emnist-balanced-{part}-{kind}-ubyte.gz"
            (only_fashion / "emnist" / name).write_bytes(b"torn")
    words = ["paper", "adfedwcp", "--table", "8", "--data-dir"]
    assert main([*words, str(only_fashion)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("fedgrove: ")
    assert "emnist-balanced-train-images-idx3-ubyte.gz' " in line
    assert main([*words, "nowhere"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("fedgrove: --data-dir is 'nowhere', which is not a folder; ")
    assert main(["paper", "adfedwcp", "--table", "12", "--data-dir", "nowhere"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("fedgrove: --data-dir is 'nowhere', which is not a folder; ")
    assert not (only_fashion / "runs").exists()


def test_rows_run_apart_are_put_together(whole: Path, tmp_path: Path) -> None:
    """Processes may each run some rows; their run folders, moved into one, make the table."""
    together = tmp_path / "together"
    (together / "motion").mkdir(parents=True)
    for i, rows in enumerate(("start=1", "start=0.2")):
        part = tmp_path / str(i)
        assert main([*QUICK, "--engine", "serial", "--out", str(part), "--rows", rows]) == 0
        for run in (part / "motion").glob("*-s0"):
            run.rename(together / "motion" / run.name)
    for run in (whole / "motion").glob("*-s0"):
        if not (together / "motion" / run.name).exists():
            shutil.copytree(run, together / "motion" / run.name)
    assert main([*QUICK, "--engine", "serial", "--out", str(together)]) == 0
    tables = [json.loads((folder / "table.json").read_text()) for folder in (whole, together)]
    assert timeless(tables[0]) == timeless(tables[1])


def test_with_none_of_its_data_it_is_refused(
    only_uci: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(only_uci)
    assert main(["paper", "ca-afp", "--figure", "3", "--data-dir", str(only_uci)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("fedgrove: wisdm was not found")
    assert not (only_uci / "runs").exists()


def test_a_table_about_the_data_trains_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["paper", "ca-afp", "--table", "1", "--quick", "--out", str(tmp_path / "t")]
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[0] == "CA-AFP, Table 1"
    assert err == ""
    assert {path.name for path in (tmp_path / "t").iterdir()} == {"table.json", "table.md"}
    assert main([*words, "--json"]) == 0
    (comparison,) = json.loads(capsys.readouterr().out)
    assert comparison == json.loads((tmp_path / "t/table.json").read_text())
    by_measure = {row["measure"]: row["ours"] for row in comparison["rows"]}
    assert by_measure["clients without some class"] == 0
    assert main([*words[:4], "--data", "uci-har", "--data-dir", str(tmp_path)]) == 2
    assert "uci-har" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            "--rows x",
            "--rows is 'x'; it must be left out: a table about the data does not train anything.",
        ),
        ("--rounds 3", "--rounds is 3; it must be left out: "),
        ("--seeds 1,2", "--seeds is "),
        ("--engine warp", "there is no engine 'warp'"),
        ("--device warp", "there is no device 'warp'"),
    ],
)
def test_a_table_about_the_data_refuses_what_it_cannot_heed(
    flags: str,
    sentence: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["paper", "ca-afp", "--table", "1", "--quick", *flags.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"fedgrove: {sentence}")
    assert list(tmp_path.iterdir()) == []
