"""Grove: its rules by hand, both sides agree on what a client holds, groups, devices, bytes."""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import answers, make_run, play, reports, tensors
from tests.contract import Contract
from tests.methods.exchanges import exchanges
from torch import nn

import fedgrove
from fedgrove import data, methods, trees
from fedgrove.channels.find_groups import find_groups
from fedgrove.channels.submodel import read_packet_channels
from fedgrove.config.cost import estimate_cost
from fedgrove.core import Batch, ClientInfo, Packet, Report, Setup
from fedgrove.engines import Serial
from fedgrove.engines.batched.engine import Batched
from fedgrove.engines.faulty import Faulty
from fedgrove.errors import InputError, UnfitError
from fedgrove.methods.grove import client_views
from fedgrove.methods.grove.method import ALL, Grove, State, add_merits
from fedgrove.methods.grove.stability import Found, HeldOutGroups
from fedgrove.nets import Net
from fedgrove.runs.faults import Faults
from fedgrove.runs.memory import Memory
from fedgrove.runs.rounds import plan, rounds
from fedgrove.runs.run import Run, build

CONTRACT = Contract(
    # With views, rounding decides which of equal changes are sent down, another way on each engine.
    small={"server": "versions"},
    off=methods.make("grove:off"),
    # A tenth of 768, 64, 4096 and 64 numbers: 77, 6, 410 and 6; n H(k/n) + k bits are 437.82, 34.73, 2332.27 and 34.73,
    # and with four magnitudes 370.944 bytes. Half of the head's 195, 98: 293 bits, 40.625 bytes. Down, all that was
    # missed: of 4 clients 3 at a time (1 - .25^t) / .75 updates in round t; over 50 rounds
    # (50 - 1/.75) / .75 / 50 = 1.29778.
    paper_bytes=(370.944 + 40.625 + 370.944 * 1.29778) * 3 * 50,
    refused_with_privacy="send numbers next to their model (better, tried)",
)

ALONE = HeldOutGroups(most=1)


@dataclass(frozen=True)
class Alternate(HeldOutGroups):
    """Divides clients as soon as it is asked, every second into the other group."""

    least: float = 0.0

    def __call__(self, first: torch.Tensor, second: torch.Tensor) -> Found:
        """Two groups."""
        return Found([row % 2 for row in range(len(first))], 1.0)


EAGER = Alternate()


def state_of(model: list[float], *, has_versions: bool = False, **words: Any) -> State:
    tree = {"w": torch.tensor(model)}
    made = {
        "round": 3,
        "rounds": 10,
        "up": 0.5,
        "down": 0.25,
        "models": {ALL: tree},
        "statistics": {ALL: {}},
        "client_views": client_views.first(tree, ALL, has_versions),
        "groups": {},
        "evidence": {},
        "merits": {},
        "structure": (),
        "scores": {},
        "narrow": {},
    }
    return State(**{**made, **words})


def report(client: int, examples: int, update: list[float], **metrics: float) -> Report:
    return Report(client, {"change": Packet({"w": torch.tensor(update)})}, examples, metrics)


