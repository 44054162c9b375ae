"""Sets whose targets are the samples that follow."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedgrove import data
from fedgrove.data.sets.generated import make_motion_forecast
from fedgrove.data.sets.har import make_uci_har, make_uci_har_forecast


def test_targets_follow_their_window() -> None:
    """Windows are 32 samples apart: a target of 8 stands in the next window at 64 - 32."""
    dataset = make_motion_forecast(1)
    assert dataset.targets is not None
    assert dataset.x.shape[1:] == (3, 64)
    assert dataset.targets.shape == (len(dataset.x), 24)
    assert dataset.labels[:9] == (*(f"x +{step}" for step in range(1, 9)), "y +1")
    first = dataset.targets[0].reshape(3, 8)
    assert np.array_equal(first, dataset.x[1][:, 32:40])
    # What is held out may not overlap the targets either.
    assert dataset.reach == 72


def test_targets_are_scaled_as_their_inputs() -> None:
    scaled = data.load("motion-forecast", clients=3)
    raw = data.load("motion-forecast", clients=3, standardise=False)
    for k, client in scaled.clients.items():
        own = raw.clients[k]
        mean = own.train.x.mean((0, 2)).repeat_interleave(8)
        deviation = own.train.x.std((0, 2), correction=0).repeat_interleave(8)
        assert torch.allclose(client.test.y, (own.test.y - mean) / deviation, atol=1e-4)
    assert scaled.problem.metric.name == "rmse"
    # One who forecasts the mean of each channel, 0, has an error of about 1.
    y = torch.cat([client.train.y for client in scaled.clients.values()])
    sums = scaled.problem.sums(torch.zeros_like(y), y, torch.ones(len(y)), {})
    error = scaled.problem.metric.value(scaled.problem.select_sums(sums, ""))
    assert error == pytest.approx(1.0, abs=0.05)


def test_uci_windows_are_followed_by_the_next_of_their_chain() -> None:
    """Two chains of 3 and 2 windows, their rows in turn; the last of each has nothing after it."""
    recordings = {0: np.arange(256.0), 1: 1000 + np.arange(192.0)}
    rows = [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2)]
    windows = [recordings[chain][64 * i : 64 * i + 128] for chain, i in rows]
    arrays = {
        "x": np.stack([np.stack([window] * 9) for window in windows]).astype(np.float32),
        "y": np.array([2, 4, 2, 4, 2]),
        "user": np.array([5, 7, 5, 7, 5]),
        "chain": np.array([0, 1, 0, 1, 0]),
    }
    made = make_uci_har_forecast(arrays)
    assert made.targets is not None
    assert made.x[:, 0, 0].tolist() == [0, 64, 1000]
    assert made.x.shape == (3, 9, 128)
    assert made.targets[:, :8].tolist() == [
        list(range(128, 136)),
        list(range(192, 200)),
        list(range(1128, 1136)),
    ]
    assert made.y.tolist() == [2, 2, 4]
    assert made.reach == make_uci_har(arrays).reach + 8
    assert made.user is not None
    assert made.user.tolist() == [0, 0, 1]
