"""Two blocks of convolution, pooling, ReLU and dropout over a series at once, for CPU training.

What the two blocks of ``har-cnn`` take in a training step, and what is done about it:

- **Products**, most of them the second convolution's. By Winograd's algorithm it takes 8 instead of
  20, and so does the gradient of its input (:mod:`fedgrove.nets.cpu_training.winograd`).
- **Passes over all numbers.** torch's pooling writes an index of 64 bits for every number and reads
  it again; ReLU, dropout and its scale go over the numbers once more each.
- **Memory.** New memory has to be cleared by the operating system, and is in no cache. So all
  arrays of a step are used again in the next one, and gradients are written over what they are the
  gradients of.

Between the two convolutions the series lies in *phases*: (4, batch, blocks, channels), where phase
q of block s is step 4 s + q. A tile, 4 neighbouring outputs, has 8 inputs, which are the phases of
a block and of the next one: they are transformed where they lie, by plain products of matrices, and
what is pooled in pairs lies in long stretches. The padding is part of it: the first two steps are
zeros, and so are those after the end. The last block of an example begins no tile; one is computed
there nevertheless, so that all lie in one stretch, and it is never read.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..dropout import Dropout, Seed, draw_seed, is_plain, noise_of, zero_where
from .winograd import POINTS, TILE, WIDTH, transforms

_DROPS = (Dropout, nn.Identity)
"""What may follow a block."""
PADDING = WIDTH // 2
"""Zeros on either side, which keep the length."""


def two_blocks(
    conv1: nn.Conv2d, drop1: nn.Module, conv2: nn.Conv2d, drop2: nn.Module, x: Tensor
) -> Tensor:
    """Run two blocks of a network on series: twice ``drop(relu(max_pool(conv(x))))``.

    What comes out are images of height 1, (batch, channels, 1, length / 4): the batched engine
    could not tell a series of many clients' channels from features. Kernels are (1, 5) with padding
    (0, 2) and a bias; pooling is in pairs. In training, hooks on the four modules may not be
    called.
    """
    if _is_faster_at_once(conv1, drop1, conv2, drop2, x):
        out: Tensor = _TwoBlocks.apply(  # type: ignore[no-untyped-call]
            x, conv1.weight, conv1.bias, conv2.weight, conv2.bias, drop1, drop2
        )
        return out.unsqueeze(2)
    images = _as_images(x)
    for conv, drop in ((conv1, drop1), (conv2, drop2)):
        # Pooling and ReLU commute; in this order ReLU sees half the numbers.
        images = drop(F.relu(F.max_pool2d(conv(images), (1, 2))))
    return images


def _is_faster_at_once(
    conv1: nn.Conv2d, drop1: nn.Module, conv2: nn.Conv2d, drop2: nn.Module, x: Tensor
) -> bool:
    # In eval mode step by step, so that others can follow what is done: whoever exports a network,
    # or finds out which channels belong together. Gradients of the input are seldom asked for.
    is_training = drop1.training and drop2.training
    are_known = isinstance(drop1, _DROPS) and isinstance(drop2, _DROPS)
    if not is_training or not are_known or not is_plain(x) or x.requires_grad:
        return False
    # The batched engine puts clients side by side as channels, and their weights one behind the
    # other.
    if conv1.weight.dim() != 4 or conv1.weight.shape[1] != x.shape[1]:
        return False
    # A mask may have left no channel, and a batch may be empty; torch knows what to do.
    is_empty = not (x.numel() and conv1.weight.numel() and conv2.weight.numel())
    if is_empty or x.shape[2] < TILE:
        return False
    try:
        # What torch.func differentiates or maps over is no piece of memory. (It could be taught to
        # go through this function, but then every call would take 30 microseconds longer.)
        x.data_ptr()
        conv1.weight.data_ptr()
        conv2.weight.data_ptr()
    except RuntimeError:
        return False
    return True


def _as_images(x: Tensor) -> Tensor:
    """Series as images of height 1, with channels last in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2).unsqueeze(2)


