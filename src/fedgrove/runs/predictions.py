"""Predict every window of a recording with a model of a finished run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..data.arrays import OwnDataOptions
from ..data.dataset import Array, Floats, Ints, find_window_starts, number_runs, take_windows
from ..errors import InputError, check
from .model import Model

if TYPE_CHECKING:
    import pandas as pd

AT_ONCE = 4096
"""Windows that are copied at a time: overlapping windows need many times the memory of the rows."""


def predict_recording(
    model: Model, path: str | Path, given: Mapping[str, Any], client: str | None = None
) -> pd.DataFrame:
    """Predict each window of a recording; without windows, each row.

    The recording is read, filled and resampled as those of the run were, and a window never crosses
    a gap in time.

    Args:
        model: The model.
        path: A file with a table; a column with the label is not needed.
        given: How the data of the run were read: label, client, time, stride and fill.
        client: If the file has the column of clients, only the rows of this one are predicted.

    Returns:
        A row for each window: the line of the file and the time at which it starts, what is
        predicted, and for classes its probability.
    """
    from ..data.readers import read_recording

    prepared = model.preparation
    if len(model.shape) > 2 or (len(model.shape) == 2 and prepared.window is None):
        raise InputError(
            f"{model.who} takes inputs {model.shape}, not windows of a recording or rows; call "
            "predict of the model in Python."
        )
    options = OwnDataOptions(
        **given, window=prepared.window, channels=prepared.channels, rate=prepared.rate
    )
    table, recordings = read_recording(Path(path), options)
    if client is not None and options.client in table.frame:
        is_own = recordings.rows["client"] == client
        if not is_own.any():
            raise InputError(
                f"{table.source} has no row whose '{options.client}' is '{client}'; give a file "
                "with recordings of this client, or one without that column."
            )
        recordings = recordings.take(is_own.to_numpy())
    rows = recordings.rows
    channels = model.shape[0]
    check(
        recordings.signal.shape[1] == channels,
        "the number of input columns",
        recordings.signal.shape[1],
        f"{channels}, as in the run",
    )
    length = 1
    step = 1
    if options.window is not None:
        length = options.window
        step = options.step
    stretch = number_runs(rows["recording"].to_numpy(), rows["piece"].to_numpy())
    starts = find_window_starts(stretch, length, step)
    if not len(starts):
        raise InputError(
            f"{table.source} has no {length} rows without a gap, which is one window of the run; "
            "give a longer recording."
        )
    found = _predict(model, recordings.signal, starts, length)
    begin = rows.iloc[starts]
    where: dict[str, Any] = {str(table.frame.index.name or "row"): begin["line"].to_numpy()}
    clock = options.clock_in(list(table.frame))
    if clock is not None:
        where[clock] = table.frame[clock].loc[begin["line"]].to_numpy()
    # Imported here because pandas takes half a second; the reader has imported it by now.
    import pandas as pd

    return pd.DataFrame({**where, **found})


def _predict(model: Model, signal: Floats, starts: Ints, length: int) -> dict[str, Array]:
    """Return the columns of what is predicted for the windows of a recording."""
    parts = []
    for first in range(0, len(starts), AT_ONCE):
        inputs = take_windows(signal, starts[first : first + AT_ONCE], length)
        if len(model.shape) == 1:
            inputs = inputs[:, :, 0]
        if model.kind == "classes":
            parts.append(np.asarray(model.predict_proba(inputs)))
        else:
            parts.append(np.asarray(model.predict(inputs)).reshape(len(inputs), -1))
    outputs = np.concatenate(parts)
    if model.kind == "classes":
        return {
            "predicted": model.classes[outputs.argmax(axis=1)],
            "probability": outputs.max(axis=1),
        }
    return dict(zip(model.labels, outputs.T, strict=True))
