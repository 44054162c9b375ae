"""The structure of a network: its layers in order of execution, their tensors, what they cost.

A :class:`Layout` is plain data without a module, so it can be compared, pickled and sent.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from ..errors import InputError, check, first_line, unknown
from . import norms
from .forward_state import find_changed_state

Kind = Literal["conv", "linear", "norm", "other"]
FLOAT_BYTES = 4
"""Networks train in float32; all byte counts here are for that type."""


@dataclass(frozen=True)
class Layer:
    """A module with tensors: not ReLU or pooling."""

    name: str
    kind: Kind
    params: tuple[str, ...]
    buffers: tuple[str, ...]
    weights: tuple[str, ...]
    """What may be pruned: the weights of conv and linear layers, and the matrices of recurrent and
    attention layers."""
    bias: str | None
    macs: int
    """Multiply-accumulates per sample, over all calls; 0 if the layer is never called."""
    activations: int
    """Numbers in its output per sample, over all calls; 0 if the layer is never called."""

    @property
    def names(self) -> tuple[str, ...]:
        """The layer's parameters, then its buffers."""
        return self.params + self.buffers


@dataclass(frozen=True)
class Layout:
    """The structure of a network as plain data, found once.

    Tensors have the names of the ``state_dict``; a tensor that two layers share has one name.
    Buffers are the float buffers of the ``state_dict``.

    >>> layout = Layout.of(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), (4,))
    >>> layout.prunable, layout.size, layout.macs
    (('0.weight', '2.weight'), 23, 18)
    """

    layers: tuple[Layer, ...]
    """In the order in which they start to run; layers that never run come last, in the order in
    which they were registered."""
    named_shapes: tuple[tuple[str, tuple[int, ...]], ...]
    params: tuple[str, ...]
    buffers: tuple[str, ...]
    batch_norm: bool
    """Whether a norm layer takes statistics over a batch, so that a batch has two or more."""
    writes_input: bool = False
    """Whether the forward pass writes into its input."""
    frozen: tuple[str, ...] = ()
    """Parameters without a gradient (``requires_grad=False``): they stay in the module."""
    frozen_size: int = 0
    """The number of elements of ``frozen``."""
    frozen_macs: int = 0
    """Multiply-accumulates of layers that are frozen completely, which are not in ``layers``."""
    state: tuple[str, ...] = ()
    """Other buffers and attributes that the forward pass changes: they are restored after every
    call."""

    @classmethod
    def of(cls, module: nn.Module, shape: tuple[int, ...]) -> Layout:
        """Observe a module while it runs once, in eval mode, on zeros.

        Args:
            module: The module.
            shape: The shape of one input, without the batch dimension.
        """
        tensors = named_tensors(module)
        names = tuple(tensors)
        # named_tensors puts the parameters first.
        count = sum(parameter.requires_grad for parameter in module.parameters())
        layers, frozen_macs, writes_input = _observe_layers(module, shape, tensors)
        # Frozen parameters are not in the tree, so only the layout knows of them.
        frozen = frozen_parameters(module)
        keeps_statistics = any(layer.kind == "norm" and layer.buffers for layer in layers)
        # A BatchNorm without running statistics has no buffers, and still needs a batch of two.
        fixed = norms.find_fixed_norms(module)
        trained_norms = set(module.modules()).difference(fixed)
        has_batch_norm = any(isinstance(part, _BatchNorm) for part in trained_norms)
        state: tuple[str, ...] = ()
        # The built-in networks have none, and need not be tried.
        if not type(module).__module__.startswith(f"{__package__}."):
            state = find_changed_state(module, shape, tensors)
        return cls(
            layers=layers,
            named_shapes=tuple((name, tuple(t.shape)) for name, t in tensors.items()),
            params=names[:count],
            buffers=names[count:],
            batch_norm=keeps_statistics or has_batch_norm,
            writes_input=writes_input,
            frozen=tuple(frozen),
            frozen_size=sum(parameter.numel() for parameter in frozen.values()),
            frozen_macs=frozen_macs,
            state=state,
        )

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every parameter and buffer of the network, in that order; a copy."""
        return dict(self.named_shapes)

    @property
    def prunable(self) -> tuple[str, ...]:
        """The names of the weights that may be pruned, in order of execution."""
        return _unique(chain.from_iterable(layer.weights for layer in self.layers))

    @property
    def never_pruned(self) -> tuple[str, ...]:
        """Parameters of two dimensions or more that belong to no layer known here."""
        shapes = self.shapes
        prunable = set(self.prunable)
        names = []
        for k in self.params:
            if len(shapes[k]) > 1 and k not in prunable:
                names.append(k)
        return tuple(names)

    @property
    def norms(self) -> tuple[str, ...]:
        """Parameters and buffers of the norm layers: what FedBN keeps local."""
        return _names_of(layer for layer in self.layers if layer.kind == "norm")

    @property
    def scales(self) -> tuple[str, ...]:
        """The scale of every norm layer that has one, γ in papers."""
        names: list[str] = []
        for layer in self.layers:
            if layer.kind != "norm":
                continue
            for name in layer.params:
                # torch calls γ `weight` and β `bias` in every norm layer.
                if name.rpartition(".")[2] == "weight":
                    names.append(name)
        return _unique(names)

    @property
    def head_layer(self) -> Layer | None:
        """The last linear layer that runs, if any does."""
        last = None
        for layer in self.layers:
            if layer.kind == "linear" and layer.activations:
                last = layer
        return last

    @property
    def head(self) -> tuple[str, ...]:
        """The parameters of the last linear layer that runs; empty if no linear layer runs."""
        layer = self.head_layer
        if layer is None:
            return ()
        return layer.params

    def without(self, local: Collection[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the parameters and the buffers that are not ``local``, in the network's order.

        >>> layout = Layout.of(nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1)), (2,))
        >>> layout.without(layout.head)
        (('0.weight', '0.bias'), ('0.running_mean', '0.running_var'))
        """
        weights = []
        statistics = []
        for name in self.shapes:
            if name in local:
                continue
            if name in self.params:
                weights.append(name)
            else:
                statistics.append(name)
        return tuple(weights), tuple(statistics)

    @property
    def size(self) -> int:
        """The number of parameters of the network; buffers are not counted."""
        return self.count(self.params)

    @property
    def prunable_size(self) -> int:
        """The number of prunable weights."""
        return self.count(self.prunable)

    @property
    def macs(self) -> int:
        """Multiply-accumulates of one forward pass per sample, frozen layers included."""
        return self.frozen_macs + sum(layer.macs for layer in self.layers)

    @property
    def activations(self) -> int:
        """Numbers that the layers output per sample."""
        return sum(layer.activations for layer in self.layers)

    @property
    def param_bytes(self) -> int:
        """The size of the network's parameters in float32."""
        return FLOAT_BYTES * self.size

    def first(self, n: int) -> tuple[str, ...]:
        """Return the tensor names of the first ``n`` layers with parameters, layer by layer."""
        return _names_of(self._trained(n)[:n])

    def last(self, n: int) -> tuple[str, ...]:
        """Return the tensor names of the last ``n`` layers with parameters, layer by layer."""
        layers = self._trained(n)
        # layers[-n:] would be all layers for n = 0.
        return _names_of(layers[len(layers) - n :])

    def density(self, mask: Mapping[str, Tensor] | None) -> float:
        """Return the kept share of the prunable weights; a mask need not name all of them.

        >>> layout = Layout.of(nn.Linear(3, 2), (3,))
        >>> mask = {"weight": torch.tensor([[1, 1, 0], [0, 0, 1]]).bool()}
        >>> layout.density(mask), layout.density(None)
        (0.5, 1.0)
        """
        if mask is None or not self.prunable_size:
            return 1.0
        self._check_mask(mask)
        pruned = 0
        for name in self.prunable:
            if name in mask:
                pruned += mask[name].numel() - int(mask[name].count_nonzero())
        return 1 - pruned / self.prunable_size

    def memory(self, batch: int, optimiser_slots: int) -> int:
        """Estimate the bytes of one training step of the network, all in float32.

        (2 + s)·d + a·B numbers: d parameters, their gradients, s optimiser slots (SGD 0, with
        momentum 1, Adam 2), and the a activations of B samples; what is frozen counts once. Real
        use is higher: pooling indices, dropout masks and the kernels' work space are not counted.
        """
        check(batch > 0, "batch", batch, "above 0")
        check(optimiser_slots >= 0, "optimiser_slots", optimiser_slots, "0 or more")
        trained = (2 + optimiser_slots) * self.size
        return FLOAT_BYTES * (trained + self.frozen_size + self.activations * batch)

    def count(self, which: Iterable[str]) -> int:
        """Count the elements of the network's tensors called ``which``."""
        shapes = self.shapes
        total = 0
        for name in which:
            total += math.prod(shapes[name])
        return total

    @property
    def trained_layers(self) -> list[Layer]:
        """The layers that run and have parameters."""
        trained = []
        for layer in self.layers:
            if layer.params and layer.activations:
                trained.append(layer)
        return trained

    def _trained(self, n: int) -> list[Layer]:
        """Return the layers that run and have parameters; refuse more than there are."""
        layers = self.trained_layers
        allowed = f"from 0 to {len(layers)}, the layers of this net that have parameters"
        check(0 <= n <= len(layers), "n", n, allowed)
        return layers

    def _check_mask(self, mask: Mapping[str, Tensor]) -> None:
        shapes = self.shapes
        for name, leaf in mask.items():
            if name not in shapes:
                raise unknown("tensor of this net", name, shapes)
            given = tuple(leaf.shape)
            expected = shapes[name]
            allowed = f"{expected}, that of the tensor"
            check(given == expected, f"the shape of mask '{name}'", given, allowed)


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the trained parameters, then the float buffers of a ``state_dict``; shared ones once.

    Parameters that are frozen (``requires_grad=False``) are constants of the module.
    """
    saved = module.state_dict().keys()
    tensors: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            tensors[name] = parameter
    for name, buffer in module.named_buffers():
        if name in saved and buffer.is_floating_point():
            tensors[name] = buffer
    return tensors


def frozen_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are frozen (``requires_grad=False``): constants of the module."""
    frozen = {}
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            frozen[name] = parameter
    return frozen


