"""A convolution of many clients in one kernel each way, written in Triton: no windows are stored.

A convolution is a product of windows and weights. Here a block of windows is read from the images
straight into the product (an implicit product), for all clients in one launch. That saves what the
two other ways pay: grouped kernels work client by client where groups are small, and windows that
are laid out first (:mod:`.conv_windows`) are a copy of kh·kw times the images.

Triton comes with torch's CUDA builds, and compiles a kernel when it is first needed: a second or
two, kept on disk. Images of K clients have their channels last and side by side, (N, H, W, K·C) in
memory. In float64, and without Triton, :mod:`.convolution` takes another way.

Shapes: K clients, N examples, C channels in and O out, kernels of kh x kw, images of H x W in and
H' x W' out. R = kh·kw·C numbers in a window, M = N·H'·W' windows of a client.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

Pair = tuple[int, int]

ENOUGH_WARPS = 4224
"""Warps that keep a GPU busy, 32 for each multiprocessor; with fewer, a sum is split in parts."""


@triton.jit
def _multiply(
    images,
    weight,
    bias,
    out,
    examples,
    height,
    width,
    out_height,
    out_width,
    image_row,
    out_row,
    depth,
    filters,
    weight_client,
    weight_tap,
    weight_depth,
    weight_filter,
    KERNEL_H: tl.constexpr,
    KERNEL_W: tl.constexpr,
    STRIDE_H: tl.constexpr,
    STRIDE_W: tl.constexpr,
    PAD_H: tl.constexpr,
    PAD_W: tl.constexpr,
    DEPTH: tl.constexpr,
    BACKWARD: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A block of outputs: windows of ``images`` times ``weight``, of one client.

    With ``BACKWARD`` a window holds what an input point contributed to. Where the stride is 2, the
    even points contributed through other places of the kernel than the odd ones: points are
    therefore taken class by class, and each class skips the places that it has no part in.
    ``DEPTH`` is the number of channels in ``images`` where it is too small to fill a block,
    otherwise 0.
    """
    CLASSES_H: tl.constexpr = STRIDE_H if BACKWARD else 1
    CLASSES_W: tl.constexpr = STRIDE_W if BACKWARD else 1
    client = tl.program_id(2)
    blocks_of_class = tl.num_programs(0) // (CLASSES_H * CLASSES_W)
    class_y = tl.program_id(0) // blocks_of_class // CLASSES_W
    class_x = tl.program_id(0) // blocks_of_class % CLASSES_W
    m = tl.program_id(0) % blocks_of_class * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    # How many rows and columns of the output are in the class.
    rows = tl.cdiv(out_height - class_y, CLASSES_H)
    columns = tl.cdiv(out_width - class_x, CLASSES_W)
    example = m // (rows * columns)
    y = (m // columns) % rows * CLASSES_H + class_y
    x = m % columns * CLASSES_W + class_x
    exists = example < examples
    # 64 bits for what may be large: the beginning of an image.
    image = images + (example * height * width).to(tl.int64) * image_row + client * depth
    weights = weight + client.to(tl.int64) * weight_client
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    if DEPTH > 0:
        # A block spans several places of the kernel.
        for start in range(0, KERNEL_H * KERNEL_W * DEPTH, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            tap = k // DEPTH
            channel = k % DEPTH
            row, inside_y = _source(
                y[:, None], (tap // KERNEL_W)[None, :], height, STRIDE_H, PAD_H, BACKWARD
            )
            column, inside_x = _source(
                x[:, None], (tap % KERNEL_W)[None, :], width, STRIDE_W, PAD_W, BACKWARD
            )
            in_window = k < KERNEL_H * KERNEL_W * DEPTH
            inside = inside_y & inside_x & exists[:, None] & in_window[None, :]
            places = (row * width + column) * image_row + channel[None, :]
            a = tl.load(image[:, None] + places, mask=inside, other=0.0)
            offsets = tap * weight_tap + channel * weight_depth
            b = tl.load(
                weights + offsets[:, None] + (n * weight_filter)[None, :],
                mask=in_window[:, None] & (n < filters)[None, :],
                other=0.0,
            )
            total = tl.dot(a, b, total, input_precision=PRECISION)
    else:
        # A block lies within one place of the kernel: whether it is inside is asked once per row.
        blocks = depth // BLOCK_K
        first_y = (class_y + PAD_H) % CLASSES_H
        first_x = (class_x + PAD_W) % CLASSES_W
        taps_y = tl.cdiv(KERNEL_H - first_y, CLASSES_H)
        taps_x = tl.cdiv(KERNEL_W - first_x, CLASSES_W)
        for i in range(0, taps_y * taps_x * blocks):
            tap_y = first_y + i // blocks // taps_x * CLASSES_H
            tap_x = first_x + i // blocks % taps_x * CLASSES_W
            tap = tap_y * KERNEL_W + tap_x
            channel = (i % blocks) * BLOCK_K + tl.arange(0, BLOCK_K)
            row, inside_y = _source(y, tap_y, height, STRIDE_H, PAD_H, BACKWARD)
            column, inside_x = _source(x, tap_x, width, STRIDE_W, PAD_W, BACKWARD)
            inside = inside_y & inside_x & exists
            place = (row * width + column) * image_row
            a = tl.load(
                (image + place)[:, None] + channel[None, :], mask=inside[:, None], other=0.0
            )
            offsets = tap * weight_tap + channel * weight_depth
            b = tl.load(
                weights + offsets[:, None] + (n * weight_filter)[None, :],
                mask=(n < filters)[None, :],
                other=0.0,
            )
            total = tl.dot(a, b, total, input_precision=PRECISION)
    if HAS_BIAS:
        total += tl.load(bias + client * filters + n, mask=n < filters, other=0.0)[None, :]
    place = (example.to(tl.int64) * out_height + y) * out_width + x
    tl.store(
        out + place[:, None] * out_row + (client * filters + n)[None, :],
        total.to(out.dtype.element_ty),
        mask=exists[:, None] & (n < filters)[None, :],
    )


@triton.jit
def _source(
    place,
    tap,
    size,
    STRIDE: tl.constexpr,
    PAD: tl.constexpr,
    BACKWARD: tl.constexpr,
):
    """Along one side: which point of the image a window reads at ``tap``, and whether it is one."""
    if BACKWARD:
        shifted = place + PAD - tap
        source = shifted // STRIDE
        return source, (shifted >= 0) & (shifted % STRIDE == 0) & (source < size)
    source = place * STRIDE - PAD + tap
    return source, (source >= 0) & (source < size)


@triton.jit
def _multiply_transposed(
    images,
    gradient,
    out,
    windows,
    windows_per_part,
    height,
    width,
    out_height,
    out_width,
    image_row,
    gradient_row,
    depth,
    filters,
    part_size,
    KERNEL_H: tl.constexpr,
    KERNEL_W: tl.constexpr,
    STRIDE_H: tl.constexpr,
    STRIDE_W: tl.constexpr,
    PAD_H: tl.constexpr,
    PAD_W: tl.constexpr,
    PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A block of the weights' gradient: windows, transposed, times the gradient of what they made.

    The sum over windows may be split in ``PARTS``, each written to a separate place.
    """
    client = tl.program_id(2) // PARTS
    part = tl.program_id(2) % PARTS
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    # The numbers of a window: all channels of its first place, then of the next.
    k = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    tap = k // depth
    channel = k % depth
    tap_y = tap // KERNEL_W
    tap_x = tap % KERNEL_W
    in_window = tap < KERNEL_H * KERNEL_W
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    first = part * windows_per_part
    last = tl.minimum(first + windows_per_part, windows)
    for start in range(0, windows_per_part, BLOCK_K):
        m = first + start + tl.arange(0, BLOCK_K)
        example = m // (out_height * out_width)
        row = ((m // out_width) % out_height)[None, :] * STRIDE_H - PAD_H + tap_y[:, None]
        column = (m % out_width)[None, :] * STRIDE_W - PAD_W + tap_x[:, None]
        inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
        image = images + (example * height * width).to(tl.int64) * image_row + client * depth
        a = tl.load(
            image[None, :] + (row * width + column) * image_row + channel[:, None],
            mask=inside & in_window[:, None] & (m < last)[None, :],
            other=0.0,
        )
        b = tl.load(
            gradient + m.to(tl.int64)[:, None] * gradient_row + (client * filters + n)[None, :],
            mask=(m < last)[:, None] & (n < filters)[None, :],
            other=0.0,
        )
        total = tl.dot(a, b, total, input_precision=PRECISION)
    taps = KERNEL_H * KERNEL_W
    # As the tree has it: (K, O, C, kh, kw).
    there = (client * filters + n)[None, :] * (depth * taps) + (channel * taps + tap)[:, None]
    tl.store(
        out + part.to(tl.int64) * part_size + there,
        total,
        mask=in_window[:, None] & (n < filters)[None, :],
    )


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair) -> Tensor:
    """Triton kernel: convolve many clients, x (N, K·C, H, W), weight (K, O, kh, kw, C)."""
    clients, filters, kh, kw, depth = weight.shape
    size = find_output_size(x.shape[2:], (kh, kw), stride, padding)
    shape = (len(x), clients * filters, *size)
    y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    _launch(x, weight, bias, y, depth, filters, (depth, 1, kh * kw * depth), stride, padding, False)
    return y


def input_gradient(dy: Tensor, x: Tensor, weight: Tensor, stride: Pair, padding: Pair) -> Tensor:
    """Triton kernel: the clients' gradient of x, from that of y (N, K·O, H', W')."""
    _, filters, kh, kw, depth = weight.shape
    dx = torch.empty_like(x)
    # The same weights, read the other way round.
    strides = (depth, kh * kw * depth, 1)
    _launch(dy, weight, None, dx, filters, depth, strides, stride, padding, True)
    return dx


def _launch(
    images: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    depth: int,
    filters: int,
    weight_strides: tuple[int, int, int],
    stride: Pair,
    padding: Pair,
    backward: bool,
) -> None:
    clients, _, kh, kw, _ = weight.shape
    tiles = choose_image_tiles(filters, images.element_size())
    fills_blocks = depth % tiles.k == 0
    classes = stride if backward else (1, 1)
    # Of the largest class, the first.
    windows = (
        len(out) * triton.cdiv(out.shape[2], classes[0]) * triton.cdiv(out.shape[3], classes[1])
    )
    blocks = triton.cdiv(windows, tiles.m) * classes[0] * classes[1]
    grid = (blocks, triton.cdiv(filters, tiles.n), clients)
    _multiply[grid](
        images,
        weight,
        out if bias is None else bias,
        out,
        len(out),
        images.shape[2],
        images.shape[3],
        out.shape[2],
        out.shape[3],
        images.shape[1],
        out.shape[1],
        depth,
        filters,
        weight[0].numel(),
        *weight_strides,
        DEPTH=0 if fills_blocks else depth,
        BACKWARD=backward,
        HAS_BIAS=bias is not None,
        **_constants((kh, kw), stride, padding, tiles),
    )


def weight_gradient(dy: Tensor, x: Tensor, weight: Tensor, stride: Pair, padding: Pair) -> Tensor:
    """Triton kernel: the clients' gradient of the weights (K, O, C, kh, kw), in float32."""
    clients, filters, kh, kw, depth = weight.shape
    shape = (clients, filters, depth, kh, kw)
    numbers = depth * kh * kw
    windows = len(dy) * dy.shape[2] * dy.shape[3]
    tiles = choose_weight_tiles(numbers, filters, x.element_size())
    blocks = triton.cdiv(numbers, tiles.m) * triton.cdiv(filters, tiles.n)
    parts = count_parts(blocks * clients * tiles.warps, windows, tiles.k)
    per_part = triton.cdiv(triton.cdiv(windows, parts), tiles.k) * tiles.k
    sums = torch.empty((parts, *shape), dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(numbers, tiles.m), triton.cdiv(filters, tiles.n), clients * parts)
    _multiply_transposed[grid](
        x,
        dy,
        sums,
        windows,
        per_part,
        x.shape[2],
        x.shape[3],
        dy.shape[2],
        dy.shape[3],
        x.shape[1],
        dy.shape[1],
        depth,
        filters,
        sums[0].numel(),
        PARTS=parts,
        **_constants((kh, kw), stride, padding, tiles),
    )
    return sums[0] if parts == 1 else sums.sum(0)


class Tiles(NamedTuple):
    """How a product is cut: a program makes m x n numbers and adds up k at a time."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


def choose_image_tiles(filters: int, bytes_each: int) -> Tiles:
    """Choose the tiles of a Triton kernel for images: as wide as there are filters."""
    n = min(128, max(16, triton.next_power_of_2(filters)))
    k = 64 if bytes_each == 2 else 32
    if n <= 32:
        return Tiles(m=256, n=n, k=k, warps=8, stages=3)
    return Tiles(m=128, n=n, k=k, warps=8 if n == 128 else 4, stages=3)


def choose_weight_tiles(numbers: int, filters: int, bytes_each: int) -> Tiles:
    """Choose the tiles of a Triton kernel for the gradient of weights.

    The product is (window's numbers) x filters, a sum over all windows.
    """
    n = 32 if filters <= 32 else 64
    if bytes_each == 2:
        return Tiles(m=64 if numbers >= 64 else 32, n=n, k=64, warps=4, stages=3)
    # Blocks of 32: both factors have the summed dimension last, which in float32 the largest
    # matrix instructions cannot read. From 64 on Triton would use those, and turn all blocks round.
    return Tiles(m=32, n=n, k=32, warps=2, stages=3)


def count_parts(warps: int, windows: int, block: int) -> int:
    """Return into how many parts to split a sum over windows, so that the GPU is busy.

    A power of two, so that few kernels do for all; a part has four blocks or more.

    >>> count_parts(warps=400, windows=32768, block=64)
    16
    >>> count_parts(warps=5000, windows=32768, block=64)
    1
    >>> count_parts(warps=2, windows=300, block=32)
    2
    """
    parts = 1
    while warps * parts < ENOUGH_WARPS and windows // (2 * parts) >= 4 * block:
        parts *= 2
    return parts


def find_output_size(size: Any, kernel: Pair, stride: Pair, padding: Pair) -> Pair:
    """Return (H', W'), the size of a batched convolution's output for images (H, W).

    >>> find_output_size((28, 28), (5, 5), (1, 1), (2, 2))
    (28, 28)
    """
    height = (size[0] + 2 * padding[0] - kernel[0]) // stride[0] + 1
    width = (size[1] + 2 * padding[1] - kernel[1]) // stride[1] + 1
    return height, width


def _constants(kernel: Pair, stride: Pair, padding: Pair, tiles: Tiles) -> dict[str, Any]:
    """What both Triton kernels are compiled for."""
    return {
        "KERNEL_H": kernel[0],
        "KERNEL_W": kernel[1],
        "STRIDE_H": stride[0],
        "STRIDE_W": stride[1],
        "PAD_H": padding[0],
        "PAD_W": padding[1],
        # How float32 is multiplied; the shorter types have one way only.
        "PRECISION": "tf32" if torch.backends.cudnn.allow_tf32 else "ieee",
        "BLOCK_M": tiles.m,
        "BLOCK_N": tiles.n,
        "BLOCK_K": tiles.k,
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
    }
