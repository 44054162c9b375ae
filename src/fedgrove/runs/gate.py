"""What every report passes before it is folded into a model: one that would spoil it is refused."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import NamedTuple

import torch
from torch import Tensor

from .. import gpu_copies, trees
from ..core import ClientInfo, ExpectedPacket, ExpectedReport, Packet, Report, Task
from ..errors import check
from ..parts.robust import is_parameter
from .files import is_plain_name

REFUSALS = {
    "malformed": "it is no report, or its parts are not what a report is made of",
    "client": "it names another client than the one that was asked",
    "duplicate": "the task was answered before, or never sent",
    "examples": "it claims other examples than the client enrolled with",
    "memory": "it names a version of the client's memory that this task cannot have made",
    "metrics": "a number is missing, not finite or out of its range",
    "packets": "it holds other packets than the task asks for",
    "tensors": "a packet holds other tensors, types or shapes than the task asks for",
    "mask": "a packet has another mask than the task asks for, or values outside it",
    "not finite": "a value is not finite",
    "too long": "the update is far longer than those of recent rounds",
}
"""Why a report can be refused."""

NORM_BOUND = 100.0
"""How many times longer than usual an update may be. Clients that have many times the examples of
others make updates several times as long; lies worth telling are far longer."""
RECENT = 100
"""How many lengths of updates of a kind are remembered."""
FEW_LENGTHS = 9
"""So many lengths make a median that a few liars cannot move far."""


class Refusal(NamedTuple):
    """Why a report was refused: a word that is counted, and a sentence."""

    reason: str
    sentence: str


@dataclass(frozen=True)
class Gate:
    """Refuses reports that are not what was asked for or would spoil the model, and says why.

    A report must come from the client that was asked, hold the packets that the method says an
    answer holds, with the same tensors, types, shapes and masks, and finite numbers; ``examples``
    must be what the client enrolled with, since a client cannot buy weight by claiming more.
    """

    norm: float = NORM_BOUND
    """An update longer than so many times the median of recent ones, and longer than the model it
    changes, is refused; 0: none is."""

    def __post_init__(self) -> None:
        check(self.norm == 0 or self.norm >= 1, "norm", self.norm, "0 (off) or 1 and more")

    def refuses(
        self,
        report: object,
        task: Task,
        expected: ExpectedReport,
        info: ClientInfo,
        ruler: Ruler | None = None,
    ) -> Refusal | None:
        """Why the answer to a task cannot be used; None if it can, its length aside.

        With a ``ruler``, which then need not measure again for :meth:`lengths`.
        """
        # A length says that numbers are finite; where none is taken, their sum does so faster.
        measures = ruler if self.norm else None
        try:
            if measures is not None:
                measures.take_next()
            return _refuses(report, task, expected, info, measures)
        except Exception as error:
            # A report from outside may hold anything at all: whatever cannot even be looked at is
            # refused like the rest.
            return malformed(task, error)

    def lengths(self, report: Report, task: Task, ruler: Ruler | None = None) -> Lengths:
        """How long the updates in a report are; nothing if they do not matter."""
        return lengths_of(report, task, ruler) if self.norm else {}

    def refuses_lengths(
        self, task: Task, lengths: Lengths, usual: Mapping[str, float]
    ) -> Refusal | None:
        """Why an update is too long beside what is usual for its kind; None if it is not."""
        for name, (length, model_length) in lengths.items():
            factor = self.norm
            if name.endswith(STATISTICS_OF):
                # Variances go with the square of the inputs' units, in which clients may differ.
                factor = self.norm**4
            bound = factor * usual[kind_of(task, name)]
            # An update shorter than the model cannot do much harm, however short the others are:
            # near the end of training most of them may be all but 0.
            if length > bound and length > model_length:
                return Refusal(
                    "too long",
                    f"client {task.to} sent {name} with a change of length {length:.3g}; recent "
                    f"ones allow {bound:.3g}, {factor:g} times their median. "
                    "--norm-bound changes the factor.",
                )
        return None


def malformed(task: Task, error: Exception) -> Refusal:
    """The refusal of a report that cannot even be looked at."""
    sentence = f"client {task.to} sent a malformed report: {type(error).__name__}: {error}."
    return Refusal("malformed", sentence)


# ---- is it what was asked for --------------------------------------------------------------------


def _refuses(
    report: object, task: Task, expected: ExpectedReport, info: ClientInfo, ruler: Ruler | None
) -> Refusal | None:
    client = f"client {task.to}"
    if not isinstance(report, Report):
        kind = type(report).__name__
        return Refusal("malformed", f"{client} answered with a {kind}, which is no report.")
    if report.of != task.to:
        return Refusal("client", f"{client} was asked, and the report is of client {report.of}.")
    if report.memory is not None and not is_plain_name(report.memory):
        return Refusal("malformed", f"{client} names {report.memory!r} as what it remembers.")
    if report.examples != info.examples:
        return Refusal(
            "examples",
            f"{client} claims {report.examples} examples but enrolled with {info.examples}.",
        )
    reason = _refuses_metrics(report.metrics, expected)
    if reason is not None:
        return Refusal("metrics", f"{client} sent {reason}")
    one_sided = sorted(report.give.keys() ^ expected.packets.keys())
    if one_sided:
        wanted = ", ".join(expected.packets) or "nothing"
        given = ", ".join(report.give) or "nothing"
        return Refusal(
            "packets",
            f"{client} sent {given} where the report of {task.verb} must contain {wanted}; a "
            "method declares what its reports contain with Give(..., expected=...).",
        )
    for name, form in expected.packets.items():
        refusal = _refuses_packet(report.give[name], form, task.send.get(name), ruler)
        if refusal is not None:
            return Refusal(refusal.reason, f"{client} sent {name} with {refusal.sentence}")
    return None


def _refuses_metrics(metrics: Mapping[str, float], expected: ExpectedReport) -> str | None:
    for name, number in metrics.items():
        if not math.isfinite(number):
            return f"{name} = {number}, which is not finite."
    for name in expected.metrics:
        if name not in metrics:
            return f"no {name}, which the answer must hold."
    ranges = {**expected.metrics, **expected.optional}
    for name, (lowest, highest) in ranges.items():
        if name not in metrics:
            continue
        if not lowest <= metrics[name] <= highest:
            return f"{name} = {metrics[name]:g}; it must be between {lowest:g} and {highest:g}."
    return None


def _refuses_packet(
    packet: Packet, form: ExpectedPacket, sent: Packet | None, ruler: Ruler | None
) -> Refusal | None:
    # All shapes before any value: a wrong shape is the more telling reason.
    if list(packet.values) != list(form.tensors):
        one_sided = sorted(packet.values.keys() ^ form.tensors.keys())
        what = f"{', '.join(one_sided)} on one side only" if one_sided else "another order"
        return Refusal("tensors", f"other tensors than were asked for: {what}.")
    for name, (dtype, shape) in form.tensors.items():
        leaf = packet.values[name]
        is_plain = isinstance(leaf, Tensor) and leaf.layout is torch.strided
        if not is_plain:
            return Refusal("tensors", f"something else than a dense tensor in {name}.")
        if leaf.dtype != dtype or tuple(leaf.shape) != shape:
            return Refusal(
                "tensors",
                f"{leaf.dtype} of shape {tuple(leaf.shape)} in {name}; it must be {dtype} of "
                f"shape {shape}.",
            )
    reason = _refuses_mask(packet, form)
    if reason is not None:
        return Refusal("mask", reason)
    # What is infinite or no number makes a change that is not finite, whatever was sent.
    if ruler is not None:
        changes = ruler.changes(packet, sent).values()
        if all(math.isfinite(change.length) for change in changes):
            return None
    for name, leaf in packet.values.items():
        if leaf.is_floating_point() and not _is_finite(leaf):
            return Refusal(
                "not finite",
                f"values that are not finite in {name}; a lower lr or a gradient clip may help.",
            )
    return None


def _refuses_mask(packet: Packet, form: ExpectedPacket) -> str | None:
    mask = packet.mask
    if mask is None:
        needs_one = form.mask is not None and form.mask != "own"
        return "no mask where it must have one." if needs_one else None
    if form.mask is None:
        return "a mask where it must have none."
    if form.mask != "own" and not _same_mask(mask, form.mask):
        return "another mask than it was sent."
    for name, kept in mask.items():
        if name not in form.tensors:
            return f"a mask of {name}, which it does not hold."
        if kept.dtype != torch.bool or tuple(kept.shape) != form.tensors[name][1]:
            return f"a mask of {kept.dtype} and shape {tuple(kept.shape)} in {name}."
        # What lies outside a mask is not sent, so it must not count where nothing is sent either.
        # As booleans true is more than false; to count them takes a fifth of the time of any().
        if trees.count_true(packet.values[name].bool() > kept):
            return f"values outside its mask in {name}."
    return None


def _same_mask(mask: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    # Most clients return the very mask they were sent.
    if mask is other:
        return True
    if mask.keys() != other.keys():
        return False
    return all(kept is other[name] or torch.equal(kept, other[name]) for name, kept in mask.items())


def _is_finite(value: Tensor) -> bool:
    """Whether all numbers are finite."""
    # One pass without a temporary in the usual case: a finite sum has only finite terms. A sum that
    # is not finite may only be too large, so then each number is looked at.
    if math.isfinite(float(value.sum())):
        return True
    return bool(torch.isfinite(value).all())


# ---- how long are updates ------------------------------------------------------------------------

STATISTICS_OF = ", statistics"
"""Running statistics have a length of their own, under the packet's name and this."""

