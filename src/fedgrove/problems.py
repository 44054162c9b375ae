"""Problems: what the targets of a data set are, with the loss and the metric that fit them.

A data set has one :class:`Problem`. A federation that mixes data sets has a :class:`MixedProblem`,
with one problem for each data set. Objectives and scoring call both in the same way::

    losses(outputs, y, marks)        the loss of each example
    sums(outputs, y, weight, marks)  the sums over a batch that the metric is computed from
    for_task(task)                   the problem of a client with this task

``marks`` is ``carry["client"]`` (:func:`client_marks`). It is empty for most clients. Otherwise it
holds the labels that the client knows ("allowed") and the number of its task ("task"). All values
are tensors, so that clients with different tasks can train in one stack.
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
from .renamed import find_old_names
from .trees import Tree

MetricSums = Mapping[str, float]
"""Sums over a client's examples by name; ``total`` is the number of examples."""


# ---- metrics -------------------------------------------------------------------------------------


RESERVED_NAMES = (
    "method", "data", "partition", "scenario", "split", "validation", "engine", "seed", "round",
    "rounds", "clients", "cohort", "groups", "group_sizes", "scored", "unscored", "metric",
    "more_is_better", "share", "finetune", "tasks", "figures", "notes", "seconds", "purity",
    "density", "params", "macs", "loss", "total", "lost", "refused", "abandoned", "counts",
)  # fmt: skip
"""Names with another meaning in summary.json and metrics.jsonl: no metric may have one of them."""


def _mean(sums: MetricSums) -> float:
    """Return the mean of a metric from its sums."""
    return sums["value"] / sums["total"]


@dataclass(frozen=True)
class Metric:
    """How well predictions fit the targets: a value of each example, and what their sums mean.

    Args:
        name: The name in tables and in summary.json.
        of_examples: ``of_examples(outputs, y)`` returns one number per example, or a dictionary of
            several. The library leaves out padding. If there is a number for each output of an
            example, their mean is taken, over the labels that the client knows.
        value: ``value(sums)`` gets the sums over a client's examples and ``total``, the number of
            examples. The default is the mean.
        more_is_better: Whether a larger value is better.
        share: Whether the value lies between 0 and 1 and is shown in percent.

    >>> exact = Metric("exact", lambda outputs, y: (outputs.round() == y).all(1), share=True)
    >>> outputs = torch.tensor([[1.1], [2.7]])
    >>> exact.sums(outputs, torch.tensor([[1.0], [2.0]]), weight=torch.ones(2))
    {'value': tensor(1.)}
    """

    name: str
    of_examples: Callable[[Tensor, Tensor], Tensor | Mapping[str, Tensor]]
    value: Callable[[MetricSums], float] = _mean
    more_is_better: bool = True
    share: bool = False

    def __post_init__(self) -> None:
        allowed = "letters, digits, '-' or '_', such as mae"
        is_text = isinstance(self.name, str)
        is_word = is_text and self.name.replace("-", "").replace("_", "").isalnum()
        check(is_word, "name of the metric", self.name, allowed)
        is_reserved = self.name in RESERVED_NAMES or self.name.startswith("bytes")
        allowed = "a different name: summaries use this one for something else"
        check(not is_reserved, "name of the metric", self.name, allowed)

    def sums(self, outputs: Tensor, y: Tensor, weight: Tensor, marks: Tree | None = None) -> Tree:
        """Sum the numbers of a batch; ``weight`` is 0 for padding."""
        numbers = self.of_examples(outputs, y)
        if isinstance(numbers, Tensor):
            numbers = {"value": numbers}
        for name in ("loss", "total"):
            if name in numbers:
                raise InputError(
                    f"the metric {self.name} returns a number called {name}, which the library "
                    "computes itself; choose a different name."
                )
        sums = {}
        for name, number in numbers.items():
            per_example = average_outputs(number.to(weight.dtype), marks or {})
            sums[name] = (per_example * weight).sum()
        return sums

    @property
    def value_range(self) -> tuple[float, float]:
        """The lowest and the highest possible value."""
        if self.share:
            return (0.0, 1.0)
        return (-math.inf, math.inf)

    def describe(self) -> dict[str, Any]:
        """Return the entries about the metric in summary.json."""
        return {
            "metric": self.name,
            "more_is_better": self.more_is_better,
            "share": self.share,
        }


