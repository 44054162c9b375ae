"""Files and blocks of pages that tools/generate.py writes are current."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "tools" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # What generators import is this module.
    sys.modules["generate"] = module
    spec.loader.exec_module(module)
    return module


def generators() -> list[str]:
    text = (ROOT / "tools" / "generate.py").read_text()
    block = text.split("GENERATORS = {", 1)[1].split("}", 1)[0]
    return [line.split('"')[1] for line in block.splitlines() if '"' in line]


@pytest.mark.parametrize("name", generators())
def test_what_is_generated_is_current(tool: ModuleType, name: str) -> None:
    """If this fails: python tools/generate.py"""
    if name == "results":
        pytest.importorskip("fedgrove_lab")
    outdated = [str(path.relative_to(ROOT)) for path in tool.outdated([name])]
    assert not outdated, f"outdated: {outdated}; write them with: python tools/generate.py {name}"


def test_a_change_is_noticed(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    path = ROOT / "README.md"
    monkeypatch.setattr(tool, "find_generator", lambda name: lambda: {path: "another text"})
    assert tool.outdated(["any"]) == {path: "another text"}
