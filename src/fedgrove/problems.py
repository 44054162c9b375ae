"""Problems: what targets are, and with that the loss, the metric, and which way is better.

A data set has one :class:`Problem`; a federation that mixes data sets has :class:`Tasks`, one
problem for each. Both answer the same three calls, which objectives and scoring make::

    losses(outputs, y, own)        the loss of each example
    sums(outputs, y, weight, own)  what the metric is computed from, summed over a batch
    of(task)                       the problem of a client

``own`` is ``carry["client"]``, empty for most clients: which labels are the client's own
("allowed"), and which task is ("task"). All is tensors, so that clients of different tasks train in
one stack.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .errors import InputError, check
from .trees import Tree

Sums = Mapping[str, float]
"""Sums over a client's examples by name; ``total`` is how many examples there are."""


# ---- metrics -------------------------------------------------------------------------------------


TAKEN = {
    *("method", "data", "partition", "scenario", "split", "validation", "engine", "seed"),
    *("round", "rounds", "clients", "cohort", "groups", "group_sizes", "scored", "unscored"),
    *("metric", "more_is_better", "share", "finetune", "tasks", "figures", "notes", "seconds"),
    *(
        "purity",
        "density",
        "params",
        "macs",
        "loss",
        "total",
        "lost",
        "refused",
        "abandoned",
        "counts",
    ),
}
"""Names that summary.json and metrics.jsonl have for something else: no metric is called so."""


def _mean(sums: Sums) -> float:
    return sums["value"] / sums["total"]


@dataclass(frozen=True)
class Metric:
    """How well predictions fit: numbers of each example, which are summed, and a value of the sums.

    ``of_examples(outputs, y)`` gives one number per example, or several by name; padding is left
    out by the library. A number for each output of an example becomes their mean, over those of a
    client's own labels. ``value`` gets their sums and ``total``; by default it is the mean.

    >>> exact = Metric("exact", lambda outputs, y: (outputs.round() == y).all(1), share=True)
    >>> outputs = torch.tensor([[1.1], [2.7]])
    >>> exact.sums(outputs, torch.tensor([[1.0], [2.0]]), weight=torch.ones(2))
    {'value': tensor(1.)}
    """

    name: str
    of_examples: Callable[[Tensor, Tensor], Tensor | Mapping[str, Tensor]]
    value: Callable[[Sums], float] = _mean
    more_is_better: bool = True
    share: bool = False
    """Whether it is between 0 and 1, and shown in percent."""

    def __post_init__(self) -> None:
        allowed = "a word of letters, digits, '-' or '_', such as mae"
        is_text = isinstance(self.name, str)
        is_word = is_text and self.name.replace("-", "").replace("_", "").isalnum()
        check(is_word, "name of the metric", self.name, allowed)
        is_taken = self.name in TAKEN or self.name.startswith("bytes")
        check(not is_taken, "name of the metric", self.name, "another word: this one is taken")

    def sums(self, outputs: Tensor, y: Tensor, weight: Tensor, own: Tree | None = None) -> Tree:
        """The numbers of a batch, summed; ``weight`` is 0 for padding."""
        numbers = self.of_examples(outputs, y)
        if isinstance(numbers, Tensor):
            numbers = {"value": numbers}
        taken = sorted({"loss", "total"} & numbers.keys())
        if taken:
            raise InputError(
                f"the metric {self.name} gives a sum called {taken[0]}, which is the library's "
                "own (examples, and their losses); call it otherwise."
            )
        sums = {}
        for name, number in numbers.items():
            per_example = mean_over_outputs(number.to(weight.dtype), own or {})
            sums[name] = (per_example * weight).sum()
        return sums

    @property
    def range(self) -> tuple[float, float]:
        """Where a value must lie."""
        return (0.0, 1.0) if self.share else (-math.inf, math.inf)

    @property
    def words(self) -> dict[str, Any]:
        """What a summary says of it."""
        return {
            "metric": self.name,
            "more_is_better": self.more_is_better,
            "share": self.share,
        }


def mean_over_outputs(values: Tensor, own: Tree) -> Tensor:
    """One value per example: the mean over its outputs, or over those that are the client's own.

    >>> values = torch.tensor([[3.0, 0.0, 0.0]])
    >>> mean_over_outputs(values, {"allowed": torch.tensor([True, False, False])})
    tensor([3.])
    """
    if values.dim() == 1:
        return values
    values = values.flatten(1)
    if "allowed" not in own or values.shape[1] != len(own["allowed"]):
        return values.mean(1)
    # Not a product: the loss of a label that the client does not have may be infinite.
    mine = torch.where(own["allowed"], values, torch.zeros_like(values))
    return mine.sum(1) / own["allowed"].sum()


