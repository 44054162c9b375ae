"""FedAdam: two rounds against plain torch."""

from __future__ import annotations

from pathlib import Path

import torch
from tests.contract import Contract
from tests.methods import plain_torch
from tests.methods.plain_torch import PLAIN_SGD

from fedgrove.methods import FedAdam

CONTRACT = Contract(
    off=FedAdam(server=None),
    why_no_liar_spoils_it="its server moves no parameter by much more than its step",
)


def next_v(v: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    return 0.99 * v + 0.01 * d**2


def test_two_rounds_equal_plain_torch(tmp_path: Path) -> None:
    """beta1 = 0.9, tau = .001, and the step that the method has."""
    method = FedAdam(local=PLAIN_SGD)
    run, state = plain_torch.play_two_rounds(method, tmp_path)
    step = method.server.step  # type: ignore[union-attr]
    x = plain_torch.initial()
    m = {name: torch.zeros_like(value) for name, value in x.items()}
    v = {name: torch.full_like(value, 1e-6) for name, value in x.items()}
    for number in range(2):
        mean = plain_torch.mean([plain_torch.train(x, i, number) for i in range(2)])
        for name in x:
            d = mean[name] - x[name]
            m[name] = 0.9 * m[name] + (1 - 0.9) * d
            v[name] = next_v(v[name], d)
            x[name] = x[name] + step * m[name] / (v[name].sqrt() + 1e-3)
    assert plain_torch.far(run.params, state.model) > 1e-3
    assert plain_torch.far(x, state.model) < 1e-12
