"""What is remembered is what there is, and is read without torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fedgrove
from fedgrove import data, methods, nets
from fedgrove.cli import catalogue, main
from fedgrove.cli.catalogue import Index, fingerprint, read_index
from fedgrove.config.experiment import Experiment, Federations

HEAVY = ("torch", "sklearn", "scipy", "numpy")
PROGRAM = f"""
import sys
from fedgrove.cli import main
code = main()
print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)
sys.exit(code)
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder that holds the index."""
    folder: Path = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDGROVE_CACHE", str(folder))
        read_index()
    return folder


@pytest.fixture
def remembered(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    """The index as it is read from its file."""
    monkeypatch.setenv("FEDGROVE_CACHE", str(cache))

    def fail() -> None:
        raise AssertionError("found out again")

    monkeypatch.setattr(catalogue, "make_index", fail)
    return read_index()


def started(cache: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    source = str(Path(fedgrove.__file__).parents[1])
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *words],
        env={**os.environ, "PYTHONPATH": source, "FEDGROVE_CACHE": str(cache), **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_method_net_and_data_set_is_there_as_imported(remembered: Index) -> None:
    lists = remembered.lists
    presets = [f"{name}:{preset}" for name in methods.names() for preset in methods.presets(name)]
    assert sorted(name for name, _ in lists["methods"]) == sorted([*methods.names(), *presets])
    assert lists["data"] == [(name, data.describe(name)) for name in data.names()]
    assert lists["nets"] == [(name, nets.describe(name)) for name in nets.names()]
    assert set(remembered.recipes) == set(data.names())


@pytest.mark.parametrize("on", ["digits", "uci-har", "cifar10"])
def test_settings_are_those_of_the_methods(remembered: Index, on: str) -> None:
    for name, _ in remembered.lists["methods"]:
        method = methods.make(name)
        recipe = Federations().recipe(Experiment(method, on))
        assert remembered.settings_with(name, on) == catalogue.setting_rows(method, recipe)
        module = sys.modules[type(method).__module__]
        assert remembered.docstrings[name] == (module.__doc__ or "").strip()


@pytest.mark.parametrize(
    "words", [("list", "methods"), ("list", "data"), ("show", "ditto"), ("--help",)]
)
def test_no_command_that_only_reads_imports_torch(cache: Path, words: tuple[str, ...]) -> None:
    done = started(cache, *words)
    assert done.returncode == 0
    assert done.stdout
    assert done.stderr.splitlines() == ["[]"]


def test_completion_imports_no_torch(cache: Path) -> None:
    variables = {"_FEDGROVE_COMPLETE": "complete_bash", "COMP_CWORD": "2"}
    done = started(cache, COMP_WORDS="fedgrove run ca", **variables)
    assert done.stdout.split() == ["ca-afp", "ca-afp:paper", "caldas-dropout"]
    assert done.stderr.splitlines()[-1:] in ([], ["[]"])


def test_a_file_that_changes_makes_the_index_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.py").write_text("1")
    monkeypatch.setattr(catalogue, "PACKAGE_FOLDER", tmp_path)
    before = fingerprint()
    assert fingerprint() == before
    (tmp_path / "a.py").write_text("12")
    changed = fingerprint()
    (tmp_path / "b.py").touch()
    assert len({before, changed, fingerprint()}) == 3


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"fingerprint": 1}', b"\xff"])
def test_a_damaged_index_is_made_anew(
    damage: bytes, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (file,) = cache.iterdir()
    monkeypatch.setenv("FEDGROVE_CACHE", str(tmp_path))
    (tmp_path / file.name).write_bytes(damage)
    found = Index({"methods": [("a", "b")]}, {}, {}, {})
    monkeypatch.setattr(catalogue, "make_index", lambda: found)
    assert read_index() == found
    assert json.loads((tmp_path / file.name).read_text())["lists"] == {"methods": [["a", "b"]]}
    monkeypatch.delattr(catalogue, "make_index")
    assert read_index() == found


def test_without_a_cache_all_works_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FEDGROVE_CACHE", str(tmp_path / "file"))
    found: Any = Index({"methods": [("a", "b")]}, {}, {}, {})
    monkeypatch.setattr(catalogue, "make_index", lambda: found)
    assert main(["list", "methods"]) == 0
    assert capsys.readouterr().out.split() == ["a", "b"]