class _TwoBlocks(torch.autograd.Function):
    """The function and its gradient, for autograd."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight1: Tensor,
        bias1: Tensor,
        weight2: Tensor,
        bias2: Tensor,
        drop1: nn.Module,
        drop2: nn.Module,
    ) -> Tensor:
        """Run a network's two blocks: the series (batch, channels, length / 4)."""
        batch, channels, length = x.shape
        ctx.sizes = _Sizes(batch, length, channels, len(weight1), len(weight2))
        ctx.drops = (_Drop.of(drop1), _Drop.of(drop2))
        ctx.seed = None
        if any(drop.drops for drop in ctx.drops):
            ctx.seed = draw_seed()
        ctx.save_for_backward(x, weight1, bias1, weight2, bias2)
        ctx.memory = _take_memory(ctx.sizes, x.dtype)
        arrays: _Arrays = ctx.memory.arrays(ctx.sizes)
        return arrays.forward(x, [weight1, bias1, weight2, bias2], ctx.seed, ctx.drops)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Return the gradients of weights and biases of a network's two blocks."""
        x, *parameters = ctx.saved_tensors
        if torch.is_grad_enabled():
            # Somebody wants the gradient of this gradient. Frozen parameters have none.
            out = _step_by_step(x, parameters, ctx.sizes, ctx.seed, ctx.drops)
            moving = [value for value in parameters if value.requires_grad]
            slow = iter(torch.autograd.grad(out, moving, grads[0], create_graph=True))
            to_all = [next(slow) if value.requires_grad else None for value in parameters]
            return None, *to_all, None, None
        if ctx.memory is None:
            # The same gradient once more, after the first has overwritten what it needs.
            ctx.memory = _take_memory(ctx.sizes, x.dtype)
            ctx.memory.arrays(ctx.sizes).forward(x, parameters, ctx.seed, ctx.drops)
        to_parameters = ctx.memory.arrays(ctx.sizes).backward(grads[0], ctx.drops)
        _give_back(ctx.memory)
        ctx.memory = None
        return None, *to_parameters, None, None


class _Drop(NamedTuple):
    """What dropout does in a block: numbers with a noise up to ``highest`` go, others are scaled.

    The scale costs nothing: what a convolution is computed from is scaled on the way, and its bias.
    """

    drops: bool
    highest: int
    scale: float

    @classmethod
    def of(cls, drop: nn.Module) -> _Drop:
        """Return the dropout of a network's module, which may be one that drops nothing."""
        if isinstance(drop, Dropout):
            return cls(drop.drops, drop.highest_dropped, drop.scale)
        return cls(False, 0, 1.0)


# ---- the arrays ----------------------------------------------------------------------------------


