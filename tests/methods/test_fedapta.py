"""FedAPTA: the fold by hand, tasks that are found, newcomers, noise, switches, drift, bad input."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import admitted, federation, make_run, play, remembered, reports, tensors
from tests.contract import Contract
from torch import nn

import fedgrove
from fedgrove import methods, trees
from fedgrove.channels.find_groups import find_kept_channels
from fedgrove.channels.shrink import cut_channels
from fedgrove.channels.submodel import groups_from_plain
from fedgrove.core import AnyMethod, ClientInfo, Packet, Report, Setup
from fedgrove.data import ClientData, Examples, Federation
from fedgrove.engines import Serial
from fedgrove.engines.batched.engine import Batched
from fedgrove.engines.work import perform
from fedgrove.errors import InputError
from fedgrove.methods import FedAPTA, FedAvg
from fedgrove.methods.fedapta.channel_rules import (
    RATIO_STEP,
    LayerwiseL1,
    RandomChannels,
    RollingWindow,
    UniformL1,
)
from fedgrove.methods.fedapta.drift import DriftCorrection
from fedgrove.methods.fedapta.method import START, State, origin_of, weights_in_groups
from fedgrove.methods.fedapta.task_groups import LITERAL, Hdbscan
from fedgrove.nets import Net, build
from fedgrove.parts.augment import Augment
from fedgrove.parts.local import SGD, Adam, LocalTraining
from fedgrove.runs.memory import Memory
from fedgrove.runs.rounds import plan, plan_scoring, rounds
from fedgrove.runs.run import Run
from fedgrove.runs.summary import purity

CONTRACT = Contract(
    small={"ratios": (0.25, 0.5)},
    off=FedAPTA(ratios=(0.0,), grouping=None),
    one_group=FedAPTA(ratios=(0.0,), grouping=None),
    sends_masks=True,
    has_a_place_for_each_client=True,
    # A quarter of 768 + 4096 weights is 1216. The first layer, whose mean |w| is .148 compared with .062, loses the least
    # that it may, .8 of a quarter: 12.8 units, and the second the rest, 16.6; whole: 13 and 17. 51 and 47 stay:
    # 12*51+51 = 663, 51*47+47 = 2444, 47*3+3 = 144: 3251. Of a half 25.6 and 33.2, whole 26 and 33; 38 and 31
    # stay: 494, 1209, 96: 1799.
    paper_bytes=8 * (3251 + 1799) / 2 * 3 * 50,
)

# ---- by hand -------------------------------------------------------------------------------------

NET = Net(nn.Sequential(nn.Linear(1, 4), nn.ReLU(), nn.Linear(4, 2)), (1,))
FIRST = {
    "0.weight": torch.tensor([[1.0], [4.0], [3.0], [2.0]]),
    "0.bias": torch.zeros(4),
    "2.weight": torch.zeros(2, 4),
    "2.bias": torch.zeros(2),
}


def start(clients: int, **info: Any) -> Setup:
    infos = {k: ClientInfo(10 * (k + 1), **info) for k in range(clients)}
    return Setup(FIRST, NET, infos, 3, lambda j: {})


def answer(task: Any, head: list[float] | None = None, body: float = 0.0) -> Report:
    """A report that adds ``body`` to the first layer, and a direction to the last one's rows."""
    packet = task.send["model"]
    values = {name: leaf.clone() for name, leaf in packet.values.items()}
    values["0.weight"] += body
    if head is not None:
        values["2.weight"] += torch.tensor(head).reshape(2, 1).expand(2, 4)
    return Report(task.to, {"model": replace(packet, values=trees.apply_mask(values, packet.mask or {}))},
                  10 * (task.to + 1))  # fmt: skip


def test_a_round_by_hand() -> None:
    """Half of four units: the two of largest |w| stay, 4 and 3. They move by 1, and the others are
    filled in: device 0 gives (1, 5, 4, 2) of weight 10, the dense device 1 (2, 5, 4, 3) of 20. The
    mean is (10 · 1 + 20 · 2) / 30 = 5/3 for the first."""
    method = FedAPTA(ratios=(0.5, 0.0), grouping=None)
    state = method.init(start(2))
    tasks = method.plan(state, [0, 1])
    assert tasks[0].send["model"].mask is not None
    assert tasks[0].send["model"].values["0.weight"].flatten().tolist() == [0.0, 4.0, 3.0, 0.0]
    assert tasks[1].send["model"].mask is None
    after = method.fold(state, [answer(task, body=1.0) for task in tasks])
    found = after.models[0]["0.weight"].flatten().tolist()
    assert found == pytest.approx([5 / 3, 5.0, 4.0, (2 * 10 + 3 * 20) / 30])
    assert (after.round, after.groups) == (1, {0: 0, 1: 0})


def test_the_second_round_is_filled_in_from_the_first() -> None:
    """As above, once more: the model is (5/3, 5, 4, 8/3), and the device of half the units again keeps
    the second and third. What it lacks is filled in from this model, not from the initial one:
    (10 · 5/3 + 20 · 8/3) / 30 = 7/3, and (10 · 8/3 + 20 · 11/3) / 30 = 10/3."""
    method = FedAPTA(ratios=(0.5, 0.0), grouping=None)
    state = method.init(start(2))
    for _ in range(2):
        tasks = method.plan(state, [0, 1])
        state = method.fold(state, [answer(task, body=1.0) for task in tasks])
    found = state.models[0]["0.weight"].flatten().tolist()
    assert found == pytest.approx([7 / 3, 6.0, 5.0, 10 / 3])


