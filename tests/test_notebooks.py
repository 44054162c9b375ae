"""The notebooks run from top to bottom, as plain code and, where it is installed, in Jupyter's kernel."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
EVERY = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def cells(path: Path, kind: str) -> list[str]:
    book = json.loads(path.read_text())
    return ["".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == kind]


def test_there_are_two() -> None:
    assert len(NOTEBOOKS) == 2


@EVERY
def test_a_notebook_is_tidy(path: Path) -> None:
    """No outputs of somebody's machine, code that parses, links that lead somewhere."""
    for cell in json.loads(path.read_text())["cells"]:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
    for code in cells(path, "code"):
        ast.parse(code)
    for text in cells(path, "markdown"):
        for target in re.findall(r"\]\(([^)#\s]+)", text):
            assert (path.parent / target).exists()


@pytest.mark.slow
@EVERY
def test_a_notebook_runs_as_plain_code(path: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    script = tmp_path / "notebook.py"
    script.write_text("\n\n".join(cells(path, "code")))
    done = subprocess.run(
        [sys.executable, "notebook.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Jupyter's own
@EVERY
def test_a_notebook_runs_in_jupyter(path: Path, tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    copy = tmp_path / path.name
    shutil.copy(path, copy)
    book = nbformat.read(copy, as_version=4)
    client = nbclient.NotebookClient(
        book, timeout=280, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
