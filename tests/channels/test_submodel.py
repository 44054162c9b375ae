"""Sub-models: groups as plain data, recovery by hand, what a mask says about channels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.conftest import make_run
from torch import nn

from fedgrove import trees
from fedgrove.channels.find_groups import find_groups, make_channel_mask
from fedgrove.channels.groups import ChannelGroup, Place
from fedgrove.channels.selection import Gamma, select_first
from fedgrove.channels.submodel import (
    all_channels,
    count_params_at,
    extract_submodel,
    fill_missing_channels,
    get_shapes,
    groups_from_plain,
    groups_to_plain,
    read_packet_channels,
    restore_full_width,
    restore_submodel,
    slim_submodel,
)
from fedgrove.core import Packet, Task
from fedgrove.methods import Hermes
from fedgrove.nets import Net
from fedgrove.runs.checkpoint import state_from_json, state_to_json

TINY = Net(nn.Sequential(nn.Linear(1, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 1)), (1,))


def flags(*bits: int) -> torch.Tensor:
    return torch.tensor(bits).bool()


def test_groups_are_noted_and_recalled_through_a_checkpoint(tmp_path: Path) -> None:
    run = make_run(Hermes(), tmp_path, net="resnet18")
    plain, tensors = groups_to_plain(find_groups(run.net)), {}
    assert groups_from_plain(
        state_from_json(state_to_json(plain, tensors), tensors)
    ) == find_groups(run.net)


def test_a_sub_model_and_its_channels() -> None:
    groups, tree = (
        find_groups(TINY),
        {k: torch.ones(shape) for k, shape in TINY.layout.shapes.items()},
    )
    packet = extract_submodel(tree, groups, {"0": flags(1, 0, 1)})
    assert packet.values["0.weight"].flatten().tolist() == [1, 0, 1]
    assert packet.values["3.weight"].flatten().tolist() == [1, 0, 1]
    assert read_packet_channels(packet, groups)["0"].tolist() == [True, False, True]
    home = {
        k: packet.values[k] for k in ("0.weight", "0.bias", "3.weight", "3.bias")
    }  # without the norm layer
    mask = {k: m for k, m in (packet.mask or {}).items() if k in home}
    assert read_packet_channels(Packet(home, mask), groups)["0"].tolist() == [True, False, True]
    assert (
        extract_submodel(tree, groups, all_channels(groups))
        == Packet(tree)
        == extract_submodel(tree, groups, None)
    )
    assert read_packet_channels(Packet(tree), groups)["0"].all()


def test_missing_channels_have_the_servers_running_statistics() -> None:
    """A client of channels 0 and 2 has 9 everywhere, the server 2: channel 1 of the norm layer's
    statistics is the server's as well, whatever the client has there."""
    groups = find_groups(TINY)
    server = {k: torch.full(shape, 2.0) for k, shape in TINY.layout.shapes.items()}
    packet = extract_submodel(server, groups, {"0": flags(1, 0, 1)})
    nines = {k: torch.full_like(leaf, 9.0) for k, leaf in packet.values.items()}
    trained = trees.apply_mask(nines, packet.mask or {})
    whole = fill_missing_channels(Packet(trained, packet.mask), server, groups)
    for name in ("0.bias", "1.weight", "1.running_mean", "1.running_var"):
        assert whole[name].tolist() == [9.0, 2.0, 9.0], name


def test_entries_of_no_channel_keep_none() -> None:
    """As a layer has them that reads channels of two groups; an index of -1 is not the last one."""
    group = ChannelGroup("w", 2, (Place("w", 0, (-1, 0, 1), "filter"),))
    packet = Packet({"w": torch.ones(3, 1)}, {"w": flags(1, 1, 0).view(3, 1)})
    assert read_packet_channels(packet, [group])["w"].tolist() == [True, False]


@pytest.mark.parametrize(("share", "size"), [(1.0, 3 + 3 + 3 + 3 + 3 + 1), (1 / 3, 6)])
def test_size(share: float, size: int) -> None:
    assert count_params_at(TINY, share) == size
    mask = make_channel_mask(TINY, select_first(find_groups(TINY), share))
    assert size == TINY.layout.size - sum(int((~m).sum()) for m in mask.values())


# ---- slimming and recovery -----------------------------------------------------------------------


def test_recovery_by_hand(tmp_path: Path) -> None:
    """Of gamma (3, -1, 2, .5 | 9, 8, 7, 6, 5, 4, .1, .2) half stay: 3, 9, 8, 7, 6, 5 of the twelve."""
    run = make_run(Hermes(), tmp_path, net="bn-cnn2")
    client = run.client(Task(0), {})
    guided = {k: torch.rand_like(v) + 0.5 for k, v in run.params.items()}
    guided["norm1.weight"] = torch.tensor([3.0, -1.0, 2.0, 0.5], dtype=torch.float64)
    guided["norm2.weight"] = torch.tensor([9, 8, 7, 6, 5, 4, 0.1, 0.2], dtype=torch.float64)
    carry = slim_submodel({"guided": guided}, client, Gamma(), 0.5)
    assert carry["channels"]["conv1"].tolist() == [True, False, False, False]
    assert carry["channels"]["conv2"].tolist() == [True] * 5 + [False] * 3
    # Statistics too: those of a removed channel, which was 0 in the meantime, are not the channel's.
    tuned = trees.apply_mask({k: v + 1 for k, v in guided.items()}, carry["slim.mask"])
    whole = restore_full_width({**carry, "tuned": tuned}, client)
    # what stays is as tuned, what was removed is as before, but for its scale
    assert torch.equal(whole["conv1.weight"][0], guided["conv1.weight"][0] + 1)
    assert torch.equal(whole["conv1.weight"][1:], guided["conv1.weight"][1:])
    assert torch.equal(whole["conv2.weight"][:5, 0], guided["conv2.weight"][:5, 0] + 1)
    assert torch.equal(whole["conv2.weight"][:, 1:], guided["conv2.weight"][:, 1:])
    assert whole["norm1.weight"].tolist() == [4, 0, 0, 0]
    for name in ("norm1.bias", "norm1.running_mean", "norm1.running_var"):
        assert torch.equal(whole[name][1:], guided[name][1:])
        assert torch.equal(whole[name][:1], guided[name][:1] + 1)
    assert torch.equal(whole["head.bias"], guided["head.bias"] + 1)


