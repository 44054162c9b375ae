"""The papers' networks, and any of the user's own."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError, check, unknown
from . import custom, norms
from .har import HarCnn
from .images import BnCnn, LeafCnn, LeNet, MnistCnn
from .layout import probe
from .mlp import Mlp
from .net import Net, Output
from .resnet import ResNet18

__all__ = ["Net", "Output", "build", "describe", "fitting", "names"]


@dataclass(frozen=True)
class _Known:
    make: Callable[..., nn.Module]
    about: str
    spatial: int | None
    """How many dimensions follow the channels; None: any."""
    least: int = 1

    def fits(self, shape: tuple[int, ...]) -> bool:
        return self.spatial is None or (
            len(shape) == self.spatial + 1 and min(shape[1:]) >= self.least
        )

    @property
    def takes(self) -> str:
        match self.spatial:
            case None:
                return "any shape"
            case 1:
                return f"(channels, length) with a length of at least {self.least}"
            case _:
                return f"(channels, height, width) with sides of at least {self.least}"

    @property
    def options(self) -> dict[str, Any]:
        parameters = inspect.signature(self.make).parameters.values()
        fixed = ("shape", "classes", "blocks")
        return {p.name: p.default for p in parameters if p.name not in fixed}


_NETS = {
    "har-cnn": _Known(HarCnn, "the 1D-CNN of CA-AFP", 1, 4),
    "mnist-cnn": _Known(MnistCnn, "the CNN of FedLayerPrune", 2, 4),
    "lenet": _Known(LeNet, "the LeNet of AdFedWCP", 2, 16),
    "leafcnn": _Known(LeafCnn, "the LeafCNN of AdFedWCP", 2, 16),
    "bn-cnn2": _Known(functools.partial(BnCnn, blocks=2), "the 2-conv CNN of SAFL for MNIST", 2, 4),
    "bn-cnn4": _Known(
        functools.partial(BnCnn, blocks=4), "the 4-conv CNN of SAFL for CIFAR-10", 2, 16
    ),
    "resnet18": _Known(ResNet18, "ResNet-18 for small images", 2, 8),
    "mlp": _Known(Mlp, "two hidden layers", None),
}


def names() -> tuple[str, ...]:
    """The networks that are built in."""
    return tuple(_NETS)


def is_ours(module: nn.Module) -> bool:
    """Whether a module is of a built-in class, whose settings all show in its text.

    >>> is_ours(build("mlp", (8,), 3, seed=0)), is_ours(nn.Linear(1, 1))
    (True, False)
    """
    return type(module).__module__.startswith(f"{__name__}.")


def describe(name: str) -> str:
    """One line on a built-in network: what it is, what it takes, what can be set.

    >>> describe("mlp")
    'two hidden layers; takes any shape; options: hidden=64'
    """
    known = _known(name)
    options = ", ".join(f"{k}={v}" for k, v in known.options.items()) or "none"
    return f"{known.about}; takes {known.takes}; options: {options}"


def fitting(shape: tuple[int, ...]) -> tuple[str, ...]:
    """The built-in networks that take inputs of ``shape``.

    >>> fitting((9, 128))
    ('har-cnn', 'mlp')
    """
    return tuple(name for name, known in _NETS.items() if known.fits(shape))


def build(
    net: str | nn.Module, shape: tuple[int, ...], classes: int, seed: int, **options: Any
) -> nn.Module:
    """Make a network for inputs of ``shape``, with initial weights that follow from ``seed`` alone.

    ``net`` is a name, perhaps with options ("bn-cnn2:norm=none"), ``path/file.py:Class``, or a module (which is copied,
    and keeps its weights). Global random state is left as it was. The network is tried once: it must give
    ``(2, classes)`` for a batch of two.

    >>> build("mlp", (8,), 3, seed=0, hidden=5).fc1
    Linear(in_features=8, out_features=5, bias=True)
    """
    check(
        bool(shape) and all(isinstance(n, int) and n > 0 for n in shape),
        "shape",
        shape,
        "positive whole numbers",
    )
    check(classes > 0, "classes", classes, "above 0")
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed: it would seed the accelerators too, which fork_rng does not restore here.
        torch.default_generator.manual_seed(seed)
        module = _make(net, tuple(shape), classes, options)
        norms.settle(module)
        _try(module, net if isinstance(net, str) else type(net).__name__, tuple(shape), classes)
    return module


def _make(
    net: str | nn.Module, shape: tuple[int, ...], classes: int, options: Mapping[str, Any]
) -> nn.Module:
    if isinstance(net, nn.Module):
        if options:
            raise InputError(
                f"options {', '.join(options)} came with a finished module; set them where you make it."
            )
        return copy.deepcopy(net)
    if custom.is_spec(net):
        return custom.load(net, shape, classes, options)
    name, _, said = net.partition(":")
    known = _known(name)
    options = {**_said(name, said, known.options), **options}
    return _fitted(name, known, shape, classes, options)


def _said(net: str, text: str, known: Mapping[str, Any]) -> dict[str, Any]:
    """Options written behind a name, "norm=none,width=32", in the types of their defaults."""
    given = dict(pair.partition("=")[::2] for pair in text.split(",")) if text else {}
    try:
        return {k: _typed(v, known[k]) if k in known else v for k, v in given.items()}
    except (ValueError, KeyError):
        options = ", ".join(f"{k}={v}" for k, v in known.items())
        raise InputError(
            f"net '{net}:{text}' was asked for; its options are written as in {net}:{options}."
        ) from None


def _typed(text: str, default: Any) -> Any:
    return (
        {"true": True, "false": False}[text.lower()]
        if isinstance(default, bool)
        else type(default)(text)
    )


def _fitted(
    net: str, known: _Known, shape: tuple[int, ...], classes: int, options: Mapping[str, Any]
) -> nn.Module:
    for name in options:
        if name not in known.options:
            raise unknown(f"option of net '{net}'", name, known.options)
    if not known.fits(shape):
        raise InputError(
            f"net '{net}' takes {known.takes} and was given {shape}; "
            f"nets that take this shape: {', '.join(fitting(shape))}."
        )
    return known.make(shape, classes, **options)


def _known(name: str) -> _Known:
    if name not in _NETS:
        raise unknown("net", name, _NETS)
    return _NETS[name]


def _try(module: nn.Module, name: str, shape: tuple[int, ...], classes: int) -> None:
    out = probe(module, shape, batch=2)
    got = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
    if got != (2, classes):
        raise InputError(
            f"net '{name}' gave {got} for two inputs of shape {shape}; it must give {(2, classes)}, "
            "one logit per class: check its last layer."
        )