# ---- by hand -------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_versions", [False, True])
def test_the_server_by_hand(has_versions: bool) -> None:
    """Updates (4 0 -4 0) of one example and (0 2 -2 0) of three: the mean is (1 1.5 -2.5 0).

    Twice that from (1 1 1 1) is (3 4 -4 1). Published, a quarter of four is one: -5 of (2 3 -5 0); (2 3 0 0) is left.
    """
    method = Grove(up=0.5, down=0.25, step=2.0, finding=ALONE, own="none")
    before = state_of([1.0, 1.0, 1.0, 1.0], has_versions=has_versions)
    given = [report(5, 1, [4.0, 0.0, -4.0, 0.0]), report(8, 3, [0.0, 2.0, -2.0, 0.0])]
    after = method.fold(before, given)
    assert after.round == 4
    assert after.models[ALL]["w"].tolist() == [3.0, 4.0, -4.0, 1.0]
    if has_versions:
        assert after.client_views.published is not None
        assert after.client_views.published.models[ALL]["w"].tolist() == [1.0, 1.0, -4.0, 1.0]
        assert after.client_views.published.client_versions == {5: (ALL, 0), 8: (ALL, 0)}
        assert after.client_views.left[ALL]["w"].tolist() == [2.0, 3.0, 0.0, 0.0]
        assert set(method.deliver(after, 5)) == {"missed0"}
    else:
        # They held all of the old model; of the new one the largest difference is sent, -5.
        assert after.client_views.views[8]["w"].tolist() == [1.0, 1.0, 1.0, 1.0]
        sent = method.deliver(after, 5)["change"].values["w"]
        assert sent.tolist() == [0.0, 0.0, -5.0, 0.0]


@pytest.mark.parametrize("has_versions", [False, True])
def test_whole_models_count_by_how_they_moved(has_versions: bool) -> None:
    # Clients hold 0, 0 (views: and the half of 4, -2 that is sent, so 4, 0), and train from there.
    # Up travels the whole model: it moved by 1, -1, and the group's model moves by twice that; the
    # mean of the models themselves would pull it back to what clients hold.
    began = [0.0, 0.0] if has_versions else [4.0, 0.0]
    held = client_views.first({"w": torch.zeros(2)}, ALL, has_versions)
    method = Grove(up=1.0, down=0.5, step=2.0, home=False, own="none", finding=ALONE)
    state = state_of([4.0, -2.0], client_views=held, down=0.5)
    trained = Packet({"w": torch.tensor(began) + torch.tensor([1.0, -1.0])})
    after = method.fold(state, [Report(0, {"model": trained}, 5)])
    assert after.models[ALL]["w"].tolist() == [6.0, -4.0]


def test_the_client_by_hand(tmp_path: Path) -> None:
    """Changes of 3, -2 and 1 in the first bias, and 1 left of the third: two of 64 are sent.

    3, -2 and 2 are at hand; the largest are 3 and -2, the first of equal ones, of mean magnitude 2.5.
    """
    run = make_run(Grove(up=2 / 64, own="offset"), tmp_path)
    (task, *_) = plan(run, run.initial_state)
    left = trees.map(torch.zeros_like, shared(run))
    left["fc1.bias"][2] = 1.0
    client = run.client(task, {"left": left})
    carry = run.method.client.begin({"change": trees.map(torch.zeros_like, shared(run))}, client)
    changes = torch.zeros_like(client.start["fc1.bias"])
    changes[:3] = torch.tensor([3.0, -2.0, 1.0])
    carry["local"] = {**carry["model"], "fc1.bias": carry["model"]["fc1.bias"] + changes}
    outcome = run.method.client.send(carry, client)
    sent = outcome.give["change"].values
    assert sent["fc1.bias"][:4].tolist() == pytest.approx([2.5, -2.5, 0.0, 0.0])
    assert outcome.memory["left"]["fc1.bias"][:4].tolist() == pytest.approx([0.5, 0.5, 2.0, 0.0])
    assert outcome.memory["step"]["fc1.bias"][:3].tolist() == pytest.approx([3.0, -2.0, 1.0])
    assert trees.identical(outcome.memory["held"], shared(run))
    assert set(outcome.memory["kept"]) == set(client.layout.head)
    # It goes on from there, and what it uses is half of its last step from the model.
    again = run.client(task, dict(outcome.memory))
    used = run.method.client.use({**outcome.memory, "change": zeros(run)}, again)["model"]
    moved = used["fc1.bias"] - client.start["fc1.bias"]
    assert moved[:3].tolist() == pytest.approx([1.5, -1.0, 0.5])


