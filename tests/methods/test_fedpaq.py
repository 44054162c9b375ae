"""FedPAQ: the quantiser is right on average, and the mean update moves the model."""

from __future__ import annotations

from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from tests.conftest import make_run, reports
from tests.contract import Contract

from fedgrove import trees
from fedgrove.core import Packet, Report
from fedgrove.engines import Serial
from fedgrove.errors import InputError
from fedgrove.methods.fedpaq import QSGD, FedPAQ
from fedgrove.parts.one_model import OneModel
from fedgrove.runs.rounds import plan

CONTRACT = Contract(
    off=FedPAQ(levels=0),
    # 4 bits and a sign: ten levels and 0 are eleven; and the length.
    paper_bytes=(4 * 5187 + 5187 * 5 / 8 + 4) * 3 * 50,
)


def draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_levels_by_hand() -> None:
    """(3, -4, 0) is 5 long; with one level 3/5 and 4/5 are chances: 0 or 5, 0 or -5. With five they are levels."""
    x = {"w": torch.tensor([3.0, -4.0, 0.0])}
    for seed in range(20):
        one, other, zero = QSGD(1)(x, draw(seed))["w"].tolist()
        assert (one in (0.0, 5.0), other in (0.0, -5.0), zero) == (True, True, 0.0)
        assert QSGD(5)(x, draw(seed))["w"].tolist() == [3.0, -4.0, 0.0]


def test_by_layer_the_length_is_the_layers() -> None:
    """Alone in its layer a value is as long as the layer, and stays as it is."""
    tree = {"a": torch.tensor([3.0]), "b": torch.tensor([-4.0])}
    assert trees.equal(QSGD(1, scope="layer")(tree, draw()), tree)


@pytest.mark.parametrize("levels", [1, 4])
def test_right_on_average_with_the_variance_of_the_paper(levels: int) -> None:
    """4,000 draws: the mean is within 5 standard errors; |q - x|^2 is below min(d/s^2, sqrt(d)/s) |x|^2 on average."""
    x = torch.randn(20, generator=draw(9), dtype=torch.float64)
    generator = draw(1)
    drawn = torch.stack([QSGD(levels)({"w": x}, generator)["w"] for _ in range(4000)])
    errors = 5 * drawn.std(0) / 4000**0.5
    assert bool(((drawn.mean(0) - x).abs() <= errors + 1e-9).all())
    variance = float((drawn - x).square().sum(1).mean() / x.square().sum())
    assert 0 < variance <= min(20 / levels**2, 20**0.5 / levels)


@settings(deadline=None)
@given(st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=30), st.integers(1, 9))
def test_it_is_a_level_beside_the_value(numbers: list[float], levels: int) -> None:
    x = torch.tensor(numbers)
    q = QSGD(levels)({"w": x}, draw())["w"]
    step = float(x.double().norm()) / levels
    assert bool(((q - x).abs() <= step * (1 + 1e-5) + 1e-30).all())
    assert not bool(torch.signbit(q[q == 0]).any())


def test_the_round_by_hand() -> None:
    """w = (1, 1); updates (4, 0) of one example and (0, -4) of three: w + (1, -3). Statistics are averaged: 3/4 of 8."""
    model = {"w": torch.tensor([1.0, 1.0]), "n.running_mean": torch.tensor([5.0])}
    given_ = []
    for client, examples, update, statistic in ((0, 1, [4.0, 0.0], 0.0), (1, 3, [0.0, -4.0], 8.0)):
        packets = {
            "update": Packet({"w": torch.tensor(update)}),
            "statistics": Packet({"n.running_mean": torch.tensor([statistic])}),
        }
        given_.append(Report(client, packets, examples))
    after = FedPAQ().fold(OneModel(0, model), given_)
    assert after.round == 1
    assert after.model["w"].tolist() == [2.0, -2.0]
    assert after.model["n.running_mean"].tolist() == [6.0]
    assert list(after.model) == list(model)


def test_what_is_drawn_depends_on_seed_round_and_client(tmp_path: Path) -> None:
    run = make_run(FedPAQ(), tmp_path)
    tasks = plan(run, run.initial_state)
    first, again = (list(reports(run, Serial(), tasks)) for _ in range(2))
    for one, other in zip(first, again, strict=True):
        assert trees.identical(one.give["update"].values, other.give["update"].values)
    # Few levels are few values, of which a codec makes few bytes.
    for report in first:
        sent = trees.flatten(report.give["update"].values)
        assert len(set(sent.abs().tolist())) <= 11
        up = sum(report.cost["up"].values())
        assert 5 * up < sum(report.cost["down"].values())


def test_what_is_refused() -> None:
    with pytest.raises(InputError, match="levels is -1; it must be 1 or more"):
        FedPAQ(levels=-1)
    with pytest.raises(InputError, match="scope is 'net'; it must be 'model' or 'layer'"):
        FedPAQ(scope="net")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="a random quantiser was given no generator"):
        QSGD()({"w": torch.ones(2)})
