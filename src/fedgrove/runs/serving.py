"""How the process is set while a server takes reports: threads, and Python's garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from ..seeds import one_thread

SMALL = 1 << 20
"""Parameters. What a server computes on a network with fewer takes one thread least time."""
COLLECT_AFTER = 100_000
"""New objects, before Python looks for cycles among them."""


@contextmanager
def serving(parameters: int) -> Iterator[None]:
    """Take the reports of an exchange, on a network of so many parameters."""
    with _threads_for(parameters), _rare_collections():
        yield


def _threads_for(parameters: int) -> AbstractContextManager[None]:
    """One torch thread for work on the trees of a small network, and as many as before on others.

    Leaves of ten thousand numbers are done before a second thread has woken up, and threads that
    wait for the next leaf keep cores from those that encode and train.
    """
    return one_thread() if parameters < SMALL else nullcontext()


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Look for cycles less often.

    A report is hundreds of objects, few of them in cycles, and to look at all there are after
    every 700 took a tenth of the time.
    """
    before = gc.get_threshold()
    # 0: whoever set it wants none at all.
    if before[0]:
        gc.set_threshold(max(before[0], COLLECT_AFTER), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