def test_a_part_of_the_last_step_is_kept(tmp_path: Path) -> None:
    """A quarter of a step of 4 and -2 from the group's model; the head is the trained one."""
    run = make_run(Grove(keep=0.25, finding=ALONE), tmp_path)
    (task, *_) = plan(run, run.initial_state)
    client = run.client(task, {})
    carry = run.method.client.begin({"change": zeros(run)}, client)
    step = zeros(run)
    step["fc1.bias"][:2] = torch.tensor([4.0, -2.0])
    (head, *_) = client.layout.head
    own = {head: carry["model"][head] + 1}
    carry["local"] = {**carry["model"], **trees.map(torch.add, shared(run), step), **own}
    offset = run.method.client.make_offset(carry, client)["offset"]
    moved = offset["fc1.bias"] - client.start["fc1.bias"]
    assert moved[:3].tolist() == pytest.approx([1.0, -0.5, 0.0])
    assert torch.equal(offset[head], own[head])
    # What it uses later is made of the step that it remembers.
    again = run.client(task, {"step": step})
    used = run.method.client.use({"change": zeros(run), "step": step}, again)["model"]
    assert torch.equal(used["fc1.bias"], offset["fc1.bias"])


def test_the_two_kinds_of_model_are_compared_by_hand() -> None:
    """The offset gives the right class 3/4, the personal model 1/4: it is better by 1/2, on one
    example; the other one is padding."""
    net = Net(nn.Sequential(nn.Linear(1, 2)), (1,))
    models = {}
    for name, bias in (("offset", [math.log(3), 0.0]), ("personal", [0.0, math.log(3)])):
        models[name] = {"0.weight": torch.zeros(2, 1), "0.bias": torch.tensor(bias)}
    batch = Batch(
        torch.ones(2, 1),
        torch.tensor([0, 0]),
        torch.tensor([1.0, 0.0]),
        torch.arange(2),
        torch.tensor(0),
    )
    sums = Grove().client.compare(net, {}, batch, models)
    assert float(sums["better"]) == pytest.approx(0.5)
    assert float(sums["tried"]) == 1.0


@pytest.mark.parametrize(("merit", "is_pulled"), [(-0.1, True), (0.1, False), (None, False)])
def test_a_client_uses_what_does_better_in_its_group(
    merit: float | None, is_pulled: bool, tmp_path: Path
) -> None:
    """Where offsets do worse by .1, the personal models; with nothing known, the offset."""
    merits = {} if merit is None else {ALL: (merit, 5.0)}
    packet = Grove(finding=ALONE).deliver(state_of([1.0], merits=merits), 7)["choice"]
    assert packet.values["pulled"].tolist() == [is_pulled]
    run = make_run(Grove(finding=ALONE), tmp_path)
    (task, *_) = plan(run, run.initial_state)
    client = run.client(task, {})
    personal = trees.map(lambda leaf: leaf + 1, client.start)
    carry = {"change": zeros(run), "choice": packet.values, "personal": personal}
    used = run.method.client.use(carry, client)["model"]
    assert trees.identical(used, personal if is_pulled else client.start)


def test_what_clients_say_of_models_by_hand() -> None:
    """.9 (1 + .5 * 4 - .25 * 8) = .9 and .9 (10 + 4 + 8) = 19.8."""
    after = add_merits((1.0, 10.0), [(0.5, 4.0), (-0.25, 8.0)])
    assert after == pytest.approx((0.9, 19.8))
    # A group of which nobody reports keeps what it has.
    state = state_of([1.0], merits={1: (1.0, 10.0)})
    assert Grove(finding=ALONE).fold(state, [report(5, 2, [1.0])]).merits == {1: (1.0, 10.0)}


def test_nobody_claims_more_examples_than_it_has() -> None:
    method = Grove(finding=ALONE)
    state = state_of([1.0])
    after = method.fold(state, [report(5, 2, [1.0], better=-1.0, tried=1e9)])
    assert after.merits[ALL] == pytest.approx((-1.8, 1.8))


