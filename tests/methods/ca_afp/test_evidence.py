"""What clients report about their gradients, and the sums a server keeps of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from tests.conftest import make_run

from fedgrove import methods, trees
from fedgrove.core import Batch, Batches
from fedgrove.methods.ca_afp.evidence import Gather, evidence_packet, variance, votes
from fedgrove.parts.gradient import Gradient
from fedgrove.parts.objective import CrossEntropy, Proximal

F64 = torch.float64


def vector(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=F64)


def gathered(
    model: torch.Tensor, *trained: torch.Tensor, mask: torch.Tensor | None = None
) -> Gather:
    """A round's sums of models alone."""
    sums = Gather(model, torch.ones(len(model)).bool() if mask is None else mask)
    for w in trained:
        sums.add(w, {})
    return sums


# ---- variance ------------------------------------------------------------------------------------


def test_variance_is_taken_within_rounds_and_pooled() -> None:
    """Two rounds that lie far apart.

    round 1: (2, 0), (4, 2): mean (3, 1), squares 1+1, 1+1             -> 2, 2   over 2
    round 2: (13, 1), (16, 4), (10, 1): mean (13, 2), 0+9+9, 1+4+1     -> 18, 6  over 3
    pooled: 20/5 = 4, 8/5 = 1.6. Over all five together the first would be 140/5 = 28.
    """
    first = gathered(vector(1, 1), vector(2, 0), vector(4, 2)).since({})
    both = gathered(vector(3, 1), vector(13, 1), vector(16, 4), vector(10, 1)).since(first)
    assert variance(first).tolist() == [1.0, 1.0]
    assert variance(both).tolist() == pytest.approx([4.0, 1.6], abs=1e-12)


def test_one_report_in_a_round_does_not_count() -> None:
    alone = gathered(vector(0, 0), vector(5, 5)).since({})
    assert variance(alone) is None
    again = gathered(vector(0, 0), vector(-5, 5)).since(alone)
    assert variance(again) is None  # two clients, but never in one round
    met = gathered(vector(0, 0), vector(1, 0), vector(3, 0)).since(again)
    assert variance(met).tolist() == [1.0, 0.0]  # as if the two had never been
    after = gathered(vector(0, 0), vector(99, 0)).since(met)
    assert variance(after).tolist() == [1.0, 0.0]


def test_nobody_spoke() -> None:
    assert variance({}) is None
    assert votes({}) == (None, 0.0)


@given(st.integers(2, 6), st.integers(0, 2**31), st.floats(-100, 100))
def test_one_round_gives_the_population_variance_wherever_the_model_is(
    n: int, seed: int, at: float
) -> None:
    models = torch.randn(n, 7, generator=torch.Generator().manual_seed(seed), dtype=F64)
    pooled = variance(gathered(torch.full((7,), at, dtype=F64), *models).since({}))
    assert (pooled - models.var(0, unbiased=False)).abs().max() < 1e-9


def test_clients_that_agree_have_no_variance_and_never_less() -> None:
    """0.1 has no exact form: the difference of sums must not come out below 0."""
    w = torch.full((3,), 0.1, dtype=torch.float32)
    pooled = variance(gathered(torch.zeros(3), *[w] * 7).since({}))
    assert bool((pooled >= 0).all())
    assert float(pooled.max()) < 1e-16


# ---- signs and gradients -------------------------------------------------------------------------


def test_signs_and_gradients_stand_where_the_mask_says() -> None:
    """In use: places 0, 2, 3. Signs (1, -1, 0) and (1, 1, 1) add up to 2, 0, 1 there; place 1 and 4
    hold gradients.
    """
    mask = torch.tensor([1, 0, 1, 1, 0]).bool()
    sums = Gather(torch.zeros(5), mask)
    for signs, grow in (([1, -1, 0], [2.0, 0.0]), ([1, 1, 1], [-0.5, 4.0])):
        evidence = {
            "scores.signs": torch.tensor(signs, dtype=torch.int8),
            "scores.grow": torch.tensor(grow),
        }
        sums.add(torch.zeros(5), evidence)
    gathered_sums = sums.since({})
    assert gathered_sums["signs"].tolist() == [2.0, 0.0, 0.0, 1.0, 0.0]
    assert gathered_sums["grow"].tolist() == [0.0, 1.5, 0.0, 0.0, 4.0]
    assert votes(gathered_sums)[1] == 2.0


def test_votes_of_all_rounds_count_and_one_alone_does_not() -> None:
    def round_of(*signs: int) -> Gather:
        sums = Gather(torch.zeros(1), torch.ones(1).bool())
        for sign in signs:
            sums.add(torch.zeros(1), {"scores.signs": torch.tensor([sign], dtype=torch.int8)})
        return sums

    one = round_of(-1).since({})
    assert votes(one) == (None, 1.0)
    summed, n = votes(round_of(-1, 1, -1).since(one))
    assert (summed.tolist(), n) == ([-2.0], 4.0)


def test_many_votes_do_not_overflow_their_eight_bits() -> None:
    sums = Gather(torch.zeros(1), torch.ones(1).bool())
    for _ in range(300):
        sums.add(torch.zeros(1), {"scores.signs": torch.tensor([1], dtype=torch.int8)})
    assert votes(sums.since({}))[0].tolist() == [300.0]


