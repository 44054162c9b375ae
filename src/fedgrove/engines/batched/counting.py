"""Counting the bytes of messages in other processes, several at once, while the engine goes on.

They count reports, and messages to single clients. The length of a message is found by writing it:
each layer is tried in several forms, by zstandard, numpy and hundreds of short calls from Python, 2
to 4 ms per client. When a GPU trains a whole cohort in a few milliseconds, a round waits for this.

*Why processes.* Threads would wait for Python's lock at each of those calls. A process has another
lock, and it needs little: the numbers and the mask of each packet, the mask that its receiver
knows, and the forms that the codec allows. They are copied into shared memory, which takes a tenth
of the time of counting.

*Why fork.* A forked process exists at once, with everything imported. A spawned one imports torch,
which takes seconds, and the user's script.

*When not.* A process must not fork after CUDA has started in it, because the copy would have the
driver's locks and pinned memory. So the processes start before the first exchange, once for all
engines of a process. If CUDA has started before, if there is no fork, or with fewer than four
cores, the engine counts everything itself.

They change no result. What a process cannot count, or not in time, the engine counts itself, and
reports the error if there is one; a process that has died or hangs is not used again. They know
nothing about the run, and end with the process that started them.
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
from ..pool.message import Indices, list_trees, rebuild_packets
from ..pool.worker import delay_signals, exit_after, set_signals
from .jobs import ClientJob

MAX_PROCESSES = 8
"""The most processes by default; they get half of the cores."""
MIN_CORES = 4
"""With fewer cores no process is started by default."""
SHARED_BYTES = 1 << 26
"""Bytes of memory shared with each process; the system allocates them when they are used."""
WORTH_SENDING = 1 << 14
"""Bytes of a packet, from which on counting takes longer than sending it to a process."""
MAX_AHEAD_PER_WORKER = 4
"""The number of reports per process that are submitted ahead of the caller."""
FEW_RECEIVERS = 4
"""A packet for at most this many clients is submitted once for each of them: sending it is faster
than counting it here, and its length depends on what each client already knows."""
MAX_PENDING = 64
"""The most requests that a process has at once. Some hundreds fill a pipe, and then the engine
would wait forever for a process that hangs, or that waits for its answers to be read."""
TIMEOUT_SECONDS = 30.0
"""Seconds within which a process must answer its oldest request."""

Costs = Mapping[str, CostByPart]
"""The bytes of packets, by name."""

REQUEST_HEADER = struct.Struct("<QQQ")
"""Where a request begins in the shared memory, and the bytes of its trees and of its description.