def test_a_loss_below_zero_is_still_a_vote(tmp_path: Path) -> None:
    """A problem of one's own may have one: e^3 better on each of two examples counts as 1."""
    run = make_run(Grove(finding=ALONE), tmp_path)
    (task, *_) = plan(run, run.initial_state)
    client = run.client(task, {})
    carry = run.method.client.begin({"change": zeros(run)}, client)
    carry["local"] = carry["model"]
    carry["merit"] = {"better": 2 * torch.tensor(3.0).exp(), "tried": torch.tensor(2.0)}
    assert run.method.client.send(carry, client).metrics == {"better": 1.0, "tried": 2.0}


def mask_of(method: Grove, state: State, client: int) -> trees.Mask | None:
    group = state.groups.get(client, ALL)
    return method._masks(state).of(group, state.narrow.get(client, 1.0))


def shared(run: Run) -> trees.Tree:
    return trees.pick(run.params, run.method.client.shared_names(run.net.layout)[0])


def zeros(run: Run) -> trees.Tree:
    return trees.map(torch.zeros_like, shared(run))


# ---- both sides agree ----------------------------------------------------------------------------

WEAK = ClientInfo(12, speed=0.4)


def with_weak(run: Run, *clients: int) -> Run:
    """The same run with slow devices."""
    changed = dict(run.federation.clients)
    for client in clients:
        changed[client] = replace(changed[client], info=WEAK)
    return replace(run, federation=replace(run.federation, clients=changed))


def states(run: Run, faults: str) -> Iterator[Any]:
    """The state after each round, some of whose clients fail."""
    run = replace(run, faults=Faults.parse(faults))
    loop = rounds(run)
    exchange = next(loop)
    lost = 0
    while exchange.tasks:
        exchange = loop.send(answers(run, Faulty(Serial()), exchange.tasks))
        lost += len(exchange.tally.lost) + len(exchange.tally.refused)
        yield exchange.state
    assert lost


@pytest.mark.parametrize("finding", [ALONE, EAGER], ids=["one", "groups"])
@pytest.mark.parametrize(
    ("server", "density"), [("views", 0.5), ("versions", 1.0), ("versions", 0.5)]
)
def test_both_sides_know_what_a_client_holds(
    server: Any, density: float, finding: HeldOutGroups, tmp_path: Path
) -> None:
    """Whoever's exchange was lost or refused, on all devices, before and after groups are found."""
    method = Grove(server=server, density=density, finding=finding, own="none", room=0.7)
    words: dict[str, Any] = {"sizes": (6,) * 6, "cohort": 4, "rounds": 9}
    run = with_weak(make_run(method, tmp_path, options={"hidden": 8}, **words), 2, 5)
    state = None
    for state in states(run, "crash=0.15,nan=0.1,late=0.15"):
        for client in range(6):
            memory = run.memory.read(client, run.memory.files.get(client))
            held = memory.get("held", shared(run))
            if server == "views":
                view = state.client_views.views.get(client, state.client_views.initial)
                assert trees.distance(held, view) < 1e-12
            # What it holds once it has read what it would be sent now.
            carry: dict[str, Any] = dict(memory)
            for name, packet in method.deliver(state, client).items():
                carry[name] = packet.values
                if packet.mask:
                    carry[f"{name}.mask"] = packet.mask
            member = run.client(plan_for(run, state, client), {})
            now = trees.pick(method.client.begin(carry, member)["model"], held)
            group = state.groups.get(client, ALL)
            mask = mask_of(method, state, client) or {}
            if server == "views":
                model = state.models[group]
                expected = client_views.received(
                    state.client_views, client, group, model, 0.1, mask or None
                )
            else:
                expected = trees.apply_mask(state.client_views.published.models[group], mask)
                # And what is left adds up to the model.
                whole = trees.map(torch.add, expected, state.client_views.left[group])
                model = trees.apply_mask(state.models[group], mask)
                assert trees.distance(trees.apply_mask(whole, mask), model) < 1e-12
            assert trees.distance(now, expected) < 1e-12
    assert state is not None
    assert (len(state.models) > 1) == (finding is EAGER)


