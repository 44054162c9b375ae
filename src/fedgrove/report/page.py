"""The writer of all pages: a title, paragraphs, tables, plotly figures and notes in one file.

A page holds everything it needs, plotly's script too, so it opens offline and can be sent by mail.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import InputError, check

STYLE = """
body {
  font: 15px/1.5 system-ui, sans-serif;
  max-width: 1280px; margin: 2rem auto; padding: 0 1rem; color: #222
}
h1 { font-size: 1.5rem; margin-bottom: .2rem }
h2 { font-size: 1.1rem; margin: 2.2rem 0 .3rem }
.warning {
  background: #b00020; color: #fff;
  padding: .1rem .6rem; border-radius: .3rem; font-weight: 600
}
.scroll { overflow-x: auto }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums }
th, td {
  padding: .2rem .5rem; text-align: right; white-space: nowrap;
  border-bottom: 1px solid #e4e4e4
}
th:first-child, td:first-child { text-align: left }
th { border-bottom: 2px solid #888; white-space: normal; vertical-align: bottom }
small, li { color: #555 }
"""


def can_draw() -> bool:
    """Whether plotly, of the extra ``fedgrove[report]``, is installed."""
    return find_spec("plotly") is not None


def need_plotly(path: Path) -> None:
    """Refuse ``--plot`` before any work is done if the page cannot be written."""
    if not can_draw():
        raise InputError(
            "--plot was given and plotly is not installed; "
            "get it with: pip install 'fedgrove[report]'"
        )
    if not path.parent.is_dir():
        raise InputError(
            f"--plot is '{path}', and there is no folder '{path.parent}'; "
            "make it or name another file."
        )
    check(not path.is_dir(), "--plot", str(path), "a file, and this is a folder")


class Page:
    """A page that grows from top to bottom and is then written.

    >>> page = Page("Results", warning="two clients only")
    >>> page.paragraph("All methods.", small="Means over 3 seeds.")
    >>> page.table(["method", "accuracy %"], [["fedavg", "91.20"]])
    >>> "<td>91.20</td>" in page.html()
    True
    """

    def __init__(self, title: str, warning: str = "") -> None:
        """Begin a page; a warning stands in red below the title, and in the browser's tab."""
        self._tab = title
        self._blocks = [f"<h1>{escape(title)}</h1>"]
        self._has_script = False
        if warning:
            self._tab = f"{title}, {warning}"
            self._blocks.append(f'<p><span class="warning">{escape(warning)}</span></p>')

    def heading(self, text: str) -> None:
        """Begin a section."""
        self._blocks.append(f"<h2>{escape(text)}</h2>")

    def paragraph(self, text: str = "", small: str = "") -> None:
        """Add a text, and a text in small print on a line of its own below it."""
        lines = []
        if text:
            lines.append(escape(text))
        if small:
            lines.append(f"<small>{escape(small)}</small>")
        self._blocks.append(f"<p>{'<br>'.join(lines)}</p>")

    def figure(self, figure: Any) -> None:
        """Add a plotly figure."""
        # Plotly's script is 5 MB: it goes in with the first figure, and the others use it.
        drawing = figure.to_html(
            full_html=False,
            include_plotlyjs=not self._has_script,
            config={"displayModeBar": False},
        )
        self._has_script = True
        self._blocks.append(drawing)

    def table(self, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Add a table; its first column is aligned to the left, the others to the right."""
        lines = [_table_row("th", head)]
        for row in rows:
            lines.append(_table_row("td", row))
        # A wide table scrolls by itself, or it would push the whole page sideways.
        self._blocks.append(f"<div class=scroll><table>{''.join(lines)}</table></div>")

    def notes(self, notes: Sequence[str]) -> None:
        """Add a list of notes."""
        items = [f"<li>{escape(note)}</li>" for note in notes]
        self._blocks.append(f"<ul>{''.join(items)}</ul>")

    def html(self) -> str:
        """The whole page."""
        head = f'<meta charset="utf-8"><title>{escape(self._tab)}</title><style>{STYLE}</style>'
        body = "".join(self._blocks)
        return f"<!doctype html><html lang=en><head>{head}</head><body>{body}</body></html>\n"

    def write(self, path: Path) -> None:
        """Write the page whole or not at all; a page of before stays until the new one is there."""
        unfinished = path.with_name(path.name + ".part")
        # Bytes, because the page declares UTF-8 and a text file would follow the locale.
        unfinished.write_bytes(self.html().encode())
        os.replace(unfinished, path)


def _table_row(tag: str, cells: Sequence[str]) -> str:
    marked = [f"<{tag}>{escape(cell)}</{tag}>" for cell in cells]
    return f"<tr>{''.join(marked)}</tr>"
