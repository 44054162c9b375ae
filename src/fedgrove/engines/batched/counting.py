"""Processes that count what messages take, several at once, while the engine goes on.

These are reports, and what single clients are sent. The length of a message is found by writing it:
each layer is tried in several forms, by zstandard, numpy and hundreds of short calls from Python, 2
to 4 ms a client. Once a card trains a whole cohort in a few milliseconds, that is what a round
waits for.

*Why processes.* Threads would wait for Python's lock at each of those calls. A process has a lock
of its own, and what it needs is little: the numbers and the mask of each packet, the mask that its
receiver holds, and what the codec may do. They are copied into memory that both processes see,
which takes a tenth of the time to count them.

*Why fork.* A forked process is there at once, with all that is imported. One that is spawned
imports torch, for seconds, and with it the script that the user has started.

*When not.* A process must not fork once CUDA is at work in it: what the driver has locked and
pinned would be so in the copy too. So the processes start before the first exchange, once for all
engines of a process. Where CUDA has begun before, where there is no fork, or on fewer than four
cores, nobody counts but the engine.

They change no result. What a process could not count, or not in time, the engine counts itself, and
tells the error if there is one; a process that has died or hangs is asked no more. They know
nothing of the run, and end with the process that started them.
"""

from __future__ import annotations

import gc
import mmap
import multiprocessing as mp
import os
import pickle
import struct
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor

from ... import trees
from ...core import Answer, Packet, Report
from ...trees import Tree
from ...wire.codec import Chainable, Codec, CostByPart, KnownMask
from ...wire.message_costs import (
    NO_COSTS,
    BroadcastCosts,
    count_task_ahead,
    find_masks_known_to_client,
    find_masks_known_to_server,
)
from ...wire.tensors import AllowedForms
from ..pool import shared
from ..pool.engine import cores, default_start
from ..pool.message import Indices, packets_of, trees_of
from ..pool.worker import choose_signals, end_with, signals_held
from .stacking import Job

MOST = 8
"""No more processes by default; they get half of the cores."""
FEWEST_CORES = 4
"""With fewer cores no process is started by default."""
ROOM = 1 << 26
"""Bytes of memory that are shared with each process; those never used are never taken."""
WORTH_SENDING = 1 << 14
"""Bytes of a packet from which on to count them takes longer than to send them."""
AHEAD = 4
"""So many reports for each process are handed out before the first is asked for."""
FEW_RECEIVERS = 4
"""A packet to no more clients is handed out once for each of them: to send it takes less than to
count it here, and what they hold, on which its length depends, differs."""
MOST_WAITING = 64
"""So many orders of a process are under way at most. Some hundreds fill a pipe, and then the engine
would wait, without end, for a process that hangs or that waits for its answers to be read."""
PATIENCE = 30.0
"""Seconds within which a process must have counted what it was given first."""

Costs = Mapping[str, CostByPart]
"""What packets take, by name."""

WHERE = struct.Struct("<QQQ")
"""Where a parcel begins in the shared memory, and the bytes of its trees and of its order.

All that goes through a pipe: longer messages could fill that of a process which hangs, and so stop
the one that sends them.
"""


class Order(NamedTuple):
    """What a process is to count."""

    allow: AllowedForms
    """What the codec may do. Not the codec itself: the process may not have its class, or may have
    an older one of that name."""
    packets: Indices
    known: tuple[tuple[str, int, bytes], ...]
    """(packet name, index of the mask that its receiver holds, digest of that mask)."""
    places: shared.Index


class Parcel(NamedTuple):
    """An order, written, and the trees that it is about."""

    names: tuple[str, ...]
    """Of the packets."""
    forest: list[Tree]
    places: shared.Index
    size: int
    """Bytes that the trees take."""
    order: bytes

    @property
    def room(self) -> int:
        """Bytes that it takes in all, rounded up: the next one begins at an aligned place too."""
        return shared.aligned(self.size + len(self.order))


@dataclass(frozen=True)
class Stated(Chainable):
    """A codec of which is known what it may do, and no more."""

    stated: AllowedForms

    @property
    def allow(self) -> AllowedForms:
        """As it was stated."""
        return self.stated


# ---- in the process of the engine ----------------------------------------------------------------


