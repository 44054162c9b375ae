"""The built-in networks: for sensor windows, for images, and for inputs of any shape."""

from __future__ import annotations

import math
from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import check
from .cpu_training.series import two_blocks
from .dropout import Dropout
from .norms import make_norm

# ---- any shape -----------------------------------------------------------------------------------


class Mlp(nn.Module):
    """Two hidden layers of ``hidden`` units with ReLU on the flattened input, then FC classes."""

    def __init__(self, shape: tuple[int, ...], classes: int, hidden: int = 64) -> None:
        super().__init__()
        self.fc1 = nn.Linear(math.prod(shape), hidden)
        self.fc2 = nn.Linear(hidden, hidden)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of a batch of any shape."""
        x = F.relu(self.fc1(x.flatten(1)))
        x = F.relu(self.fc2(x))
        logits: Tensor = self.head(x)
        return logits


# ---- windows of sensor readings ------------------------------------------------------------------


# Classes, and not a change of the weights afterwards: code that draws a layer's weights again
# (fedgrove.nets.Net.redraw) calls its reset_parameters.
class GlorotConv2d(nn.Conv2d):
    """A convolution that starts as TensorFlow's do: Glorot uniform weights, zero biases."""

    def reset_parameters(self) -> None:
        """Draw the convolution's weights."""
        draw_glorot(self)


class GlorotLinear(nn.Linear):
    """A linear layer that starts as TensorFlow's do: Glorot uniform weights, zero biases."""

    def reset_parameters(self) -> None:
        """Draw the linear layer's weights."""
        draw_glorot(self)


def draw_glorot(layer: nn.Conv2d | nn.Linear) -> None:
    r"""Draw weights uniformly in :math:`\pm\sqrt{6 / (fan_{in} + fan_{out})}`, set biases to 0.

    (Glorot & Bengio 2010, Eq. 16; a fan is the number of channels times the size of the kernel.)
    """
    nn.init.xavier_uniform_(layer.weight)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


