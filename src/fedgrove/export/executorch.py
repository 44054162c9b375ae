"""ExecuTorch files (.pte) for phones and boards: one example at a time, on XNNPACK where it can."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .onnx import quiet
from .source import ToUnits

SUFFIX = ".pte"
EXTRA = "edge"
NEEDS: tuple[str, ...] = ("executorch",)


def write(module: nn.Module, shape: tuple[int, ...], path: Path, notes: Mapping[str, str]) -> None:
    """Write a module in eval mode as an ExecuTorch file, for one example at a time.

    A .pte file has no ``notes``.
    """
    with quiet():
        program = torch.export.export(module, (torch.zeros(1, *shape),))
        path.write_bytes(_lowered(program))


def quantise(module: nn.Module, plain: Path, x: Tensor, path: Path) -> None:
    """Export an ExecuTorch file with int8 weights and activations, a scale per channel.

    The ranges of activations are those on ``x``.
    """
    with quiet():
        from executorch.backends.xnnpack.quantizer import xnnpack_quantizer as xnnpack
        from torchao.quantization.pt2e import quantize_pt2e as pt2e

        config = xnnpack.get_symmetric_quantization_config(is_per_channel=True)
        quantizer = xnnpack.XNNPACKQuantizer().set_global(config)
        quantizer.set_module_type(ToUnits, None)
        example = (x[:1],)
        observed = pt2e.prepare_pt2e(torch.export.export(module, example).module(), quantizer)
        with torch.no_grad():
            # One at a time: the graph was exported for a batch of one.
            for one in torch.split(x, 1):
                observed(one)
        program = torch.export.export(pt2e.convert_pt2e(observed), example)
        path.write_bytes(_lowered(program))


def _lowered(program: Any) -> bytes:
    from executorch import exir
    from executorch.backends.xnnpack.partition import xnnpack_partitioner as partitioners

    lowered = exir.to_edge_transform_and_lower(
        program, partitioner=[partitioners.XnnpackPartitioner()]
    )
    return bytes(lowered.to_executorch().buffer)


def load(path: Path) -> Callable[[Tensor], Tensor]:
    """Load an exported ExecuTorch file as a function from inputs to outputs."""
    with quiet():
        from executorch import runtime
    program = runtime.Runtime.get().load_program(str(path))
    method = program.load_method("forward")

    def predict(x: Tensor) -> Tensor:
        found: list[Tensor] = []
        for one in torch.split(x, 1):
            outputs = method.execute([one.contiguous()])
            # A copy, because the next call writes into the same memory.
            found.append(outputs[0].clone())
        return torch.cat(found)

    return predict
