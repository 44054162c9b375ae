"""Every example in a docstring is run."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import fedgrove

FOUND = [m.name for m in pkgutil.walk_packages(fedgrove.__path__, "fedgrove.")]
MODULES = sorted(name for name in FOUND if not name.endswith("__main__"))


@pytest.mark.parametrize("name", ["fedgrove", *MODULES])
def test_examples_in_docstrings(name: str) -> None:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("fedgrove"):
            raise
        pytest.skip(f"needs the extra {error.name}")
    result = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    assert result.failed == 0


def test_there_are_examples() -> None:
    finder = doctest.DocTestFinder()
    found = [
        t
        for n in ("fedgrove.parts.local", "fedgrove.errors")
        for t in finder.find(importlib.import_module(n))
    ]
    assert sum(bool(t.examples) for t in found) >= 3
