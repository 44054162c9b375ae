"""EfficientFL: a mask by magnitude after one dense round, and updates in 8 bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.conftest import answers, make_run, reports
from tests.contract import WHOLE, Contract

from fedgrove import methods, trees
from fedgrove.engines import Serial
from fedgrove.errors import InputError
from fedgrove.methods import EfficientFL
from fedgrove.runs.rounds import rounds

CONTRACT = Contract(
    off=EfficientFL(density=1.0, bits=0),
    sends_masks=True,
    paper_bytes=0.3 * WHOLE,
)


@pytest.mark.parametrize(("bits", "levels"), [(8, 255), (3, 7)])
def test_one_dense_round_then_a_fixed_mask_and_few_levels(
    bits: int, levels: int, tmp_path: Path
) -> None:
    run = make_run(methods.EfficientFL(density=0.25, bits=bits), tmp_path, net="har-cnn")
    prunable = run.net.layout.prunable
    masks = []
    loop = rounds(run)
    exchange = next(loop)
    while exchange.tasks:
        before = exchange.state
        found = list(reports(run, Serial(), exchange.tasks))
        for task in exchange.tasks:
            assert (task.send["model"].mask is None) == (before.round == 0)
        weight = sum(r.examples for r in found)
        model = {k: v.clone() for k, v in before.model.items()}
        for r in found:
            packet = r.give["update"]
            assert all(len(v.unique()) <= levels for v in packet.values.values())
            # All bits are made use of.
            assert max(len(v.unique()) for v in packet.values.values()) > levels // 2
            assert all(bool((packet.values[k][~m] == 0).all()) for k, m in before.mask.items())
            model = {k: v + packet.values[k] * r.examples / weight for k, v in model.items()}
        exchange = loop.send(zip(exchange.tasks, found, strict=True))
        masks.append(exchange.state.mask)
        assert trees.distance(trees.apply_mask(model, masks[-1]), exchange.state.model) < 1e-12
        if before.round == 0:
            # By the magnitude of the first mean, all layers together.
            w = trees.flatten(trees.pick(model, prunable))
            kept = trees.flatten(trees.pick(masks[0], prunable))
            assert int(kept.sum()) == round(0.25 * len(kept))
            assert float(w[kept].abs().min()) >= float(w[~kept].abs().max()) - 1e-12
    assert len(masks) == 3
    assert all(trees.equal(mask, masks[0]) for mask in masks)


def test_eight_bits_are_close_to_none(tmp_path: Path) -> None:
    """An update on 255 levels is off by at most half a level: 1/254 of its largest value."""
    models = []
    for bits in (0, 8):
        run = make_run(methods.EfficientFL(density=1.0, bits=bits), tmp_path / str(bits), rounds=1)
        loop = rounds(run)
        models.append(loop.send(answers(run, Serial(), next(loop).tasks)).state.model)
    exact, rough = models
    moved = max(float((exact[k] - run.params[k]).abs().max()) for k in exact)
    assert 0 < trees.distance(exact, rough) < 2 * moved / 254


@pytest.mark.parametrize("bits", [1, 17, -1])
def test_impossible_bits_get_a_sentence(bits: int) -> None:
    with pytest.raises(
        InputError, match=r"^bits is -?\d+; it must be 0 \(no quantisation\) or in 2\.\.16\.$"
    ):
        methods.EfficientFL(bits=bits)


def test_bits_0_sends_the_model_as_it_is(tmp_path: Path) -> None:
    run = make_run(methods.EfficientFL(bits=0), tmp_path, rounds=1)
    (first, *_) = reports(run, Serial(), next(rounds(run)).tasks)
    assert set(first.give) == {"model"}
    assert len(torch.cat([v.view(-1) for v in first.give["model"].values.values()]).unique()) > 255