@contextmanager
def lent(counters: Counters | None) -> Iterator[Counters | None]:
    """The processes, as long as nobody else has given them something to count."""
    # Locked during another map that has not come to its end, perhaps in another thread.
    if counters is None or not counters.lock.acquire(blocking=False):
        yield None
        return
    try:
        yield counters
    finally:
        # Where the caller wants no more: nothing may be written over what is still being read.
        try:
            for worker in counters.workers:
                worker.take_all()
        finally:
            # After Ctrl-C too, or nobody could be lent them again.
            counters.lock.release()


class Awaited(NamedTuple):
    """A packet of a task that is being counted, for a receiver that holds ``known``."""

    name: str
    packet: Packet
    known: KnownMask | None
    ticket: Ticket


def look_up_tasks(
    jobs: Sequence[Job], sent: BroadcastCosts, counters: Counters | None
) -> list[Awaited]:
    """Have what the jobs were sent counted, if they then hold what they do.

    What few are sent is handed out, for each of them; what many are sent is counted here, once.
    """
    receivers: Counter[int] = Counter()
    for job in jobs:
        for packet in job.task.send.values():
            receivers[id(packet.values)] += 1
    awaited: list[Awaited] = []
    for position, job in enumerate(jobs):
        codec = job.run.method.codec
        handed_out: list[Awaited] = []
        if counters is not None and _is_told(codec):
            # What goes wrong here goes wrong where it is counted in its turn, and is said there.
            with suppress(Exception):
                known = find_masks_known_to_client(job.task, codec, job.run.known_state)
                own: dict[str, Packet] = {}
                for name, packet in job.task.send.items():
                    if receivers[id(packet.values)] <= FEW_RECEIVERS:
                        own[name] = packet
                for name, ticket in counters.hand_out(position, codec, own, known).items():
                    handed_out.append(Awaited(name, own[name], known[name], ticket))
        awaited += handed_out
        names = {each.name for each in handed_out}
        count_task_ahead(job.task, codec, job.run.known_state, sent, leave_out=names)
    return awaited


def note_tasks(awaited: Iterable[Awaited], sent: BroadcastCosts) -> None:
    """Note what packets of tasks take; those that could not be counted are left out."""
    for name, packet, known, ticket in awaited:
        cost = ticket.costs().get(name)
        if cost is not None:
            sent.note(packet, known, cost)


def counted(
    answers: Iterable[tuple[Job, Answer]], counters: Counters | None
) -> Iterator[tuple[Job, Answer, Costs]]:
    """Each answer with what the packets of its report take, as far as processes have counted it.

    Reports are handed out ahead; the answers come in the order in which they were given.
    """
    if counters is None:
        for job, answer in answers:
            yield job, answer, NO_COSTS
        return
    waiting: deque[tuple[Job, Answer, Ticket]] = deque()
    failure: Exception | None = None
    try:
        for position, (job, answer) in enumerate(answers):
            if len(waiting) == AHEAD * len(counters.workers):
                first, its_answer, ticket = waiting.popleft()
                yield first, its_answer, ticket.costs()
            waiting.append((job, answer, _hand_out_report(counters, position, job, answer)))
    except Exception as error:
        # Raised when it is that job's turn.
        failure = error
    while waiting:
        first, its_answer, ticket = waiting.popleft()
        yield first, its_answer, ticket.costs()
    if failure is not None:
        raise failure


def _hand_out_report(counters: Counters, position: int, job: Job, answer: Answer) -> Ticket:
    """Have the report of a job counted, if there is one, and it is worth it."""
    codec = job.run.method.codec
    if not isinstance(answer, Report) or not _is_told(codec):
        return Ticket()
    try:
        masked = [name for name, packet in answer.give.items() if packet.mask is not None]
        known = find_masks_known_to_server(job.task, masked, codec, job.run.known_state.digest)
    except Exception:
        # As where what a client gives is no packet: counting it says so.
        return Ticket()
    tickets = counters.hand_out(position, codec, answer.give, known)
    # All its packets go together.
    return next(iter(tickets.values()), Ticket())


@dataclass(eq=False)
class Ticket:
    """What is still being counted, or was."""

    worker: Worker | None = None
    found: Costs | None = None

    def costs(self) -> Costs:
        """What was counted; the process is waited for. Nothing where it did not work."""
        if self.worker is not None and self.found is None:
            self.worker.take_until(self)
        return self.found or NO_COSTS


