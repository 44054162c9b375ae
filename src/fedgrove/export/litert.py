"""LiteRT files (.tflite, before: TensorFlow Lite): one example at a time, for phones and boards."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .onnx import quiet

SUFFIX = ".tflite"
EXTRA = "litert"
NEEDS: tuple[str, ...] = ("litert_torch", "ai_edge_litert")
INPUT = "x"
LAYERS = (
    torch.ops.aten.linear.default,
    torch.ops.aten.conv1d.default,
    torch.ops.aten.conv2d.default,
)


class Named(nn.Module):
    """A module whose output has a name, which becomes that of the file's output."""

    def __init__(self, module: nn.Module, output: str) -> None:
        super().__init__()
        self.module = module
        self.output = output

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Return the exported module's outputs by name."""
        return {self.output: self.module(x)}


def write(module: nn.Module, shape: tuple[int, ...], path: Path, notes: Mapping[str, str]) -> None:
    """Write a module in eval mode as a LiteRT file, for one example at a time.

    A .tflite file has no ``notes``; the output is called ``notes["output"]``, or logits.
    """
    with _silent():
        named = Named(module, notes.get("output", "logits")).eval()
        _convert(named, torch.zeros(1, *shape), path)


def quantise(module: nn.Module, plain: Path, x: Tensor, path: Path) -> None:
    """Export a LiteRT file with int8 weights and activations, a scale per channel.

    The ranges of activations are those on ``x``. Output names are those of the ``plain`` file.
    """
    with _silent():
        output = _open(plain).get_signature_list()["serving_default"]["outputs"][0]
        from litert_torch.quantize import pt2e_quantizer as recipes
        from litert_torch.quantize.quant_config import QuantConfig
        from torchao.quantization.pt2e import quantize_pt2e as pt2e
        from torchao.quantization.pt2e.quantizer import QuantizationAnnotation

        config = recipes.get_symmetric_quantization_config(is_per_channel=True)

        # Products are those of the standardisation.
        not_products = [op for op in recipes.PT2EQuantizer.STATIC_OPS if not op.startswith("mul")]

        class FloatEnds(recipes.PT2EQuantizer):  # type: ignore[misc]
            """Leaves the first and the last layer in float, and all that is before and after.

            Otherwise the file would take and give int8 numbers.
            """

            STATIC_OPS = not_products

            def annotate(self, model: Any) -> Any:
                """Return the graph with what is quantised noted on its nodes."""
                layers = [node for node in model.graph.nodes if node.target in LAYERS]
                for node in layers[:1] + layers[-1:]:
                    # A note that says nothing keeps others from being made.
                    note = QuantizationAnnotation(_annotated=True)
                    node.meta["quantization_annotation"] = note
                return super().annotate(model)

        quantizer = FloatEnds().set_global(config)
        example = (x[:1],)
        named = Named(module, output).eval()
        observed = pt2e.prepare_pt2e(torch.export.export(named, example).module(), quantizer)
        with torch.no_grad():
            # One at a time: the graph was exported for a batch of one.
            for one in torch.split(x, 1):
                observed(one)
        quantised = pt2e.convert_pt2e(observed, fold_quantize=False)
        _convert(quantised, x[:1], path, QuantConfig(pt2e_quantizer=quantizer))


def _convert(module: nn.Module, example: Tensor, path: Path, config: Any = None) -> None:
    import litert_torch

    converted = litert_torch.convert(module, sample_kwargs={INPUT: example}, quant_config=config)
    converted.export(str(path))


def load(path: Path) -> Callable[[Tensor], Tensor]:
    """Load an exported LiteRT file as a function from inputs to outputs, on one CPU thread."""
    with _silent():
        interpreter = _open(path)
        # Now rather than at the first example, as it prints.
        interpreter.allocate_tensors()
        run = interpreter.get_signature_runner()

    def predict(x: Tensor) -> Tensor:
        found: list[Tensor] = []
        for one in torch.split(x, 1):
            (outputs,) = run(**{INPUT: one.numpy()}).values()
            # A copy, because the next call writes into the same memory.
            found.append(torch.from_numpy(outputs.copy()))
        return torch.cat(found)

    return predict


def _open(path: Path) -> Any:
    from ai_edge_litert.interpreter import Interpreter

    return Interpreter(model_path=str(path), num_threads=1)


@contextmanager
def _silent() -> Iterator[None]:
    """Silence the converter, which reports progress on stdout, and its C++, which uses stderr."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with quiet(), open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
            with redirect_stdout(nowhere), redirect_stderr(nowhere):
                yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