# ---- one problem ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """What a data set's targets are.

    ``loss(outputs, y)`` gives a loss per example, or one for each output, whose mean is taken, over
    a client's own labels. Both are pure functions of tensors: no Python branch on values.
    """

    name: str
    loss: Callable[[Tensor, Tensor], Tensor]
    metric: Metric
    kind: str = ""
    """What y holds, whatever the name is: "classes", "labels" or "numbers"; "": something else."""

    def losses(self, outputs: Tensor, y: Tensor, own: Tree) -> Tensor:
        """The loss of each example."""
        return mean_over_outputs(self.loss(restricted(outputs, own), y), own)

    def sums(self, outputs: Tensor, y: Tensor, weight: Tensor, own: Tree) -> Tree:
        """What the metric is computed from, the number of examples, and the sum of their losses."""
        loss = self.losses(outputs, y, own)
        return {
            **self.metric.sums(restricted(outputs, own), y, weight, own),
            "total": weight.sum(),
            "loss": (loss * weight).sum(),
        }

    def of(self, task: str) -> Problem:
        """The problem of every client."""
        return self

    def own_sums(self, sums: Tree, task: str) -> dict[str, float]:
        """The sums of a client, as numbers."""
        return {name: float(value) for name, value in sums.items()}

    @property
    def range(self) -> tuple[float, float]:
        """Where a client's value must lie."""
        return self.metric.range


def restricted(outputs: Tensor, own: Tree) -> Tensor:
    """The outputs, where those of labels that a client does not have can never win."""
    if "allowed" not in own:
        return outputs
    # Not minus infinity: the loss of padding would be infinite, and infinite times its weight of 0
    # is not a number. The exponential of this is 0 all the same.
    lowest = torch.finfo(outputs.dtype).min / 4
    return outputs.masked_fill(~own["allowed"], lowest)


# ---- classes -------------------------------------------------------------------------------------


def cross_entropy(outputs: Tensor, y: Tensor) -> Tensor:
    """:math:`-log p(y | x)` of each example; y (n,) holds the numbers of classes."""
    return F.cross_entropy(outputs, y, reduction="none")


def _is_right(outputs: Tensor, y: Tensor) -> Mapping[str, Tensor]:
    return {"correct": outputs.argmax(1) == y}


def _share_of_right(sums: Sums) -> float:
    return sums["correct"] / sums["total"]


ACCURACY = Metric("accuracy", _is_right, _share_of_right, share=True)
"""The share of examples whose largest logit is that of their class."""

CLASSES = Problem("classes", cross_entropy, ACCURACY, "classes")
"""Each example is of one class: y int64 (n,)."""


# ---- several labels ------------------------------------------------------------------------------


def binary_cross_entropy(outputs: Tensor, y: Tensor) -> Tensor:
    """The loss of a yes or no for each label: (n, L), as y, which is 0 or 1."""
    targets = y.to(outputs.dtype)
    return F.binary_cross_entropy_with_logits(outputs, targets, reduction="none")


def _hits_and_misses(outputs: Tensor, y: Tensor) -> Mapping[str, Tensor]:
    said = outputs > 0
    true = y > 0.5
    return {
        "hits": (said & true).sum(1),
        "false_alarms": (said & ~true).sum(1),
        "misses": (~said & true).sum(1),
    }


def _f1(sums: Sums) -> float:
    """2 hits / (2 hits + false alarms + misses); 1 where there was nothing to find or to say."""
    wrong = sums["false_alarms"] + sums["misses"]
    if not sums["hits"] + wrong:
        return 1.0
    return 2 * sums["hits"] / (2 * sums["hits"] + wrong)


def _share_of_right_labels(outputs: Tensor, y: Tensor) -> Tensor:
    return (outputs > 0) == (y > 0.5)


F1 = Metric("f1", _hits_and_misses, _f1, share=True)
"""Micro-averaged F1: over all labels of all of a client's examples together."""

LABEL_ACCURACY = Metric("label_accuracy", _share_of_right_labels, share=True)
"""The share of labels that are right, of those that a client has."""

LABELS = Problem("labels", binary_cross_entropy, F1, "labels")
"""Each example has any number of labels: y (n, L) is 0 or 1; a logit above 0 says yes."""


