"""``a+b``: the words of a federation of several data sets, one for all sets or one for each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..errors import InputError, check
from .reading import is_path

SIGN = "+"


def is_several(data: str) -> bool:
    """Whether the word names several sets; a file that is called so is one.

    >>> is_several("mnist+digits"), is_several("digits")
    (True, False)
    """
    return SIGN in data and not Path(data).exists()


def tasks_of(data: str) -> dict[str, str]:
    """The sets of ``a+b`` by the names of their tasks: that of a file is its own.

    >>> tasks_of("digits+my/own.npz")
    {'digits': 'digits', 'own': 'my/own.npz'}
    """
    sets = data.split(SIGN)
    check(all(sets), "data", data, "names with a + between them, as mnist+digits")
    names = [Path(each).stem if is_path(each) else each for each in sets]
    if len(set(names)) < len(names):
        raise InputError(f"data is {data!r}, which names a set twice; name each once.")
    return dict(zip(names, sets, strict=True))


def for_each(word: str, text: str | None, tasks: Sequence[str]) -> list[str | None]:
    """What a word says of each set: the same of all, or one after another.

    >>> for_each("partition", "iid+natural", ["digits", "motion"])
    ['iid', 'natural']
    """
    if text is None or SIGN not in text:
        return [text] * len(tasks)
    own = text.split(SIGN)
    allowed = f"one for all {len(tasks)} data sets, or one for each with + between them"
    check(len(own) == len(tasks), word, text, allowed)
    return [*own]


def shares(clients: int | None, tasks: Sequence[str]) -> list[int | None]:
    """How many clients each set has: as equal as can be, the first ones have one more.

    >>> shares(8, ["a", "b", "c"])
    [3, 3, 2]
    """
    if clients is None:
        return [None] * len(tasks)
    count = len(tasks)
    check(clients >= count, "clients", clients, f"at least {count}, one for each data set")
    return [clients // count + (place < clients % count) for place in range(count)]