Nothing else goes through a pipe: longer messages could fill the pipe of a process that hangs, and
so stop the sender.
"""


class CountRequest(NamedTuple):
    """What a process has to count."""

    allow: AllowedForms
    """The forms that the codec allows. Not the codec itself: the process may not have its class, or
    may have an older one of that name."""
    packets: Indices
    known: tuple[tuple[str, int, bytes], ...]
    """(packet name, index of the mask that its receiver knows, digest of that mask)."""
    places: shared.Index


class PackedRequest(NamedTuple):
    """A request as bytes, and its trees."""

    names: tuple[str, ...]
    """The names of the packets."""
    forest: list[Tree]
    places: shared.Index
    size: int
    """Bytes of the trees."""
    order: bytes

    @property
    def room(self) -> int:
        """Bytes of a counting request in shared memory, rounded up so that the next is aligned."""
        return shared.align(self.size + len(self.order))


@dataclass(frozen=True)
class DescribedCodec(Chainable):
    """A codec that is known only by the forms that it allows."""

    allowed_forms: AllowedForms

    @property
    def allow(self) -> AllowedForms:
        """The forms that the codec of a counting process allows."""
        return self.allowed_forms


# ---- in the process of the engine ----------------------------------------------------------------


@contextmanager
def borrow_counters(counters: Counters | None) -> Iterator[Counters | None]:
    """Lock the counting processes for one caller; yield None if another caller uses them."""
    # Locked during another map that has not ended, perhaps in another thread.
    if counters is None or not counters.lock.acquire(blocking=False):
        yield None
        return
    try:
        yield counters
    finally:
        # If the caller stopped early: requests that are being read must not be overwritten.
        try:
            for worker in counters.workers:
                worker.receive_all()
        finally:
            # After Ctrl-C too, or they could never be used again.
            counters.lock.release()


class PendingPacket(NamedTuple):
    """A packet of a task that is being counted, for a receiver that knows the mask ``known``."""

    name: str
    packet: Packet
    known: KnownMask | None
    ticket: Ticket


def start_counting_tasks(
    jobs: Sequence[ClientJob], sent: BroadcastCosts, counters: Counters | None
) -> list[PendingPacket]:
    """Start counting the bytes of the tasks' packets in other processes.

    Packets for few clients are submitted for each of them; packets for many are counted here once.
    """
    receivers: Counter[int] = Counter()
    for job in jobs:
        for packet in job.task.send.values():
            receivers[id(packet.values)] += 1
    pending: list[PendingPacket] = []
    for position, job in enumerate(jobs):
        codec = job.run.method.codec
        submitted: list[PendingPacket] = []
        if counters is not None and _can_describe(codec):
            # An error here occurs again when the packet is counted, and is reported there.
            with suppress(Exception):
                known = find_masks_known_to_client(job.task, codec, job.run.known_state)
                own: dict[str, Packet] = {}
                for name, packet in job.task.send.items():
                    if receivers[id(packet.values)] <= FEW_RECEIVERS:
                        own[name] = packet
                for name, ticket in counters.submit(position, codec, own, known).items():
                    submitted.append(PendingPacket(name, own[name], known[name], ticket))
        pending += submitted
        names = {each.name for each in submitted}
        count_task_ahead(job.task, codec, job.run.known_state, sent, leave_out=names)
    return pending


def record_task_costs(pending: Iterable[PendingPacket], sent: BroadcastCosts) -> None:
    """Record the bytes of packets of tasks, except those that could not be counted."""
    for name, packet, known, ticket in pending:
        cost = ticket.costs().get(name)
        if cost is not None:
            sent.note(packet, known, cost)


def attach_costs(
    answers: Iterable[tuple[ClientJob, Answer]], counters: Counters | None
) -> Iterator[tuple[ClientJob, Answer, Costs]]:
    """Yield each answer with the bytes of its packets, as far as processes have counted them.

    Reports are submitted ahead; the order of the answers does not change.
    """
    if counters is None:
        for job, answer in answers:
            yield job, answer, NO_COSTS
        return
    waiting: deque[tuple[ClientJob, Answer, Ticket]] = deque()
    failure: Exception | None = None
    try:
        for position, (job, answer) in enumerate(answers):
            if len(waiting) == MAX_AHEAD_PER_WORKER * len(counters.workers):
                first, its_answer, ticket = waiting.popleft()
                yield first, its_answer, ticket.costs()
            waiting.append((job, answer, _submit_report(counters, position, job, answer)))
    except Exception as error:
        # Raised when it is that job's turn.
        failure = error
    while waiting:
        first, its_answer, ticket = waiting.popleft()
        yield first, its_answer, ticket.costs()
    if failure is not None:
        raise failure


def _submit_report(counters: Counters, position: int, job: ClientJob, answer: Answer) -> Ticket:
    """Submit the report of a job, if there is one and it is large enough."""
    codec = job.run.method.codec
    if not isinstance(answer, Report) or not _can_describe(codec):
        return Ticket()
    try:
        masked = [name for name, packet in answer.give.items() if packet.mask is not None]
        known = find_masks_known_to_server(job.task, masked, codec, job.run.known_state.digest)
    except Exception:
        # For example a client that gives something else than a packet: counting reports it.
        return Ticket()
    tickets = counters.submit(position, codec, answer.give, known)
    # All its packets share a ticket.
    return next(iter(tickets.values()), Ticket())


@dataclass(eq=False)
class Ticket:
    """Stands for costs that a process counts, or has counted."""

    worker: CountingWorker | None = None
    found: Costs | None = None

    def costs(self) -> Costs:
        """Wait for the counting process and return the costs; none if it failed."""
        if self.worker is not None and self.found is None:
            self.worker.receive_until(self)
        return self.found or NO_COSTS


@dataclass(eq=False)
class CountingWorker:
    """A process that counts, and its requests."""

    process: BaseProcess
    pipe: Connection
    memory: mmap.mmap
    """Shared with the process."""
    owner: int
    """The id of the process that started it."""
    used: int = 0
    """Bytes of the memory in use, from the first on."""
    has_ended: bool = False
    _tickets: deque[Ticket] = field(default_factory=deque)
    """The tickets of unanswered requests, in order."""

    def __post_init__(self) -> None:
        self._buffer = torch.frombuffer(self.memory, dtype=torch.uint8)

    @property
    def is_usable(self) -> bool:
        """Whether this process can use the counting process.

        A process forked from the owner cannot: it would read answers that the owner waits for.
        """
        return not self.has_ended and self.owner == os.getpid()

    def submit(self, packed: PackedRequest) -> Ticket:
        """Have a counting process count a request; wait for earlier ones if there is no room."""
        if self.used + packed.room > SHARED_BYTES:
            self.receive_all()
        if len(self._tickets) >= MAX_PENDING:
            self._receive()
        if not self.is_usable:
            # It has ended while this waited for it.
            return Ticket()
        start = self.used
        at_order = start + packed.size
        try:
            shared.write(packed.forest, packed.places, self._buffer[start:])
        except Exception:
            # A tensor of a kind that cannot be shared.
            return Ticket()
        self.memory[at_order : at_order + len(packed.order)] = packed.order
        self.used += packed.room
        ticket = Ticket(self)
        try:
            self._tickets.append(ticket)
            self.pipe.send_bytes(REQUEST_HEADER.pack(start, packed.size, len(packed.order)))
        except BaseException as error:
            self._end_after(error)
        return ticket

    def receive_until(self, ticket: Ticket) -> None:
        """Wait for a counting process's answer to a ticket, and for those before it."""
        while ticket in self._tickets:
            self._receive()

    def receive_all(self) -> None:
        """Wait for all answers of a counting process; its shared memory is then free."""
        while self._tickets:
            self._receive()
        self.used = 0

    def _receive(self) -> None:
        """Wait for the next answer."""
        if not self.is_usable:
            self._tickets.clear()
            return
        try:
            ticket = self._tickets.popleft()
            if not self.pipe.poll(TIMEOUT_SECONDS):
                raise TimeoutError
            ticket.found = pickle.loads(self.pipe.recv_bytes())
        except BaseException as error:
            self._end_after(error)

    def _end_after(self, error: BaseException) -> None:
        """End a process that does not answer, or whose next answer is unknown.

        The latter is so after Ctrl-C, which is raised again: it may have come between an answer and
        its ticket.
        """
        self.end()
        if not isinstance(error, Exception):
            raise error

    def end(self) -> None:
        """End a counting process, and drop its requests."""
        self.has_ended = True
        self._tickets.clear()
        self.pipe.close()
        # Not terminate(): a stopped process would not get that signal.
        self.process.kill()
        self.process.join()


