"""Errors, in sentences: what was given, what is allowed, what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FedgroveError(Exception):
    """Any error that fedgrove raises on purpose; its text is a sentence for the user."""


class InputError(FedgroveError, ValueError):
    """A name, value or file that cannot be used. The command line prints it, exit code 2."""


class UnfitError(InputError):
    """A network that a method cannot use as it is; says why, and what would do."""


class MethodError(InputError):
    """An error in a method of the user's own; says which function, and where."""


class MissingError(InputError):
    """A data set whose files are nowhere; files that are there and wrong are another matter."""


class DamageError(InputError):
    """A file of a run folder that is missing, or is not what was written."""


class FolderWarning(UserWarning):
    """What was found wrong in a run folder and could be put right."""


class WireError(FedgroveError, ValueError):
    """Bytes that are not what they claim to be."""


class NotHeld(WireError):
    """Bytes that refer to a mask their reader does not hold; ``packets``: which of a message do."""

    def __init__(self, sentence: str, packets: tuple[str, ...] = ()) -> None:
        super().__init__(sentence)
        self.packets = packets


class EngineError(FedgroveError, RuntimeError):
    """Work that an engine could not finish: a worker died, every update was refused."""


def unknown(kind: str, given: str, allowed: Iterable[str]) -> InputError:
    """The error for an unknown name: it suggests the nearest name and lists all.

    >>> print(unknown("method", "fedavgg", ["fedavg", "local"]))
    there is no method 'fedavgg'; did you mean 'fedavg'? There are: fedavg, local.
    """
    names = sorted(allowed)
    # Below difflib's default cutoff of 0.6: a wrong suggestion costs little, since all names are
    # listed behind it.
    nearest = difflib.get_close_matches(given, names, n=1, cutoff=0.4)
    hint = f"; did you mean '{nearest[0]}'?" if nearest else "."
    listed = ", ".join(names) or "none"
    return InputError(f"there is no {kind} '{given}'{hint} There are: {listed}.")


def check(ok: bool, name: str, given: object, allowed: str) -> None:
    """Raise an :class:`InputError` unless ``ok``, with the range that is allowed.

    >>> check(0.5 <= 1, "density", 0.5, "in (0, 1]")
    >>> check(-1 > 0, "lr", -1, "above 0")
    Traceback (most recent call last):
    fedgrove.errors.InputError: lr is -1; it must be above 0.
    """
    if not ok:
        raise InputError(f"{name} is {given!r}; it must be {allowed}.")
