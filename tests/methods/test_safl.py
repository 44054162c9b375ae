"""SAFL and Hermes: one fold of each stage by hand, bytes, what they are when turned off, and that they learn."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import make_run, play, remembered, reports, tensors
from tests.contract import Contract
from tests.methods.exchanges import exchanges
from torch import nn

import fedgrove
from fedgrove import trees
from fedgrove.channels.find_groups import find_groups, make_channel_mask
from fedgrove.channels.selection import FilterL1, Gamma
from fedgrove.channels.shrink import cut_channels
from fedgrove.core import ClientInfo, Packet, Report, Setup
from fedgrove.engines import Pool, Serial
from fedgrove.engines.batched.engine import Batched
from fedgrove.engines.work import perform
from fedgrove.errors import InputError
from fedgrove.methods import SAFL, FedBN, Hermes
from fedgrove.methods.safl.method import Fusion
from fedgrove.methods.safl.slimming import GammaDistance, GammaL1, stepwise
from fedgrove.nets import Net
from fedgrove.parts.aggregate import WeightedMean
from fedgrove.parts.local import SGD, Adam, LocalTraining
from fedgrove.runs.checkpoint import state_from_json, state_to_json
from fedgrove.runs.rounds import plan, plan_scoring
from fedgrove.runs.run import Run
from fedgrove.wire.codec import SubModel

SLIM = {"densities": (0.5,), "guided": 1, "tune": 1, "score": FilterL1()}
CONTRACT = Contract(
    small=SLIM | {"clusters": 2},
    off=SAFL(densities=()),
    one_group=SAFL(densities=()),
    sends_masks=True,
    has_a_place_for_each_client=True,
    # Half the units: 12*32+32 = 416, 32*32+32 = 1056, 32*3+3 = 99: 1571 in all. One round of stage 1 with all four,
    # 49 of stage 2; K = 2: (2K + 1) M + p M.
    paper_bytes=4 * (4 * (5 * 5187 + 1571) + 2 * 49 * 3 * 1571),
    refused_with_privacy="numbers next to their model",
    for_a_million={"densities": "0.5"},
    net_with_norms=True,
)

CALM = LocalTraining(1, 8, Adam(1e-2, eps=1e-3))
SHORT: dict[str, Any] = {"densities": (1.0, 0.75, 0.5), "guided": 2, "tune": 1, "local": CALM}


def safl(**words: Any) -> SAFL:
    return SAFL(**(SHORT | {"clusters": 2} | words))


def run_of(method: Any, folder: Path, **words: Any) -> Run:
    return make_run(method, folder, **({"net": "bn-cnn2", "rounds": 5} | words))


def flags(*bits: int) -> torch.Tensor:
    return torch.tensor(bits).bool()


# ---- by hand -------------------------------------------------------------------------------------

NET = Net(nn.Sequential(nn.Linear(1, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 1)), (1,))
START = Setup(
    {k: torch.full(s, 9.0) for k, s in NET.layout.shapes.items()},
    NET,
    {k: ClientInfo(n) for k, n in enumerate((10, 30, 60))},
    3,
    lambda j: {k: torch.full(s, 9.0 + j) for k, s in NET.layout.shapes.items()},
)
KEPT = {0: flags(1, 1, 0), 1: flags(0, 1, 1), 2: flags(0, 1, 1)}


def sub_model(client: int, value: float, shared: bool) -> Report:
    """A client's sub-model, all of one value; in stage 2 without its norm layer."""
    mask = make_channel_mask(NET, {"0": KEPT[client]})
    names = [k for k in NET.layout.shapes if not (shared and k in NET.layout.norms)]
    values = {k: torch.full(NET.layout.shapes[k], value) for k in names}
    mask = {k: m for k, m in mask.items() if k in values}
    packet = Packet(trees.apply_mask(values, mask), mask)
    return Report(client, {"model": packet}, (10, 30, 60)[client], {"group": 0.0})


def first_fold() -> tuple[SAFL, Any]:
    method = SAFL(densities=(2 / 3,), clusters=2, guided=1, tune=1)
    state = method.init(START)
    return method, method.fold(
        state, [sub_model(k, v, False) for k, v in enumerate((1.0, 2.0, 4.0))]
    )


