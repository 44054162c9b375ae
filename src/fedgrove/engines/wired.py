"""Serial, but every message becomes bytes and is read back: what a network would carry.

Each side uses only what it sent or received itself. Codecs are lossless, so the results are those
of :class:`~fedgrove.engines.serial.Serial`, and the bytes are those it counts; but a client that
lost the masks it held says so, and is sent its task again.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

from ..core import Answer, Cost, Job, Lost, Task
from ..errors import EngineError, UnknownMask, WireError
from ..runs.run import Run
from ..wire.codec import Codec, KnownMask, hash_mask
from ..wire.known_state import StoredMask
from ..wire.ledger import Ledger
from ..wire.message import (
    ResendRequest,
    read_answer,
    read_task,
    write_report,
    write_resend_request,
    write_task,
)
from ..wire.message_costs import (
    BroadcastCosts,
    count_report,
    count_task,
    find_masks_known_to_client,
    find_masks_known_to_server,
    list_masks_to_remember,
)
from .work import CLIENT_FAILURES, crashed, late, perform, unreadable, with_memory


@dataclass(eq=False)
class Wired:
    """Every task and report through real bytes, one client after another.

    A client that takes longer than ``timeout`` seconds is lost.
    """

    timeout: float | None = None
    name: str = field(default="wired", init=False)

    def __post_init__(self) -> None:
        # What the clients themselves hold, apart from what the server believes (run.known_state).
        self._clients: WeakKeyDictionary[Run, dict[int, _Masks]] = WeakKeyDictionary()

    def map(self, jobs: Iterable[Job]) -> Iterator[tuple[Job, Answer]]:
        """Do each job when its answer is asked for."""
        broadcasts = BroadcastCosts()
        for job in jobs:
            run, task = job
            yield job, self._exchange(run, task, broadcasts)

    def _exchange(self, run: Run, task: Task, broadcasts: BroadcastCosts) -> Answer:
        """A task to its client and the answer back, both as bytes."""
        started = time.monotonic()
        codec = run.method.codec
        spent = Ledger()
        received = self._deliver(run, task, broadcasts, spent)

        # On the client, which goes back to the version of its memory that the header names.
        memory = run.memory.read(received.to, received.memory)
        try:
            report, remembered = perform(run, received, memory)
        except CLIENT_FAILURES as error:
            return replace(crashed(task, error), cost=_cost(spent))
        outcome = with_memory(run, received, report, remembered)
        if isinstance(outcome, Lost):
            return replace(outcome, cost=_cost(spent))
        report = outcome

        # Up. Both sides know the masks of the task itself.
        try:
            up = count_report(task, report, codec, run.known_state)
            masked = [name for name, packet in report.give.items() if packet.mask is not None]
            masks_received = find_masks_known_to_server(received, masked, codec, hash_mask)
            report_bytes = write_report(report, codec, masks_received)
            masks_sent = find_masks_known_to_server(task, task.send, codec, run.known_state.digest)
            answer = read_answer(report_bytes, codec, masks_sent)
            if isinstance(answer, ResendRequest):
                raise WireError("it is no report.")
        except Exception as error:
            return replace(unreadable(task, error), cost=_cost(spent))
        _check_count("report", report_bytes, up)
        spent.add({"up": up})
        if self.timeout is not None and time.monotonic() - started > self.timeout:
            return replace(late(task, self.timeout), cost=_cost(spent))
        # What it computed travels with no message: it is for the clock of a simulation.
        return replace(answer, cost=_cost(spent), macs=report.macs)

    def _deliver(self, run: Run, task: Task, broadcasts: BroadcastCosts, spent: Ledger) -> Task:
        """The task as its client reads it; a client that lacks a mask says so, and gets it whole.

        What either side sends is added to ``spent``.
        """
        codec = run.method.codec
        masks = self._masks_of(run, task)
        try:
            return masks.receive(_send(run, task, broadcasts, spent), codec)
        except UnknownMask as error:
            lacks_bytes = write_resend_request(ResendRequest(task.to, error.packets), codec)
        # On the server, which learns that it was wrong about the client; then nothing is sure.
        spent.add({"up": {"header": len(lacks_bytes)}})
        assert isinstance(read_answer(lacks_bytes, codec), ResendRequest)
        run.known_state.forget(task.to)
        return masks.receive(_send(run, task, broadcasts, spent), codec)

    def _masks_of(self, run: Run, task: Task) -> _Masks:
        """What the client of a task holds.

        The clients of a run that is resumed are new here, where real ones would have kept their
        masks: these start with what the checkpoint says of them.
        """
        clients = self._clients.setdefault(run, {})
        masks = clients.setdefault(task.to, _Masks())
        if not masks.restarted:
            for name, known in find_masks_known_to_client(
                task, run.method.codec, run.known_state
            ).items():
                if known is not None and name not in masks.by_packet:
                    masks.keep(name, known)
        return masks

    def restart(self, run: Run, client: int) -> None:
        """A client starts anew: the masks that it held are gone, and nobody tells the server."""
        self._clients.setdefault(run, {})[client] = _Masks(restarted=True)

    def close(self) -> None:
        """Forget what clients hold."""
        self._clients.clear()


@dataclass
class _Masks:
    """What a client holds itself: the mask of the last packet of each name, and its digest."""

    restarted: bool = False
    by_packet: dict[str, tuple[bytes, StoredMask]] = field(default_factory=dict)

    def keep(self, packet: str, known: KnownMask) -> None:
        """Hold a mask in place of the last one."""
        if packet in self.by_packet and self.by_packet[packet][0] == known.digest:
            return
        self.by_packet[packet] = (known.digest, StoredMask.of(known.mask))

    def receive(self, data: bytes, codec: Codec) -> Task:
        """Read a task and keep its masks; raises NotHeld if it refers to others."""
        known = {}
        for name, (digest, contents) in self.by_packet.items():
            known[name] = KnownMask(contents.mask(), digest)
        task = read_task(data, codec, known)
        for name in list_masks_to_remember(task, codec):
            mask = task.send[name].mask
            assert mask is not None
            self.keep(name, KnownMask(mask, hash_mask(mask)))
        return task


def _send(run: Run, task: Task, broadcasts: BroadcastCosts, spent: Ledger) -> bytes:
    """A task as the server writes it."""
    codec = run.method.codec
    # What is known is looked up before `count_task` notes the masks as held.
    data = write_task(task, codec, find_masks_known_to_client(task, codec, run.known_state))
    down = count_task(task, codec, run.known_state, broadcasts)
    _check_count("task", data, down)
    spent.add({"down": down})
    return data


def _check_count(what: str, data: bytes, cost: Mapping[str, int]) -> None:
    """The bytes counted must be the bytes written."""
    counted = sum(cost.values())
    if counted != len(data):
        raise EngineError(f"a {what} of {len(data)} bytes was counted as {counted} bytes.")


def _cost(spent: Ledger) -> Cost:
    return {"down": spent.down, "up": spent.up} if spent.up else {"down": spent.down}
