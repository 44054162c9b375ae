"""A worker process of the pool: its loop, its signals, and how it does a task."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection

import torch

from ...core import Lost, Report, Task
from ...errors import EngineError, FedgroveError
from ...runs.run import Run
from ...wire.message_costs import count_report
from ..work import explain_error, lose_unreadable, perform_and_remember
from . import shared
from .message import Envelope, Failed, PackedRuns, rebuild_packets, strip, unpack_runs
from .shared import Block

STOP_SIGNALS = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
]
"""The signals that end a run from outside; Windows has no SIGHUP."""


@contextmanager
def delay_signals() -> Iterator[None]:
    """Delay signals while the pool starts workers, until the block ends.

    A process started in it delays them until it unblocks.
    """
    if not hasattr(signal, "pthread_sigmask"):
        # On Windows.
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def serve(
    pipe: Connection, inherited: list[Connection], runs: list[Run] | PackedRuns, server: int
) -> None:
    """Work in a process of the pool: receive tasks and answer, until the pipe closes."""
    set_signals()
    # Inherited by the fork. If workers kept them open, no worker would see its pipe close when the
    # server dies.
    for server_end in inherited:
        server_end.close()
    threading.Thread(target=exit_after, args=(server,), daemon=True).start()
    torch.set_num_threads(1)
    try:
        if isinstance(runs, PackedRuns):
            runs = unpack_runs(runs)
    except EngineError as error:
        pipe.send(Failed(str(error)))
        return
    # All objects so far stay alive, so the garbage collector can skip them. It would also write to
    # memory that is shared with the server, which copies it.
    gc.freeze()
    try:
        # This worker has started.
        pipe.send(None)
        while True:
            run_index, envelope, blocks, reply = pipe.recv()
            pipe.send_bytes(do_task(runs[run_index], envelope, blocks, reply))
    except (EOFError, OSError):
        # The server has closed its end.
        return


def set_signals() -> None:
    """Set what this worker does on signals, and unblock them."""
    for number in STOP_SIGNALS:
        # Ctrl-C and a closed terminal reach every process; the server handles them.
        signal.signal(number, signal.SIG_IGN)
    # A fork inherits the server's handler, which is not for workers.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def exit_after(server: int) -> None:
    """Exit when the server process has ended, even in the middle of a job."""
    while os.getppid() == server:
        time.sleep(1)
    os._exit(1)


def do_task(run: Run, envelope: Envelope, blocks: list[Block], reply: str) -> bytes:
    """Do one task in a worker; return the pickled answer.

    The block ``reply`` gets the report's trees.
    """
    try:
        forest = []
        for block in blocks:
            # The server puts each tree of a task into a separate block.
            (tree,) = shared.get(block)
            forest.append(tree)
        task: Task = replace(envelope.body, send=rebuild_packets(envelope.packets, forest))
        outcome = perform_and_remember(run, task)
        if isinstance(outcome, Lost):
            return pickle.dumps(outcome)
        return _write_report(run, task, outcome, reply)
    except (FedgroveError, OSError) as error:
        # Not the client's fault: memory that cannot be read, a full disk or shared memory.
        return pickle.dumps(Failed(explain_error(error)))


def _write_report(run: Run, task: Task, report: Report, reply: str) -> bytes:
    """Return a pickled report without its trees; a report that cannot be encoded is lost."""
    try:
        cost = {"up": count_report(task, report, run.method.codec, run.known_state)}
        body, forest = strip(replace(report, cost=cost))
        return pickle.dumps((body, shared.put(forest, reply)))
    except shared.SharedMemoryFull:
        raise
    except Exception as error:
        return pickle.dumps(lose_unreadable(task, error))
