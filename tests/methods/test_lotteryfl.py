"""LotteryFL: when and what a client prunes, its rewind, tickets as bits, and the mean by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.conftest import make_run, play
from tests.contract import Contract
from tests.methods.exchanges import exchanges

from fedgrove import trees
from fedgrove.core import Client, ClientInfo, Packet, Report, Setup
from fedgrove.data.federation import Examples
from fedgrove.engines import Serial
from fedgrove.errors import InputError
from fedgrove.methods.lotteryfl import LotteryFL, State, packed, unpacked
from fedgrove.nets import Net
from fedgrove.problems import numbers
from fedgrove.runs.run import Run

CONTRACT = Contract(
    # It prunes only what is good enough, which nothing is after a round.
    small={"threshold": 0.0},
    off=LotteryFL(density=1.0),
    one_group=LotteryFL(density=1.0),
    sends_masks=True,
    # 150 draws of 4 clients: each is drawn 37 times and two once more. Nine tenths are left each time, down to half:
    # 5056, 4550, 4095, 3686, 3317, 2985, 2686, 2528 weights, then 2528; and 131 biases. Each of the first seven times
    # in between is once what goes up and once what comes down.
    paper_bytes=4
    * (
        2 * 131 * 150
        + 4 * (5056 + 2 * (4550 + 4095 + 3686 + 3317 + 2985 + 2686) + 2528)
        + 2 * 2528 * (150 - 28)
    ),
    refused_with_privacy="mask of 'model'",
)

NET = Net(torch.nn.Linear(5, 1), (5,))
FIRST = {"weight": torch.tensor([[0.5, 0.4, 0.3, 0.2, 0.1]]), "bias": torch.tensor([0.7])}


def row(*values: float) -> torch.Tensor:
    return torch.tensor([values])


def kept(*places: int) -> torch.Tensor:
    return row(*(float(i in places) for i in range(5))).bool()


def client(net: Net = NET) -> Client:
    nothing: Any = None
    return Client(0, ClientInfo(4), nothing, {}, net, FIRST, 0)


def drawn(method: LotteryFL, correct: float, mask: torch.Tensor | None = None, net: Net = NET):
    """A client that gets ``correct`` of 10 examples right draws its ticket."""
    carry = {
        "model": {"weight": row(5.0, -1.0, 2.0, -4.0, 3.0), "bias": torch.tensor([9.0])},
        "scores": {"correct": torch.tensor(correct), "total": torch.tensor(10.0)},
    }
    if mask is not None:
        carry["model.mask"] = {"weight": mask}
    return method._draw(carry, client(net))


def test_a_good_client_prunes_and_rewinds_by_hand() -> None:
    """6 of 10 right, threshold .6: two fifths of five weights go, those of -1 and 2.

    It begins again at the initial weights, bias included.
    """
    carry = drawn(LotteryFL(density=0.2, rate=0.4, threshold=0.6), 6.0)
    assert torch.equal(carry["ticket.mask"]["weight"], kept(0, 3, 4))
    assert trees.identical(carry["ticket"], FIRST)


def test_a_client_below_the_threshold_goes_on_with_what_it_was_sent() -> None:
    carry = drawn(LotteryFL(density=0.2, rate=0.4, threshold=0.6), 5.0)
    assert "ticket.mask" not in carry
    assert carry["ticket"] is carry["model"]
    again = drawn(LotteryFL(density=0.2, rate=0.4, threshold=0.6), 5.0, kept(0, 1))
    assert torch.equal(again["ticket.mask"]["weight"], kept(0, 1))


def test_it_prunes_within_its_ticket_and_no_further_than_its_density() -> None:
    """Of 4 weights half would go; a density of .6 keeps 3 of 5, so one goes: the smallest in use."""
    carry = drawn(LotteryFL(density=0.6, rate=0.5, threshold=0.0), 0.0, kept(0, 1, 3, 4))
    assert torch.equal(carry["ticket.mask"]["weight"], kept(0, 3, 4))


def test_the_share_is_of_the_weights_in_use() -> None:
    """Of 4 weights in use .6 are 2.4: those of -1 and 3 go. Of all 5 weights it would be 3."""
    carry = drawn(LotteryFL(density=0.2, rate=0.6, threshold=0.0), 0.0, kept(0, 1, 3, 4))
    assert torch.equal(carry["ticket.mask"]["weight"], kept(0, 3))


def test_a_share_below_one_weight_is_one_weight() -> None:
    """A tenth of 3 rounds to 0, and the density would never be reached."""
    carry = drawn(LotteryFL(density=0.2, rate=0.1, threshold=0.0), 0.0, kept(0, 3, 4))
    assert torch.equal(carry["ticket.mask"]["weight"], kept(0, 3))


def test_where_less_is_better_the_threshold_is_the_most_there_may_be() -> None:
    """A mean absolute error of 20 / 10 = 2."""
    net = Net(torch.nn.Linear(5, 1), (5,))
    net.problem = numbers(metric="mae")
    carry = {
        "model": {"weight": row(5.0, -1.0, 2.0, -4.0, 3.0), "bias": torch.tensor([9.0])},
        "scores": {"value": torch.tensor(20.0), "total": torch.tensor(10.0)},
    }
    assert "ticket.mask" in LotteryFL(threshold=2.0)._draw(dict(carry), client(net))
    assert "ticket.mask" not in LotteryFL(threshold=1.9)._draw(dict(carry), client(net))


def test_training_data_alone_decide(tmp_path: Path) -> None:
    """Neither validation nor test data: with wrong labels in both, every ticket stays the same."""
    run = make_run(LotteryFL(threshold=0.3), tmp_path / "right", dtype=torch.float32)
    clients = {}
    for k, data in run.federation.clients.items():
        validation = Examples(data.validation.x, 1 - data.validation.y.clamp(max=1))
        test = Examples(data.test.x, 1 - data.test.y.clamp(max=1))
        clients[k] = replace(data, validation=validation, test=test)
    other = make_run(LotteryFL(threshold=0.3), tmp_path / "wrong", dtype=torch.float32)
    other = replace(other, federation=replace(run.federation, clients=clients))
    tickets = play(run, Serial()).tickets
    assert tickets
    assert trees.identical(tickets, play(other, Serial()).tickets)


def test_the_mean_by_hand() -> None:
    """Clients of 1 and 3 examples: the first has all, the second the places 0 and 3.

    Place 0: (1*4 + 3*8) / 4 = 7; places 1, 2 and 4 are the first's; place 3: (1*1 + 3*5) / 4 = 4.
    """
    state = State(0, FIRST, ("weight",), {})
    one = Packet({"weight": row(4.0, 2.0, 3.0, 1.0, 6.0), "bias": torch.tensor([1.0])})
    two = Packet(
        {"weight": row(8.0, 0.0, 0.0, 5.0, 0.0), "bias": torch.tensor([5.0])},
        {"weight": kept(0, 3)},
    )
    method = LotteryFL(density=0.4)
    after = method.fold(state, [Report(0, {"model": one}, 1), Report(1, {"model": two}, 3)])
    assert after.model["weight"].tolist() == [[7.0, 2.0, 3.0, 4.0, 6.0]]
    assert after.model["bias"].tolist() == [4.0]
    # Each uses the part that lies in its own ticket.
    assert method.deliver(after, 0)["model"].mask is None
    delivered = method.deliver(after, 1)["model"]
    assert delivered.values["weight"].tolist() == [[7.0, 0.0, 0.0, 4.0, 0.0]]
    # The second is at its density, and will not prune again.
    assert [task.verb for task in method.plan(after, [0, 1])] == ["train:ticket", "train"]
    # What nobody has stays as it was.
    last = method.fold(after, [Report(1, {"model": delivered}, 3)])
    assert last.model["weight"].tolist() == [[7.0, 2.0, 3.0, 4.0, 6.0]]


def test_a_mask_that_leaves_out_a_layer_has_all_of_it() -> None:
    state = State(0, FIRST, ("weight",), {})
    model = Packet(FIRST, {"bias": torch.tensor([True])})
    after = LotteryFL().fold(state, [Report(0, {"model": model}, 1)])
    mask = LotteryFL().deliver(after, 0)["model"].mask
    assert mask is not None
    assert bool(mask["weight"].all())


@given(st.lists(st.integers(1, 20), min_size=1, max_size=4), st.integers(0, 2**31))
def test_bits_come_back(sizes: list[int], seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    mask = {str(i): torch.rand(n, 2, generator=g) < 0.5 for i, n in enumerate(sizes)}
    bits = packed(mask)
    assert len(bits) == -(-trees.size(mask) // 8)
    assert trees.equal(unpacked(bits, mask), mask)


def tiny(folder: Path, **words: Any) -> Run:
    method = LotteryFL(**({"density": 0.5, "rate": 0.3, "threshold": 0.0} | words))
    return make_run(method, folder, rounds=6, dtype=torch.float32)


def test_tickets_shrink_each_time_until_they_are_small_enough(tmp_path: Path) -> None:
    run = tiny(tmp_path)
    weights = trees.pick(run.params, run.net.layout.prunable)
    for before, tasks, answers, after in exchanges(run):
        for task, report in zip(tasks, answers, strict=True):
            sent = task.send["model"]
            mine = report.give["model"].mask
            assert mine is not None
            for name, layer in weights.items():
                old = torch.ones_like(layer).bool() if sent.mask is None else sent.mask[name]
                assert bool((mine[name] <= old).all())
                target = round(0.5 * layer.numel())
                smaller = max(target, int(old.sum()) - round(0.3 * int(old.sum())))
                assert int(mine[name].sum()) == smaller
        absent = set(run.infos) - {task.to for task in tasks}
        for k in absent & before.tickets.keys():
            assert torch.equal(after.tickets[k], before.tickets[k])
    assert after.round == 6


def test_clients_have_tickets_of_their_own(tmp_path: Path) -> None:
    """From the second time on: at first all of them prune the same initial model."""
    state = play(tiny(tmp_path), Serial())
    bits = list(state.tickets.values())
    assert any(not torch.equal(bits[0], other) for other in bits[1:])


def test_the_looking_up_changes_no_training(tmp_path: Path) -> None:
    """A threshold nobody reaches: as with density 1, to the bit."""
    models = []
    for words in ({"threshold": 1.1}, {"density": 1.0}):
        state = play(tiny(tmp_path / str(len(models)), **words), Serial())
        assert state.tickets == {}
        models.append(state.model)
    assert trees.identical(*models)


def test_bytes_by_hand() -> None:
    """Five weights and a bias; a rate of .4 and a density of .4: 5, 3, 2 weights.

    3 clients, 2 of them in each of 3 rounds: 6 draws, each client twice. First 5 down and 3 up,
    then 3 down and 2 up, and the bias four times: 3 * (5 + 3 + 3 + 2 + 4) numbers of 4 bytes.
    """
    method = LotteryFL(density=0.4, rate=0.4)
    assert method.paper_bytes(NET, 3, 2, 3) == 4 * 3 * 17
    assert LotteryFL(density=1.0).paper_bytes(NET, 3, 2, 3) == 8 * 6 * 2 * 3


def test_it_begins_dense() -> None:
    state = LotteryFL().init(Setup(FIRST, NET, {0: ClientInfo(1)}, 5, lambda j: FIRST))
    assert trees.identical(state.model, FIRST)
    assert state.tickets == {}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"density": 0.0}, r"^density is 0\.0; it must be in \(0, 1\]\.$"),
        ({"rate": 1.0}, r"^rate is 1\.0; it must be in \(0, 1\)\.$"),
        ({"threshold": float("nan")}, r"^threshold is nan; it must be a finite number\.$"),
    ],
)
def test_what_is_out_of_range_is_refused(words: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        LotteryFL(**words)
