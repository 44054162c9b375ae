"""What a person sees before the first round: a line that says what is waited for.

Nothing here takes time to import, as the line is there before torch is.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TextIO

ERASE = "\r\033[K"
"""Back to the beginning of the line, and delete it."""


@contextmanager
def starting(what: str, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """Say on stderr what is waited for, and give a function that says what comes next.

    On a terminal only: one line, which is gone at the end. A log gets its first line with the run.
    """
    is_shown = not quiet and is_live(sys.stderr)

    def say(words: str) -> None:
        if is_shown:
            sys.stderr.write(f"{ERASE}fedgrove: {words} ...")
            sys.stderr.flush()

    say(what)
    try:
        yield say
    finally:
        if is_shown:
            sys.stderr.write(ERASE)
            sys.stderr.flush()


def load_torch(quiet: bool = False) -> None:
    """Import torch, which takes a second or two, and say so meanwhile."""
    with starting("loading torch", quiet):
        import_module("torch")


def is_live(stream: TextIO) -> bool:
    """Whether a line can be written over on this stream: a terminal that can do that."""
    is_dumb = os.environ.get("TERM", "").lower() in ("dumb", "unknown")
    return stream.isatty() and not is_dumb
