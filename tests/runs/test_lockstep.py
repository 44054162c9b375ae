"""Torch's threads and Python's collections while a run trains, and that they are put back."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from fedgrove.runs.lockstep import NEW_OBJECTS, SMALL_NET, collect_rarely, limit_threads


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def take(parameters: int, threads: int) -> None:
    with limit_threads(parameters):
        assert torch.get_num_threads() == threads
        raise ValueError("on purpose")


@pytest.mark.parametrize(("parameters", "threads"), [(SMALL_NET - 1, 1), (SMALL_NET, 2)])
def test_small_networks_take_one_thread(parameters: int, threads: int) -> None:
    with pytest.raises(ValueError, match="on purpose"):
        take(parameters, threads)
    assert torch.get_num_threads() == 2


def collect(expected: tuple[int, int, int]) -> None:
    with collect_rarely():
        assert gc.get_threshold() == expected
        raise ValueError("on purpose")


@pytest.mark.parametrize(
    ("before", "meanwhile"),
    [(700, NEW_OBJECTS), (0, 0), (NEW_OBJECTS + 1, NEW_OBJECTS + 1)],
    ids=["default", "off", "seldom already"],
)
def test_garbage_is_looked_for_less_often(before: int, meanwhile: int) -> None:
    usual = gc.get_threshold()
    try:
        gc.set_threshold(before, 11, 12)
        others = gc.get_threshold()[1:]
        with pytest.raises(ValueError, match="on purpose"):
            collect((meanwhile, *others))
        assert gc.get_threshold() == (before, *others)
    finally:
        gc.set_threshold(*usual)
