"""Torch's threads while reports are taken, and that they are put back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fedgrove.runs.serving import SMALL, serving


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def take(parameters: int, threads: int) -> None:
    with serving(parameters):
        assert torch.get_num_threads() == threads
        raise ValueError("on purpose")


@pytest.mark.parametrize(("parameters", "threads"), [(SMALL - 1, 1), (SMALL, 2)])
def test_small_networks_take_one_thread(parameters: int, threads: int) -> None:
    with pytest.raises(ValueError, match="on purpose"):
        take(parameters, threads)
    assert torch.get_num_threads() == 2
