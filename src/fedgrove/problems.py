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

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .errors import InputError, check
from .metrics import (
    ACCURACY,
    CLASS_METRICS,
    CLASS_SUMS,
    F1,
    absolute_error,
    as_numbers,
    average_outputs,
    root_mean,
    squared_error,
)
from .metrics import Metric as Metric
from .renamed import find_old_names
from .trees import Tree


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

    def select_sums(self, sums: Tree, task: str) -> dict[str, Any]:
        """Return the sums of a client with this task, as numbers."""
        return {name: as_numbers(value) for name, value in sums.items()}

    @property
    def value_range(self) -> tuple[float, float]:
        """The lowest and the highest possible value of the metric."""
        return self.metric.value_range


# ---- classes -------------------------------------------------------------------------------------


def cross_entropy(outputs: Tensor, y: Tensor) -> Tensor:
    """Compute :math:`-log p(y | x)` of each example; y (n,) holds the numbers of classes."""
    return F.cross_entropy(outputs, y, reduction="none")


CLASSES = Problem("classes", cross_entropy, ACCURACY, "classes")
"""Each example belongs to one class: y int64 (n,)."""


# ---- several labels ------------------------------------------------------------------------------


def binary_cross_entropy(outputs: Tensor, y: Tensor) -> Tensor:
    """Compute the loss of a yes or no for each label: (n, L), as y, which is 0 or 1."""
    targets = y.to(outputs.dtype)
    return F.binary_cross_entropy_with_logits(outputs, targets, reduction="none")


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


def numbers(unit: Unit = Unit(), metric: str = "mae") -> Problem:
    """Return the problem of predicting numbers, y float (n, L), by their squared error.

    Args:
        unit: How the network's outputs are scaled.
        metric: "mae", "rmse" or "mse", in the units of the targets.

    Raises:
        InputError: The metric is none of these.
    """
    metrics = {
        "mae": Metric("mae", InUnits(absolute_error, unit), more_is_better=False),
        "rmse": Metric("rmse", InUnits(squared_error, unit), root_mean, more_is_better=False),
        "mse": Metric("mse", InUnits(squared_error, unit), more_is_better=False),
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

    def select_sums(self, sums: Tree, task: str) -> dict[str, Any]:
        """Return the sums of a client with this task, as numbers."""
        prefix = f"{task}."
        found = {}
        for name, value in sums.items():
            if name.startswith(prefix):
                found[name.removeprefix(prefix)] = as_numbers(value)
        return found

    @property
    def value_range(self) -> tuple[float, float]:
        """The lowest and the highest possible value of the metric of any task."""
        lowest, highest = zip(*(task.problem.value_range for task in self.tasks), strict=True)
        return (min(lowest), max(highest))


AnyProblem = Problem | MixedProblem


def score_by(problem: AnyProblem, metric: str | None) -> AnyProblem:
    """Return the problem with the metric that the option metric names; None: its own.

    Args:
        problem: The problem of a federation.
        metric: One of :data:`CLASS_METRICS`.

    Raises:
        InputError: The targets are not classes.

    >>> score_by(CLASSES, "macro_f1").metric.name
    'macro_f1'
    """
    if metric is None:
        return problem
    check(metric in CLASS_METRICS, "metric", metric, f"one of {', '.join(CLASS_METRICS)}")
    if isinstance(problem, MixedProblem):
        tasks = [
            replace(task, problem=_replace_metric(task.problem, metric, f"task {task.name}"))
            for task in problem.tasks
        ]
        return replace(problem, tasks=tuple(tasks))
    return _replace_metric(problem, metric, "the data")


def _replace_metric(problem: Problem, metric: str, whose: str) -> Problem:
    if problem.kind != "classes":
        raise InputError(
            f"metric is {metric}, which needs classes, and the targets of {whose} are "
            f"{problem.name}, scored by {problem.metric.name}; leave metric out, or choose data "
            "with classes."
        )
    return replace(problem, metric=CLASS_METRICS[metric])


def name_class_sums(problem: AnyProblem, outputs: int) -> list[str]:
    """Return the names of the sums by class that a client may report; none for other metrics.

    >>> name_class_sums(score_by(CLASSES, "macro_f1"), 1)
    ['hits.0', 'examples.0', 'predictions.0']
    """
    if isinstance(problem, MixedProblem):
        metrics = [task.problem.metric for task in problem.tasks]
    else:
        metrics = [problem.metric]
    if not any(metric.by_class for metric in metrics):
        return []
    return [f"{name}.{label}" for name in CLASS_SUMS for label in range(outputs)]


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
