"""The small networks for images."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from . import norms


class MnistCnn(nn.Module):
    """The CNN of FedLayerPrune, 32 and 64 channels.

    2 × (conv 5 with same padding, ReLU, pool 2), FC 128, FC classes. 454,922 parameters at
    1 × 28 × 28 and 10 classes.

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
        x = _convolved(x, self.conv1, self.conv2)
        x = F.relu(self.fc1(x))
        logits: Tensor = self.head(x)
        return logits


class LeNet(nn.Module):
    """The LeNet of AdFedWCP, 32 and 64 channels.

    2 × (conv 5, ReLU, pool 2), FC 120, FC 84, FC classes. 256,830 parameters at 3 × 32 × 32 and
    10 classes.
    """

    channels_last = True

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        channels, height, width = shape
        self.conv1 = nn.Conv2d(channels, 32, 5)
        self.conv2 = nn.Conv2d(32, 64, 5)
        self.fc1 = nn.Linear(64 * _convolved_side(height) * _convolved_side(width), 120)
        self.fc2 = nn.Linear(120, 84)
        self.head = nn.Linear(84, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images ``(batch, channels, height, width)``."""
        x = _convolved(x, self.conv1, self.conv2)
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        logits: Tensor = self.head(x)
        return logits


class LeafCnn(nn.Module):
    """The LeafCNN of AdFedWCP, 32 and 64 channels.

    2 × (conv 5, ReLU, pool 2), FC 2048, FC classes. 2,247,599 parameters at 1 × 28 × 28 and
    47 classes.
    """

    channels_last = True

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        channels, height, width = shape
        self.conv1 = nn.Conv2d(channels, 32, 5)
        self.conv2 = nn.Conv2d(32, 64, 5)
        self.fc1 = nn.Linear(64 * _convolved_side(height) * _convolved_side(width), 2048)
        self.head = nn.Linear(2048, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images ``(batch, channels, height, width)``."""
        x = _convolved(x, self.conv1, self.conv2)
        x = F.relu(self.fc1(x))
        logits: Tensor = self.head(x)
        return logits


class BnCnn(nn.Module):
    """The CNN of SAFL: ``blocks`` × (conv 3 with same padding, norm, ReLU, pool 2), FC classes.

    ``width`` channels in the first block, doubling from block to block. ``norm="none"`` is the net
    on which SAFL runs FedAvg. A conv has a bias only where no norm follows: a norm's shift does the
    same.

    Differs from the paper: it gives no widths; with 64, four blocks make a model of 6.2 MB for
    CIFAR-10.
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
        channels, rows, columns = shape
        self.blocks = blocks
        # Under vmap, torch's GroupNorm raises an error for channels last.
        self.channels_last = norm != "group"
        bias = norm == "none"
        for i in range(blocks):
            out = width * 2**i
            self.add_module(f"conv{i + 1}", nn.Conv2d(channels, out, 3, padding=1, bias=bias))
            self.add_module(f"norm{i + 1}", norms.layer(norm, out))
            channels = out
            rows //= 2
            columns //= 2
        self.head = nn.Linear(channels * rows * columns, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images ``(batch, channels, height, width)``."""
        for i in range(1, self.blocks + 1):
            x = self.get_submodule(f"conv{i}")(x)
            x = self.get_submodule(f"norm{i}")(x)
            # Pooling first, as in _convolved.
            x = F.relu(F.max_pool2d(x, 2))
        logits: Tensor = self.head(x.flatten(1))
        return logits


def _convolved(x: Tensor, conv1: nn.Module, conv2: nn.Module) -> Tensor:
    """2 × (conv, ReLU, pool 2), flattened to ``(batch, numbers)``."""
    # Pooling and ReLU commute; in this order ReLU sees a quarter of the numbers.
    x = F.relu(F.max_pool2d(conv1(x), 2))
    x = F.relu(F.max_pool2d(conv2(x), 2))
    return x.flatten(1)


def _convolved_side(side: int) -> int:
    """What is left of an image's side after 2 × (conv 5 without padding, pool 2)."""
    # A kernel of 5 without padding takes 4 from a side.
    return ((side - 4) // 2 - 4) // 2
