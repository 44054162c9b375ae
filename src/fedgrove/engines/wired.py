"""Serial, but every message becomes bytes and is read back: what a network would carry.

Each side uses only what it sent or received itself. Codecs are lossless, so the results are those
of :class:`~fedgrove.engines.serial.Serial`, and the bytes are those it counts.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

from ..core import SCORING_VERBS, Answer, Job, Lost, Packet, Task
from ..errors import EngineError
from ..runs.run import Run
from ..wire.codec import Known
from ..wire.count import BroadcastCosts, count_down, count_up
from ..wire.held import Held
from ..wire.message import read_report, read_task, write_report, write_task
from .work import crashed, late, perform, unreadable, with_memory


@dataclass(eq=False)
class Wired:
    """Every task and report through real bytes, one client after another.

    A client that takes longer than ``timeout`` seconds is lost.
    """

    timeout: float | None = None
    name: str = field(default="wired", init=False)

    def __post_init__(self) -> None:
        # What the clients themselves hold, apart from what the server believes (run.held).
        self._clients: WeakKeyDictionary[Run, dict[int, Held]] = WeakKeyDictionary()

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
        client_held = self._held_by(run, task.to)
        self._forget_what_the_client_lacks(run, task, client_held)

        # Down. What is known is looked up before `count_down` notes the masks as held.
        believed = _known(run.held, task.to, task.send)
        task_bytes = write_task(task, codec, believed)
        received = read_task(task_bytes, codec, _known(client_held, task.to, task.send))
        down = count_down(task, codec, run.held, broadcasts)
        _check_count("task", task_bytes, down)
        if task.verb not in SCORING_VERBS:
            for name, packet in received.send.items():
                client_held.note(task.to, name, packet.mask)

        # On the client.
        memory = run.memory.read(received.memory)
        try:
            report, remembered = perform(run, received, memory)
        except Exception as error:
            return replace(crashed(task, error), cost={"down": down})
        outcome = with_memory(run, received, report, remembered)
        if isinstance(outcome, Lost):
            return replace(outcome, cost={"down": down})
        report = outcome

        # Up. Both sides know the masks of the task itself.
        try:
            up = count_up(task, report, codec, run.held)
            masks_received = _masks_sent(received, client_held)
            for name, packet in report.give.items():
                if packet.mask is None:
                    # Without a mask of its own a packet has nothing to refer to.
                    masks_received[name] = None
            report_bytes = write_report(report, codec, masks_received)
            answer = read_report(report_bytes, codec, _masks_sent(task, run.held))
        except Exception as error:
            return replace(unreadable(task, error), cost={"down": down})
        _check_count("report", report_bytes, up)
        if self.timeout is not None and time.monotonic() - started > self.timeout:
            return replace(late(task, self.timeout), cost={"down": down, "up": up})
        return replace(answer, cost={"down": down, "up": up})

    def _held_by(self, run: Run, client: int) -> Held:
        """What a client holds; one met for the first time holds what the checkpoint says."""
        clients = self._clients.setdefault(run, {})
        if client not in clients:
            masks = {key: mask for key, mask in run.held.masks.items() if key[0] == client}
            clients[client] = Held(masks)
        return clients[client]

    @staticmethod
    def _forget_what_the_client_lacks(run: Run, task: Task, client_held: Held) -> None:
        """After a map that broke the server is rolled back, and the client may hold newer masks."""
        for name in task.send:
            believed = run.held.known(task.to, name)
            actual = client_held.known(task.to, name)
            if believed is not None and (actual is None or actual.digest != believed.digest):
                run.held.masks.pop((task.to, name))

    def close(self) -> None:
        """Forget what clients hold."""
        self._clients.clear()


def _known(held: Held, client: int, packets: Mapping[str, Packet]) -> dict[str, Known | None]:
    known: dict[str, Known | None] = {}
    for name, packet in packets.items():
        known[name] = None if packet.mask is None else held.known(client, name)
    return known


def _masks_sent(task: Task, held: Held) -> dict[str, Known | None]:
    """The masks of the task's packets, which the answer's packets of the same name may refer to."""
    known: dict[str, Known | None] = {}
    for name, packet in task.send.items():
        known[name] = None if packet.mask is None else held.digest(packet.mask)
    return known


def _check_count(what: str, data: bytes, cost: Mapping[str, int]) -> None:
    """The bytes counted must be the bytes written."""
    counted = sum(cost.values())
    if counted != len(data):
        raise EngineError(f"a {what} of {len(data)} bytes was counted as {counted} bytes.")
