"""Changes to an ONNX graph that keep the int8 model's predicted classes close to the float model's.

docs/evidence/export.md summarises what each of them is worth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .rounding import patches, rounded

LINEAR = ("Gemm", "MatMul")
LAYERS = ("Conv", *LINEAR)
PLAIN = ("Add", "Sub", "Mul", "Div")
"""Element-wise arithmetic: the standardisation of inputs, whose stored tensors are not weights."""
SMALL = 0.05
"""The first and the last layer stay in float if each holds at most this share of all weights."""
WIDEST = 2048
"""Layers with more inputs per output than this are rounded to the nearest.

Rounding them by what they read would take minutes.
"""


class _Layer(NamedTuple):
    """A convolution or a linear layer, and its weights as the graph stores them."""

    node: Any
    weight: Any


def _layers(graph: Any) -> dict[str, _Layer]:
    """The convolutions and linear layers of a graph, by name, in running order."""
    stored = {tensor.name: tensor for tensor in graph.initializer}
    layers: dict[str, _Layer] = {}
    for node in graph.node:
        # A MatMul of two activations (as in attention) reads no stored tensor: it has no weights.
        if node.op_type in LAYERS and node.input[1] in stored:
            layers[node.name] = _Layer(node, stored[node.input[1]])
    return layers


# ---- what stays in float -------------------------------------------------------------------------


def ends(graph: Any) -> list[str]:
    """Return the first and the last layer of an ONNX graph that stay float, if small.

    An error of the first layer passes through all others; one of the last goes straight into the
    logits.
    """
    counts = {name: math.prod(layer.weight.dims) for name, layer in _layers(graph).items()}
    limit = SMALL * sum(counts.values())
    names = list(counts)
    kept: list[str] = []
    for name in names[:1] + names[-1:]:
        # In a network of one layer, the first is also the last.
        if counts[name] <= limit and name not in kept:
            kept.append(name)
    return kept


def shares_without(graph: Any, kept: list[str]) -> tuple[float, float] | None:
    """Return the shares of weights and MACs that an int8 export has outside ``kept`` layers.

    None where layers of other kinds (recurrent ones, say) have weights too: they are not quantised,
    and their MACs are not counted here.
    """
    # A bias has one axis: it moves a layer's output but multiplies nothing.
    matrices = {tensor.name for tensor in graph.initializer if len(tensor.dims) > 1}
    for node in graph.node:
        is_counted = node.op_type in (*PLAIN, *LAYERS)
        if not is_counted and matrices.intersection(node.input):
            return None

    shapes = {value.name: value.type.tensor_type.shape.dim for value in graph.value_info}
    weights: dict[str, int] = {}
    macs: dict[str, int] = {}
    for name, layer in _layers(graph).items():
        weights[name] = math.prod(layer.weight.dims)
        macs[name] = weights[name] * _places(layer.node, shapes)
    return _share_without(weights, kept), _share_without(macs, kept)


def _places(node: Any, shapes: Any) -> int:
    """How often one example uses each weight of a layer.

    Once per position of a convolution's output, once per step of a sequence for a linear layer.
    """
    dims = [dim.dim_value for dim in shapes.get(node.output[0], ())]
    # The batch comes first; channels are the second axis of a convolution, the last of a product.
    if node.op_type in LINEAR:
        return math.prod(dims[1:-1])
    return math.prod(dims[2:])


def _share_without(amounts: dict[str, int], left_out: list[str]) -> float:
    excluded = sum(map(amounts.__getitem__, left_out))
    return 1 - excluded / max(1, sum(amounts.values()))


# ---- where ReLU stands ---------------------------------------------------------------------------


def relu_first(graph: Any, kept: list[str]) -> None:
    """Move ReLU before max pooling in an ONNX graph, so that int8 steps are not wasted.

    Behind a layer in float, pooling stays where it is: otherwise it would run on int8 between two
    memory layouts, which is slow.
    """
    producers = _producers(graph)
    # Listed beforehand: a swap puts the pooling further back, where it would be met again.
    pools = [node for node in graph.node if node.op_type == "MaxPool"]
    for pool in pools:
        consumers = [node for node in graph.node if pool.output[0] in node.input]
        only_relu_follows = len(consumers) == 1 and consumers[0].op_type == "Relu"
        layer = producers.get(pool.input[0])
        if only_relu_follows and layer is not None and layer.name not in kept:
            _swap(graph, pool, consumers[0])


def _swap(graph: Any, pool: Any, relu: Any) -> None:
    """Turn  source -> pool -> between -> relu -> result  into the same with relu before pool."""
    source = pool.input[0]
    between = pool.output[0]
    result = relu.output[0]
    relu.input[0] = source
    relu.output[0] = between
    pool.input[0] = between
    pool.output[0] = result

    # A graph lists its nodes in running order, so the two exchange their slots as well. Protobuf
    # has no assignment to a slot, only a copy into it.
    relu_copy = type(relu)()
    relu_copy.CopyFrom(relu)
    relu.CopyFrom(pool)
    pool.CopyFrom(relu_copy)

    # The recorded shape of ``between`` is that behind pooling, which no longer holds.
    # A copy of the list is walked, because entries are removed on the way.
    for value in list(graph.value_info):
        if value.name == between:
            graph.value_info.remove(value)


def relu_as_max(graph: Any, kept: list[str]) -> None:
    """Write ReLU after an int8 linear layer of an ONNX graph as max(x, 0).

    onnxruntime would fuse ReLU into the product and run both in float.
    """
    import onnx

    producers = _producers(graph)
    for node in graph.node:
        if node.op_type != "Relu":
            continue
        layer = producers.get(node.input[0])
        if layer is None or layer.op_type not in LINEAR or layer.name in kept:
            continue
        zero = f"{node.output[0]}_zero"
        graph.initializer.append(onnx.helper.make_tensor(zero, onnx.TensorProto.FLOAT, (), [0.0]))
        node.op_type = "Max"
        node.input.append(zero)


def _producers(graph: Any) -> dict[str, Any]:
    """The node that computes each tensor, by the tensor's name."""
    producers: dict[str, Any] = {}
    for node in graph.node:
        for name in node.output:
            producers[name] = node
    return producers


