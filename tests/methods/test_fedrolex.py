"""FedRolex: the window rolls over all channels."""

from __future__ import annotations

from pathlib import Path

import torch
from tests.conftest import make_run
from tests.contract import Contract
from tests.methods.exchanges import exchanges

from fedgrove.channels.find_groups import find_groups
from fedgrove.channels.groups import ChannelGroup
from fedgrove.channels.selection import select_window
from fedgrove.channels.submodel import read_packet_channels
from fedgrove.methods import FedRolex
from fedgrove.runs.rounds import plan_scoring

CONTRACT = Contract(
    small={"widths": (0.75, 0.5)},
    off=FedRolex(widths=(1.0,), scale=False, masked=False, static=False),
    one_group=FedRolex(widths=(1.0,), masked=False),
    refused_with_privacy="mask of 'head'",
    sends_masks=True,
    has_a_place_for_each_client=True,
    # As HeteroFL.
    paper_bytes=8 * (3123 + 1571) / 2 * 3 * 50,
)


def test_windows_by_hand() -> None:
    windows = [
        select_window([ChannelGroup("a", 5, ())], 0.4, t)["a"].int().tolist() for t in range(6)
    ]
    assert windows == [
        [1, 1, 0, 0, 0],
        [0, 1, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 0, 1, 1],
        [1, 0, 0, 0, 1],
        windows[0],
    ]


def test_every_channel_is_trained_and_everybody_uses_all(tmp_path: Path) -> None:
    run = make_run(FedRolex(widths=(0.25,)), tmp_path, net="bn-cnn2", rounds=8)
    trained: dict[str, torch.Tensor] = {}
    for state, tasks, _, after in exchanges(run):  # noqa: B007
        if state.is_trained:
            # The statistics of the whole model are collected.
            continue
        for task in tasks:
            window = read_packet_channels(task.send["model"], find_groups(run.net))
            assert {g: int(c.sum()) for g, c in window.items()} == {"conv1": 1, "conv2": 2}
            assert int(window["conv1"].int().argmax()) == state.round % 4
            trained = {g: c | trained.get(g, c) for g, c in window.items()}
    assert all(bool(c.all()) for c in trained.values())
    assert all(task.send["model"].mask is None for task in plan_scoring(run, after))
