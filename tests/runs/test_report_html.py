"""report.html of a run folder: made by every run, compared with its baselines, never in the way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import fedgrove
from fedgrove.errors import EngineError, FolderWarning
from fedgrove.runs import report_html
from fedgrove.runs.folder import RunFolder
from fedgrove.runs.report_html import compute_cosines, read_run_record, write_run_report

WORDS = {
    "data": "digits",
    "clients": 4,
    "rounds": 2,
    "epochs": 1,
    "engine": "serial",
    "progress": False,
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Local, then fedavg, then a method that prunes, in one folder."""
    place = tmp_path_factory.mktemp("runs")
    fedgrove.run("local", out=place / "alone", **WORDS)
    fedgrove.run("fedavg", out=place / "mean", **WORDS)
    fedgrove.run("heterofl", out=place / "widths", profile="phones", **WORDS)
    return place


def test_every_run_has_a_page_that_knows_its_baselines(runs: Path) -> None:
    text = (runs / "widths" / "report.html").read_text(encoding="utf-8")
    assert "where fedavg gives" in text
    assert "training alone gives" in text
    # The first one had nobody beside it.
    assert (
        "where" not in (runs / "alone" / "report.html").read_text().split("class=tiles")[0][-400:]
    )
    # It is no part of what checksums guard: to write it again changes nothing.
    assert "report.html" not in (runs / "widths" / "checksums.txt").read_text()
    fedgrove.load_run(runs / "widths").rounds()


def test_what_is_gathered(runs: Path) -> None:
    record = read_run_record(RunFolder.open(runs / "widths"))
    assert list(record.baselines) == ["local", "fedavg"]
    assert [client["client"] for client in record.clients] == [0, 1, 2, 3]
    summary = record.summary
    assert summary is not None
    for client in record.clients:
        assert client["score"] == summary["accuracy_clients"][str(client["client"])]
        assert client["density"] == summary["density_clients"][str(client["client"])]
    # Clients of few channels have zeros where the others have weights.
    assert 0 < min(record.layers.values()) < 1
    assert "density_clients" not in json.loads((runs / "mean" / "summary.json").read_text())


def test_models_of_their_own_are_compared(runs: Path) -> None:
    record = read_run_record(RunFolder.open(runs / "alone"))
    assert len(record.similarity) == len(record.similar) == 4
    for i, row in enumerate(record.similarity):
        assert row[i] == pytest.approx(1, abs=1e-3)
        # Seen from their mean, models cannot all point the same way.
        assert sum(row) < 4


def test_one_and_the_same_model_is_not_compared_with_itself() -> None:
    model = {"a": torch.linspace(0, 1, 7)}
    assert compute_cosines([model] * 3) == []
    # Apart from their mean of 1 by -1, 0 and 1.
    apart = [{"a": torch.tensor([value])} for value in (0.0, 1.0, 2.0)]
    assert compute_cosines(apart) == [[1, 0, -1], [0, 0, 0], [-1, 0, 1]]


def test_other_runs_are_no_baselines(runs: Path, tmp_path: Path) -> None:
    fedgrove.run("fedavg", out=tmp_path / "a", **{**WORDS, "seed": 1})
    fedgrove.run("stc", out=tmp_path / "b", **WORDS)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "summary.json").write_text('{"method": "local", broken')
    assert read_run_record(RunFolder.open(tmp_path / "b")).baselines == {}


def test_a_page_that_fails_does_not_fail_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no ink")

    monkeypatch.setattr(report_html, "make_run_report", broken)
    with pytest.warns(FolderWarning, match=r"report\.html was not written: no ink"):
        result = fedgrove.run("local", out=tmp_path / "run", **WORDS)
    assert result.summary["rounds"] == 2
    assert not (tmp_path / "run" / "report.html").exists()


def test_a_failed_run_has_one_that_says_why(tmp_path: Path) -> None:
    words = {**WORDS, "lr": 1e30, "set": {"local.optimiser": "SGD"}}
    with pytest.raises(EngineError) as failed:
        fedgrove.run("fedavg", out=tmp_path / "run", **words)
    text = (tmp_path / "run" / "report.html").read_text()
    assert "Why it failed: " in text
    assert str(failed.value)[:30] in text


def test_a_temporary_run_gets_its_page_when_it_is_saved(tmp_path: Path) -> None:
    result = fedgrove.run("local", smoke=True, **WORDS)
    assert not (result.folder.path / "report.html").exists()
    saved = result.save(tmp_path / "kept")
    assert (saved.path / "report.html").is_file()


def test_a_folder_that_has_just_begun(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "new", '[run]\nmethod = "fedavg"\nrounds = 3\n')
    path = write_run_report(folder)
    assert path is not None
    assert "unfinished: 0 of 3 rounds" in path.read_text()
