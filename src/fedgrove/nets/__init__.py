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
from .layout import probe, tensors_of
from .mlp import Mlp
from .net import Net, Output
from .resnet import ResNet18
from .shufflenet import ShuffleNetV2

__all__ = ["Net", "Output", "build", "describe", "fitting", "names"]


@dataclass(frozen=True)
class _BuiltIn:
    make: Callable[..., nn.Module]
    about: str
    spatial: int | None
    """How many dimensions follow the channels; None: any."""
    least: int = 1
    """The least size of each of these dimensions; below, a layer would have nothing left."""

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether it takes inputs of ``shape``."""
        if self.spatial is None:
            return True
        return len(shape) == self.spatial + 1 and min(shape[1:]) >= self.least

    @property
    def takes(self) -> str:
        """The shapes that it takes, in words."""
        match self.spatial:
            case None:
                return "any shape"
            case 1:
                return f"(channels, length) with a length of at least {self.least}"
            case _:
                return f"(channels, height, width) with sides of at least {self.least}"

    @property
    def options(self) -> dict[str, Any]:
        """What the user may set, with the defaults."""
        options = {}
        for name, parameter in inspect.signature(self.make).parameters.items():
            # The data decide the first two, the net's name the third.
            if name not in ("shape", "classes", "blocks"):
                options[name] = parameter.default
        return options


_NETS = {
    "har-cnn": _BuiltIn(HarCnn, "the 1D-CNN of CA-AFP", spatial=1, least=4),
    "mnist-cnn": _BuiltIn(MnistCnn, "the CNN of FedLayerPrune", spatial=2, least=4),
    "lenet": _BuiltIn(LeNet, "the LeNet of AdFedWCP", spatial=2, least=16),
    "leafcnn": _BuiltIn(LeafCnn, "the LeafCNN of AdFedWCP", spatial=2, least=16),
    "bn-cnn2": _BuiltIn(
        functools.partial(BnCnn, blocks=2), "the 2-conv CNN of SAFL for MNIST", spatial=2, least=4
    ),
    "bn-cnn4": _BuiltIn(
        functools.partial(BnCnn, blocks=4),
        "the 4-conv CNN of SAFL for CIFAR-10",
        spatial=2,
        least=16,
    ),
    "resnet18": _BuiltIn(ResNet18, "ResNet-18 for small images", spatial=2, least=8),
    "shufflenetv2": _BuiltIn(ShuffleNetV2, "ShuffleNetV2 for small images", spatial=2, least=8),
    "mlp": _BuiltIn(Mlp, "two hidden layers", spatial=None),
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
    net = _built_in(name)
    options = ", ".join(f"{option}={default}" for option, default in net.options.items())
    if not options:
        options = "none"
    return f"{net.about}; takes {net.takes}; options: {options}"


def fitting(shape: tuple[int, ...]) -> tuple[str, ...]:
    """The built-in networks that take inputs of ``shape``.

    >>> fitting((9, 128))
    ('har-cnn', 'mlp')
    """
    return tuple(name for name, net in _NETS.items() if net.fits(shape))


def build(
    net: str | nn.Module, shape: tuple[int, ...], classes: int, seed: int, **options: Any
) -> nn.Module:
    """Make a network for inputs of ``shape``, with initial weights that depend on ``seed`` alone.

    ``net`` is a name, perhaps with options ("bn-cnn2:norm=none"), ``path/file.py:Class``, or a
    module (which is copied, and keeps its weights). Global random state is left as it was. The
    network is tried once: it must give ``(2, classes)`` for a batch of two.

    >>> build("mlp", (8,), 3, seed=0, hidden=5).fc1
    Linear(in_features=8, out_features=5, bias=True)
    """
    shape_is_valid = bool(shape) and all(isinstance(n, int) and n > 0 for n in shape)
    check(shape_is_valid, "shape", shape, "positive whole numbers")
    check(classes > 0, "classes", classes, "above 0")
    shape = tuple(shape)
    name = net if isinstance(net, str) else type(net).__name__
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed: it would seed the accelerators too, which fork_rng does not restore
        # here.
        torch.default_generator.manual_seed(seed)
        module = _make(net, shape, classes, options)
        norms.settle(module)
        _check_tensors(module, name)
        _check_output(module, name, shape, classes)
        if not is_ours(module):
            _check_training(module, name, shape, classes)
    return module


def _make(
    net: str | nn.Module, shape: tuple[int, ...], classes: int, options: Mapping[str, Any]
) -> nn.Module:
    if isinstance(net, nn.Module):
        if options:
            raise InputError(
                f"options {', '.join(options)} were given with a finished module; "
                "set them where you make the module."
            )
        return copy.deepcopy(net)
    if custom.is_spec(net):
        return custom.load(net, shape, classes, options)
    name, _, text = net.partition(":")
    built_in = _built_in(name)
    # An option given as an argument wins over the same one behind the name.
    options = {**_parsed(name, text, built_in.options), **options}
    for option, value in options.items():
        if option not in built_in.options:
            raise unknown(f"option of net '{name}'", option, built_in.options)
        # All whole numbers are sizes: of 0, torch makes a layer, with a warning.
        is_size = type(built_in.options[option]) is int
        check(not is_size or value >= 1, f"{option} of net '{name}'", value, "1 or more")
    if not built_in.fits(shape):
        raise InputError(
            f"net '{name}' takes {built_in.takes} and was given {shape}; "
            f"nets that take this shape: {', '.join(fitting(shape))}."
        )
    return built_in.make(shape, classes, **options)


def _parsed(name: str, text: str, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The options in ``text``, as in "norm=none,width=32", in the types of their defaults.

    Unknown options stay as they are: they are refused together with those given as arguments.
    """
    if not text:
        return {}
    # Of an option that is written twice the last one counts, before any is converted.
    texts: dict[str, str] = {}
    for pair in text.split(","):
        option, _, value = pair.partition("=")
        texts[option] = value
    options: dict[str, Any] = {}
    for option, value in texts.items():
        if option not in defaults:
            options[option] = value
            continue
        try:
            options[option] = _typed(value, defaults[option])
        except (ValueError, KeyError):
            example = ",".join(f"{option}={default}" for option, default in defaults.items())
            raise InputError(
                f"net '{name}:{text}' has an option that cannot be read; "
                f"write options as in {name}:{example}."
            ) from None
    return options