def test_a_fold_of_stage_1_by_hand() -> None:
    """Channels are kept 1, 3, 2 times: the cluster keeps the last two. Clients count alike.

    Channel 1 is everybody's: (1 + 2 + 4) / 3; channel 2 of two: (2 + 4) / 2; channel 0 is nobody's any more.
    The second cluster, which nobody chose, stays as it was.
    """
    method = replace(SAFL(clusters=2, guided=1, tune=1), densities=(2 / 3, 2 / 3))
    state = method.init(START)
    assert {j: float(m["3.bias"]) for j, m in state.models.items()} == {0: 9.0, 1: 10.0}
    state = method.fold(state, [sub_model(k, v, False) for k, v in enumerate((1.0, 2.0, 4.0))])
    assert state.channels[0]["0"].tolist() == [False, True, True]
    assert state.models[0]["0.weight"].flatten().tolist() == pytest.approx([0, 7 / 3, 3])
    assert state.models[0]["1.weight"].tolist() == pytest.approx([0, 7 / 3, 3])
    assert state.models[0]["3.weight"].flatten().tolist() == pytest.approx([0, 7 / 3, 3])
    assert state.models[0]["1.running_mean"][1:].tolist() == pytest.approx(
        [7 / 3, 3]
    )  # over those who have it
    assert state.models[0]["3.bias"].tolist() == pytest.approx([7 / 3])
    assert float(state.models[1]["3.bias"]) == 10.0
    assert 1 not in state.channels
    assert state.groups == {0: 0, 1: 0, 2: 0}
    assert state.idle == {0: 0, 1: 1}
    (task, *_) = method.plan(state, [0])
    assert (task.verb, task.settings) == ("prune:2", {"density": 2 / 3})
    assert (task.send["model1"].mask, float(task.send["model0"].values["1.weight"][0])) == (
        None,
        0.0,
    )


def test_clients_join_the_cluster_that_they_name_by_its_place() -> None:
    """Clusters 1 and 3 are left of four, so that place 0 is cluster 1 and place 1 is cluster 3.

    Client 0 chooses place 1, and its model, of one value, becomes cluster 3's; clients 1 and 2
    choose place 0: (2 + 4) / 2.
    """
    method = SAFL(densities=(2 / 3, 2 / 3), clusters=4, guided=1, tune=1)
    state = method.init(START)
    state = replace(state, models={j: state.models[j] for j in (1, 3)})
    reports = []
    for client, (value, place) in enumerate(((1.0, 1.0), (2.0, 0.0), (4.0, 0.0))):
        report = sub_model(client, value, False)
        reports.append(replace(report, metrics={"group": place}))
    state = method.fold(state, reports)
    assert state.groups == {0: 3, 1: 1, 2: 1}
    assert {j: float(model["3.bias"]) for j, model in state.models.items()} == {1: 3.0, 3: 1.0}
    assert state.channels[1]["0"].tolist() == [False, True, True]
    assert state.channels[3]["0"].tolist() == [True, True, False]


def test_tied_channels_of_a_cluster_are_decided_by_their_scales() -> None:
    """Clients 0 and 1 keep channels 0, 1 and 1, 2: counts 1, 2, 1, of which two of three stay.

    Channel 0 has the scale .5, channel 2 has -.8, each at the one client that has it: channel 2
    stays, though channel 0 comes first.
    """
    method = SAFL(densities=(2 / 3, 2 / 3), clusters=1, guided=1, tune=1)
    reports = [sub_model(0, 1.0, False), sub_model(1, 1.0, False)]
    for report, scales in zip(reports, ([0.5, 0.1, 0.0], [0.0, 0.1, -0.8]), strict=True):
        report.give["model"].values["1.weight"].copy_(torch.tensor(scales))
    state = method.fold(method.init(START), reports)
    assert state.channels[0]["0"].tolist() == [False, True, True]
    assert state.models[0]["1.weight"].tolist() == pytest.approx([0, 0.1, -0.8])