@dataclass(eq=False)
class Counters:
    """The processes that count for this one."""

    workers: list[CountingWorker]
    owner: int
    """The id of the process that started them."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Locked by the caller that uses them."""

    def submit(
        self,
        position: int,
        codec: Chainable,
        packets: Mapping[str, Packet],
        known: Mapping[str, KnownMask | None],
    ) -> dict[str, Ticket]:
        """Submit large packets to the counting processes; return their names with one ticket.

        Args:
            position: The position of the job, which decides the process.
            codec: Encodes the packets; its allowed forms describe it completely.
            packets: By name.
            known: The masks that their receiver knows, by name.
        """
        usable = [worker for worker in self.workers if worker.is_usable]
        packed = _pack_request(codec, packets, known) if usable else None
        if packed is None or packed.room > SHARED_BYTES:
            return {}
        # By position: similar packets come to one process, and find its caches filled.
        ticket = usable[position % len(usable)].submit(packed)
        return dict.fromkeys(packed.names, ticket)


def _pack_request(
    codec: Chainable, packets: Mapping[str, Packet], known: Mapping[str, KnownMask | None]
) -> PackedRequest | None:
    """Pack the packets that are large enough; None if there are none."""
    try:
        large = {name: packet for name, packet in packets.items() if _is_large(packet)}
        if not large:
            return None
        indices, forest = list_trees(large)
        known_masks = []
        for name in large:
            known_mask = known.get(name)
            if known_mask is not None:
                known_masks.append((name, len(forest), known_mask.digest))
                forest.append(known_mask.mask)
        if not all(trees.are_plain(*tree.values()) for tree in forest):
            return None
        places, size = shared.lay_out(forest)
        order = CountRequest(codec.allow, indices, tuple(known_masks), places)
        return PackedRequest(tuple(large), forest, places, size, pickle.dumps(order))
    except Exception:
        # For example a client that gives something else than a packet: counting reports it.
        return None


