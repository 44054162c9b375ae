"""What is done to an ONNX graph so that int8 names the classes that float names; docs/export.md has the figures."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .rounding import patches, rounded

LINEAR = ("Gemm", "MatMul")
PLAIN = ("Add", "Sub", "Mul", "Div")
"""What standardises inputs, with numbers that are no weights."""
SMALL = 0.05
"""The share of all weights up to which the first and the last layer stay in float."""
WIDEST = 2048
"""Inputs of one output up to which weights are rounded by what they read; above, to the nearest: it takes minutes."""


def _layers(graph: Any) -> dict[str, int]:
    """The layers with weights, by node, and how many; in the order in which they run."""
    sizes = {each.name: math.prod(each.dims) for each in graph.initializer}
    layers = [node for node in graph.node if node.op_type in ("Conv", *LINEAR)]
    return {node.name: sizes[node.input[1]] for node in layers if node.input[1] in sizes}


def ends(graph: Any) -> list[str]:
    """The first and the last layer, if small: what the first does wrong goes through all, the last feeds the logits."""
    sizes = _layers(graph)
    return [
        name
        for name in dict.fromkeys([*[*sizes][:1], *[*sizes][-1:]])
        if sizes[name] <= SMALL * sum(sizes.values())
    ]


def shares_without(graph: Any, kept: list[str]) -> tuple[float, float] | None:
    """The shares of weights and of MACs that are not in the layers that are kept in float.

    None where other layers have weights too (recurrent ones, say): these are not quantised, nor are they counted here.
    """
    matrices = {each.name for each in graph.initializer if len(each.dims) > 1}
    if any(
        node.op_type not in (*PLAIN, "Conv", *LINEAR) and matrices & {*node.input}
        for node in graph.node
    ):
        return None
    shapes = {each.name: each.type.tensor_type.shape.dim for each in graph.value_info}
    sizes, nodes = _layers(graph), {node.name: node for node in graph.node}
    macs = {name: size * _places(nodes[name], shapes) for name, size in sizes.items()}
    weights, work = (
        1 - sum(each[name] for name in kept) / max(1, sum(each.values())) for each in (sizes, macs)
    )
    return weights, work


def _places(node: Any, shapes: Any) -> int:
    """How often a layer is applied to one example: a convolution at every point, a linear layer at every step."""
    dims = [d.dim_value for d in shapes.get(node.output[0], ())]
    return math.prod(dims[1:-1] if node.op_type in LINEAR else dims[2:])


def relu_first(graph: Any, kept: list[str]) -> None:
    """Put ReLU in front of max pooling: the same numbers, but no steps of int8 go to what is below 0.

    Behind a layer in float it is left: pooling would then run on int8 between two layouts, which takes long.
    """
    by = {out: node for node in graph.node for out in node.output}
    for pool in [node for node in graph.node if node.op_type == "MaxPool"]:
        after = [node for node in graph.node if pool.output[0] in node.input]
        before = by.get(pool.input[0])
        if [node.op_type for node in after] != ["Relu"] or before is None or before.name in kept:
            continue
        relu, between = after[0], pool.output[0]
        pool.output[0], relu.output[0] = relu.output[0], between
        relu.input[0], pool.input[0] = pool.input[0], between
        first = type(pool)()
        first.CopyFrom(relu)
        relu.CopyFrom(pool)
        pool.CopyFrom(first)
        for each in [
            each for each in graph.value_info if each.name == between
        ]:  # its shape was that behind pooling
            graph.value_info.remove(each)


def relu_apart(graph: Any, kept: list[str]) -> None:
    """Write ReLU behind a linear layer in int8 as max(x, 0): onnxruntime fuses ReLU into a product in float."""
    onnx: Any = importlib.import_module("onnx")
    by = {out: node for node in graph.node for out in node.output}
    for relu in [node for node in graph.node if node.op_type == "Relu"]:
        before = by.get(relu.input[0])
        if before is not None and before.op_type in LINEAR and before.name not in kept:
            zero = f"{relu.output[0]}_zero"
            graph.initializer.append(
                onnx.helper.make_tensor(zero, onnx.TensorProto.FLOAT, (), [0.0])
            )
            relu.op_type = "Max"
            relu.input.append(zero)


def round_anew(
    made: Any, model: Any, batches: list[dict[str, Tensor]], start: Callable[[bytes], Any]
) -> None:
    """Round the weights of ``made`` anew, each layer by the inputs that it has in ``model``, the same in float."""
    onnx: Any = importlib.import_module("onnx")
    tensors = {each.name: each for each in (*model.graph.initializer, *made.graph.initializer)}
    sources = {out: node for node in made.graph.node for out in node.output}
    layers = {node.name: node for node in model.graph.node if node.name in _layers(model.graph)}
    within = {
        node.name: sources[node.input[1]]
        for node in made.graph.node
        if node.name in layers and node.input[1] in sources
    }
    found = _moments(model, [layers[name] for name in within], batches, start)
    for name, moments in found.items():
        node, (whole, scale) = layers[name], within[name].input[:2]
        weight = torch.from_numpy(onnx.numpy_helper.to_array(tensors[node.input[1]]).copy())
        back = node.op_type in LINEAR and not _said(node).get("transB", 0)
        flat = weight.t() if back else weight.flatten(1)
        q = rounded(
            flat, torch.from_numpy(onnx.numpy_helper.to_array(tensors[scale]).copy()), moments
        )
        q = q.t() if back else q.reshape(weight.shape)
        tensors[whole].CopyFrom(onnx.numpy_helper.from_array(q.contiguous().numpy(), whole))


def _moments(
    model: Any, layers: list[Any], batches: list[dict[str, Tensor]], start: Callable[[bytes], Any]
) -> dict[str, Tensor]:
    """X^T X of what each layer reads; not of groups of channels, nor where it would take minutes."""
    onnx: Any = importlib.import_module("onnx")
    dims = {each.name: [*each.dims] for each in model.graph.initializer}
    layers = [node for node in layers if _inputs(node, dims[node.input[1]]) <= WIDEST]
    watched, names = (
        type(model)(),
        list(dict.fromkeys(node.input[0] for node in layers if node.input[0] != "x")),
    )
    watched.CopyFrom(model)
    watched.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in names)
    session = start(watched.SerializeToString())
    found: dict[str, Tensor] = {}
    for batch in batches:
        given = session.run(names, {k: v.numpy() for k, v in batch.items()}) if names else []
        seen = batch | {
            name: torch.from_numpy(each) for name, each in zip(names, given, strict=True)
        }
        for node in layers:
            rows = _read(node, seen[node.input[0]])
            if rows is not None:
                found[node.name] = found.get(node.name, 0) + (rows.t() @ rows).double()
    return found


def _inputs(node: Any, dims: list[int]) -> int:
    """How many numbers one output of a layer reads, by the shape of its weights."""
    return (
        math.prod(dims[1:]) if node.op_type == "Conv" or _said(node).get("transB", 0) else dims[0]
    )


def _read(node: Any, x: Tensor) -> Tensor | None:
    """A row of inputs for each output of a layer; None for convolutions in groups or over three axes."""
    if node.op_type in LINEAR:
        return None if _said(node).get("transA", 0) else x.reshape(-1, x.shape[-1])
    said, axes = _said(node), x.dim() - 2
    if said.get("group", 1) != 1 or axes > 2 or said.get("auto_pad", b"NOTSET") != b"NOTSET":
        return None
    ones, none = [1] * axes, [0] * (2 * axes)
    return patches(
        x,
        said["kernel_shape"],
        said.get("strides", ones),
        said.get("pads", none),
        said.get("dilations", ones),
    )


def _said(node: Any) -> dict[str, Any]:
    """The attributes of a node."""
    onnx: Any = importlib.import_module("onnx")
    return {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
