"""The network that takes inputs of any shape."""

from __future__ import annotations

import math

from torch import Tensor, nn
from torch.nn import functional as F


class Mlp(nn.Module):
    """Two hidden layers of ``hidden`` units with ReLU on the flattened input, then FC classes."""

    def __init__(self, shape: tuple[int, ...], classes: int, hidden: int = 64) -> None:
        super().__init__()
        self.fc1 = nn.Linear(math.prod(shape), hidden)
        self.fc2 = nn.Linear(hidden, hidden)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of a batch of any shape."""
        x = F.relu(self.fc1(x.flatten(1)))
        x = F.relu(self.fc2(x))
        logits: Tensor = self.head(x)
        return logits
