"""ShuffleNetV2 for small images."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import check
from . import norms

STEM = 24
"""Channels behind the first convolution, at every width of the paper."""
LAST = 1024
"""Channels in front of the head, at the widths 0.5, 1.0 and 1.5 of the paper."""
BLOCKS = (4, 8, 4)
"""How many blocks each of the three stages has."""


class Unit(nn.Module):
    """Half of the channels pass by, half go through three convs; then both are shuffled.

    The convs are 1 × 1, 3 × 3 depthwise and 1 × 1. Where the image is halved, in the first unit of
    a stage, nothing is split: all channels go through both branches, and the one that else passes
    by has a depthwise and a 1 × 1 conv.
    """

    def __init__(self, channels: int, out: int, stride: int, norm: str) -> None:
        super().__init__()
        half = out // 2
        # A norm layer's shift does what a bias would do.
        bias = norm == "none"
        self.splits = stride == 1
        if not self.splits:
            self.side_conv1 = _depthwise(channels, stride, bias)
            self.side_norm1 = norms.layer(norm, channels)
            self.side_conv2 = nn.Conv2d(channels, half, 1, bias=bias)
            self.side_norm2 = norms.layer(norm, half)
        self.conv1 = nn.Conv2d(half if self.splits else channels, half, 1, bias=bias)
        self.norm1 = norms.layer(norm, half)
        self.conv2 = _depthwise(half, stride, bias)
        self.norm2 = norms.layer(norm, half)
        self.conv3 = nn.Conv2d(half, half, 1, bias=bias)
        self.norm3 = norms.layer(norm, half)

    def forward(self, x: Tensor) -> Tensor:
        """Both branches side by side, shuffled: x₁, y₁, x₂, y₂, ..."""
        if self.splits:
            side, x = torch.chunk(x, 2, 1)
        else:
            side = self.side_norm1(self.side_conv1(x))
            side = F.relu(self.side_norm2(self.side_conv2(side)))
        y = F.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        y = F.relu(self.norm3(self.conv3(y)))
        return F.channel_shuffle(torch.cat((side, y), 1), 2)


class ShuffleNetV2(nn.Module):
    """ShuffleNetV2 (Ma et al. 2018) of width 1.0 with the 32 × 32 stem of FedAPTA's ResNet-18.

    1,263,854 parameters at 3 × 32 × 32 and 10 classes; ``width`` channels in the first of three
    stages: 116 is the paper's 1.0, 48 its 0.5, 176 its 1.5. ``norm``: batch, group (two groups, as
    in FedAPTA) or none. Channels are in the paper's order, and so in torchvision's.

    Differs from the paper: it starts with a conv of stride 2 and a pooling, for images of
    224 × 224. FedAPTA does not give its stem; both have the same parameters.
    """

    def __init__(
        self, shape: tuple[int, ...], classes: int, norm: str = "batch", width: int = 116
    ) -> None:
        super().__init__()
        # Half of the channels in two groups of a GroupNorm.
        check(width > 0 and width % 4 == 0, "width", width, "a multiple of 4")
        # Under vmap, torch's GroupNorm raises an error for channels last.
        self.channels_last = norm != "group"
        bias = norm == "none"
        self.conv1 = nn.Conv2d(shape[0], STEM, 3, padding=1, bias=bias)
        self.norm1 = norms.layer(norm, STEM)
        self.stage2 = _stage(STEM, width, BLOCKS[0], norm)
        self.stage3 = _stage(width, 2 * width, BLOCKS[1], norm)
        self.stage4 = _stage(2 * width, 4 * width, BLOCKS[2], norm)
        self.conv5 = nn.Conv2d(4 * width, LAST, 1, bias=bias)
        self.norm5 = norms.layer(norm, LAST)
        self.head = nn.Linear(LAST, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images ``(batch, channels, height, width)``."""
        x = F.relu(self.norm1(self.conv1(x)))
        x = self.stage2(x)
        x = self.stage3(x)
        x = self.stage4(x)
        x = F.relu(self.norm5(self.conv5(x)))
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


def _depthwise(channels: int, stride: int, bias: bool) -> nn.Conv2d:
    return nn.Conv2d(channels, channels, 3, stride, padding=1, groups=channels, bias=bias)


def _stage(channels: int, out: int, blocks: int, norm: str) -> nn.Sequential:
    units = [Unit(channels, out, 2, norm)]
    for _ in range(blocks - 1):
        units.append(Unit(out, out, 1, norm))
    return nn.Sequential(*units)
