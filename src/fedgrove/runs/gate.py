"""The gate: refuses reports that are not what a task requests, or that would spoil the model."""

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
from ..errors import check, clean_text, spell_option
from ..options.groups import NORM_BOUND as NORM_BOUND
from ..parts.robust import is_parameter
from .files import is_plain_name

REFUSALS = {
    "malformed": "it is not a report, or its parts have the wrong types",
    "client": "it names a client other than the client of the task",
    "duplicate": "the task was already answered, or never sent",
    "examples": "it claims a number of examples that differs from the client's enrolment",
    "memory": "it names a version of the client's memory that this task cannot have created",
    "metrics": "a number is missing, not finite or out of range",
    "packets": "its packets differ from those that the task requests",
    "tensors": "the tensors of a packet differ from the requested ones in name, type or shape",
    "mask": "the mask of a packet differs from the requested mask, or a value is outside it",
    "not finite": "a value is not finite",
    "too long": "the update is far longer than those of recent rounds",
}
"""Why a report can be refused."""

RECENT_UPDATES = 100
"""How many recent lengths of updates of a kind are kept."""
FEW_LENGTHS = 9
"""This many lengths have a median that a few liars cannot move far."""


MOST_OTHER_METRICS = 64
LONGEST_METRIC = 100
"""How many numbers a report may have that its method does not declare, and how long their names
may be."""
LARGEST_METRIC = 1e100
"""How large a number of a report may be: sums and squares of larger ones would not be finite."""


class Refusal(NamedTuple):
    """Why a report was refused: a key of :data:`REFUSALS`, and a sentence."""

    reason: str
    sentence: str


@dataclass(frozen=True)
class Gate:
    """Checks every report before it is folded.

    A report must come from the client of its task and have the packets that the method declares,
    with the declared tensors, types, shapes and masks, and finite numbers. ``examples`` must be
    what the client enrolled with: a client cannot change its weight after it has enrolled.
    """

    norm: float = NORM_BOUND
    """Refuse an update that is longer than the model it changes and longer than ``norm`` times the
    median of recent ones; 0: refuse none for its length."""

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
        """Return why the gate refuses a report; None if it does not, apart from its length.

        Args:
            report: The answer, which may be anything.
            task: The task.
            expected: What its report contains.
            info: What the server knows about the client.
            ruler: Measures the packets; :meth:`lengths` need not measure them again.
        """
        # A length shows that numbers are finite; without lengths their sum is faster.
        measures = ruler if self.norm else None
        try:
            if measures is not None:
                measures.start_report()
            return _check_report(report, task, expected, info, measures)
        except Exception as error:
            # An answer from outside may be anything: what cannot even be looked at is refused.
            return malformed(task, error)

    def lengths(self, report: Report, task: Task, ruler: Ruler | None = None) -> Lengths:
        """Return the lengths of a report's updates for the gate; nothing if they do not matter."""
        return measure_lengths(report, task, ruler) if self.norm else {}

    def refuses_lengths(
        self, task: Task, lengths: Lengths, usual: Mapping[str, float]
    ) -> Refusal | None:
        """Return why the gate refuses an update as too long, compared with others of its kind."""
        for name, (length, model_length) in lengths.items():
            factor = self.norm
            if name.endswith(STATISTICS_ENDING):
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
                    f"{spell_option('norm_bound')} changes the factor.",
                )
        return None


def malformed(task: Task, error: Exception) -> Refusal:
    """Return the gate's refusal of a report that cannot even be read."""
    sentence = f"client {task.to} sent a malformed report: {type(error).__name__}: {error}."
    return Refusal("malformed", sentence)


# ---- is it what the task requests ----------------------------------------------------------------