class HarCnn(nn.Module):
    """The 1D-CNN of CA-AFP: 2 × (conv 5, ReLU, pool 2, dropout .3), FC 32, dropout .2, FC classes.

    89,254 parameters for UCI-HAR (9 × 128, 6 classes), 124,198 for WISDM (3 × 200, 6 classes).
    ``dropout=False`` leaves dropout out, for comparisons that must be exact. ``init="glorot"``
    starts as the paper's network does, which is TensorFlow's; ``"torch"`` draws weights and biases
    within 1/sqrt(fan_in).
    """

    def __init__(
        self, shape: tuple[int, ...], classes: int, dropout: bool = True, init: str = "torch"
    ) -> None:
        super().__init__()
        check(init in ("torch", "glorot"), "init", init, "torch or glorot")
        channels, length = shape
        drop = Dropout if dropout else nn.Identity
        conv = GlorotConv2d if init == "glorot" else nn.Conv2d
        linear = GlorotLinear if init == "glorot" else nn.Linear
        # A window is treated as an image of height 1: torch's CPU kernels for images with channels
        # last are 1.6 (convolution) to 3 times (pooling) as fast as those for series.
        self.conv1 = conv(channels, 64, (1, 5), padding=(0, 2))
        self.drop1 = drop(0.3)
        self.conv2 = conv(64, 64, (1, 5), padding=(0, 2))
        self.drop2 = drop(0.3)
        self.fc1 = linear(64 * (length // 4), 32)
        self.drop3 = drop(0.2)
        self.head = linear(32, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of windows ``(batch, channels, length)``."""
        # One function for both blocks: in training on a CPU it is faster than layer by layer.
        x = two_blocks(self.conv1, self.drop1, self.conv2, self.drop2, x)
        x = self.drop3(F.relu(self.fc1(x.flatten(1))))
        logits: Tensor = self.head(x)
        return logits


# ---- images --------------------------------------------------------------------------------------


class _TwoConvCnn(nn.Module):
    """2 × (conv 5, ReLU, pool 2) with 32 and 64 channels, then linear layers with ReLU between."""

    channels_last = True

    def __init__(
        self, shape: tuple[int, ...], classes: int, hidden: tuple[int, ...], padding: int
    ) -> None:
        super().__init__()
        channels, *sides = shape
        self.conv1 = nn.Conv2d(channels, 32, 5, padding=padding)
        self.conv2 = nn.Conv2d(32, 64, 5, padding=padding)
        features = 64
        for side in sides:
            for _ in range(2):
                # A kernel of 5 takes 4 from a side, and padding gives 2 back for each pixel.
                side = (side - 4 + 2 * padding) // 2
            features *= side
        self.hidden = len(hidden)
        for i, units in enumerate(hidden):
            self.add_module(f"fc{i + 1}", nn.Linear(features, units))
            features = units
        self.head = nn.Linear(features, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of images ``(batch, channels, height, width)``."""
        # Pooling and ReLU commute; in this order ReLU sees a quarter of the numbers.
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        x = x.flatten(1)
        for i in range(self.hidden):
            x = F.relu(self.get_submodule(f"fc{i + 1}")(x))
        logits: Tensor = self.head(x)
        return logits


class MnistCnn(_TwoConvCnn):
    """The CNN of FedLayerPrune, 32 and 64 channels.

    2 × (conv 5 with same padding, ReLU, pool 2), FC 128, FC classes. 454,922 parameters at
    1 × 28 × 28 and 10 classes.

    Differs from the paper: it reports about 1.2 M, which its own description does not give.
    """

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__(shape, classes, hidden=(128,), padding=2)


class LeNet(_TwoConvCnn):
    """The LeNet of AdFedWCP, 32 and 64 channels.

    2 × (conv 5, ReLU, pool 2), FC 120, FC 84, FC classes. 256,830 parameters at 3 × 32 × 32 and
    10 classes.
    """

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__(shape, classes, hidden=(120, 84), padding=0)


class LeafCnn(_TwoConvCnn):
    """The LeafCNN of AdFedWCP, 32 and 64 channels.

    2 × (conv 5, ReLU, pool 2), FC 2048, FC classes. 2,247,599 parameters at 1 × 28 × 28 and
    47 classes.
    """

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__(shape, classes, hidden=(2048,), padding=0)


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
            self.add_module(f"norm{i + 1}", make_norm(norm, out))
            channels = out
            rows //= 2
            columns //= 2
        self.head = nn.Linear(channels * rows * columns, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of images ``(batch, channels, height, width)``."""
        for i in range(1, self.blocks + 1):
            x = self.get_submodule(f"conv{i}")(x)
            x = self.get_submodule(f"norm{i}")(x)
            # Pooling and ReLU commute; in this order ReLU sees a quarter of the numbers.
            x = F.relu(F.max_pool2d(x, 2))
        logits: Tensor = self.head(x.flatten(1))
        return logits


# ---- ResNet-18 -----------------------------------------------------------------------------------


class ResidualBlock(nn.Module):
    """Two 3 × 3 convs with norms, added to the input, or to its 1 × 1 projection.

    The projection is there where the shape changes.
    """

    def __init__(self, channels: int, out: int, stride: int, norm: str) -> None:
        super().__init__()
        # A norm layer's shift does what a bias would do.
        bias = norm == "none"
        self.conv1 = nn.Conv2d(channels, out, 3, stride, padding=1, bias=bias)
        self.norm1 = make_norm(norm, out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=bias)
        self.norm2 = make_norm(norm, out)
        self.shortcut: nn.Module = nn.Identity()
        shape_changes = stride != 1 or channels != out
        if shape_changes:
            conv = nn.Conv2d(channels, out, 1, stride, bias=bias)
            self.shortcut = nn.Sequential(OrderedDict(conv=conv, norm=make_norm(norm, out)))

    def forward(self, x: Tensor) -> Tensor:
        """Return ReLU(x' + F(x)), the output of a residual block."""
        y = F.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        return F.relu(y + self.shortcut(x))


STEMS = ("small", "large")
"""How a network for images begins: in full resolution, or with a quarter of it in each direction.
"""


class ResNet18(nn.Module):
    """ResNet-18; with its small ``stem`` (conv 3, stride 1, no pooling) that of FedLayerPrune.

    11,173,962 parameters at 3 × 32 × 32 and 10 classes; ``width`` channels in the first of four
    groups. ``norm``: batch, group (two groups, as in FedAPTA) or none. The large stem is that of
    He et al. and of FedAPTA's code, torchvision's: conv 7 of stride 2 and a pooling of stride 2,
    for images of 224 × 224. It has 11,181,642 parameters.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        classes: int,
        norm: str = "batch",
        width: int = 64,
        stem: str = "small",
    ) -> None:
        super().__init__()
        check(stem in STEMS, "stem", stem, f"one of {', '.join(STEMS)}")
        # Under vmap, torch's GroupNorm raises an error for channels last.
        self.channels_last = norm != "group"
        self.is_large = stem == "large"
        size = 7 if self.is_large else 3
        stride = 2 if self.is_large else 1
        bias = norm == "none"
        self.conv1 = nn.Conv2d(shape[0], width, size, stride, padding=size // 2, bias=bias)
        self.norm1 = make_norm(norm, width)
        self.layer1 = _two_residual_blocks(width, width, 1, norm)
        self.layer2 = _two_residual_blocks(width, 2 * width, 2, norm)
        self.layer3 = _two_residual_blocks(2 * width, 4 * width, 2, norm)
        self.layer4 = _two_residual_blocks(4 * width, 8 * width, 2, norm)
        self.head = nn.Linear(8 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of images ``(batch, channels, height, width)``."""
        x = F.relu(self.norm1(self.conv1(x)))
        if self.is_large:
            x = F.max_pool2d(x, 3, 2, 1)
        x = self.layer1(x)
        x = self.layer2(x)
        x = self.layer3(x)
        x = self.layer4(x)
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


def _two_residual_blocks(channels: int, out: int, stride: int, norm: str) -> nn.Sequential:
    return nn.Sequential(
        ResidualBlock(channels, out, stride, norm), ResidualBlock(out, out, 1, norm)
    )


# ---- ShuffleNetV2 --------------------------------------------------------------------------------

STEM_CHANNELS = 24
"""Channels behind the first convolution of ShuffleNetV2, at every width of the paper."""
LAST = 1024
"""Channels in front of its head, at the widths 0.5, 1.0 and 1.5 of the paper."""
BLOCKS = (4, 8, 4)
"""How many blocks each of its three stages has."""


class ShuffleUnit(nn.Module):
    """Half of the channels pass by, half go through three convs; then both are shuffled.

    The convs are 1 × 1, 3 × 3 depthwise and 1 × 1. Where the image is halved, in the first unit of
    a stage, nothing is split: all channels go through both branches, and the one that otherwise
    passes by has a depthwise and a 1 × 1 conv.
    """

    def __init__(self, channels: int, out: int, stride: int, norm: str) -> None:
        super().__init__()
        half = out // 2
        # A norm layer's shift does what a bias would do.
        bias = norm == "none"
        self.splits = stride == 1
        if not self.splits:
            self.side_conv1 = _depthwise(channels, stride, bias)
            self.side_norm1 = make_norm(norm, channels)
            self.side_conv2 = nn.Conv2d(channels, half, 1, bias=bias)
            self.side_norm2 = make_norm(norm, half)
        self.conv1 = nn.Conv2d(half if self.splits else channels, half, 1, bias=bias)
        self.norm1 = make_norm(norm, half)
        self.conv2 = _depthwise(half, stride, bias)
        self.norm2 = make_norm(norm, half)
        self.conv3 = nn.Conv2d(half, half, 1, bias=bias)
        self.norm3 = make_norm(norm, half)

    def forward(self, x: Tensor) -> Tensor:
        """Return both branches side by side, shuffled: x₁, y₁, x₂, y₂, ..."""
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
    """ShuffleNetV2 (Ma et al. 2018) of width 1.0; its small ``stem`` is for images of 32 × 32.

    1,263,854 parameters at 3 × 32 × 32 and 10 classes; ``width`` channels in the first of three
    stages: 116 is the paper's 1.0, 48 its 0.5, 176 its 1.5. ``norm``: batch, group (two groups, as
    in FedAPTA) or none. Channels are in the paper's order, and so in torchvision's. The large stem
    is that of the paper and of FedAPTA's code, torchvision's: the first conv has stride 2, and a
    pooling follows, for images of 224 × 224. Both have the same parameters.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        classes: int,
        norm: str = "batch",
        width: int = 116,
        stem: str = "small",
    ) -> None:
        super().__init__()
        check(stem in STEMS, "stem", stem, f"one of {', '.join(STEMS)}")
        # Half of the channels in two groups of a GroupNorm.
        check(width > 0 and width % 4 == 0, "width", width, "a multiple of 4")
        # Under vmap, torch's GroupNorm raises an error for channels last.
        self.channels_last = norm != "group"
        self.is_large = stem == "large"
        stride = 2 if self.is_large else 1
        bias = norm == "none"
        self.conv1 = nn.Conv2d(shape[0], STEM_CHANNELS, 3, stride, padding=1, bias=bias)
        self.norm1 = make_norm(norm, STEM_CHANNELS)
        self.stage2 = _shuffle_stage(STEM_CHANNELS, width, BLOCKS[0], norm)
        self.stage3 = _shuffle_stage(width, 2 * width, BLOCKS[1], norm)
        self.stage4 = _shuffle_stage(2 * width, 4 * width, BLOCKS[2], norm)
        self.conv5 = nn.Conv2d(4 * width, LAST, 1, bias=bias)
        self.norm5 = make_norm(norm, LAST)
        self.head = nn.Linear(LAST, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of images ``(batch, channels, height, width)``."""
        x = F.relu(self.norm1(self.conv1(x)))
        if self.is_large:
            x = F.max_pool2d(x, 3, 2, 1)
        x = self.stage2(x)
        x = self.stage3(x)
        x = self.stage4(x)
        x = F.relu(self.norm5(self.conv5(x)))
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


def _depthwise(channels: int, stride: int, bias: bool) -> nn.Conv2d:
    return nn.Conv2d(channels, channels, 3, stride, padding=1, groups=channels, bias=bias)


def _shuffle_stage(channels: int, out: int, blocks: int, norm: str) -> nn.Sequential:
    units = [ShuffleUnit(channels, out, 2, norm)]
    for _ in range(blocks - 1):
        units.append(ShuffleUnit(out, out, 1, norm))
    return nn.Sequential(*units)
