"""ASCII where a terminal or a file can do no more: words for signs, in place of an error."""

from __future__ import annotations

import codecs
import io
import sys

NAME = "fedgrove"
SIGNS = {
    "±": "+-",
    "×": "x",
    "·": "*",
    "²": "^2",
    "µ": "u",
    "≤": "<=",
    "≥": ">=",
    "→": "->",
    "–": "-",
    "—": "-",
    "…": "...",
    "Σ": "sum",
    "β": "beta",
    "γ": "gamma",
    "λ": "lambda",
    "μ": "mu",
    "₁": "1",
    "₂": "2",
    "─": "-",
    "━": "-",
    "│": "|",
    "┃": "|",
}
"""How signs are written with the letters that every terminal has; any other is a question mark."""


def write_ascii_where_needed() -> None:
    """Let stdout and stderr write signs that their encoding lacks in ASCII, and never fail."""
    codecs.register_error(NAME, replaced)
    for stream in (sys.stdout, sys.stderr):
        # Not those of a notebook or a test, which take any text.
        if isinstance(stream, io.TextIOWrapper) and not is_unicode(stream.encoding):
            stream.reconfigure(errors=NAME)


def is_unicode(encoding: str) -> bool:
    """Whether an encoding has every sign."""
    return encoding.lower().replace("-", "").replace("_", "").startswith("utf")


def replaced(error: UnicodeError) -> tuple[str, int]:
    """What stands for signs that cannot be encoded, and where to go on.

    >>> codecs.register_error(NAME, replaced)
    >>> "3 ± 1 é".encode("ascii", errors=NAME)
    b'3 +- 1 ?'
    """
    if not isinstance(error, UnicodeEncodeError):
        raise error
    signs = error.object[error.start : error.end]
    return "".join(SIGNS.get(sign, "?") for sign in signs), error.end
