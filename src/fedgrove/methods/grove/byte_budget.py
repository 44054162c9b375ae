"""A budget of bytes instead of shares: how much may be sent so that a run costs what it should.

What messages take at a share is measured, with the method's own codec, on updates of random numbers
(:class:`SampleMessages`); :func:`share_within` looks for the share that meets the budget. Clients
whose devices hold only a part of the net send less than that.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ... import trees
from ...core import Packet, Report, Setup, Task, TaskSettings
from ...errors import BudgetError, InputError, check
from ...renamed import find_old_names
from ...seeds import torch_rng
from ...trees import Tree
from ...wire.codec import Codec, Dense
from ...wire.message import write_report, write_task
from ..stc.ternary import coded
from ..stc.versions import IN_ONE_PACKET, MISSED, update_bits

UNITS = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}
LEAST_SHARE = 1e-7
"""A share this small sends one value of each layer."""
MOST_SHARE = 0.5
"""Above it quality falls: with one magnitude per layer, small values are sent as large ones."""
NEAR = 0.01
"""A share is good enough when it costs what it should to this part."""
MOST_TRIES = 20
SPREAD = 0.5
"""How unlike channels are, in the logarithm of their updates' length."""
MEMORY = "100.train.0123456789abcdef"
"""What the name of a client's memory looks like in a message."""


def parse_share(given: str | float) -> float:
    """Grove: parse a budget such as ``2%``: a share of the bytes that FedAvg sends.

    >>> parse_share("1%"), parse_share(0.02)
    (0.01, 0.02)
    """
    allowed = "a share of FedAvg's bytes above 0 and up to 1, such as '1%' or 0.01"
    percent = re.fullmatch(r"\s*(\d*\.?\d+)\s*%\s*", str(given))
    try:
        share = float(percent[1]) / 100 if percent else float(given)
    except ValueError:
        share = 0.0
    check(0 < share <= 1, "bytes", given, allowed)
    return share


def parse_size(
    given: str,
    name: str = "budget",
    allowed: str = "bytes for one client in the whole run, such as '8MB' or '500kB'",
) -> float:
    """Grove: parse a budget such as ``1 MB``: a number of bytes; 1 MB is 1000 kB.

    ``name`` and ``allowed`` are for the error message.

    >>> parse_size("8MB"), parse_size("500 kB")
    (8000000.0, 500000.0)
    """
    found = re.fullmatch(r"\s*(\d*\.?\d+)\s*([kMG]?B)\s*", str(given))
    size = float(found[1]) * UNITS[found[2]] if found else 0.0
    check(size > 0, name, given, allowed)
    return size


def bytes_allowed(share: str | float | None, budget: str | None, setup: Setup) -> float:
    """Grove: the bytes that the budget allows for one exchange of one client, both ways.

    By a share, that part of what FedAvg's two messages take; by a budget, its part of that: a
    client takes part in cohort / clients of the rounds, on average.
    """
    if share is not None:
        return parse_share(share) * dense_bytes_of(setup)
    assert budget is not None
    return parse_size(budget) / turns_of(setup)


def turns_of(setup: Setup) -> float:
    """Grove: in how many rounds a client takes part, on average."""
    return setup.rounds * setup.cohort / max(1, len(setup.clients))


def dense_bytes_of(setup: Setup) -> int:
    """Grove: the bytes of FedAvg's two messages: the whole model down and up."""
    model = {"model": Packet(setup.params)}
    return task_bytes(model, Dense(), setup, memory=None) + report_bytes(
        model, Dense(), setup, memory=None
    )


