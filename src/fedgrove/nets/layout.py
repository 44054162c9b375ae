"""What a network is made of: its layers in order of execution, their tensors, and what they cost."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from ..channels.groups import ChannelGroup, Channels, channels_of, expand, may_remove_channels
from ..errors import InputError, check, unknown
from ..trees import Mask

Kind = Literal["conv", "linear", "norm", "other"]
FLOAT_BYTES = 4
"""Networks train in float32; all byte counts here are of that type."""


@dataclass(frozen=True)
class Layer:
    """A module that holds tensors of its own; modules that hold none (ReLU, pooling) are not layers."""

    name: str
    kind: Kind
    params: tuple[str, ...]
    buffers: tuple[str, ...]
    weight: str | None
    """The weight that may be pruned: of conv and linear layers only."""
    bias: str | None
    macs: int
    """Multiply-accumulates per sample, over all calls; 0 where never called."""
    activations: int
    """Numbers in its output per sample, over all calls; 0 where never called."""

    @property
    def names(self) -> tuple[str, ...]:
        """Its parameters, then its buffers."""
        return self.params + self.buffers


@dataclass(frozen=True)
class Layout:
    """Everything that is asked about a network's structure, found once.

    ``layers`` are in the order in which they start to run; layers that never run come last, in the order
    in which they were registered. Tensors are called as in ``state_dict``; a tensor that two layers share has one
    name. Buffers are the float buffers that a ``state_dict`` holds.

    >>> layout = Layout.of(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), (4,))
    >>> layout.prunable, layout.size, layout.macs
    (('0.weight', '2.weight'), 23, 18)
    """

    layers: tuple[Layer, ...]
    named_shapes: tuple[tuple[str, tuple[int, ...]], ...]
    params: tuple[str, ...]
    buffers: tuple[str, ...]
    source: tuple[nn.Module, tuple[int, ...]] | None = field(
        default=None, compare=False, repr=False
    )
    """The module that was looked at and the shape of its inputs: ``groups`` are found when they are first asked for."""

    @classmethod
    def of(cls, module: nn.Module, shape: tuple[int, ...]) -> Layout:
        """Look at ``module`` while it runs once, in eval mode, on zeros of ``(1, *shape)``."""
        tensors, count = tensors_of(module), len(list(module.parameters()))
        shapes = tuple((name, tuple(t.shape)) for name, t in tensors.items())
        every = tuple(tensors)
        return cls(
            _layers(module, shape, tensors),
            shapes,
            every[:count],
            every[count:],
            (module, tuple(shape)),
        )

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every parameter and buffer, in that order; a copy."""
        return dict(self.named_shapes)

    @property
    def prunable(self) -> tuple[str, ...]:
        """The weights of conv and linear layers, in order of execution."""
        return _once(layer.weight for layer in self.layers if layer.weight is not None)

    @property
    def norms(self) -> tuple[str, ...]:
        """Parameters and buffers of the norm layers: what FedBN keeps local."""
        return _once(name for layer in self.layers if layer.kind == "norm" for name in layer.names)

    @property
    def scales(self) -> tuple[str, ...]:
        """The scale of every norm layer that has one, γ in papers."""
        norms = (layer for layer in self.layers if layer.kind == "norm")
        return _once(
            name for layer in norms for name in layer.params if name.rpartition(".")[2] == "weight"
        )

    @property
    def batch_norm(self) -> bool:
        """Whether a norm layer takes statistics over a batch, and so cannot train on a batch of one."""
        kept = any(layer.kind == "norm" and layer.buffers for layer in self.layers)
        parts = self.source[0].modules() if self.source is not None else ()
        return kept or any(isinstance(part, _BatchNorm) for part in parts)

    @property
    def head_layer(self) -> Layer | None:
        """The last linear layer that runs, if any does."""
        found = [layer for layer in self.layers if layer.kind == "linear" and layer.activations]
        return found[-1] if found else None

    @property
    def head(self) -> tuple[str, ...]:
        """The parameters of the last linear layer that runs; none where no linear layer does."""
        return self.head_layer.params if self.head_layer else ()

    @property
    def size(self) -> int:
        """How many parameters there are; buffers are not counted."""
        return self.count(self.params)

    @property
    def prunable_size(self) -> int:
        """How many prunable weights there are."""
        return self.count(self.prunable)

    @property
    def macs(self) -> int:
        """Multiply-accumulates of one forward pass per sample: conv, linear and recurrent layers."""
        return sum(layer.macs for layer in self.layers)

    @property
    def activations(self) -> int:
        """Numbers that the layers put out per sample."""
        return sum(layer.activations for layer in self.layers)

    @property
    def param_bytes(self) -> int:
        """The parameters in float32."""
        return FLOAT_BYTES * self.size

    @cached_property
    def groups(self) -> tuple[ChannelGroup, ...]:
        """The channels that fall together, in order of execution; found once. The net's output is in no group."""
        from ..channels.shrink import coupled

        return coupled(*self.source, [layer.name for layer in self.layers]) if self.source else ()

    def expand(self, channels: Mapping[str, Tensor]) -> Mask:
        """The mask of all that falls with removed channels: see :func:`fedgrove.channels.groups.expand`.

        >>> layout = Layout.of(nn.Sequential(nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 1)), (1,))
        >>> {name: kept.int().tolist() for name, kept in layout.expand({"0": torch.tensor([True, False])}).items()}
        {'0.weight': [[1], [0]], '0.bias': [1, 0], '2.weight': [[1, 0]]}
        """
        return expand(self.groups, self.shapes, channels)

    def channels_of(self, mask: Mapping[str, Tensor] | None) -> Channels | None:
        """The whole channels that a mask removes: see :func:`fedgrove.channels.groups.channels_of`."""
        return (
            channels_of(self.groups, mask)
            if mask is not None and may_remove_channels(mask)
            else None
        )

    def first(self, n: int) -> tuple[str, ...]:
        """The names (parameters, then buffers, layer by layer) of the first ``n`` layers with parameters."""
        return _once(name for layer in self._trained(n)[:n] for name in layer.names)

    def last(self, n: int) -> tuple[str, ...]:
        """The names (parameters, then buffers, layer by layer) of the last ``n`` layers with parameters."""
        layers = self._trained(n)
        return _once(name for layer in layers[len(layers) - n :] for name in layer.names)

    def density(self, mask: Mapping[str, Tensor] | None) -> float:
        """The kept share of the prunable weights: Σ m / d over them; a weight that the mask does not name is whole.

        >>> layout = Layout.of(nn.Linear(3, 2), (3,))
        >>> layout.density({"weight": torch.tensor([[1, 1, 0], [0, 0, 1]]).bool()}), layout.density(None)
        (0.5, 1.0)
        """
        if mask is None or not self.prunable_size:
            return 1.0
        self._check_mask(mask)
        pruned = sum(
            mask[k].numel() - int(mask[k].count_nonzero()) for k in self.prunable if k in mask
        )
        return 1 - pruned / self.prunable_size

    def memory(self, batch: int, optimiser_slots: int) -> int:
        """Estimate the bytes of one training step, all in float32.

        (2 + s)·d + a·B numbers: d parameters, their gradients, s optimiser slots (SGD 0, momentum 1, Adam 2), and
        the a activations of B samples. Real use is higher: pooling indices, dropout masks and work space of
        the kernels are not counted.
        """
        check(batch > 0, "batch", batch, "above 0")
        check(optimiser_slots >= 0, "optimiser_slots", optimiser_slots, "0 or more")
        return FLOAT_BYTES * ((2 + optimiser_slots) * self.size + self.activations * batch)

    def count(self, which: Iterable[str]) -> int:
        """How many numbers the tensors called ``which`` hold."""
        shapes = self.shapes
        return sum(math.prod(shapes[name]) for name in which)

    def _trained(self, n: int) -> list[Layer]:
        """The layers that run and have parameters, of which ``n`` are wanted."""
        layers = [layer for layer in self.layers if layer.params and layer.activations]
        check(
            0 <= n <= len(layers),
            "n",
            n,
            f"from 0 to {len(layers)}, the layers of this net that have parameters",
        )
        return layers

    def _check_mask(self, mask: Mapping[str, Tensor]) -> None:
        shapes = self.shapes
        for name, kept in mask.items():
            if name not in shapes:
                raise unknown("tensor of this net", name, shapes)
            given, own = tuple(kept.shape), shapes[name]
            check(given == own, f"the shape of mask '{name}'", given, f"{own}, that of the tensor")


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """The parameters, then the float buffers of a ``state_dict``, by name; shared ones once."""
    saved = module.state_dict().keys()
    buffers = {k: b for k, b in module.named_buffers() if k in saved and b.is_floating_point()}
    return {**dict(module.named_parameters()), **buffers}


