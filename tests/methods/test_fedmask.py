"""FedMask: hard masks and their gradient, scores, parts, the vote, and what stays frozen, by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.conftest import make_run, play, remembered
from tests.contract import Contract

from fedgrove import trees
from fedgrove.core import Packet, Report
from fedgrove.engines import Serial
from fedgrove.engines.work import perform
from fedgrove.errors import FedgroveError, InputError
from fedgrove.methods.fedmask import (
    FedMask,
    State,
    bits,
    hard,
    majority,
    masked_network,
    one_shot,
    rescaled,
    scores_from,
)
from fedgrove.nets import Net
from fedgrove.parts.local import SGD, LocalTraining
from fedgrove.parts.one_model import sent_with_own_mask
from fedgrove.runs.gate import Gate
from fedgrove.runs.rounds import plan, plan_scoring

CONTRACT = Contract(
    trains_weights=False,
    why_no_liar_spoils_it="its server sends bits, whatever is reported",
    sends_masks=True,
    # 5056 weights, one bit each, down and up.
    paper_bytes=2 * 5056 / 8 * 3 * 50,
    refused_with_privacy="mask of 'bits'",
)


def flags(*values: int) -> torch.Tensor:
    return torch.tensor(values).bool()


def test_a_hard_mask_by_hand() -> None:
    """sigmoid'(0) = 1/4, sigmoid'(ln 3) = 3/4 * 1/4; a score of exactly 0 counts."""
    s = torch.tensor([0.0, 3.0, 1 / 3], dtype=torch.float64)
    s[1:] = s[1:].log()
    s.requires_grad_()
    mask = hard(s)
    assert mask.tolist() == [1.0, 1.0, 0.0]
    (gradient,) = torch.autograd.grad(mask.sum(), s)
    assert gradient.tolist() == pytest.approx([1 / 4, 3 / 16, 3 / 16])


def test_the_forward_pass_by_hand() -> None:
    """Weights 5, 6, 7: one masked by its score, one outside the part; the bias as it was drawn.

    d/ds of the sum: 5/4 and 6/4 by the chain rule, 0 outside the part, and none for the bias.
    """
    params = {"w": torch.tensor([1e-9, -1e-9, 1e-9]), "b": torch.tensor([99.0])}
    for leaf in params.values():
        leaf.requires_grad_()
    frozen = {"w": torch.tensor([5.0, 6.0, 7.0]), "b": torch.tensor([8.0])}
    weights = masked_network(params, {"frozen": frozen, "part": {"w": flags(1, 1, 0)}})
    assert weights["w"].tolist() == [5.0, 0.0, 0.0]
    assert weights["b"].tolist() == [8.0]
    total = weights["w"].sum() + weights["b"].sum()
    moved, still = torch.autograd.grad(total, [params["w"], params["b"]], allow_unused=True)
    assert moved.tolist() == pytest.approx([5 / 4, 6 / 4, 0.0])
    assert still is None


def test_scores_by_hand() -> None:
    """A quarter up where the server's bit is 1, and down where it is 0; signs may stay."""
    own = {"w": torch.tensor([0.5, -0.5, 0.5, -0.5, 0.0])}
    scores = scores_from(own, {"w": flags(1, 0, 0, 1, 1)}, 0.25)
    assert scores["w"].tolist() == [0.75, -0.75, 0.25, -0.25, 0.25]


def test_a_part_and_its_bits_by_hand() -> None:
    """Half of four: the scores 2 and 1, the first of two equal ones; then only what is not below 0."""
    scores = {"w": torch.tensor([1.0, 2.0, -3.0, 1.0])}
    part = one_shot(scores, 0.5)
    assert torch.equal(part["w"], flags(1, 1, 0, 0))
    later = {"w": torch.tensor([-1.0, 2.0, 5.0, 1.0])}
    assert torch.equal(bits(later, part)["w"], flags(0, 1, 0, 0))


