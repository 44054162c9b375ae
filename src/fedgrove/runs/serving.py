"""How many threads torch has while a server takes reports."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from ..seeds import one_thread

SMALL = 1 << 20
"""Parameters. What a server computes on a network with fewer takes one thread least time."""


def serving(parameters: int) -> AbstractContextManager[None]:
    """One torch thread for work on the trees of a small network, and as many as before on others.

    Leaves of ten thousand numbers are done before a second thread has woken up, and threads that
    wait for the next leaf keep cores from those that encode and train.
    """
    return one_thread() if parameters < SMALL else nullcontext()
