"""How a client trains: optimisers, the recipe, the learning rate, clipping."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import make_run
from torch import Tensor

from fedgrove import methods, trees
from fedgrove.core import Train
from fedgrove.errors import InputError
from fedgrove.parts import local
from fedgrove.parts.local import SGD, Adam, LocalTraining, clip_scale, flat_mask, learning_rate
from fedgrove.parts.objective import CrossEntropy

F64 = torch.float64


def vector(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=F64)


def walk(rule: SGD | Adam, w: Tensor, gradients: list[Tensor], in_place: bool) -> list[Tensor]:
    """The parameters after each step."""
    w = w.clone()
    state = rule.init(w)
    seen = []
    for g in gradients:
        if in_place:
            rule.step_(w, g.clone(), state, rule.lr)
        else:
            w, state = rule.step(w, g, state, rule.lr)
        seen.append(w.clone())
    return seen


# ---- golden values -------------------------------------------------------------------------------


@pytest.mark.parametrize("in_place", [False, True])
def test_sgd_by_hand(in_place: bool) -> None:
    # lr 0.1, momentum 0.5, weight decay 0.2, w = 1, gradients 2 and -1:
    # g = 2 + 0.2 * 1 = 2.2;         v = 2.2;                     w = 1 - 0.22 = 0.78
    # g = -1 + 0.2 * 0.78 = -0.844;  v = 0.5 * 2.2 - 0.844 = 0.256;  w = 0.78 - 0.0256 = 0.7544
    rule = SGD(lr=0.1, momentum=0.5, weight_decay=0.2)
    first, second = walk(rule, vector(1.0), [vector(2.0), vector(-1.0)], in_place)
    assert first.item() == pytest.approx(0.78, abs=1e-15)
    assert second.item() == pytest.approx(0.7544, abs=1e-15)


@pytest.mark.parametrize("in_place", [False, True])
def test_adam_by_hand(in_place: bool) -> None:
    # lr 0.1, betas 0.5 and 0.75, eps 1 (large, so that its place shows), weight decay 0.5, w = 2,
    # gradients 3 and 0:
    # t = 1: g = 3 + 0.5 * 2 = 4; m = 0.5 * 4 = 2; v = 0.25 * 16 = 4
    #        m / (1 - 0.5) = 4; v / (1 - 0.75) = 16; w = 2 - 0.1 * 4 / (sqrt(16) + 1) = 1.92
    # t = 2: g = 0 + 0.5 * 1.92 = 0.96; m = 0.5 * 2 + 0.5 * 0.96 = 1.48;
    #        v = 0.75 * 4 + 0.25 * 0.9216 = 3.2304
    #        m / (1 - 0.25) = 1.973333...; v / (1 - 0.5625) = 7.383771...; its root 2.717310...
    #        w = 1.92 - 0.1 * 1.973333 / 3.717310 = 1.866915...
    rule = Adam(lr=0.1, beta1=0.5, beta2=0.75, eps=1.0, weight_decay=0.5)
    first, second = walk(rule, vector(2.0), [vector(3.0), vector(0.0)], in_place)
    assert first.item() == pytest.approx(1.92, abs=1e-15)
    assert second.item() == pytest.approx(
        1.92 - 0.1 * (1.48 / 0.75) / (math.sqrt(3.2304 / 0.4375) + 1), abs=1e-14
    )
    assert second.item() == pytest.approx(1.866915, abs=1e-6)


@pytest.mark.parametrize(("length", "scale"), [(5.0, 0.4), (2.0, 1.0), (1.0, 1.0), (0.0, 1.0)])
def test_clip_scale_by_hand(length: float, scale: float) -> None:
    # a gradient of (3, 4) * length / 5 has that length; clipped to 2: min(1, 2 / length)
    g = vector(3.0, 4.0) * (length / 5)
    assert clip_scale(g, 2.0).item() == pytest.approx(scale, abs=1e-15)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=9), st.floats(1e-3, 1e3))
def test_a_clipped_gradient_is_never_longer_and_keeps_its_direction(
    numbers: list[float], clip: float
) -> None:
    g = vector(*numbers)
    scale = clip_scale(g, clip).item()
    assert 0 < scale <= 1
    assert (g * scale).norm().item() <= clip * (1 + 1e-12)
    if g.norm() <= clip:
        assert scale == pytest.approx(1, abs=1e-15)


def test_learning_rate_by_hand() -> None:
    # 0.1 * 0.5^3 = 0.0125
    recipe = LocalTraining(1, 8, SGD(0.1), decay=0.5)
    rates = [
        learning_rate(recipe, {"settings": {"round": torch.tensor(t, dtype=F64)}}).item()
        for t in range(4)
    ]
    assert rates == pytest.approx([0.1, 0.05, 0.025, 0.0125], abs=1e-15)
    steady = learning_rate(
        LocalTraining(1, 8, SGD(0.1)), {"settings": {"round": torch.tensor(7.0, dtype=F64)}}
    )
    assert steady.item() == 0.1


def test_flat_mask_is_ones_where_it_names_nothing() -> None:
    params = {"w": torch.zeros(2, 2), "b": torch.zeros(2)}
    mask = {"w": torch.tensor([[True, False], [False, True]])}
    assert flat_mask(mask, params).tolist() == [1, 0, 0, 1, 1, 1]
    assert flat_mask(mask, params).dtype == torch.float32


# ---- torch's own optimisers as oracles -----------------------------------------------------------

RULES = [
    SGD(0.05),
    SGD(0.05, momentum=0.9),
    SGD(0.05, momentum=0.9, weight_decay=0.1),
    SGD(0.05, weight_decay=0.1),
    Adam(1e-2),
    Adam(1e-2, weight_decay=0.1),
    Adam(1e-2, beta1=0.8, beta2=0.9, eps=1e-4, weight_decay=0.03),
]


def oracle(rule: SGD | Adam, w: Tensor) -> torch.optim.Optimizer:
    if isinstance(rule, SGD):
        return torch.optim.SGD(
            [w], lr=rule.lr, momentum=rule.momentum, weight_decay=rule.weight_decay
        )
    betas = (rule.beta1, rule.beta2)
    return torch.optim.Adam(
        [w], lr=rule.lr, betas=betas, eps=rule.eps, weight_decay=rule.weight_decay
    )


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_twenty_steps_equal_torchs_own(rule: SGD | Adam, in_place: bool) -> None:
    g = torch.Generator().manual_seed(1)
    start = torch.randn(30, generator=g, dtype=F64)
    gradients = [torch.randn(30, generator=g, dtype=F64) for _ in range(20)]
    w = start.clone().requires_grad_()
    optimiser = oracle(rule, w)
    for mine, gradient in zip(walk(rule, start, gradients, in_place), gradients, strict=True):
        w.grad = gradient.clone()
        optimiser.step()
        assert (mine - w.detach()).abs().max() < 1e-12


# ---- the pure form and the in-place form ---------------------------------------------------------

STEPS = st.lists(st.lists(st.floats(-10, 10), min_size=3, max_size=3), min_size=2, max_size=6)
SHARES = st.floats(0, 0.99)


@settings(deadline=None)
@given(STEPS, st.floats(1e-4, 1), SHARES, st.floats(0, 1))
def test_sgd_in_place_equals_pure(
    rows: list[list[float]], lr: float, momentum: float, weight_decay: float
) -> None:
    _compare(SGD(lr, momentum, weight_decay), rows)


@settings(deadline=None)
@given(STEPS, st.floats(1e-4, 1), SHARES, SHARES, st.floats(0, 1))
def test_adam_in_place_equals_pure(
    rows: list[list[float]], lr: float, one: float, other: float, weight_decay: float
) -> None:
    # beta1 is the smaller one, as in any use of Adam. The other way round m / sqrt(v) has no bound:
    # after a gradient near 0 the rounding of that one number is all that is left of v.
    beta1, beta2 = sorted((one, other))
    _compare(Adam(lr, beta1, beta2, 1e-6, weight_decay), rows)


def _compare(rule: SGD | Adam, rows: list[list[float]]) -> None:
    w, *gradients = (vector(*row) for row in rows)
    for pure, lean in zip(
        *(walk(rule, w, gradients, in_place) for in_place in (False, True)), strict=True
    ):
        assert (pure - lean).abs().max() < 1e-12 * max(1.0, pure.abs().max().item())


@pytest.mark.parametrize(
    "rule", [SGD(0.1, 0.9, 0.1), Adam(0.1, weight_decay=0.1)], ids=["sgd", "adam"]
)
def test_the_pure_form_leaves_its_inputs_alone(rule: SGD | Adam) -> None:
    w = vector(1.0, 2.0)
    g = vector(3.0, -4.0)
    state = rule.init(w)
    before = {k: v.clone() for k, v in state.items()}
    rule.step(w, g, state, rule.lr)
    assert w.tolist() == [1.0, 2.0]
    assert g.tolist() == [3.0, -4.0]
    assert all(torch.equal(state[k], before[k]) for k in before)


@pytest.mark.parametrize(
    ("rule", "vectors"), [(SGD(), 0), (SGD(momentum=0.9), 1), (Adam(), 2)], ids=str
)
def test_slots_are_the_vectors_it_remembers(rule: SGD | Adam, vectors: int) -> None:
    w = vector(1.0, 2.0, 3.0)
    assert rule.slots == vectors == sum(v.shape == w.shape for v in rule.init(w).values())


@pytest.mark.parametrize(
    "rule",
    [
        SGD(0.1),
        SGD(0.1, weight_decay=0.01),
        SGD(0.1, momentum=0.9, weight_decay=0.01),
        Adam(0.1),
        Adam(0.1, weight_decay=0.01),
    ],
    ids=str,
)
def test_a_pruned_weight_stays_zero_without_a_sign(rule: SGD | Adam) -> None:
    """Its gradient is 0 times a number, and so a zero of either sign; a -0.0 would cost bytes."""
    pure = vector(0.0, 0.0, 0.0, 0.0, 1.0)
    in_place = pure.clone()
    pure_state = rule.init(pure)
    in_place_state = rule.init(in_place)
    for g in (vector(-0.0, 0.0, -0.0, 0.0, 1.0), vector(-0.0, -0.0, 0.0, 0.0, -1.0)):
        pure, pure_state = rule.step(pure, g.clone(), pure_state, rule.lr)
        rule.step_(in_place, g.clone(), in_place_state, rule.lr)
        for w in (pure, in_place):
            assert trees.identical({"w": w[:4]}, {"w": torch.zeros(4, dtype=w.dtype)})


# ---- the recipe ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: SGD(lr=0), "lr is 0; it must be above 0."),
        (lambda: SGD(momentum=1.0), r"momentum is 1.0; it must be in \[0, 1\)."),
        (lambda: SGD(weight_decay=-1), "weight_decay is -1; it must be 0 or more."),
        (lambda: Adam(lr=-1e-3), "lr is -0.001; it must be above 0."),
        (lambda: Adam(beta1=1.0), r"beta1 is 1.0; it must be in \[0, 1\)."),
        (lambda: Adam(beta2=-0.1), r"beta2 is -0.1; it must be in \[0, 1\)."),
        (lambda: Adam(eps=0), "eps is 0; it must be above 0."),
        (lambda: Adam(weight_decay=-1), "weight_decay is -1; it must be 0 or more."),
        (lambda: LocalTraining(epochs=0), "epochs is 0; it must be 1 or more."),
        (lambda: LocalTraining(batch=0), "batch is 0; it must be 1 or more."),
        (lambda: LocalTraining(decay=0), r"decay is 0; it must be in \(0, 1\]."),
        (lambda: LocalTraining(decay=1.1), r"decay is 1.1; it must be in \(0, 1\]."),
        (lambda: LocalTraining(clip=0), "clip is 0; it must be above 0, or none."),
        (lambda: SGD(lr=math.nan), "lr is nan; it must be above 0."),
    ],
)
def test_impossible_values_are_refused(make, sentence: str) -> None:
    with pytest.raises(InputError, match=f"^{sentence}$"):
        make()


def test_a_stage_without_a_recipe_says_so() -> None:
    with pytest.raises(ValueError, match="has no recipe"):
        local.recipe(Train(CrossEntropy(), None))


def test_epochs_are_shuffled_anew_and_skip_a_batch_of_one_with_batch_norm(tmp_path: Path) -> None:
    stage = Train(CrossEntropy(), LocalTraining(3, 4))
    sizes = {}
    for net in ("mlp", "bn-cnn2"):
        run = make_run(methods.FedAvg(), tmp_path / net, net=net, sizes=(13,), cohort=1)
        (task,) = run.method.plan(run.method.init(run.setup), [0])
        batches = list(local.epochs(run.net, stage, run.client(task, {}), 0))
        sizes[net] = [len(b.y) for b in batches]
        orders = [b.index.tolist() for b in batches if b.position == 0]
        assert len(orders) == 3
        assert all(a != b for a, b in pairwise(orders))
        again = [
            b.index.tolist()
            for b in local.epochs(run.net, stage, run.client(task, {}), 0)
            if b.position == 0
        ]
        other = [
            b.index.tolist()
            for b in local.epochs(run.net, stage, run.client(task, {}), 1)
            if b.position == 0
        ]
        later = run.client(replace(task, round=1), {})
        assert orders == again
        assert orders != other
        assert orders != [
            b.index.tolist() for b in local.epochs(run.net, stage, later, 0) if b.position == 0
        ]
    assert sizes == {"mlp": [4, 4, 4, 1] * 3, "bn-cnn2": [4, 4, 4] * 3}
