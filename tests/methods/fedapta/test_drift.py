"""FedDC's drift: its equations by hand, on linear losses through whole rounds, and what may not be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from tests.conftest import federation
from torch import nn

from fedgrove.core import Batch, ClientInfo
from fedgrove.data import ClientData, Examples
from fedgrove.engines import Serial
from fedgrove.errors import InputError
from fedgrove.methods import FedAPTA
from fedgrove.methods.fedapta.drift import (
    DriftCorrection,
    correction,
    drifted,
    own_gradient,
)
from fedgrove.nets import Net
from fedgrove.parts.local import SGD, LocalTraining
from fedgrove.parts.objective import Loss, Objective
from fedgrove.runs.memory import Memory
from fedgrove.runs.rounds import rounds
from fedgrove.runs.run import Run


@pytest.mark.parametrize(("weight", "penalty"), [(1.0, 0.5), (2.0, 0.25)])
def test_the_terms_by_hand(weight: float, penalty: float) -> None:
    """w = (1, 2), h = (1, 0), received (1, 1): w + h - t = (1, 1), half of alpha .5 times 2 is .5;
    c = (3, -1): <w, c> = 3 - 2 = 1. In all 1.5; the gradient is alpha (1, 1) + c = (3.5, -.5).
    A device that weighs 2 has half of alpha."""
    w = torch.tensor([1.0, 2.0], requires_grad=True)
    carry = {
        "model": {"w": torch.tensor([1.0, 1.0]), "buffer": torch.tensor([9.0])},
        "drift": {"w": torch.tensor([1.0, 0.0])},
        "correction": {"w": torch.tensor([3.0, -1.0])},
        "settings": {"weight": torch.tensor(weight)},
    }
    batch = Batch(*[torch.zeros(1)] * 5)
    loss, aux = DriftCorrection(alpha=0.5)(None, {"w": w}, batch, carry)  # type: ignore[arg-type]
    assert (loss.item(), aux) == (1.0 + penalty, {})
    loss.backward()
    assert w.grad is not None
    assert w.grad.tolist() == [3.0 + penalty, -1.0 + penalty]


def test_the_correction_by_hand() -> None:
    """1 - 3 = -2; a device of weight 2 is corrected towards half of the group's: .5 - 3."""
    own, group = {"w": torch.tensor([3.0])}, {"w": torch.tensor([1.0])}
    assert correction(own, group)["w"].tolist() == [-2.0]
    assert correction(own, group, weight=2.0)["w"].tolist() == [-2.5]


def test_the_own_gradient_by_hand() -> None:
    """A device of gradient 3, corrected by -2, does 4 steps of rate .5: it moves by -.5 · 4 · 1 = -2,
    and -(-2 + -2 / (4 · .5)) = 3."""
    along = {"w": torch.tensor([-2.0])}
    own = own_gradient({"w": torch.tensor([-2.0])}, along, steps=4, lr=0.5)
    assert own["w"].tolist() == [3.0]


def test_the_drift_by_hand() -> None:
    """1 + (5 - 3) = 3."""
    h, w, t = ({"w": torch.tensor([x])} for x in (1.0, 5.0, 3.0))
    assert drifted(h, w, t)["w"].tolist() == [3.0]


def test_a_negative_alpha_is_refused() -> None:
    with pytest.raises(InputError, match="alpha is -1"):
        DriftCorrection(alpha=-1)


# ---- whole rounds on linear losses ---------------------------------------------------------------


@dataclass(frozen=True)
class MeanOutput(Objective):
    """The mean output: of a linear layer without a bias a loss that is linear in its weights."""

    is_loss: ClassVar[bool] = True

    def __call__(self, out: Any, params: Any, batch: Batch, carry: Any) -> Loss:
        return out.logits.mean(), {}


ONE_STEP = LocalTraining(1, 64, SGD(0.5))