def probe(module: nn.Module, shape: tuple[int, ...], batch: int = 1) -> Any:
    """Return the output of a module for zeros of ``(batch, *shape)`` in eval mode.

    Train modes and torch's random state do not change.
    """
    return _probe(module, shape, batch)[0]


def _probe(module: nn.Module, shape: tuple[int, ...], batch: int) -> tuple[Any, bool]:
    """Return the output, and whether the module wrote into its input."""
    like = next(iter(named_tensors(module).values()), torch.zeros(()))
    modes = [(part, part.training) for part in module.modules()]
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            zeros = torch.zeros((batch, *shape), dtype=like.dtype, device=like.device)
            output = module.eval()(zeros)
            # torch counts the writes to a tensor, through views of it too.
            return output, zeros._version > 0
    except Exception as error:
        reason = first_line(error)
        advice = "check the shape against the first layers of the net"
        if "scalar type" in reason or "dtype" in reason:
            advice = (
                f"inputs are {like.dtype}: convert them in the forward pass, for example with "
                "x.long()"
            )
        raise InputError(
            f"{type(module).__name__} was given zeros of shape {(batch, *shape)} and raised "
            f"{type(error).__name__}: {reason}; {advice}."
        ) from error
    finally:
        for part, mode in modes:
            part.training = mode


