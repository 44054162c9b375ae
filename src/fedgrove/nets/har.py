"""The network for windows of sensor readings."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from .dropout import Dropout


class HarCnn(nn.Module):
    """The 1D-CNN of CA-AFP: 2 × (conv 5, ReLU, pool 2, dropout .3), FC 32, dropout .2, FC classes.

    89,254 parameters for UCI-HAR (9 × 128, 6 classes), 124,198 for WISDM (3 × 200, 6 classes).
    ``dropout=False`` leaves dropout out, for comparisons that must be exact. A window is treated as
    an image of height 1: torch's CPU kernels for images with channels last are 1.6 (convolution) to
    3 times (pooling) as fast as those for series.
    """

    def __init__(self, shape: tuple[int, ...], classes: int, dropout: bool = True) -> None:
        super().__init__()
        channels, length = shape
        drop = Dropout if dropout else nn.Identity
        self.conv1 = nn.Conv2d(channels, 64, (1, 5), padding=(0, 2))
        self.drop1 = drop(0.3)
        self.conv2 = nn.Conv2d(64, 64, (1, 5), padding=(0, 2))
        self.drop2 = drop(0.3)
        self.fc1 = nn.Linear(64 * (length // 4), 32)
        self.drop3 = drop(0.2)
        self.head = nn.Linear(32, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of windows ``(batch, channels, length)``."""
        # Channels last in memory; `contiguous(memory_format=...)` would do it too, not under vmap.
        x = x.transpose(1, 2).contiguous().transpose(1, 2).unsqueeze(2)
        # Pooling and ReLU commute; in this order ReLU sees half the numbers.
        x = self.drop1(F.relu(F.max_pool2d(self.conv1(x), (1, 2))))
        x = self.drop2(F.relu(F.max_pool2d(self.conv2(x), (1, 2))))
        x = self.drop3(F.relu(self.fc1(x.flatten(1))))
        logits: Tensor = self.head(x)
        return logits
