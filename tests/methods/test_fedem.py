"""FedEM: who explains an example, shares, the weighted loss, a round and a prediction by hand."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from tests.conftest import make_run, play, reports
from tests.contract import WHOLE, Contract

import fedgrove
from fedgrove import trees
from fedgrove.core import Batch, Report
from fedgrove.engines import Serial
from fedgrove.engines.work import perform
from fedgrove.errors import InputError
from fedgrove.methods import FedAvg
from fedgrove.methods.fedem import (
    Explained,
    FedEM,
    Responsible,
    mixed,
    responsibilities,
    room_for,
    shares_of,
)
from fedgrove.nets import Net
from fedgrove.parts.local import SGD, LocalTraining
from fedgrove.runs.rounds import draw_cohort, plan, plan_scoring

CONTRACT = Contract(
    small={"components": 2},
    off=FedEM(components=1),
    paper_bytes=2 * WHOLE,
)

ODDS = torch.tensor([3.0, 1.0]).log()
NET = Net(torch.nn.Linear(1, 2), (1,))


def says(logits: torch.Tensor) -> trees.Tree:
    """A network that gives these logits, whatever it sees."""
    return {"weight": torch.zeros(2, 1), "bias": logits}


def batch(*classes: int, first: int = 0) -> Batch:
    count = len(classes)
    return Batch(
        x=torch.ones(count, 1),
        y=torch.tensor(classes),
        weight=torch.ones(count),
        index=torch.arange(first, first + count),
        position=torch.tensor(0),
    )


def test_who_explains_an_example_by_hand() -> None:
    """Probabilities .8 and .2 of the truth, shares 1/4 and 3/4: .25 * .8 and .75 * .2, 4 to 3."""
    losses = -torch.tensor([[0.8], [0.2]]).log()
    q = responsibilities(losses, torch.tensor([0.25, 0.75]))
    assert q[:, 0].tolist() == pytest.approx([4 / 7, 3 / 7])


def test_an_example_far_from_all_is_still_explained() -> None:
    """exp(-1000) is 0 in any float; the ratio, e to 1, is not lost."""
    q = responsibilities(torch.tensor([[1000.0], [1001.0]]), torch.tensor([0.5, 0.5]))
    assert q[:, 0].tolist() == pytest.approx([math.e / (math.e + 1), 1 / (math.e + 1)])


def test_a_component_without_a_share_stays_without() -> None:
    q = responsibilities(torch.tensor([[9.0], [1.0]]), torch.tensor([1.0, 0.0]))
    assert q[:, 0].tolist() == [1.0, 0.0]
    assert shares_of(q).tolist() == [1.0, 0.0]


def test_the_table_by_hand() -> None:
    """Two components that say 3:1 and 1:3. Class 0 is three quarters the first's, class 1 the other's.

    Shares: (3/4 + 1/4 + 3/4) / 3 = 7/12. A second batch fills its own places; padding fills none.
    """
    carry = {
        "model0": says(ODDS),
        "model1": says(-ODDS),
        "shares": {"pi": torch.tensor([0.5, 0.5])},
        "room": {"zeros": torch.zeros(5)},
    }
    measure = Explained(2)
    last = batch(0, 1, first=2)
    # The second example of it is padding, which repeats the client's first.
    last = last._replace(weight=torch.tensor([1.0, 0.0]), index=torch.tensor([2, 0]))
    table = sum(measure(NET, {}, part, carry)["q"] for part in (batch(0, 1), last))
    assert isinstance(table, torch.Tensor)
    assert table[0].tolist() == pytest.approx([0.75, 0.25, 0.75, 0.0, 0.0])
    assert table[1].tolist() == pytest.approx([0.25, 0.75, 0.25, 0.0, 0.0])
    assert shares_of(table).tolist() == pytest.approx([7 / 12, 5 / 12])
    assert measure.passes == 2


def test_the_weighted_loss_by_hand() -> None:
    """q 1/2 and 1/4 of component 1; a network of even odds has loss ln 2 for both: 3/8 ln 2."""
    carry = {"explained": {"q": torch.tensor([[9.0, 9.0, 9.0], [0.0, 0.5, 0.25]])}}
    out = NET(says(torch.zeros(2)), torch.ones(2, 1), train=True)
    loss, aux = Responsible(1)(out, {}, batch(0, 1, first=1), carry)
    assert float(loss) == pytest.approx(3 / 8 * math.log(2))
    assert aux == {}


def test_a_mixture_by_hand() -> None:
    """3:1 and 1:3 in shares of .9 and .1: .9 * 3/4 + .1 * 1/4 = .7."""
    outputs = torch.stack([ODDS, -ODDS])[:, None]
    logits = mixed(NET, outputs, torch.tensor([0.9, 0.1]), {})
    # Already logarithms of probabilities.
    assert logits[0].exp().tolist() == pytest.approx([0.7, 0.3])


def test_a_round_by_hand(tmp_path: Path) -> None:
    """One client, one batch, one step: both halves of a round take q from the shares before it."""
    method = FedEM(components=2, local=LocalTraining(1, 32, SGD(0.1)))
    run = make_run(method, tmp_path, sizes=(20, 13), cohort=1, rounds=1)
    (client,) = draw_cohort(run, 0)
    part = run.federation.clients[client].train
    state = play(run, Serial())

    leaves = []
    losses = []
    for model in run.initial_state.models:
        leaves.append({name: value.clone().requires_grad_() for name, value in model.items()})
        logits = run.net(leaves[-1], part.x, train=True).logits
        losses.append(torch.nn.functional.cross_entropy(logits, part.y, reduction="none"))
    # Equal shares at first: their logarithm is the same for both, and softmax leaves it out.
    q = torch.softmax(-torch.stack(losses).detach(), 0)
    for m in range(2):
        loss = (q[m] * losses[m]).mean()
        gradients = torch.autograd.grad(loss, list(leaves[m].values()))
        stepped = {}
        for (name, value), gradient in zip(leaves[m].items(), gradients, strict=True):
            stepped[name] = (value - 0.1 * gradient).detach()
        assert trees.distance(state.models[m], stepped) < 1e-12
    kept = run.memory.read(client, run.memory.files[client])["shares"]["pi"]
    assert kept.tolist() == pytest.approx(q.mean(1).tolist(), abs=1e-12)
    # Such shares that it matters which ones are taken.
    assert abs(float(kept[0]) - 0.5) > 1e-3


def test_the_mean_of_each_component_by_hand(tmp_path: Path) -> None:
    """(1 * 1 + 3 * 5) / 4 = 4 and (1 * 2 + 3 * -2) / 4 = -1."""
    run = make_run(FedEM(components=2), tmp_path)
    state = run.initial_state
    answers = []
    for number, (task, examples) in enumerate(zip(plan(run, state)[:2], (1, 3), strict=True)):
        give = {}
        for (name, packet), value in zip(
            task.send.items(), ((1.0, 2.0), (5.0, -2.0))[number], strict=True
        ):
            filled = trees.map(lambda leaf, v=value: torch.full_like(leaf, v), packet.values)
            give[name] = type(packet)(filled)
        answers.append(Report(task.to, give, examples))
    first, second = run.method.fold(state, answers).models
    assert set(trees.flatten(first).tolist()) == {4.0}
    assert set(trees.flatten(second).tolist()) == {-1.0}


def test_a_client_mixes_by_shares_that_fit_the_components_as_they_are(tmp_path: Path) -> None:
    """Also one that never trained. The largest share comes first, and is what fine-tuning trains."""
    run = make_run(FedEM(components=3), tmp_path, finetune=(0, 2))
    state = run.initial_state
    for task in plan_scoring(run, state, "finetune"):
        report, kept = perform(run, task, {})
        part = run.federation.clients[task.to].train
        losses = []
        for model in state.models:
            logits = run.net(model, part.x, train=False).logits
            losses.append(torch.nn.functional.cross_entropy(logits, part.y, reduction="none"))
        pi = torch.softmax(-torch.stack(losses), 0).mean(1)
        best = state.models[int(pi.argmax())]
        # Two epochs away from it, and nearer to it than to the others.
        distances = [trees.distance(kept["own"], model) for model in state.models]
        assert trees.distance(kept["own"], best) == min(distances) > 0
        assert {"test0", "test2"} <= report.metrics.keys()


def test_a_client_without_examples_keeps_equal_shares(tmp_path: Path) -> None:
    method = FedEM(components=2, local=LocalTraining(1, 8, SGD(0.1)))
    run = make_run(method, tmp_path, sizes=(20, 0), cohort=2, rounds=1)
    answers = list(reports(run, Serial(), plan(run, run.initial_state)))
    assert [answer.examples for answer in answers] == [20, 0]
    task = plan(run, run.initial_state)[1]
    _, kept = perform(run, task, {})
    assert kept["shares"]["pi"].tolist() == [0.5, 0.5]


def test_clients_of_about_one_size_have_tables_of_one_length() -> None:
    assert [room_for(n) for n in (1, 64, 65, 256, 257, 5000)] == [64, 64, 256, 256, 1024, 16384]


@pytest.mark.slow
def test_a_mixture_serves_clients_better_than_one_model() -> None:
    """On users of three kinds."""
    words = {"data": "motion", "rounds": 8, "evaluate": 0, "progress": False, "engine": "pool"}
    one = fedgrove.run(FedAvg(), **words).summary
    mixture = fedgrove.run("fedem", **words).summary
    assert mixture["accuracy_mean"] > one["accuracy_mean"]
    assert mixture["bytes_paper"] == 3 * one["bytes_paper"]


@pytest.mark.parametrize("name", ["rooms", "tags"])
def test_it_mixes_whatever_the_targets_are(name: str) -> None:
    """Three components at equal shares and one differ little; cross-entropy would be far off."""
    words = {"data": name, "clients": 6, "rounds": 2, "progress": False, "engine": "serial"}
    one = fedgrove.run("fedavg", **words).summary
    mixture = fedgrove.run("fedem", **words).summary
    key = f"{one['metric']}_mean"
    assert mixture[key] == pytest.approx(one[key], rel=0.25)


def test_no_components_are_refused() -> None:
    with pytest.raises(InputError, match=r"components is 0; it must be in 1\.\.100\."):
        FedEM(components=0)
