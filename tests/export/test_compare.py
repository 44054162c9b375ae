"""A limit of the size, all formats in one table, and the names of files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.export.made import finished, of, with_onnx

import fedgrove as fg
from fedgrove.cli import main
from fedgrove.errors import BudgetError, InputError
from fedgrove.export import executorch as executorch_files
from fedgrove.export import litert as litert_files
from fedgrove.export import onnx as onnx_files
from fedgrove.export.compare import compare_formats
from fedgrove.export.figures import Exported
from fedgrove.export.formats import parse_file_size
from fedgrove.export.source import Source

# ---- a limit of the size -------------------------------------------------------------------------


@with_onnx
def test_float_is_kept_if_it_fits_else_int8(
    digits: Path, everyone: dict[int, Exported], tmp_path: Path
) -> None:
    sizes = {row.version: row.bytes for row in everyone[0].rows}
    between = f"{(sizes['int8'] + sizes['shrunk']) // 2}B"
    roomy = fg.export_model(digits, client=0, size=f"{sizes['shrunk']}B", out=tmp_path / "roomy")
    assert sorted(p.name for p in roomy.folder.iterdir()) == [
        "client-00000.onnx",
        "client-00000.onnx.md",
    ]
    # int8 is not even tried.
    assert "int8" not in of(roomy)
    tight = fg.export_model(digits, client=0, size=between, out=tmp_path / "tight")
    assert sorted(p.name for p in tight.folder.iterdir()) == [
        "client-00000.int8.onnx",
        "client-00000.int8.onnx.md",
    ]
    assert tight.file == "client-00000.int8.onnx"
    text = (tight.folder / tight.card).read_text()
    assert text.startswith("# client-00000.int8.onnx")
    assert 'InferenceSession("client-00000.int8.onnx")' in text
    assert any("was not kept" in note for note in tight.notes)
    with pytest.raises(BudgetError, match=r"size is 1kB; .* is int8, with .* kB: give .*kB") as no:
        fg.export_model(digits, client=0, size="1kB", out=tmp_path / "none")
    assert no.value.needed == sizes["int8"]
    assert not (tmp_path / "none").exists()
    # What the sentence says is enough.
    enough = str(no.value).partition("give ")[2].partition(",")[0]
    assert sizes["int8"] <= (parse_file_size(enough) or 0) < sizes["int8"] + 101
    with pytest.raises(InputError, match=r"size is 'small'; it must be the most bytes of a file"):
        fg.export_model(digits, client=0, size="small")


# ---- all formats ---------------------------------------------------------------------------------


@with_onnx
def test_a_format_that_is_not_installed_is_a_row(
    digits: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for files in (executorch_files, litert_files):
        monkeypatch.setattr(files, "NEEDS", ("no_such_package",))
    monkeypatch.setenv("COLUMNS", "120")
    before = sorted(digits.rglob("*"))
    assert main(["export", str(digits), "--to", "all", "--check"]) == 0
    shown = capsys.readouterr().out
    rows = [line.split() for line in shown.splitlines()]
    assert [row[1:3] for row in rows if row[:1] == ["0"]] == [
        ["onnx", "float"],
        ["onnx", "int8"],
        ["executorch", "float,"],
        ["litert", "float,"],
    ]
    assert "pip install 'fedgrove[edge]'" in shown
    assert "pip install 'fedgrove[litert]'" in shown
    # Nothing was written.
    assert sorted(digits.rglob("*")) == before

    words = ["export", str(digits), "--client", "2", "--to", "all", "--out", str(tmp_path / "out")]
    assert main([*words, "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)
    assert [entry["file"] for entry in entries] == [
        "client-00002.onnx",
        "client-00002.int8.onnx",
        None,
        None,
    ]
    assert entries[0]["latency"] == 1.0
    assert len(list((tmp_path / "out").iterdir())) == 3
    # Without --check files are written, so it must be said for whom.
    assert main(["export", str(digits), "--to", "all"]) == 2
    assert "--client K" in capsys.readouterr().err


@with_onnx
def test_a_format_that_fails_is_a_row_and_an_error(
    digits: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*args: Any) -> None:
        raise RuntimeError("no kernel for this layer")

    monkeypatch.setattr(onnx_files, "quantise", broken)
    assert main(["export", str(digits), "--check"]) == 1
    shown = capsys.readouterr()
    assert "failed" in shown.out
    assert "no kernel for this layer" in shown.out
    assert "1 of 2 exports failed; the reasons are below the table" in shown.err
    rows = compare_formats(digits, client=1, formats=["onnx"])
    assert [(row.version, bool(row.failure)) for row in rows] == [("float", False), ("int8", True)]
    with pytest.raises(InputError, match=r"no format 'onxn'; did you mean 'onnx'"):
        compare_formats(digits, formats=["onxn"])


@with_onnx
def test_of_all_formats_one_file_within_the_size_is_kept(
    digits: Path, everyone: dict[int, Exported], tmp_path: Path
) -> None:
    sizes = {row.version: row.bytes for row in everyone[0].rows}
    float_size = sizes["shrunk"]
    words: dict[str, Any] = {"client": 0, "formats": ["onnx"], "write": True}
    kept = compare_formats(digits, size=f"{float_size - 1}B", out=tmp_path / "a", **words)
    assert [row.file for row in kept] == [None, "client-00000.int8.onnx"]
    assert [row.fits for row in kept] == [False, True]
    kept = compare_formats(digits, size=f"{float_size}B", out=tmp_path / "b", **words)
    assert [row.file for row in kept] == ["client-00000.onnx", None]
    assert len(list((tmp_path / "b").iterdir())) == 2
    with pytest.raises(BudgetError, match=r"smallest file of client 0 is onnx in int8"):
        compare_formats(digits, size=f"{sizes['int8'] - 1}B", **words)


# ---- names ---------------------------------------------------------------------------------------


def stems(*names: str) -> list[str]:
    """The names of the files of clients that are called so."""
    federation = SimpleNamespace(name_of=lambda client: names[client])
    files = dict.fromkeys(range(len(names)), "")
    made = cast(Any, Source)(None, {}, None, None, federation, files)
    return [made.file_stem(client) for client in files]


def test_files_are_named_by_the_client_where_that_is_a_name() -> None:
    assert stems("anna", "Bo Müller", "x/../y") == ["anna", "Bo-Müller", "x-y"]
    # Numbers, nothing that is left, names that only differ in capitals, and names of others.
    assert stems("0", "...", "Cy", "cy") == [f"client-{k:05d}" for k in range(4)]
    assert stems("client-00001", "1") == ["client-00000", "client-00001"]
    # "a.int8.onnx" would be the int8 file of a.
    assert stems("a", "a.int8") == ["a", "a-int8"]


@with_onnx
def test_a_shrunk_model_is_measured_against_the_dense_one(tmp_path: Path) -> None:
    run = finished(tmp_path, "mlp", (12,))
    rows = compare_formats(run, formats=["onnx"], align=2)
    assert [row.version for row in rows] == ["float", "int8"]
    assert rows[0].difference is not None
    assert rows[0].difference <= 1e-5
    assert replace(rows[0], failure="no").has_failed
