"""What the tests of the lab share."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for every column, whatever terminal the tests run in."""
    monkeypatch.setenv("COLUMNS", "240")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
