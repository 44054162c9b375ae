"""How much a weight matters: golden values."""

from __future__ import annotations

import torch

from fedgrove.parts.score import Magnitude


def test_magnitude_by_hand() -> None:
    assert Magnitude()({"w": torch.tensor([-3.0, 0.0, 2.0])})["w"].tolist() == [3.0, 0.0, 2.0]
