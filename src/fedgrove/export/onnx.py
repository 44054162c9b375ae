"""ONNX files: written by torch, quantised and run by onnxruntime."""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .onnx_int8 import LINEAR, ends, relu_apart, relu_first, round_anew, shares_without

SUFFIX = ".onnx"
EXTRA = "export"
NEEDS: tuple[str, ...] = ("onnx", "onnxscript", "onnxruntime")
OPSET = 18
"""Old enough for runtimes that are some years old."""
QUANTISED = (
    "Conv",
    "Gemm",
    "MatMul",
    "Add",
    "Relu",
    "MaxPool",
    "Reshape",
    "Flatten",
    "Unsqueeze",
    "Transpose",
)
"""The operations that run on int8; the standardisation in front stays in float."""
BATCH = 32


def write(module: nn.Module, shape: tuple[int, ...], path: Path, notes: Mapping[str, str]) -> None:
    """Write a module in eval mode, for batches of any size; ``notes`` go into the file's metadata."""
    onnx: Any = importlib.import_module("onnx")
    batch = torch.export.Dim("batch")
    with quiet():
        program: Any = torch.onnx.export(
            module,
            (torch.zeros(2, *shape),),  # a batch of one would be taken for a constant
            dynamo=True,
            opset_version=OPSET,
            input_names=["x"],
            output_names=["logits"],
            dynamic_shapes=({0: batch},),
            verbose=False,
        )
    model = program.model_proto
    _forget(model)
    onnx.helper.set_model_props(model, dict(notes))
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, str(path))


def _forget(model: Any) -> None:
    """Leave out where the code stood on this machine; it is of no use to a device."""
    graph = model.graph
    for part in (
        model,
        graph,
        *graph.node,
        *graph.value_info,
        *graph.input,
        *graph.output,
        *graph.initializer,
    ):
        part.ClearField("metadata_props")
        part.ClearField("doc_string")


def quantise(module: nn.Module, plain: Path, x: Tensor, path: Path) -> tuple[float, float] | None:
    """Write weights and activations as int8, a scale per output channel, and say which shares of weights and MACs are.

    In float stay what linear layers give (256 steps made ties among logits) and the first and the last layer where
    they are small. Activations have the range, and weights are rounded by the inputs, that they have on ``x``.
    """
    onnx: Any = importlib.import_module("onnx")
    quantisation: Any = importlib.import_module("onnxruntime.quantization")
    ready = path.with_suffix(".ready")
    batches = iter([{"x": part.numpy()} for part in torch.split(x, BATCH)])

    class Reader(quantisation.CalibrationDataReader):  # type: ignore[misc]
        """One batch after another."""

        def get_next(self) -> Any:
            """The next batch, or None."""
            return next(batches, None)

    with quiet():
        quantisation.shape_inference.quant_pre_process(str(plain), str(ready))
        model = onnx.load(str(ready))
        kept = ends(model.graph)
        shares = shares_without(model.graph, kept)
        relu_first(model.graph, kept)
        relu_apart(model.graph, kept)
        onnx.save(model, str(ready))
        quantisation.quantize_static(
            str(ready),
            str(path),
            Reader(),
            per_channel=True,
            op_types_to_quantize=list(QUANTISED),
            nodes_to_exclude=kept,
            extra_options={"OpTypesToExcludeOutputQuantization": list(LINEAR)},
        )
        made = onnx.load(str(path))
        round_anew(made, model, [{"x": part} for part in torch.split(x, BATCH)], _session)
    ready.unlink()
    _tidy(plain, made, path)
    return shares


def _tidy(plain: Path, model: Any, path: Path) -> None:
    """Say in the int8 file what the other says, and name only the sets of operations that are in it."""
    onnx: Any = importlib.import_module("onnx")
    used = {"", *(node.domain for node in model.graph.node)}
    for i in reversed([i for i, each in enumerate(model.opset_import) if each.domain not in used]):
        del model.opset_import[i]
    onnx.helper.set_model_props(
        model, {p.key: p.value for p in onnx.load(str(plain)).metadata_props}
    )
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, str(path))


def load(path: Path) -> Callable[[Tensor], Tensor]:
    """The file as a function from inputs to logits, on one thread of the processor."""
    session = _session(str(path))
    return lambda x: torch.from_numpy(session.run(["logits"], {"x": x.numpy()})[0])


def _session(model: str | bytes) -> Any:
    runtime: Any = importlib.import_module("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return runtime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


@contextmanager
def quiet() -> Iterator[None]:
    """Without what exporters say of themselves: deprecations inside torch, packages that are not needed."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
