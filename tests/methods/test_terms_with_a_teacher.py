"""Objectives that hold the network against another one: MOON's contrast, FedNTD's distillation."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fedgrove.core import Batch
from fedgrove.errors import InputError
from fedgrove.methods.fedntd import NotTrueDistillation, not_true_divergence
from fedgrove.methods.moon import ModelContrast, contrast, cosine
from fedgrove.nets import Net
from fedgrove.parts.objective import ProblemLoss
from fedgrove.problems import CLASSES, MixedProblem, TaskProblem, numbers

F64 = torch.float64


def rows(*numbers: list[float]) -> Tensor:
    return torch.tensor(numbers, dtype=F64)


def batch(x: Tensor, y: list[int], weight: list[float]) -> Batch:
    numbers = torch.tensor(weight, dtype=F64)
    return Batch(x, torch.tensor(y), numbers, torch.arange(len(y)), torch.tensor(0))


# ---- MOON ----------------------------------------------------------------------------------------


def test_contrast_by_hand() -> None:
    # z = (1, 0): cosine 0 to the near one (0, 2), 1 to the far one (3, 0); tau 1/2:
    # -log(e^0 / (e^0 + e^2)) = log(1 + e^2). The other way round: log(1 + e^-2).
    z = rows([1.0, 0.0], [1.0, 0.0])
    found = contrast(z, rows([0.0, 2.0], [3.0, 0.0]), rows([3.0, 0.0], [0.0, 2.0]), 0.5)
    assert found.tolist() == pytest.approx([math.log1p(math.e**2), math.log1p(math.e**-2)])


def test_features_of_zeros_have_a_finite_gradient() -> None:
    z = torch.zeros(1, 3, dtype=F64, requires_grad=True)
    (gradient,) = torch.autograd.grad(cosine(z, rows([1.0, 2.0, 3.0])).sum(), z)
    assert bool(torch.isfinite(gradient).all())


class Twice(nn.Module):
    """Features are x times a weight; the head is a line."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(2, 2, bias=False)
        self.head = nn.Linear(2, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.scale(x))
        return out


NET = Net(Twice().double(), (2,))


def tree(scale: list[list[float]]) -> dict[str, Tensor]:
    return {"scale.weight": torch.tensor(scale, dtype=F64), "head.weight": torch.eye(2, dtype=F64)}


def test_model_contrast_is_the_weighted_mean_over_features() -> None:
    # x = (1, 0): the network keeps it, the shared model too (cosine 1), the last one turns it to
    # (0, 1) (cosine 0): mu log(1 + e^((0 - 1) / tau)), mu 3, tau 1/2. The second example is padding.
    same = [[1.0, 0.0], [0.0, 1.0]]
    turned = [[0.0, -1.0], [1.0, 0.0]]
    carry = {"model": tree(same), "previous": tree(turned)}
    x = rows([1.0, 0.0], [5.0, 7.0])
    params = tree(same)
    out = NET(params, x, train=True)
    loss, aux = ModelContrast(mu=3.0)(out, params, batch(x, [0, 0], [1.0, 0.0]), carry)
    assert float(loss) == pytest.approx(3 * math.log1p(math.e**-2))
    assert aux == {}


@given(st.lists(st.floats(0.5, 2), min_size=4, max_size=4))
def test_where_both_models_are_one_no_gradient_is_left(weights: list[float]) -> None:
    params = tree([weights[:2], weights[2:]])
    leaf = params["scale.weight"].requires_grad_()
    x = rows([1.0, 0.5], [-1.0, 2.0])
    other = tree([[1.0, 2.0], [0.0, 1.0]])
    out = NET(params, x, train=True)
    carry = {"model": other, "previous": other}
    loss, _ = ModelContrast(mu=2.0)(out, params, batch(x, [0, 1], [1.0, 1.0]), carry)
    (gradient,) = torch.autograd.grad(loss, leaf)
    assert float(loss.detach()) == pytest.approx(2 * math.log(2))
    assert float(gradient.abs().max()) < 1e-14


