"""The network for windows of sensor readings."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import check
from .cpu_training.series import two_blocks
from .dropout import Dropout


# Classes of their own, and not a change of the weights afterwards: whoever draws a layer anew
# (fedgrove.nets.Net.redraw) calls its reset_parameters.
class GlorotConv2d(nn.Conv2d):
    """A convolution that starts as TensorFlow's do: Glorot uniform weights, zero biases."""

    def reset_parameters(self) -> None:
        """Draw the weights."""
        glorot(self)


class GlorotLinear(nn.Linear):
    """A linear layer that starts as TensorFlow's do."""

    def reset_parameters(self) -> None:
        """Draw the weights."""
        glorot(self)


def glorot(layer: nn.Conv2d | nn.Linear) -> None:
    r"""Weights uniform in :math:`\pm\sqrt{6 / (fan_{in} + fan_{out})}`, biases 0.

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
    within 1/sqrt(fan_in). A window is treated as an image of height 1: torch's CPU kernels for
    images with channels last are 1.6 (convolution) to 3 times (pooling) as fast as those for
    series. When it trains on a CPU, both blocks are one function
    (:mod:`fedgrove.nets.cpu_training.series`).
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
        self.conv1 = conv(channels, 64, (1, 5), padding=(0, 2))
        self.drop1 = drop(0.3)
        self.conv2 = conv(64, 64, (1, 5), padding=(0, 2))
        self.drop2 = drop(0.3)
        self.fc1 = linear(64 * (length // 4), 32)
        self.drop3 = drop(0.2)
        self.head = linear(32, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of windows ``(batch, channels, length)``."""
        x = two_blocks(self.conv1, self.drop1, self.conv2, self.drop2, x)
        x = self.drop3(F.relu(self.fc1(x.flatten(1))))
        logits: Tensor = self.head(x)
        return logits