def test_a_cluster_keeps_as_many_channels_as_its_clients_do_on_average() -> None:
    """Both clients keep the two channels of the first layer and three of six of the second.

    That is 10 of 2 * 8: five channels stay, those kept twice and, of the two kept once, the one
    with the larger scale, -.8 against .5. (The mean of the layers' shares, (1 + 1/2) / 2, would
    keep six.)
    """
    net = Net(
        nn.Sequential(
            nn.Linear(1, 2),
            nn.BatchNorm1d(2),
            nn.ReLU(),
            nn.Linear(2, 6),
            nn.BatchNorm1d(6),
            nn.ReLU(),
            nn.Linear(6, 1),
        ),
        (1,),
    )
    before = {k: torch.full(s, 9.0) for k, s in net.layout.shapes.items()}
    fusion = Fusion(find_groups(net), Gamma(), WeightedMean().start(before))
    for second, place, scale in (
        (flags(1, 1, 1, 0, 0, 0), 2, 0.5),
        (flags(1, 1, 0, 1, 0, 0), 3, -0.8),
    ):
        mask = make_channel_mask(net, {"0": flags(1, 1), "3": second})
        values = {k: torch.ones(s) for k, s in net.layout.shapes.items()}
        values["4.weight"][place] = scale
        fusion.add(Packet(trees.apply_mask(values, mask), mask))
    model, channels = fusion.value()
    assert channels["0"].tolist() == [True, True]
    assert channels["3"].tolist() == [True, True, False, True, False, False]
    assert model["4.weight"].tolist() == pytest.approx([1, 1, 0, -0.8, 0, 0])


def test_a_fold_of_stage_2_by_hand() -> None:
    """Weights 10, 30, 60. Channel 0 is the first client's alone and stays his; channel 2: (30·2 + 60·4) / 90."""
    method, state = first_fold()
    assert state.round == 1
    assert [method.deliver(state, k) for k in range(3)] == [
        {}
    ] * 3  # stage 2 begins with what clients have
    assert state.model["0.weight"].flatten().tolist() == pytest.approx(
        [1, (10 + 60 + 240) / 100, 300 / 90]
    )
    state = method.fold(state, [sub_model(k, v, True) for k, v in enumerate((5.0, 2.0, 4.0))])
    assert state.model["0.weight"].flatten().tolist() == pytest.approx(
        [5, (50 + 60 + 240) / 100, 300 / 90]
    )
    assert float(state.model["0.weight"][0]) == 5.0
    assert set(state.model) == {"0.weight", "0.bias", "3.weight", "3.bias"}
    packet = method.deliver(state, 0)["model"]
    assert packet.values["3.weight"].flatten().tolist() == pytest.approx([5, 3.5, 0])
    assert (packet.mask or {})["3.weight"].flatten().tolist() == [True, True, False]
    state = method.fold(
        state, [sub_model(2, 8.0, True)]
    )  # the others did not take part: what is theirs stays
    assert state.model["0.weight"].flatten().tolist() == pytest.approx([5, 8, 8])


def test_the_rates_of_the_paper() -> None:
    """For a pruning rate of .5: 0, .1, .2, .3, .4, .5."""
    assert stepwise(0.5) == (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)
    assert stepwise(0.35) == (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.35)
    assert stepwise(1.0) == (1.0,)
    # (1 - .9) / .1 is a little less than one step, (1 - .7) / .1 a little more than three.
    assert stepwise(0.9) == (1.0, 0.9)
    assert stepwise(0.7) == (1.0, 0.9, 0.8, 0.7)
    # The target comes last also where it is more than half a step on.
    assert stepwise(0.25)[-2:] == (0.3, 0.25)
    assert stepwise(0.22)[-2:] == (0.3, 0.22)
    assert (SAFL().schedule, len(Hermes(density=0.3).schedule)) == (stepwise(0.7), 8)


# ---- the two stages ------------------------------------------------------------------------------


def test_stage_1_is_with_everyone_and_stage_2_with_the_cohort(tmp_path: Path) -> None:
    run = run_of(safl(), tmp_path)
    for state, tasks, answers, after in exchanges(run):
        if state.round < 3:
            assert [t.to for t in tasks] == [0, 1, 2, 3]
            assert {t.verb for t in tasks} == {"prune:2"}
            assert all(set(t.send) == {"model0", "model1"} for t in tasks)
            counts = [sum(int(c.sum()) for c in after.kept[k].values()) for k in after.kept]
            assert counts == [round(12 * SHORT["densities"][state.round])] * 4  # 4 and 8 channels
        else:
            assert len(tasks) == 3
            assert all((not t.send) == (state.round == 3) for t in tasks)
            assert after.kept is state.kept
            for report in answers:
                assert not set(report.give["model"].values) & set(run.net.layout.norms)
                mask = report.give["model"].mask or {}
                assert all((report.give["model"].values[k][~m] == 0).all() for k, m in mask.items())


