"""The small networks for images."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from . import norms


class MnistCnn(nn.Module):
    """The CNN of FedLayerPrune: 2 × (conv 5 with same padding, ReLU, pool 2) of 32 and 64 channels, FC 128, FC classes.

    454,922 parameters at 1 × 28 × 28 and 10 classes.

    Differs from the paper: it says about 1.2 M, which its own description does not give.
    """

    channels_last = True

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        channels, height, width = shape
        self.conv1 = nn.Conv2d(channels, 32, 5, padding=2)
        self.conv2 = nn.Conv2d(32, 64, 5, padding=2)
        self.fc1 = nn.Linear(64 * (height // 4) * (width // 4), 128)
        self.head = nn.Linear(128, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images ``(batch, channels, height, width)``."""
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        logits: Tensor = self.head(F.relu(self.fc1(x.flatten(1))))
        return logits


def _valid(side: int) -> int:
    """What two rounds of (conv 5 without padding, pool 2) leave of a side."""
    return ((side - 4) // 2 - 4) // 2


class LeNet(nn.Module):
    """The LeNet of AdFedWCP: 2 × (conv 5, ReLU, pool 2) of 32 and 64 channels, FC 120, FC 84, FC classes.

    256,830 parameters at 3 × 32 × 32 and 10 classes.
    """

    channels_last = True

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        channels, height, width = shape
        self.conv1 = nn.Conv2d(channels, 32, 5)
        self.conv2 = nn.Conv2d(32, 64, 5)
        self.fc1 = nn.Linear(64 * _valid(height) * _valid(width), 120)
        self.fc2 = nn.Linear(120, 84)
        self.head = nn.Linear(84, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images ``(batch, channels, height, width)``."""
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        x = F.relu(self.fc1(x.flatten(1)))
        logits: Tensor = self.head(F.relu(self.fc2(x)))
        return logits


class LeafCnn(nn.Module):
    """The LeafCNN of AdFedWCP: 2 × (conv 5, ReLU, pool 2) of 32 and 64 channels, FC 2048, FC classes.

    2,247,599 parameters at 1 × 28 × 28 and 47 classes.
    """

    channels_last = True

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        channels, height, width = shape
        self.conv1 = nn.Conv2d(channels, 32, 5)
        self.conv2 = nn.Conv2d(32, 64, 5)
        self.fc1 = nn.Linear(64 * _valid(height) * _valid(width), 2048)
        self.head = nn.Linear(2048, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images ``(batch, channels, height, width)``."""
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        logits: Tensor = self.head(F.relu(self.fc1(x.flatten(1))))
        return logits


class BnCnn(nn.Module):
    """The CNN of SAFL: ``blocks`` × (conv 3 with same padding, norm, ReLU, pool 2), FC classes.

    ``width`` channels in the first block, doubling from block to block. ``norm="none"`` is the net on which SAFL
    runs FedAvg. A conv has a bias only where no norm follows, whose shift does the same.

    Differs from the paper: it gives no widths; with 64, four blocks make a model of 6.2 MB for CIFAR-10.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        classes: int,
        blocks: int = 4,
        width: int = 64,
        norm: str = "batch",
    ) -> None:
        super().__init__()
        channels, high, wide = shape
        self.blocks = blocks
        self.channels_last = norm != "group"  # which vmap cannot do so
        for i in range(blocks):
            out = width * 2**i
            self.add_module(
                f"conv{i + 1}", nn.Conv2d(channels, out, 3, padding=1, bias=norm == "none")
            )
            self.add_module(f"norm{i + 1}", norms.layer(norm, out))
            channels, high, wide = out, high // 2, wide // 2
        self.head = nn.Linear(channels * high * wide, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images ``(batch, channels, height, width)``."""
        for i in range(1, self.blocks + 1):
            x = self.get_submodule(f"norm{i}")(self.get_submodule(f"conv{i}")(x))
            x = F.relu(F.max_pool2d(x, 2))
        logits: Tensor = self.head(x.flatten(1))
        return logits
