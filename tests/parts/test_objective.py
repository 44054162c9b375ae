"""What local training minimises."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from fedgrove.core import Batch, Carry
from fedgrove.errors import InputError
from fedgrove.methods.clusterfl import Clustered
from fedgrove.nets import Net, Output
from fedgrove.parts.objective import (
    CrossEntropy,
    Linear,
    Objective,
    ProblemLoss,
    Proximal,
    Sum,
    check_fits,
    check_whole,
)
from fedgrove.problems import CLASSES, LABELS, numbers
from fedgrove.trees import Tree

F64 = torch.float64
NET = Net(nn.Linear(1, 2), (1,))
"""Whose outputs they are does not matter, but that its targets are classes."""


def batch(y: list[int], weight: list[float]) -> Batch:
    n = len(y)
    return Batch(
        torch.zeros(n, 1),
        torch.tensor(y),
        torch.tensor(weight, dtype=F64),
        torch.arange(n),
        torch.tensor(0),
    )


def output(logits: list[list[float]]) -> Output:
    return Output(torch.tensor(logits, dtype=F64, requires_grad=True), None, NET, True)


@dataclass(frozen=True)
class Say(Objective):
    """A constant that remembers something."""

    value: float
    key: str
    said: float

    def __call__(
        self, out: Output, params: Tree, batch: Batch, carry: Carry
    ) -> tuple[Tensor, Tree]:
        return torch.tensor(self.value), {self.key: torch.tensor(self.said)}


# ---- CrossEntropy --------------------------------------------------------------------------------


def test_cross_entropy_by_hand() -> None:
    # softmax of (ln 3, 0) is (3/4, 1/4), of (0, 0) it is (1/2, 1/2):
    # labels 1, 0: -ln 1/4 = ln 4 and -ln 1/2 = ln 2, their mean (ln 8) / 2
    loss, aux = CrossEntropy()(
        output([[math.log(3), 0.0], [0.0, 0.0]]), {}, batch([1, 0], [1, 1]), {}
    )
    assert loss.item() == pytest.approx(math.log(8) / 2, abs=1e-14)
    assert aux == {}


def test_cross_entropy_weighs_examples() -> None:
    # the same two with weights 3 and 1: (3 ln 4 + ln 2) / 4 = 7 ln 2 / 4
    loss, _ = CrossEntropy()(
        output([[math.log(3), 0.0], [0.0, 0.0]]), {}, batch([1, 0], [3, 1]), {}
    )
    assert loss.item() == pytest.approx(7 * math.log(2) / 4, abs=1e-14)


@given(
    st.lists(
        st.tuples(st.floats(-5, 5), st.floats(-5, 5), st.integers(0, 1)), min_size=1, max_size=5
    ),
    st.lists(st.tuples(st.floats(-50, 50), st.floats(-50, 50)), max_size=4),
)
def test_padding_changes_neither_loss_nor_gradient(
    real: list[tuple[float, float, int]], padding: list[tuple[float, float]]
) -> None:
    n = len(real)
    more = len(padding)
    plain = output([[a, b] for a, b, _ in real])
    padded = output([[a, b] for a, b, _ in real] + [[a, b] for a, b in padding])
    labels = [y for _, _, y in real]
    one, _ = CrossEntropy()(plain, {}, batch(labels, [1.0] * n), {})
    other, _ = CrossEntropy()(padded, {}, batch(labels + [0] * more, [1.0] * n + [0.0] * more), {})
    assert other.item() == pytest.approx(one.item(), abs=1e-12)
    (g,) = torch.autograd.grad(one, plain.logits)
    (h,) = torch.autograd.grad(other, padded.logits)
    assert (g - h[:n]).abs().max() < 1e-12
    assert bool((h[n:] == 0).all())


# ---- Proximal ------------------------------------------------------------------------------------


def pull(mu: float, w: Tensor, ref: Tensor) -> Tensor:
    loss, aux = Proximal(mu)(
        output([[0.0]]), {"w": w}, batch([0], [1]), {"model": {"w": ref, "buffer": torch.ones(1)}}
    )
    assert aux == {}
    return loss


def test_proximal_by_hand() -> None:
    # mu/2 |w - ref|^2 with mu = 0.4, w - ref = (3, -4): 0.2 * (9 + 16) = 5
    assert pull(0.4, torch.tensor([4.0, -3.0]), torch.tensor([1.0, 1.0])).item() == pytest.approx(
        5.0
    )


@given(
    st.floats(0, 10),
    st.lists(st.tuples(st.floats(-9, 9), st.floats(-9, 9)), min_size=1, max_size=6),
)
def test_the_gradient_of_proximal_is_mu_times_the_distance(
    mu: float, pairs: list[tuple[float, float]]
) -> None:
    w = torch.tensor([a for a, _ in pairs], dtype=F64, requires_grad=True)
    ref = torch.tensor([b for _, b in pairs], dtype=F64)
    (g,) = torch.autograd.grad(pull(mu, w, ref), w)
    assert (g - mu * (w - ref)).abs().max() < 1e-12


def test_proximal_pulls_to_the_tree_it_names_and_leaves_buffers_out() -> None:
    carry = {"mine": {"w": torch.tensor([2.0]), "running_mean": torch.tensor([99.0])}, "aux": {}}
    loss, _ = Proximal(2.0, to="mine")(
        output([[0.0]]), {"w": torch.tensor([5.0])}, batch([0], [1]), carry
    )
    assert loss.item() == 9.0  # 2/2 * (5 - 2)^2


def test_the_gradient_of_a_linear_term_is_its_direction() -> None:
    """<w, c> with w = (4, -3) and c = (.5, 2): 2 - 6 = -4."""
    w = torch.tensor([4.0, -3.0], requires_grad=True)
    carry = {"along": {"w": torch.tensor([0.5, 2.0])}}
    loss, aux = Linear("along")(output([[0.0]]), {"w": w}, batch([0], [1]), carry)
    assert (loss.item(), aux) == (-4.0, {})
    (g,) = torch.autograd.grad(loss, w)
    assert g.tolist() == [0.5, 2.0]


def test_proximal_refuses_a_negative_mu() -> None:
    with pytest.raises(InputError, match=r"^mu is -0\.1; it must be 0 or more\.$"):
        Proximal(-0.1)


# ---- Clustered -----------------------------------------------------------------------------------


def tie(rule: Clustered, w: Tensor, u: Tensor, last: Tensor) -> Tensor:
    far = torch.full((2,), 99.0, dtype=F64)
    carry = {"model": {"buffer": far, "w": u}, "personal": {"buffer": far, "w": last}}
    loss, aux = rule(output([[0.0]]), {"w": w}, batch([0], [1]), carry)
    assert aux == {}
    return loss


def test_clustered_by_hand() -> None:
    # w = (1, 2), u = (3, -1), last = (0, 4): |w|^2 = 5, w.u = 1, |w - last|^2 = 1 + 4 = 5
    # alpha 2, beta 3, rho 4: 2*5 - 2*3*1 + 4/2*5 = 10 - 6 + 10 = 14
    w, u, last = (torch.tensor(v, dtype=F64) for v in ([1.0, 2.0], [3.0, -1.0], [0.0, 4.0]))
    assert tie(Clustered(2.0, 3.0, 4.0), w, u, last).item() == 14.0
    assert tie(Clustered(2.0, 0.0, 0.0), w, u, last).item() == 10.0
    assert tie(Clustered(0.0, 3.0, 0.0), w, u, last).item() == -6.0
    assert tie(Clustered(0.0, 0.0, 4.0), w, u, last).item() == 10.0


@given(
    st.lists(st.tuples(*[st.floats(-9, 9)] * 3), min_size=1, max_size=5),
    st.tuples(*[st.floats(0, 3)] * 3),
)
def test_the_gradient_of_clustered(
    rows: list[tuple[float, float, float]], rates: tuple[float, float, float]
) -> None:
    # 2 alpha w - 2 beta u + rho (w - last)
    w, u, last = torch.tensor(rows, dtype=F64).T.contiguous().unbind(0)
    w = w.clone().requires_grad_()
    alpha, beta, rho = rates
    (g,) = torch.autograd.grad(tie(Clustered(alpha, beta, rho), w, u, last), w)
    assert (g - (2 * alpha * w - 2 * beta * u + rho * (w - last))).abs().max() < 1e-11


def test_clustered_refuses_a_negative_rate() -> None:
    with pytest.raises(
        InputError,
        match=r"^alpha, beta, rho is \(0\.1, -1\.0, 0\.0\); it must be 0 or more each\.$",
    ):
        Clustered(0.1, -1.0, 0.0)


# ---- Sum -----------------------------------------------------------------------------------------


def test_a_sum_is_flat_however_it_is_bracketed() -> None:
    a = Say(1, "a", 1)
    b = Say(2, "b", 2)
    c = Say(4, "c", 3)
    assert (a + b) + c == a + (b + c) == Sum((a, b, c))
    assert (a + b) + (c + a) == Sum((a, b, c, a))


def test_a_sum_adds_losses_and_merges_what_its_terms_remember() -> None:
    objective = Say(1, "x", 10) + Say(2, "y", 20) + Say(4, "x", 30)
    loss, aux = objective(output([[0.0]]), {}, batch([0], [1]), {})
    assert loss.item() == 7.0
    # Of two terms that use one name, the last wins.
    assert {k: float(v) for k, v in aux.items()} == {"x": 30.0, "y": 20.0}


def test_a_sum_of_the_two_real_terms() -> None:
    # CE of (0, 0) is ln 2; 1/2 * (3 - 1)^2 = 2
    params = {"w": torch.tensor([3.0], dtype=F64)}
    carry = {"model": {"w": torch.tensor([1.0], dtype=F64)}}
    loss, _ = (CrossEntropy() + Proximal(1.0))(output([[0.0, 0.0]]), params, batch([1], [1]), carry)
    assert loss.item() == pytest.approx(math.log(2) + 2, abs=1e-14)


# ---- which targets a loss fits -------------------------------------------------------------------


@dataclass(frozen=True)
class Borrowed(Objective):
    """A loss of somebody else, which says itself what it is for."""

    targets: ClassVar[tuple[str, ...]] = ("classes", "labels")

    def __call__(
        self, out: Output, params: Tree, batch: Batch, carry: Carry
    ) -> tuple[Tensor, Tree]:
        return out.logits.sum(), {}


def test_a_loss_says_which_targets_it_fits() -> None:
    check_fits(Borrowed(), CLASSES)
    check_fits(Borrowed() + Proximal(0.1), LABELS)
    with pytest.raises(
        InputError, match=r"has Borrowed, which is for classes or labels, and .* are numbers; use"
    ):
        check_fits(Proximal(0.1) + Borrowed(), numbers())
    with pytest.raises(InputError, match=r"has CrossEntropy, which is for classes, and .* labels"):
        check_fits(CrossEntropy(), LABELS)
    check_fits(ProblemLoss() + Proximal(0.1), numbers())


@dataclass(frozen=True)
class OwnLoss(Objective):
    """A loss of a user who did not think of targets other than classes."""

    def __call__(
        self, out: Output, params: Tree, batch: Batch, carry: Carry
    ) -> tuple[Tensor, Tree]:
        return F.cross_entropy(out.logits, batch.y), {}


def test_a_loss_that_names_no_targets_is_for_classes() -> None:
    check_fits(OwnLoss(), CLASSES)
    for problem, kind in ((numbers(), "numbers"), (LABELS, "labels")):
        with pytest.raises(InputError, match=rf"has OwnLoss, .* write targets = \(\"{kind}\",\)"):
            check_fits(ProblemLoss() + OwnLoss(), problem)
    # A term that is no loss does not look at the targets.
    check_fits(ProblemLoss() + Proximal(0.1), numbers())


def test_the_losses_to_take_are_those_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="must be one of ProblemLoss, CrossEntropy") as refused:
        check_whole(Proximal(0.1))
    assert "Borrowed" not in str(refused.value)
    monkeypatch.setattr(Borrowed, "__module__", Objective.__module__)
    with pytest.raises(InputError, match=r"must be one of ProblemLoss, .*\bBorrowed\.$"):
        check_whole(Proximal(0.1))
