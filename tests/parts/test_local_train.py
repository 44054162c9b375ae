"""The Train stage in its two forms, under masks, and with BatchNorm."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import make_run
from torch import Tensor, nn

from fedgrove import methods, trees
from fedgrove.core import Batch, Carry, Client, Packet, Task, Train
from fedgrove.engines.work import make_carry as first_carry
from fedgrove.nets import Net, Output
from fedgrove.nets.norms import drop_batch_counters
from fedgrove.parts import local
from fedgrove.parts.local import SGD, Adam, LocalTraining
from fedgrove.parts.objective import CrossEntropy, Objective, Proximal
from fedgrove.runs.run import Run
from fedgrove.trees import Tree

F64 = torch.float64
RECIPES = {
    "adam": LocalTraining(2, 8, Adam(1e-2)),
    "adam-all": LocalTraining(2, 8, Adam(1e-2, weight_decay=1e-2), decay=0.9, clip=0.5),
    "sgd": LocalTraining(2, 8, SGD(0.05)),
    "sgd-all": LocalTraining(2, 8, SGD(0.05, momentum=0.9, weight_decay=1e-3), decay=0.9, clip=0.5),
}


def drawn_mask(run: Run, density: float, seed: int = 0) -> trees.Mask:
    g = torch.Generator().manual_seed(seed)
    return {
        k: torch.rand(run.params[k].shape, generator=g) < density for k in run.net.layout.prunable
    }


def task_of(run: Run, mask: trees.Mask | None = None, round: int = 2) -> tuple[Client, Carry]:
    task = Task(1, {"model": Packet(run.params, mask)}, round=round)
    return run.client(task, {}), first_carry(task, {}, F64)


def lean(run: Run, stage: Train, carry: Carry, batches: Iterable[Batch]) -> Carry:
    return local.train(run.net, stage, carry, batches)


def pure(run: Run, stage: Train, carry: Carry, batches: Iterable[Batch]) -> Carry:
    carry = local.start_training(run.net, stage, carry)
    for batch in batches:
        carry = local.step(run.net, stage, carry, batch)
    return carry


@pytest.mark.parametrize("density", [None, 0.3])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("net", ["mlp", "bn-cnn2", "har-cnn"])
def test_train_equals_begin_and_steps(
    net: str, recipe: LocalTraining, density: float | None, tmp_path: Path
) -> None:
    run = make_run(methods.FedAvg(), tmp_path, net=net)
    client, carry = task_of(run, None if density is None else drawn_mask(run, density))
    before = copy.deepcopy(carry)
    stage = Train(CrossEntropy() + Proximal(0.1), recipe)
    results = [
        form(run, stage, carry, local.epochs(run.net, stage, client, 0))["local"]
        for form in (lean, pure)
    ]
    assert trees.distance(*results) < 1e-12
    assert list(results[0]) == list(results[1]) == list(run.net.layout.shapes)
    assert trees.distance(results[0], run.params) > 1e-3
    assert all(trees.identical(carry[k], before[k]) for k in before)
    assert carry.keys() == before.keys()


def both(net: Net, stage: Train, carry: Carry, batch: Batch) -> tuple[Carry, Carry]:
    """One step in either form."""
    return local.train(net, stage, carry, [batch]), local.step(
        net, stage, local.start_training(net, stage, carry), batch
    )


def test_no_batches_give_the_masked_start(tmp_path: Path) -> None:
    run = make_run(methods.FedAvg(), tmp_path)
    mask = drawn_mask(run, 0.5)
    _, carry = task_of(run, mask)
    for form in (lean, pure):
        trained = form(run, Train(CrossEntropy(), LocalTraining()), carry, [])["local"]
        assert trees.identical(trained, trees.apply_mask(run.params, mask))


def test_one_step_by_hand() -> None:
    # logits = w x with w = (0, 0)^T (one input, two classes), x = 2, y = 0: softmax (1/2, 1/2), so
    # the gradient is (p - onehot) x = (-1/2, 1/2) * 2 = (-1, 1).
    # lr 0.1 * decay 0.5^1 = 0.05: w = (0.05, -0.05).
    # Clipped to length 1 (it is sqrt 2 long): (0.05, -0.05) / sqrt 2.
    net = Net(nn.Linear(1, 2, bias=False).double(), (1,))
    batch = Batch(
        torch.full((1, 1), 2.0, dtype=F64),
        torch.tensor([0]),
        torch.ones(1, dtype=F64),
        *torch.zeros(2, 1),
    )
    start = {"weight": torch.zeros(2, 1, dtype=F64)}
    carry = first_carry(Task(0, {"model": Packet(start)}, round=1), {}, F64)
    for clip, expected in ((None, 0.05), (1.0, 0.05 / 2**0.5)):
        stage = Train(CrossEntropy(), LocalTraining(1, 1, SGD(0.1), decay=0.5, clip=clip))
        for after in both(net, stage, carry, batch):
            assert after["local"]["weight"].flatten().tolist() == pytest.approx(
                [expected, -expected], abs=1e-15
            )
    assert start["weight"].tolist() == [[0.0], [0.0]]


def test_start_and_end_name_trees_of_the_carry(tmp_path: Path) -> None:
    run = make_run(methods.FedAvg(), tmp_path)
    client, carry = task_of(run)
    carry["personal"] = {k: v + 1 for k, v in run.params.items()}
    stage = Train(CrossEntropy(), LocalTraining(1, 8, SGD(1e-6)), start="personal", end="tuned")
    for form in (lean, pure):
        after = form(run, stage, carry, local.epochs(run.net, stage, client, 0))
        assert trees.distance(after["tuned"], carry["personal"]) < 1e-2
        assert "local" not in after


def test_a_stage_may_end_where_it_starts_and_be_pulled_to_there(tmp_path: Path) -> None:
    run = make_run(methods.FedAvg(), tmp_path)
    client, carry = task_of(run)
    stage = Train(
        CrossEntropy() + Proximal(5.0), LocalTraining(1, 8, SGD(0.05)), start="model", end="model"
    )
    results = [
        form(run, stage, carry, local.epochs(run.net, stage, client, 0))["model"]
        for form in (lean, pure)
    ]
    assert trees.distance(*results) < 1e-12


# ---- what objectives remember --------------------------------------------------------------------


@dataclass(frozen=True)
class Count(Objective):
    """A loss of zero that counts its calls."""

    def __call__(
        self, out: Output, params: trees.Tree, batch: Batch, carry: Carry
    ) -> tuple[Tensor, trees.Tree]:
        return out.logits.sum() * 0, {
            "calls": carry["aux"].get("calls", torch.zeros((), dtype=F64)) + 1
        }


def test_aux_comes_back_in_the_next_step(tmp_path: Path) -> None:
    run = make_run(methods.FedAvg(), tmp_path)
    client, carry = task_of(run)
    carry["aux"] = {"other": torch.tensor(7.0)}
    stage = Train(CrossEntropy() + Count(), LocalTraining(2, 8))
    steps = len(list(local.epochs(run.net, stage, client, 0)))
    assert steps > 2
    for form in (lean, pure):
        aux = form(run, stage, carry, local.epochs(run.net, stage, client, 0))["aux"]
        assert {k: v.item() for k, v in aux.items()} == {"other": 7.0, "calls": steps}
        assert not any(v.requires_grad for v in aux.values())


# ---- masks ---------------------------------------------------------------------------------------

HARD = LocalTraining(1, 8, Adam(0.05, weight_decay=0.1), clip=0.1)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(
        methods.FedAvg(), tmp_path_factory.mktemp("small"), options={"hidden": 5}, sizes=(20, 20)
    )


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_pruned_weights_are_exactly_zero_after_training(small: Run, data: st.DataObject) -> None:
    mask = {}
    for name in data.draw(st.sets(st.sampled_from(small.net.layout.params), min_size=1)):
        n = small.params[name].numel()
        bits = data.draw(st.integers(0, 2**n - 1))
        mask[name] = torch.tensor([bool(bits >> i & 1) for i in range(n)]).view(
            small.params[name].shape
        )
    client, carry = task_of(small, mask)
    stage = Train(CrossEntropy(), HARD)
    results = [
        form(small, stage, carry, local.epochs(small.net, stage, client, 0))["local"]
        for form in (lean, pure)
    ]
    for values in results:
        assert all(bool((values[k][~m] == 0).all()) for k, m in mask.items())
        assert all(bool(torch.isfinite(v).all()) for v in values.values())
    assert trees.distance(*results) < 1e-11


def test_a_mask_of_ones_changes_nothing(tmp_path: Path) -> None:
    run = make_run(methods.FedAvg(), tmp_path, net="bn-cnn2")
    whole = {k: torch.ones_like(v, dtype=torch.bool) for k, v in run.params.items()}
    stage = Train(CrossEntropy(), HARD)
    results = []
    for mask in (None, whole):
        client, carry = task_of(run, mask)
        results.append(lean(run, stage, carry, local.epochs(run.net, stage, client, 0))["local"])
    assert trees.identical(*results)


def test_clipping_measures_what_the_mask_leaves() -> None:
    # As in test_one_step_by_hand, gradient (-1, 1); the mask keeps the first: (-1, 0) has length 1,
    # so a clip of 1 leaves it whole and w = (0.1, 0). Clipped before masking it would be
    # (0.0707, 0).
    net = Net(nn.Linear(1, 2, bias=False).double(), (1,))
    batch = Batch(
        torch.full((1, 1), 2.0, dtype=F64),
        torch.tensor([0]),
        torch.ones(1, dtype=F64),
        *torch.zeros(2, 1),
    )
    packet = Packet(
        {"weight": torch.zeros(2, 1, dtype=F64)}, {"weight": torch.tensor([[True], [False]])}
    )
    carry = first_carry(Task(0, {"model": packet}), {}, F64)
    stage = Train(CrossEntropy(), LocalTraining(1, 1, SGD(0.1), clip=1.0))
    for after in both(net, stage, carry, batch):
        assert after["local"]["weight"].flatten().tolist() == pytest.approx([0.1, 0.0], abs=1e-15)


# ---- BatchNorm -----------------------------------------------------------------------------------


def test_batch_norm_statistics_move_per_client_and_inputs_stay(tmp_path: Path) -> None:
    run = make_run(methods.FedAvg(), tmp_path, net="bn-cnn2")
    buffers = run.net.layout.buffers
    assert buffers
    before = {k: v.clone() for k, v in run.params.items()}
    stage = Train(CrossEntropy(), LocalTraining(1, 8, SGD(1e-2)))
    moved = []
    for k in (0, 1):
        task = Task(k, {"model": Packet(run.params)})
        carry = first_carry(task, {}, F64)
        client = run.client(task, {})
        moved.append(
            trees.pick(
                lean(run, stage, carry, local.epochs(run.net, stage, client, 0))["local"], buffers
            )
        )
    start = trees.pick(before, buffers)
    assert all(not torch.equal(moved[0][k], start[k]) for k in buffers)
    assert all(not torch.equal(moved[0][k], moved[1][k]) for k in buffers)
    assert trees.identical(run.params, before)
    assert trees.identical(run.net.params(), before)


def test_running_statistics_by_hand() -> None:
    # One channel, inputs 1 and 3 (mean 2, unbiased variance 2), momentum 0.1:
    # mean 0.9 * 0 + 0.1 * 2 = 0.2, variance 0.9 * 1 + 0.1 * 2 = 1.1
    module = nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 2)).double()
    drop_batch_counters(module)
    net = Net(module, (1,))
    x = torch.tensor([[1.0], [3.0]], dtype=F64)
    y = torch.tensor([0, 1])
    batch = Batch(x, y, torch.ones(2, dtype=F64), torch.arange(2), torch.tensor(0))
    carry = first_carry(Task(0, {"model": Packet(net.params())}), {}, F64)
    stage = Train(CrossEntropy(), LocalTraining(1, 2, SGD(1e-9)))
    for after in both(net, stage, carry, batch):
        assert after["local"]["0.running_mean"].tolist() == pytest.approx([0.2], abs=1e-15)
        assert after["local"]["0.running_var"].tolist() == pytest.approx([1.1], abs=1e-15)


def test_a_client_with_one_example_and_batch_norm_trains_on_nothing(tmp_path: Path) -> None:
    run = make_run(methods.FedAvg(), tmp_path, net="bn-cnn2", sizes=(12, 1), cohort=2)
    client, carry = task_of(run)
    stage = Train(CrossEntropy(), replace(HARD, epochs=2))
    trained = lean(run, stage, carry, local.epochs(run.net, stage, client, 0))["local"]
    assert trees.identical(trained, run.params)


# ---- the forward pass somewhere else -------------------------------------------------------------


def halved(params: Tree, carry: Carry) -> Tree:
    """Half of every weight, and what the carry adds to it."""
    return {name: value / 2 + carry["shift"][name] for name, value in params.items()}


@pytest.mark.parametrize("form", [lean, pure])
def test_a_step_goes_straight_through(form, tmp_path: Path) -> None:
    """The gradient is taken at w/2 + s, and moves w itself: w - lr g(w/2 + s), not g(w), not g/2."""
    run = make_run(methods.FedAvg(), tmp_path)
    client, carry = task_of(run)
    carry["shift"] = {name: torch.full_like(value, 0.1) for name, value in run.params.items()}
    stage = Train(CrossEntropy(), LocalTraining(1, 32, SGD(0.1)), at=halved)
    trained = form(run, stage, carry, local.epochs(run.net, stage, client, 0))["local"]

    leaves = {}
    for name, value in run.params.items():
        leaves[name] = (value / 2 + 0.1).requires_grad_()
    # All of the client's examples are one batch.
    part = client.data.train
    loss = torch.nn.functional.cross_entropy(run.net(leaves, part.x, train=True).logits, part.y)
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    expected = {}
    for (name, value), gradient in zip(run.params.items(), gradients, strict=True):
        expected[name] = value - 0.1 * gradient
    assert trees.distance(trained, expected) < 1e-12


@pytest.mark.parametrize("form", [lean, pure])
def test_a_step_by_the_chain_rule(form, tmp_path: Path) -> None:
    """w - lr g(w/2 + s) / 2: what straight through moves, times the derivative of w/2 + s."""
    run = make_run(methods.FedAvg(), tmp_path)
    client, carry = task_of(run)
    carry["shift"] = {name: torch.full_like(value, 0.1) for name, value in run.params.items()}
    straight = Train(CrossEntropy(), LocalTraining(1, 32, SGD(0.1)), at=halved)
    chained = replace(straight, differentiate=True)
    moves = []
    for stage in (straight, chained):
        trained = form(run, stage, carry, local.epochs(run.net, stage, client, 0))["local"]
        moves.append(trees.sub(trained, run.params))
    assert trees.distance(trees.map(lambda move: move / 2, moves[0]), moves[1]) < 1e-12
    assert float(trees.sq_norm(moves[1])) > 1e-6


@dataclass(frozen=True)
class Waning(Objective):
    """A loss of which less counts with every step; the first share comes from ``begin``."""

    def begin(self, params: Tree, carry: Carry) -> Tree:
        return {"share": carry["first"]["share"]}

    def __call__(
        self, out: Output, params: Tree, batch: Batch, carry: Carry
    ) -> tuple[Tensor, Tree]:
        share = carry["aux"]["share"]
        loss, _ = CrossEntropy()(out, params, batch, carry)
        return share * loss, {"share": share / 2}


@pytest.mark.parametrize("form", [lean, pure])
def test_what_an_objective_begins_with(form, tmp_path: Path) -> None:
    """Two steps of one batch each: shares 0.5 and 0.25, then 0.125 is left."""
    run = make_run(methods.FedAvg(), tmp_path)
    client, carry = task_of(run)
    carry["first"] = {"share": torch.tensor(0.5, dtype=F64)}
    stage = Train(Waning(), LocalTraining(2, 32, SGD(0.1)))
    after = form(run, stage, carry, local.epochs(run.net, stage, client, 0))
    assert float(after["aux"]["share"]) == 0.125

    leaves = {name: value.clone().requires_grad_() for name, value in run.params.items()}
    part = client.data.train
    for share in (0.5, 0.25):
        logits = run.net(leaves, part.x, train=True).logits
        loss = torch.nn.functional.cross_entropy(logits, part.y)
        gradients = torch.autograd.grad(loss, list(leaves.values()))
        stepped = {}
        for (name, value), gradient in zip(leaves.items(), gradients, strict=True):
            stepped[name] = (value - 0.1 * share * gradient).detach().requires_grad_()
        leaves = stepped
    expected = {name: value.detach() for name, value in leaves.items()}
    assert trees.distance(after["local"], expected) < 1e-12


# ---- what stays as it is -------------------------------------------------------------------------


@pytest.mark.parametrize("net", ["mlp", "bn-cnn2"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_frozen_keeps_its_bits_and_the_rest_trains(
    recipe: str, net: str, tmp_path: Path
) -> None:
    """Also under weight decay and momentum, and the statistics of a norm layer with its scale."""
    run = make_run(methods.FedAvg(local=RECIPES[recipe]), tmp_path, net=net)
    names = run.net.layout.first(2)
    stage = Train(CrossEntropy(), RECIPES[recipe], frozen="fixed")
    client, carry = task_of(run)
    carry["fixed"] = trees.pick(carry["model"], names)
    found = []
    for form in (lean, pure):
        batches = local.epochs(run.net, stage, client, 0)
        found.append(form(run, stage, carry, batches)["local"])
    for after in found:
        assert trees.identical(trees.pick(after, names), carry["fixed"])
        moved = [k for k in after if not torch.equal(after[k], carry["model"][k])]
        assert set(moved) == set(after) - set(names)
    assert trees.distance(*found) < 1e-12


def test_clipping_overlooks_what_is_frozen() -> None:
    # One line: outputs w x + b at x = 1, squared distance to 0 by hand. w = 3, b = 4 give a gradient
    # of (14, 14) for (w, b). With w frozen the length is 14, and b moves by lr * clip = 0.5.
    net = Net(nn.Linear(1, 1).double(), (1,))
    start = {"weight": torch.full((1, 1), 3.0).double(), "bias": torch.full((1,), 4.0).double()}
    recipe = LocalTraining(1, 1, SGD(0.5), clip=1.0)
    one = torch.ones(1, 1, dtype=F64)
    batch = Batch(one, one, one[0], torch.arange(1), torch.tensor(0))
    carry: Carry = {"model": start, "aux": {}, "settings": {"round": torch.tensor(0.0)}}
    carry["fixed"] = {"weight": start["weight"]}
    stage = Train(SquaredOutput(), recipe, frozen="fixed")
    for after in (
        local.train(net, stage, carry, [batch]),
        local.step(net, stage, local.start_training(net, stage, carry), batch),
    ):
        assert float(after["local"]["bias"]) == pytest.approx(3.5)
        assert float(after["local"]["weight"]) == 3


def linear(w: tuple[float, float], **more: trees.Tree) -> tuple[Net, Batch, Carry]:
    """Two weights, one example x = 1 of class 0, in double precision."""
    net = Net(nn.Linear(1, 2, bias=False).double(), (1,))
    one = torch.ones(1, dtype=F64)
    batch = Batch(one[:, None], torch.tensor([0]), one, torch.arange(1), torch.tensor(0))
    start = {"weight": torch.tensor(w, dtype=F64)[:, None]}
    settings = {"round": torch.tensor(0.0, dtype=F64)}
    carry: Carry = {"model": start, "aux": {}, "settings": settings, **more}
    return net, batch, carry


def weights(tree: trees.Tree) -> list[float]:
    found: list[float] = tree["weight"].flatten().tolist()
    return found


def test_a_kept_velocity_is_0_where_the_mask_is_by_hand() -> None:
    """w = (0, 3), velocity (4, 4) of earlier rounds; the mask prunes the second weight.

    At (0, 0) p = (1/2, 1/2), so the gradient is (-1/2, 1/2) and masked (-1/2, 0). Momentum .5:
    v = (.5 * 4 - 1/2, 0) = (1.5, 0), and lr .1: w = (-.15, 0). With the old velocity the pruned
    weight would have become -.2.
    """
    mask = {"weight": torch.tensor([[True], [False]])}
    kept = {"weight": torch.full((2, 1), 4.0, dtype=F64)}
    net, batch, carry = linear((0.0, 3.0), **{"model.mask": mask, "optimiser.v": kept})
    stage = Train(CrossEntropy(), LocalTraining(1, 1, SGD(0.1, momentum=0.5), keep_state=True))
    in_place, pure = both(net, stage, carry, batch)
    for after in (in_place, pure):
        assert weights(after["local"]) == pytest.approx([-0.15, 0], abs=1e-15)
    assert weights(in_place["optimiser.v"]) == pytest.approx([1.5, 0])
    assert pure[local.OPTIMISER]["v"].tolist() == pytest.approx([1.5, 0])
    # What the client remembers is not written into.
    assert weights(kept) == [4, 4]


def test_adams_step_counter_goes_on_by_hand() -> None:
    """After one step of a gradient of 0 (t = 1, m = v = 0) comes one of (-1/2, 1/2).

    betas .5 and .75: m = (-1/4, 1/4), v = (1/16, 1/16); with t = 2 m / (1 - .25) = -1/3 and
    v / (1 - .5625) = 1/7: w moves by lr * 1/3 * sqrt 7. Reset, t = 1, it would move by lr.
    """
    zeros = {"weight": torch.zeros(2, 1, dtype=F64)}
    state = {
        "optimiser.m": zeros,
        "optimiser.v": zeros,
        "optimiser.t": {"t": torch.tensor(1.0, dtype=F64)},
    }
    net, batch, carry = linear((0.0, 0.0), **state)
    rule = Adam(0.1, beta1=0.5, beta2=0.75, eps=1e-12)
    stage = Train(CrossEntropy(), LocalTraining(1, 1, rule, keep_state=True))
    in_place, pure = both(net, stage, carry, batch)
    moved = 0.1 * 7**0.5 / 3
    for after in (in_place, pure):
        assert weights(after["local"]) == pytest.approx([moved, -moved])
    assert float(in_place["optimiser.t"]["t"]) == float(pure[local.OPTIMISER]["t"]) == 2
    assert float(state["optimiser.t"]["t"]) == 1
    reset = replace(stage, local=replace(KEEPS_NOTHING, optimiser=rule))
    for after in both(net, reset, linear((0.0, 0.0))[2], batch):
        assert weights(after["local"]) == pytest.approx([0.1, -0.1])


KEEPS_NOTHING = LocalTraining(1, 1)


def test_a_state_that_does_not_fit_is_not_used() -> None:
    net, _, carry = linear((0.0, 0.0))
    stage = Train(CrossEntropy(), LocalTraining(1, 1, Adam(0.1), keep_state=True))
    place = local.place_of_state("train:evidence", 1)
    assert place == "optimiser.train.1."
    ones = {"weight": torch.ones(2, 1, dtype=F64)}
    counted = {"t": torch.tensor(5.0, dtype=F64)}
    kept = {f"{place}m": ones, f"{place}v": ones, f"{place}t": counted}
    found = local.find_state(net, stage, carry, kept, place)
    assert found == {"optimiser.m": ones, "optimiser.v": ones, "optimiser.t": counted}
    other_shape = {"weight": torch.ones(3, 1, dtype=F64)}
    for wrong in (
        {f"{place}m": ones},
        {**kept, f"{place}v": other_shape},
        {**kept, f"{place}v": {"other": ones["weight"]}},
        {name.replace("train", "probe"): tree for name, tree in kept.items()},
    ):
        first = local.find_state(net, stage, carry, wrong, place)
        assert weights(first["optimiser.m"]) == weights(first["optimiser.v"]) == [0, 0]
        assert float(first["optimiser.t"]["t"]) == 0
    resets = replace(stage, local=LocalTraining(1, 1, Adam(0.1)))
    assert local.find_state(net, resets, carry, kept, place) == {}


def halve(params: Tree, carry: Carry) -> Tree:
    """A projection that a test can follow."""
    return {name: leaf / 2 for name, leaf in params.items()}


def test_a_projection_comes_before_every_step_by_hand() -> None:
    """w = (2 ln 3, 0) is halved to (ln 3, 0): p = (3/4, 1/4), gradient (-1/4, 1/4).

    With lr 1 w = (ln 3 + 1/4, -1/4). No batch: no step, and nothing is halved.
    """
    net, batch, carry = linear((2 * math.log(3), 0.0))
    stage = Train(CrossEntropy(), LocalTraining(1, 1, SGD(1.0)), project=halve)
    for after in both(net, stage, carry, batch):
        assert weights(after["local"]) == pytest.approx([math.log(3) + 0.25, -0.25])
    assert weights(local.train(net, stage, carry, [])["local"]) == [2 * math.log(3), 0]
    assert weights(carry["model"]) == [2 * math.log(3), 0]


@dataclass(frozen=True)
class SquaredOutput(Objective):
    """The square of the output."""

    def __call__(
        self, out: Output, params: Tree, batch: Batch, carry: Carry
    ) -> tuple[Tensor, Tree]:
        return (out.logits**2).sum(), {}