# Both outputs move: which ones an update changes is evidence of its own.
EAST, NORTH = [1.0, 0.001], [0.001, 1.0]


def exchange(method: FedAPTA, state: State, heads: dict[int, list[float]]) -> State:
    """One round in which each device moves its last layer in a given direction."""
    tasks = method.plan(state, sorted(heads))
    return method.fold(state, [answer(task, heads[task.to]) for task in tasks])


def two_tasks(devices: int = 8) -> dict[int, list[float]]:
    """Even devices do one task, odd ones another; the directions are not quite the same."""
    heads = {}
    for k in range(devices):
        east = k % 2 == 0
        aside = 0.01 * (k + 1)
        heads[k] = [1.0, aside] if east else [aside, 1.0]
    return heads


def test_two_tasks_part_and_keep_their_numbers() -> None:
    method = FedAPTA(ratios=(0.0,))
    state = exchange(method, method.init(start(8)), two_tasks())
    assert state.groups == {k: k % 2 for k in range(8)}
    # Each group's mean of its own: weights 10, 30, 50, 70 move by .01, .03, .05, .07 northwards.
    north = (10 * 0.01 + 30 * 0.03 + 50 * 0.05 + 70 * 0.07) / 160
    assert state.models[0]["2.weight"][:, 0].tolist() == pytest.approx([1.0, north])
    # The new group's, from the model that its devices began with: weights 20, 40, 60, 80.
    east = (20 * 0.02 + 40 * 0.04 + 60 * 0.06 + 80 * 0.08) / 200
    assert state.models[1]["2.weight"][:, 0].tolist() == pytest.approx([east, 1.0])
    for _ in range(3):
        state = exchange(method, state, two_tasks())
        assert state.groups == {k: k % 2 for k in range(8)}
    assert sorted(state.models) == [0, 1]


def test_a_new_group_continues_the_model_that_most_of_it_began_with() -> None:
    """Devices 0, 2 and 4 of group 0 and device 1 of group 1 now go south-west. Their group is new,
    and its model that of group 0 moved by the first three. Device 1 began elsewhere."""
    method = FedAPTA(ratios=(0.0,), grouping=LITERAL)
    state = exchange(method, method.init(start(16)), two_tasks(16))
    assert state.groups == {k: k % 2 for k in range(16)}
    leaving = {k: [-1.0, -1.0] for k in (0, 1, 2, 4)}
    after = exchange(method, state, two_tasks(16) | leaving)
    assert after.groups == state.groups | dict.fromkeys(leaving, 2)
    moved = after.models[2]["2.weight"] - state.models[0]["2.weight"]
    assert moved.flatten().tolist() == pytest.approx([-1.0] * 8)
    # Nothing is remembered of updates.
    assert after.traces == {}


def test_settled_devices_are_not_grouped_again() -> None:
    """In the second round all updates are short: the groups are final, and nothing is computed."""

    class Refusing(Hdbscan):
        def __call__(self, *words: Any) -> list[int]:
            raise AssertionError

    method = FedAPTA(ratios=(0.0,))
    state = exchange(method, method.init(start(8)), two_tasks())
    short = {k: [0.1 * east, 0.1 * north] for k, (east, north) in two_tasks().items()}
    method = replace(method, grouping=Refusing())
    assert exchange(method, state, short).groups == state.groups
    with pytest.raises(AssertionError):
        exchange(method, state, two_tasks())


def test_a_newcomer_begins_at_the_start_and_joins_its_task() -> None:
    """It counts from the next round on: its model began elsewhere."""
    method = FedAPTA(ratios=(0.0,))
    state = exchange(method, method.init(start(10)), two_tasks())
    assert origin_of(state, 9) == START
    (task,) = method.plan(state, [9])
    assert trees.equal(task.send["model"].values, FIRST)
    # Before it has trained it uses the model of the largest group; of equal ones the first.
    assert trees.equal(method.deliver(state, 9)["model"].values, state.models[0])
    larger = exchange(method, method.init(start(10)), two_tasks(9))
    assert trees.equal(method.deliver(larger, 9)["model"].values, larger.models[0])
    after = exchange(method, state, {9: NORTH})
    assert after.groups[9] == 1
    assert trees.equal(after.models[1], state.models[1])
    assert origin_of(after, 9) == 1


def test_absent_devices_keep_their_groups() -> None:
    method = FedAPTA(ratios=(0.0,))
    state = exchange(method, method.init(start(8)), two_tasks())
    heads = two_tasks()
    after = exchange(method, state, {k: heads[k] for k in (0, 3)})
    assert after.groups == state.groups
    literal = replace(method, grouping=LITERAL)
    state = exchange(literal, literal.init(start(8)), two_tasks())
    assert exchange(literal, state, {k: heads[k] for k in (0, 3)}).groups == state.groups


def test_a_device_that_switches_is_regrouped() -> None:
    """Device 0 goes north from round 4 on: its history is forgotten at once."""
    method = FedAPTA(ratios=(0.0,))
    state = method.init(start(8))
    for _ in range(4):
        state = exchange(method, state, two_tasks())
    heads = two_tasks() | {0: NORTH}
    after = exchange(method, state, heads)
    assert after.groups == {k: k % 2 for k in range(8)} | {0: 1}
    # What it trained from the other group's model is not mixed in.
    kept = [k for k in range(8) if k % 2]
    expected = exchange(method, state, {k: heads[k] for k in kept})
    assert trees.equal(after.models[1], expected.models[1])