def _can_describe(codec: Codec) -> TypeGuard[Chainable]:
    """Return whether the allowed forms describe a codec completely."""
    return isinstance(codec, Chainable) and codec.is_defined_by_allow


def _is_large(packet: Packet) -> bool:
    """Return whether counting a packet takes longer than sending it."""
    return sum(leaf.nbytes for leaf in packet.values.values()) >= WORTH_SENDING


# ---- the processes that count for this one -------------------------------------------------------


_COUNTERS: Counters | None = None


def get_counters(wanted: int | None = None) -> Counters | None:
    """Return the counting processes of all engines in this process; the first call starts them.

    Args:
        wanted: Their number; None: it depends on the cores.

    Returns:
        None if there are no processes.
    """
    global _COUNTERS
    # A process forked from this one has a copy of the variable, and needs other processes.
    if _COUNTERS is None or _COUNTERS.owner != os.getpid():
        if wanted is None:
            wanted = choose_default_number()
        _COUNTERS = Counters(_start_workers(wanted), os.getpid())
    if not _COUNTERS.workers:
        return None
    return _COUNTERS


def choose_default_number() -> int:
    """Return how many counting processes to use: half the cores, as the engine needs some."""
    if cores() < MIN_CORES:
        return 0
    return min(MAX_PROCESSES, cores() // 2)


def _start_workers(number: int) -> list[CountingWorker]:
    """Start ``number`` processes, or fewer if the system refuses."""
    # A process of a pool may have no children.
    may_have_children = not mp.current_process().daemon
    can_fork = default_start() == "fork" and not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if not may_have_children or not can_fork:
        return []
    workers: list[CountingWorker] = []
    try:
        for _ in range(number):
            workers.append(_start())
    except OSError:
        # Too many processes, or too little memory: use those that started.
        pass
    return workers


def _start() -> CountingWorker:
    """Start a process."""
    context = mp.get_context("fork")
    own_end, worker_end = context.Pipe()
    # Without a file or a name, so that nothing can be left behind.
    memory = mmap.mmap(-1, SHARED_BYTES)
    process = context.Process(target=serve, args=(worker_end, memory, os.getpid()), daemon=True)
    # The process sets its own signal handlers before it gets a signal.
    with delay_signals(), worker_end:
        process.start()
    return CountingWorker(process, own_end, memory, os.getpid())


# ---- in a process that counts --------------------------------------------------------------------


def serve(pipe: Connection, memory: mmap.mmap, owner: int) -> None:
    """Answer counting requests in a worker process until the pipe closes."""
    set_signals()
    _close_all_but(pipe.fileno())
    threading.Thread(target=exit_after, args=(owner,), daemon=True).start()
    torch.set_num_threads(1)
    # Existing objects stay, and the collector must not copy shared pages by visiting them.
    gc.freeze()
    buffer = torch.frombuffer(memory, dtype=torch.uint8)
    try:
        while True:
            start, size, length = REQUEST_HEADER.unpack(pipe.recv_bytes())
            at_order = start + size
            costs = _costs(memory[at_order : at_order + length], buffer[start:])
            pipe.send_bytes(pickle.dumps(costs))
    except (EOFError, OSError):
        # The engine's process has closed its end.
        return


def _close_all_but(descriptor: int) -> None:
    """Close the files, locks and sockets that came with the fork.

    While they are open here, no other process notices that the owner has closed them. The standard
    streams stay open.
    """
    # If they cannot be listed, they stay open.
    names = os.listdir("/dev/fd") if os.path.isdir("/dev/fd") else []
    for name in names:
        if int(name) > 2 and int(name) != descriptor:
            # One of them was for the listing itself, and is closed already.
            with suppress(OSError):
                os.close(int(name))


def _costs(order_bytes: bytes, buffer: Tensor) -> dict[str, CostByPart] | None:
    """Count the bytes of the packets of a request; None if it fails."""
    try:
        order: CountRequest = pickle.loads(order_bytes)
        forest = shared.view(order.places, buffer)
        known = {name: KnownMask(forest[i], digest) for name, i, digest in order.known}
        codec = DescribedCodec(order.allow)
        costs: dict[str, CostByPart] = {}
        for name, packet in rebuild_packets(order.packets, forest).items():
            costs[name] = dict(codec.cost(packet, known.get(name)))
        return costs
    except Exception:
        # The engine counts them again, and reports the error.
        return None
