"""FixedPrune: a round worked by hand, its density, and its bytes on both engines."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.conftest import answers, make_run, play, reports
from tests.contract import WHOLE, Contract

from fedgrove import methods, trees
from fedgrove.core import ClientInfo, Packet, Report, Setup
from fedgrove.engines import Pool, Serial
from fedgrove.errors import InputError
from fedgrove.methods import FixedPrune
from fedgrove.nets import Net
from fedgrove.runs.rounds import rounds
from fedgrove.wire.codec import Bitmap, Dense
from fedgrove.wire.ledger import Ledger

CONTRACT = Contract(
    off=FixedPrune(density=1.0),
    sends_masks=True,
    paper_bytes=0.3 * WHOLE,
    refused_with_privacy="mask of 'model'",
)


def test_a_round_by_hand() -> None:
    """Density 1/2 of four weights; clients of 1 and 3 examples.

    mean = (1*[8, 0, 0, 4] + 3*[0, 4, 0, 0]) / 4 = [2, 3, 0, 1]; the two largest are 3 and 2; the
    bias is kept.
    """
    net = Net(torch.nn.Linear(4, 1), (4,))
    method = methods.FixedPrune(density=0.5)
    first = {"weight": torch.tensor([[1.0, -2.0, 3.0, -4.0]]), "bias": torch.tensor([0.1])}
    state = method.init(Setup(first, net, {0: ClientInfo(1), 1: ClientInfo(3)}, 5, lambda j: first))
    assert state.model["weight"].tolist() == [[0.0, 0.0, 3.0, -4.0]]
    one = Packet({"weight": torch.tensor([[8.0, 0.0, 0.0, 4.0]]), "bias": torch.tensor([1.0])})
    two = Packet({"weight": torch.tensor([[0.0, 4.0, 0.0, 0.0]]), "bias": torch.tensor([3.0])})
    after = method.fold(state, [Report(0, {"model": one}, 1), Report(1, {"model": two}, 3)])
    assert after.round == 1
    assert after.model["weight"].tolist() == [[2.0, 3.0, 0.0, 0.0]]
    assert after.model["bias"].tolist() == [2.5]
    assert after.mask["weight"].tolist() == [[True, True, False, False]]


def test_a_static_round_by_hand() -> None:
    """As above, but the mask of -4 and 3 stays: the mean there is 1 and -1, whatever else is larger.

    Clients sent [0, 0, 4, -4] and [0, 0, 0, 0]: (1*4 + 3*0) / 4 = 1.
    """
    net = Net(torch.nn.Linear(4, 1), (4,))
    method = methods.FixedPrune(density=0.5, static=True)
    first = {"weight": torch.tensor([[1.0, -2.0, 3.0, -4.0]]), "bias": torch.tensor([0.1])}
    state = method.init(Setup(first, net, {0: ClientInfo(1), 1: ClientInfo(3)}, 5, lambda j: first))
    one = Packet({"weight": torch.tensor([[0.0, 0.0, 4.0, -4.0]]), "bias": torch.tensor([1.0])})
    two = Packet({"weight": torch.tensor([[0.0, 0.0, 0.0, 0.0]]), "bias": torch.tensor([3.0])})
    after = method.fold(state, [Report(0, {"model": one}, 1), Report(1, {"model": two}, 3)])
    assert after.model["weight"].tolist() == [[0.0, 0.0, 1.0, -1.0]]
    assert after.model["bias"].tolist() == [2.5]
    assert after.mask["weight"].tolist() == [[False, False, True, True]]


def test_a_static_mask_stays_and_clients_train_under_it(tmp_path: Path) -> None:
    method = methods.FixedPrune(density=0.25, static=True)
    run = make_run(method, tmp_path, dtype=torch.float32)
    mask = run.initial_state.mask
    loop = rounds(run)
    exchange = next(loop)
    while exchange.tasks:
        found = list(reports(run, Serial(), exchange.tasks))
        for report in found:
            packet = report.give["model"]
            assert trees.equal(packet.mask, mask)
            assert all(bool((packet.values[k][m] != 0).all()) for k, m in mask.items())
        exchange = loop.send(zip(exchange.tasks, found, strict=True))
        assert not exchange.tally.refused
        assert trees.equal(exchange.state.mask, mask)


def test_static_with_density_1_is_the_other(tmp_path: Path) -> None:
    one, other = (
        play(
            make_run(
                methods.FixedPrune(density=1.0, static=static),
                tmp_path / str(static),
                dtype=torch.float32,
            ),
            Serial(),
        )
        for static in (True, False)
    )
    assert trees.identical(one.model, other.model)


def test_density_is_exact_in_every_round_and_report(tmp_path: Path) -> None:
    run = make_run(methods.FixedPrune(density=0.25), tmp_path, dtype=torch.float32)
    wanted = {k: round(0.25 * run.params[k].numel()) for k in run.net.layout.prunable}
    loop = rounds(run)
    exchange = next(loop)
    while exchange.tasks:
        found = list(reports(run, Serial(), exchange.tasks))
        for report in found:
            packet = report.give["model"]
            assert {k: int(m.sum()) for k, m in packet.mask.items()} == wanted
            assert all(bool((packet.values[k][~m] == 0).all()) for k, m in packet.mask.items())
        exchange = loop.send(zip(exchange.tasks, found, strict=True))
        assert {k: int(m.sum()) for k, m in exchange.state.mask.items()} == wanted


def test_serial_and_pool_count_the_same_bytes_and_parts_add_up(tmp_path: Path) -> None:
    totals = []
    parts = []
    for engine in (Serial(), Pool(workers=2)):
        run = make_run(
            methods.FixedPrune(), tmp_path / engine.name, net="har-cnn", dtype=torch.float32
        )
        ledger = Ledger()
        loop = rounds(run)
        exchange = next(loop)
        while exchange.tasks:
            exchange = loop.send(ledger.tally(answers(run, engine, exchange.tasks)))
        engine.close()
        totals.append(ledger.totals())
        parts.append(ledger.parts())
    assert totals[0] == totals[1]
    assert parts[0] == parts[1]
    for way in ("up", "down"):
        assert totals[0][f"bytes_{way}"] == sum(parts[0][f"bytes_{way}_parts"].values())
        assert parts[0][f"bytes_{way}_parts"]["mask"] > 0


def test_a_mask_is_sent_when_it_changes(tmp_path: Path) -> None:
    """A client that gets the same mask again pays for it once: the second task has no mask part."""
    run = make_run(methods.FixedPrune(), tmp_path, dtype=torch.float32)
    state = run.method.init(run.setup)
    tasks = run.method.plan(state, [0])
    first, again = (next(iter(reports(run, Serial(), tasks))).cost["down"] for _ in range(2))
    assert first["mask"] > 0
    assert again["mask"] == 0
    assert again["values"] == first["values"]


def test_sparse_is_smaller_than_dense(tmp_path: Path) -> None:
    sizes = {}
    for codec in (Dense(), Bitmap(), methods.FixedPrune().codec):
        run = make_run(
            methods.FixedPrune(codec=codec),
            tmp_path / type(codec).__name__,
            dtype=torch.float32,
            rounds=1,
        )
        ledger = Ledger()
        loop = rounds(run)
        loop.send(ledger.tally(answers(run, Serial(), next(loop).tasks)))
        sizes[type(codec).__name__] = ledger.totals()["bytes_up"]
    assert sizes["Smallest"] < sizes["Bitmap"] < sizes["Dense"]


def test_learns_something(tmp_path: Path) -> None:
    run = make_run(
        methods.FixedPrune(density=0.5), tmp_path, dtype=torch.float32, rounds=6, sizes=(40, 40, 40)
    )
    state = play(run, Serial())
    assert not torch.equal(state.model["head.weight"], run.params["head.weight"])


@pytest.mark.parametrize("density", [0.0, -0.1, 1.5])
def test_an_impossible_density_is_refused(density: float) -> None:
    with pytest.raises(InputError, match=r"density is .*; it must be in \(0, 1\]"):
        methods.FixedPrune(density=density)