WIDE = Net(nn.Sequential(nn.Linear(1, 100), nn.ReLU(), nn.Linear(100, 2)), (1,))


def moved_by(method: FedAPTA, state: State, moves: dict[int, torch.Tensor]) -> State:
    """One round in which the last layer of each device, of 2 x 100 weights, moves so."""
    answers = []
    for task in method.plan(state, sorted(moves)):
        packet = task.send["model"]
        values = dict(packet.values)
        values["2.weight"] = values["2.weight"] + moves[task.to].reshape(2, 100)
        answers.append(Report(task.to, {"model": replace(packet, values=values)}, 10))
    return method.fold(state, answers)


@pytest.mark.parametrize("seed", range(3))
def test_groups_outlast_what_their_tasks_have_to_teach(seed: int) -> None:
    """Thirty devices of three tasks. Updates of a task share a direction which fades by .7 a round;
    each has noise, as long at first, which fades by .95. From round 10 on there is little else, and
    it points, by chance, away from a device's own group and along another.

    A device that then really switches, with an update as long as its first, is still seen."""
    g = torch.Generator().manual_seed(seed)
    directions = torch.randn(3, 200, generator=g) / 200**0.5
    method = FedAPTA(ratios=(0.0,))
    infos = {k: ClientInfo(10) for k in range(30)}
    state = method.init(Setup(WIDE.params(), WIDE, infos, 30, lambda j: {}))
    found = []
    for r in range(30):
        noise = torch.randn(30, 200, generator=g) / 200**0.5
        moves = {k: 0.7**r * directions[k % 3] + 0.95**r * noise[k] for k in range(30)}
        state = moved_by(method, state, moves)
        found.append(state.groups)
    tasks = {k: k % 3 for k in range(30)}
    assert purity(found[0], tasks) == 1.0
    assert found == [found[0]] * 30
    switched = moved_by(method, state, {0: directions[1] + noise[0] / 2})
    assert switched.groups == found[0] | {0: found[0][1]}


def test_devices_of_different_groups_that_switch_to_a_new_task_form_a_group() -> None:
    """Fifteen devices of three tasks. Two of the first and one of the third switch to a fourth, half
    of which is like the second. Three are a cluster, which the groups before must not divide."""
    directions = torch.eye(200)[:4]
    method = FedAPTA(ratios=(0.0,))
    infos = {k: ClientInfo(10) for k in range(15)}
    state = method.init(Setup(WIDE.params(), WIDE, infos, 15, lambda j: {}))
    # Each device has a little of its own.
    own = 0.05 * torch.eye(200)[10:25]
    moves = {k: directions[k % 3] + own[k] for k in range(15)}
    for _ in range(2):
        state = moved_by(method, state, moves)
    assert purity(state.groups, {k: k % 3 for k in range(15)}) == 1.0
    fourth = 0.5 * directions[1] + 0.87 * directions[3]
    switched = {k: fourth + own[k] for k in (0, 3, 2)}
    after = moved_by(method, state, moves | switched)
    assert after.groups == state.groups | dict.fromkeys(switched, 3)


def test_which_outputs_are_trained_tells_tasks_apart() -> None:
    """Two devices train the first output only, two both: too few for HDBSCAN to find clusters."""
    heads = {0: [1.0, 0.0], 1: [0.9, 0.0], 2: [1.0, 0.1], 3: [0.9, 0.2]}
    for grouping, groups in (
        (Hdbscan(), {0: 0, 1: 0, 2: 1, 3: 1}),
        (Hdbscan(outputs=False), dict.fromkeys(range(4), 0)),
    ):
        method = FedAPTA(grouping=grouping)
        assert exchange(method, method.init(start(4)), heads).groups == groups


@pytest.mark.parametrize("devices", [1, 2])
def test_few_devices_stay_together(devices: int) -> None:
    """HDBSCAN finds nothing among so few: the documented outcome is one group."""
    for grouping in (Hdbscan(), LITERAL):
        method = FedAPTA(ratios=(0.0,), grouping=grouping)
        state = method.init(start(devices))
        for _ in range(2):
            state = exchange(method, state, {k: [EAST, NORTH][k] for k in range(devices)})
        assert state.groups == dict.fromkeys(range(devices), 0)


def test_devices_that_do_not_move_stay_together() -> None:
    method = FedAPTA(ratios=(0.0,))
    state = exchange(method, method.init(start(6)), {k: [0.0, 0.0] for k in range(6)})
    assert set(state.groups.values()) == {0}


def test_when_nothing_is_found_groups_stay_as_they_were() -> None:
    """Updates without a pattern, and nothing remembered: everybody keeps its group."""
    rule = replace(LITERAL, min_size=5)
    method = FedAPTA(ratios=(0.0,), grouping=rule)
    state = exchange(method, method.init(start(12)), two_tasks(10))
    assert set(state.groups.values()) == {0, 1}
    after = exchange(method, state, {0: EAST, 1: NORTH, 11: NORTH})
    # Device 11 is new: it joins its nearest neighbour, device 1.
    assert after.groups == state.groups | {11: 1}