Lengths = Mapping[str, tuple[float, float]]
"""By packet: the length of the update, and of the model it changes (0 where nothing was sent)."""


def kind_of(task: Task, packet: str) -> str:
    """Updates of one kind have comparable lengths: the same packet of the same work."""
    return f"{task.verb.partition(':')[0]}/{packet}"


def lengths_of(report: Report, task: Task, ruler: Ruler | None = None) -> Lengths:
    """The Euclidean length of what each packet changes, or of what it holds if it is new.

    A new packet is an update of the model under another name, or evidence of it, so it is measured
    beside all that was sent. One without floating-point numbers has no length.
    """
    if ruler is None:
        ruler = Ruler()
    lengths = {}
    for name, packet in report.give.items():
        sent = task.send.get(name)
        for kind, change in ruler.changes(packet, sent).items():
            if sent is None:
                sent_lengths = [ruler.length(other) for other in task.send.values()]
                model_length = math.hypot(*sent_lengths)
            else:
                model_length = ruler.length(sent, change.names)
            lengths[f"{name}{kind}"] = (change.length, model_length)
    return lengths


NOTHING: Mapping[str, Tensor] = {}
"""One for all packets that nothing was sent for: it is recognised by its id."""


class Change(NamedTuple):
    """How long a change of some leaves is."""

    length: float
    names: tuple[str, ...]


