"""What goes wrong, in sentences: what was given, what is allowed, what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FedgroveError(Exception):
    """Anything fedgrove refuses; its text is a sentence for the person who asked."""


class InputError(FedgroveError, ValueError):
    """A name, value or file that cannot be used. The command line prints it and ends with code 2."""


class WireError(FedgroveError, ValueError):
    """Bytes that are not what they claim to be."""


class EngineError(FedgroveError, RuntimeError):
    """Work that an engine could not finish: a worker died, every update was refused."""


def unknown(kind: str, given: str, allowed: Iterable[str]) -> InputError:
    """Say that a name is not known, which one is nearest, and what there is.

    >>> print(unknown("method", "fedavgg", ["fedavg", "local"]))
    there is no method 'fedavgg'; did you mean 'fedavg'? There are: fedavg, local.
    """
    names = sorted(allowed)
    near = difflib.get_close_matches(given, names, n=1, cutoff=0.4)
    hint = f"; did you mean '{near[0]}'?" if near else "."
    return InputError(
        f"there is no {kind} '{given}'{hint} There are: {', '.join(names) or 'none'}."
    )


def check(ok: bool, name: str, given: object, allowed: str) -> None:
    """Refuse an impossible value by naming its range.

    >>> check(0.5 <= 1, "density", 0.5, "in (0, 1]")
    >>> check(-1 > 0, "lr", -1, "above 0")
    Traceback (most recent call last):
    fedgrove.errors.InputError: lr is -1; it must be above 0.
    """
    if not ok:
        raise InputError(f"{name} is {given!r}; it must be {allowed}.")
