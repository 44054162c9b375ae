"""What a run asks of torch and of Python while it trains: threads, and few garbage collections."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from ..seeds import single_thread

SMALL = 1 << 20
"""Parameters. What a server computes on a network with fewer takes one thread least time."""


def serving(parameters: int) -> AbstractContextManager[None]:
    """One torch thread for work on the trees of a small network, and as many as before on others.

    Leaves of ten thousand numbers are done before a second thread has woken up, and threads that
    wait for the next leaf keep cores from those that encode and train.
    """
    return single_thread() if parameters < SMALL else nullcontext()


NEW_OBJECTS = 20_000
"""So many objects more than before, and Python's garbage collector looks for cycles among them. A
round makes some ten thousand and lets go of them at its end."""


@contextmanager
def few_collections() -> Iterator[None]:
    """Fewer garbage collections than Python's default of one per 700 new objects.

    That would be ten in a round of ten clients, in which next to nothing is found: a tenth of the
    server's time. Every hundredth or so goes through all objects there are, which takes longer than
    a round.
    """
    first, *others = gc.get_threshold()
    # 0 turns the collector off, and whoever wants it seldom may have said so.
    is_changed = 0 < first < NEW_OBJECTS
    if is_changed:
        gc.set_threshold(NEW_OBJECTS, *others)
    try:
        yield
    finally:
        # Otherwise another run has set it, and may have ended and put it back.
        if is_changed:
            gc.set_threshold(first, *others)