def test_a_network_without_a_linear_layer_has_no_features() -> None:
    net = Net(nn.Sequential(nn.Conv1d(1, 2, 1), nn.AdaptiveAvgPool1d(1), nn.Flatten()), (1, 4))
    params = net.params()
    x = torch.zeros(1, 1, 4)
    with pytest.raises(InputError, match="has no linear layer, and so no features"):
        ModelContrast()(net(params, x, True), params, batch(x, [0], [1.0]), {"model": params})


# ---- FedNTD --------------------------------------------------------------------------------------


def test_not_true_divergence_by_hand() -> None:
    # Class 0 is true, and whatever its logits are they do not count. Of classes 1 and 2 the teacher
    # says (3/4, 1/4), the student (1/2, 1/2): 3/4 ln(3/2) + 1/4 ln(1/2).
    student = rows([9.0, 0.0, 0.0])
    teacher = rows([-4.0, math.log(3), 0.0])
    everything = torch.ones(3, dtype=torch.bool)
    y = torch.tensor([0])
    expected = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    assert not_true_divergence(student, teacher, y, everything, 1.0).tolist() == pytest.approx(
        [expected]
    )
    # At tau 1/2 the logits are twice as large: the teacher says (9/10, 1/10).
    hot = 0.9 * math.log(1.8) + 0.1 * math.log(0.2)
    assert not_true_divergence(student, teacher, y, everything, 0.5).tolist() == pytest.approx(
        [hot]
    )


def test_of_one_class_nothing_is_left_to_compare() -> None:
    own = torch.tensor([False, True, False])
    student = torch.zeros(1, 3, dtype=F64, requires_grad=True)
    found = not_true_divergence(student, rows([5.0, 1.0, -5.0]), torch.tensor([1]), own, 1.0)
    (gradient,) = torch.autograd.grad(found.sum(), student)
    assert float(found.detach()) == 0
    assert bool((gradient == 0).all())


def test_distillation_is_scaled_by_tau_squared_and_weighs_examples() -> None:
    net = Net(nn.Linear(1, 3).double(), (1,))
    carry = {
        "model": {"weight": rows([0.0], [math.log(3)], [0.0]), "bias": torch.zeros(3).double()}
    }
    params = {"weight": torch.zeros(3, 1).double(), "bias": torch.zeros(3).double()}
    x = rows([1.0], [1.0])
    found, _ = NotTrueDistillation(beta=2.0, tau=0.5)(
        net(params, x, True), params, batch(x, [0, 1], [1.0, 0.0]), carry
    )
    hot = 0.9 * math.log(1.8) + 0.1 * math.log(0.2)
    assert float(found) == pytest.approx(2 * 0.25 * hot)


def test_only_tasks_of_classes_are_distilled() -> None:
    tasks = MixedProblem(
        (TaskProblem("a", CLASSES, 0, 2), TaskProblem("b", numbers(), 2, 1, columns=1))
    )
    net = Net(nn.Linear(1, 3).double(), (1,), tasks)
    params = {"weight": torch.zeros(3, 1).double(), "bias": torch.zeros(3).double()}
    teacher = {"model": {"weight": rows([1.0], [2.0], [3.0]), "bias": torch.zeros(3).double()}}
    x = rows([1.0])
    y = Batch(x, rows([1.0]), torch.ones(1).double(), torch.arange(1), torch.tensor(0))
    for task in (0, 1):
        carry = {**teacher, "client": {"task": torch.tensor(task)}}
        loss, _ = NotTrueDistillation()(net(params, x, True), params, y, carry)
        # Two classes leave one that is not true, with nothing to say; numbers have none at all.
        assert float(loss) == 0


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: ModelContrast(mu=-1), "mu is -1; it must be 0 or more."),
        (lambda: ModelContrast(tau=0), "tau is 0; it must be above 0."),
        (lambda: NotTrueDistillation(beta=-1), "beta is -1; it must be 0 or more."),
        (lambda: NotTrueDistillation(tau=0), "tau is 0; it must be above 0."),
    ],
)
def test_impossible_values_are_refused(make, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        make()


def test_a_sum_makes_the_passes_of_its_terms() -> None:
    """MOON's two other models and NTD's teacher: three forward passes more, of 100 each."""
    net = Net(nn.Linear(3, 2), (3,))
    assert ProblemLoss().more_macs(net, 100) == 0
    assert (ProblemLoss() + ModelContrast() + NotTrueDistillation()).more_macs(net, 100) == 300
