"""Rates by layer: every coefficient by hand, the schedule's pieces, the cap, and what is measured."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fedgrove import nets
from fedgrove.core import Batch, ClientInfo, Measure
from fedgrove.engines.work import count_macs
from fedgrove.errors import InputError, UnfitError
from fedgrove.methods.fedlayerprune.fisher import GradientVariance, HessianTrace
from fedgrove.methods.fedlayerprune.rates import (
    Alike,
    Allocated,
    KindAndDepth,
    LearnedSensitivity,
    LossIncrease,
    Piecewise,
    base_for,
    capped,
    mean_rate,
    proportion_of,
    rate_of_device,
)
from fedgrove.nets import Net
from fedgrove.nets.layout import Layout
from fedgrove.parts.allocate import ERK, Uniform
from fedgrove.parts.objective import CrossEntropy


def layout_of(name: str, shape: tuple[int, ...], classes: int) -> Layout:
    return Layout.of(nets.build(name, shape, classes, seed=0), shape)


CNN = layout_of("mnist-cnn", (1, 28, 28), 10)
"""Four layers that can be pruned: conv1 800 weights, conv2 51,200, fc1 401,408, head 1,280."""


def test_kind_and_depth_by_hand() -> None:
    """Of four layers, whose middles are .125, .375, .625 and .875, one is shallow and one deep.

    conv and shallow .6 * .7 = .42; conv .6 and linear 1.1 between; linear and deep 1.1 * 1.2 = 1.32.
    """
    alphas = KindAndDepth().sensitivities(CNN)
    assert list(alphas) == ["conv1.weight", "conv2.weight", "fc1.weight", "head.weight"]
    assert alphas.values() == pytest.approx([0.42, 0.6, 1.1, 1.32])


def test_thirds_of_a_residual_network() -> None:
    """21 layers: 7 shallow convolutions at .42, 7 at .6, 6 deep at .72, the head at 1.32."""
    layout = layout_of("resnet18", (3, 32, 32), 10)
    values = [round(alpha, 6) for alpha in KindAndDepth().sensitivities(layout).values()]
    assert values == [0.42] * 7 + [0.6] * 7 + [0.72] * 6 + [1.32]


def test_norm_layers_have_no_rate() -> None:
    layout = layout_of("bn-cnn2", (1, 8, 8), 3)
    assert set(KindAndDepth()(layout, 0.5)) == {"conv1.weight", "conv2.weight", "head.weight"}


def test_the_rate_of_a_round_by_hand() -> None:
    """p_base .2: .2 * .42 = .084 at first; in the last rounds 1.5 times that, and the head .396.

    With p_base .6 the head is at .6 * 1.32 * 1.5 = 1.188, which p_max .8 cuts.
    """
    schedule = Piecewise()
    first = capped(KindAndDepth()(CNN, 0.2 * schedule(0, 20)), 0.6)
    last = capped(KindAndDepth()(CNN, 0.2 * schedule(19, 20)), 0.6)
    assert first.values() == pytest.approx([0.084, 0.12, 0.22, 0.264])
    assert last.values() == pytest.approx([0.126, 0.18, 0.33, 0.396])
    high = capped(KindAndDepth()(CNN, 0.6 * schedule(19, 20)), 0.8)
    assert high.values() == pytest.approx([0.378, 0.54, 0.8, 0.8])


def test_the_pieces_of_the_schedule_by_hand() -> None:
    """Level to .3; at .5 it is 1 + .5 * .2 / .5 = 1.2; at .8 and behind it 1.5."""
    schedule = Piecewise()
    assert [schedule(t, 10) for t in (0, 2, 3)] == [1, 1, 1]
    assert schedule(5, 10) == pytest.approx(1.2)
    assert schedule(8, 10) == pytest.approx(1.5)
    assert schedule(9, 10) == 1.5
    assert [Piecewise(rise=0)(t, 10) for t in range(10)] == [1] * 10


def test_a_strength_by_hand() -> None:
    """Four layers, of which one holds half of all strength: 4 * .5 = 2, so .6 .7 / (.1 + 2);
    the others have a sixth each: 4 / 6. All are scaled to the mean rate without strengths."""
    evidence = {"conv1.weight": 3.0, "conv2.weight": 1.0, "fc1.weight": 1.0, "head.weight": 1.0}
    rates = KindAndDepth(strength=GradientVariance())(CNN, 0.2, evidence)
    proportion = (0.42 / 2.1) / (1.1 / (0.1 + 4 / 6))
    assert rates["conv1.weight"] / rates["fc1.weight"] == pytest.approx(proportion)
    assert mean_rate(CNN, rates) == pytest.approx(mean_rate(CNN, KindAndDepth()(CNN, 0.2)))
    # Without one, what was measured is not used; before anybody has measured, neither.
    assert KindAndDepth()(CNN, 0.2, evidence) == KindAndDepth()(CNN, 0.2)
    assert KindAndDepth(strength=GradientVariance())(CNN, 0.2) == KindAndDepth()(CNN, 0.2)


def test_layers_alike_and_allocated() -> None:
    assert set(Alike()(CNN, 0.3).values()) == {0.3}
    assert Allocated(Uniform())(CNN, 0.5).values() == pytest.approx([0.5] * 4)
    rates = Allocated(ERK())(CNN, 0.5)
    assert mean_rate(CNN, rates) == pytest.approx(0.5, abs=1e-5)
    # ERK keeps small layers denser than large ones.
    assert rates["conv1.weight"] < rates["fc1.weight"]


def test_a_layer_without_a_sensitivity_is_refused() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(3, 4, batch_first=True)
            self.head = nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.head(self.rnn(x)[0][:, -1])
            return out

    layout = Layout.of(Recurrent(), (5, 3))
    with pytest.raises(UnfitError, match="'rnn' is neither a convolution nor linear"):
        KindAndDepth()(layout, 0.2)
    assert set(Alike()(layout, 0.2)) == set(layout.prunable)


# ---- learned -------------------------------------------------------------------------------------


def two_layers(first: int, second: int) -> Layout:
    """A network with so many weights in its layers."""
    module = nn.Sequential(nn.Linear(1, first), nn.Linear(first, second // first))
    return Layout.of(module, (1,))


def test_learned_rates_by_hand() -> None:
    """10 and 30 weights; pruning half of them costs 1 and 6: per weight .1 and .2.

    p_l = c / (.1, .2) = c (10, 5) with 10 * 10 c + 30 * 5 c = 250 c = .3 * 40 = 12: c = .048.
    """
    layout = two_layers(10, 30)
    rates = LearnedSensitivity()(layout, 0.3, {"0.weight": 1.0, "1.weight": 6.0})
    assert rates.values() == pytest.approx([0.48, 0.24])


def test_what_a_full_layer_does_not_take_the_others_do() -> None:
    """At a mean of .6 the first layer would be at .96; it stops at .9, and leaves 24 - 9 = 15."""
    layout = two_layers(10, 30)
    rates = LearnedSensitivity()(layout, 0.6, {"0.weight": 1.0, "1.weight": 6.0})
    assert rates.values() == pytest.approx([0.9, 0.5])


@given(
    st.lists(st.floats(0, 10), min_size=4, max_size=4),
    st.floats(0.01, 0.9),
)
def test_learned_rates_meet_their_mean(increases: list[float], p: float) -> None:
    evidence = dict(zip(CNN.prunable, increases, strict=True))
    rates = LearnedSensitivity()(CNN, p, evidence)
    assert mean_rate(CNN, rates) == pytest.approx(p)
    assert max(rates.values()) <= 0.9 + 1e-9


def test_before_anybody_has_measured_layers_are_alike() -> None:
    assert set(LearnedSensitivity()(CNN, 0.3).values()) == {0.3}
    nothing = dict.fromkeys(CNN.prunable, 0.0)
    assert set(LearnedSensitivity()(CNN, 0.3, nothing).values()) == {0.3}


def test_the_loss_increase_by_hand() -> None:
    """y = w2 (w1 x) with w1 = (1, 2), w2 = (1, 3) on x = 1: logits 7 and 0.

    Half of w1 leaves 2, and 6; of w2, half of the two weights in use leaves 3, and 6 as well.
    Cross-entropy of class 0 is log(1 + exp(-z)).
    """
    module = nn.Sequential(nn.Linear(1, 2, bias=False), nn.Linear(2, 2, bias=False))
    net = Net(module, (1,))
    params = {
        "0.weight": torch.tensor([[1.0], [2.0]], dtype=torch.float64),
        "1.weight": torch.tensor([[1.0, 3.0], [0.0, 0.0]], dtype=torch.float64),
    }
    one = torch.ones(1, dtype=torch.float64)
    batch = Batch(one[:, None], torch.tensor([0]), one, torch.tensor([0]), torch.tensor(0))
    measure = LossIncrease(0.5)
    increases = measure.value(measure.of(CrossEntropy())(net, params, batch, {}))
    cost = math.log1p(math.exp(-6)) - math.log1p(math.exp(-7))
    # A probe of zeros that are pruned already would cost nothing, whatever the layer is worth.
    assert increases == pytest.approx({"0.weight": cost, "1.weight": cost})
    # One of two weights is the least that goes; both are more.
    both = LossIncrease(0.9)
    more = both.value(both.of(CrossEntropy())(net, params, batch, {}))
    assert more["0.weight"] == pytest.approx(math.log(2) - math.log1p(math.exp(-7)))


@pytest.mark.parametrize("part", [LossIncrease(0.5), GradientVariance(), HessianTrace(draws=2)])
def test_what_measures_take_is_counted(part) -> None:
    """Torch's own count of operations is no more than what the clock is told, and near it."""
    net = Net(nets.build("bn-cnn2", (1, 8, 8), 3, seed=0, width=4), (1, 8, 8))
    if isinstance(part, GradientVariance):
        # Gradients of each example become grouped convolutions, of which torch's counter multiplies
        # every group's input with every group's gradient: a net without convolutions.
        net = Net(nets.build("mlp", (1, 8, 8), 3, seed=0), (1, 8, 8))
    g = torch.Generator().manual_seed(0)
    x = torch.randn(4, 1, 8, 8, generator=g)
    batch = Batch(x, torch.tensor([0, 1, 2, 0]), torch.ones(4), torch.arange(4), torch.tensor(0))
    stage = Measure("it", part.of(CrossEntropy()))
    with FlopCounterMode(display=False) as counted:
        stage.f(net, net.params(), batch, {})
    claimed = 2 * 4 * count_macs(net, stage, None)
    assert 0.8 < counted.get_total_flops() / claimed <= 1.02