def task_bytes(
    send: Mapping[str, Packet],
    codec: Codec,
    setup: Setup,
    settings: TaskSettings | None = None,
    memory: str | None = MEMORY,
) -> int:
    """Grove: the length of a task with a coded update, in the middle of a run."""
    # Typical numbers: smaller ones may take fewer bytes in a message.
    client = len(setup.clients) // 2
    task = Task(client, send, settings or {}, round=setup.rounds // 2, memory=memory)
    return len(write_task(task, codec))


def report_bytes(
    give: Mapping[str, Packet],
    codec: Codec,
    setup: Setup,
    metrics: Mapping[str, float] | None = None,
    memory: str | None = MEMORY,
) -> int:
    """Grove: the length of a report with a coded update, in the middle of a run."""
    report = Report(len(setup.clients) // 2, give, 100, metrics or {}, memory=memory)
    return len(write_report(report, codec))


@dataclass(frozen=True)
class SampleMessages:
    """The contents of the two messages of an exchange, with coded updates of random numbers."""

    federation: Setup
    model: Tree
    """What updates are like."""
    statistics: Tree
    """What is sent in full next to them."""
    evidence: int
    """How many numbers are sent up as evidence; half of them are 0."""
    metrics: Mapping[str, float]
    codec: Codec
    has_versions: bool
    """Whether the server sends the updates that a client has missed; or one update always."""
    room: float
    """How much memory there is for missed updates, in models."""

    def bytes(self, share: float) -> float:
        """Grove: the mean bytes of one exchange with coded updates, both ways."""
        whole = {}
        if self.statistics:
            whole["statistics"] = Packet(self.statistics)
        give = {"change": Packet(self._update(share, 0)), **whole}
        if self.evidence:
            signs = {"scores.head": torch.zeros(self.evidence)}
            give["evidence"] = Packet(coded(0.5, _noise(signs, 0), None))
        up = report_bytes(give, self.codec, self.federation, self.metrics)
        if self.has_versions:
            return up + self._missed(share, whole)
        settings = {"up": rounded(share)}
        sent = {"change": Packet(self._update(share, 1)), **whole}
        later = task_bytes(sent, self.codec, self.federation, settings)
        nothing = {"change": Packet(trees.map(torch.zeros_like, self.model)), **whole}
        first = task_bytes(nothing, self.codec, self.federation, settings, memory=None)
        # In round 0 all clients have the model, and a change of zeros is sent.
        return up + later + (first - later) / self.federation.rounds

    def _missed(self, share: float, whole: Mapping[str, Packet]) -> float:
        """What is sent down where a client is sent what it has missed, or the whole model."""
        settings = {"up": rounded(share)}
        sizes = [task_bytes(whole, self.codec, self.federation, settings)]
        total = trees.map(torch.zeros_like, self.model)
        # Updates overlap: what a sum of several takes is measured, not multiplied.
        for number in range(IN_ONE_PACKET):
            total = trees.map(torch.add, total, self._update(share, number))
            sent = {f"{MISSED}0": Packet(total), **whole}
            sizes.append(task_bytes(sent, self.codec, self.federation, settings))
        model = {"model": Packet(self.model), **whole}
        largest = task_bytes(model, self.codec, self.federation, settings)
        numbers = trees.size(self.model)
        kept = int((trees.flatten(self._update(share, 0)) != 0).sum())
        # A place and a value take eight bytes, a number of the model four.
        longest = min(
            self.room * 4 * numbers / (8 * kept), 32 * numbers / update_bits(numbers, kept)
        )
        mean = 0.0
        rounds = self.federation.rounds
        for number, chance in enumerate(
            waits(len(self.federation.clients), self.federation.cohort, rounds)
        ):
            full, rest = divmod(number, IN_ONE_PACKET)
            missed = full * (sizes[-1] - sizes[0]) + sizes[rest]
            mean += chance * (missed if number <= longest else largest)
        return mean

    def _update(self, share: float, number: int) -> Tree:
        return coded(share, _noise(self.model, number), None)


def _noise(like: Mapping[str, Tensor], number: int) -> Tree:
    """Random numbers, larger in some channels than in others, in the same ones each time.

    So are updates: a codec makes use of it, and it makes them overlap.
    """
    # Fixed seeds: a budget leads to one and the same share in every run.
    scales = torch_rng(0, "channels of a representative update")
    generator = torch_rng(0, "representative update", number)
    noise: Tree = {}
    for name, leaf in like.items():
        noise[name] = torch.randn(leaf.shape, generator=generator)
        if leaf.dim() > 1:
            row = torch.randn(len(leaf), *(1,) * (leaf.dim() - 1), generator=scales)
            noise[name] *= torch.exp(SPREAD * row)
    return noise


def share_within(exchange: SampleMessages, share: str | float | None, budget: str | None) -> float:
    """Grove: the largest share of an update's values that keeps a run within its byte budget.

    It is the largest share there is, if that takes less than the budget.

    A budget that is too small is refused, with the least that would do.
    """
    start = exchange.federation
    target = bytes_allowed(share, budget, start)
    least = exchange.bytes(LEAST_SHARE)
    if least > target:
        cheapest = "the cheapest messages of this net, with one value for each layer, take"
        if share is not None:
            needed = 100 * least / dense_bytes_of(start)
            raise InputError(
                f"bytes is {share!r}; {cheapest} {needed:.3g}% of what FedAvg sends. Give more "
                "than that, or use a larger net."
            )
        needed = least * turns_of(start)
        sentence = (
            f"budget is {budget!r}; {cheapest} {needed / 1e3:.4g}kB for each client in "
            f"{start.rounds} rounds. Give more than that, or use fewer rounds or a smaller cohort."
        )
        raise BudgetError(sentence, needed)
    return share_for(exchange.bytes, target)


def share_for(cost: Callable[[float], float], target: float) -> float:
    """Grove: the share of an update's values that costs a number of bytes.

    ``cost`` rises with the share.

    >>> share_for(lambda share: 100 + 10_000 * share, 300)
    0.01991
    """
    if cost(MOST_SHARE) <= target:
        return MOST_SHARE
    low = LEAST_SHARE
    high = MOST_SHARE
    middle = low
    for _ in range(MOST_TRIES):
        # The geometric mean: shares range over seven orders of magnitude.
        middle = math.sqrt(low * high)
        spent = cost(middle)
        if abs(spent - target) <= NEAR * target:
            break
        if spent > target:
            high = middle
        else:
            low = middle
    return rounded(middle)


def share_of_less(share: float, tree: Mapping[str, Tensor], mask: Mapping[str, Tensor]) -> float:
    """Grove: the share of the values under a mask that costs what a share of all values did."""
    less = {}
    for name, leaf in tree.items():
        less[name] = leaf[mask[name]] if name in mask else leaf
    return share_for(lambda part: coded_bytes(part, less), coded_bytes(share, tree))


def rounded(share: float) -> float:
    """Grove: round a share to four digits, because it is sent with every task."""
    return float(f"{share:.4g}")


def coded_bytes(share: float, tree: Mapping[str, Tensor]) -> float:
    """Grove: the approximate bytes of a coded update: places, signs and magnitudes.

    >>> coded_bytes(0.5, {"w": torch.zeros(2, 4)})
    5.5
    """
    total = 0.0
    for leaf in tree.values():
        kept = max(1, round(share * leaf.numel()))
        # Four bytes are the layer's one magnitude, in single precision.
        total += update_bits(leaf.numel(), kept) / 8 + 4
    return total


def waits(clients: int, cohort: int, rounds: int) -> list[float]:
    r"""Grove: the probability of each number of updates that a drawn client has missed.

    Each client is drawn with :math:`p = M/K` in each of T rounds. All have version 0, so that in
    round t a client that was never drawn has missed as much as one that was drawn in round 0.
    Averaged over rounds, j are missed with :math:`(1-p)^{j-1} (1 + p (T - 1 - j)) / T`, and none
    with 1/T.

    >>> [round(p, 4) for p in waits(2, 1, 3)]
    [0.3333, 0.5, 0.1667]
    """
    # A cohort may be larger than the number of clients: then each is drawn in every round.
    p = cohort / max(clients, cohort)
    chances = [1 / rounds]
    for j in range(1, rounds):
        chances.append((1 - p) ** (j - 1) * (1 + p * (rounds - 1 - j)) / rounds)
    return chances


__getattr__ = find_old_names(__name__)