def average_outputs(values: Tensor, marks: Tree) -> Tensor:
    """Return one value per example: the mean over its outputs, or over the labels a client knows.

    >>> values = torch.tensor([[3.0, 0.0, 0.0]])
    >>> average_outputs(values, {"allowed": torch.tensor([True, False, False])})
    tensor([3.])
    """
    if values.dim() == 1:
        return values
    values = values.flatten(1)
    if "allowed" not in marks or values.shape[1] != len(marks["allowed"]):
        return values.mean(1)
    # Not a product: the loss of a label that the client does not know may be infinite.
    known = torch.where(marks["allowed"], values, torch.zeros_like(values))
    return known.sum(1) / marks["allowed"].sum()


def restrict_outputs(outputs: Tensor, marks: Tree) -> Tensor:
    """Make the outputs of labels that a client does not know so low that they never win."""
    if "allowed" not in marks:
        return outputs
    # Not minus infinity: the loss of padding would be infinite, and infinite times its weight of 0
    # is not a number. The exponential of this value is 0 as well.
    lowest = torch.finfo(outputs.dtype).min / 4
    return outputs.masked_fill(~marks["allowed"], lowest)


# ---- one problem ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """What the targets of a data set are, and the loss and the metric for them.

    Loss and metric are pure functions of tensors: no Python branch depends on values.

    Args:
        name: The name in messages and in config.toml.
        loss: ``loss(outputs, y)`` returns one loss per example, or one for each output, of which
            the mean is taken, over the labels that the client knows.
        metric: How predictions are scored.
        kind: What ``y`` holds: "classes", "labels" or "numbers"; empty for anything else.
    """

    name: str
    loss: Callable[[Tensor, Tensor], Tensor]
    metric: Metric
    kind: str = ""

    def losses(self, outputs: Tensor, y: Tensor, marks: Tree) -> Tensor:
        """Compute the loss of each example."""
        return average_outputs(self.loss(restrict_outputs(outputs, marks), y), marks)

    def sums(self, outputs: Tensor, y: Tensor, weight: Tensor, marks: Tree) -> Tree:
        """Sum the numbers of the metric, the examples ("total") and their losses ("loss")."""
        loss = self.losses(outputs, y, marks)
        return {
            **self.metric.sums(restrict_outputs(outputs, marks), y, weight, marks),
            "total": weight.sum(),
            "loss": (loss * weight).sum(),
        }

    def for_task(self, task: str) -> Problem:
        """Return the problem of a client with this task: the same for all clients."""
        return self

    def select_sums(self, sums: Tree, task: str) -> dict[str, float]:
        """Return the sums of a client with this task, as numbers."""
        return {name: float(value) for name, value in sums.items()}

    @property
    def value_range(self) -> tuple[float, float]:
        """The lowest and the highest possible value of the metric."""
        return self.metric.value_range


# ---- classes -------------------------------------------------------------------------------------


def cross_entropy(outputs: Tensor, y: Tensor) -> Tensor:
    """Compute :math:`-log p(y | x)` of each example; y (n,) holds the numbers of classes."""
    return F.cross_entropy(outputs, y, reduction="none")


def _is_correct(outputs: Tensor, y: Tensor) -> Mapping[str, Tensor]:
    return {"correct": outputs.argmax(1) == y}


def _share_correct(sums: MetricSums) -> float:
    return sums["correct"] / sums["total"]


ACCURACY = Metric("accuracy", _is_correct, _share_correct, share=True)
"""The share of examples whose largest logit belongs to their class."""

CLASSES = Problem("classes", cross_entropy, ACCURACY, "classes")
"""Each example belongs to one class: y int64 (n,)."""


# ---- several labels ------------------------------------------------------------------------------


def binary_cross_entropy(outputs: Tensor, y: Tensor) -> Tensor:
    """Compute the loss of a yes or no for each label: (n, L), as y, which is 0 or 1."""
    targets = y.to(outputs.dtype)
    return F.binary_cross_entropy_with_logits(outputs, targets, reduction="none")


def _count_hits_and_misses(outputs: Tensor, y: Tensor) -> Mapping[str, Tensor]:
    predicted = outputs > 0
    true = y > 0.5
    return {
        "hits": (predicted & true).sum(1),
        "false_alarms": (predicted & ~true).sum(1),
        "misses": (~predicted & true).sum(1),
    }


def _f1(sums: MetricSums) -> float:
    """Compute 2 hits / (2 hits + false alarms + misses); 1 if no label is true or predicted."""
    wrong = sums["false_alarms"] + sums["misses"]
    if not sums["hits"] + wrong:
        return 1.0
    return 2 * sums["hits"] / (2 * sums["hits"] + wrong)


def _is_correct_label(outputs: Tensor, y: Tensor) -> Tensor:
    return (outputs > 0) == (y > 0.5)


F1 = Metric("f1", _count_hits_and_misses, _f1, share=True)
"""Micro-averaged F1: over all labels of all examples of a client together."""

LABEL_ACCURACY = Metric("label_accuracy", _is_correct_label, share=True)
"""The share of correct labels, of those that a client knows."""

LABELS = Problem("labels", binary_cross_entropy, F1, "labels")
"""Each example has any number of labels: y (n, L) is 0 or 1; a logit above 0 means yes."""


# ---- numbers -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Unit:
    """How a network's outputs are scaled: target = output * scale + mean, for each output.

    A network learns targets near 0 with a deviation near 1. Tables report them as they were given.
    """

    mean: tuple[float, ...] = (0.0,)
    scale: tuple[float, ...] = (1.0,)

    def outputs_of(self, y: Tensor) -> Tensor:
        """Return the outputs that a perfect network has for the targets (n, L)."""
        # Column by column, with plain numbers: a tensor made of these would be copied to the
        # device in every step, which a captured graph does not allow.
        columns = []
        for column, mean, scale in zip(y.unbind(1), self.mean, self.scale, strict=True):
            columns.append((column - mean) / scale)
        return torch.stack(columns, 1)

    def targets_of(self, outputs: Tensor) -> Tensor:
        """Return a network's outputs (n, L) in the units of the targets."""
        columns = []
        for column, mean, scale in zip(outputs.unbind(1), self.mean, self.scale, strict=True):
            columns.append(column * scale + mean)
        return torch.stack(columns, 1)


