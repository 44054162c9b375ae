"""The model card: what the file next to it is, in Markdown, for readers who do not have the run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import __version__
from ..data.preparation import Preparation
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
    outputs = source.outputs(client, standardised)
    preparation = source.preparation(client)
    values = {
        "source": source,
        "exported": exported,
        "standardised": standardised,
        "version": __version__,
        "data": source.data(client),
        "takes_raw": source.takes_raw(client),
        "network": type(source.net.module).__name__,
        "sizes": ", ".join(map(str, source.federation.shape)),
        "file": exported.file,
        "outputs": outputs,
        "preparation": preparation,
        "is_smaller": rows["shrunk"].params < rows["dense"].params,
        "kind": outputs.problem.kind,
        "meaning": _explain_numbers(preparation, standardised),
        "score_unit": _name_score_unit(exported.metric, preparation),
        # Scores are shares, or in the units of the targets.
        "digits": "%.4f" if exported.share else "%.4g",
        "known": known,
    }
    return render("card.md", values, near=__file__)


def _explain_numbers(preparation: Preparation, standardised: bool) -> str:
    """Say in which units predicted numbers are."""
    ahead = preparation.ahead
    if ahead is None:
        return "in the units in which the targets were given"
    samples = f"the next {ahead} samples of each channel"
    if standardised:
        return f"{samples}, standardised as the inputs are"
    return f"{samples}, in the units of the recordings"


def _name_score_unit(metric: str, preparation: Preparation) -> str:
    """Say in which units an error is; of a metric made in Python that is not known."""
    if metric not in ("mae", "rmse"):
        return ""
    if preparation.ahead is not None and preparation.mean is not None:
        return "; errors are in standard deviations of the client's channels"
    return "; errors are in the units of the targets"
