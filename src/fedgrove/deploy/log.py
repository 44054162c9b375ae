"""What a server or a node says, one sentence a line, where Flower shows the output of its apps."""

from __future__ import annotations

import logging
import sys

LOG = logging.getLogger("fedgrove")


def show() -> None:
    """Write to stderr, unless the app has set up a log of its own."""
    if LOG.hasHandlers():
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("fedgrove: %(message)s"))
    LOG.addHandler(handler)
    LOG.setLevel(logging.INFO)
