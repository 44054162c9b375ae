"""Which channels are found to be removable."""

import torch
from torch import nn

from fedgrove.channels.find_groups import find_groups
from fedgrove.nets import Net


def test_groups_that_share_a_weight_are_not_removable() -> None:
    """Two layers with one weight: if all groups lost the same channels, cutting them would work."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(6, 16)
            self.b = nn.Linear(16, 16)
            self.c = nn.Linear(16, 16)
            self.c.weight = self.b.weight
            self.head = nn.Linear(16, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.relu(self.a(x))
            x = torch.relu(self.c(torch.relu(self.b(x))))
            logits: torch.Tensor = self.head(x)
            return logits

    assert find_groups(Net(Tied(), (6,))) == ()
