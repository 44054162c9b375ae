"""ResNet-18 for small images."""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn
from torch.nn import functional as F

from . import norms


class Block(nn.Module):
    """Two 3 × 3 convs with norms, added to the input, or to its 1 × 1 projection.

    The projection is there where the shape changes.
    """

    def __init__(self, channels: int, out: int, stride: int, norm: str) -> None:
        super().__init__()
        # A norm layer's shift does what a bias would do.
        bias = norm == "none"
        self.conv1 = nn.Conv2d(channels, out, 3, stride, padding=1, bias=bias)
        self.norm1 = norms.layer(norm, out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=bias)
        self.norm2 = norms.layer(norm, out)
        self.shortcut: nn.Module = nn.Identity()
        shape_changes = stride != 1 or channels != out
        if shape_changes:
            conv = nn.Conv2d(channels, out, 1, stride, bias=bias)
            self.shortcut = nn.Sequential(OrderedDict(conv=conv, norm=norms.layer(norm, out)))

    def forward(self, x: Tensor) -> Tensor:
        """ReLU(x' + F(x))."""
        y = F.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        return F.relu(y + self.shortcut(x))


class ResNet18(nn.Module):
    """ResNet-18 with the 32 × 32 stem (conv 3, stride 1, no pooling) of FedLayerPrune and FedAPTA.

    11,173,962 parameters at 3 × 32 × 32 and 10 classes; ``width`` channels in the first of four
    groups. ``norm``: batch, group (two groups, as in FedAPTA) or none.

    Differs from the paper: He et al. start with conv 7 of stride 2 and a pooling, for images of
    224 × 224.
    """

    def __init__(
        self, shape: tuple[int, ...], classes: int, norm: str = "batch", width: int = 64
    ) -> None:
        super().__init__()
        # Under vmap, torch's GroupNorm raises an error for channels last.
        self.channels_last = norm != "group"
        self.conv1 = nn.Conv2d(shape[0], width, 3, padding=1, bias=norm == "none")
        self.norm1 = norms.layer(norm, width)
        self.layer1 = _two_blocks(width, width, 1, norm)
        self.layer2 = _two_blocks(width, 2 * width, 2, norm)
        self.layer3 = _two_blocks(2 * width, 4 * width, 2, norm)
        self.layer4 = _two_blocks(4 * width, 8 * width, 2, norm)
        self.head = nn.Linear(8 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images ``(batch, channels, height, width)``."""
        x = F.relu(self.norm1(self.conv1(x)))
        x = self.layer1(x)
        x = self.layer2(x)
        x = self.layer3(x)
        x = self.layer4(x)
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


def _two_blocks(channels: int, out: int, stride: int, norm: str) -> nn.Sequential:
    return nn.Sequential(Block(channels, out, stride, norm), Block(out, out, 1, norm))
