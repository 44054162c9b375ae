"""FedSNIP: the mask comes from all clients' first gradients, and stays."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.conftest import make_run, reports

from fedgrove import methods, trees
from fedgrove.engines import Serial
from fedgrove.errors import InputError
from fedgrove.parts.mask import best
from fedgrove.runs.rounds import rounds
from fedgrove.runs.run import Run


def sensitivity(run: Run, client: int) -> torch.Tensor:
    """|w g| of a client's first 8 examples as a share of its sum, by autograd, in its 16 bits."""
    data = run.federation.clients[client].train
    w = {k: v.clone().requires_grad_() for k, v in run.params.items()}
    F.cross_entropy(run.net(w, data.x[:8], train=False).logits, data.y[:8]).backward()
    products = [(w[k] * w[k].grad).abs().detach().view(-1) for k in run.net.layout.prunable]
    score = torch.cat(products)
    return (score / score.sum()).bfloat16().double()


def test_the_mask_is_that_of_all_clients_first_batches_and_stays(tmp_path: Path) -> None:
    run = make_run(methods.FedSNIP(density=0.2), tmp_path, cohort=2)
    loop = rounds(run)
    exchange = next(loop)
    # All four, though the cohort is two.
    assert [task.to for task in exchange.tasks] == list(run.infos)
    assert all(task.verb == "snip" and not task.send for task in exchange.tasks)
    exchange = loop.send(reports(run, Serial(), exchange.tasks))
    assert exchange.state.round == 0
    score = sum(info.examples * sensitivity(run, k) for k, info in run.infos.items())
    wanted = best(score, round(0.2 * len(score)))
    mask = exchange.state.mask
    kept = trees.flat(trees.pick(mask, run.net.layout.prunable))
    assert int(kept.sum()) == round(0.2 * len(kept))
    assert float(score[kept].min()) >= float(score[~kept].max()) * (1 - 1e-6)
    # But for equals in 16 bits.
    assert int((kept != wanted).sum()) <= 2
    while exchange.tasks:
        assert {task.to for task in exchange.tasks} < set(run.infos)
        answers = list(reports(run, Serial(), exchange.tasks))
        for report in answers:
            values = report.give["model"].values
            assert all(bool((values[k][~m] == 0).all()) for k, m in mask.items())
        exchange = loop.send(answers)
        assert trees.equal(exchange.state.mask, mask)
        assert all(bool((exchange.state.model[k][~m] == 0).all()) for k, m in mask.items())
    assert exchange.state.round == run.rounds


def test_an_impossible_density_is_refused() -> None:
    with pytest.raises(InputError, match=r"^density is 0\.0; it must be in \(0, 1\]\.$"):
        methods.FedSNIP(density=0.0)