# ---- evidence_packet -----------------------------------------------------------------------------


def test_testimony_by_hand() -> None:
    """In use -3, 0, .5: signs -1, 0, 1. Outside 2, -4, 1: the two largest are 2 and -4, with their
    signs.
    """
    gradient = torch.tensor([-3.0, 2.0, 0.0, -4.0, 0.5, 1.0])
    mask = torch.tensor([1, 0, 1, 0, 1, 0]).bool()
    packet = evidence_packet(gradient, mask, 2)
    assert packet.values["scores.signs"].tolist() == [-1, 0, 1]
    assert packet.values["scores.signs"].dtype == torch.int8
    assert packet.values["scores.grow"].tolist() == [2.0, -4.0, 0.0]
    assert packet.values["scores.grow"].dtype == torch.bfloat16
    assert packet.mask is None
    # The ledger shows what evidence costs by these names.
    assert all(name.startswith("scores.") for name in packet.values)


def test_testimony_sends_no_gradients_nobody_asked_for() -> None:
    assert set(evidence_packet(torch.ones(3), torch.ones(3).bool(), 0).values) == {"scores.signs"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_has_no_vote(dtype: torch.dtype) -> None:
    """Next to a gradient of 5, what 5 cannot tell from itself is noise; a thousand times that is
    not.
    """
    eps = torch.finfo(dtype).eps
    gradient = torch.tensor([5.0, eps, -eps, 1000 * eps, -1000 * eps, 0.0], dtype=dtype)
    packet = evidence_packet(gradient, torch.ones(6).bool(), 0)
    assert packet.values["scores.signs"].tolist() == [1, 0, 0, 1, -1, 0]
    still = evidence_packet(torch.zeros(2, dtype=dtype), torch.ones(2).bool(), 0)
    assert still.values["scores.signs"].tolist() == [0, 0]


def test_what_is_told_arrives_where_it_belongs() -> None:
    """The server's sums of testimonies are the sums of gradients, where all were asked for."""
    g = torch.Generator().manual_seed(0)
    mask = torch.rand(40, generator=g) < 0.5
    # Small whole numbers are exact in bfloat16.
    gradients = [torch.randint(-8, 9, (40,), generator=g).float() for _ in range(3)]
    sums = Gather(torch.zeros(40), mask)
    for gradient in gradients:
        sums.add(torch.zeros(40), evidence_packet(gradient, mask, 40).values)
    gathered_sums = sums.since({})
    assert torch.equal(gathered_sums["grow"], torch.where(mask, 0.0, sum(gradients)).double())
    assert torch.equal(
        gathered_sums["signs"], torch.where(mask, sum(v.sign() for v in gradients), 0.0).double()
    )


# ---- Gradient ------------------------------------------------------------------------------------


def padded(batch: Batch, n: int) -> Batch:
    """With n more examples of weight 0."""
    x = torch.cat([batch.x, 9 + torch.zeros(n, *batch.x.shape[1:], dtype=batch.x.dtype)])
    weight = torch.cat([batch.weight, torch.zeros(n, dtype=batch.weight.dtype)])
    return Batch(
        x, torch.cat([batch.y, batch.y[:1].repeat(n)]), weight, torch.arange(len(x)), batch.position
    )


def test_gradients_of_batches_sum_to_that_of_all_examples(tmp_path: Path) -> None:
    """Batches of 8, 8 and 4 of 20 examples: the sum is 20 times the gradient of the mean loss, pull
    and all.
    """
    run = make_run(methods.FedAvg(), tmp_path)
    client = run.client(methods.FedAvg().plan(run.method.init(run.setup), [0])[0], {})
    reference = {k: v + 0.1 for k, v in run.params.items()}
    carry = {"reference": reference}
    total = None
    for batch in client.batches(Batches("train", size=8)):
        value = Gradient(CrossEntropy() + Proximal(0.5, "reference"))(
            run.net, run.params, padded(batch, 3), carry
        )
        total = value if total is None else trees.map(torch.add, total, value)
    weights = {k: v.clone().requires_grad_() for k, v in run.params.items()}
    data = client.data.train
    loss = F.cross_entropy(run.net(weights, data.x, train=False).logits, data.y, reduction="sum")
    away = sum(((weights[k] - reference[k]) ** 2).sum() for k in weights)
    (loss + 20 * 0.25 * away).backward()
    assert list(total) == list(run.net.layout.prunable)  # biases are not asked for
    assert trees.distance(total, {k: weights[k].grad for k in total}) < 1e-11


@pytest.mark.parametrize("signs", [[1], [1, 1, 1], [1, 127], [-128, 1]])
def test_votes_that_do_not_fit_are_not_counted(signs: list[int]) -> None:
    gather = Gather(torch.zeros(3), torch.tensor([True, True, False]))
    told = {"scores.signs": torch.tensor(signs, dtype=torch.int8), "scores.grow": torch.ones(2)}
    gather.add(torch.ones(3), told)
    sums = gather.since({})
    assert sums["votes"] == 0
    assert not sums["signs"].any()
    assert not sums["grow"].any()
