"""What a worker process of the pool does."""

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
from ..work import CLIENT_FAILURES, crashed, explained, perform, unreadable, with_memory
from . import shared
from .message import Envelope, Failed, packets_of, strip
from .packing import PackedRuns, unpack
from .shared import Block

SIGNALS = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
]
"""What ends a run from outside; Windows has no SIGHUP."""


@contextmanager
def signals_held() -> Iterator[None]:
    """Signals wait until this is over, and in a process that begins here until it asks for them."""
    if not hasattr(signal, "pthread_sigmask"):
        # On Windows.
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def serve(
    pipe: Connection, inherited: list[Connection], runs: list[Run] | PackedRuns, server: int
) -> None:
    """The loop of a worker: receive a task, do it, answer; ends when the pipe closes."""
    choose_signals()
    # Inherited by the fork. If workers held them open, no worker would see the pipe close when the
    # server dies.
    for server_end in inherited:
        server_end.close()
    threading.Thread(target=end_with, args=(server,), daemon=True).start()
    torch.set_num_threads(1)
    try:
        if isinstance(runs, PackedRuns):
            runs = unpack(runs)
    except EngineError as error:
        pipe.send(Failed(str(error)))
        return
    # All that is there now stays: the garbage collector need not look at it again and again, and
    # where it does not, no page that is shared with the server has to be copied.
    gc.freeze()
    try:
        # That it has started.
        pipe.send(None)
        while True:
            run_index, envelope, blocks, reply = pipe.recv()
            pipe.send_bytes(answer(runs[run_index], envelope, blocks, reply))
    except (EOFError, OSError):
        # The server has closed its end.
        return


def choose_signals() -> None:
    """What a worker does on signals, which it could not get so far."""
    for number in SIGNALS:
        # Ctrl-C, and the end of a terminal, reach every process: they are for the server to handle.
        signal.signal(number, signal.SIG_IGN)
    # Not the server's own handler, which a fork inherits.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def end_with(server: int) -> None:
    """End this process when the server has ended, also in the middle of a job."""
    while os.getppid() == server:
        time.sleep(1)
    os._exit(1)


def answer(run: Run, envelope: Envelope, blocks: list[Block], reply: str) -> bytes:
    """Do one task: its report and the block with the report's trees, or what became of it."""
    try:
        forest = []
        for block in blocks:
            # The server shares each tree of a task in a block of its own.
            (tree,) = shared.get(block)
            forest.append(tree)
        task: Task = replace(envelope.body, send=packets_of(envelope.packets, forest))
        memory = run.memory.read(task.to, task.memory)
        try:
            report, remembered = perform(run, task, memory)
        except CLIENT_FAILURES as error:
            return pickle.dumps(crashed(task, error))
        outcome = with_memory(run, task, report, remembered)
        if isinstance(outcome, Lost):
            return pickle.dumps(outcome)
        return _written(run, task, outcome, reply)
    except (FedgroveError, OSError) as error:
        # Not the client's fault: memory that cannot be read, a full disk or shared memory.
        return pickle.dumps(Failed(explained(error)))


def _written(run: Run, task: Task, report: Report, reply: str) -> bytes:
    """A report, its trees in the block called ``reply``; one that cannot be written is lost."""
    try:
        cost = {"up": count_report(task, report, run.method.codec, run.known_state)}
        body, forest = strip(replace(report, cost=cost))
        return pickle.dumps((body, shared.put(forest, reply)))
    except shared.SharedMemoryFull:
        raise
    except Exception as error:
        return pickle.dumps(unreadable(task, error))