@pytest.mark.parametrize("method", [safl(), Hermes(**SHORT)], ids=["safl", "hermes"])
def test_clients_use_their_own_sub_models_at_any_time(method: Any, tmp_path: Path) -> None:
    run = run_of(method, tmp_path)
    for _, _, _, after in exchanges(run):
        for task in plan_scoring(run, after):
            report, kept = perform(run, task, run.memory.read(task.to, run.memory.files[task.to]))
            expected = 12 * SHORT["densities"][min(after.round, 3) - 1]
            mask = make_channel_mask(run.net, _channels(run, task.to))
            assert sum(int(c.sum()) for c in _channels(run, task.to).values()) == round(expected)
            assert report.metrics["params"] == run.net.layout.size - sum(
                int((~m).sum()) for m in mask.values()
            )
            assert not kept


def _channels(run: Run, client: int) -> trees.Tree:
    return run.memory.read(client, run.memory.files[client])["channels"]


def test_a_pruned_channel_may_come_back(tmp_path: Path) -> None:
    """The model is whole again before every pruning step, so what is kept is not nested: here the group insists."""
    eager = {
        "pull": GammaDistance(5.0, to="model"),
        "local": LocalTraining(1, 8, Adam(0.1)),
        "guided": 8,
        "clusters": 1,
    }
    run, seen = run_of(safl(densities=(0.5,) * 3, **eager), tmp_path, rounds=4), list[Any]()
    for _, _, _, after in exchanges(run):
        seen.append(after.kept)
    back = [
        bool((new[k][g] & ~old[k][g]).any())
        for old, new in pairwise(seen)
        for k in old
        for g in old[k]
    ]
    assert any(back)


def hermes_that_moves(recover: bool) -> Hermes:
    """All scales are drawn to 0 in large steps, so that a restored one soon overtakes others."""
    quick = LocalTraining(1, 8, Adam(0.1))
    densities = (0.75, 0.75, 0.5, 0.5)
    return Hermes(
        densities=densities, guided=8, tune=1, recover=recover, sparse=GammaL1(1.0), local=quick
    )


def channels_by_round(run: Run) -> list[dict[int, trees.Tree]]:
    """What every client keeps after each round of stage 1, from its own memory."""
    seen = []
    for state, _, _, _ in exchanges(run):
        if state.round < len(run.method.schedule):
            seen.append({k: _channels(run, k) for k in run.federation.clients})
    return seen


@pytest.mark.parametrize("recover", [True, False])
def test_hermes_without_recovery_never_gets_a_channel_back(recover: bool, tmp_path: Path) -> None:
    """Of 12 channels 9, 9, 6 and 6 stay. With recovery at least one comes back on the way."""
    seen = channels_by_round(run_of(hermes_that_moves(recover), tmp_path, rounds=5))
    returned = []
    for before, after in pairwise(seen):
        for k in before:
            for name in before[k]:
                returned.append(bool((after[k][name] & ~before[k][name]).any()))
    assert any(returned) == recover
    counts = [sum(int(kept.sum()) for kept in of[0].values()) for of in seen]
    assert counts == [9, 9, 6, 6]


def test_without_recovery_what_is_gone_is_0_and_is_not_trained(tmp_path: Path) -> None:
    run = run_of(hermes_that_moves(False), tmp_path, rounds=5)
    for _, _, _, _ in exchanges(run):
        for k in run.federation.clients:
            personal = run.memory.read(k, run.memory.files[k])["personal"]
            for name, kept in make_channel_mask(run.net, _channels(run, k)).items():
                assert (personal[name][~kept] == 0).all()


def test_a_density_that_rises_again_brings_nothing_back_without_recovery(tmp_path: Path) -> None:
    method = replace(hermes_that_moves(False), densities=(0.5, 0.75))
    first, second = channels_by_round(run_of(method, tmp_path, rounds=3))
    for k in first:
        assert trees.equal(first[k], second[k])