def linear_rounds(
    folder: Path,
    gradients: list[float],
    sizes: list[int],
    n: int,
    cohorts: Any = None,
    local: LocalTraining = ONE_STEP,
    **words: Any,
) -> Iterator[tuple[Any, dict[str, float]]]:
    """The state and the devices' corrections and gradients after each of n rounds.

    Device k's inputs are all ``gradients[k]``, which is the gradient of its loss by the only weight.
    One step of rate .5 a round, from a weight of 10.
    """
    module = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(module.weight, 10.0)
    clients = {}
    for k, (gradient, size) in enumerate(zip(gradients, sizes, strict=True)):
        x = torch.full((size, 1), gradient, dtype=torch.float64)
        part = Examples(x, torch.zeros(size).long())
        clients[k] = ClientData(part, part, part, ClientInfo(size))
    made = replace(federation((1,), (4,)), clients=clients)
    method = FedAPTA(ratios=(0.0,), grouping=None, local=local, objective=MeanOutput(), **words)
    run = Run(method, made, Net(module, (1,)), Memory(folder), rounds=n, cohort=len(gradients))
    loop = rounds(run)
    step = next(loop)
    while step.tasks:
        tasks = [t for t in step.tasks if cohorts is None or t.to in cohorts[step.state.round]]
        step = loop.send((task, each) for (_, task), each in Serial().map((run, t) for t in tasks))
        seen = {}
        for k in clients:
            memory = run.memory.read(k, run.memory.files.get(k))
            for name in ("own_gradient", "drift"):
                if name in memory:
                    seen[f"{name}{k}"] = memory[name]["weight"].item()
        yield step.state, seen


def test_a_correction_stays_on_linear_losses(tmp_path: Path) -> None:
    """Gradients 2 and 0, alpha 0, one step of .5. Round 1, nothing known: the devices move by -1 and
    0, so h = (-1, 0), g = (2, 0), G = 1 and w = 10 - .5 - .5 = 9. From round 2 on c = (-1, 1), and
    both move by -.5 · 1: g stays (2, 0), and c with it. (Without the correction added back g would
    be (1, 1) after round 2, c 0 in round 3, and -1 and 1 again in round 4.) h falls by .5 in each
    round: w falls by .5 and by the mean of h, 1, then 1.5, 2."""
    alone = DriftCorrection(alpha=0.0)
    found = linear_rounds(tmp_path, [2.0, 0.0], [4, 4], 4, drift="feddc", correct=alone)
    for weight, drifts in zip(
        (9.0, 7.5, 5.5, 3.0),
        ((-1.0, 0.0), (-1.5, -0.5), (-2.0, -1.0), (-2.5, -1.5)),
        strict=True,
    ):
        state, seen = next(found)
        assert state.models[0]["weight"].item() == pytest.approx(weight)
        assert state.gradients[0]["weight"].item() == pytest.approx(1.0)
        assert (seen["own_gradient0"], seen["own_gradient1"]) == pytest.approx((2.0, 0.0))
        assert (seen["drift0"], seen["drift1"]) == pytest.approx(drifts)


def test_own_gradients_are_known_whatever_the_steps_and_the_rate(tmp_path: Path) -> None:
    """Batches of 2 and two epochs: 4 examples are 4 steps, 6 are 6; the rate is .5, then .25. In round
    1 the devices move by -.5 · 4 · 2 = -4 and 0, in round 2 by the rate times the steps times G = (4 ·
    2) / 10 = .8, -.8 and -1.2: what they find their gradients to be stays 2 and 0."""
    alone = DriftCorrection(alpha=0.0)
    local = LocalTraining(2, 2, SGD(0.5), decay=0.5)
    found = linear_rounds(
        tmp_path, [2.0, 0.0], [4, 6], 2, local=local, drift="feddc", correct=alone
    )
    for drifts in ((-4.0, 0.0), (-4.8, -1.2)):
        state, seen = next(found)
        assert (seen["drift0"], seen["drift1"]) == pytest.approx(drifts)
        assert (seen["own_gradient0"], seen["own_gradient1"]) == pytest.approx((2.0, 0.0))
        assert state.gradients[0]["weight"].item() == pytest.approx(0.8)


