"""The folder as a registry: which of its modules are papers, and which of their parts there are."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

from fedgrove.errors import InputError
from fedgrove_lab import papers


def test_each_module_is_a_paper_or_is_named_as_none() -> None:
    for module in pkgutil.iter_modules(papers.__path__):
        is_paper = hasattr(importlib.import_module(f"fedgrove_lab.papers.{module.name}"), "PAPER")
        assert is_paper != (module.name in papers.NOT_PAPERS), module.name


def test_parts_by_number() -> None:
    assert list(papers.parts("ca-afp", 2, 3)) == ["table2", "figure3"]
    assert list(papers.parts("ca-afp", None, 4)) == ["figure4"]
    assert papers.names() == ["adfedwcp", "ca-afp", "fedapta", "fedlayerprune", "grove", "safl"]


def test_what_is_no_paper_and_no_part_is_refused() -> None:
    with pytest.raises(
        InputError,
        match=r"no paper 'studies'\. There are: adfedwcp, ca-afp, fedapta, fedlayerprune, grove, safl\.",
    ):
        papers.find("studies")
    with pytest.raises(InputError, match="safl has --table 1, 2, 3 and --figure 7, 8"):
        papers.parts("safl", None, None)
    with pytest.raises(InputError, match="--figure is 9; it must be one of 2, 3, 4, those of ca"):
        papers.parts("ca-afp", 2, 9)
