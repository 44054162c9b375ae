r"""The virtual clock: how long each client takes on its own device, and so how long an exchange.

:math:`t_k = \text{down}_k + \text{compute}_k + \text{up}_k`: the real bytes of the task over the
client's downlink, the multiply-accumulates of its work over its speed, and the real bytes of its
report over its uplink. Where the federation has a trace, bytes are integrated over it from the
virtual second at which they begin to flow. An exchange lasts as long as its slowest client, or to
the deadline where somebody missed it.

Without a deadline the clock changes no result, except for methods that follow a trace. Scoring and
the final fine-tuning take no time on it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..core import REFERENCE_GMACS, Answer, ClientInfo, Lost, Task
from ..data.devices import Steps
from ..errors import InputError, spell_option
from ..renamed import find_old_names

if TYPE_CHECKING:
    from .run import Run

MEGABIT = 1e6
GIGA = 1e9
DIGITS = 9
"""Of the seconds that are written; the clock goes on from what was written, so that a run that is
resumed has the same times."""


class NoClientInTime(InputError):
    """A deadline that none of the clients can meet."""


class Times(NamedTuple):
    """The virtual seconds of one client."""

    down: float
    compute: float
    up: float

    @property
    def total(self) -> float:
        """Virtual seconds of a client from the start of the exchange to its whole report."""
        return self.down + self.compute + self.up


def times(
    info: ClientInfo, steps: Steps | None, start: float, bytes_down: int, macs: int, bytes_up: int
) -> Times:
    """Compute how long a client takes on the virtual clock.

    Args:
        info: The client's device.
        steps: How its bandwidth changes; None: it does not.
        start: The virtual second in which the exchange begins.
        bytes_down: The length of the task.
        macs: The multiply-accumulates of the work.
        bytes_up: The length of the report.

    A megabyte each way at 8 and 4 Mbit/s, and 2 GMAC at speed 1:

    >>> device = ClientInfo(examples=1, bandwidth=4.0, downlink=8.0)
    >>> times(device, None, 0.0, bytes_down=1_000_000, macs=2 * 10**9, bytes_up=1_000_000)
    Times(down=1.0, compute=2.0, up=2.0)
    """
    if steps is None:
        steps = Steps((0.0,), (info.up,), (info.down,))
    down = transfer(bytes_down, start, steps.seconds, steps.down)
    compute = macs / (info.speed * REFERENCE_GMACS * GIGA)
    up = transfer(bytes_up, start + down + compute, steps.seconds, steps.up)
    return Times(down, compute, up)


def transfer(count: int, start: float, seconds: Sequence[float], rates: Sequence[float]) -> float:
    """Compute the virtual seconds in which some bytes are sent at changing bandwidths.

    Where the rate is 0, they wait.

    Args:
        count: The number of bytes.
        start: The virtual second in which the transfer begins.
        seconds: The seconds from which the rates apply.
        rates: The bandwidths in Mbit/s.

    A megabyte from second 1 on, at 4 Mbit/s up to second 2, nothing
    up to second 5, then 8 Mbit/s: half of it passes before the outage.

    >>> transfer(1_000_000, 1.0, seconds=(0.0, 2.0, 5.0), rates=(4.0, 0.0, 8.0))
    4.5
    """
    bits = 8.0 * count
    if not bits:
        return 0.0
    spent = 0.0
    step = bisect_right(seconds, start) - 1
    while True:
        rate = MEGABIT * rates[step]
        is_last = step == len(seconds) - 1
        if is_last:
            return spent + bits / rate
        left = seconds[step + 1] - (start + spent)
        if rate > 0 and bits <= rate * left:
            return spent + bits / rate
        bits -= rate * left
        spent += left
        step += 1


class Stopwatch:
    """The virtual time of one exchange that starts at the second ``start``."""

    def __init__(self, run: Run, start: float) -> None:
        self._run = run
        self._start = start
        self._somebody_is_missing = False
        self._in_time = 0
        self._slowest: tuple[int, Times] | None = None
        self._fastest_late: tuple[int, Times] | None = None

    def time_answers(self, answers: Iterable[tuple[Task, Answer]]) -> Iterator[tuple[Task, Answer]]:
        """Yield the answers of an exchange; those after the virtual deadline are lost."""
        for task, answer in answers:
            yield task, self._judge(task, answer)

    def _judge(self, task: Task, answer: Answer) -> Answer:
        taken = self._times(task, answer)
        if self._slowest is None or taken.total > self._slowest[1].total:
            self._slowest = (task.to, taken)
        if isinstance(answer, Lost):
            self._somebody_is_missing = True
            return answer
        deadline = self._run.deadline
        if deadline is None or taken.total <= deadline:
            self._in_time += 1
            return answer
        self._somebody_is_missing = True
        if self._fastest_late is None or taken.total < self._fastest_late[1].total:
            self._fastest_late = (task.to, taken)
        sentence = (
            f"client {task.to} takes {taken.total:.4g} s of virtual time, and the deadline is "
            f"{deadline:g} s."
        )
        # Its report was sent all the same.
        return Lost(task.to, "late", sentence, _cost(answer))

    def _times(self, task: Task, answer: Answer) -> Times:
        """Of a lost client only what was sent counts: how far it got is unknown."""
        federation = self._run.federation
        try:
            info = federation.info(task.to, task.round)
        except Exception:
            # A client whose data cannot be made: it is lost, and the engine has said why.
            return Times(0.0, 0.0, 0.0)
        steps = None if federation.trace is None else federation.trace.get(task.to)
        cost = _cost(answer)
        return times(
            info,
            steps,
            self._start,
            bytes_down=sum(cost.get("down", {}).values()),
            macs=getattr(answer, "macs", 0),
            bytes_up=sum(cost.get("up", {}).values()),
        )

    @property
    def seconds(self) -> float:
        """The virtual seconds that the exchange took.

        With a deadline a server waits for those who are missing: it cannot tell one that failed
        from one that is slow. Without, it hears of failures.
        """
        deadline = self._run.deadline
        if deadline is not None and self._somebody_is_missing:
            return deadline
        return 0.0 if self._slowest is None else self._slowest[1].total

    @property
    def end(self) -> float:
        """The virtual second in which the exchange ends, as it is written."""
        return round(self._start + self.seconds, DIGITS)

    def to_line(self) -> dict[str, Any]:
        """Return the entries of a line of metrics.jsonl about virtual time."""
        parts: dict[str, Any] = {
            "virtual_seconds": round(self.seconds, DIGITS),
            "virtual_clock": self.end,
        }
        if self._slowest is not None:
            client, taken = self._slowest
            spent = {name: round(value, DIGITS) for name, value in taken._asdict().items()}
            parts["slowest"] = {"client": client, **spent}
        return parts

    def explain_all_late(self) -> str:
        """Return a sentence if all clients that answered missed the deadline; otherwise ""."""
        if self._in_time or self._fastest_late is None:
            return ""
        client, taken = self._fastest_late
        return (
            f"No client answered within {spell_option('deadline', f'{self._run.deadline:g}')}: the "
            "fastest, client "
            f"{client}, takes {taken.total:.4g} s of virtual time ({taken.down:.3g} s down, "
            f"{taken.compute:.3g} s of work, {taken.up:.3g} s up)."
        )

    def check_deadline(self, tasks: Sequence[Task]) -> None:
        """Refuse a deadline that all clients of a run always miss."""
        federation = self._run.federation
        all_were_asked = len(tasks) == len(federation.ids)
        is_final = self._start == 0 and all_were_asked and federation.trace is None
        sentence = self.explain_all_late()
        if is_final and sentence:
            raise NoClientInTime(f"{sentence} Give a longer deadline.")


def _cost(answer: Any) -> Mapping[str, Mapping[str, int]]:
    # What an engine passes on may be no answer at all; the gate refuses it later.
    cost: Mapping[str, Mapping[str, int]] = getattr(answer, "cost", {})
    return cost


def clock_of(lines: Sequence[Mapping[str, Any]]) -> float:
    """Return the virtual second up to which the lines of metrics.jsonl go."""
    if not lines:
        return 0.0
    # A run that was begun before there was a clock starts it where it is resumed.
    return float(lines[-1].get("virtual_clock", 0.0))


def make_notes(run: Run, end: float) -> list[str]:
    """Return a summary's note if a bandwidth trace ended before the run did."""
    trace = run.federation.trace
    if trace is None:
        return []
    ended = []
    for client in run.federation.ids:
        seconds = trace[client].seconds
        # A client with one line has the same bandwidth all along.
        if len(seconds) > 1 and seconds[-1] < end:
            ended.append(seconds[-1])
    if not ended:
        return []
    return [
        f"the trace ended before the run for {len(ended)} of {len(run.federation.ids)} clients, "
        f"the first at {min(ended):g} s of {end:.4g} s: their last bandwidths stayed in effect"
    ]


__getattr__ = find_old_names(__name__)