# ---- the base ------------------------------------------------------------------------------------


def kept_at(rates, layout: Layout, p_max: float) -> Callable[[float], float]:
    return lambda p: 1 - mean_rate(layout, capped(rates(layout, p), p_max))


@pytest.mark.parametrize("rates", [KindAndDepth(), Alike(), Allocated(ERK()), LearnedSensitivity()])
def test_the_base_leads_to_the_density(rates) -> None:
    base = base_for(0.48, kept_at(rates, CNN, 0.8), Piecewise(), 20, p_max=0.8)
    kept = []
    for t in range(20):
        kept.append(1 - mean_rate(CNN, capped(rates(CNN, base * Piecewise()(t, 20)), 0.8)))
    assert sum(kept) / 20 == pytest.approx(0.48, abs=1e-4)


def test_the_base_for_the_papers_resnet() -> None:
    """52.7 % pruned on average needs a base near .6, three times what the paper says."""
    layout = layout_of("resnet18", (3, 32, 32), 10)
    base = base_for(1 - 0.527, kept_at(KindAndDepth(), layout, 0.8), Piecewise(), 30, p_max=0.8)
    assert base == pytest.approx(0.6, abs=0.05)
    rates = capped(KindAndDepth()(layout, 0.2 * 1.5), 0.6)
    # What the paper's own base leads to in its last rounds.
    assert mean_rate(layout, rates) == pytest.approx(0.21, abs=0.01)