# ---- numbers -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Unit:
    """What an output of 0 and a step of 1 mean in the units of the targets, one for each output.

    A network learns targets near 0 with a spread near 1; a table reports them as they were given.
    """

    mean: tuple[float, ...] = (0.0,)
    scale: tuple[float, ...] = (1.0,)

    def outputs_of(self, y: Tensor) -> Tensor:
        """Targets (n, L) as a network should give them."""
        # Column by column, with plain numbers: a tensor made of these would be copied to the
        # device in every step, which a captured graph does not allow.
        columns = []
        for column, mean, scale in zip(y.unbind(1), self.mean, self.scale, strict=True):
            columns.append((column - mean) / scale)
        return torch.stack(columns, 1)

    def targets_of(self, outputs: Tensor) -> Tensor:
        """A network's outputs (n, L) in the units of the targets."""
        columns = []
        for column, mean, scale in zip(outputs.unbind(1), self.mean, self.scale, strict=True):
            columns.append(column * scale + mean)
        return torch.stack(columns, 1)


@dataclass(frozen=True)
class InUnits:
    """A function of predictions and targets that gets both in the units of the targets."""

    f: Callable[[Tensor, Tensor], Tensor]
    unit: Unit

    def __call__(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The function's value."""
        return self.f(self.unit.targets_of(outputs), _like(y, outputs))


@dataclass(frozen=True)
class SquaredError:
    """The squared error of each output, in units of its spread."""

    unit: Unit

    def __call__(self, outputs: Tensor, y: Tensor) -> Tensor:
        """One row per example, one column per output."""
        return (outputs - self.unit.outputs_of(_like(y, outputs))) ** 2


def _like(y: Tensor, outputs: Tensor) -> Tensor:
    # y (n,) minus outputs (n, 1) would be (n, n).
    return y.to(outputs.dtype).reshape(outputs.shape)


def _absolute(predicted: Tensor, y: Tensor) -> Tensor:
    return (predicted - y).abs().mean(1)


def _squared(predicted: Tensor, y: Tensor) -> Tensor:
    return ((predicted - y) ** 2).mean(1)


def _root_of_mean(sums: Sums) -> float:
    return math.sqrt(sums["value"] / sums["total"])


def numbers(unit: Unit = Unit(), metric: str = "mae") -> Problem:
    """Each example has one number or more, y float (n, L), learnt by their squared error.

    ``metric`` is "mae", "rmse" or "mse", in the units of the targets.
    """
    metrics = {
        "mae": Metric("mae", InUnits(_absolute, unit), more_is_better=False),
        "rmse": Metric("rmse", InUnits(_squared, unit), _root_of_mean, more_is_better=False),
        "mse": Metric("mse", InUnits(_squared, unit), more_is_better=False),
    }
    check(metric in metrics, "metric", metric, f"one of {', '.join(metrics)}")
    return Problem("numbers", SquaredError(unit), metrics[metric], "numbers")


# ---- several tasks in one federation -------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """A data set in a mixed federation: its problem, its outputs, and the columns of its targets.

    It has the outputs ``first`` to ``first + outputs``. ``columns`` 0 stands for the number of a
    class.
    """

    name: str
    problem: Problem
    first: int
    outputs: int
    columns: int = 0

    def cut(self, outputs: Tensor, y: Tensor, is_mine: Tensor) -> tuple[Tensor, Tensor]:
        """The task's own outputs and targets; zeros where the client is of another task.

        Zeros are valid targets of every problem, and let no gradient through.
        """
        mine = outputs[:, self.first : self.first + self.outputs]
        if self.columns:
            targets = y[:, : self.columns]
        else:
            # Beside targets of several columns, a class stands in the first of them.
            targets = y.long() if y.dim() == 1 else y[:, 0].long()
        zero_targets = torch.zeros_like(targets)
        return (
            torch.where(is_mine, mine, torch.zeros_like(mine)),
            torch.where(is_mine, targets, zero_targets),
        )

    def own(self, own: Tree) -> Tree:
        """The client's own labels among the task's outputs."""
        if "allowed" not in own:
            return {}
        return {"allowed": own["allowed"][self.first : self.first + self.outputs]}


@dataclass(frozen=True)
class Tasks:
    """The problems of a mixed federation; ``own["task"]`` is the number of a client's task."""

    tasks: tuple[Task, ...]
    name: str = "tasks"
    kind: str = "tasks"

    def losses(self, outputs: Tensor, y: Tensor, own: Tree) -> Tensor:
        """The loss of each example, by the problem of the client's task."""
        total = outputs.new_zeros(outputs.shape[0])
        for number, task in enumerate(self.tasks):
            is_mine = own["task"] == number
            losses = task.problem.losses(*task.cut(outputs, y, is_mine), task.own(own))
            # Each loss is computed and one is taken: a branch would need a stack for each task.
            total = total + torch.where(is_mine, losses, torch.zeros_like(losses))
        return total

    def sums(self, outputs: Tensor, y: Tensor, weight: Tensor, own: Tree) -> Tree:
        """The sums of every task, of which a client reads its own."""
        sums: Tree = {}
        for number, task in enumerate(self.tasks):
            cut = task.cut(outputs, y, own["task"] == number)
            for name, value in task.problem.sums(*cut, weight, task.own(own)).items():
                sums[f"{task.name}.{name}"] = value
        return sums

    def of(self, task: str) -> Problem:
        """The problem of a client of this task."""
        return self.tasks[self.number(task)].problem

    def number(self, task: str) -> int:
        """The number of a task."""
        names = [known.name for known in self.tasks]
        if task not in names:
            raise InputError(
                f"a client is of task {task!r}; the federation's tasks are {', '.join(names)}."
            )
        return names.index(task)

    def own_sums(self, sums: Tree, task: str) -> dict[str, float]:
        """The sums of a client's own task, as numbers."""
        start = f"{task}."
        found = {}
        for name, value in sums.items():
            if name.startswith(start):
                found[name.removeprefix(start)] = float(value)
        return found

    @property
    def range(self) -> tuple[float, float]:
        """Where a client's value must lie, whatever its task."""
        lows, highs = zip(*(task.problem.range for task in self.tasks), strict=True)
        return (min(lows), max(highs))


AnyProblem = Problem | Tasks


# ---- the classes of a client, whatever else there is ---------------------------------------------


class ClassTargets(NamedTuple):
    """A batch's targets as classes, counted over all outputs of the network."""

    y: Tensor
    """(n,): the output of each example's class; 0 where the client's targets are no classes."""
    own: Tensor
    """(outputs,): which outputs are classes of the client's; none where it has no classes."""

    @property
    def is_given(self) -> Tensor:
        """Whether the client's targets are classes at all."""
        return self.own.any()


def class_targets(problem: AnyProblem, outputs: Tensor, y: Tensor, own: Tree) -> ClassTargets:
    """The targets of a batch as classes, for objectives that need more than their loss.

    In a mixed federation those of the client's task, if that is one of classes.

    >>> outputs = torch.zeros(2, 3)
    >>> class_targets(CLASSES, outputs, torch.tensor([2, 0]), {})
    ClassTargets(y=tensor([2, 0]), own=tensor([True, True, True]))
    """
    check_has_classes(problem)
    count = outputs.shape[1]
    number = torch.arange(count, device=outputs.device)
    if not isinstance(problem, Tasks):
        everything = number >= 0
        return ClassTargets(y, own.get("allowed", everything))
    # Beside targets of several columns, a class stands in the first of them.
    classes = y.long() if y.dim() == 1 else y[:, 0].long()
    target = torch.zeros_like(classes)
    mine = number < 0
    for position, task in enumerate(problem.tasks):
        if task.problem.kind != "classes":
            continue
        is_mine = own["task"] == position
        of_task = (number >= task.first) & (number < task.first + task.outputs)
        target = torch.where(is_mine, classes + task.first, target)
        mine = torch.where(is_mine, of_task, mine)
    if "allowed" in own:
        mine = mine & own["allowed"]
    return ClassTargets(target, mine)


def check_has_classes(problem: AnyProblem) -> None:
    """Refuse a federation none of whose targets are classes."""
    if isinstance(problem, Tasks):
        kinds = {task.problem.kind for task in problem.tasks}
    else:
        kinds = {problem.kind}
    if "classes" not in kinds:
        raise InputError(
            f"the targets of the data are {problem.name}, and what is asked for is made of "
            "classes; take data with classes, or another method, as fedavg."
        )


def client_marks(
    problem: AnyProblem, outputs: int, labels: tuple[int, ...] | None, task: str
) -> Tree:
    """What ``carry["client"]`` holds: a client's own labels and its task, where there are such.

    >>> client_marks(CLASSES, 3, (0, 2), "")
    {'allowed': tensor([ True, False,  True])}
    """
    marks: Tree = {}
    first = 0
    last = outputs
    if isinstance(problem, Tasks):
        number = problem.number(task)
        marks["task"] = torch.tensor(number)
        first = problem.tasks[number].first
        last = first + problem.tasks[number].outputs
    if labels is None:
        return marks
    if problem.of(task).kind == "numbers":
        raise InputError(
            "a client has labels of its own, but its targets are numbers; leave labels out."
        )
    # A tuple: what is written out in the sentence may be a tensor.
    own = tuple(labels)
    check(
        all(0 <= label < last - first for label in own) and len(own) > 0,
        "labels",
        own,
        f"numbers from 0 to {last - first - 1}",
    )
    marks["allowed"] = torch.zeros(outputs, dtype=torch.bool)
    marks["allowed"][[first + label for label in labels]] = True
    return marks
