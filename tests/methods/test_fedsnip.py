"""FedSNIP: the mask comes from one gradient of each client, and stays."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.conftest import answers, make_run, reports
from tests.contract import WHOLE, Contract

from fedgrove import methods, seeds, trees
from fedgrove.core import Measure, Task
from fedgrove.data.federation import Examples
from fedgrove.engines import Serial
from fedgrove.errors import InputError
from fedgrove.methods import FedSNIP
from fedgrove.parts.mask import best
from fedgrove.runs.rounds import rounds
from fedgrove.runs.run import Run

CONTRACT = Contract(
    off=FedSNIP(density=1.0),
    sends_masks=True,
    paper_bytes=0.3 * WHOLE,
    refused_with_privacy="sensitivity",
    for_a_million={"ask": 5},
)


def probe(run: Run, client: int) -> torch.Tensor:
    """The examples that a client measures: 8 drawn from its seed in round 0 for this verb."""
    seed = seeds.derive(run.seed, 0, client, "snip")
    count = len(run.federation.clients[client].train)
    # 0: the first Measure of the verb.
    return torch.randperm(count, generator=seeds.torch_rng(seed, "shuffle", 0))[:8]


def sensitivity(run: Run, client: int) -> torch.Tensor:
    """|w g| of 8 random examples as a share of its sum, by autograd, in its 16 bits."""
    data = run.federation.clients[client].train
    drawn = probe(run, client)
    w = {k: v.clone().requires_grad_() for k, v in run.params.items()}
    F.cross_entropy(run.net(w, data.x[drawn], train=False).logits, data.y[drawn]).backward()
    products = [(w[k] * w[k].grad).abs().detach().view(-1) for k in run.net.layout.prunable]
    score = torch.cat(products)
    return (score / score.sum()).bfloat16().double()


def test_the_mask_is_that_of_a_random_batch_of_every_client_and_stays(tmp_path: Path) -> None:
    run = make_run(methods.FedSNIP(density=0.2), tmp_path, cohort=2)
    loop = rounds(run)
    exchange = next(loop)
    # All four, though the cohort is two.
    assert [task.to for task in exchange.tasks] == list(run.infos)
    assert all(task.verb == "snip" and not task.send for task in exchange.tasks)
    exchange = loop.send(answers(run, Serial(), exchange.tasks))
    assert exchange.state.round == 0
    score = sum(info.examples * sensitivity(run, k) for k, info in run.infos.items())
    wanted = best(score, round(0.2 * len(score)))
    mask = exchange.state.mask
    kept = trees.flatten(trees.pick(mask, run.net.layout.prunable))
    assert int(kept.sum()) == round(0.2 * len(kept))
    assert float(score[kept].min()) >= float(score[~kept].max()) * (1 - 1e-6)
    # But for equals in 16 bits.
    assert int((kept != wanted).sum()) <= 2
    while exchange.tasks:
        assert {task.to for task in exchange.tasks} < set(run.infos)
        found = list(reports(run, Serial(), exchange.tasks))
        for report in found:
            values = report.give["model"].values
            assert all(bool((values[k][~m] == 0).all()) for k, m in mask.items())
        exchange = loop.send(zip(exchange.tasks, found, strict=True))
        assert trees.equal(exchange.state.mask, mask)
        assert all(bool((exchange.state.model[k][~m] == 0).all()) for k, m in mask.items())
    assert exchange.state.round == run.rounds


def test_the_probe_sees_several_classes_of_rows_that_lie_sorted(tmp_path: Path) -> None:
    """Recordings are stored activity by activity: the first rows are all of one class."""
    run = make_run(methods.FedSNIP(), tmp_path, sizes=(48, 48))
    clients = {}
    for client, data in run.federation.clients.items():
        order = torch.argsort(data.train.y, stable=True)
        rows = Examples(data.train.x[order], data.train.y[order])
        clients[client] = replace(data, train=rows)
    run = replace(run, federation=replace(run.federation, clients=clients))
    (measure,) = [stage for stage in run.work("snip") if isinstance(stage, Measure)]
    for client, data in run.federation.clients.items():
        assert len(set(data.train.y[:8].tolist())) == 1
        (batch,) = run.client(Task(client, verb="snip"), {}).batches(measure.over, 0)
        assert len(batch.y) == 8
        # Of three classes of about a third each, 8 examples are of one with probability 3^-7.
        assert len(set(batch.y.tolist())) > 1


def test_an_impossible_density_is_refused() -> None:
    with pytest.raises(InputError, match=r"^density is 0\.0; it must be in \(0, 1\]\.$"):
        methods.FedSNIP(density=0.0)