def plan_for(run: Run, state: State, client: int) -> Any:
    (task,) = run.method.plan(state, [client])
    return task


@pytest.mark.parametrize("server", ["views", "versions"])
def test_nothing_diverges_where_a_third_is_lost(server: Any, tmp_path: Path) -> None:
    words: dict[str, Any] = {"sizes": (12,) * 6, "cohort": 5, "rounds": 10}
    run = make_run(Grove(server=server), tmp_path, options={"hidden": 16}, **words)
    length = trees.sq_norm(shared(run))
    for state in states(run, "crash=0.3"):
        for model in state.models.values():
            assert trees.sq_norm(model) < 9 * length


def test_a_hostile_head_does_not_decide_what_is_usual(tmp_path: Path) -> None:
    """One head of 1e30 leaves the others as they are among themselves; NaN never comes so far."""
    run = make_run(Grove(), tmp_path, sizes=(20,) * 8, cohort=8, rounds=2)
    state = run.initial_state
    honest = list(reports(run, Serial(), plan(run, state)))

    def lied(report: Report) -> Report:
        huge = torch.full_like(report.give["evidence"].values["scores.head"], 1e30)
        return replace(report, give={**report.give, "evidence": Packet({"scores.head": huge})})

    plain = run.method.fold(state, honest).evidence
    spoilt = run.method.fold(state, [lied(honest[0]), *honest[1:]]).evidence
    for client in range(1, 8):
        assert torch.isfinite(spoilt[client][1]).all()
        assert float(plain[client][1] @ spoilt[client][1]) > 0.6


# ---- many clients --------------------------------------------------------------------------------


def test_many_clients_need_no_more_of_the_server(tmp_path: Path) -> None:
    """Of 1e5 clients the state holds no model each, and evidence of a few."""
    sizes = []
    method = Grove(ask=8, finding=EAGER, room=0.5)
    for length in (5, 15):
        federation = data.load("crowd", clients=100_000)
        memory = Memory(tmp_path / str(length))
        run = build(method, federation, memory, net="mlp:hidden=64", rounds=length, cohort=3)
        state = play(run, Serial())
        assert state.client_views.published is not None
        assert not state.client_views.views
        assert len(state.evidence) <= 8
        sizes.append(sum(leaf.numel() for leaf in tensors(state).values()))
        assert len(pickle.dumps(state.client_views.published.client_versions)) < 10_000
    assert sizes[1] <= 1.5 * sizes[0]


def test_the_server_chooses_by_what_fits() -> None:
    """A gibibyte holds 2^28 numbers: 2^18 clients' models of 2^10."""
    model = {"w": torch.zeros(1 << 10)}
    assert not Grove()._has_versions(model, 1 << 18)
    assert Grove()._has_versions(model, (1 << 18) + 1)
    assert not Grove(server="views")._has_versions(model, 1 << 30)
    assert Grove(server="versions")._has_versions(model, 1)
    assert not Grove(server="versions", down=1.0)._has_versions(model, 1 << 30)


def test_who_left_no_evidence_joins_the_nearest_group() -> None:
    """Clients 1 and 2 went east, 3 and 4 north; 9 and 10, of whom nothing is kept, do as they do."""
    method = Grove(ask=4, own="none")
    east, north = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    evidence = {1: (2, east, east), 2: (2, east, east), 3: (2, north, north), 4: (2, north, north)}
    models = {group: {"w": torch.zeros(2)} for group in (ALL, 1, 2)}
    groups = {1: 1, 2: 1, 3: 2, 4: 2}
    state = state_of([0.0, 0.0], models=models, groups=groups, evidence=evidence)
    state = replace(state, statistics={group: {} for group in models})
    after = method.fold(state, [with_head(9, [0.1, 2.0]), with_head(10, [2.0, 0.3])])
    assert after.groups == {**groups, 9: 2, 10: 1}
    assert after.evidence == evidence


