"""Blocks and gates of pFedGate by hand, and the knapsack against one that goes block by block."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.func import vmap

from fedgrove.core import Batch, Train
from fedgrove.errors import InputError
from fedgrove.methods.pfedgate import (
    Cut,
    GatedLoss,
    GatingLayer,
    PFedGate,
    batch_scores,
    check_budget,
    chosen,
    cuts,
    least_score,
    make_gates,
    scaled,
    sizes_of,
    spread_out,
    summed_scores,
)
from fedgrove.nets import Net
from fedgrove.parts import local
from fedgrove.parts.local import SGD, LocalTraining


def plan(*sizes_by_weight):
    """Weights of the given block sizes; the first block's size is that of all but the last."""
    found = []
    first = 0
    for sizes in sizes_by_weight:
        found.append(Cut(f"w{len(found)}", (sum(sizes),), first, len(sizes), sizes[0]))
        first += len(sizes)
    return tuple(found)


def test_weights_are_cut_into_blocks_of_one_size_the_last_shorter():
    net = Net(nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 1)), (5,))
    # 25 in 10: ceil(25/10) = 3 numbers, ceil(25/3) = 9 blocks, the last with 25 - 8 * 3 = 1.
    # 5 in 10: no more blocks than numbers.
    one, other = cuts(net.layout, 10)
    assert (one.name, one.first, one.count, one.size) == ("0.weight", 0, 9, 3)
    assert one.sizes == (3,) * 8 + (1,)
    assert (other.name, other.first, other.count, other.size) == ("1.weight", 9, 5, 1)
    assert sum(sizes_of((one, other))) == 30


def test_a_value_for_each_block_is_one_for_each_weight():
    tree = spread_out(torch.tensor([1.0, 2.0, 3.0]), (Cut("w", (2, 4), 0, 3, 3),))
    assert tree["w"].tolist() == [[1, 1, 1, 2], [2, 2, 3, 3]]


def test_the_knapsack_by_hand():
    # Two weights, blocks of 4, 4, 2 and of 1, 1; in all 12. The first of each, 4 and 1, stay.
    blocks = plan((4, 4, 2), (1, 1))
    scores = torch.tensor([0.1, 0.8, 0.5, 0.1, 0.15])
    # Worth per number: -, .2, .25, -, .15. Budget 7/12: 5 are spent, 2 left: the block of 2.
    assert chosen(scores, blocks, 7 / 12).tolist() == [True, False, True, True, False]
    # 8/12: 3 left: the block of 2; that of 4 does not fit, and is passed over; that of 1 fits.
    assert chosen(scores, blocks, 8 / 12).tolist() == [True, False, True, True, True]
    # 11/12: 6 left: 2 and 4. All: all.
    assert chosen(scores, blocks, 11 / 12).tolist() == [True, True, True, True, False]
    assert chosen(scores, blocks, 1.0).tolist() == [True] * 5


def test_of_equal_blocks_the_earlier_one():
    blocks = plan((2, 2, 2, 2))
    assert chosen(torch.full((4,), 0.5), blocks, 0.5).tolist() == [True, True, False, False]


@given(
    budget=st.floats(0.4, 1.0),
    seed=st.integers(0, 999),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3),
)
def test_blocks_in_use_are_within_the_budget_and_no_more_of_them_would_be(budget, seed, sizes):
    blocks = plan(*((size,) * 3 for size in sizes))
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(3 * len(sizes), generator=generator)
    taken = chosen(scores, blocks, budget)
    numbers = torch.tensor(sizes_of(blocks), dtype=torch.float64)
    room = budget * numbers.sum() - numbers[taken].sum()
    assert room >= -1e-9
    assert all(bool(taken[cut.first]) for cut in blocks)
    for left_out in numbers[~taken]:
        assert left_out > room


@given(
    budget=st.floats(0.1, 1.0),
    seed=st.integers(0, 999),
    weights=st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=5), min_size=1, max_size=5),
)
def test_size_by_size_is_block_by_block(budget, seed, weights):
    """The paper's greedy rule, one block after another; blocks of one weight have one size."""
    blocks = plan(*((sizes[0],) * (len(sizes) - 1) + (min(sizes),) for sizes in weights))
    sizes = sizes_of(blocks)
    # Ties too.
    scores = torch.randint(0, 4, (len(sizes),), generator=torch.Generator().manual_seed(seed)) / 4
    first = {cut.first for cut in blocks}
    room = budget * sum(sizes) + 1e-9
    expected = [False] * len(sizes)
    worth = [math.inf if i in first else float(scores[i]) / sizes[i] for i in range(len(sizes))]
    for i in sorted(range(len(sizes)), key=lambda i: -worth[i]):
        if sizes[i] <= room:
            room -= sizes[i]
            expected[i] = True
    assert chosen(scores, blocks, budget).tolist() == expected


@given(seed=st.integers(0, 999), budget=st.floats(0.3, 1.0))
def test_with_blocks_of_one_size_greedy_is_the_best_there_is(seed, budget):
    blocks = plan((3, 3, 3, 3), (3, 3))
    scores = torch.rand(6, generator=torch.Generator().manual_seed(seed))
    if budget * 18 < 6:
        return
    best = 0.0
    for choice in itertools.product((0.0, 1.0), repeat=6):
        keeps_first = choice[0] and choice[4]
        if keeps_first and 3 * sum(choice) <= budget * 18 + 1e-9:
            best = max(best, float((torch.tensor(choice) * scores).sum()))
    assert float(scores[chosen(scores, blocks, budget)].sum()) == pytest.approx(best)