@dataclass(frozen=True)
class InUnits:
    """Calls a function of predictions and targets with both in the units of the targets."""

    f: Callable[[Tensor, Tensor], Tensor]
    unit: Unit

    def __call__(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the function's value."""
        return self.f(self.unit.targets_of(outputs), _reshape_like(y, outputs))


@dataclass(frozen=True)
class SquaredError:
    """The squared error of each output, where the targets are scaled by ``unit``."""

    unit: Unit

    def __call__(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return one row per example, one column per output."""
        return (outputs - self.unit.outputs_of(_reshape_like(y, outputs))) ** 2


def _reshape_like(y: Tensor, outputs: Tensor) -> Tensor:
    # y (n,) minus outputs (n, 1) would be (n, n).
    return y.to(outputs.dtype).reshape(outputs.shape)


def _absolute_error(predicted: Tensor, y: Tensor) -> Tensor:
    return (predicted - y).abs().mean(1)


def _squared_error(predicted: Tensor, y: Tensor) -> Tensor:
    return ((predicted - y) ** 2).mean(1)


def _root_mean(sums: MetricSums) -> float:
    return math.sqrt(sums["value"] / sums["total"])


def numbers(unit: Unit = Unit(), metric: str = "mae") -> Problem:
    """Return the problem of predicting numbers, y float (n, L), by their squared error.

    Args:
        unit: How the network's outputs are scaled.
        metric: "mae", "rmse" or "mse", in the units of the targets.

    Raises:
        InputError: The metric is none of these.
    """
    metrics = {
        "mae": Metric("mae", InUnits(_absolute_error, unit), more_is_better=False),
        "rmse": Metric("rmse", InUnits(_squared_error, unit), _root_mean, more_is_better=False),
        "mse": Metric("mse", InUnits(_squared_error, unit), more_is_better=False),
    }
    check(metric in metrics, "metric", metric, f"one of {', '.join(metrics)}")
    return Problem("numbers", SquaredError(unit), metrics[metric], "numbers")


# ---- several tasks in one federation -------------------------------------------------------------


@dataclass(frozen=True)
class TaskProblem:
    """One task of a mixed federation: its problem, its outputs and the columns of its targets.

    Args:
        name: The name of the task, which is that of its data set.
        problem: What its targets are.
        first: The task's first output of the network.
        outputs: The number of its outputs.
        columns: The number of columns of its targets; 0 if the target is the number of a class.
    """

    name: str
    problem: Problem
    first: int
    outputs: int
    columns: int = 0

    @property
    def output_slice(self) -> slice:
        """The task's outputs among those of the network."""
        return slice(self.first, self.first + self.outputs)

    def select(self, outputs: Tensor, y: Tensor, is_client_task: Tensor) -> tuple[Tensor, Tensor]:
        """Return the task's outputs and targets; zeros if the client has another task.

        Zeros are valid targets of every problem, and pass no gradient on.
        """
        if self.columns:
            targets = y[:, : self.columns]
        else:
            targets = _class_column(y)
        outputs = outputs[:, self.output_slice]
        return (
            torch.where(is_client_task, outputs, torch.zeros_like(outputs)),
            torch.where(is_client_task, targets, torch.zeros_like(targets)),
        )

    def select_marks(self, marks: Tree) -> Tree:
        """Return the labels that the client knows, among the task's outputs."""
        if "allowed" not in marks:
            return {}
        return {"allowed": marks["allowed"][self.output_slice]}


def _class_column(y: Tensor) -> Tensor:
    """Return the classes of targets that may have several columns: these are in the first one."""
    if y.dim() == 1:
        return y.long()
    return y[:, 0].long()


@dataclass(frozen=True)
class MixedProblem:
    """The problems of a mixed federation; ``marks["task"]`` is the number of a client's task."""

    tasks: tuple[TaskProblem, ...]
    # config.toml stores the name, so it stays "tasks".
    name: str = "tasks"
    kind: str = "tasks"

    def losses(self, outputs: Tensor, y: Tensor, marks: Tree) -> Tensor:
        """Compute the loss of each example, by the problem of the client's task."""
        total = outputs.new_zeros(outputs.shape[0])
        for number, task in enumerate(self.tasks):
            is_client_task = marks["task"] == number
            selected, targets = task.select(outputs, y, is_client_task)
            losses = task.problem.losses(selected, targets, task.select_marks(marks))
            # All losses are computed and one is used: a branch would need a stack for each task.
            total = total + torch.where(is_client_task, losses, torch.zeros_like(losses))
        return total

    def sums(self, outputs: Tensor, y: Tensor, weight: Tensor, marks: Tree) -> Tree:
        """Sum for every task; :meth:`select_sums` picks those of a client's task."""
        sums: Tree = {}
        for number, task in enumerate(self.tasks):
            selected, targets = task.select(outputs, y, marks["task"] == number)
            found = task.problem.sums(selected, targets, weight, task.select_marks(marks))
            for name, value in found.items():
                sums[f"{task.name}.{name}"] = value
        return sums

    def for_task(self, task: str) -> Problem:
        """Return the problem of a client with this task."""
        return self.tasks[self.number(task)].problem

    def number(self, task: str) -> int:
        """Return the number of a task."""
        names = [known.name for known in self.tasks]
        if task not in names:
            raise InputError(
                f"a client has the task {task!r}; the federation's tasks are {', '.join(names)}."
            )
        return names.index(task)

    def select_sums(self, sums: Tree, task: str) -> dict[str, float]:
        """Return the sums of a client with this task, as numbers."""
        prefix = f"{task}."
        found = {}
        for name, value in sums.items():
            if name.startswith(prefix):
                found[name.removeprefix(prefix)] = float(value)
        return found

    @property
    def value_range(self) -> tuple[float, float]:
        """The lowest and the highest possible value of the metric of any task."""
        lowest, highest = zip(*(task.problem.value_range for task in self.tasks), strict=True)
        return (min(lowest), max(highest))


AnyProblem = Problem | MixedProblem


# ---- the classes of a client ---------------------------------------------------------------------


class ClassTargets(NamedTuple):
    """The targets of a batch as classes, numbered over all outputs of the network."""

    y: Tensor
    """(n,): the output of each example's class; 0 if the client's targets are not classes."""
    own: Tensor
    """(outputs,): which outputs are classes of the client; none if its targets are not classes."""

    @property
    def is_given(self) -> Tensor:
        """Whether the client's targets are classes."""
        return self.own.any()


def class_targets(problem: AnyProblem, outputs: Tensor, y: Tensor, marks: Tree) -> ClassTargets:
    """Return the targets of a batch as classes, for objectives that need more than the loss.

    In a mixed federation only a client whose task has classes gets any.

    Args:
        problem: The federation's problem.
        outputs: The network's outputs for the batch.
        y: The targets of the batch.
        marks: The client's labels and task, ``carry["client"]``.

    Raises:
        InputError: No task of the problem has classes.

    >>> outputs = torch.zeros(2, 3)
    >>> class_targets(CLASSES, outputs, torch.tensor([2, 0]), {})
    ClassTargets(y=tensor([2, 0]), own=tensor([True, True, True]))
    """
    check_has_classes(problem)
    number = torch.arange(outputs.shape[1], device=outputs.device)
    if not isinstance(problem, MixedProblem):
        return ClassTargets(y, marks.get("allowed", number >= 0))
    classes = _class_column(y)
    target = torch.zeros_like(classes)
    own = number < 0
    for position, task in enumerate(problem.tasks):
        if task.problem.kind != "classes":
            continue
        is_client_task = marks["task"] == position
        is_task_output = (number >= task.first) & (number < task.first + task.outputs)
        target = torch.where(is_client_task, classes + task.first, target)
        own = torch.where(is_client_task, is_task_output, own)
    if "allowed" in marks:
        own = own & marks["allowed"]
    return ClassTargets(target, own)


def has_classes(problem: AnyProblem) -> bool:
    """Return whether the targets of a problem, or of one of its tasks, are classes."""
    if isinstance(problem, MixedProblem):
        return any(task.problem.kind == "classes" for task in problem.tasks)
    return problem.kind == "classes"


def check_has_classes(problem: AnyProblem) -> None:
    """Refuse a federation in which no task has classes."""
    if not has_classes(problem):
        raise InputError(
            f"the targets of the data are {problem.name}, and the method needs classes; choose "
            "data with classes, or a different method, such as fedavg."
        )


def client_marks(
    problem: AnyProblem, outputs: int, labels: tuple[int, ...] | None, task: str
) -> Tree:
    """Return ``carry["client"]``: the labels that a client knows, and its task.

    Args:
        problem: The problem of the federation.
        outputs: The number of outputs of the network.
        labels: The labels that the client knows, None for all.
        task: The client's task in a mixed federation, else empty.

    >>> client_marks(CLASSES, 3, (0, 2), "")
    {'allowed': tensor([ True, False,  True])}
    """
    marks: Tree = {}
    first = 0
    count = outputs
    if isinstance(problem, MixedProblem):
        number = problem.number(task)
        marks["task"] = torch.tensor(number)
        first = problem.tasks[number].first
        count = problem.tasks[number].outputs
    if labels is None:
        return marks
    if problem.for_task(task).kind == "numbers":
        raise InputError("a client has labels, but its targets are numbers; leave the labels out.")
    # A tuple: the error message shows it, and labels may be a tensor.
    labels = tuple(labels)
    are_valid = len(labels) > 0 and all(0 <= label < count for label in labels)
    check(are_valid, "labels", labels, f"numbers from 0 to {count - 1}")
    marks["allowed"] = torch.zeros(outputs, dtype=torch.bool)
    for label in labels:
        marks["allowed"][first + label] = True
    return marks


__getattr__ = find_old_names(__name__)
