"""Q-FedCG: what is left of an update, its grid, the mean, and the bytes, by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.conftest import make_run, play
from tests.contract import WHOLE, Contract

from fedgrove import nets, trees
from fedgrove.core import Packet, Report
from fedgrove.engines import Serial
from fedgrove.engines.work import perform
from fedgrove.errors import InputError
from fedgrove.methods import FedAvg, QFedCG
from fedgrove.methods.qfedcg import largest_of
from fedgrove.nets import Net
from fedgrove.parts.one_model import OneModel
from fedgrove.runs.rounds import plan

CONTRACT = Contract(
    off=QFedCG(share=1.0, bits=32),
    # Half the values in a quarter of the bits, an eighth: 87.5 % less.
    paper_bytes=WHOLE / 8,
)

UPDATE = {"a": torch.tensor([4.0, -1.0, 0.5]), "b": torch.tensor([[-2.0], [3.0], [0.25]])}


def test_the_largest_half_of_all_layers_by_hand() -> None:
    """Of 4, -1, .5, -2, 3 and .25 the three largest are 4, 3 and -2: one of `a`, two of `b`."""
    kept = largest_of(UPDATE, 0.5)
    assert kept["a"].tolist() == [4.0, 0.0, 0.0]
    assert kept["b"].tolist() == [[-2.0], [3.0], [0.0]]


def test_the_grid_by_hand() -> None:
    """4 bits: 7 levels each side. `a`: steps of 4/7. `b`: steps of 3/7, -2 is 4.67 of them, so -5."""
    sent = QFedCG(share=0.5, bits=4).compressed(UPDATE)
    assert sent["a"].tolist() == [4.0, 0.0, 0.0]
    assert sent["b"].flatten().tolist() == pytest.approx([-15 / 7, 3.0, 0.0])


def test_unquantised_values_travel_as_they_are() -> None:
    assert trees.identical(QFedCG(share=0.5, bits=32).compressed(UPDATE), largest_of(UPDATE, 0.5))
    assert trees.identical(QFedCG(share=1.0, bits=32).compressed(UPDATE), UPDATE)


@given(
    values=st.lists(st.floats(-9, 9, width=32), min_size=1, max_size=40),
    share=st.floats(0.01, 1),
)
def test_exactly_so_many_values_are_kept_and_none_outside_is_larger(values, share) -> None:
    update = {"w": torch.tensor(values)}
    kept = largest_of(update, share)["w"]
    count = max(1, round(share * len(values)))
    assert int((kept != 0).sum()) <= count
    left = torch.tensor(values)[kept == 0].abs()
    used = kept[kept != 0].abs()
    if len(left) and len(used):
        assert float(left.max()) <= float(used.min())


def test_the_mean_by_hand() -> None:
    """10 + (1 * 4 + 3 * 0) / 4 = 11: who left a value out says 0. 20 + (1 * 2 + 3 * 6) / 4 = 25."""
    state = OneModel(0, {"w": torch.tensor([10.0, 20.0])})
    answers = []
    for client, (values, examples) in enumerate((((4.0, 2.0), 1), ((0.0, 6.0), 3))):
        packet = Packet({"w": torch.tensor(values)})
        answers.append(Report(client, {"update": packet}, examples))
    after = QFedCG().fold(state, answers)
    assert after.model["w"].tolist() == [11.0, 25.0]
    assert after.round == 1


def test_running_statistics_are_neither_left_out_nor_rounded(tmp_path: Path) -> None:
    run = make_run(QFedCG(share=0.1, bits=2), tmp_path / "a", net="bn-cnn2", cohort=1)
    plain = make_run(FedAvg(), tmp_path / "b", net="bn-cnn2", cohort=1)
    (task,) = plan(run, run.initial_state)
    report, _ = perform(run, task, {})
    (same,) = plan(plain, plain.initial_state)
    whole, _ = perform(plain, same, {})
    buffers = run.net.layout.buffers
    assert buffers
    for name in buffers:
        moved = whole.give["model"].values[name] - run.params[name]
        assert torch.equal(report.give["update"].values[name], moved)
    sent = trees.pick(report.give["update"].values, run.net.layout.params)
    kept = sum(int((leaf != 0).sum()) for leaf in sent.values())
    assert 0 < kept <= round(0.1 * run.net.layout.size)


def test_the_papers_reduction_is_exact() -> None:
    """Half the values, 8 of 32 bits: 1/8 of what FedAvg sends, on both of its networks."""
    for name, shape, classes in (("lenet", (3, 32, 32), 10), ("leafcnn", (1, 28, 28), 47)):
        net = Net(nets.build(name, shape, classes, 0), shape)
        dense = FedAvg().paper_bytes(net, 100, 100, 7)
        assert QFedCG().paper_bytes(net, 100, 100, 7) == dense / 8


def test_real_bytes_are_below_a_quarter_up(tmp_path: Path) -> None:
    """Which values are sent has to be said too: 8 bits of half, about a bit of all, and names."""
    words = {"rounds": 1, "cohort": 1, "dtype": torch.float32}
    sizes = {}
    for method in (QFedCG(), FedAvg()):
        run = make_run(method, tmp_path / type(method).__name__, **words)
        (job,) = [(run, task) for task in plan(run, run.initial_state)]
        ((_, answer),) = Serial().map([job])
        sizes[type(method).__name__] = sum(answer.cost["up"].values())
    assert sizes["QFedCG"] < sizes["FedAvg"] / 4


def test_it_ends_near_fedavg(tmp_path: Path) -> None:
    """Compressed updates move the model most of the way that whole ones do."""
    plain = play(make_run(FedAvg(), tmp_path / "a"), Serial()).model
    run = make_run(QFedCG(share=0.9, bits=16), tmp_path / "b")
    other = play(run, Serial()).model
    assert 0 < trees.distance(plain, other) < 0.5 * trees.distance(plain, run.params)


@pytest.mark.parametrize("words", [{"share": 0.0}, {"share": 1.5}, {"bits": 1}, {"bits": 24}])
def test_bad_values_are_refused(words) -> None:
    (name,) = words
    with pytest.raises(InputError, match=f"{name} is .*; it must be in"):
        QFedCG(**words)
