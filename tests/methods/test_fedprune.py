"""FedPrune: the schedule, the contest and the squared gradients by hand, and PruneFL's own rule."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.conftest import answers, make_run, play, reports
from tests.contract import Contract
from tests.methods.exchanges import exchanges, verbs

from fedgrove import trees
from fedgrove.core import ClientInfo, Packet, Report, Setup
from fedgrove.engines import Serial
from fedgrove.errors import InputError
from fedgrove.methods.fedprune import FedPrune, RiskPerTime, protected, scheduled
from fedgrove.nets import Net
from fedgrove.parts.local import LocalTraining
from fedgrove.runs.rounds import rounds
from fedgrove.wire.ledger import Ledger

CONTRACT = Contract(
    small={"every": 1},
    off=FedPrune(density=1.0),
    sends_masks=True,
    # A step after each of 49 rounds, down to .3 of 5056 weights: the mean over the 50 rounds is .65 of them, to
    # rounding; 131 biases; and 49 times 4 bytes a weight.
    paper_bytes=8 * 131 * 3 * 50
    + 8 * 3 * sum(round(5056 * (1 - 0.7 * s / 49)) for s in range(50))
    + 4 * 5056 * 3 * 49,
    refused_with_privacy="importance",
    for_a_million={"every": 1},
)

NET = Net(torch.nn.Linear(6, 1), (6,))


def row(*values: float) -> torch.Tensor:
    return torch.tensor([values])


def kept(*places: int) -> torch.Tensor:
    return row(*(float(i in places) for i in range(6))).bool()


WEIGHTS = {"weight": row(6.0, -5.0, 4.0, -3.0, 2.0, 1.0), "bias": torch.tensor([0.5])}


def start(length: int = 4) -> Setup:
    return Setup(WEIGHTS, NET, {0: ClientInfo(1), 1: ClientInfo(3)}, length, lambda j: WEIGHTS)


def report(client: int, examples: int, importance: torch.Tensor, weights: torch.Tensor) -> Report:
    model = Packet({"weight": weights, "bias": torch.tensor([0.5])})
    give = {"model": model, "importance": Packet({"scores.weight": importance.bfloat16()})}
    return Report(client, give, examples)


def test_schedule_by_hand() -> None:
    """To .4 in three steps of .2."""
    assert [scheduled(0.4, step, 3, 100) for step in (1, 2, 3)] == [80, 60, 40]
    assert scheduled(0.3, 1, 1, 10) == 3


def test_when_steps_are() -> None:
    """20 rounds, every 5: after 5, 10 and 15, measured in the rounds before; not after the last."""
    method = FedPrune(every=5)
    state = method.init(start(20))
    measured = []
    for r in range(20):
        tasks = method.plan(replace(state, round=r), [0])
        if verbs(tasks) == {"train:importance"}:
            measured.append(r)
    assert measured == [4, 9, 14]


def test_protected_by_hand() -> None:
    """Of 5 weights in use a share of .3 is contested: 3.5 stay, rounded down 3, the largest."""
    used = {"weight": kept(0, 1, 2, 3, 5)}
    safe = protected(WEIGHTS, used, contested=0.3)["weight"]
    assert torch.equal(safe, kept(0, 1, 2))
    assert not bool(protected(WEIGHTS, used, contested=1.0)["weight"].any())


def test_a_step_by_hand() -> None:
    """Density 1/3 in two steps of two weights each: from 6 to 4, then to 2.

    Step 1: 4 of 6 stay, so a third is contested, more than .3: the places 0 to 3 hold the largest
    weights and are safe. There is no room: places 4 and 5 go, whatever their gradients.
    Step 2: 2 of the 4 stay, half is contested. Safe are the two largest of 6, -5, 1, -3: these are
    0 and 1, and there is no room again.
    """
    method = FedPrune(density=1 / 3, every=1)
    state = replace(method.init(start(3)), round=0)
    gradients = row(0.0, 0.0, 0.0, 0.0, 9.0, 9.0)
    after = method.fold(state, [report(0, 1, gradients, WEIGHTS["weight"])])
    assert torch.equal(after.mask["weight"], kept(0, 1, 2, 3))
    assert after.model["weight"].tolist() == [[6.0, -5.0, 4.0, -3.0, 0.0, 0.0]]
    trained = row(6.0, -5.0, 1.0, -3.0, 0.0, 0.0)
    last = method.fold(after, [report(0, 1, gradients, trained)])
    assert torch.equal(last.mask["weight"], kept(0, 1))


def test_pruned_weights_compete_with_the_smallest_in_use() -> None:
    """All is contested, and 4 of 6 stay; clients have 1 and 3 examples.

    Mean importances: (1*4 + 3*0) / 4 = 1, 0, (1*0 + 3*4) / 4 = 3, 2, 5 and 4: places 2 to 5 stay.
    At the next step place 0, pruned, has the largest: it comes back, and starts at 0.
    """
    method = FedPrune(density=1 / 3, every=1, contested=1.0)
    state = method.init(start(3))
    one = report(0, 1, row(4.0, 0.0, 0.0, 2.0, 5.0, 4.0), WEIGHTS["weight"])
    two = report(1, 3, row(0.0, 0.0, 4.0, 2.0, 5.0, 4.0), WEIGHTS["weight"])
    after = method.fold(state, [one, two])
    assert torch.equal(after.mask["weight"], kept(2, 3, 4, 5))
    last = method.fold(after, [report(0, 1, row(9.0, 0, 0, 1, 2, 8), after.model["weight"])])
    assert torch.equal(last.mask["weight"], kept(0, 5))
    assert last.model["weight"].tolist() == [[0.0, 0.0, 0.0, 0.0, 0.0, 1.0]]


def test_prunefls_own_rule_decides_how_many() -> None:
    """Three of six weights are safe (half is contested), of importances 3, 0 and 0; c0 = 1/2.

    3 / (1/2 + 1/2) = 3; with 9: 12 / (1/2 + 4/6) = 10.3; with 1: 13 / (1/2 + 5/6) = 9.75, less.
    """
    method = FedPrune(density=0.1, every=1, contested=0.5, adaptive=RiskPerTime(fixed=0.5))
    state = method.init(start(3))
    after = method.fold(state, [report(0, 1, row(3.0, 0, 0, 1, 9, 0), WEIGHTS["weight"])])
    assert torch.equal(after.mask["weight"], kept(0, 1, 2, 4))
    # No fewer than the density says: 5/6 of 6 weights are 5.
    bounded = replace(method, density=5 / 6)
    after = bounded.fold(state, [report(0, 1, row(3.0, 0, 0, 1, 9, 0), WEIGHTS["weight"])])
    assert torch.equal(after.mask["weight"], kept(0, 1, 2, 3, 4))


def test_a_step_nobody_answers_is_left_out_and_made_up_for() -> None:
    method = FedPrune(density=1 / 3, every=1)
    skipped = method.fold(method.init(start(3)), [])
    assert (skipped.round, skipped.mask) == (1, {})
    last = method.fold(skipped, [report(0, 1, row(0, 0, 0, 0, 9, 9), WEIGHTS["weight"])])
    assert int(last.mask["weight"].sum()) == 2


def test_importance_is_the_mean_of_squared_batch_gradients(tmp_path: Path) -> None:
    """Batches of 8 and 5 of 13 examples: (8 g_1^2 + 5 g_2^2) / 13 at the trained model."""
    method = FedPrune(every=1, local=LocalTraining(1, 8))
    run = make_run(method, tmp_path)
    tasks = run.method.plan(run.initial_state, [1])
    (found,) = reports(run, Serial(), tasks)
    trained = found.give["model"].values
    data = run.federation.clients[1].train
    client = run.client(tasks[0], {})
    measure = run.work("train:importance")[1]
    order = client.order(measure.over, 0)
    assert len(order) == 13
    expected = {k: torch.zeros_like(trained[k]) for k in run.net.layout.prunable}
    for index in (order[:8], order[8:]):
        w = {k: v.clone().requires_grad_() for k, v in trained.items()}
        out = run.net(w, data.x[index], train=False).logits
        F.cross_entropy(out, data.y[index]).backward()
        for name, total in expected.items():
            gradient = w[name].grad
            assert gradient is not None
            total += len(index) / 13 * gradient**2
    for name, value in expected.items():
        sent = found.give["importance"].values["scores." + name]
        assert sent.dtype == torch.bfloat16
        torch.testing.assert_close(sent.double(), value, rtol=5e-3, atol=1e-30)


def test_density_falls_step_by_step_and_nothing_else_changes_it(tmp_path: Path) -> None:
    run = make_run(FedPrune(density=0.4, every=2), tmp_path, rounds=8, dtype=torch.float32)
    total = run.net.layout.count(run.net.layout.prunable)
    found = []
    for _, _, _, after in exchanges(run):
        found.append(int(trees.flatten(after.mask).sum()) if after.mask else total)
    expected = [total, *[round(total * share) for share in (0.8, 0.8, 0.6, 0.6, 0.4, 0.4, 0.4)]]
    assert found == expected


def test_the_adaptive_rule_runs_and_may_grow_again(tmp_path: Path) -> None:
    method = FedPrune(density=0.01, every=1, adaptive=RiskPerTime())
    run = make_run(method, tmp_path, rounds=6, dtype=torch.float32)
    state = play(run, Serial())
    share = int(trees.flatten(state.mask).sum()) / run.net.layout.count(run.net.layout.prunable)
    assert 0.01 <= share < 1


def test_what_importances_cost_is_counted_as_scores(tmp_path: Path) -> None:
    run = make_run(FedPrune(every=2), tmp_path, dtype=torch.float32)
    loop = rounds(run)
    exchange = next(loop)
    scores = []
    while exchange.tasks:
        ledger = Ledger()
        exchange = loop.send(ledger.tally(answers(run, Serial(), exchange.tasks)))
        scores.append(ledger.parts()["bytes_up_parts"].get("scores", 0))
    assert scores[0] == 0
    assert scores[1] > 0
    assert scores[2] == 0


def test_bytes_by_hand() -> None:
    """Six weights and a bias, 3 rounds, every 1: two steps, to 4.5, which rounds to 4, and to 3.

    2 * (7 + 5 + 4) numbers both ways, and the importances of 6 weights twice: 44 numbers of 4 bytes
    for each of 2 clients.
    """
    method = FedPrune(density=0.5, every=1)
    assert method.paper_bytes(NET, 9, 2, 3) == 4 * 2 * (2 * (7 + 5 + 4) + 12)
    assert FedPrune(density=1.0).paper_bytes(NET, 9, 2, 3) == 8 * 7 * 2 * 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"density": 0.0}, r"^density is 0\.0; it must be in \(0, 1\]\.$"),
        ({"every": 0}, r"^every is 0; it must be 1 or more rounds\.$"),
        ({"contested": 0.0}, r"^contested is 0\.0; it must be in \(0, 1\]\.$"),
    ],
)
def test_what_is_out_of_range_is_refused(words: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        FedPrune(**words)


def test_a_run_too_short_for_a_step_is_refused() -> None:
    message = r"^every is 5; it must be below the number of rounds, 5, or nothing is ever pruned\.$"
    with pytest.raises(InputError, match=message):
        FedPrune(every=5).init(start(5))
    assert FedPrune(every=5, density=1.0).init(start(5)).round == 0
