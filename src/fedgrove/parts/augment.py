"""Augmentation of images while a client trains: crops, flips and squares that are cut out.

Draws are a function of the client's seed, the example, and its place in the epoch, computed on
tensors: every engine draws the same ones, in any order and for any number of clients at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import check

WORD = (1 << 31) - 1
"""Draws are whole numbers of 31 bits: their products with FACTOR fit into 63."""
FACTOR = 0x45D9F3B


@dataclass(frozen=True)
class Augment:
    """Random crops, horizontal flips and a square that is cut out, in the order of their fields.

    An image is moved by up to ``pad`` pixels in each direction, mirrored, and a square of
    ``cutout`` pixels is set to 0, the mean colour of standardised images, as are pixels that a crop
    adds. (The usual recipe for CIFAR-10: pad 4, and cutout 16 of DeVries & Taylor 2017.) In images
    smaller than 32 x 32 the pad is at most an eighth of the side, and the square at most half of
    it.

    Differs from the usual recipe: that fills what a crop adds with black.
    """

    pad: int = 4
    """How many pixels an image is moved by at most."""
    flip: bool = True
    """Whether every second image is mirrored."""
    cutout: int = 16
    """The side of the square, whose middle lies anywhere in the image; 0: none."""

    def __post_init__(self) -> None:
        check(self.pad >= 0, "pad", self.pad, "0 or more pixels")
        check(self.cutout >= 0, "cutout", self.cutout, "0 or more pixels")

    def __call__(self, x: Tensor, key: Tensor, index: Tensor, place: Tensor) -> Tensor:
        """Return the images of a batch, each changed by its own draws; pure.

        Args:
            x: The images, (batch, channels, height, width).
            key: A number that the client's seed gives.
            index: (batch,): which of the client's examples each is.
            place: (batch,): its place in the epoch.
        """
        height, width = x.shape[-2:]

        def draw(purpose: int, count: int) -> Tensor:
            return draw_numbers(key, index, place, purpose) % count

        pad_rows = min(self.pad, height // 8)
        pad_columns = min(self.pad, width // 8)
        down = draw(0, 2 * pad_rows + 1) - pad_rows
        right = draw(1, 2 * pad_columns + 1) - pad_columns
        is_mirrored = draw(2, 2) == 1 if self.flip else torch.zeros_like(index, dtype=torch.bool)
        x = move(x, down, right, is_mirrored)
        side = min(self.cutout, height // 2, width // 2)
        return cut_out(x, draw(3, height), draw(4, width), side)


def mix(word: Tensor) -> Tensor:
    """Part of augmentation: scramble numbers of 31 bits, so that near ones give distant ones."""
    for _ in range(2):
        word = ((word ^ (word >> 16)) * FACTOR) & WORD
    return word ^ (word >> 16)


def draw_numbers(key: Tensor, index: Tensor, place: Tensor, purpose: int) -> Tensor:
    """Part of augmentation: a number of 31 bits for each example.

    Equal arguments give equal numbers, on every device.
    """
    # Mixed before each sum: key 3 and purpose 0 must not draw what key 2 and purpose 1 do.
    word = mix(key & WORD)
    for part in (purpose, index, place):
        word = mix((word + part) & WORD)
    return word


def move(x: Tensor, down: Tensor, right: Tensor, is_mirrored: Tensor) -> Tensor:
    """Part of augmentation: move images by whole pixels, then mirror some; what is added is 0.

    >>> row = torch.tensor([[[[1.0, 2.0, 3.0]]]])
    >>> zero, one, yes = torch.tensor([0]), torch.tensor([1]), torch.tensor([True])
    >>> move(row, zero, one, ~yes), move(row, zero, one, yes)
    (tensor([[[[0., 1., 2.]]]]), tensor([[[[2., 1., 0.]]]]))
    """
    height, width = x.shape[-2:]
    rows = torch.arange(height, device=x.device) - down.unsqueeze(1)
    columns = torch.arange(width, device=x.device)
    columns = torch.where(is_mirrored.unsqueeze(1), columns.flip(0), columns)
    columns = columns - right.unsqueeze(1)
    is_row = (rows >= 0) & (rows < height)
    is_column = (columns >= 0) & (columns < width)
    is_inside = is_row.unsqueeze(2) & is_column.unsqueeze(1)
    # One index per pixel: which of the old image's pixels it shows, or for a new one any.
    rows = rows.clamp(0, height - 1)
    columns = columns.clamp(0, width - 1)
    source = rows.unsqueeze(2) * width + columns.unsqueeze(1)
    pixels = x.flatten(2)
    moved = pixels.gather(2, source.flatten(1).unsqueeze(1).expand(pixels.shape)).view(x.shape)
    return torch.where(is_inside.unsqueeze(1), moved, torch.zeros_like(moved))


def cut_out(x: Tensor, row: Tensor, column: Tensor, side: int) -> Tensor:
    """Part of augmentation: set a square around a pixel of each image to 0, as far as it is inside.

    >>> ones = torch.ones(1, 1, 1, 4)
    >>> cut_out(ones, torch.tensor([0]), torch.tensor([3]), side=2)
    tensor([[[[1., 1., 0., 0.]]]])
    """
    height, width = x.shape[-2:]
    # From half a side before the pixel, up to half a side behind it, that pixel not included.
    rows = torch.arange(height, device=x.device) - row.unsqueeze(1) + side // 2
    columns = torch.arange(width, device=x.device) - column.unsqueeze(1) + side // 2
    in_rows = (rows >= 0) & (rows < 2 * (side // 2))
    in_columns = (columns >= 0) & (columns < 2 * (side // 2))
    is_cut = in_rows.unsqueeze(2) & in_columns.unsqueeze(1)
    return torch.where(is_cut.unsqueeze(1), torch.zeros_like(x), x)