def test_a_round_without_reports_changes_nothing() -> None:
    method = FedAPTA(ratios=(0.0,))
    state = exchange(method, method.init(start(8)), two_tasks())
    after = method.fold(state, [])
    assert after == replace(state, round=2)


def test_figures_count_groups() -> None:
    method = FedAPTA(ratios=(0.0,))
    state = exchange(method, method.init(start(8)), two_tasks())
    assert method.server_metrics(state) == {"groups": 2, "largest_group": 4}


# ---- ratios --------------------------------------------------------------------------------------


def test_ratios_are_given_in_turn_or_follow_from_devices() -> None:
    assert FedAPTA(ratios=(0.0, 0.5)).init(start(3)).ratios == {0: 0.0, 1: 0.5, 2: 0.0}
    assert FedAPTA().init(start(2)).ratios == {0: 0.0, 1: 0.0}
    slow = FedAPTA().init(start(2, speed=0.5)).ratios
    assert 0 < slow[0] <= 0.75


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"ratios": (0.2, 1.0)}, r"ratios is \(0.2, 1.0\); it must be shares in \[0, 1\)"),
        ({"last": 0}, "last is 0"),
        ({"use": "half"}, "there is no use 'half'"),
        ({"drift": "ours"}, r"there is no drift 'ours'\. There are: feddc, none, server"),
        # What the field was before it had three values.
        ({"drift": True}, "there is no drift 'True'"),
    ],
)
def test_bad_fields_are_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        FedAPTA(**fields)


def test_a_ratio_that_cannot_be_met_is_refused_before_there_is_a_folder(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(InputError, match=r"of 4 channels, can lose at most 0.75 of them"):
        fedgrove.run(
            FedAPTA(ratios=(0.9,)), data="digits", clients=4, rounds=1, out=out,
            net="bn-cnn2:width=4", progress=False,
        )  # fmt: skip
    assert not out.exists()


def test_a_net_without_a_linear_layer_is_refused(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 6), nn.Flatten())
    net = Net(module, (1, 8, 8))
    begin = Setup(net.params(), net, {0: ClientInfo(3)}, 1, lambda j: {})
    with pytest.raises(InputError, match="has no fully connected layer"):
        FedAPTA(ratios=(0.0,)).init(begin)


@pytest.mark.parametrize("rule", [UniformL1(), RollingWindow(), RandomChannels()], ids=str)
def test_other_pruning_rules(rule: Any, tmp_path: Path) -> None:
    method = FedAPTA(ratios=(0.25, 0.5), prune=rule)
    run = make_run(method, tmp_path, net="bn-cnn2", dtype=torch.float32)
    assert play(run, Serial()).round == 3


def test_what_a_device_uses(tmp_path: Path) -> None:
    for use, width in (("whole", 4), ("cut", 2)):
        method = FedAPTA(ratios=(0.5,), use=use)
        run = make_run(method, tmp_path / use, net="bn-cnn2", dtype=torch.float32)
        (task, *_) = plan_scoring(run, play(run, Serial()))
        channels = find_kept_channels(run.net, task.send["model"].mask)
        left = 4 if channels is None else int(channels["conv1"].sum())
        assert left == width or use == "cut"
        assert (channels is None) == (use == "whole")


@pytest.mark.slow
def test_a_weak_device_exports_a_small_file(tmp_path: Path) -> None:
    """By default: at ratio .8 of bn-cnn2's convolutional weights it has a third of the file."""
    fedgrove.run(
        FedAPTA(ratios=(0.0, 0.8)), data="digits", clients=2, cohort=2, rounds=1,
        net="bn-cnn2:norm=group", engine="serial", out=tmp_path / "run",
    )  # fmt: skip
    sizes = []
    for client in (0, 1):
        folder = tmp_path / str(client)
        fedgrove.export_model(tmp_path / "run", client=client, out=folder)
        sizes.append(max(file.stat().st_size for file in folder.rglob("*.onnx")))
    assert sizes[1] < 0.35 * sizes[0]


@pytest.mark.parametrize(
    "prune", [LayerwiseL1(), LayerwiseL1("sum"), UniformL1(), RollingWindow(), RandomChannels()]
)
def test_what_a_device_is_given_fits_it(prune: Any) -> None:
    """Memory and time of a step, in the net that the rule really cuts; and no smaller ratio fits."""
    shape = (1, 28, 28)
    net = Net(build("bn-cnn2", shape, 10, 0, norm="group"), shape)
    whole = net.layout
    infos = {}
    for k, (memory, speed) in enumerate([(1.0, 1.0), (0.8, 1.0), (0.66, 1.0), (1.0, 0.3)]):
        infos[k] = ClientInfo(10, memory=round(memory * whole.memory(32, 1)), speed=speed)
    begin = Setup(net.params(), net, infos, 3, lambda j: {})
    state = FedAPTA(prune=prune).init(begin)
    assert state.ratios[0] == 0

    def needs(k: int, ratio: float) -> tuple[float, float]:
        groups = groups_from_plain(state.structure)
        small = cut_channels(net, prune(net.params(), groups, ratio, 0, k)).net.layout
        return small.memory(32, 1) / infos[k].memory, small.macs / whole.macs / infos[k].speed

    for k in (1, 2, 3):
        assert max(needs(k, state.ratios[k])) <= 1
        assert max(needs(k, state.ratios[k] - RATIO_STEP)) > 1