def test_clients_choose_at_once_as_they_would_alone():
    blocks = plan((4, 4, 2), (1, 1))
    scores = torch.rand(7, 5, generator=torch.Generator().manual_seed(0))
    together = vmap(lambda s: chosen(s, blocks, 0.6))(scores)
    alone = torch.stack([chosen(s, blocks, 0.6) for s in scores])
    assert torch.equal(together, alone)


def test_a_budget_below_the_first_blocks_is_refused():
    blocks = plan((4, 4, 2), (1, 1))
    check_budget(blocks, 5 / 12)
    with pytest.raises(InputError, match=r"these are 5 of 12 weights: give 0\.417 or more"):
        check_budget(blocks, 0.4)


# ---- the gating layer ----------------------------------------------------------------------------


def batch(x, y, weight):
    count = len(x)
    return Batch(x, torch.tensor(y), torch.tensor(weight), torch.arange(count), torch.tensor(0))


def test_scores_of_a_batch_leave_padding_out():
    # sigmoid(0) = .5, sigmoid(ln 3) = .75; the third row is padding.
    ln3 = torch.log(torch.tensor(3.0))
    logits = torch.stack([torch.zeros(2), torch.stack([ln3, -ln3]), torch.full((2,), 99.0)])
    scores = batch_scores(logits, torch.tensor([1.0, 1.0, 0.0]))
    assert scores.tolist() == pytest.approx([0.625, 0.375])


def test_scores_are_summed_over_examples():
    net = Net(GatingLayer(2, 3), (2,))
    tree = {name: torch.zeros_like(leaf) for name, leaf in net.params().items()}
    sums = summed_scores(net, tree, batch(torch.randn(3, 2), [0, 0, 0], [1.0, 1.0, 0.0]), {})
    assert sums["sum"].tolist() == [1.0, 1.0, 1.0]
    assert float(sums["examples"]) == 2


def test_gates_are_scores_of_blocks_in_use_by_hand():
    """Two blocks of 1 of two weights each; the first of each stays, half fit: the others are out.

    The least score of 5 blocks is .2. The score .75 has the gradient 1 + .75, the score .1, which is
    below the least, 1; a block that is not in use has none.
    """
    blocks = plan((1, 1), (1, 1))
    scores = torch.tensor([0.75, 0.9, 0.1, 0.8], requires_grad=True)
    gates = make_gates(scores, blocks, 0.5, least_score(5, 0.5))
    assert gates.tolist() == pytest.approx([0.75, 0, 0.1, 0])
    (slope,) = torch.autograd.grad(gates.sum(), [scores])
    assert slope.tolist() == pytest.approx([1.75, 0, 1, 0])


def test_the_gates_gradient_goes_straight_through():
    """Of the loss of a model of two blocks, its rows; the first one stays, the second one is out.

    The score of the first is sigmoid(ln 3) = .75, so logits are (.75, 0), and its derivative by the
    gating layer's logit is .75 * .25; that of the gate by the score 1 + .75.
    """
    model = Net(nn.Linear(2, 2, bias=False), (2,))
    gate = Net(GatingLayer(2, 2), (2,))
    nets = {"model": model, "gate": gate}
    gate.nets = nets
    model.nets = nets
    weight = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    tree = {name: torch.zeros_like(leaf) for name, leaf in gate.params().items()}
    tree["linear.bias"] = torch.tensor([math.log(3), 5.0])
    tree = {name: leaf.requires_grad_() for name, leaf in tree.items()}
    x = torch.tensor([[1.0, 1.0]])
    one = batch(x, [0], [1.0])
    loss, _ = GatedLoss(2, 0.5)(gate(tree, x, train=True), tree, one, {"model": {"weight": weight}})
    assert loss.item() == pytest.approx(math.log1p(math.exp(-0.75)))
    (bias,) = torch.autograd.grad(loss, [tree["linear.bias"]])
    p = 1 / (1 + math.exp(-0.75))
    assert bias.tolist() == pytest.approx([(p - 1) * 1 * 1.75 * 0.75 * 0.25, 0], abs=1e-7)


def test_the_model_trains_under_its_gates_by_hand():
    """Weights (ln 9, 5), gates (.5, 0): logits (ln 3, 0), p = (3/4, 1/4).

    By the first weight the gradient is -1/4 * .5: with lr 1 it becomes ln 9 + 1/8. The second one is
    masked.
    """
    net = Net(nn.Linear(1, 2, bias=False), (1,))
    recipe = LocalTraining(1, 1, SGD(1.0))
    trains = [s for s in PFedGate(local=recipe).work("train") if isinstance(s, Train)]
    stage = trains[1]
    assert stage.at is scaled
    carry = {
        "model": {"weight": torch.tensor([[math.log(9)], [5.0]])},
        "chosen": {"weight": torch.tensor([[True], [False]])},
        "gates": {"weight": torch.tensor([[0.5], [0.0]])},
        "settings": {"round": torch.tensor(0.0)},
        "aux": {},
    }
    one = batch(torch.ones(1, 1), [0], [1.0])
    lean = local.train(net, stage, carry, [one])
    pure = local.step(net, stage, local.start_training(net, stage, carry), one)
    for trained in (lean, pure):
        weight = trained["local"]["weight"].flatten().tolist()
        assert weight == pytest.approx([math.log(9) + 0.125, 0])


def test_a_gate_for_every_prunable_weight():
    net = Net(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), (4,))
    scores = torch.tensor([0.1, 0.9, 0.2, 0.3, 0.1, 0.8, 0.7, 0.2])
    gates = PFedGate(blocks=4)._gates(scores, net.layout)
    # 16 of 32: the first rows, then the rows of .9 and .8.
    assert gates["0.weight"][:, 0].tolist() == pytest.approx([0.1, 0.9, 0, 0])
    assert gates["1.weight"][:, 3].tolist() == pytest.approx([0.1, 0.8, 0, 0])