def test_a_density_that_the_cap_does_not_allow_is_refused() -> None:
    with pytest.raises(InputError, match=r"density is 0\.1; it must be 0.2 or more with p_max 0.8"):
        base_for(0.1, kept_at(Alike(), CNN, 0.8), Piecewise(), 10, p_max=0.8)


def test_the_rate_of_a_device_by_hand() -> None:
    """Half the bandwidth keeps half of .6, so .7 goes; the slowest keeps no less than a quarter."""
    typical = ClientInfo(examples=1, bandwidth=40.0, speed=2.0)
    half = proportion_of(ClientInfo(examples=1, bandwidth=20.0, speed=4.0), typical)
    slow = proportion_of(ClientInfo(examples=1, bandwidth=80.0, speed=0.1), typical)
    fast = proportion_of(ClientInfo(examples=1, bandwidth=80.0, speed=8.0), typical)
    assert (half, slow, fast) == (0.5, 0.25, 1.0)
    assert rate_of_device(0.4, half) == pytest.approx(0.7)
    assert rate_of_device(0.4, fast) == pytest.approx(0.4)
    # Above 1 only a layer's cap holds it back, for weak devices too.
    assert rate_of_device(1.2, half) == 1.2


@pytest.mark.parametrize(
    "make",
    [
        lambda: KindAndDepth(conv=-1),
        lambda: KindAndDepth(epsilon=0),
        lambda: LearnedSensitivity(probe=1),
        lambda: LearnedSensitivity(most=0),
        lambda: Piecewise(begin=0.9, end=0.8),
        lambda: Piecewise(rise=-1),
    ],
)
def test_impossible_coefficients_are_refused(make) -> None:
    with pytest.raises(InputError, match="it must be"):
        make()