class _Sizes(NamedTuple):
    """Sizes of a batch, and of what becomes of it."""

    batch: int
    length: int
    channels: int
    channels1: int
    channels2: int

    @property
    def steps(self) -> int:
        """The length of the network's series after the first pooling."""
        return self.length // 2

    @property
    def blocks(self) -> int:
        """Blocks of an example in a convolution by tiles: one for each tile, and one after them."""
        return -(-self.steps // TILE) + 1

    @property
    def tiles(self) -> int:
        """Tiles of all examples of a convolution: one for each block but the very last."""
        return self.batch * self.blocks - 1

    @property
    def rows(self) -> int:
        """Steps of all examples after the network's first pooling, with padding."""
        return TILE * self.batch * self.blocks

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the arrays of a convolutional network's two blocks, by name."""
        noises = self.rows * self.channels1 + 2 * self.tiles * self.channels2
        return {
            "padded": (self.batch, 2 * TILE * self.blocks + WIDTH - 1, self.channels),
            "windows": (2 * self.rows, WIDTH * self.channels),
            "pairs1": (2, self.rows, self.channels1),
            "series": (self.rows, self.channels1),
            "noise": (noises,),
            "inputs": (POINTS, self.tiles, self.channels1),
            "kernels": (POINTS, self.channels2, self.channels1),
            "products": (POINTS, self.tiles, self.channels2),
            "pairs2": (2, 2, self.tiles, self.channels2),
            "out": (2, self.tiles, self.channels2),
        }

    @property
    def numbers(self) -> int:
        """How many numbers all arrays of the network's two blocks have together."""
        return sum(map(_room, self.shapes.values()))


def _room(shape: tuple[int, ...]) -> int:
    """How many numbers are set aside for an array: it begins at a line of the cache."""
    return -(-math.prod(shape) // 16) * 16


class _Memory:
    """The memory of a step, and how it is divided for each size of batches.

    The last batch of an epoch is smaller than the others, and lies in the same memory.
    """

    def __init__(self, numbers: Tensor) -> None:
        self.numbers = numbers
        self._divided: dict[_Sizes, _Arrays] = {}

    def fits(self, sizes: _Sizes) -> bool:
        """Whether the arrays of a network's two blocks have room."""
        return sizes in self._divided or sizes.numbers <= len(self.numbers)

    def arrays(self, sizes: _Sizes) -> _Arrays:
        """Divide the memory for the arrays of a network's two blocks."""
        if sizes not in self._divided:
            if len(self._divided) == MOST_DIVISIONS:
                self._divided.clear()
            self._divided[sizes] = _Arrays(sizes, self.numbers)
        return self._divided[sizes]


MOST_DIVISIONS = 64
"""The number that is remembered: a client with other data has a last batch of another size."""

MOST_SPARE = 2
"""The number of steps whose memory is kept."""
_spare: dict[torch.dtype, list[_Memory]] = {}
"""Memory of steps that are done. A step whose gradient is never asked for gives none back."""


def _take_memory(sizes: _Sizes, dtype: torch.dtype) -> _Memory:
    try:
        memory = _spare[dtype].pop()
    except (KeyError, IndexError):
        # The first step, or one within another.
        memory = None
    if memory is not None and memory.fits(sizes):
        return memory
    return _Memory(torch.empty(sizes.numbers, dtype=dtype))


def _give_back(memory: _Memory) -> None:
    spare = _spare.setdefault(memory.numbers.dtype, [])
    # Who needs many at once, as for the gradient of a sum over batches, seldom does so again.
    if len(spare) < MOST_SPARE:
        spare.append(memory)


class _Arrays:
    """The arrays of a step, and what is done with them.

    Views are made once and for all: in a step each would take as long as adding a thousand numbers.
    """

    def __init__(self, sizes: _Sizes, memory: Tensor) -> None:
        self.sizes = sizes
        arrays: dict[str, Tensor] = {}
        start = 0
        for name, shape in sizes.shapes.items():
            arrays[name] = memory[start : start + math.prod(shape)].view(shape)
            start += _room(shape)
        batch, length, channels, channels1, _ = sizes
        blocks = sizes.blocks

        self.padded = arrays["padded"]
        # The second convolution's padding, which is before pooling, and the first one's.
        before = 2 * PADDING + PADDING
        self.inside = self.padded[:, before : before + length]
        self.windows = arrays["windows"]
        # In the order (2 of a pair, phases, batch, blocks); a window is one stretch of memory.
        shape = (2, TILE, batch, blocks, WIDTH * channels)
        self.windows_to = self.windows.view(shape)
        per_example = self.padded.stride(0)
        strides = (channels, 2 * channels, per_example, 2 * TILE * channels, 1)
        self.windows_from = self.padded.as_strided(shape, strides)

        self.pairs1 = arrays["pairs1"].view(-1, channels1)
        self.first1, self.second1 = arrays["pairs1"].unbind(0)
        self.series = arrays["series"]
        self.outside = _outside(self.series.view(TILE, batch, blocks, channels1), sizes.steps)

        self.noise = arrays["noise"]
        self.noise1 = self.noise[: self.series.numel()].view_as(self.series)
        self.noise2 = self.noise[self.series.numel() :].view_as(arrays["out"])

        by_phase = self.series.view(TILE, -1)
        self.block = by_phase[:, :-channels1]
        self.next_block = by_phase[:, channels1:]
        self.inputs_by_point = arrays["inputs"]
        self.inputs = arrays["inputs"].flatten(1)
        self.kernels_by_point = arrays["kernels"]
        self.kernels = arrays["kernels"].flatten(1)
        self.products_by_point = arrays["products"]
        self.products = arrays["products"].flatten(1)
        self.pairs2 = arrays["pairs2"].view(TILE, -1)
        self.first2, self.second2 = arrays["pairs2"].unbind(1)
        self.out = arrays["out"]
        self.out_of_examples = _of_examples(self.out, sizes)

        # Gradients lie where something was that is no longer needed.
        self.to_out = self.noise2
        self.to_out_of_examples = _of_examples(self.to_out, sizes)
        self.to_series = self.noise1
        to_phases = self.to_series.view(TILE, -1)
        self.to_block = to_phases[:, :-channels1]
        self.to_next_block = to_phases[:, channels1:]
        self.to_last_block = to_phases[:, -channels1:]

    def forward(
        self, x: Tensor, parameters: list[Tensor], seed: Seed | None, drops: tuple[_Drop, _Drop]
    ) -> Tensor:
        """Run both blocks of the network: the series (batch, channels, length / 4)."""
        weight1, bias1, weight2, bias2 = parameters
        self.draw(seed)
        self.first_block(x, weight1, bias1, drops[0])
        return self.second_block(weight2, bias2, drops[1])

    def backward(self, grad: Tensor, drops: tuple[_Drop, _Drop]) -> list[Tensor]:
        """Return the gradients of weights and biases of both network blocks.

        What :meth:`forward` left here is overwritten.
        """
        to_weight2, to_bias2 = self.second_gradients(grad, drops[1])
        to_weight1, to_bias1 = self.first_gradients(drops[0])
        return [to_weight1, to_bias1, to_weight2, to_bias2]

    def draw(self, seed: Seed | None) -> None:
        """Draw the noise of the network's dropout in both blocks; None: nothing is dropped."""
        if seed is not None:
            self.noise.copy_(noise_of(seed, len(self.noise)))

    def first_block(self, x: Tensor, weight: Tensor, bias: Tensor, drop: _Drop) -> None:
        """Run the network's first block: from the batch to the series in phases."""
        self.padded.zero_()
        torch.mul(x.transpose(1, 2), drop.scale, out=self.inside)
        self.windows_to.copy_(self.windows_from)
        kernel = weight.permute(3, 1, 2, 0).reshape(-1, len(weight))
        torch.mm(self.windows, kernel, out=self.pairs1)
        _pool(self.first1, self.second1, bias, drop, self.noise1, out=self.series)
        for part in self.outside:
            part.zero_()

    def second_block(self, weight: Tensor, bias: Tensor, drop: _Drop) -> Tensor:
        """Run the network's second block: from phases to (batch, channels, length)."""
        kernel, block, next_block, outputs = transforms(weight.dtype, drop.scale)
        torch.mm(kernel, weight.reshape(-1, WIDTH).t(), out=self.kernels)
        torch.mm(block.t(), self.block, out=self.inputs)
        self.inputs.addmm_(next_block.t(), self.next_block)
        torch.bmm(self.inputs_by_point, self.kernels_by_point.mT, out=self.products_by_point)
        torch.mm(outputs.t(), self.products, out=self.pairs2)
        _pool(self.first2, self.second2, bias, drop, self.noise2, out=self.out)
        even, odd = self.out_of_examples.unbind(0)
        # In this way it is a copy of pieces; of the whole it would be one of single numbers.
        in_order = torch.stack([even.transpose(1, 2), odd.transpose(1, 2)], 3)
        return in_order.flatten(2)[:, :, : self.sizes.steps // 2]

    def second_gradients(self, grad: Tensor, drop: _Drop) -> tuple[Tensor, Tensor]:
        """Return the gradients of the second block's weight and bias.

        That of the series is left in ``to_series``.
        """
        _, block, next_block, outputs = transforms(grad.dtype, drop.scale)
        tile_ends = 2 * (self.sizes.blocks - 1)
        if grad.shape[2] < tile_ends:
            grad = F.pad(grad, (0, tile_ends - grad.shape[2]))
        self.to_out.zero_()
        self.to_out_of_examples.copy_(grad.reshape(*grad.shape[:2], -1, 2).permute(3, 0, 2, 1))
        to_bias = _pool_backward(self.to_out, self.out, self.first2, self.second2)

        # The products become their gradients, and so do the inputs.
        torch.mm(outputs, self.pairs2, out=self.products)
        torch.bmm(self.products_by_point, self.kernels_by_point, out=self.inputs_by_point)
        torch.mm(block, self.inputs, out=self.to_block)
        self.to_last_block.zero_()
        self.to_next_block.addmm_(next_block, self.inputs)
        to_weight = self.plain_weight_gradient() * drop.scale
        return to_weight.permute(1, 2, 0).unsqueeze(2), to_bias * drop.scale

    def plain_weight_gradient(self) -> Tensor:
        """Return the weight gradient of the second convolution by plain sums, without its scale.

        Its shape is (width, outputs, inputs).

        Winograd's algorithm would be twice as fast, a tenth of a step, but where all terms are 0
        it leaves a rest of rounding. Adam divides a gradient by its own size: it would move weights
        that have no gradient, and that no other engine moves.
        """
        _, channels2, channels1 = self.kernels_by_point.shape
        to_outputs = self.pairs2.view(TILE, -1, channels2)
        phases = self.series.view(TILE, -1, channels1)
        to_weight = phases.new_zeros(WIDTH, channels2, channels1)
        for k, to_tap in enumerate(to_weight):
            # Output q sees phase q + k of its block; from 4 on it is phase q + k - 4 of the next.
            in_block = TILE - k
            if in_block > 0:
                to_tap.addbmm_(to_outputs[:in_block].mT, phases[k:, :-1])
            if k > 0:
                to_tap.addbmm_(to_outputs[in_block:].mT, phases[:k, 1:])
        return to_weight

    def first_gradients(self, drop: _Drop) -> tuple[Tensor, Tensor]:
        """Return the gradients of the network's first weight and bias.

        :meth:`second_gradients` comes before it.
        """
        to_bias = _pool_backward(self.to_series, self.series, self.first1, self.second1)
        to_kernel = self.windows.t() @ self.pairs1
        to_weight = to_kernel.view(WIDTH, 1, -1, len(to_bias)).permute(3, 2, 1, 0)
        return to_weight, to_bias * drop.scale


def _outside(phases: Tensor, steps: int) -> list[Tensor]:
    """The parts before and after the series: its padding."""
    parts = [phases[:PADDING, :, 0]]
    end = PADDING + steps
    for block in range(end // TILE, phases.shape[2]):
        parts.append(phases[max(end - TILE * block, 0) :, :, block])
    return parts


def _of_examples(out: Tensor, sizes: _Sizes) -> Tensor:
    """A view of what tiles give, (2, tiles, channels), as (2, batch, tiles, channels)."""
    _, tiles, channels = out.shape
    shape = (2, sizes.batch, sizes.blocks - 1, channels)
    return out.as_strided(shape, (tiles * channels, sizes.blocks * channels, channels, 1))


def _pool(
    first: Tensor, second: Tensor, bias: Tensor, drop: _Drop, noise: Tensor, out: Tensor
) -> None:
    """Of each pair the larger one if it is above 0 and not dropped.

    ``second`` becomes how far it is ahead, which is all that the gradient needs of the pairs.
    """
    torch.maximum(first, second, out=out)
    # The bias comes after pooling, where there are half the numbers: rounding keeps the order.
    out.add_(bias, alpha=drop.scale).relu_()
    if drop.drops:
        zero_where.grad_input(out, noise, drop.highest, grad_input=out)
    second.sub_(first)


def _pool_backward(to_out: Tensor, out: Tensor, first: Tensor, ahead: Tensor) -> Tensor:
    """The gradient of the bias; those of the pairs are left in ``first`` and ``ahead``.

    It goes to the larger one; to the first where they are equal, as in torch.
    """
    # The output is above 0 where the larger one was and where it was not dropped.
    zero_where.grad_input(to_out, out, 0, grad_input=to_out)
    zero_where.grad_input(to_out, ahead, 0, grad_input=ahead)
    torch.sub(to_out, ahead, out=first)
    return to_out.flatten(0, -2).sum(0)


# ---- the same in operations of torch's -----------------------------------------------------------


def _step_by_step(
    x: Tensor,
    parameters: list[Tensor],
    sizes: _Sizes,
    seed: Seed | None,
    drops: tuple[_Drop, _Drop],
) -> Tensor:
    """What the function gives, for any gradient that is asked for."""
    weight1, bias1, weight2, bias2 = parameters
    arrays = _Arrays(sizes, torch.empty(sizes.numbers, dtype=x.dtype))
    arrays.draw(seed)
    phases = arrays.noise1.view(TILE, sizes.batch, sizes.blocks, -1)
    noise1 = phases.permute(1, 3, 2, 0).flatten(2)[:, :, PADDING:]
    noise2 = arrays.to_out_of_examples.permute(1, 3, 2, 0).flatten(2)
    images = _as_images(x)
    blocks = ((weight1, bias1, noise1, drops[0]), (weight2, bias2, noise2, drops[1]))
    for weight, bias, noise, drop in blocks:
        images = F.conv2d(images, weight, bias, padding=(0, PADDING))
        images = F.relu(F.max_pool2d(images, (1, 2)))
        if drop.drops:
            kept = noise[:, :, None, : images.shape[3]] > drop.highest
            images = images * kept * drop.scale
    return images.squeeze(2)