def test_rescaling_by_hand() -> None:
    """Four inputs at density 1/2: variance 2 / (4/2) = 1. Weights of size 1/2 are doubled."""
    weight = torch.tensor([[0.5, -0.5, 0.5, 0.5]])
    assert rescaled(weight, 0.5).tolist() == [[1.0, -1.0, 1.0, 1.0]]
    assert rescaled(torch.zeros(1, 4), 0.5).tolist() == [[0.0] * 4]


def test_the_vote_by_hand() -> None:
    """Weights 0 and 1: (1 * 1 + 3 * 0) / 4 = .25 and 1. Weight 2: only client 0 may use it, 1 of 1.

    Weight 3: nobody may; what was voted before stays.
    """
    method = FedMask()
    state = State(4, {"w": torch.tensor([1.0, 0.0, 0.0, 0.5])})
    first = Packet({"w": flags(1, 1, 1, 0)}, {"w": flags(1, 1, 1, 0)})
    second = Packet({"w": flags(0, 1, 0, 0)}, {"w": flags(1, 1, 0, 0)})
    answers = [Report(0, {"bits": first}, 1), Report(1, {"bits": second}, 3)]
    after = method.fold(state, answers)
    assert after.votes["w"].tolist() == [0.25, 1.0, 1.0, 0.5]
    assert after.round == 5
    assert torch.equal(majority(after.votes)["w"], flags(0, 1, 1, 1))
    assert torch.equal(method.deliver(after, 7)["bits"].values["w"], flags(0, 1, 1, 1))


def test_a_step_by_hand(tmp_path: Path) -> None:
    """s - lr dL/dw w sigmoid'(s), the gradient at the masked network; biases stay."""
    method = FedMask(scale=0.5, rescale=False, local=LocalTraining(1, 32, SGD(0.1)))
    run = make_run(method, tmp_path, cohort=1)
    (task,) = plan(run, run.initial_state)
    _, kept = perform(run, task, {})

    leaves = {name: value.clone().requires_grad_() for name, value in run.params.items()}
    part = run.federation.clients[task.to].train
    # At first every weight is in use; all of the client's examples are one batch.
    logits = run.net(leaves, part.x, train=True).logits
    loss = torch.nn.functional.cross_entropy(logits, part.y)
    slope = float(torch.sigmoid(torch.tensor(0.5)) * torch.sigmoid(torch.tensor(-0.5)))
    for name in run.net.layout.prunable:
        (gradient,) = torch.autograd.grad(loss, leaves[name], retain_graph=True)
        expected = 0.5 - 0.1 * gradient * run.params[name] * slope
        torch.testing.assert_close(kept["scores"][name], expected, rtol=0, atol=1e-7)
    assert set(kept["scores"]) == set(run.net.layout.prunable)


def test_a_client_prunes_once(tmp_path: Path) -> None:
    """Half of each layer after its first round, and never again; what it sends lies within."""
    run = make_run(FedMask(density=0.5), tmp_path, cohort=4, rounds=1)
    state = play(run, Serial())
    first = {k: v for k, v in remembered(run).items() if "/part/" in k}
    for name in run.net.layout.prunable:
        part = first[f"2/part/{name}"]
        assert int(part.sum()) == round(part.numel() / 2)
    assert not torch.equal(
        first["1/part/" + run.net.layout.prunable[0]], first["2/part/" + run.net.layout.prunable[0]]
    )
    (task, *_) = plan(run, state)
    memory = run.memory.read(task.to, run.memory.files[task.to])
    report, kept = perform(run, task, memory)
    assert trees.identical(kept["part"], memory["part"])
    packet = report.give["bits"]
    for name, leaf in packet.values.items():
        assert leaf.dtype == torch.bool
        assert not bool((leaf & ~memory["part"][name]).any())
        # No layer is cut off.
        assert int(leaf.sum()) > 0