def probe(module: nn.Module, shape: tuple[int, ...], batch: int = 1) -> Any:
    """What ``module`` gives for zeros of ``(batch, *shape)`` in eval mode; modes and random state are left as found."""
    like = next(iter(tensors_of(module).values()), torch.zeros(()))
    modes = [(m, m.training) for m in module.modules()]
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            return module.eval()(torch.zeros((batch, *shape), dtype=like.dtype, device=like.device))
    except Exception as error:
        reason = (str(error).strip() or "no reason given").splitlines()[0]
        raise InputError(
            f"{type(module).__name__} was given zeros of shape {(batch, *shape)} and raised "
            f"{type(error).__name__}: {reason}; check the shape against the first layers of the net."
        ) from error
    finally:
        for m, mode in modes:
            m.training = mode


def _layers(
    module: nn.Module, shape: tuple[int, ...], tensors: Mapping[str, Tensor]
) -> tuple[Layer, ...]:
    """The layers in order of execution, with what they cost."""
    holders = {name: m for name, m in module.named_modules() if _own(m)}
    order, macs, outs = _watch(module, shape, holders)
    called = [*dict.fromkeys(order), *(name for name in holders if name not in order)]
    label = {id(t): name for name, t in tensors.items()}
    found = (
        _layer(name, holders[name], label, macs.get(name, 0), outs.get(name, 0)) for name in called
    )
    return tuple(layer for layer in found if layer.names)


