"""ExecuTorch files (.pte) for phones and boards: one example at a time, on XNNPACK where it can."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .onnx import quiet

SUFFIX = ".pte"
EXTRA = "edge"
NEEDS: tuple[str, ...] = ("executorch",)


def write(module: nn.Module, shape: tuple[int, ...], path: Path, notes: Mapping[str, str]) -> None:
    """Write a module in eval mode, for one example at a time. A .pte file has no room for ``notes``."""
    with quiet():
        path.write_bytes(_lowered(torch.export.export(module, (torch.zeros(1, *shape),))))


def quantise(module: nn.Module, plain: Path, x: Tensor, path: Path) -> None:
    """Write weights and activations as int8, a scale per output channel; activations by what they are on ``x``."""
    with quiet():
        xnnpack: Any = importlib.import_module(
            "executorch.backends.xnnpack.quantizer.xnnpack_quantizer"
        )
        steps: Any = importlib.import_module("torchao.quantization.pt2e.quantize_pt2e")
        chosen = xnnpack.XNNPACKQuantizer().set_global(
            xnnpack.get_symmetric_quantization_config(is_per_channel=True)
        )
        watched = steps.prepare_pt2e(torch.export.export(module, (x[:1],)).module(), chosen)
        with torch.no_grad():
            for one in torch.split(x, 1):
                watched(one)
        path.write_bytes(_lowered(torch.export.export(steps.convert_pt2e(watched), (x[:1],))))


def _lowered(program: Any) -> bytes:
    exir: Any = importlib.import_module("executorch.exir")
    parts: Any = importlib.import_module(
        "executorch.backends.xnnpack.partition.xnnpack_partitioner"
    )
    lowered = exir.to_edge_transform_and_lower(program, partitioner=[parts.XnnpackPartitioner()])
    return bytes(lowered.to_executorch().buffer)


def load(path: Path) -> Callable[[Tensor], Tensor]:
    """The file as a function from inputs to logits, one example after another."""
    with quiet():
        runtime: Any = importlib.import_module("executorch.runtime")
    program = runtime.Runtime.get().load_program(str(path))
    method = program.load_method("forward")
    # The next call writes over what this one gave.
    return lambda x: torch.cat(
        [method.execute([one.contiguous()])[0].clone() for one in torch.split(x, 1)]
    )
