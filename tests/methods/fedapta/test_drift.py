"""FedDC's drift: its three equations by hand, and what its terms do to a gradient."""

from __future__ import annotations

import pytest
import torch

from fedgrove.core import Batch
from fedgrove.errors import InputError
from fedgrove.methods.fedapta.drift import DriftCorrection, correction, drifted


def test_the_terms_by_hand() -> None:
    """w = (1, 2), h = (1, 0), received (1, 1): w + h - t = (1, 1), half of alpha .5 times 2 is .5;
    c = (3, -1): <w, c> = 3 - 2 = 1. In all 1.5; the gradient is alpha (1, 1) + c = (3.5, -.5)."""
    w = torch.tensor([1.0, 2.0], requires_grad=True)
    carry = {
        "model": {"w": torch.tensor([1.0, 1.0]), "buffer": torch.tensor([9.0])},
        "drift": {"w": torch.tensor([1.0, 0.0])},
        "correction": {"w": torch.tensor([3.0, -1.0])},
    }
    batch = Batch(*[torch.zeros(1)] * 5)
    loss, aux = DriftCorrection(alpha=0.5)(None, {"w": w}, batch, carry)  # type: ignore[arg-type]
    assert (loss.item(), aux) == (1.5, {})
    loss.backward()
    assert w.grad is not None
    assert w.grad.tolist() == [3.5, -0.5]


def test_the_correction_by_hand() -> None:
    """(3 - 1) / (4 steps · .5) = 1."""
    along = correction({"w": torch.tensor([3.0])}, {"w": torch.tensor([1.0])}, steps=4, lr=0.5)
    assert along["w"].tolist() == [1.0]


def test_the_drift_by_hand() -> None:
    """1 + (5 - 3) = 3."""
    h, w, t = ({"w": torch.tensor([x])} for x in (1.0, 5.0, 3.0))
    assert drifted(h, w, t)["w"].tolist() == [3.0]


def test_a_negative_alpha_is_refused() -> None:
    with pytest.raises(InputError, match="alpha is -1"):
        DriftCorrection(alpha=-1)
