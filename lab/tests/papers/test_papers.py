"""The folder as a registry: which papers there are, their parts, and what their files may hold."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from fedgrove.errors import InputError
from fedgrove_lab import papers
from fedgrove_lab.papers.definition import RowDefinition, load_definition


@pytest.mark.parametrize("name", papers.names())
def test_every_name_that_a_file_uses_is_in_it(name: str) -> None:
    """A method, note or table of numbers with a slip in its name would be left out silently."""
    paper = load_definition(name)
    used: set[str] = set()
    for kind in ("table", "figure"):
        for number in getattr(paper, kind):
            part = paper.part(f"{kind}.{number}")
            for row in part.rows:
                used.update(row.reported)
            if part.numbers:
                used.add(part.numbers)
            for note in (*paper.every_note, *part.notes):
                # A note is a name, a value, or a sentence.
                assert note in paper.notes or note.startswith("$") or "." in note, note
    assert used == set(paper.reported)


def test_an_unknown_key_is_refused() -> None:
    with pytest.raises(ValidationError, match="lable"):
        RowDefinition(lable="x")  # type: ignore[call-arg]


def test_parts_by_number() -> None:
    assert list(papers.parts("ca-afp", 2, 3)) == ["table2", "figure3"]
    assert list(papers.parts("ca-afp", None, 4)) == ["figure4"]
    assert papers.names() == ["adfedwcp", "ca-afp", "fedapta", "fedlayerprune", "grove", "safl"]


def test_what_is_no_paper_and_no_part_is_refused() -> None:
    with pytest.raises(
        InputError,
        match=r"no paper 'study'\. There are: adfedwcp, ca-afp, fedapta, fedlayerprune, grove, safl\.",
    ):
        papers.find("study")
    with pytest.raises(InputError, match="safl has --table 1, 2, 3, 4 and --figure 7, 8"):
        papers.parts("safl", None, None)
    with pytest.raises(InputError, match="--figure is 9; it must be one of 2, 3, 4, those of ca"):
        papers.parts("ca-afp", 2, 9)
