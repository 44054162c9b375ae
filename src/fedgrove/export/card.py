"""The model card: what the file next to it is, in Markdown, for readers who do not have the run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import __version__
from ..data.sets import SETS
from ..report.page import render
from .figures import Exported

if TYPE_CHECKING:
    from .source import Source


def card(source: Source, exported: Exported, standardised: bool) -> str:
    """Return the model card of an exported file; ``standardised`` if its inputs are already."""
    client = exported.client
    rows = {row.version: row for row in exported.rows}
    # A federation made in Python has a name of its own, which no known data set need have.
    known = SETS.get(source.federation.name)
    values = {
        "source": source,
        "exported": exported,
        "standardised": standardised,
        "version": __version__,
        "data": source.data(client),
        "preparation": source.preparation(client),
        "takes_raw": source.takes_raw(client),
        "network": type(source.net.module).__name__,
        "sizes": ", ".join(map(str, source.federation.shape)),
        "shrunk": rows["shrunk"],
        "is_smaller": rows["shrunk"].params < rows["dense"].params,
        "known": known,
    }
    return render("card.md", values, near=__file__)
