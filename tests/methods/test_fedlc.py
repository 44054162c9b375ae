"""How often a client has each class, and the loss that is calibrated by it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.contract import Contract
from torch import Tensor, nn

from fedgrove.core import Batch
from fedgrove.errors import InputError
from fedgrove.methods import FedLC
from fedgrove.methods.fedlc import LogitCalibration, margins
from fedgrove.nets import Net, Output
from fedgrove.parts.label_counts import LabelCounts
from fedgrove.parts.objective import ProblemLoss
from fedgrove.problems import CLASSES, MixedProblem, TaskProblem, class_targets, numbers
from fedgrove.trees import Tree

CONTRACT = Contract(
    off=FedLC(objective=LogitCalibration(tau=0.0)),
)

F64 = torch.float64
NET = Net(nn.Linear(1, 3).double(), (1,))
MIXED = MixedProblem(
    (TaskProblem("a", CLASSES, 0, 2), TaskProblem("b", numbers(), 2, 1, columns=1))
)


def batch(y: Tensor, weight: list[float]) -> Batch:
    n = len(y)
    x = torch.zeros(n, 1, dtype=F64)
    return Batch(x, y, torch.tensor(weight, dtype=F64), torch.arange(n), torch.tensor(0))


def calibrated(logits: list[list[float]], y: list[int], labels: Tree, tau: float) -> float:
    out = Output(torch.tensor(logits, dtype=F64), None, NET, True)
    of_batch = batch(torch.tensor(y), [1.0] * len(y))
    loss, _ = LogitCalibration(tau=tau)(out, {}, of_batch, {"labels": labels})
    return float(loss)


def test_calibration_by_hand() -> None:
    # 16 and 1 examples: n^(-1/4) is 1/2 and 1. tau 2 ln 2 takes ln 2 from the first logit and ln 4
    # from the second: of equal logits e^z becomes 1/2 and 1/4, the shares 2/3 and 1/3.
    labels = {"counts": torch.tensor([16.0, 1.0]), "is_class": torch.ones(2)}
    tau = 2 * math.log(2)
    assert calibrated([[0.0, 0.0]], [0], labels, tau) == pytest.approx(math.log(1.5))
    assert calibrated([[0.0, 0.0]], [1], labels, tau) == pytest.approx(math.log(3))


def test_a_class_without_examples_is_out_of_sight() -> None:
    # The loss of class 0 beside a vacant one is 0 but for e^-100.
    labels = {"counts": torch.tensor([1.0, 0.0]), "is_class": torch.ones(2)}
    assert calibrated([[0.0, 0.0]], [0], labels, 1.0) == pytest.approx(0, abs=1e-12)
    assert calibrated([[0.0, 0.0]], [0], labels, 0.0) == pytest.approx(math.log(2))


@given(st.lists(st.integers(0, 50), min_size=3, max_size=3))
def test_rarer_classes_fall_further(counts: list[int]) -> None:
    found = margins(torch.tensor(counts, dtype=F64), torch.ones(3, dtype=F64))
    for more, fewer in ((0, 1), (1, 2), (0, 2)):
        if counts[more] >= counts[fewer]:
            assert float(found[more]) <= float(found[fewer])


@given(st.lists(st.floats(-5, 5), min_size=6, max_size=6))
def test_without_tau_it_is_the_loss_of_the_problem_to_the_bit(numbers: list[float]) -> None:
    logits = torch.tensor(numbers).view(2, 3)
    out = Output(logits, None, NET, True)
    of_batch = batch(torch.tensor([0, 2]), [1.0, 1.0])
    labels = {"counts": torch.tensor([0.0, 4.0, 1.0]), "is_class": torch.ones(3)}
    found, _ = LogitCalibration(tau=0.0)(out, {}, of_batch, {"labels": labels})
    plain, _ = ProblemLoss()(out, {}, of_batch, {})
    assert torch.equal(found, plain)


def test_outputs_that_are_numbers_stay_as_they_are() -> None:
    net = Net(nn.Linear(1, 3).double(), (1,), MIXED)
    own = {"task": torch.tensor(1)}
    of_batch = batch(torch.tensor([[2.0]]), [1.0])
    labels = LabelCounts()(net, net.params(), of_batch, {"client": own})
    out = Output(torch.tensor([[9.0, 9.0, 5.0]], dtype=F64), None, net, True)
    found, _ = LogitCalibration()(out, {}, of_batch, {"labels": labels, "client": own})
    # (5 - 2)^2
    assert float(found) == 9


def test_a_negative_tau_is_refused() -> None:
    with pytest.raises(InputError, match=r"tau is -1; it must be 0 or more."):
        LogitCalibration(tau=-1)


# ---- classes among other targets -----------------------------------------------------------------


def test_class_targets_count_over_all_outputs() -> None:
    tasks = MixedProblem(
        (TaskProblem("a", numbers(), 0, 1, columns=1), TaskProblem("b", CLASSES, 1, 3))
    )
    outputs = torch.zeros(2, 4)
    y = torch.tensor([[2.0], [0.0]])
    allowed = torch.tensor([False, True, False, True])
    found = class_targets(tasks, outputs, y, {"task": torch.tensor(1), "allowed": allowed})
    assert found.y.tolist() == [3, 1]
    assert found.own.tolist() == [False, True, False, True]
    assert bool(found.is_given)
    of_numbers = class_targets(tasks, outputs, y, {"task": torch.tensor(0)})
    assert not bool(of_numbers.is_given)


def test_data_without_classes_are_refused() -> None:
    with pytest.raises(InputError, match="the targets of the data are numbers"):
        class_targets(numbers(), torch.zeros(1, 1), torch.zeros(1, 1), {})