def test_a_round_that_says_nothing_new_confirms_nothing() -> None:
    """Groups must show twice; without two reports there is nothing new to show them by.

    Client 9, who reports alone after they were found, is unlike nobody and joins none.
    """
    method = Grove(finding=Alternate(least=0.5), own="none", forget=0.0)
    east, north = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    evidence = {k: (2, east, east) if k % 2 else (2, north, north) for k in range(4)}
    seen = replace(state_of([0.0, 0.0], evidence=evidence), shared=1.0)
    assert method.fold(seen, []).groups == {}
    two = [with_head(0, [0.0, 1.0]), with_head(1, [1.0, 0.0])]
    divided = method.fold(seen, two)
    assert divided.groups == {0: 1, 1: 2, 2: 1, 3: 2}
    assert method.fold(divided, [with_head(9, [0.0, 1.0])]).groups == divided.groups


def with_head(client: int, head: list[float]) -> Report:
    packets = {"change": Packet({"w": torch.zeros(2)})}
    packets["evidence"] = Packet({"scores.head": torch.tensor(head)})
    return Report(client, packets, 1)


# ---- devices -------------------------------------------------------------------------------------


def test_a_weak_device_has_fewer_channels_from_the_start(tmp_path: Path) -> None:
    run = with_weak(make_run(Grove(multiple=4), tmp_path, net="har-cnn", cohort=4), 2)
    (share,) = run.initial_state.narrow.values()
    assert 0 < share < 1
    groups = find_groups(run.net)
    for before, tasks, given, _ in exchanges(run):
        by_client = {task.to: task for task in tasks}
        sent = by_client.pop(2).send["change"]
        assert all(
            packet.mask is None for task in by_client.values() for packet in task.send.values()
        )
        kept = read_packet_channels(sent, groups)
        for group in groups:
            # In steps of 4: half of 64 channels.
            assert int(kept[group.name].sum()) % 4 == 0
            assert int(kept[group.name].sum()) <= (share + 0.05) * group.size
            best = before.scores[ALL][group.name].argmax()
            assert bool(kept[group.name][best])
        (weak,) = [each for each in given if each.of == 2]
        for name, leaf in weak.give["change"].values.items():
            assert not bool(leaf[~sent.mask[name]].any())
        # Its own model has no more than these channels.
        memory = run.memory.read(2, run.memory.files[2])
        assert not bool(memory["personal"]["conv2.weight"][~sent.mask["conv2.weight"]].any())


def test_a_narrow_model_lies_within_its_groups(tmp_path: Path) -> None:
    run = with_weak(make_run(Grove(density=0.75, thin=0.0, multiple=1), tmp_path, net="har-cnn"), 2)
    state = run.initial_state
    wide, narrow = (mask_of(run.method, state, client) for client in (0, 2))
    fewer = 0
    for name, kept in narrow.items():
        assert not bool((kept & ~wide[name]).any())
        fewer += int((wide[name] & ~kept).sum())
    assert fewer


def test_strong_devices_change_nothing(tmp_path: Path) -> None:
    one = play(make_run(Grove(), tmp_path / "a"), Serial())
    other = play(make_run(Grove(fit=False), tmp_path / "b"), Serial())
    assert not one.narrow
    assert trees.identical(tensors(one), tensors(other))


@pytest.mark.parametrize("server", ["views", "versions"])
def test_weak_devices_train_in_one_stack(server: Any, tmp_path: Path) -> None:
    method = Grove(server=server, up=1.0, step=1.0)
    found = []
    for engine in (Serial(), Batched()):
        run = make_run(method, tmp_path / engine.name, net="bn-cnn2", sizes=(16,) * 4, rounds=2)
        given = reports(with_weak(run, 1, 3), engine, plan(with_weak(run, 1, 3), run.initial_state))
        found.append([each.give["model"].values for each in given])
    for one, other in zip(*found, strict=True):
        assert trees.distance(one, other) < 1e-9


