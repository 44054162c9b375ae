"""The wired engine: serial, but every message is encoded to bytes and decoded again.

Each side uses only what it sent or received itself. Codecs are lossless, so the results equal those
of :class:`~fedgrove.engines.serial.Serial`, and so do the counted bytes. A client that has lost its
masks requests them, and is sent its task again.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

from ..core import Answer, Cost, Job, Lost, Task
from ..errors import EngineError, UnexpectedReport, UnknownMask, WireError
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
from .work import lose_late, lose_unreadable, perform_and_remember, refuse_undecoded


@dataclass(eq=False)
class Wired:
    """Runs one client after another, and sends every task and report as real bytes.

    The task of a client that takes longer than ``timeout`` seconds is lost.
    """

    timeout: float | None = None
    name: str = field(default="wired", init=False)

    def __post_init__(self) -> None:
        # What the clients themselves know; run.known_state is what the server assumes they know.
        self._clients: WeakKeyDictionary[Run, dict[int, _Masks]] = WeakKeyDictionary()

    def map(self, jobs: Iterable[Job]) -> Iterator[tuple[Job, Answer]]:
        """Do each job over real bytes when the caller takes its answer."""
        broadcasts = BroadcastCosts()
        for job in jobs:
            run, task = job
            yield job, self._exchange(run, task, broadcasts)

    def _exchange(self, run: Run, task: Task, broadcasts: BroadcastCosts) -> Answer:
        """Send a task to its client and the answer back, both as bytes."""
        started = time.monotonic()
        codec = run.method.codec
        spent = Ledger()
        received = self._deliver(run, task, broadcasts, spent)

        # On the client, which starts from the version of its memory that the header names.
        report = perform_and_remember(run, received)
        if isinstance(report, Lost):
            return replace(report, cost=_cost(spent))

        # Up. Both sides know the masks of the task itself.
        try:
            up = count_report(task, report, codec, run.known_state)
            masked = [name for name, packet in report.give.items() if packet.mask is not None]
            masks_received = find_masks_known_to_server(received, masked, codec, hash_mask)
            report_bytes = write_report(report, codec, masks_received)
            masks_sent = find_masks_known_to_server(task, task.send, codec, run.known_state.digest)
            answer = read_answer(report_bytes, codec, run.expected(task), masks_sent)
            if isinstance(answer, ResendRequest):
                raise WireError("it is not a report.")
        except UnexpectedReport as error:
            # Its bytes have arrived.
            spent.add({"up": up})
            return replace(refuse_undecoded(task, error), cost=_cost(spent))
        except Exception as error:
            return replace(lose_unreadable(task, error), cost=_cost(spent))
        _check_count("report", report_bytes, up)
        spent.add({"up": up})
        if self.timeout is not None and time.monotonic() - started > self.timeout:
            return replace(lose_late(task, self.timeout), cost=_cost(spent))
        # `macs` is in no message: only the clock of a simulation needs it.
        return replace(answer, cost=_cost(spent), macs=report.macs)

    def _deliver(self, run: Run, task: Task, broadcasts: BroadcastCosts, spent: Ledger) -> Task:
        """Return the task as its client reads it; a client that lacks a mask requests it.

        The bytes that either side sends are added to ``spent``.
        """
        codec = run.method.codec
        masks = self._masks_of(run, task)
        try:
            return masks.receive(_send(run, task, broadcasts, spent), codec)
        except UnknownMask as error:
            lacks_bytes = write_resend_request(ResendRequest(task.to, error.packets), codec)
        # On the server: it was wrong about this client, so it forgets all that it assumed.
        spent.add({"up": {"header": len(lacks_bytes)}})
        assert isinstance(read_answer(lacks_bytes, codec, run.expected(task)), ResendRequest)
        run.known_state.forget(task.to)
        return masks.receive(_send(run, task, broadcasts, spent), codec)

    def _masks_of(self, run: Run, task: Task) -> _Masks:
        """Return the masks that the client of a task knows.

        Real clients keep their masks while a run is stopped. The simulated clients of a resumed run
        start with the masks in its checkpoint.
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
        """Let a client lose its masks without telling the server, as after a restart."""
        self._clients.setdefault(run, {})[client] = _Masks(restarted=True)

    def close(self) -> None:
        """Forget the masks that the clients of the wired engine know."""
        self._clients.clear()


@dataclass
class _Masks:
    """The masks that a client knows: of the last packet of each name, with its digest."""

    restarted: bool = False
    by_packet: dict[str, tuple[bytes, StoredMask]] = field(default_factory=dict)

    def keep(self, packet: str, known: KnownMask) -> None:
        """Replace the last mask of a packet that a wired client knows."""
        if packet in self.by_packet and self.by_packet[packet][0] == known.digest:
            return
        self.by_packet[packet] = (known.digest, StoredMask.of(known.mask))

    def receive(self, data: bytes, codec: Codec) -> Task:
        """Read a task as a wired client and keep its masks.

        Raises:
            UnknownMask: It refers to a mask that this client does not know.
        """
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
    """Return a task as bytes, and add them to ``spent``."""
    codec = run.method.codec
    # Looked up before `count_task` notes the task's masks as known.
    data = write_task(task, codec, find_masks_known_to_client(task, codec, run.known_state))
    down = count_task(task, codec, run.known_state, broadcasts)
    _check_count("task", data, down)
    spent.add({"down": down})
    return data


def _check_count(what: str, data: bytes, cost: Mapping[str, int]) -> None:
    """Raise if the counted bytes are not the written bytes."""
    counted = sum(cost.values())
    if counted != len(data):
        raise EngineError(f"a {what} of {len(data)} bytes was counted as {counted} bytes.")


def _cost(spent: Ledger) -> Cost:
    return {"down": spent.down, "up": spent.up} if spent.up else {"down": spent.down}
