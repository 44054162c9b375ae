"""HeteroFL: the narrow model lies in the wide one, and every parameter is averaged over those who have it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tests.conftest import make_run, play, reports
from tests.contract import Contract
from torch import nn

from fedgrove import trees
from fedgrove.channels.find_groups import find_groups
from fedgrove.channels.submodel import read_packet_channels
from fedgrove.core import ClientInfo, Report, Setup
from fedgrove.data.devices import TIERS
from fedgrove.engines import Serial
from fedgrove.errors import InputError
from fedgrove.methods import CaldasDropout, FedAvg, FedDrop, FedRolex, HeteroFL
from fedgrove.nets import Net
from fedgrove.parts.device_widths import client_shares
from fedgrove.parts.local import Adam, LocalTraining
from fedgrove.parts.robust import Median
from fedgrove.runs.rounds import plan, plan_scoring

CONTRACT = Contract(
    small={"widths": (0.75, 0.5)},
    # These devices hold all of it.
    off=HeteroFL(scale=False, masked=False, static=False),
    one_group=HeteroFL(masked=False),
    refused_with_privacy="mask of 'head'",
    sends_masks=True,
    has_a_place_for_each_client=True,
    # Three quarters: 12*48+48 = 624, 48*48+48 = 2352, 48*3+3 = 147: 3123; half: 416, 1056, 99: 1571. In turn.
    paper_bytes=8 * (3123 + 1571) / 2 * 3 * 50,
)

NET = Net(nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1)), (1,))
START = Setup(
    {k: torch.zeros(s) for k, s in NET.layout.shapes.items()},
    NET,
    {0: ClientInfo(10), 1: ClientInfo(30)},
    3,
    lambda j: {},
)


def test_a_fold_by_hand() -> None:
    """Half the units are shared: (10·1 + 30·5) / 40 = 4; the others are the wide client's alone, statistics too."""
    method = HeteroFL(widths=(0.5, 1.0), static=False)
    state = method.init(START)
    packets = {k: method.deliver(state, k)["model"] for k in (0, 1)}
    assert (packets[0].mask or {})["0.weight"].flatten().tolist() == [True, True, False, False]
    assert packets[1].mask is None
    done = [
        Report(
            k,
            {
                "model": replace(
                    p, values={n: torch.full_like(v, 1.0 + 4 * k) for n, v in p.values.items()}
                )
            },
            n,
        )
        for (k, p), n in zip(packets.items(), (10, 30), strict=True)
    ]
    found = method.fold(state, done).model
    for name in (
        "0.weight",
        "0.bias",
        "1.weight",
        "1.bias",
        "1.running_mean",
        "1.running_var",
        "3.weight",
    ):
        assert found[name].flatten().tolist() == [4, 4, 5, 5], name
    assert found["3.bias"].tolist() == [4]


def test_a_fold_by_the_median_by_hand() -> None:
    """Client k sends k everywhere, 4 is a liar: units 0 and 1 are of 0..3 and his, med = 2; units 2
    and 3 of the wide 1 and 3 alone, (1 + 3)/2 = 2."""
    method = HeteroFL(widths=(0.5, 1.0), static=False, mean=Median())
    start = replace(START, clients={k: ClientInfo(10 + k) for k in range(5)})
    state = method.init(start)
    done = []
    for k in range(5):
        packet = method.deliver(state, k)["model"]
        value = 1e30 if k == 4 else float(k)
        values = {n: torch.full_like(v, value) for n, v in packet.values.items()}
        values = trees.apply_mask(values, packet.mask or {})
        done.append(Report(k, {"model": replace(packet, values=values)}, 10 + k))
    found = method.fold(state, done).model
    for name in ("0.weight", "0.bias", "1.weight", "1.running_mean", "1.running_var", "3.weight"):
        assert found[name].flatten().tolist() == [2, 2, 2, 2], name
    assert found["3.bias"].tolist() == [2]


def test_sub_models_are_nested_and_stay_as_wide(tmp_path: Path) -> None:
    method = HeteroFL(widths=(1.0, 0.5, 0.25), local=LocalTraining(1, 8, Adam(1e-2)))
    run = make_run(method, tmp_path, net="bn-cnn2", sizes=(20,) * 3)
    state = play(run, Serial())
    kept = [
        read_packet_channels(task.send["model"], find_groups(run.net))
        for task in plan_scoring(run, state)
    ]
    assert [sum(int(c.sum()) for c in k.values()) for k in kept] == [12, 6, 3]
    assert all(bool((small[g] <= wide[g]).all()) for wide, small in pairwise(kept) for g in wide)
    for report in reports(run, Serial(), plan(run, state)):
        assert (
            read_packet_channels(report.give["model"], find_groups(run.net)).keys()
            == kept[0].keys()
        )
        assert report.give["model"].mask is None if report.of == 0 else report.give["model"].mask
    assert not trees.equal(
        state.model, play(replace(run, method=FedAvg(local=method.local)), Serial()).model
    )


def test_devices_decide_how_wide() -> None:
    infos = {
        k: ClientInfo(9, bandwidth, speed, memory)
        for k, (_, bandwidth, speed, memory) in enumerate(TIERS)
    }
    shares = client_shares(replace(START, clients=infos), (), LocalTraining(1, 8, Adam(1e-2)))
    assert list(shares.values()) == sorted(shares.values())
    assert shares[0] < shares[2] == 1.0
    assert client_shares(START, (0.5, 0.25), None) == {0: 0.5, 1: 0.25}


def test_refusals() -> None:
    with pytest.raises(InputError, match=r"^widths is \(1.5,\); it must be shares in \(0, 1\]"):
        HeteroFL(widths=(1.5,))


OFF = {"scale": False, "masked": False, "static": False}


@pytest.mark.parametrize(
    "method",
    [
        HeteroFL(widths=(1.0,), **OFF),
        FedRolex(widths=(1.0,), **OFF),
        FedDrop(widths=(1.0,), **OFF),
        CaldasDropout(share=1.0, **OFF),
    ],
    ids=lambda method: type(method).__name__,
)
def test_turned_off_they_are_fedavg_with_batch_norm_too(method: HeteroFL, tmp_path: Path) -> None:
    states = []
    for each in (FedAvg(), method):
        folder = tmp_path / type(each).__name__
        run = make_run(each, folder, net="bn-cnn2", dtype=torch.float32)
        states.append(play(run, Serial()).model)
    assert trees.identical(*states)


def test_static_norms_alone_change_the_statistics_alone(tmp_path: Path) -> None:
    """In training they are of no effect."""
    models = []
    for static in (False, True):
        method = HeteroFL(widths=(1.0,), masked=False, static=static)
        run = make_run(method, tmp_path / str(static), net="bn-cnn2", dtype=torch.float32)
        models.append(play(run, Serial()).model)
    names = run.net.layout.params
    assert trees.identical(*(trees.pick(model, names) for model in models))
    assert not trees.equal(*models)