def _check_report(
    report: object, task: Task, expected: ExpectedReport, info: ClientInfo, ruler: Ruler | None
) -> Refusal | None:
    client = f"client {task.to}"
    if not isinstance(report, Report):
        kind = type(report).__name__
        return Refusal("malformed", f"{client} answered with a {kind}, which is not a report.")
    if report.of != task.to:
        return Refusal(
            "client", f"{client} was given the task, but the report names client {report.of}."
        )
    if report.memory is not None and not is_plain_name(report.memory):
        return Refusal("malformed", f"{client} names {report.memory!r} as its memory.")
    if report.examples != info.examples:
        return Refusal(
            "examples",
            f"{client} claims {report.examples} examples but enrolled with {info.examples}.",
        )
    reason = _check_metrics(report.metrics, expected)
    if reason is not None:
        return Refusal("metrics", f"{client} sent {reason}")
    if report.give.keys() != expected.packets.keys():
        wanted = ", ".join(expected.packets) or "nothing"
        given = ", ".join(report.give) or "nothing"
        return Refusal(
            "packets",
            f"{client} sent {given} where the report of {task.verb} must contain {wanted}; a "
            "method declares what its reports contain with Give(..., expected=...).",
        )
    for name, form in expected.packets.items():
        refusal = _check_packet(report.give[name], form, task.send.get(name), ruler)
        if refusal is not None:
            return Refusal(refusal.reason, f"{client} sent {name} with {refusal.sentence}")
    return None


def _check_metrics(metrics: Mapping[str, float], expected: ExpectedReport) -> str | None:
    declared = len(expected.metrics) + len(expected.optional)
    if len(metrics) > declared + MOST_OTHER_METRICS:
        return f"{len(metrics)} numbers; {MOST_OTHER_METRICS} may be added to those of the method."
    for name, number in metrics.items():
        # Names reach outputs of the run: metrics.jsonl, tables, pages.
        if len(name) > LONGEST_METRIC or not name.isprintable():
            return f"a number with an unusable name, {clean_text(name, LONGEST_METRIC)!r}."
        if not math.isfinite(number):
            return f"{name} = {number}, which is not finite."
        if abs(number) > LARGEST_METRIC:
            return f"{name} = {number:g}; it must be at most {LARGEST_METRIC:g} in size."
    for name in expected.metrics:
        if name not in metrics:
            return f"no {name}, which the answer must contain."
    for name, (lowest, highest) in {**expected.metrics, **expected.optional}.items():
        if name in metrics and not lowest <= metrics[name] <= highest:
            return f"{name} = {metrics[name]:g}; it must be between {lowest:g} and {highest:g}."
    return None


def _check_packet(
    packet: Packet, form: ExpectedPacket, sent: Packet | None, ruler: Ruler | None
) -> Refusal | None:
    # All shapes before any value: a wrong shape is the more telling reason.
    if list(packet.values) != list(form.tensors):
        one_sided = sorted(packet.values.keys() ^ form.tensors.keys())
        what = f"{', '.join(one_sided)} on one side only" if one_sided else "another order"
        return Refusal("tensors", f"tensors that differ from the requested ones: {what}.")
    for name, (dtype, shape) in form.tensors.items():
        leaf = packet.values[name]
        is_dense = isinstance(leaf, Tensor) and leaf.layout is torch.strided
        if not is_dense:
            return Refusal("tensors", f"something other than a dense tensor in {name}.")
        if leaf.dtype != dtype or tuple(leaf.shape) != shape:
            return Refusal(
                "tensors",
                f"{leaf.dtype} of shape {tuple(leaf.shape)} in {name}; it must be {dtype} of "
                f"shape {shape}.",
            )
    reason = _check_mask(packet, form)
    if reason is not None:
        return Refusal("mask", reason)
    # What is infinite or no number makes a change that is not finite, whatever was sent.
    if ruler is not None:
        changes = ruler.changes(packet, sent).values()
        if all(math.isfinite(change.length) for change in changes):
            return None
    for name, leaf in packet.values.items():
        if not trees.is_finite_leaf(leaf):
            return Refusal(
                "not finite",
                f"values that are not finite in {name}; a lower lr or a gradient clip may help.",
            )
    return None