def test_a_device_that_no_ratio_fits_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    profile = tmp_path / "tiny.csv"
    profile.write_text("client,up,down,speed,memory\n0,5,5,1,100000\n1,5,5,1,1000\n")
    with pytest.raises(
        InputError, match=r"client 1's device has 1000 .* ratio of 0\.95, the largest"
    ):
        fedgrove.run(
            "fedapta", data="digits", clients=2, net="bn-cnn2:norm=group", rounds=1,
            profile=str(profile), engine="serial", out=tmp_path / "run",
        )  # fmt: skip
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("prune", [LayerwiseL1(), LayerwiseL1("sum"), UniformL1()])
def test_the_papers_bytes_are_those_of_the_numbers_that_are_sent(
    prune: Any, tmp_path: Path
) -> None:
    """Of the first round, from the same weights: parameters under the mask, four bytes each way."""
    method = FedAPTA(ratios=(0.0, 0.4, 0.8), prune=prune)
    run = make_run(
        method, tmp_path, net="bn-cnn2", options={"width": 16, "norm": "group"}, sizes=(9, 9, 9)
    )
    sent = 0
    for task in plan(run, run.initial_state):
        packet = task.send["model"]
        for name in run.net.layout.params:
            kept = (packet.mask or {}).get(name)
            sent += packet.values[name].numel() if kept is None else int(kept.sum())
    assert method.paper_bytes(run.net, 3, 3, 7) == 8 * sent * 7


def test_more_last_layers_than_there_are_are_refused(tmp_path: Path) -> None:
    run = make_run(FedAPTA(ratios=(0.5,), last=9), tmp_path, net="bn-cnn2")
    with pytest.raises(
        InputError, match="last is 9; it must be at most 1, the number of fully connected"
    ):
        _ = run.initial_state
    assert len(FedAPTA(last=2).init(start(1)).head) == 4


def test_devices_really_train_smaller_nets(tmp_path: Path) -> None:
    """At ratio .5 a conv that reads pruned channels costs a quarter."""
    macs = {}
    for ratio in (0.0, 0.5):
        method = FedAPTA(ratios=(ratio,), prune=UniformL1())
        run = make_run(method, tmp_path / str(ratio), net="bn-cnn2", dtype=torch.float32)
        (task, *_) = plan(run, run.method.init(run.setup))
        macs[ratio] = perform(run, task, {})[0].macs
    assert macs[0.5] < 0.4 * macs[0.0]


# ---- drift ---------------------------------------------------------------------------------------


def test_without_its_terms_a_drift_doubles_the_first_step(tmp_path: Path) -> None:
    """No gradient is known before: devices train as FedAvg's, and the server adds h = w_i - w."""
    local = LocalTraining(2, 8, SGD(0.1))
    plain = make_run(FedAvg(local=local), tmp_path / "a", rounds=1)
    expected = play(plain, Serial()).model
    alone = DriftCorrection(alpha=0.0)
    for drift in ("feddc", "server"):
        method = FedAPTA(ratios=(0.0,), grouping=None, drift=drift, correct=alone, local=local)
        run = make_run(method, tmp_path / drift, rounds=1)
        found = play(run, Serial()).models[0]
        for name, w in run.params.items():
            torch.testing.assert_close(found[name], w + 2 * (expected[name] - w))


def test_groups_are_found_by_what_was_trained(tmp_path: Path) -> None:
    """Not by the drift, which is averaged: the traces of the first round are those without."""
    local = LocalTraining(2, 8, SGD(0.1))
    traces = {}
    for drift in ("none", "feddc", "server"):
        method = FedAPTA(
            ratios=(0.0, 0.5), drift=drift, correct=DriftCorrection(alpha=0.0), local=local
        )
        run = make_run(method, tmp_path / drift, net="bn-cnn2", rounds=1)
        traces[drift] = play(run, Serial()).traces
    for client, (total, present, *_) in traces["none"].items():
        for drift in ("feddc", "server"):
            torch.testing.assert_close(traces[drift][client][0], total)
            assert torch.equal(traces[drift][client][1], present)


def test_a_fold_with_drifts_by_hand() -> None:
    """Two dense devices, of 10 and 20 examples, move the first layer by 1 and 4; each has a drift
    of .5. The model moves by (10 * 1.5 + 20 * 4.5) / 30 = 3.5. Their own gradients are -1 and -4,
    and the group's, which is sent with the model, is (10 * -1 + 20 * -4) / 30 = -3.
    """
    method = FedAPTA(ratios=(0.0,), grouping=None, drift="feddc")
    state = method.init(start(2))
    reports = []
    for task, body in zip(method.plan(state, [0, 1]), (1.0, 4.0), strict=True):
        report = answer(task, body=body)
        trained = report.give["model"]
        shifted = {name: leaf + 0.5 for name, leaf in trained.values.items()}
        gradient = {name: torch.zeros_like(leaf) for name, leaf in FIRST.items()}
        gradient["0.weight"] -= body
        give = {
            "model": replace(trained, values=shifted),
            "head": Packet({name: trained.values[name] for name in state.head}),
            "gradient": Packet(gradient),
        }
        reports.append(replace(report, give=give))
    after = method.fold(state, reports)
    moved = after.models[0]["0.weight"] - FIRST["0.weight"]
    assert moved.flatten().tolist() == pytest.approx([3.5] * 4)
    (task,) = method.plan(after, [1])
    sent = task.send["group_gradient"].values
    assert sent["0.weight"].flatten().tolist() == pytest.approx([-3.0] * 4)
    assert sent["2.weight"].flatten().tolist() == [0.0] * 8


