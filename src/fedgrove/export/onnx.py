"""ONNX files: written by torch, quantised and run by onnxruntime."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .onnx_int8 import LINEAR, ends, relu_as_max, relu_first, round_by_inputs, shares_without

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
"""The operations that run on int8; the standardisation of inputs stays in float."""
CALIBRATION_BATCH = 32
"""Examples per batch of calibration."""


def write(module: nn.Module, shape: tuple[int, ...], path: Path, notes: Mapping[str, str]) -> None:
    """Write a module in eval mode as an ONNX file, for batches of any size.

    ``notes`` become the metadata; the output is called ``notes["output"]``, or logits.
    """
    import onnx

    batch = torch.export.Dim("batch")
    # torch.export would take a batch of one for a constant.
    example = torch.zeros(2, *shape)
    with quiet():
        program: Any = torch.onnx.export(
            module,
            (example,),
            dynamo=True,
            opset_version=OPSET,
            input_names=["x"],
            output_names=[notes.get("output", "logits")],
            dynamic_shapes=({0: batch},),
            verbose=False,
        )
    model = program.model_proto
    _clear_traces(model)
    onnx.helper.set_model_props(model, dict(notes))
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, str(path))


def _clear_traces(model: Any) -> None:
    """Remove stack traces: they hold paths of this machine and are of no use to a device."""
    graph = model.graph
    parts = [
        model,
        graph,
        *graph.node,
        *graph.value_info,
        *graph.input,
        *graph.output,
        *graph.initializer,
    ]
    for part in parts:
        part.ClearField("metadata_props")
        part.ClearField("doc_string")


def quantise(module: nn.Module, plain: Path, x: Tensor, path: Path) -> tuple[float, float] | None:
    """Export an ONNX file with int8 weights and activations, a scale per channel.

    Returns the shares of weights and of MACs that are in int8.

    The outputs of linear layers stay in float (256 steps made logits tie), and so do the first and
    the last layer where they are small. The ranges of activations are those on ``x``, and weights
    are rounded by the inputs that they read on ``x``.
    """
    import onnx
    from onnxruntime import quantization as quantisation

    batches = torch.split(x, CALIBRATION_BATCH)
    remaining = iter(batches)

    class Reader(quantisation.CalibrationDataReader):  # type: ignore[misc]
        """Hands out one batch after another."""

        def get_next(self) -> Any:
            """Return the next batch for ONNX calibration, or None."""
            batch = next(remaining, None)
            return None if batch is None else {"x": batch.numpy()}

    prepared = path.with_suffix(".ready")
    with quiet():
        # onnxruntime's own preparation. It also records the shapes that MACs are counted by.
        quantisation.shape_inference.quant_pre_process(str(plain), str(prepared))
        model = onnx.load(str(prepared))
        kept = ends(model.graph)
        # Before ReLU moves: that drops the recorded shape of the tensor between it and pooling.
        shares = shares_without(model.graph, kept)
        relu_first(model.graph, kept)
        relu_as_max(model.graph, kept)
        onnx.save(model, str(prepared))
        quantisation.quantize_static(
            str(prepared),
            str(path),
            Reader(),
            per_channel=True,
            op_types_to_quantize=list(QUANTISED),
            nodes_to_exclude=kept,
            extra_options={"OpTypesToExcludeOutputQuantization": list(LINEAR)},
        )
        quantised = onnx.load(str(path))
        round_by_inputs(quantised, model, batches, _session)
    prepared.unlink()
    _finish(plain, quantised, path)
    return shares


def _finish(plain: Path, model: Any, path: Path) -> None:
    """Save the int8 model with the float file's metadata and only the operator sets it uses."""
    import onnx

    used = {node.domain for node in model.graph.node}
    # The default set must always be named.
    used.add("")
    # Backwards, so that a deletion does not move the entries that are still to be looked at.
    for i in reversed(range(len(model.opset_import))):
        if model.opset_import[i].domain not in used:
            del model.opset_import[i]
    notes = {prop.key: prop.value for prop in onnx.load(str(plain)).metadata_props}
    onnx.helper.set_model_props(model, notes)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, str(path))


def load(path: Path) -> Callable[[Tensor], Tensor]:
    """Load an exported ONNX file as a function from inputs to outputs, on one CPU thread."""
    session = _session(str(path))

    def predict(x: Tensor) -> Tensor:
        (outputs,) = session.run(None, {"x": x.numpy()})
        return torch.from_numpy(outputs)

    return predict


def _session(model: str | bytes) -> Any:
    """A session for a file (its path) or a serialised model (its bytes)."""
    import onnxruntime as runtime

    options = runtime.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    return runtime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


@contextmanager
def quiet() -> Iterator[None]:
    """Silence ONNX exporters: deprecations inside torch, optional packages."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
