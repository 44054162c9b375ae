"""What notebooks show of objects: short tables as HTML."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from html import escape

MOST_ROWS = 30
"""Rows of a table in a notebook; of more, those in the middle are left out."""


def is_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return hasattr(shell, "kernel")


def show_table(title: str, rows: Sequence[Mapping[str, object]], notes: Sequence[str] = ()) -> str:
    """Return the HTML of a table in a notebook.

    Args:
        title: The line above it.
        rows: The cells of each row by the heads of their columns.
        notes: Lines below it.

    >>> print(show_table("<2 runs>", []))
    <p><b>&lt;2 runs&gt;</b></p>
    """
    parts = [f"<p><b>{escape(title)}</b></p>"]
    if rows:
        # Imported here because pandas takes half a second, and few processes are notebooks.
        import pandas as pd

        # Text, so that no number is changed.
        table = pd.DataFrame(list(rows)).fillna("").astype(str)
        parts.append(table.to_html(index=False, border=0, max_rows=MOST_ROWS))
    parts += [f"<p>{escape(note)}</p>" for note in notes]
    return "\n".join(parts)
