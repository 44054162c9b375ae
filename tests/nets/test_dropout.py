"""Dropout from few bits: the share it drops, the mean it keeps, and how it behaves under vmap."""

import pytest
import torch
from torch.func import vmap

from fedgrove.errors import InputError
from fedgrove.nets.dropout import Dropout


@pytest.mark.parametrize("shape", [(200_000,), (7, 3), (10, 20, 30, 40)])
@pytest.mark.parametrize("p", [0.2, 0.3, 0.5])
def test_drops_its_share_and_keeps_the_mean(shape: tuple[int, ...], p: float) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        y = Dropout(p)(torch.ones(shape))
    n = y.numel()
    share = (y == 0).double().mean().item()
    assert abs(share - p) < 5 * (p * (1 - p) / n) ** 0.5 + 2**-16
    kept = y[y != 0]
    assert torch.allclose(kept, torch.full_like(kept, 1 / (1 - round(p * 65536) / 65536)))


def test_neighbours_are_independent() -> None:
    """The four pieces of one 64-bit draw do not repeat each other."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        kept = (Dropout(0.5)(torch.ones(400_000)) > 0).double().view(-1, 4)
    correlation = torch.corrcoef(kept.T)
    assert (correlation - torch.eye(4)).abs().max() < 0.02


def test_eval_mode_and_rate_zero_do_nothing() -> None:
    x = torch.randn(5, 5)
    assert Dropout(0.5).eval()(x) is x
    assert Dropout(0.0)(x) is x


# A few numbers, and so many that they are not left to torch.
@pytest.mark.parametrize("n", [100, 10_001])
def test_under_vmap_every_client_draws_its_own(n: int) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        y = vmap(Dropout(0.5), randomness="different")(torch.ones(3, n))
    assert not torch.equal(y[0], y[1])
    assert not torch.equal(y[1], y[2])


def test_an_impossible_rate_is_refused() -> None:
    with pytest.raises(InputError, match=r"p is 1.0; it must be in"):
        Dropout(1.0)