def test_a_drift_is_kept_where_a_device_has_the_weight(tmp_path: Path) -> None:
    for drift, kept_trees in (
        ("feddc", {"drift", "own_gradient", "had", "drift_group"}),
        ("server", {"drift", "drift_group"}),
    ):
        local = LocalTraining(2, 8, SGD(0.1))
        method = FedAPTA(ratios=(0.5,), grouping=None, drift=drift, local=local)
        run = make_run(method, tmp_path / drift, net="bn-cnn2", rounds=3, cohort=4)
        state = play(run, Serial())
        assert state.round == 3
        kept = remembered(run)
        assert {key.split("/")[1] for key in kept} == kept_trees
        for client in range(4):
            weight = kept[f"{client}/drift/conv1.weight"]
            alive = weight.flatten(1).abs().sum(1) > 0
            # Two of four filters, as the ratio says.
            assert int(alive.sum()) <= 2
        assert sorted(state.gradients) == ([0] if drift == "feddc" else [])


@pytest.mark.parametrize("drift", ["feddc", "server"])
def test_zeros_outside_a_sub_model_have_no_sign(drift: str, tmp_path: Path) -> None:
    """As after a codec: a gradient is -(c + ...), which would make -0.0 of nothing."""
    method = FedAPTA(ratios=(0.5,), drift=drift, local=LocalTraining(1, 8, SGD(0.1)))
    run = make_run(method, tmp_path, net="bn-cnn2", sizes=(20, 20))
    state = run.initial_state
    for _ in range(2):
        tasks = plan(run, state)
        answers = admitted(run, Serial(), tasks)
        for packets in [task.send for task in tasks] + [report.give for report in answers]:
            for packet in packets.values():
                assert packet.mask
                for name, mask in packet.mask.items():
                    zeros = packet.values[name][~mask]
                    assert trees.identical({name: zeros}, {name: torch.zeros_like(zeros)})
        state = method.fold(state, answers)


def test_weights_in_groups_by_hand() -> None:
    """10 and 30 examples in one group are .5 and 1.5 of their mean, 20 and 20 in another 1 and 1. A
    device that is in no group yet begins with others at the start: 50 alone."""
    method = FedAPTA(ratios=(0.0,), drift="feddc", correct=DriftCorrection(weighted=True))
    state = method.init(start(5))
    examples = {0: 10, 1: 30, 2: 20, 3: 20, 4: 50}
    assert weights_in_groups(replace(state, examples=examples)) == pytest.approx(
        {0: 10 / 26, 1: 30 / 26, 2: 20 / 26, 3: 20 / 26, 4: 50 / 26}
    )
    models = {0: FIRST, 1: FIRST}
    state = replace(state, examples=examples, models=models, groups={0: 0, 1: 0, 2: 1, 3: 1})
    assert weights_in_groups(state) == pytest.approx({0: 0.5, 1: 1.5, 2: 1.0, 3: 1.0, 4: 1.0})
    # It is what a device is sent; without examples it is sent 1.
    sent = [task.settings["weight"] for task in method.plan(state, [0, 1])]
    assert sent == [0.5, 1.5]
    state = replace(state, examples=examples | {0: 0})
    assert method.plan(state, [0])[0].settings["weight"] == 1.0
    plain = replace(method, correct=DriftCorrection())
    assert plain.plan(state, [1])[0].settings["weight"] == 1.0


def test_what_a_drift_costs_in_bytes(tmp_path: Path) -> None:
    """FedDC's: a gradient down and up next to the model; on the server alone the head once more."""
    sent = {}
    for drift in ("none", "feddc", "server"):
        method = FedAPTA(ratios=(0.0,), drift=drift, local=LocalTraining(1, 8, SGD(0.1)))
        run = make_run(method, tmp_path / drift, cohort=1)
        (task,) = plan(run, run.initial_state)
        report, _ = perform(run, task, {})
        assert (
            run.gate.refuses(report, task, run.expected(task), run.setup.clients[task.to]) is None
        )
        sizes = []
        for packets in (task.send, report.give):
            sizes.append({name: trees.size(packet.values) for name, packet in packets.items()})
        sent[drift] = sizes
    # 12·64+64 + 64·64+64 + 64·3+3 = 5187, of which the head has 195.
    assert sent["none"] == [{"model": 5187}, {"model": 5187}]
    assert sent["feddc"] == [
        {"model": 5187, "group_gradient": 5187},
        {"model": 5187, "head": 195, "gradient": 5187},
    ]
    assert sent["server"] == [{"model": 5187}, {"model": 5187, "head": 195}]


def test_feddc_under_adam_is_refused(tmp_path: Path) -> None:
    words = {"data": "digits", "clients": 2, "cohort": 2, "rounds": 1, "engine": "serial"}
    out = tmp_path / "run"
    adam = LocalTraining(1, 8, Adam(1e-3))
    with pytest.raises(InputError, match="drift is feddc and the optimiser Adam; FedDC uses"):
        fedgrove.run(FedAPTA(ratios=(0.0,), drift="feddc", local=adam), out=out, **words)
    assert not out.exists()
    fedgrove.run(FedAPTA(ratios=(0.0,), drift="server", local=adam), out=out, **words)