# ---- bytes ---------------------------------------------------------------------------------------


def spent(summary: dict[str, Any]) -> int:
    total: int = summary["bytes_up"] + summary["bytes_down"]
    return total


WORDS: dict[str, Any] = {"engine": "serial", "progress": False, "score_on": 1, "epochs": 1}
MOTION = {**WORDS, "data": "motion", "rounds": 5, "cohort": 4}
DIGITS = {**WORDS, "data": "digits", "clients": 8, "rounds": 6, "cohort": 4, "net": "mlp:hidden=64"}


@pytest.mark.parametrize(
    ("words", "setting"),
    [
        pytest.param(MOTION, {"bytes": "1%"}, marks=pytest.mark.slow),
        pytest.param(MOTION, {"bytes": "2%"}, marks=pytest.mark.slow),
        (DIGITS, {"bytes": 0.03}),
        pytest.param(DIGITS, {"bytes": "4%", "server": "versions"}, marks=pytest.mark.slow),
        (DIGITS, {"bytes": "2%", "density": 0.7}),
    ],
)
def test_a_run_costs_what_it_may(words, setting: dict[str, Any], tmp_path: Path) -> None:
    # What FedAvg sends depends on nothing that it learns.
    short = {**words, "rounds": 1, "cohort": 1}
    dense = fedgrove.run("fedavg", **short, out=tmp_path / "fedavg").summary
    mine = fedgrove.run("grove", **words, set=setting, out=tmp_path / "grove").summary
    allowed = {"1%": 0.01, "2%": 0.02, "4%": 0.04}.get(setting["bytes"], setting["bytes"])
    share = spent(mine) / (spent(dense) * words["rounds"] * words["cohort"])
    assert share == pytest.approx(allowed, rel=0.1)


def test_a_client_spends_its_budget(tmp_path: Path) -> None:
    """Four of eight clients in each of six rounds: each three times."""
    mine = fedgrove.run("grove", **DIGITS, set={"budget": "6kB"}, out=tmp_path / "run").summary
    assert spent(mine) / 8 == pytest.approx(6000, rel=0.1)
    assert mine["figures"]["share_up"] == mine["figures"]["share_down"] != 0.1