NUMBERS_AT_ONCE = 1 << 28
"""A card's memory for differences: so many numbers."""
STACKS_ON_CARD = 16
"""The lengths of so many stacks are remembered, and the stacks held."""
MODELS_ON_CARD = 8
"""So many models that were sent stay on a card: one, or one per group, goes to many clients."""


class Ruler:
    """Measures the packets of one exchange, each once: a model that goes to all clients too."""

    def __init__(self) -> None:
        # By the id of a packet's values, which are held with it: the id is then no one else's.
        self._held: dict[int, Mapping[str, Tensor]] = {}
        self._lengths: dict[tuple[int, tuple[str, ...] | None], float] = {}
        self._on_card: dict[tuple[int, tuple[str, ...], torch.device], Tensor] = {}
        # Of all rows of a stack at once, by their address and what they are compared with; the rows
        # are held with it: the address is then no one else's.
        self._of_stacks: dict[tuple[int, int, tuple[str, ...]], tuple[Tensor, list[float]]] = {}
        self._seen: set[tuple[int, int, tuple[str, ...]]] = set()
        # By the id of a packet: those of the report at hand only, since a cohort may be large.
        self._changes: dict[int, tuple[Packet, dict[str, Change]]] = {}

    def take_next(self) -> None:
        """The next report is at hand."""
        self._changes.clear()

    def changes(self, packet: Packet, sent: Packet | None) -> Mapping[str, Change]:
        """What a packet changes: its weights, under "", and running statistics, if it has any."""
        if id(packet) not in self._changes:
            before = NOTHING if sent is None else sent.values
            changes = {}
            for kind, names in _names_by_kind(packet).items():
                length = self._change_on_card(packet.values, before, names)
                if length is None:
                    length = _length(_parts_of_change(packet.values, before, names))
                changes[kind] = Change(length, names)
            self._changes[id(packet)] = (packet, changes)
        return self._changes[id(packet)][1]

    def length(self, sent: Packet, names: tuple[str, ...] | None = None) -> float:
        """How long a packet is that was sent, or its leaves of these names."""
        key = (id(sent.values), names)
        if key not in self._lengths:
            self._held[id(sent.values)] = sent.values
            chosen = sent.values if names is None else names
            leaves = {name: sent.values[name] for name in chosen if name in sent.values}
            length = _length_on_card(leaves)
            if length is None:
                length = _length(part for leaf in leaves.values() for part in _parts(leaf))
            self._lengths[key] = length
        return self._lengths[key]

    def _change_on_card(
        self, after: Mapping[str, Tensor], before: Mapping[str, Tensor], names: tuple[str, ...]
    ) -> float | None:
        """The length of a change where the leaves lie on a card as well; None where they do not."""
        vector = trees.as_vector({name: after[name] for name in names})
        found = None if vector is None else gpu_copies.find_row(vector)
        if found is None:
            return None
        if before and any(_is_new(after[name], before.get(name)) for name in names):
            return None
        rows, row = found
        key = (rows.data_ptr(), id(before), names)
        if key not in self._of_stacks:
            self._held[id(before)] = before
            # Every client may have been sent something else: then each row is measured once.
            is_first = key not in self._seen
            self._seen.add(key)
            if is_first and not _is_on(before, names, rows.device):
                # The CPU has measured one client before a card has what this one was sent.
                return None
            sent = self._sent_on_card(before, names, rows.device)
            if is_first:
                return _lengths_of_rows(rows[row : row + 1], sent)[0]
            # For all clients of the stack, also where few of them were sent this: to ask a card
            # takes longer than its answer.
            if len(self._of_stacks) == STACKS_ON_CARD:
                del self._of_stacks[next(iter(self._of_stacks))]
            self._of_stacks[key] = (rows, _lengths_of_rows(rows, sent))
        return self._of_stacks[key][1][row]

    def _sent_on_card(
        self, before: Mapping[str, Tensor], names: tuple[str, ...], device: torch.device
    ) -> Tensor | None:
        """What was sent as a vector on the card; None if nothing was."""
        if not before:
            return None
        key = (id(before), names, device)
        if key not in self._on_card:
            leaves = trees.pick(before, names)
            as_sent = trees.as_vector(leaves)
            as_sent = trees.flatten(leaves) if as_sent is None else as_sent
            if len(self._on_card) == MODELS_ON_CARD:
                del self._on_card[next(iter(self._on_card))]
            self._on_card[key] = gpu_copies.read_on(as_sent, device)
        return self._on_card[key]


