"""``fedgrove predict``: what a client's model predicts for each window of a recording."""

from __future__ import annotations

import sys
from dataclasses import KW_ONLY, field
from pathlib import Path
from typing import Any

from ..errors import InputError, list_some
from ..options.definition import Options, argument, option, option_class
from ..options.groups import JsonOption, TrustOption


@option_class
class PredictOptions(Options, JsonOption, TrustOption):
    """Options of ``fedgrove predict``."""

    run: str = field(metadata=argument("A run folder.", "RUN", complete="runs"))
    file: str = field(
        metadata=argument("A recording: a CSV file (also .csv.gz) or parquet.", "FILE")
    )
    _: KW_ONLY
    client: str | None = option(
        None,
        "The client whose model predicts: a number or a name.",
        "K",
        without="the model that all clients share",
    )
    stride: int | None = option(
        None,
        "Number of rows from one window to the next.",
        "N",
        without="as in the run",
        allowed="1 or more",
        check=lambda stride: stride >= 1,
    )
    time: str | None = option(
        None, "The column to sort the rows by, as in t or t:ms.", "COLUMN", without="as in the run"
    )
    fill: str | None = option(
        None,
        "What empty cells become: mean, zero or previous; drop leaves out rows with empty cells.",
        "KIND",
        without="as in the run",
    )
    out: str | None = option(
        None, "The CSV file to write.", "FILE", without="the predictions are printed"
    )


def predict(options: PredictOptions) -> None:
    """Predict each window of a recording with a client's model.

    Prints CSV with a line for each window: the line of the file and the time at which it starts,
    what is predicted, and its probability. The recording is prepared as those of the run were:
    sorted, filled and resampled.
    """
    from ..api import load_run
    from ..config.toml import check_trust

    options.check()
    if options.out is not None and Path(options.out).exists():
        raise InputError(f"the file {options.out} exists; give a different name.")
    result = load_run(options.run, trust=options.trust)
    # The method's code is not run.
    check_trust(result.folder.config, result.folder.path, options.trust, ["method"])
    if options.client is None:
        clients = result.clients()
        if {row["group"] for row in clients} != {0}:
            names = list_some([str(row["name"]) for row in clients])
            raise InputError(
                f"{options.run} has no model for all clients; give --client K, one of: {names}."
            )
    found = result.predict(
        options.file,
        options.client,
        stride=options.stride,
        time=options.time,
        fill=options.fill,
    )
    # The column may be followed by its unit, as in t:ms.
    clock = (options.time or result.folder.options.get("time") or "").partition(":")[0]
    if options.json:
        print(found.to_json(orient="records", indent=1, force_ascii=False))
        return
    try:
        _shorten_numbers(found, clock).to_csv(options.out or sys.stdout, index=False)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise InputError(
            f"{options.out} cannot be written ({error.strerror or error}); give a different name."
        ) from None
    if options.out is not None:
        print(f"{options.out}: {len(found)} windows")


def _shorten_numbers(found: Any, clock: str) -> Any:
    """Return predictions with six digits; times keep all, since they may count from 1970."""
    shortened = found.copy()
    for column in found.columns:
        if column != clock and found[column].dtype.kind == "f":
            shortened[column] = found[column].map("{:.6g}".format)
    return shortened
