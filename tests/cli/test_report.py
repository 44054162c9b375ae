"""``fedgrove report`` and the pages and tables of ``fedgrove compare``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import fedgrove
from fedgrove.cli import main
from fedgrove.errors import InputError

SHORT = ["--data", "digits", "--clients", "4", "--rounds", "2", "--epochs", "1"]
SHORT += ["--engine", "serial"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("place")
    for method in ("local", "fedavg"):
        assert main(["run", method, *SHORT, "--out", str(place / method), "--json"]) == 0
    sweep = ["sweep", "local", "fedavg", *SHORT, "--seeds", "0,1"]
    assert main([*sweep, "--out", str(place / "all"), "--json"]) == 0
    return place


@pytest.fixture
def here(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return place


def test_the_page_of_a_run_again(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = here / "local" / "report.html"
    page.unlink()
    assert main(["report", str(here / "local")]) == 0
    assert capsys.readouterr().out == f"Page: {page}\n"
    # By now fedavg is next to it.
    assert "where fedavg gives" in page.read_text()
    assert main(["report", str(here / "local"), "--out", "mine.html"]) == 0
    assert Path("mine.html").is_file()


def test_the_page_of_a_sweep(here: Path) -> None:
    page = here / "all" / "report.html"
    assert "Paired by seed" in page.read_text()
    before = page.read_text()
    page.unlink()
    assert main(["report", str(here / "all")]) == 0
    # Seconds are those of the summaries: nothing in it is of now.
    assert page.read_text() == before
    assert (here / "all" / "fedavg-s1" / "report.html").is_file()
    # With its page the folder is still that sweep, and can be taken up again.
    sweep = ["sweep", "local", "fedavg", *SHORT, "--seeds", "0,1", "--out", str(here / "all")]
    assert main([*sweep, "--json"]) == 0


def test_compare_writes_a_page_and_a_table(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(here / "local"), str(here / "fedavg")]
    assert main(["compare", *runs]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"Page: {here / 'compare.html'}"
    assert "Accuracy against bytes" in (here / "compare.html").read_text()
    assert main(["compare", *runs, "--page", "p.html", "--table", "t.tex"]) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == ["Table: t.tex", "Page: p.html"]
    # By their names in the folder of both.
    assert "FedAvg & " in Path("t.tex").read_text()
    # A sweep has its page already.
    assert main(["compare", str(here / "all")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"Page: {here / 'all' / 'report.html'}"


def test_json_stays_json(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(here / "local"), str(here / "fedavg")]
    assert main(["compare", *runs, "--json", "--page", "p.html"]) == 0
    said = capsys.readouterr()
    assert len(json.loads(said.out)) == 2
    assert "Page: p.html" in said.err
    assert main(["compare", runs[0]]) == 0
    # One run is not compared with anything: it has a page of its own.
    assert "Page:" not in capsys.readouterr().out


def test_charts_are_written_as_files(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(here / "local"), str(here / "fedavg")]
    assert main(["compare", *runs, "--charts", "charts"]) == 0
    charts = sorted(path.name for path in Path("charts").glob("*.svg"))
    assert "accuracy-by-round-before-fine-tuning.svg" in charts
    assert "Charts: charts (" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("compare RUN --bytes --charts c", "--charts is 'c'; it must be given without"),
        ("report nothing", "is not a run folder: it does not exist"),
        ("report RUN --out none/p.html", "--out is 'none/p.html', and there is no folder 'none'"),
        ("report RUN --out .", "--out is '.'; it must be a file, and this is a folder"),
        ("compare RUN --table t.doc", "--table is 't.doc'; it must be a name that ends with .md"),
        ("compare RUN --page none/p.html", "there is no folder 'none'"),
        ("compare RUN --bytes --page p.html", "--page is 'p.html'; it must be given without"),
    ],
)
def test_refusals(
    words: str, sentence: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.replace("RUN", str(here / "local")).split()) == 2
    assert sentence in capsys.readouterr().err


FILES_OF_COMMANDS = [
    ("report", "--out", "x.html"),
    ("compare", "--page", "x.html"),
    ("compare", "--table", "x.csv"),
    ("compare --time", "--plot", "x.html"),
]


@pytest.mark.parametrize(("command", "option", "name"), FILES_OF_COMMANDS)
def test_a_file_of_somebody_else_needs_force(
    here: Path, command: str, option: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*command.split(), str(here / "fedavg"), option, name]
    Path(name).write_text("my thesis")
    assert main(words) == 2
    assert "exists and was not written by fedgrove" in capsys.readouterr().err
    assert Path(name).read_text() == "my thesis"
    assert main([*words, "--force"]) == 0
    # Its own file is written again without a word.
    assert main(words) == 0
    assert "my thesis" not in Path(name).read_text()


@pytest.mark.parametrize(("command", "option", "name"), FILES_OF_COMMANDS)
@pytest.mark.parametrize("inside", ["summary.json", "models/index.json", "x.html", "x.csv"])
def test_no_file_of_a_run_is_overwritten(
    here: Path, command: str, option: str, name: str, inside: str
) -> None:
    run = here / "fedavg"
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    words = [*command.split(), str(run), option, str(run / inside), "--force"]
    assert main(words) == 2
    assert main([*words[:-2], "notes.txt", "--force"]) == 2
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_the_same_rules_in_python(here: Path) -> None:
    page = fedgrove.compare(str(here / "local"), str(here / "fedavg")).page()
    with pytest.raises(InputError, match=r"outside the run folder"):
        page.write(here / "local" / "x.html")
    Path("x.html").write_text("my thesis")
    with pytest.raises(InputError, match=r"force=True"):
        page.write(Path("x.html"))
    page.write(Path("x.html"), force=True)
    page.write(here / "local" / "report.html")
    assert main(["report", str(here / "local")]) == 0