def test_in_a_new_group_a_drift_begins_anew(tmp_path: Path) -> None:
    method = FedAPTA(
        ratios=(0.0,), grouping=None, drift="feddc", local=LocalTraining(1, 8, SGD(0.1))
    )
    run = make_run(method, tmp_path, sizes=(20,))
    (task,) = plan(run, run.method.init(run.setup))
    _, memory = perform(run, task, {})
    client = run.client(task, dict(memory))
    carry = {**memory, "model": run.params, "group_gradient": memory["own_gradient"]}

    def begun(group: float) -> Any:
        numbers = {"group": group, "round": 1.0, "weight": 1.0}
        settings = {name: torch.tensor(number) for name, number in numbers.items()}
        return run.method._begin({**carry, "settings": settings}, client)

    assert trees.equal(begun(0.0)["drift"], memory["drift"])
    assert float(trees.sq_norm(begun(1.0)["drift"])) == 0
    assert float(trees.sq_norm(begun(1.0)["correction"])) == 0
    # Its gradient is the group's: nothing to correct.
    assert float(trees.sq_norm(begun(0.0)["correction"])) == 0


def test_a_weight_that_was_lacking_is_not_corrected(tmp_path: Path) -> None:
    """A device that rolls on had channels 0 and 1 of four, and now has 1 and 2: only of channel 1
    does it know its gradient. The group's is 3 everywhere and the device's 1: 3 - 1 = 2 there, and
    0 elsewhere."""
    local = LocalTraining(1, 32, SGD(0.5))
    method = FedAPTA(
        ratios=(0.5,), prune=RollingWindow(), grouping=None, drift="feddc", local=local
    )
    run = make_run(method, tmp_path, net="bn-cnn2", sizes=(20,))
    state = run.method.init(run.setup)
    (task,) = plan(run, state)
    _, memory = perform(run, task, {})
    (later,) = plan(run, replace(state, round=1))
    packet = later.send["model"]
    mask = packet.mask or {}
    before = task.send["model"].mask or {}
    filters = [m["conv1.weight"].flatten(1).any(1).tolist() for m in (before, mask)]
    assert filters == [[True, True, False, False], [False, True, True, False]]
    gradient = trees.map(lambda leaf: torch.full_like(leaf, 3.0), memory["own_gradient"])
    own = trees.map(torch.ones_like, memory["own_gradient"])
    carry = {
        **memory,
        "own_gradient": trees.apply_mask(own, before),
        "model": packet.values,
        "model.mask": mask,
        "group_gradient": trees.apply_mask(gradient, mask),
        "settings": {
            "group": torch.tensor(0.0), "round": torch.tensor(1.0), "weight": torch.tensor(1.0)
        },
    }  # fmt: skip
    along = run.method._begin(carry, run.client(later, dict(memory)))["correction"]
    found = along["conv1.weight"].flatten(1)[:, 0].tolist()
    assert found == pytest.approx([0.0, 2.0, 0.0, 0.0])
    # The device always had this one.
    assert along[state.head[-1]].tolist() == pytest.approx([2.0] * 3)


def test_a_groups_gradient_is_of_those_who_have_the_weight() -> None:
    """Device 0 (10 examples) has units 1 and 2 of four, gradient 1; device 1 (20) all, gradient 4:
    (10 · 1 + 20 · 4) / 30 = 3 of those two, and 4 of the others."""
    method = FedAPTA(ratios=(0.5, 0.0), grouping=None, drift="feddc")
    state = method.init(start(2))
    done = []
    for task, number in zip(method.plan(state, [0, 1]), (1.0, 4.0), strict=True):
        model = task.send["model"]
        gradient = task.send["group_gradient"]
        values = trees.map(lambda leaf, n=number: torch.full_like(leaf, n), gradient.values)
        values = trees.apply_mask(values, gradient.mask or {})
        head = {name: model.values[name] for name in state.head}
        give = {
            "model": model,
            "head": replace(model, values=head, mask=None),
            "gradient": replace(gradient, values=values),
        }
        done.append(Report(task.to, give, 10 * (task.to + 1)))
    after = method.fold(state, done)
    assert after.gradients[0]["0.weight"].flatten().tolist() == [4.0, 3.0, 3.0, 4.0]
    # In the next round both are sent it, device 0 its part.
    narrow, whole = method.plan(after, [0, 1])
    assert whole.send["group_gradient"].values["0.weight"].flatten().tolist() == [
        4.0,
        3.0,
        3.0,
        4.0,
    ]
    assert narrow.send["group_gradient"].values["0.weight"].flatten().tolist() == [
        0.0,
        3.0,
        3.0,
        0.0,
    ]


def test_a_group_without_reports_keeps_its_gradient() -> None:
    """Device 0 of group 0 reports, device 1 of group 1 does not."""
    method = FedAPTA(ratios=(0.0,), drift="feddc")
    fives = trees.map(lambda leaf: torch.full_like(leaf, 5.0), FIRST)
    state = replace(
        method.init(start(2)), round=1, groups={0: 0, 1: 1}, models={0: FIRST, 1: FIRST},
        gradients={0: fives, 1: fives},
    )  # fmt: skip
    (task,) = method.plan(state, [0])
    report = answer(task)
    head = Packet({name: FIRST[name] for name in state.head})
    give = {**report.give, "head": head, "gradient": Packet(FIRST)}
    after = method.fold(state, [replace(report, give=give)])
    assert after.groups == state.groups
    assert trees.equal(after.gradients[0], FIRST)
    assert trees.equal(after.gradients[1], fives)


