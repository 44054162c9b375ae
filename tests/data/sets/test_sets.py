"""The folder of data sets: a broken file takes no data set of another file away."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fedgrove import data

ROOT = Path(__file__).parents[3]
BROKEN = {
    "syntax": ("SETS = {\n", "SyntaxError: '{' was never closed"),
    "raises": ("import nowhere_to_be_found\n", "ModuleNotFoundError: No module named"),
    "no_sets": ("MY_SETS = {}\n", "has no attribute 'SETS'"),
    "not_a_set": ("SETS = {'mine': 'digits'}\n", "SETS['mine'] is a str, not a NamedSet"),
    "twice": (
        "from .generated import SETS as ALL\nSETS = {'digits': ALL['digits']}\n",
        "there is another data set 'digits'",
    ),
}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package with broken files of data sets, next to the tools and the docs."""
    root = tmp_path_factory.mktemp("copy")
    source = root / "src" / "fedgrove"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "src" / "fedgrove", source, ignore=ignored)
    shutil.copytree(ROOT / "tools", root / "tools", ignore=ignored)
    shutil.copytree(ROOT / "docs", root / "docs")
    for name, (text, _) in BROKEN.items():
        (source / "data" / "sets" / f"{name}.py").write_text(text)
    return root


def python(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in another process, with the package of this folder."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(root / "src"),
        "XDG_CACHE_HOME": str(root / "cache"),
    }
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=root, timeout=300
    )


def test_broken_files_are_listed_with_a_reason_and_all_data_sets_as_ever(copy: Path) -> None:
    listed = python(copy, "-m", "fedgrove", "list", "data")
    assert listed.returncode == 0, listed.stderr
    # A line may end within a name, at its hyphen.
    packed = "".join(listed.stdout.split())
    for name, (_, reason) in BROKEN.items():
        assert f"{name}.pyisbroken" in packed
        assert reason.replace(" ", "") in packed
    names = {line.split()[0] for line in listed.stdout.splitlines() if line.strip()}
    assert set(data.names()) <= names


def test_runs_go_on_and_an_unknown_set_names_the_broken_files(copy: Path) -> None:
    words = ["--clients", "3", "--cohort", "2", "--rounds", "1", "--engine", "serial"]
    ran = python(copy, "-m", "fedgrove", "run", "fedavg", *words)
    assert ran.returncode == 0, ran.stderr
    refused = python(copy, "-m", "fedgrove", "run", "fedavg", "--data", "mine", *words)
    assert refused.returncode == 2
    assert "there is no data set 'mine'" in refused.stderr
    assert "syntax.py is broken, so its data sets are not available; SyntaxError" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_the_docs_are_not_written_without_the_broken_sets(copy: Path) -> None:
    written = python(copy, "tools/generate.py", "data-sets")
    assert written.returncode == 1
    assert "is broken, so its data sets are not available" in written.stderr
    assert "Traceback" not in written.stderr


def test_the_lists_of_methods_are_not_written_with_a_broken_one(copy: Path) -> None:
    broken = copy / "src" / "fedgrove" / "methods" / "broken.py"
    broken.write_text("def broken(:\n")
    try:
        for generator in ("stub", "methods"):
            written = python(copy, "tools/generate.py", generator)
            assert written.returncode == 1
            assert "method 'broken' is broken: " in written.stderr
            assert "Traceback" not in written.stderr
    finally:
        broken.unlink()