def _typed(text: str, default: Any) -> Any:
    # Not bool(text): bool("false") is True.
    if isinstance(default, bool):
        return {"true": True, "false": False}[text.lower()]
    return type(default)(text)


def _built_in(name: str) -> _BuiltIn:
    if name not in _NETS:
        raise unknown("net", name, _NETS)
    return _NETS[name]


def _check_tensors(module: nn.Module, name: str) -> None:
    """Refuse parameters that cannot be trained, averaged or sent."""
    tensors = tensors_of(module)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise InputError(
            f"net '{name}' has no parameter that is trained; it must have one with "
            "requires_grad=True."
        )
    for key, tensor in tensors.items():
        if tensor.is_complex():
            raise InputError(
                f"net '{name}' has '{key}' of type {tensor.dtype}; parameters are real: hold the "
                "real and the imaginary part as two, and join them with torch.complex."
            )


def _check_training(module: nn.Module, name: str, shape: tuple[int, ...], classes: int) -> None:
    """Try a gradient in train mode, on a copy: its forward pass may be another one there."""
    trial = copy.deepcopy(module).train()
    like = next(iter(tensors_of(trial).values()))
    x = torch.randn((2, *shape), dtype=like.dtype, device=like.device)
    parameters = [parameter for parameter in trial.parameters() if parameter.requires_grad]
    try:
        out = trial(x)
        _check_logits(out, f"{name}, in train mode,", shape, classes)
        torch.autograd.grad(out.sum(), parameters, allow_unused=True)
    except InputError:
        raise
    except Exception as error:
        reason = (str(error).strip() or "no reason given").splitlines()[0]
        raise InputError(
            f"net '{name}' cannot be trained: a batch of two with a gradient raised "
            f"{type(error).__name__}: {reason}; try it by itself with loss.backward()."
        ) from error


def _check_output(module: nn.Module, name: str, shape: tuple[int, ...], classes: int) -> None:
    """Run the network once on two inputs, and refuse what is not two rows of logits."""
    _check_logits(probe(module, shape, batch=2), name, shape, classes)


def _check_logits(out: Any, name: str, shape: tuple[int, ...], classes: int) -> None:
    if isinstance(out, tuple | list):
        raise InputError(
            f"net '{name}' gave a {type(out).__name__} of {len(out)} for two inputs of shape "
            f"{shape}; it must give the logits alone, {(2, classes)}: return only these."
        )
    given = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
    if given != (2, classes):
        raise InputError(
            f"net '{name}' gave {given} for two inputs of shape {shape}; it must give "
            f"{(2, classes)}, one for each class, label or number: check its last layer."
        )