# ---- observing a module while it runs ------------------------------------------------------------


def _observe_layers(
    module: nn.Module, shape: tuple[int, ...], tensors: Mapping[str, Tensor]
) -> tuple[tuple[Layer, ...], int, bool]:
    """Run a module once and watch its layers.

    Returns:
        The layers in order of execution, with what they cost; the multiply-accumulates of those
        that are frozen; and whether the input was written to.
    """
    holders: dict[str, nn.Module] = {}
    for name, part in module.named_modules():
        own_tensors = [*part.parameters(recurse=False), *part.buffers(recurse=False)]
        if own_tensors:
            holders[name] = part

    started: list[str] = []
    macs = dict.fromkeys(holders, 0)
    activations = dict.fromkeys(holders, 0)
    handles = []
    for name, part in holders.items():
        # `name=name` binds this name: a closure would see that of the last turn of the loop.
        def before(_: nn.Module, args: Any, name: str = name) -> None:
            started.append(name)

        def after(part: nn.Module, args: Any, output: Any, name: str = name) -> None:
            macs[name] += _macs(part, args, output)
            activations[name] += _numel(output)

        handles.append(part.register_forward_pre_hook(before))
        handles.append(part.register_forward_hook(after))
    try:
        _, writes_input = _probe(module, shape, batch=1)
    finally:
        for handle in handles:
            handle.remove()

    # In order of execution, each once; then those that never ran.
    ordered = dict.fromkeys([*started, *holders])
    name_by_id = {id(t): name for name, t in tensors.items()}
    layers: list[Layer] = []
    frozen_macs = 0
    for name in ordered:
        layer = _layer(name, holders[name], name_by_id, macs[name], activations[name])
        if layer.names:
            layers.append(layer)
        else:
            frozen_macs += layer.macs
    return tuple(layers), frozen_macs, writes_input


