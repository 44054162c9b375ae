from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from tests.conftest import make_run, play, remembered, reports
from tests.contract import Contract

import fedgrove
from fedgrove import trees
from fedgrove.core import Packet
from fedgrove.engines import Serial
from fedgrove.engines.work import perform
from fedgrove.errors import InputError
from fedgrove.methods import PFedGate
from fedgrove.methods.pfedgate import cuts, recovered
from fedgrove.parts.local import SGD, LocalTraining
from fedgrove.runs.rounds import plan, plan_scoring

CONTRACT = Contract(
    off=PFedGate(budget=1.0),
    sends_masks=True,
    # All down; up half of the 5056 weights and 131 biases.
    paper_bytes=4 * (5187 + 2528 + 131) * 3 * 50,
    refused_with_privacy="mask of 'model'",
)


def test_blocks_that_a_client_does_not_use_count_as_they_were():
    packet = Packet(
        {"w": torch.tensor([5.0, 0.0]), "b": torch.tensor([3.0])},
        {"w": torch.tensor([True, False])},
    )
    whole = recovered(packet, {"w": torch.tensor([1.0, 2.0]), "b": torch.tensor([0.0])})
    assert whole["w"].tolist() == [5.0, 2.0]
    assert whole["b"].tolist() == [3.0]


def test_the_mean_by_hand(tmp_path: Path):
    """w + sum_k n_k (w_k - w M_k) / sum_k n_k, on every weight, from what clients sent."""
    run = make_run(PFedGate(), tmp_path, rounds=1)
    state = run.initial_state
    answers = list(reports(run, Serial(), plan(run, state)))
    after = run.method.fold(state, answers)
    examples = sum(report.examples for report in answers)
    for name in run.net.layout.prunable:
        moved = torch.zeros_like(state.model[name])
        for report in answers:
            packet = report.give["model"]
            kept = state.model[name] * packet.mask[name]
            moved += report.examples * (packet.values[name] - kept) / examples
        assert torch.allclose(after.model[name], state.model[name] + moved, atol=1e-12)


def test_only_blocks_within_the_budget_travel_and_the_gate_stays(tmp_path: Path):
    run = make_run(PFedGate(budget=0.4, gate=LocalTraining(1, 8, SGD(5.0))), tmp_path, rounds=1)
    (task, *_) = plan(run, run.initial_state)
    report, memory = perform(run, task, {})
    packet = report.give["model"]
    assert set(packet.mask) == set(run.net.layout.prunable)
    kept = sum(int(mask.sum()) for mask in packet.mask.values())
    assert 0.2 * 5056 < kept <= 0.4 * 5056
    assert set(memory) == {"gate", "scores"}
    # The gating layer has been trained.
    assert trees.distance(memory["gate"], run.nets["gate"].params()) > 1e-4


def test_a_client_goes_on_with_its_own_gate_and_uses_the_blocks_it_chose(tmp_path: Path):
    run = make_run(PFedGate(), tmp_path, cohort=4, rounds=2)
    state = play(run, Serial())
    for task in plan_scoring(run, state):
        report, _ = perform(run, task, {})
        # Without a gate all of the shared model.
        assert report.metrics["density"] == 1.0
    for report in reports(run, Serial(), plan_scoring(run, state)):
        assert 0.3 < report.metrics["density"] <= 0.5
    kept = remembered(run)
    gates = [kept[f"{k}/gate/linear.weight"] for k in range(4)]
    for one, other in itertools.combinations(gates, 2):
        assert not torch.allclose(one, other, atol=1e-4)


def test_a_client_uses_its_blocks_times_their_scores(tmp_path: Path):
    run = make_run(PFedGate(), tmp_path, rounds=1)
    (task, *_) = plan(run, run.initial_state)
    _, memory = perform(run, task, {})
    client = run.client(task, memory)
    carry = {**memory, "model": run.params, "aux": {}}
    used = run.work("use")[0].f(carry, client)
    for cut in cuts(run.net.layout, 5):
        scores = memory["scores"]["mean"][cut.first : cut.first + cut.count]
        for number, block in enumerate(used["model"][cut.name].flatten().split(cut.size)):
            begin = number * cut.size
            whole = run.params[cut.name].flatten()[begin : begin + len(block)]
            in_use = used["model.mask"][cut.name].flatten()[begin]
            assert torch.allclose(block, whole * scores[number] * in_use, atol=1e-12)
    # Biases are not gated.
    for name in set(run.params) - set(run.net.layout.prunable):
        assert torch.equal(used["model"][name], run.params[name])


def test_clients_with_different_data_come_to_choose_different_blocks(tmp_path: Path):
    """Gates start alike; with strong steps the clients' masks part."""
    # 20 blocks: of five, those of the widest layer are too large for there to be a choice.
    method = PFedGate(blocks=20, gate=LocalTraining(5, 8, SGD(5.0)))
    run = make_run(method, tmp_path, cohort=4, rounds=2)
    state = play(run, Serial())
    masks = []
    for answer in reports(run, Serial(), plan(run, state)):
        masks.append(trees.flatten(answer.give["model"].mask))
    assert any(not torch.equal(masks[0], other) for other in masks[1:])


def test_bad_values_are_refused(tmp_path: Path):
    for words, sentence in (
        ({"budget": 0.0}, "budget is 0.0"),
        ({"budget": 1.5}, "budget is 1.5"),
        ({"blocks": 1}, "blocks is 1"),
    ):
        with pytest.raises(InputError, match=sentence):
            PFedGate(**words)
    with pytest.raises(InputError, match="the first block of every layer is always kept"):
        fedgrove.run(
            PFedGate(budget=0.1), out=tmp_path / "run", rounds=1, engine="serial", progress=False
        )
    assert not (tmp_path / "run").exists()