def test_the_penalty_draws_back_by_hand(tmp_path: Path) -> None:
    """As above with alpha 1. Round 2 begins at w = 9 with h = (-1, 0) and c = (-1, 1): the first
    device's gradient is 2 - 1 + 1 · (w + h - w) = 0, and it stays; the second's 0 + 1 + 0 = 1: -.5.
    h = (-1, -.5); w = 9 + (0 - .5) / 2 - .75 = 8. g = -(c + Δ / .5) = (1, 0): of the loss and the
    penalty together, and G = .5."""
    strong = DriftCorrection(alpha=1.0)
    found = linear_rounds(tmp_path, [2.0, 0.0], [4, 4], 2, drift="feddc", correct=strong)
    next(found)
    state, seen = next(found)
    assert (seen["drift0"], seen["drift1"]) == pytest.approx((-1.0, -0.5))
    assert (seen["own_gradient0"], seen["own_gradient1"]) == pytest.approx((1.0, 0.0))
    assert state.models[0]["weight"].item() == pytest.approx(8.0)
    assert state.gradients[0]["weight"].item() == pytest.approx(0.5)


def test_weights_by_examples_by_hand(tmp_path: Path) -> None:
    """Devices of 6 and 2 examples weigh 1.5 and .5. Gradients 2 and -2: G = (6 · 2 - 2 · 2) / 8 = 1.
    In round 2 c = 1 / 1.5 - 2 and 1 / .5 + 2: they move by -.5 / 1.5 and -.5 / .5, the mean of which
    is -(6 / 3 + 2 · 1) / 8 = -.5: as without weights. Own gradients stay, whatever the correction."""
    alone = DriftCorrection(alpha=0.0, weighted=True)
    found = linear_rounds(tmp_path, [2.0, -2.0], [6, 2], 2, drift="feddc", correct=alone)
    state, before = next(found)
    assert state.gradients[0]["weight"].item() == pytest.approx(1.0)
    state, seen = next(found)
    moved = [seen[f"drift{k}"] - before[f"drift{k}"] for k in (0, 1)]
    assert moved == pytest.approx([-0.5 / 1.5, -1.0])
    assert (seen["own_gradient0"], seen["own_gradient1"]) == pytest.approx((2.0, -2.0))
    assert state.gradients[0]["weight"].item() == pytest.approx(1.0)


def test_an_absent_device_keeps_its_own(tmp_path: Path) -> None:
    """Device 1 misses round 2: G is then of device 0 alone, 2, and device 1 is corrected by 2 - 0."""
    alone = DriftCorrection(alpha=0.0)
    found = linear_rounds(
        tmp_path, [2.0, 0.0], [4, 4], 3, [(0, 1), (0,), (0, 1)], drift="feddc", correct=alone
    )
    next(found)
    state, before = next(found)
    assert state.gradients[0]["weight"].item() == pytest.approx(2.0)
    state, seen = next(found)
    assert seen["drift1"] - before["drift1"] == pytest.approx(-0.5 * 2)
    assert (seen["own_gradient0"], seen["own_gradient1"]) == pytest.approx((2.0, 0.0))
    assert state.gradients[0]["weight"].item() == pytest.approx(1.0)


def test_on_the_server_alone_it_is_momentum(tmp_path: Path) -> None:
    """Gradients 2 and 0, nothing in the loss: the devices move by -1 and 0 in every round, and the
    mean of h falls by .5: w falls by 1, 1.5, 2. alpha is of no effect."""
    found = linear_rounds(
        tmp_path, [2.0, 0.0], [4, 4], 3, drift="server", correct=DriftCorrection(alpha=7.0)
    )
    for weight, first in zip((9.0, 7.5, 5.5), (-1.0, -2.0, -3.0), strict=True):
        state, seen = next(found)
        assert state.models[0]["weight"].item() == pytest.approx(weight)
        assert seen == pytest.approx({"drift0": first, "drift1": 0.0})
        assert state.gradients == {}