@dataclass(eq=False)
class Worker:
    """A process that counts, and what it has been given."""

    process: BaseProcess
    pipe: Connection
    memory: mmap.mmap
    """Shared with the process."""
    owner: int
    """The process that has started it."""
    used: int = 0
    """Bytes of it that are in use, from the first on."""
    has_ended: bool = False
    _tickets: deque[Ticket] = field(default_factory=deque)
    """Of what it has been given and not yet answered, in this order."""

    def __post_init__(self) -> None:
        self._buffer = torch.frombuffer(self.memory, dtype=torch.uint8)

    @property
    def is_usable(self) -> bool:
        """Whether it can be asked.

        Not in a process that was forked from its owner, perhaps between a question and its answer:
        it would read what the owner waits for.
        """
        return not self.has_ended and self.owner == os.getpid()

    def hand_out(self, parcel: Parcel) -> Ticket:
        """Have a parcel counted; where there is no room for it, after what came before."""
        if self.used + parcel.room > ROOM:
            self.take_all()
        if len(self._tickets) >= MOST_WAITING:
            self._take()
        if not self.is_usable:
            # It was given up while it was waited for.
            return Ticket()
        start = self.used
        at_order = start + parcel.size
        try:
            shared.write(parcel.forest, parcel.places, self._buffer[start:])
        except Exception:
            # A tensor of a strange kind, which is none of the process's business.
            return Ticket()
        self.memory[at_order : at_order + len(parcel.order)] = parcel.order
        self.used += parcel.room
        ticket = Ticket(self)
        try:
            self._tickets.append(ticket)
            self.pipe.send_bytes(WHERE.pack(start, parcel.size, len(parcel.order)))
        except BaseException as error:
            self._end_after(error)
        return ticket

    def take_until(self, ticket: Ticket) -> None:
        """Wait for what was counted for a ticket, and for those before it."""
        while ticket in self._tickets:
            self._take()

    def take_all(self) -> None:
        """Wait for all that was handed out; the memory is free again."""
        while self._tickets:
            self._take()
        self.used = 0

    def _take(self) -> None:
        """Wait for the next answer."""
        if not self.is_usable:
            self._tickets.clear()
            return
        try:
            ticket = self._tickets.popleft()
            if not self.pipe.poll(PATIENCE):
                raise TimeoutError
            ticket.found = pickle.loads(self.pipe.recv_bytes())
        except BaseException as error:
            self._end_after(error)

    def _end_after(self, error: BaseException) -> None:
        """End a process that does not answer, or of which is not known what it will answer next.

        As after Ctrl-C, which goes on: it may have come between an answer and its ticket.
        """
        self.end()
        if not isinstance(error, Exception):
            raise error

    def end(self) -> None:
        """End the process; nothing more is expected of it."""
        self.has_ended = True
        self._tickets.clear()
        self.pipe.close()
        # Not terminate(): a stopped process gets no other signal.
        self.process.kill()
        self.process.join()


@dataclass(eq=False)
class Counters:
    """The processes that count for this one."""

    workers: list[Worker]
    owner: int
    """The process that has started them."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held by whoever has given them something to count."""

    def hand_out(
        self,
        position: int,
        codec: Codec,
        packets: Mapping[str, Packet],
        known: Mapping[str, KnownMask | None],
    ) -> dict[str, Ticket]:
        """Have packets counted that are worth it: their names, with the ticket of all of them.

        ``known``: the masks that their receiver holds.
        """
        usable = [worker for worker in self.workers if worker.is_usable]
        parcel = _parcel(codec, packets, known) if usable else None
        if parcel is None or parcel.room > ROOM:
            return {}
        # By position: those who are alike come to the same process, and find its caches filled.
        ticket = usable[position % len(usable)].hand_out(parcel)
        return dict.fromkeys(parcel.names, ticket)

    def end(self) -> None:
        """End all processes."""
        for worker in self.workers:
            worker.end()


def _parcel(
    codec: Codec, packets: Mapping[str, Packet], known: Mapping[str, KnownMask | None]
) -> Parcel | None:
    """The packets that are worth sending; None where there are none."""
    if not _is_told(codec):
        return None
    try:
        worthy = {name: packet for name, packet in packets.items() if _is_worth_it(packet)}
        if not worthy:
            return None
        indices, forest = trees_of(worthy)
        known_masks = []
        for name in worthy:
            held = known.get(name)
            if held is not None:
                known_masks.append((name, len(forest), held.digest))
                forest.append(held.mask)
        if not all(trees.are_plain(*tree.values()) for tree in forest):
            return None
        places, size = shared.lay_out(forest)
        order = Order(codec.allow, indices, tuple(known_masks), places)
        return Parcel(tuple(worthy), forest, places, size, pickle.dumps(order))
    except Exception:
        # As where what a client gives is no packet: counting it says so.
        return None


