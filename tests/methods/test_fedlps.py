"""FedLPS: a frozen encoder, and a predictor that each client prunes once, by its own weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.conftest import make_run
from tests.contract import Contract
from tests.methods.exchanges import exchanges, verbs
from torch import nn

from fedgrove import trees
from fedgrove.channels.submodel import groups_from_plain, read_packet_channels
from fedgrove.core import ClientInfo, Packet, Report, Setup
from fedgrove.errors import InputError
from fedgrove.methods import FedLPS
from fedgrove.methods.fedlps import encoder_names, predictor_groups, predictor_size
from fedgrove.nets import Net, build
from fedgrove.nets.freeze import freeze

CONTRACT = Contract(
    small={"widths": (0.75, 0.5)},
    off=FedLPS(encoder=0.0, widths=(1.0,)),
    sends_masks=True,
    has_a_place_for_each_client=True,
    # As HeteroFL, and no encoder.
    paper_bytes=8 * (3123 + 1571) / 2 * 3 * 50,
    refused_with_privacy="mask of 'model'",
)

NET = Net(nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 2), nn.Linear(2, 1)), (1,))
START = Setup(NET.params(), NET, {0: ClientInfo(10), 1: ClientInfo(30)}, 3, lambda j: {})


def test_the_encoder_is_the_first_third_of_the_layers() -> None:
    # A third of three layers is one.
    assert encoder_names(NET.layout, 0.34) == ("0.weight", "0.bias")
    assert encoder_names(NET.layout, 0.0) == ()
    # The units that the first layer makes are the encoder's, those of the second can go.
    assert [group.name for group in predictor_groups(NET, ("0.weight", "0.bias"))] == ["1"]
    # 2*2 + 2 and 2 + 1 are 9; with half of the second's units 2 + 1 and 1 + 1 are 5.
    assert predictor_size(NET, 0.34, 1.0) == 9
    assert predictor_size(NET, 0.34, 0.5) == 5


@pytest.mark.parametrize("net", ["bn-cnn2", "mnist-cnn", "resnet18"])
@pytest.mark.parametrize("share", [0.34, 0.5])
def test_an_encoder_is_what_freeze_would_freeze(net: str, share: float) -> None:
    """The first quarter of the layers is one thing, whoever keeps it."""
    shape = (1, 8, 8)
    options = {} if net == "mnist-cnn" else {"width": 4}
    frozen = build(net, shape, 3, 0, **options)
    freeze(frozen, shape, share)
    layout = Net(build(net, shape, 3, 0, **options), shape).layout
    assert set(encoder_names(layout, share)) == Net(frozen, shape).constants().keys()


def test_from_scratch_nothing_is_frozen(tmp_path: Path) -> None:
    """A random encoder would stay random for ever."""
    run = make_run(FedLPS(widths=(0.5,)), tmp_path, rounds=1)
    (only,) = exchanges(run)
    assert only[1][0].send["model"].values.keys() == run.net.params().keys()


def test_a_fold_by_hand() -> None:
    """Client 0 (10 examples) has the first unit, client 1 (30) both; the server had zeros.

    Of the first unit (10 * 4 + 30 * 8) / 40 = 7; of the second, which client 0 lacks and which counts there as it was,
    (10 * 0 + 30 * 8) / 40 = 6.
    """
    method = FedLPS(encoder=0.34, widths=(0.5, 1.0))
    state = method.init(START)
    state = replace(state, model={k: torch.zeros_like(v) for k, v in state.model.items()})
    keep = {
        "1.weight": torch.tensor([[True, True], [False, False]]),
        "1.bias": torch.tensor([True, False]),
        "2.weight": torch.tensor([[True, False]]),
    }
    small = {k: torch.full_like(v, 4.0) for k, v in state.model.items()}
    wide = {k: torch.full_like(v, 8.0) for k, v in state.model.items()}
    after = method.fold(
        state,
        [
            Report(0, {"model": Packet(trees.apply_mask(small, keep), keep)}, 10),
            Report(1, {"model": Packet(wide)}, 30),
        ],
    )
    assert after.model["1.weight"].tolist() == [[7, 7], [6, 6]]
    assert after.model["1.bias"].tolist() == [7, 6]
    assert after.model["2.weight"].tolist() == [[7, 6]]
    assert after.model["2.bias"].tolist() == [7]
    assert {k: c["1"].tolist() for k, c in after.channels.items()} == {0: [True, False]}


def test_clients_prune_once_by_their_own_weights_and_then_stay(tmp_path: Path) -> None:
    run = make_run(FedLPS(encoder=0.34, widths=(0.5,)), tmp_path, rounds=2, cohort=4)
    first, second = exchanges(run)
    assert verbs(first[1]) == {"train:prune"}
    assert verbs(second[1]) == {"train"}
    groups = groups_from_plain(first[3].structure)
    chosen = {}
    for report in first[2]:
        packet = report.give["model"]
        chosen[report.of] = read_packet_channels(packet, groups)["fc2"]
        assert int(chosen[report.of].sum()) == 32
        # What goes down next, and comes back, is the same part.
        (task,) = [task for task in second[1] if task.to == report.of]
        (again,) = [answer for answer in second[2] if answer.of == report.of]
        for other in (task.send["model"], again.give["model"]):
            assert trees.equal(other.mask or {}, packet.mask or {})
    # Other data, other channels.
    assert len({tuple(kept.tolist()) for kept in chosen.values()}) == 4
    # The encoder never travels.
    assert not any("fc1" in name for name in second[1][0].send["model"].values)


def test_a_part_without_a_channel_is_not_taken_for_a_choice() -> None:
    method = FedLPS(encoder=0.34, widths=(0.5, 1.0))
    state = method.init(START)
    nothing = {name: torch.zeros_like(v, dtype=torch.bool) for name, v in state.model.items()}
    empty = Packet(trees.apply_mask(state.model, nothing), nothing)
    after = method.fold(state, [Report(0, {"model": empty}, 10)])
    assert after.channels == {}
    assert trees.identical(after.model, state.model)


def test_an_encoder_that_leaves_nothing_is_refused() -> None:
    with pytest.raises(InputError, match="after the encoder it has no channels"):
        FedLPS(encoder=0.7, widths=(0.5,)).init(START)
    with pytest.raises(
        InputError, match=r"encoder is 0\.25, which is less than one of the 3 layers"
    ):
        FedLPS(encoder=0.25, widths=(1.0,)).init(START)
    with pytest.raises(InputError, match=r"encoder is 1; it must be in \[0, 1\)."):
        FedLPS(encoder=1)