def _is_on(sent: Mapping[str, Tensor], names: tuple[str, ...], device: torch.device) -> bool:
    """Whether what was sent lies on a card already, as nothing does."""
    leaves = trees.pick(sent, names) if sent else {}
    if all(leaf.device == device for leaf in leaves.values()):
        return True
    vector = trees.as_vector(leaves)
    on_gpu = None if vector is None else gpu_copies.find_copy(vector)
    return on_gpu is not None and on_gpu.device == device


def _length_on_card(leaves: Mapping[str, Tensor]) -> float | None:
    """How long leaves are that lie on a card as well; None where they do not."""
    vector = trees.as_vector(leaves)
    on_gpu = (
        None if vector is None or not vector.is_floating_point() else gpu_copies.find_copy(vector)
    )
    return None if on_gpu is None else _lengths_of_rows(on_gpu.unsqueeze(0), None)[0]


def _lengths_of_rows(rows: Tensor, sent: Tensor | None) -> list[float]:
    """The length of each row's change, or of the row where nothing was sent."""
    lengths: list[Tensor] = []
    per_part = max(1, NUMBERS_AT_ONCE // max(1, rows.shape[1]))
    for part in torch.split(rows, per_part):
        change = part if sent is None else part - sent
        # A card has no trouble with squares in float64.
        lengths.append(torch.linalg.vector_norm(change, dim=1, dtype=torch.float64))
    values: list[float] = torch.cat(lengths).tolist()
    return values


def _names_by_kind(packet: Packet) -> dict[str, tuple[str, ...]]:
    """The names of a packet's weights and of its running statistics, by what a length is called."""
    weights = []
    statistics = []
    for name, leaf in packet.values.items():
        if is_parameter(name, leaf):
            weights.append(name)
        elif leaf.is_floating_point():
            statistics.append(name)
    names = {"": tuple(weights), STATISTICS_OF: tuple(statistics)}
    return {kind: those for kind, those in names.items() if those}


def _is_new(leaf: Tensor, before: Tensor | None) -> bool:
    """Whether nothing like a leaf was sent: then all of it is a change."""
    return before is None or before.shape != leaf.shape


CHUNK = 1 << 16
"""So many numbers at once stay in a core's cache between a difference and its length."""


def _parts(leaf: Tensor) -> Sequence[Tensor]:
    """A leaf in parts of at most ``CHUNK`` numbers."""
    # The parts are those of each leaf, never of a whole tree: lengths are then the same to the bit
    # wherever an engine puts the leaves.
    if leaf.numel() <= CHUNK:
        return (leaf,)
    return torch.split(leaf.reshape(-1), CHUNK)


def _parts_of_change(
    after: Mapping[str, Tensor], before: Mapping[str, Tensor], names: Iterable[str]
) -> Iterator[Tensor]:
    """What leaves add to those that were sent, part by part."""
    for name in names:
        old = before.get(name)
        if old is None or _is_new(after[name], old):
            yield from _parts(after[name])
            continue
        for part, old_part in zip(_parts(after[name]), _parts(old), strict=True):
            yield part - old_part


def _length(parts: Iterable[Tensor]) -> float:
    """The Euclidean length of all parts together, but for whole numbers."""
    norms = []
    for part in parts:
        if not part.is_floating_point():
            continue
        norm = float(torch.linalg.vector_norm(part))
        if not math.isfinite(norm):
            # The square of a finite float32 may be too large for one; float64 takes ten times as
            # long.
            norm = float(torch.linalg.vector_norm(part, dtype=torch.float64))
        norms.append(norm)
    # Not a sum of squares, which may be too large for a number.
    return math.hypot(*norms)


class RecentLengths:
    """The lengths of recent updates, by kind; a run's checkpoint holds them."""

    def __init__(self, by_kind: Mapping[str, Sequence[float]] | None = None) -> None:
        self.by_kind = {kind: list(recent) for kind, recent in (by_kind or {}).items()}

    def knows(self, task: Task, lengths: Lengths) -> bool:
        """Whether there are enough recent updates of each of these kinds."""
        kinds = [kind_of(task, name) for name in lengths]
        return all(len(self.by_kind.get(kind, ())) >= FEW_LENGTHS for kind in kinds)

    def usual(self, now: Iterable[tuple[Task, Lengths]]) -> dict[str, float]:
        """The median of each kind of the updates that came ``now``.

        Where there are too few recent ones, those that came now count too.
        """
        recent: dict[str, list[float]] = {}
        single: dict[str, float] = {}
        for task, lengths in now:
            for name, (length, model_length) in lengths.items():
                kind = kind_of(task, name)
                before = self.by_kind.get(kind, [])
                known = recent.setdefault(kind, list(before))
                if len(before) < FEW_LENGTHS:
                    known.append(length)
                single[kind] = model_length or length
        medians = {}
        for kind, known in recent.items():
            # Of two, the shorter: one of them may be a lie. One alone is compared with the model.
            medians[kind] = median_low(known) if len(known) > 1 else single[kind]
        return medians

    def add(self, task: Task, lengths: Lengths) -> None:
        """Remember the lengths of a report that was folded."""
        for name, (length, _) in lengths.items():
            recent = self.by_kind.setdefault(kind_of(task, name), [])
            recent.append(length)
            del recent[:-RECENT]