def _own(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def _watch(
    module: nn.Module, shape: tuple[int, ...], holders: Mapping[str, nn.Module]
) -> tuple[list[str], dict[str, int], dict[str, int]]:
    """Run once and note who started when, and what each call cost."""
    order: list[str] = []
    macs: dict[str, int] = {}
    outs: dict[str, int] = {}
    handles = []
    for name, part in holders.items():

        def start(_: nn.Module, args: Any, name: str = name) -> None:
            order.append(name)

        def end(part: nn.Module, args: Any, out: Any, name: str = name) -> None:
            macs[name] = macs.get(name, 0) + _macs(part, args, out)
            outs[name] = outs.get(name, 0) + _numel(out)

        handles += [part.register_forward_pre_hook(start), part.register_forward_hook(end)]
    try:
        probe(module, shape)
    finally:
        for handle in handles:
            handle.remove()
    return order, macs, outs


def _layer(name: str, module: nn.Module, label: Mapping[int, str], macs: int, outs: int) -> Layer:
    own = {k: label[id(p)] for k, p in module.named_parameters(recurse=False)}
    buffers = _once(label[id(b)] for b in module.buffers(recurse=False) if id(b) in label)
    kind = _kind(module)
    weight = own.get("weight") if kind in ("conv", "linear") else None
    return Layer(name, kind, tuple(own.values()), buffers, weight, own.get("bias"), macs, outs)


def _kind(module: nn.Module) -> Kind:
    match module:
        case _ConvNd():
            return "conv"
        case nn.Linear():
            return "linear"
        case _NormBase() | nn.GroupNorm() | nn.LayerNorm() | nn.RMSNorm():
            return "norm"
        case _:
            return "other"


def _macs(module: nn.Module, args: tuple[Any, ...], out: Any) -> int:
    """Positions times weights: each weight is used once for every position it slides over.

    Convolutions slide over the output, transposed ones over the input; recurrent layers over the steps.
    """
    match module:
        case _ConvTransposeNd():
            return _numel(args[0]) // module.in_channels * module.weight.numel()
        case _ConvNd():
            return _numel(out) // module.out_channels * module.weight.numel()
        case nn.Linear():
            return _numel(out) // module.out_features * module.weight.numel()
        case nn.RNNBase():
            return (
                _numel(args[0])
                // module.input_size
                * sum(p.numel() for p in module.parameters() if p.ndim == 2)
            )
        case _:
            return 0


def _numel(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel()
    return sum(_numel(v) for v in value) if isinstance(value, tuple | list) else 0


def _once(items: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(items))