def _is_told(codec: Codec) -> TypeGuard[Chainable]:
    """Whether a process can be told all that it must know of a codec."""
    return isinstance(codec, Chainable) and codec.is_defined_by_allow


def _is_worth_it(packet: Packet) -> bool:
    """Whether counting a packet takes longer than sending it."""
    return sum(leaf.nbytes for leaf in packet.values.values()) >= WORTH_SENDING


# ---- who counts for this process -----------------------------------------------------------------


_COUNTERS: Counters | None = None


def counters_of_this_process(wanted: int | None = None) -> Counters | None:
    """The processes that count for all engines here; those who ask first have them started.

    ``wanted``: how many, where the cores are not to decide. None if there are none.
    """
    global _COUNTERS
    # A process that was forked from this one has its variables, and needs processes of its own.
    if _COUNTERS is None or _COUNTERS.owner != os.getpid():
        number = default_number() if wanted is None else wanted
        _COUNTERS = Counters(_started(number), os.getpid())
    return _COUNTERS if _COUNTERS.workers else None


def end_counters() -> None:
    """End the processes; the next engine that asks has others started."""
    global _COUNTERS
    if _COUNTERS is not None and _COUNTERS.owner == os.getpid():
        _COUNTERS.end()
    _COUNTERS = None


def default_number() -> int:
    """Half of the cores, since the engine and others need some too."""
    return min(MOST, cores() // 2) if cores() >= FEWEST_CORES else 0


def _started(number: int) -> list[Worker]:
    """So many processes, or as many as can be started."""
    # A process of a pool may have no children.
    may_have_children = not mp.current_process().daemon
    can_fork = default_start() == "fork" and not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if not may_have_children or not can_fork:
        return []
    workers: list[Worker] = []
    try:
        for _ in range(number):
            workers.append(_start())
    except OSError:
        # Too many processes, or too little memory: those that there are do it.
        pass
    return workers


def _start() -> Worker:
    """A new process."""
    context = mp.get_context("fork")
    own_end, worker_end = context.Pipe()
    # Of no file and without a name: there is nothing that could be left behind.
    memory = mmap.mmap(-1, ROOM)
    process = context.Process(target=serve, args=(worker_end, memory, os.getpid()), daemon=True)
    # The process decides for itself what it does on a signal, before it gets one.
    with signals_held(), worker_end:
        process.start()
    return Worker(process, own_end, memory, os.getpid())


# ---- in a process that counts --------------------------------------------------------------------


def serve(pipe: Connection, memory: mmap.mmap, owner: int) -> None:
    """Count what is asked for, until the pipe closes."""
    choose_signals()
    _close_all_but(pipe.fileno())
    threading.Thread(target=end_with, args=(owner,), daemon=True).start()
    torch.set_num_threads(1)
    # What is there now stays, and pages that are shared need not be copied to look at it.
    gc.freeze()
    buffer = torch.frombuffer(memory, dtype=torch.uint8)
    try:
        while True:
            start, size, length = WHERE.unpack(pipe.recv_bytes())
            at_order = start + size
            costs = _costs(memory[at_order : at_order + length], buffer[start:])
            pipe.send_bytes(pickle.dumps(costs))
    except (EOFError, OSError):
        # The engine's process has closed its end.
        return


def _close_all_but(descriptor: int) -> None:
    """Close the files, locks and sockets that came with the fork.

    As long as they are open here, nobody else notices that the owner has closed them. What the
    owner writes errors to stays.
    """
    # Where they cannot be listed, they stay open.
    names = os.listdir("/dev/fd") if os.path.isdir("/dev/fd") else []
    for name in names:
        if int(name) > 2 and int(name) != descriptor:
            # One of them was for the list itself, and is gone.
            with suppress(OSError):
                os.close(int(name))


def _costs(order_bytes: bytes, buffer: Tensor) -> dict[str, CostByPart] | None:
    """What the packets of an order take; None where that cannot be said."""
    try:
        order: Order = pickle.loads(order_bytes)
        forest = shared.view(order.places, buffer)
        known = {name: KnownMask(forest[i], digest) for name, i, digest in order.known}
        codec = Stated(order.allow)
        costs: dict[str, CostByPart] = {}
        for name, packet in packets_of(order.packets, forest).items():
            costs[name] = dict(codec.cost(packet, known.get(name)))
        return costs
    except Exception:
        # Counted again where the error can be told.
        return None
