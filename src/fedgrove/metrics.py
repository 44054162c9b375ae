"""Metrics: how well predictions fit the targets, as sums over examples and what the sums mean.

Clients report the sums, so that a score over all clients' examples together can be computed from
them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .errors import InputError, check
from .trees import Tree

MetricSums = Mapping[str, Any]
"""Sums over a client's examples by name; ``total`` is the number of examples. Sums of a metric
``by_class`` are dictionaries: the number of each class."""


# ---- a metric ------------------------------------------------------------------------------------


RESERVED_NAMES = (
    "method", "data", "partition", "scenario", "split", "validation", "engine", "seed", "round",
    "rounds", "clients", "cohort", "groups", "group_sizes", "scored", "unscored", "metric",
    "more_is_better", "share", "finetune", "tasks", "figures", "notes", "seconds", "purity",
    "density", "params", "macs", "loss", "total", "lost", "refused", "abandoned", "counts",
)  # fmt: skip
"""Names with another meaning in summary.json and metrics.jsonl: no metric may have one of them."""


def _mean(sums: MetricSums) -> float:
    """Return the mean of a metric from its sums."""
    return float(sums["value"] / sums["total"])


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
        by_class: Whether ``of_examples`` returns a number for each class, and each class has a sum
            of its own.

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
    by_class: bool = False

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
            if self.by_class:
                sums[name] = (number.to(weight.dtype) * weight.unsqueeze(1)).sum(0)
                continue
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


def as_numbers(value: Tensor) -> float | dict[int, float]:
    """Return a sum as a number, and a sum for each class as a number for each."""
    if value.dim():
        return dict(enumerate(value.tolist()))
    return float(value)


# ---- classes -------------------------------------------------------------------------------------


def _is_correct(outputs: Tensor, y: Tensor) -> Mapping[str, Tensor]:
    return {"correct": outputs.argmax(1) == y}


def _share_correct(sums: MetricSums) -> float:
    return float(sums["correct"] / sums["total"])


ACCURACY = Metric("accuracy", _is_correct, _share_correct, share=True)
"""The share of examples whose largest logit belongs to their class."""

CLASS_SUMS = ("hits", "examples", "predictions")
"""The sums of each class that metrics by class are computed from."""


def _count_by_class(outputs: Tensor, y: Tensor) -> Mapping[str, Tensor]:
    """Mark each example's class, its predicted class, and its class if that was predicted."""
    # Not F.one_hot, which looks at the values: a captured graph cannot.
    number = torch.arange(outputs.shape[1], device=outputs.device)
    is_class = y.unsqueeze(1) == number
    is_predicted = outputs.argmax(1).unsqueeze(1) == number
    return {
        "hits": is_class & is_predicted,
        "examples": is_class,
        "predictions": is_predicted,
    }


def _mean_recall(sums: MetricSums) -> float:
    r"""Compute the mean of hits_c / examples_c over the classes c with examples.

    Predictions of other classes count as misses of the true class.

    >>> _mean_recall({"hits": {0: 3, 1: 1}, "examples": {0: 4, 1: 2, 2: 0}})
    0.625
    """
    recalls = []
    for label, examples in sums["examples"].items():
        if examples:
            recalls.append(sums["hits"].get(label, 0.0) / examples)
    return math.fsum(recalls) / len(recalls)


def _mean_f1(sums: MetricSums) -> float:
    r"""Compute the mean of 2 hits_c / (examples_c + predictions_c) over the classes with examples.

    >>> sums = {"hits": {0: 3, 1: 1}, "examples": {0: 4, 1: 2}, "predictions": {0: 4, 1: 1, 2: 1}}
    >>> _mean_f1(sums) == (6 / 8 + 2 / 3) / 2
    True
    """
    scores = []
    for label, examples in sums["examples"].items():
        if examples:
            predictions = sums["predictions"].get(label, 0.0)
            scores.append(2 * sums["hits"].get(label, 0.0) / (examples + predictions))
    return math.fsum(scores) / len(scores)


BALANCED_ACCURACY = Metric(
    "balanced_accuracy", _count_by_class, _mean_recall, share=True, by_class=True
)
"""The mean over classes of the share of their examples that are recognised."""

MACRO_F1 = Metric("macro_f1", _count_by_class, _mean_f1, share=True, by_class=True)
"""The mean over classes of their F1: 2 hits / (examples + predictions)."""

CLASS_METRICS = {each.name: each for each in (ACCURACY, BALANCED_ACCURACY, MACRO_F1)}
"""What the option metric chooses from."""

# ---- several labels ------------------------------------------------------------------------------


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
    return float(2 * sums["hits"] / (2 * sums["hits"] + wrong))


def _is_correct_label(outputs: Tensor, y: Tensor) -> Tensor:
    return (outputs > 0) == (y > 0.5)


F1 = Metric("f1", _count_hits_and_misses, _f1, share=True)
"""Micro-averaged F1: over all labels of all examples of a client together."""

LABEL_ACCURACY = Metric("label_accuracy", _is_correct_label, share=True)
"""The share of correct labels, of those that a client knows."""

# ---- numbers -------------------------------------------------------------------------------------


def absolute_error(predicted: Tensor, y: Tensor) -> Tensor:
    """Return the absolute error of each example, mean over its outputs."""
    return (predicted - y).abs().mean(1)


def squared_error(predicted: Tensor, y: Tensor) -> Tensor:
    """Return the squared error of each example, mean over its outputs."""
    return ((predicted - y) ** 2).mean(1)


def root_mean(sums: MetricSums) -> float:
    """Return the root of the mean over a client's examples."""
    return math.sqrt(sums["value"] / sums["total"])