# ---- how weights are rounded ---------------------------------------------------------------------


def round_by_inputs(
    quantised: Any,
    model: Any,
    batches: Sequence[Tensor],
    start_session: Callable[[bytes], Any],
) -> None:
    """Round an int8 export's weights again, by the inputs that each layer really reads.

    These inputs are taken from ``model``, the same graph in float, on ``batches``;
    ``start_session`` makes an onnxruntime session of a serialised model.
    """
    from onnx import numpy_helper

    float_layers = _layers(model.graph)
    stored = {tensor.name: tensor for tensor in quantised.graph.initializer}
    producers = _producers(quantised.graph)

    # The quantiser keeps the names of layers. A quantised one no longer reads a stored float tensor
    # but the output of a DequantizeLinear node; one that stayed in float has no such producer.
    layers: dict[str, _Layer] = {}
    dequantisers: dict[str, Any] = {}
    for node in quantised.graph.node:
        if node.name in float_layers and node.input[1] in producers:
            layers[node.name] = float_layers[node.name]
            dequantisers[node.name] = producers[node.input[1]]

    for name, moments in _moments(model, layers, batches, start_session).items():
        int8_name, scale_name = dequantisers[name].input[:2]
        # Copies, because arrays of a protobuf are read-only and torch warns of such memory.
        weight = torch.from_numpy(numpy_helper.to_array(layers[name].weight).copy())
        scale = torch.from_numpy(numpy_helper.to_array(stored[scale_name]).copy())
        # rounded() takes (outputs, inputs).
        if _inputs_come_first(layers[name].node):
            q = rounded(weight.t(), scale, moments).t()
        else:
            q = rounded(weight.flatten(1), scale, moments).reshape(weight.shape)
        replacement = numpy_helper.from_array(q.contiguous().numpy(), int8_name)
        stored[int8_name].CopyFrom(replacement)


def _moments(
    model: Any,
    layers: Mapping[str, _Layer],
    batches: Sequence[Tensor],
    start_session: Callable[[bytes], Any],
) -> dict[str, Tensor]:
    """X^T X of what each layer reads, by its name.

    Layers that are too wide, or of a kind that :func:`_rows_read` does not know, are left out.
    """
    import onnx

    nodes = [layer.node for layer in layers.values() if _inputs(layer) <= WIDEST]

    # onnxruntime gives only outputs, so what layers read is made an output of a copy.
    watched = type(model)()
    watched.CopyFrom(model)
    names: list[str] = []
    for node in nodes:
        name = node.input[0]
        # Several layers may read one tensor, and the network's own input is at hand already.
        if name != "x" and name not in names:
            names.append(name)
            watched.graph.output.append(onnx.helper.make_empty_tensor_value_info(name))
    session = start_session(watched.SerializeToString())

    moments: dict[str, Tensor] = {}
    for x in batches:
        tensors = {"x": x}
        # An empty list of names would mean "all outputs" to onnxruntime.
        if names:
            arrays = session.run(names, {"x": x.numpy()})
            for name, array in zip(names, arrays, strict=True):
                tensors[name] = torch.from_numpy(array)
        for node in nodes:
            rows = _rows_read(node, tensors[node.input[0]])
            if rows is not None:
                # The product of one batch in float, the sum over batches in double precision.
                moments[node.name] = moments.get(node.name, 0) + (rows.t() @ rows).double()
    return moments


def _inputs(layer: _Layer) -> int:
    """How many numbers one output of a layer reads."""
    if _inputs_come_first(layer.node):
        return int(layer.weight.dims[0])
    return math.prod(layer.weight.dims[1:])


def _inputs_come_first(node: Any) -> bool:
    """Whether weights are stored as (inputs, outputs): by MatMul, and by Gemm without transB."""
    return node.op_type in LINEAR and not _attributes(node).get("transB", 0)


def _rows_read(node: Any, x: Tensor) -> Tensor | None:
    """What a layer reads, a row per output position; None if its kind is not supported.

    Not supported are convolutions in groups, over three axes or with automatic padding, and Gemm
    with a transposed input.
    """
    attributes = _attributes(node)
    if node.op_type in LINEAR:
        if attributes.get("transA", 0):
            return None
        return x.reshape(-1, x.shape[-1])

    axes = x.dim() - 2
    has_groups = attributes.get("group", 1) != 1
    pads_automatically = attributes.get("auto_pad", b"NOTSET") != b"NOTSET"
    if has_groups or axes > 2 or pads_automatically:
        return None
    # ONNX's defaults, for attributes that a node leaves out.
    ones = [1] * axes
    zeros = [0] * (2 * axes)
    return patches(
        x,
        attributes["kernel_shape"],
        attributes.get("strides", ones),
        attributes.get("pads", zeros),
        attributes.get("dilations", ones),
    )


def _attributes(node: Any) -> dict[str, Any]:
    from onnx import helper

    return {field.name: helper.get_attribute_value(field) for field in node.attribute}