def _check_mask(packet: Packet, form: ExpectedPacket) -> str | None:
    mask = packet.mask
    if mask is None:
        needs_one = form.mask is not None and form.mask != "own"
        return "no mask where it must have one." if needs_one else None
    if form.mask is None:
        return "a mask where it must have none."
    if form.mask != "own" and not is_same_mask(mask, form.mask):
        return "a mask that differs from the one it was sent."
    for name, kept in mask.items():
        if name not in form.tensors:
            return f"a mask of {name}, which it does not contain."
        if kept.dtype != torch.bool or tuple(kept.shape) != form.tensors[name][1]:
            return f"a mask of {kept.dtype} and shape {tuple(kept.shape)} in {name}."
        # What lies outside a mask is not sent, so it must not count where nothing is sent either.
        # As booleans true is more than false; to count them takes a fifth of the time of any().
        if trees.count_true(packet.values[name].bool() > kept):
            return f"values outside its mask in {name}."
    return None


def is_same_mask(mask: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Whether the masks of a task and its report are equal, wherever their tensors are."""
    # Most clients return the very mask they were sent.
    if mask is other:
        return True
    if mask.keys() != other.keys():
        return False
    for name, kept in mask.items():
        if kept is not other[name] and not torch.equal(kept.cpu(), other[name].cpu()):
            return False
    return True


# ---- how long updates are ------------------------------------------------------------------------

STATISTICS_ENDING = ", statistics"
"""Running statistics have their own length, under the packet's name with this ending."""

Lengths = Mapping[str, tuple[float, float]]
"""By packet: the length of the update, and of the model it changes (0 if nothing was sent)."""


def kind_of(task: Task, packet: str) -> str:
    """Return the kind of an update for the gate: packet and verb, which have similar lengths."""
    return f"{task.verb.partition(':')[0]}/{packet}"


def measure_lengths(report: Report, task: Task, ruler: Ruler | None = None) -> Lengths:
    """Return how long each update of a report is, for the gate.

    A new packet counts with its own length.

    A new packet is an update of the model under another name, or evidence about it, so it is
    compared with all that was sent. One without floating-point numbers has no length.
    """
    if ruler is None:
        ruler = Ruler()
    lengths = {}
    for name, packet in report.give.items():
        sent = task.send.get(name)
        for kind, change in ruler.changes(packet, sent).items():
            if sent is None:
                model_length = math.hypot(*[ruler.length(other) for other in task.send.values()])
            else:
                model_length = ruler.length(sent, change.names)
            lengths[f"{name}{kind}"] = (change.length, model_length)
    return lengths


NOTHING: Mapping[str, Tensor] = {}
"""What was sent for a new packet: one object, since it is recognised by its id."""


class Change(NamedTuple):
    """The length of a change of some leaves."""

    length: float
    names: tuple[str, ...]


NUMBERS_AT_ONCE = 1 << 28
"""How many differences a GPU keeps at once."""
MOST_STACKS = 16
"""How many stacks of clients have their lengths cached."""
MOST_MODELS = 8
"""How many sent models stay on a GPU: one, or one per group, goes to many clients."""


class Ruler:
    """Measures the packets of one exchange, each once: also a model that all clients are sent."""

    def __init__(self) -> None:
        # By the id of a packet's values. The values are kept alive, so that their ids stay theirs.
        self._alive: dict[int, Mapping[str, Tensor]] = {}
        self._lengths: dict[tuple[int, tuple[str, ...] | None], float] = {}
        self._models: dict[tuple[int, tuple[str, ...], torch.device], Tensor] = {}
        # Lengths of all rows of a stack, by its address and what the rows are compared with. The
        # rows are kept alive, so that the address stays theirs.
        self._stacks: dict[tuple[int, int, tuple[str, ...]], tuple[Tensor, list[float]]] = {}
        self._seen: set[tuple[int, int, tuple[str, ...]]] = set()
        # By the id of a packet; of one report only, since a cohort may be large.
        self._changes: dict[int, tuple[Packet, dict[str, Change]]] = {}

    def start_report(self) -> None:
        """Drop the changes of the last report before the gate measures the next."""
        self._changes.clear()

    def changes(self, packet: Packet, sent: Packet | None) -> Mapping[str, Change]:
        """Return what a reported packet changes: weights, under "", and running statistics."""
        if id(packet) not in self._changes:
            before = NOTHING if sent is None else sent.values
            changes = {}
            for kind, names in _names_by_kind(packet).items():
                length = self._change_on_gpu(packet.values, before, names)
                if length is None:
                    length = _length(_changed_chunks(packet.values, before, names))
                changes[kind] = Change(length, names)
            self._changes[id(packet)] = (packet, changes)
        return self._changes[id(packet)][1]

    def length(self, sent: Packet, names: tuple[str, ...] | None = None) -> float:
        """Return the length of a packet that the run sent, or of its leaves with these names."""
        key = (id(sent.values), names)
        if key not in self._lengths:
            self._alive[id(sent.values)] = sent.values
            chosen = sent.values if names is None else names
            leaves = trees.pick(sent.values, [name for name in chosen if name in sent.values])
            vector = trees.as_vector(leaves)
            copy = None
            if vector is not None and vector.is_floating_point():
                copy = gpu_copies.find_copy(vector)
            if copy is not None:
                self._lengths[key] = _row_lengths(copy.unsqueeze(0), None)[0]
            else:
                chunks = (chunk for leaf in leaves.values() for chunk in _chunks(leaf))
                self._lengths[key] = _length(chunks)
        return self._lengths[key]

    def _change_on_gpu(
        self, after: Mapping[str, Tensor], before: Mapping[str, Tensor], names: tuple[str, ...]
    ) -> float | None:
        """Return the length of a change of leaves that have GPU copies; None without copies."""
        vector = trees.as_vector(trees.pick(after, names))
        found = None if vector is None else gpu_copies.find_row(vector)
        if found is None:
            return None
        if before and any(_is_new(after[name], before.get(name)) for name in names):
            return None
        rows, row = found
        key = (rows.data_ptr(), id(before), names)
        if key not in self._stacks:
            self._alive[id(before)] = before
            # Every client may have been sent something else: then each row is measured once.
            is_first = key not in self._seen
            self._seen.add(key)
            if is_first and not _is_on(before, names, rows.device):
                # The CPU measures one client faster than a GPU gets what it was sent.
                return None
            sent = self._sent_on_gpu(before, names, rows.device)
            if is_first:
                return _row_lengths(rows[row : row + 1], sent)[0]
            # For all clients of the stack, even if few of them were sent this: a call of the GPU
            # takes longer than its work.
            if len(self._stacks) == MOST_STACKS:
                del self._stacks[next(iter(self._stacks))]
            self._stacks[key] = (rows, _row_lengths(rows, sent))
        return self._stacks[key][1][row]

    def _sent_on_gpu(
        self, before: Mapping[str, Tensor], names: tuple[str, ...], device: torch.device
    ) -> Tensor | None:
        """Return what was sent as a vector on the GPU; None if nothing was."""
        if not before:
            return None
        key = (id(before), names, device)
        if key not in self._models:
            leaves = trees.pick(before, names)
            vector = trees.as_vector(leaves)
            if vector is None:
                vector = trees.flatten(leaves)
            if len(self._models) == MOST_MODELS:
                del self._models[next(iter(self._models))]
            self._models[key] = gpu_copies.read_on(vector, device)
        return self._models[key]


def _is_on(sent: Mapping[str, Tensor], names: tuple[str, ...], device: torch.device) -> bool:
    """Whether what was sent is on a device already; nothing always is."""
    leaves = trees.pick(sent, names) if sent else {}
    if all(leaf.device == device for leaf in leaves.values()):
        return True
    vector = trees.as_vector(leaves)
    copy = None if vector is None else gpu_copies.find_copy(vector)
    return copy is not None and copy.device == device


def _row_lengths(rows: Tensor, sent: Tensor | None) -> list[float]:
    """Return the length of each row's change, or of the row if nothing was sent."""
    lengths: list[Tensor] = []
    rows_at_once = max(1, NUMBERS_AT_ONCE // max(1, rows.shape[1]))
    for some in torch.split(rows, rows_at_once):
        change = some if sent is None else some - sent
        # Squares in float64 cost a GPU little.
        lengths.append(torch.linalg.vector_norm(change, dim=1, dtype=torch.float64))
    values: list[float] = torch.cat(lengths).tolist()
    return values


def _names_by_kind(packet: Packet) -> dict[str, tuple[str, ...]]:
    """Return the names of a packet's weights and of its running statistics, if it has them."""
    names: dict[str, list[str]] = {"": [], STATISTICS_ENDING: []}
    for name, leaf in packet.values.items():
        if is_parameter(name, leaf):
            names[""].append(name)
        elif leaf.is_floating_point():
            names[STATISTICS_ENDING].append(name)
    return {kind: tuple(those) for kind, those in names.items() if those}


def _is_new(leaf: Tensor, before: Tensor | None) -> bool:
    """Whether nothing like a leaf was sent: then all of it is a change."""
    return before is None or before.shape != leaf.shape


LENGTH_CHUNK = 1 << 16
"""This many numbers stay in a core's cache between their difference and its length."""


def _chunks(leaf: Tensor) -> Sequence[Tensor]:
    # Chunks of each leaf, never of a whole tree: lengths are then the same to the bit wherever an
    # engine puts the leaves.
    if leaf.numel() <= LENGTH_CHUNK:
        return (leaf,)
    return torch.split(leaf.reshape(-1), LENGTH_CHUNK)


def _changed_chunks(
    after: Mapping[str, Tensor], before: Mapping[str, Tensor], names: Iterable[str]
) -> Iterator[Tensor]:
    """Yield the change of leaves, chunk by chunk."""
    for name in names:
        old = before.get(name)
        if old is None or _is_new(after[name], old):
            yield from _chunks(after[name])
            continue
        for chunk, old_chunk in zip(_chunks(after[name]), _chunks(old), strict=True):
            yield chunk - old_chunk


def _length(chunks: Iterable[Tensor]) -> float:
    """Return the Euclidean length of all chunks together, without those of whole numbers."""
    norms = []
    for chunk in chunks:
        if not chunk.is_floating_point():
            continue
        norm = float(torch.linalg.vector_norm(chunk))
        if not math.isfinite(norm):
            # The square of a finite float32 may be too large for one; float64 takes ten times as
            # long.
            norm = float(torch.linalg.vector_norm(chunk, dtype=torch.float64))
        norms.append(norm)
    # Not a sum of squares, which may be too large for a number.
    return math.hypot(*norms)


class RecentLengths:
    """The lengths of recent updates, by kind; a run's checkpoint has them."""

    def __init__(self, by_kind: Mapping[str, Sequence[float]] | None = None) -> None:
        self.by_kind = {kind: list(recent) for kind, recent in (by_kind or {}).items()}

    def knows(self, task: Task, lengths: Lengths) -> bool:
        """Whether the run has seen enough recent updates of each of these kinds."""
        kinds = [kind_of(task, name) for name in lengths]
        return all(len(self.by_kind.get(kind, ())) >= FEW_LENGTHS for kind in kinds)

    def usual(self, now: Iterable[tuple[Task, Lengths]]) -> dict[str, float]:
        """Return the median length of the run's recent updates, by kind, with those ``now``.

        They count themselves only if there are too few recent ones.
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
            del recent[:-RECENT_UPDATES]
