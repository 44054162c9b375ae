"""One file per page, whole or not at all, that needs nothing but itself."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from fedgrove.report.page import Page


def without_blanks(page: Page) -> str:
    """The page without blanks between tags."""
    return re.sub(r">\s+<", "><", page.html()).strip()


def test_golden() -> None:
    page = Page("A & B", warning="a look <only>")
    page.paragraph("Two rows.", small="3 seeds")
    page.heading("x < y")
    page.table(["row", "%"], [["a & co", "1"], ["b", "2"]])
    page.notes(["one", "<two>"])
    head, body = without_blanks(page).split("</head>")
    # The tab says it too: a page that lies among others must not pass for a measurement.
    assert "<title>A &amp; B, a look &lt;only&gt;</title>" in head
    assert '<meta charset="utf-8">' in head
    assert body == (
        '<body><button id=theme class=plain hidden title="light or dark">◐</button>'
        "<h1>A &amp; B</h1>"
        '<p><span class="warning">a look &lt;only&gt;</span></p>'
        "<p>Two rows.<br><small>3 seeds</small></p>"
        "<h2>x &lt; y</h2>"
        '<div class="scroll"><table><thead><tr><th>row</th><th>%</th></tr></thead><tbody>'
        "<tr><td>a &amp; co</td><td>1</td></tr><tr><td>b</td><td>2</td></tr></tbody></table></div>"
        "<ul><li>one</li><li>&lt;two&gt;</li></ul></body></html>"
    )


def test_a_page_without_warning_or_small_print() -> None:
    page = Page("Title")
    page.paragraph("Text.")
    page.paragraph(small="Small.")
    assert "<title>Title</title>" in page.html()
    assert "<p>Text.</p><p><small>Small.</small></p>" in without_blanks(page)
    assert "<span" not in page.html()


def test_it_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "page.html"
    Page("first").write(path)

    def fails(source: Path, target: Path) -> None:
        assert "<h1>second ±</h1>" in source.read_text(encoding="utf-8")
        raise OSError("no room")

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(OSError, match="no room"):
        Page("second ±").write(path)
    assert "<h1>first</h1>" in path.read_text()
    monkeypatch.undo()
    Page("second ±").write(path)
    assert "<h1>second ±</h1>" in path.read_text(encoding="utf-8")
    assert [each.name for each in tmp_path.iterdir()] == ["page.html"]
