"""How the process is set while reports are taken, and that it is put back."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from fedgrove.runs.serving import COLLECT_AFTER, SMALL, serving


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    threads = torch.get_num_threads()
    threshold = gc.get_threshold()
    torch.set_num_threads(2)
    gc.set_threshold(700, 10, 10)
    yield
    torch.set_num_threads(threads)
    gc.set_threshold(*threshold)


@pytest.mark.parametrize(("parameters", "threads"), [(SMALL - 1, 1), (SMALL, 2)])
def test_small_networks_take_one_thread(parameters: int, threads: int) -> None:
    with pytest.raises(ValueError, match="on purpose"), serving(parameters):
        assert torch.get_num_threads() == threads
        assert gc.get_threshold() == (COLLECT_AFTER, 10, 10)
        raise ValueError("on purpose")
    assert torch.get_num_threads() == 2
    assert gc.get_threshold() == (700, 10, 10)


def test_who_wants_no_collections_gets_none() -> None:
    gc.set_threshold(0, 10, 10)
    with serving(1):
        assert gc.get_threshold() == (0, 10, 10)
    assert gc.get_threshold() == (0, 10, 10)