def test_a_client_uses_the_initial_weights_under_its_own_mask(tmp_path: Path) -> None:
    run = make_run(FedMask(rescale=False), tmp_path, net="bn-cnn2", cohort=4, rounds=2)
    state = play(run, Serial())
    for task in plan_scoring(run, state):
        memory = run.memory.read(task.to, run.memory.files[task.to])
        client = run.client(task, memory)
        carry = {**memory, **{name: packet.values for name, packet in task.send.items()}}
        used = run.method._use(carry, client)
        mask = bits(memory["scores"], memory["part"])
        assert trees.identical(used["model.mask"], mask)
        expected = trees.apply_mask(run.params, mask)
        params = run.net.layout.params
        assert trees.identical(trees.pick(used["model"], params), trees.pick(expected, params))
        # Its own running statistics, which its weights cannot do without.
        for name in run.net.layout.buffers:
            assert torch.equal(used["model"][name], memory["statistics"][name])
            assert not torch.equal(used["model"][name], run.params[name])


def test_two_rounds_cost_about_a_bit_a_weight(tmp_path: Path) -> None:
    """Down a bit a weight; up half of that, and in the first round also which half it is."""
    run = make_run(FedMask(), tmp_path, dtype=torch.float32, cohort=1, sizes=(20,))
    weights = run.net.layout.count(run.net.layout.prunable)
    for state in (run.initial_state, State(1, run.initial_state.votes)):
        ((_, answer),) = Serial().map([(run, task) for task in plan(run, state)])
        assert sum(answer.cost["up"].values()) < 1.1 * 1.5 * weights / 8
        assert sum(answer.cost["down"].values()) < 1.1 * weights / 8 + 60


def test_a_reply_that_holds_no_bits_is_refused(tmp_path: Path) -> None:
    """Numbers in place of bits would outvote everybody."""
    run = make_run(FedMask(), tmp_path, cohort=1)
    (task,) = plan(run, run.initial_state)
    report, _ = perform(run, task, {})
    info = run.federation.clients[task.to].info
    expected = sent_with_own_mask(task, run.net)
    assert Gate().refuses(report, task, expected, info) is None
    packet = report.give["bits"]
    loud = Packet(trees.map(lambda leaf: 1e9 * leaf.double(), packet.values), packet.mask)
    refusal = Gate().refuses(
        Report(report.of, {"bits": loud}, report.examples), task, expected, info
    )
    assert refusal is not None
    assert refusal.reason == "tensors"


def test_it_learns(tmp_path: Path) -> None:
    """Masks alone lower the loss on a client's own data."""
    run = make_run(FedMask(local=LocalTraining(20, 8)), tmp_path, sizes=(60,), cohort=1, rounds=4)
    part = run.federation.clients[0].train

    def loss(state: State) -> float:
        (task,) = plan_scoring(run, state)
        version = run.memory.files.get(0)
        memory = run.memory.read(0, version) if version else {}
        client = run.client(task, memory)
        carry = {**memory, **{name: packet.values for name, packet in task.send.items()}}
        model = run.method._use(carry, client)["model"]
        logits = run.net(model, part.x, train=False).logits
        return float(torch.nn.functional.cross_entropy(logits, part.y))

    before = loss(run.initial_state)
    assert loss(play(run, Serial())) < 0.7 * before


def test_a_network_without_weights_to_mask_is_refused(tmp_path: Path) -> None:
    class Shift(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = torch.nn.Parameter(torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.shift

    run = make_run(FedMask(density=1.0), tmp_path)
    start = run.setup
    net = Net(Shift(), (3,))
    with pytest.raises(FedgroveError, match="it has no weights that can be pruned"):
        FedMask(density=1.0).init(type(start)(net.params(), net, start.clients, 1, start.fresh))


@pytest.mark.parametrize("words", [{"density": 0.0}, {"density": 1.1}, {"scale": 0.0}])
def test_bad_values_are_refused(words) -> None:
    (name,) = words
    with pytest.raises(InputError, match=f"{name} is .*; it must be"):
        FedMask(**words)


def test_new_and_old_clients_have_the_same_trees(tmp_path: Path) -> None:
    """So that they train in one stack."""
    run = make_run(FedMask(), tmp_path, cohort=1)
    (task,) = plan(run, run.initial_state)
    _, memory = perform(run, task, {})
    names = []
    for held in ({}, memory):
        carry = {**held, "bits": task.send["bits"].values}
        names.append(set(run.method._begin(carry, run.client(task, held))))
    assert names[0] == names[1]
