"""How often a client has each class."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedgrove.core import Batch
from fedgrove.nets import Net
from fedgrove.parts.label_counts import LabelCounts
from fedgrove.problems import CLASSES, MixedProblem, TaskProblem, numbers

NET = Net(nn.Linear(1, 3), (1,))
MIXED = MixedProblem(
    (TaskProblem("a", CLASSES, 0, 2), TaskProblem("b", numbers(), 2, 1, columns=1))
)


def batch(y: Tensor, weight: list[float]) -> Batch:
    n = len(y)
    return Batch(torch.zeros(n, 1), y, torch.tensor(weight), torch.arange(n), torch.tensor(0))


def test_counts_by_hand() -> None:
    found = LabelCounts()(NET, NET.params(), batch(torch.tensor([2, 0, 2, 1]), [1, 1, 1, 0]), {})
    assert found["counts"].tolist() == [1, 0, 2]
    assert found["is_class"].tolist() == [1, 1, 1]


def test_labels_of_another_task_are_not_counted() -> None:
    net = Net(nn.Linear(1, 3), (1,), MIXED)
    y = torch.tensor([[1.0], [1.0]])
    counts = []
    for task in (0, 1):
        own = {"client": {"task": torch.tensor(task)}}
        counts.append(LabelCounts()(net, net.params(), batch(y, [1, 1]), own))
    assert counts[0]["counts"].tolist() == [0, 2, 0]
    assert counts[0]["is_class"].tolist() == [1, 1, 0]
    assert counts[1]["counts"].tolist() == [0, 0, 0]
    assert counts[1]["is_class"].tolist() == [0, 0, 0]