def test_hermes_sends_nothing_before_the_last_pruning(tmp_path: Path) -> None:
    run = run_of(Hermes(**SHORT), tmp_path)
    for state, tasks, answers, after in exchanges(run):
        sent = [bool(t.send) for t in tasks], [bool(r.give) for r in answers]
        assert sent == ([state.round > 3] * len(tasks), [state.round >= 2] * len(answers))
        assert bool(after.kept) == (state.round >= 2)


@pytest.mark.parametrize(
    "method", [safl(devices=True), Hermes(**SHORT, devices=True)], ids=["safl", "hermes"]
)
def test_a_device_is_left_with_what_it_can_hold(method: Any, tmp_path: Path) -> None:
    """One client's device is slow, another's holds half a training step; slimming may take all from one layer."""
    run = run_of(method, tmp_path, cohort=4)
    clients, step = dict(run.federation.clients), run.net.layout.memory(8, 2)
    for k, info in {1: ClientInfo(13, speed=0.15), 2: ClientInfo(24, memory=step // 2)}.items():
        clients[k] = replace(clients[k], info=info)
    run = replace(run, federation=replace(run.federation, clients=clients))
    *_, (_, _, _, after) = exchanges(run)
    nets = {k: cut_channels(run.net, kept).net.layout for k, kept in after.kept.items()}
    assert nets[1].macs <= 0.15 * run.net.layout.macs
    assert nets[2].memory(8, 2) <= step // 2
    left = {k: sum(int(c.sum()) for c in kept.values()) for k, kept in after.kept.items()}
    assert left[0] == left[3] == 6 > left[1]  # of 12 channels; the last density is .5


def test_devices_need_a_stage_1_and_a_net_that_fits(tmp_path: Path) -> None:
    none = run_of(Hermes(densities=(), devices=True), tmp_path / "a")
    with pytest.raises(InputError, match="one or more where devices decide"):
        none.method.init(none.setup)
    run = run_of(safl(devices=True), tmp_path / "b")
    tiny = {k: ClientInfo(9, memory=100) for k in run.federation.clients}
    with pytest.raises(InputError, match="the narrowest net needs"):
        run.method.init(replace(run.setup, clients=tiny))


def test_a_client_that_missed_stage_1_trains_the_whole_width(tmp_path: Path) -> None:
    run = run_of(safl(densities=(0.5,)), tmp_path, rounds=4, cohort=4)

    def without(answers: list[Report]) -> list[Report]:
        return [r for r in answers if r.of != 2 or "group" not in r.metrics]

    *_, (_, _, _, after) = exchanges(run, without)
    assert 2 not in after.kept
    assert run.method.deliver(after, 2)["model"].mask is None
    assert run.method.deliver(after, 1)["model"].mask


# ---- turned off ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method", [SAFL(densities=()), Hermes(densities=())], ids=["safl", "hermes"]
)
def test_without_stage_1_it_is_fedbn_to_the_bit(method: Any, tmp_path: Path) -> None:
    plain = run_of(FedBN(local=CALM), tmp_path / "a", dtype=torch.float32)
    run = run_of(replace(method, local=CALM), tmp_path / "b", dtype=torch.float32)
    # All clients get the model, also in the first round: FedBN's bytes as well.
    first = [task.send["model"].values for task in run.method.plan(run.initial_state, [0, 1])]
    asked = plain.method.plan(plain.initial_state, [0, 1])
    assert all(
        trees.identical(values, task.send["model"].values)
        for values, task in zip(first, asked, strict=True)
    )
    one, other = play(plain, Serial()), play(run, Serial())
    assert trees.identical(one.model, other.model)
    scores = [
        {r.of: dict(r.metrics) for r in reports(x, Serial(), plan_scoring(x, s, "finetune"))}
        for x, s in ((plain, one), (run, other))
    ]
    assert scores[0] == scores[1]  # norm layers included
    for k, packet in ((k, run.method.deliver(other, k)["model"]) for k in run.infos):
        assert trees.identical(packet.values, plain.method.deliver(one, k)["model"].values)
        assert packet.mask is None


def test_safl_without_its_pull_is_hermes_to_the_bit(tmp_path: Path) -> None:
    words = {"densities": (1.0, 0.5), "guided": 2, "tune": 1, "local": CALM}
    alone = run_of(Hermes(**words), tmp_path / "a", dtype=torch.float32)
    run = run_of(
        SAFL(**words, pull=GammaDistance(0.0, to="model")), tmp_path / "b", dtype=torch.float32
    )
    one, other = play(alone, Serial()), play(run, Serial())
    assert trees.identical(one.model, other.model)
    assert trees.identical(remembered(alone), remembered(run))


def test_the_pull_brings_scales_together(tmp_path: Path) -> None:
    spread = []
    for weight in (0.0, 1.0):
        method = safl(
            densities=(1.0,) * 3, clusters=1, guided=4, pull=GammaDistance(weight, to="model")
        )
        run = run_of(method, tmp_path / str(weight), rounds=4)
        play(run, Serial())
        own = [v for k, v in remembered(run).items() if k.endswith("personal/norm2.weight")]
        spread.append(float(torch.stack(own).std(0).mean()))
    assert spread[1] < 0.7 * spread[0]


# ---- clusters ------------------------------------------------------------------------------------


def test_clusters_that_nobody_chooses_are_given_up_where_their_number_is_to_be_chosen(
    tmp_path: Path,
) -> None:
    run = run_of(
        safl(clusters=0, densities=(1.0, 0.9, 0.8, 0.7, 0.6)), tmp_path, rounds=6, sizes=(20,) * 6
    )
    idle: dict[int, int] = dict.fromkeys(range(5), 0)
    for state, tasks, answers, after in exchanges(run):
        if state.round < 5:
            assert {t.verb for t in tasks} == {f"prune:{len(state.models)}"}
            chosen = {sorted(state.models)[int(r.metrics["group"])] for r in answers}
            idle = {j: 0 if j in chosen else idle[j] + 1 for j in state.models}
            assert set(after.models) == (
                {j for j in idle if idle[j] < 2} if state.round < 4 else set()
            )
            assert set(after.groups.values()) == chosen
    assert len(run.method.init(run.setup).models) == 5


def test_two_kinds_of_clients_end_in_two_clusters(tmp_path: Path) -> None:
    method = safl(densities=(1.0,) * 4, guided=4, tune=2)
    run = run_of(method, tmp_path, rounds=5, sizes=(60,) * 4)
    for k, client in run.federation.clients.items():
        if k % 2:
            run.federation.clients[k] = replace(
                client, train=replace(client.train, y=(client.train.y + 1) % 3)
            )
    state = play(run, Serial())
    assert state.groups[0] == state.groups[2] != state.groups[1] == state.groups[3]


# ---- bytes ---------------------------------------------------------------------------------------


def test_the_papers_bytes_of_three_rounds_of_stage_1_by_hand() -> None:
    """The net has 3 + 3 weights and biases, 3 + 3 of the norm, 3 + 1: 16; with two channels 11, with
    one 6. Stage 1 with K = 2 and N = 3: 3 (5 * 16 + 2 (16 + 11) + (16 + 11 + 6)) = 501; its last
    round's model is not sent down again. Stage 2: 7 rounds, 2 clients, both ways: 168.
    """
    method = SAFL(densities=(1.0, 2 / 3, 1 / 3), clusters=2, guided=1, tune=1)
    assert method.paper_bytes(NET, clients=3, cohort=2, rounds=10) == 4 * (501 + 168)


def test_the_ledger_is_the_papers_formula_with_measured_sizes(tmp_path: Path) -> None:
    """Values of 4 bytes, headers and masks apart. The formula also counts (K + 1) N M before the first round, which
    both sides draw from the seed, and a last download, which is delivered and not planned; norm layers do not travel in
    stage 2, their running statistics do in stage 1."""
    run = run_of(safl(codec=SubModel()), tmp_path, dtype=torch.float32, cohort=4)
    layout, models, clients = run.net.layout, 2, 4
    values, up, down = 0, 0, models * layout.size * clients  # of round 0
    for state, _, answers, after in exchanges(run):
        for report in answers:
            values += sum(report.cost[way].get("values", 0) for way in ("up", "down"))
        if state.round < 3:
            up += sum(_size(run, after.kept[k]) for k in after.kept)
        if state.round < 2:
            down += sum(_size(run, after.channels.get(j)) for j in after.models) * clients
    last = sum(_shared(run, after.kept[k]) for k in after.kept)
    statistics = layout.count(layout.buffers) * 3 * (models + 1) * clients
    tensors = (len(layout.shapes) * 3 * (models + 1) + len(after.model) * 3) * clients
    assert (
        values == 4 * (down + up + 3 * last + statistics) + tensors
    )  # a byte per tensor says how it is coded


def _size(run: Run, channels: Any) -> int:
    """Parameters of a sub-model."""
    return run.net.layout.size - sum(
        int((~m).sum()) for m in make_channel_mask(run.net, channels or {}).values()
    )


def _shared(run: Run, channels: Any) -> int:
    """Those of them that travel in stage 2."""
    mask = make_channel_mask(run.net, channels)
    names = [k for k in run.net.layout.params if k not in run.net.layout.norms]
    return sum(int(mask[k].sum()) if k in mask else run.params[k].numel() for k in names)


# ---- engines, and that it learns -----------------------------------------------------------------


@pytest.mark.parametrize(
    "method",
    [safl(), Hermes(**SHORT), Hermes(**SHORT, recover=False)],
    ids=["safl", "hermes", "hermes-without-recovery"],
)
def test_engines_agree_over_both_stages(method: Any, tmp_path: Path) -> None:
    found = []
    for engine in _engines():
        run = run_of(method, tmp_path / engine.name, sizes=(20, 13, 33, 17, 9), cohort=4)
        state = play(run, engine)
        found.append((tensors(state), remembered(run)))
        engine.close()
    for state, kept in found[1:]:
        assert trees.distance(found[0][0], state) < 1e-9
        assert trees.distance(found[0][1], kept) < 1e-9
    assert trees.identical(found[0][1], found[1][1])  # pool, to the bit


@pytest.mark.parametrize("method", [safl(), Hermes(**SHORT)], ids=["safl", "hermes"])
def test_a_state_comes_back_from_a_checkpoint(method: Any, tmp_path: Path) -> None:
    run = run_of(method, tmp_path)
    like = run.method.init(run.setup)
    for state, tasks, _, _ in exchanges(run):
        kept: trees.Tree = {}
        again = state_from_json(json.loads(json.dumps(state_to_json(state, kept))), kept, like)
        assert state_to_json(again, {}) == state_to_json(state, {})
        for one, other in zip(tasks, plan(run, again), strict=True):
            assert (one.to, one.verb, one.settings) == (other.to, other.verb, other.settings)
            for name, packet in one.send.items():
                assert trees.identical(packet.values, other.send[name].values)
                assert trees.identical(packet.mask or {}, other.send[name].mask or {})


def _engines() -> Iterator[Any]:
    yield from (Serial(), Pool(workers=2), Batched())


def test_it_learns(tmp_path: Path) -> None:
    """Images of 8 x 8, three classes per client, half the channels of SAFL's own network."""
    method = SAFL(
        density=0.5, densities=(1.0, 0.5), guided=3, tune=1, local=LocalTraining(1, 16, SGD(0.05))
    )
    words = {
        "net": "bn-cnn2",
        "partition": "classes:3:30",
        "clients": 4,
        "cohort": 4,
        "rounds": 6,
        "evaluate": 0,
    }
    found = fedgrove.run(method, data="digits", engine="serial", **words).summary
    assert found["accuracy_mean"] > 0.8
    assert found["density"] < 0.6


# ---- refusals ------------------------------------------------------------------------------------


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(
        InputError,
        match=r"^rounds is 3; it must be more than 3, which the pruning of stage 1 takes",
    ):
        play(run_of(safl(), tmp_path / "a", rounds=3), Serial())
    with pytest.raises(
        InputError, match=r"^densities is \(0.5, 0.0\); it must be in \(0, 1\] each"
    ):
        SAFL(densities=(0.5, 0.0))
    with pytest.raises(InputError, match=r"^clusters is -1; it must be 0 \(chosen\) or more"):
        SAFL(clusters=-1)
    with pytest.raises(
        InputError, match=r"^guided, tune is \(50, 0\); it must be 1 or more epochs each"
    ):
        Hermes(tune=0)
    with pytest.raises(
        InputError, match=r"no norm layers after its channels; score them by FilterL1"
    ):
        play(run_of(safl(), tmp_path / "b", net="mlp"), Serial())
