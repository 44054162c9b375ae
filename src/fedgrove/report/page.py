"""The writer of all pages: a title, paragraphs, tables, figures and notes in one file.

A page holds everything it needs, its style and a small script too, so it opens offline and can be
sent by mail. Figures are SVG that :mod:`.figures` drew; the script adds what a pointer can do:
reading a point, hiding a series, sorting a table, light or dark. Without scripts all is still
there to read. Every text is escaped: a name with markup in it stays text.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from html import escape
from importlib.resources import files
from pathlib import Path

from ..errors import InputError, check
from .figures import COLOURS, Drawing

SHOWN = 100
"""Rows of a table that are seen at first: a page of ten thousand clients opens as fast."""
TALL = 16
"""A table of more rows scrolls in a box of its own, so that what follows is not far below."""
UNIT = re.compile(r"(\d) (%|[KMG]iB|k?B|m?s|min|h)(?!\w)")
"""A number and its unit."""
DARK = ":root[data-theme=dark]"
"""The selector in page.css of the colours for the dark."""


def check_place(path: Path, option: str = "--plot") -> None:
    """Refuse an option before any work is done if the page cannot be written where it says."""
    if not path.parent.is_dir():
        raise InputError(
            f"{option} is '{path}', and there is no folder '{path.parent}'; "
            "make it or name another file."
        )
    check(not path.is_dir(), option, str(path), "a file, and this is a folder")


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
            lines.append(_text(text))
        if small:
            lines.append(f"<small>{_text(small)}</small>")
        self._blocks.append(f"<p>{'<br>'.join(lines)}</p>")

    def lead(self, text: str) -> None:
        """Add the sentence that a reader should take home."""
        self._blocks.append(f"<p class=lead>{_text(text)}</p>")

    def tiles(self, tiles: Sequence[tuple[str, str]]) -> None:
        """Add figures in large print, each with what it is."""
        parts = [f"<div><b>{_text(v)}</b><span>{_text(what)}</span></div>" for v, what in tiles]
        self._blocks.append(f"<div class=tiles>{''.join(parts)}</div>")

    def progress(self, done: int, of: int) -> None:
        """Add a bar that says how far something is."""
        self._blocks.append(f"<progress max={max(1, of)} value={done}></progress>")

    def figures(self, *drawings: Drawing) -> None:
        """Add figures side by side where there is room, else below each other."""
        if not drawings:
            return
        parts = [_figure(drawing) for drawing in drawings]
        one = " one" if len(drawings) == 1 else ""
        self._blocks.append(f'<div class="figures{one}">{"".join(parts)}</div>')

    def table(
        self,
        head: Sequence[str],
        rows: Sequence[Sequence[str]],
        *,
        sortable: bool = False,
        keys: Sequence[str] = (),
    ) -> None:
        """Add a table; its first column is aligned to the left, the others to the right.

        A ``sortable`` one is sorted by the column that is clicked, and shows its first rows only if
        there are many. ``keys`` are what points of figures find the rows by.
        """
        lines = []
        for i, row in enumerate(rows):
            attributes = f' data-k="{escape(keys[i])}"' if keys else ""
            if sortable and i >= SHOWN:
                attributes += " hidden"
            lines.append(_table_row("td", row, attributes))
        kind = " class=sortable" if sortable else ""
        more = ""
        if sortable and len(rows) > SHOWN:
            kind += f' data-shown="{SHOWN}"'
            more = f'<button class="more plain">show all {len(rows):,} rows</button>'
        # A wide table scrolls by itself, or it would push the whole page sideways.
        tall = '"scroll tall"' if len(rows) > TALL else "scroll"
        self._blocks.append(
            f"<div class={tall}><table{kind}><thead>{_table_row('th', head)}</thead>"
            f"<tbody>{''.join(lines)}</tbody></table></div>{more}"
        )

    def code(self, text: str) -> None:
        """Add lines as they are typed."""
        self._blocks.append(f"<pre><code>{escape(text)}</code></pre>")

    def folded(self, title: str, text: str) -> None:
        """Add a text that a click unfolds, as it is, with a button that copies it."""
        self._blocks.append(
            f"<details><summary>{escape(title)}</summary><pre><code>{escape(text)}</code></pre>"
            '<button class="copy plain">copy</button></details>'
        )

    def notes(self, notes: Sequence[str]) -> None:
        """Add a list of notes."""
        items = [f"<li>{_text(note)}</li>" for note in notes]
        self._blocks.append(f"<ul>{''.join(items)}</ul>")

    def html(self) -> str:
        """The whole page."""
        _, script = _assets()
        # The script unhides it: without one there is nothing to switch.
        toggle = '<button id=theme class=plain hidden title="light or dark">◐</button>'
        return self._html(f"<script>{script}</script>", toggle)

    def html_without_script(self, refresh: int | None = None) -> str:
        """The whole page to be looked at only; it asks for itself again after so many seconds."""
        again = "" if refresh is None else f'<meta http-equiv="refresh" content="{refresh}">'
        return self._html(again, "")

    def _html(self, in_head: str, first: str) -> str:
        style, _ = _assets()
        head = (
            '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
            f"<title>{escape(self._tab)}</title><style>{style}</style>{in_head}"
        )
        body = first + "".join(self._blocks)
        return f"<!doctype html><html lang=en><head>{head}</head><body>{body}</body></html>\n"

    def write(self, path: Path) -> None:
        """Write the page whole or not at all; a page of before stays until the new one is there."""
        unfinished = path.with_name(path.name + ".part")
        try:
            # Bytes, because the page declares UTF-8 and a text file would follow the locale.
            unfinished.write_bytes(self.html().encode())
            os.replace(unfinished, path)
        finally:
            # Where it was renamed there is none any more.
            with suppress(OSError):
                unfinished.unlink()


def _text(text: str) -> str:
    """Escaped, and a unit stays with its number at the end of a line."""
    return UNIT.sub(r"\1&nbsp;\2", escape(text)).replace("± ", "±&nbsp;")


def _figure(drawing: Drawing) -> str:
    names = []
    for entry in drawing.legend:
        of = " ".join(str(i) for i in entry.of)
        names.append(
            f'<button class="c{entry.colour % COLOURS}" aria-pressed=true data-of="{of}">'
            f"<i></i>{escape(entry.name)}</button>"
        )
    legend = f"<div class=legend>{''.join(names)}</div>" if names else ""
    return f"<figure><figcaption>{escape(drawing.title)}</figcaption>{drawing.svg}{legend}</figure>"


def _table_row(tag: str, cells: Sequence[str], attributes: str = "") -> str:
    marked = [f"<{tag}>{escape(cell)}</{tag}>" for cell in cells]
    return f"<tr{attributes}>{''.join(marked)}</tr>"


@cache
def _assets() -> tuple[str, str]:
    """The style and the script of all pages."""
    folder = files(__package__)
    style = (folder / "page.css").read_text(encoding="utf-8")
    script = (folder / "page.js").read_text(encoding="utf-8")
    colours = [f".c{i}{{--c:var(--c{i})}}" for i in range(COLOURS)]
    # The dark colours once more, for a browser that runs no script and prefers them.
    begin = style.index(DARK)
    dark = style[begin : style.index("}", begin) + 1].replace(DARK, ":root:not([data-theme])")
    style += f"\n@media (prefers-color-scheme: dark) {{ {dark} }}\n{''.join(colours)}"
    return style, script