def test_slimming_within_what_is_left_by_hand(tmp_path: Path) -> None:
    """First of gamma (3, 1, 2, .5 | .1 x 8) 3 of 12 stay: 3, 2 and the first .1 of the second layer.

    Then gamma is (0, 9, 2, .5 | 0, 8, .1, ...): of all channels 9, 8 and 2 would stay; within what is
    left it is 0, 2 and 0 again, and of two the 2 and the 0 that its layer must keep.
    """
    run = make_run(Hermes(), tmp_path, net="bn-cnn2")
    client = run.client(Task(0), {})
    few = torch.full((8,), 0.1, dtype=torch.float64)
    guided = {**run.params, "norm1.weight": torch.tensor([3, 1, 2, 0.5]), "norm2.weight": few}
    left = slim_submodel({"guided": guided}, client, Gamma(), 3 / 12)["channels"]
    first = {"conv1": [1, 0, 1, 0], "conv2": [1, 0, 0, 0, 0, 0, 0, 0]}
    assert {name: kept.int().tolist() for name, kept in left.items()} == first
    few = torch.tensor([0, 8, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1])
    guided = {**run.params, "norm1.weight": torch.tensor([0, 9, 2, 0.5]), "norm2.weight": few}
    expected = {
        (3 / 12, True): {"conv1": [0, 1, 1, 0], "conv2": [0, 1, 0, 0, 0, 0, 0, 0]},
        (3 / 12, False): first,
        (2 / 12, False): {"conv1": [0, 0, 1, 0], "conv2": [1, 0, 0, 0, 0, 0, 0, 0]},
        (9 / 12, False): first,
    }
    for (density, recover), channels in expected.items():
        within = None if recover else left
        carry = slim_submodel({"guided": guided}, client, Gamma(), density, left=within)
        assert {name: k.int().tolist() for name, k in carry["channels"].items()} == channels


@pytest.mark.parametrize(("shift", "moves"), [(0.5, True), (0.0, False)])
def test_a_gradient_flows_back_into_restored_channels_where_the_shift_is_above_zero(
    shift: float, moves: bool, tmp_path: Path
) -> None:
    run = make_run(Hermes(), tmp_path, net="bn-cnn2")
    guided = {**run.params, "norm1.bias": torch.full_like(run.params["norm1.bias"], shift)}
    carry = slim_submodel({"guided": guided}, client := run.client(Task(0), {}), Gamma(), 0.5)
    whole = restore_full_width(
        {**carry, "tuned": trees.apply_mask(guided, carry["slim.mask"])}, client
    )
    removed = ~carry["channels"]["conv1"]
    scale = whole["norm1.weight"].clone().requires_grad_()
    x = torch.randn(5, *run.federation.shape, dtype=torch.float64)
    logits = run.net({**whole, "norm1.weight": scale}, x, train=False).logits
    (g,) = torch.autograd.grad((logits[:, 0]).sum(), scale)
    assert bool((g[removed] != 0).all()) == moves
    assert removed.any()


def test_at_density_1_nothing_is_masked(tmp_path: Path) -> None:
    run = make_run(Hermes(), tmp_path, net="bn-cnn2")
    client = run.client(Task(0), {})
    carry = slim_submodel({"guided": run.params}, client, Gamma(), 1.0)
    assert carry["slim.mask"] == {}
    tuned = {k: v + 1 for k, v in run.params.items()}
    assert trees.identical(restore_full_width({**carry, "tuned": tuned}, client), tuned)


def test_own_model(tmp_path: Path) -> None:
    """Initial parameters, under what is kept, under what is received; masked by the client's channels."""
    run = make_run(Hermes(), tmp_path, net="bn-cnn2")
    client = run.client(Task(0), {})
    first = restore_submodel({}, client)
    assert trees.identical(first["model"], run.params)
    assert "model.mask" not in first
    channels = select_first(find_groups(run.net), 0.5)
    personal = {k: torch.ones_like(v) for k, v in run.params.items()}
    got = {"conv1.weight": torch.full_like(run.params["conv1.weight"], 7.0)}
    carry = restore_submodel({"personal": personal, "channels": channels, "model": got}, client)
    mask = make_channel_mask(run.net, channels)
    assert trees.identical(carry["model.mask"], mask)
    assert trees.identical(carry["model"], trees.apply_mask({**personal, **got}, mask))
    assert list(carry["model"]) == list(run.net.layout.shapes) == list(get_shapes(run.params))
    lost = restore_submodel(
        {"model": got, "model.mask": {"conv1.weight": mask["conv1.weight"]}}, client
    )
    assert trees.identical(
        lost["model.mask"],
        make_channel_mask(
            run.net, {**all_channels(find_groups(run.net)), "conv1": channels["conv1"]}
        ),
    )
    assert (lost["model"]["conv1.weight"][2:] == 0).all()
    assert (lost["model"]["norm1.weight"][2:] == 0).all()  # no word of it in the mask it got