def _layer(
    name: str, module: nn.Module, name_by_id: Mapping[int, str], macs: int, activations: int
) -> Layer:
    """Describe one layer of a network."""
    params = {}
    for key, parameter in module.named_parameters(recurse=False):
        # A frozen parameter has no name.
        if id(parameter) in name_by_id:
            params[key] = name_by_id[id(parameter)]
    # Integer buffers, and those a state_dict leaves out, have no name.
    buffers = _unique(
        name_by_id[id(b)] for b in module.buffers(recurse=False) if id(b) in name_by_id
    )
    kind = _kind(module)
    weights = []
    for key in _weight_keys(module, kind):
        if key in params:
            weights.append(params[key])
    return Layer(
        name=name,
        kind=kind,
        params=tuple(params.values()),
        buffers=buffers,
        weights=tuple(weights),
        bias=params.get("bias"),
        macs=macs,
        activations=activations,
    )


def _kind(module: nn.Module) -> Kind:
    """Return the kind of a network's layer: conv, linear, norm or other."""
    match module:
        case _ConvNd():
            return "conv"
        case nn.Linear():
            return "linear"
        case _NormBase() | nn.GroupNorm() | nn.LayerNorm() | nn.RMSNorm():
            return "norm"
        case _:
            return "other"


def _weight_keys(module: nn.Module, kind: Kind) -> list[str]:
    """Return the attributes in which a module may have weights that can be pruned."""
    if kind in ("conv", "linear"):
        return ["weight"]
    match module:
        case nn.RNNBase() | nn.RNNCellBase():
            # Called weight_ih_l0, weight_hh_l0, weight_ih_l0_reverse, ...
            return [key for key, _ in module.named_parameters() if key.startswith("weight_")]
        case nn.MultiheadAttention():
            return ["in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"]
        case _:
            return []


def _macs(module: nn.Module, args: tuple[Any, ...], output: Any) -> int:
    """Count positions times weights: a weight is used once for every position it slides over.

    Convolutions slide over the output, transposed ones over the input; recurrent layers over the
    steps.
    """
    match module:
        case _ConvTransposeNd():
            return _numel(args[0]) // module.in_channels * module.weight.numel()
        case _ConvNd():
            return _numel(output) // module.out_channels * module.weight.numel()
        case nn.Linear():
            return _numel(output) // module.out_features * module.weight.numel()
        case nn.RNNBase():
            # The matrices multiply at every step; the bias vectors only add.
            matrices = sum(p.numel() for p in module.parameters() if p.ndim == 2)
            return _numel(args[0]) // module.input_size * matrices
        case _:
            return 0


def _numel(value: Any) -> int:
    """Count the elements of an output, which may be a tensor or (as an LSTM's) nested tuples."""
    if isinstance(value, Tensor):
        return value.numel()
    if isinstance(value, tuple | list):
        return sum(map(_numel, value))
    return 0


def _names_of(layers: Iterable[Layer]) -> tuple[str, ...]:
    return _unique(chain.from_iterable(layer.names for layer in layers))


def _unique(items: Iterable[str]) -> tuple[str, ...]:
    """Drop repetitions, in order of first appearance: layers may share a tensor."""
    return tuple(dict.fromkeys(items))