@pytest.mark.parametrize("drift", ["feddc", "server"])
@pytest.mark.parametrize("net", ["mlp", "bn-cnn2"])
def test_drift_on_batched_is_drift_on_serial(net: str, drift: str, tmp_path: Path) -> None:
    correct = DriftCorrection(weighted=True)
    local = LocalTraining(2, 8, SGD(0.05))
    method = FedAPTA(ratios=(0.25, 0.5), drift=drift, correct=correct, local=local)
    results = []
    for engine in (Serial(), Batched()):
        run = make_run(method, tmp_path / engine.name, net=net, rounds=3)
        results.append((tensors(play(run, engine)), remembered(run)))
    (state, memory), (other_state, other_memory) = results
    assert trees.distance(state, other_state) < 1e-9
    assert trees.distance(memory, other_memory) < 1e-9


# ---- the preset ----------------------------------------------------------------------------------


def test_the_papers_preset() -> None:
    paper = methods.make("fedapta:paper")
    assert isinstance(paper, FedAPTA)
    assert paper.ratios == (0.0, 0.2, 0.4, 0.6, 0.8)
    assert paper.drift == "server"
    assert paper.grouping == LITERAL
    assert paper.use == "whole"
    sgd = SGD(0.1, weight_decay=1e-3)
    assert paper.local == LocalTraining(5, 512, sgd, 0.998, 10.0, Augment(4, True, 16))
    # Of no effect with the server's drift alone; what --set drift=feddc takes.
    assert paper.correct == DriftCorrection(alpha=0.1, weighted=True)


# ---- tasks that are learnt -----------------------------------------------------------------------


def three_tasks(devices: int, rotated: bool = False) -> tuple[Federation, dict[int, str]]:
    """Devices in turn do one of three tasks: other patterns under the same labels.

    Or, ``rotated``, the same patterns under other labels, which no one model can learn.
    """
    g = torch.Generator().manual_seed(0)
    patterns = 1.5 * torch.randn(3, 3, 1, 8, 8, generator=g)
    if rotated:
        patterns = torch.stack([patterns[0].roll(task, 0) for task in range(3)])
    clients = {}
    for k in range(devices):
        y = torch.randint(3, (60,), generator=g)
        x = patterns[k % 3][y] + torch.randn(60, 1, 8, 8, generator=g)
        parts = [Examples(x[a:b], y[a:b]) for a, b in ((0, 40), (40, 45), (45, 60))]
        clients[k] = ClientData(parts[0], parts[1], parts[2], ClientInfo(40))
    base = federation((1, 8, 8), (8,), dtype=torch.float32)
    tasks = {k: str(k % 3) for k in clients}
    return replace(base, clients=clients), tasks


def learnt(method: AnyMethod, made: Federation, folder: Path, n: int, **words: Any) -> Any:
    module = build("bn-cnn2", (1, 8, 8), 3, 0, width=8, norm="group")
    local = LocalTraining(2, 8, SGD(0.1, weight_decay=1e-3), 0.998, 10.0)
    words = {"rounds": n, "cohort": len(made.clients)} | words
    run = Run(replace(method, local=local), made, Net(module, (1, 8, 8)), Memory(folder), **words)  # type: ignore[type-var]
    return run, play(run, Serial())


def test_tasks_are_found_in_training(tmp_path: Path) -> None:
    """Fifteen devices, three tasks, five ratios, five rounds: the groups are the tasks."""
    made, tasks = three_tasks(15)
    ratios = (0.0, 0.2, 0.4, 0.6, 0.8)
    _, state = learnt(FedAPTA(ratios=ratios), made, tmp_path / "apta", 5)
    assert purity(state.groups, tasks) == 1.0
    assert len(state.models) == 3


def test_a_group_learns_its_task_better_than_all_together(tmp_path: Path) -> None:
    made, _ = three_tasks(9, rotated=True)

    def accuracy(method: AnyMethod, name: str) -> float:
        run, state = learnt(method, made, tmp_path / name, 3)
        scores = list(reports(run, Serial(), plan_scoring(run, state)))
        return sum(report.metrics["test0"] for report in scores) / len(scores)

    assert accuracy(FedAPTA(ratios=(0.0, 0.5)), "apta") > accuracy(FedAvg(), "avg") + 0.2


def test_a_switch_in_training_is_seen_within_three_rounds(tmp_path: Path) -> None:
    made, tasks = three_tasks(12)
    clients = dict(made.clients)
    made = replace(made, clients=clients)
    module = build("bn-cnn2", (1, 8, 8), 3, 0, width=8, norm="group")
    local = LocalTraining(2, 8, SGD(0.1, weight_decay=1e-3), 0.998, 10.0)
    method = FedAPTA(ratios=(0.0, 0.4), local=local)
    run = Run(method, made, Net(module, (1, 8, 8)), Memory(tmp_path), rounds=6, cohort=12)
    loop = rounds(run)
    step = next(loop)
    while step.tasks:
        if step.state.round == 3:
            assert purity(step.state.groups, tasks) == 1.0
            # Device 0 takes up the task of device 1.
            clients[0] = clients[1]
        answers = Serial().map((run, task) for task in step.tasks)
        step = loop.send((task, each) for (_, task), each in answers)
    assert step.state.groups[0] == step.state.groups[1]
    assert purity(step.state.groups, tasks | {0: tasks[1]}) == 1.0
