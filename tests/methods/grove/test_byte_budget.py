"""Budgets of bytes: how they are written, what an exchange takes, which share meets them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedgrove.core import ClientInfo, Packet, Setup
from fedgrove.errors import InputError
from fedgrove.methods.grove.byte_budget import (
    MOST_SHARE,
    SampleMessages,
    bytes_allowed,
    coded_bytes,
    dense_bytes_of,
    parse_share,
    parse_size,
    share_for,
    share_of_less,
    share_within,
    task_bytes,
    waits,
)
from fedgrove.nets import Net
from fedgrove.wire.codec import Dense, Smallest

NET = Net(
    torch.nn.Sequential(torch.nn.Linear(40, 50), torch.nn.ReLU(), torch.nn.Linear(50, 3)), (40,)
)


def start(clients: int = 20, cohort: int = 5, rounds: int = 8) -> Setup:
    infos = {client: ClientInfo(10) for client in range(clients)}
    return Setup(NET.params(), NET, infos, rounds, lambda j: {}, cohort=cohort)


def exchange(has_versions: bool = False, **words: int) -> SampleMessages:
    model = {name: NET.params()[name] for name in ("0.weight", "0.bias")}
    return SampleMessages(start(**words), model, {}, 153, {}, Smallest(), has_versions, 4.0)


@pytest.mark.parametrize(
    ("given", "share"), [("1%", 0.01), (" .5 % ", 0.005), ("0.02", 0.02), (0.3, 0.3), ("100%", 1)]
)
def test_shares(given: str | float, share: float) -> None:
    assert parse_share(given) == pytest.approx(share)


@pytest.mark.parametrize("given", ["0%", 0, -1, "101%", 1.5, "", "one percent", "1MB", "nan"])
def test_shares_that_are_none(given: str | float) -> None:
    with pytest.raises(InputError, match="it must be a share of FedAvg's bytes"):
        parse_share(given)


@pytest.mark.parametrize(
    ("given", "size"), [("8MB", 8e6), ("1.5 GB", 1.5e9), ("20kB", 2e4), ("300B", 300)]
)
def test_sizes(given: str, size: float) -> None:
    assert parse_size(given) == size


@pytest.mark.parametrize("given", ["8", "0MB", "8 mb", "-1MB", "8MiB", ""])
def test_sizes_that_are_none(given: str) -> None:
    with pytest.raises(InputError, match=r"budget is .* as '8MB'"):
        parse_size(given)


def test_what_an_exchange_may_take() -> None:
    """Five of twenty clients in eight rounds: each takes part twice."""
    assert bytes_allowed(None, "6kB", start()) == 3000
    model = {"model": Packet(NET.params())}
    # As long down as up but for a few letters of the head.
    down = task_bytes(model, Dense(), start(), memory=None)
    assert dense_bytes_of(start()) == pytest.approx(2 * down, rel=0.01)
    assert bytes_allowed("1%", None, start()) == pytest.approx(0.02 * down, rel=0.01)


@given(clients=st.integers(1, 40), cohort=st.integers(1, 40), rounds=st.integers(1, 60))
def test_waits_are_chances(clients: int, cohort: int, rounds: int) -> None:
    chances = waits(clients, min(cohort, clients), rounds)
    assert sum(chances) == pytest.approx(1)
    assert min(chances) >= 0
    # In round t a client has missed (1 - (1-p)^t) / p on average.
    p = min(cohort, clients) / clients
    mean = sum((1 - (1 - p) ** t) / p for t in range(rounds)) / rounds
    assert sum(j * chance for j, chance in enumerate(chances)) == pytest.approx(mean)


@given(target=st.floats(110, 5000))
def test_the_share_that_costs_so_much(target: float) -> None:
    def cost(share: float) -> float:
        return 100 + 10_000 * share

    assert cost(share_for(cost, target)) == pytest.approx(target, rel=0.011)
    assert share_for(cost, 1e9) == MOST_SHARE


def test_a_mask_leaves_a_larger_share() -> None:
    """A half is left: about twice the share takes as many bytes, a little less for fewer places."""
    tree = {"w": torch.zeros(4000)}
    mask = {"w": torch.arange(4000) < 2000}
    share = share_of_less(0.02, tree, mask)
    assert 0.04 < share < 0.06
    less = {"w": torch.zeros(2000)}
    assert coded_bytes(share, less) == pytest.approx(coded_bytes(0.02, tree), rel=0.02)


@pytest.mark.parametrize("has_versions", [False, True])
def test_the_share_within_a_budget(has_versions: bool) -> None:
    made = exchange(has_versions)
    share = share_within(made, "6%", None)
    assert made.bytes(share) == pytest.approx(0.06 * dense_bytes_of(made.federation), rel=0.02)
    by_size = share_within(made, None, "1.8kB")
    assert made.bytes(by_size) == pytest.approx(900, rel=0.02)


def test_who_waits_longer_is_sent_more() -> None:
    few, many = (exchange(True, clients=clients).bytes(0.02) for clients in (5, 100))
    assert few < many
    # With a view always the same, but in the first round.
    views = [exchange(clients=clients).bytes(0.02) for clients in (100, 500)]
    assert views[0] == pytest.approx(views[1], abs=2)
    # No more than the whole model comes down.
    whole = dense_bytes_of(start(clients=1000))
    assert exchange(True, clients=1000).bytes(0.4) < whole


def test_too_little_is_refused_with_the_least() -> None:
    made = exchange()
    with pytest.raises(InputError, match=r"bytes is '0.1%'; .* take ([\d.]+)% of what") as refused:
        share_within(made, "0.1%", None)
    least = float(str(refused.value).split("take ")[1].split("%")[0])
    assert share_within(made, f"{1.05 * least}%", None) > 0
    with pytest.raises(
        InputError, match=r"budget is '300B'; .* take [\d.]+kB for each client in 8"
    ):
        share_within(made, None, "300B")