def test_more_than_it_can_use_is_left(tmp_path: Path) -> None:
    run = build(
        Grove(budget="1GB"),
        data.load("digits", clients=4),
        Memory(tmp_path),
        net="mlp:hidden=8",
        rounds=3,
    )
    assert run.initial_state.up == 0.5


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ({"bytes": "0.1%"}, r"bytes is '0.1%'; the cheapest messages .* take .*% of what FedAvg"),
        ({"budget": "1kB"}, r"budget is '1kB'; the cheapest messages .* take .*kB for each client"),
        ({"bytes": "1%", "budget": "8MB"}, "give one of them"),
        ({"bytes": 0}, "bytes is 0.* must be a share of FedAvg's bytes above 0"),
        ({"bytes": "many"}, "bytes is 'many'"),
        ({"budget": "8 parsecs"}, "budget is '8 parsecs'; it must be bytes for one client"),
        ({"up": 0}, "up is 0"),
        ({"down": 1.5}, "down is 1.5"),
        ({"server": "none"}, "server is 'none'"),
        ({"ask": 1}, "ask is 1"),
        ({"own": "all"}, "own is 'all'"),
    ],
)
def test_what_is_refused_before_a_folder_is_made(
    setting: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=sentence):
        fedgrove.run("grove", **DIGITS, set=setting, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_what_it_will_cost_can_be_asked() -> None:
    """The estimate's codec leaves no zeros out: shares are chosen by the one that will be used."""
    size = {"clients": 6, "cohort": 2, "rounds": 2, "shape": (12,), "classes": 3, "net": "mlp"}
    figures = estimate_cost(Grove(bytes="5%"), **size)
    # 5187 numbers down and up.
    assert figures["bytes_paper"] == round(0.05 * 8 * 5187 * 2 * 2)


def test_what_its_own_formula_counts(tmp_path: Path) -> None:
    """With views nothing comes down in the first of 50 rounds; budgets are what they say."""
    run = make_run(Grove(server="views"), tmp_path)
    # See tests/contracts/test_methods.py.
    expected = (370.944 + 40.625 + 370.944 * 49 / 50) * 3 * 50
    assert run.method.paper_bytes(run.net, 4, 3, 50) == round(expected)
    assert Grove(budget="8MB").paper_bytes(run.net, 4, 3, 50) == 32_000_000
    off = methods.make("grove:off")
    assert off.paper_bytes(run.net, 4, 3, 50) == 8 * 5187 * 3 * 50


# ---- the rest ------------------------------------------------------------------------------------


def headless() -> Net:
    return Net(torch.nn.Sequential(torch.nn.Conv1d(3, 3, 4), torch.nn.Flatten()), (3, 4))


def only_a_head() -> Net:
    return Net(torch.nn.Sequential(torch.nn.Linear(4, 3)), (4,))


@pytest.mark.parametrize(
    ("net", "why"),
    [(headless, "no layer with parameters"), (only_a_head, "nothing would be shared")],
)
def test_a_net_that_cannot_keep_its_head_at_home_is_refused(net, why: str) -> None:
    made = net()
    start = Setup(made.params(), made, {}, 3, lambda j: {})
    with pytest.raises(UnfitError, match=why):
        Grove().init(start)
    assert Grove(home=False).init(start).round == 0


CONVS = """
from torch import nn


class Convs(nn.Sequential):
    def __init__(self, shape, classes):
        super().__init__(nn.Conv2d(1, 2, 3), nn.Conv2d(2, classes, 6), nn.Flatten())
"""


@pytest.mark.parametrize("setting", [{}, {"bytes": "20%"}], ids=str)
def test_without_a_head_there_is_no_evidence_of_groups(
    setting: dict[str, Any], tmp_path: Path
) -> None:
    """What the refusal above advises: all layers are shared, and there is one group."""
    (tmp_path / "convs.py").write_text(CONVS)
    words = {**DIGITS, "rounds": 2, "net": f"{tmp_path / 'convs.py'}:Convs"}
    found = fedgrove.run("grove", **words, set={"home": False, **setting}, out=tmp_path / "run")
    assert found.summary["bytes_up"] > 0
    assert Grove(home=False).paper_bytes(headless(), 4, 3, 50) > 0


@pytest.mark.parametrize(
    "setting",
    [
        {"server": "versions", "bytes": "5%"},
        pytest.param({"finding.least": 0.0}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_run_that_was_interrupted_ends_as_one_that_was_not(setting, tmp_path: Path) -> None:
    words = {**DIGITS, "rounds": 4, "set": setting}
    whole = fedgrove.run("grove", **words, out=tmp_path / "whole")

    class Stop(Exception):
        pass

    def stop(line: Any) -> None:
        if line["round"] == 2:
            raise Stop

    with pytest.raises(Stop):
        fedgrove.run("grove", **words, out=tmp_path / "part", watch=stop)
    resumed = fedgrove.resume(tmp_path / "part", engine="serial", progress=False)
    for name in ("accuracy_clients", "bytes_up", "bytes_down"):
        assert resumed.summary[name] == whole.summary[name]


@pytest.mark.parametrize("words", [{"bytes": "1%", "up": 0.5}, {"budget": "8MB", "down": 0.2}])
def test_shares_beside_a_budget_are_refused(words: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="leave the shares out, or the budget"):
        Grove(**words)
