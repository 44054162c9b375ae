"""Networks by name: the built-in ones, and those in a user's file."""

from __future__ import annotations

import copy
import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError, check, first_line, shown, unknown
from ..renamed import find_old_names
from . import norms, user_files
from .layout import named_tensors, probe
from .net import Net, Output
from .networks import BnCnn, HarCnn, LeafCnn, LeNet, Mlp, MnistCnn, ResNet18, ShuffleNetV2

__all__ = ["Net", "Output", "build", "check_size", "describe", "find_fitting", "names"]

MAX_SIZE = 2**24
"""The most numbers of one input, the most classes, and the largest size of a layer."""
MAX_PARAMETERS = 2**30
"""The most parameters of a built-in network: 4 GiB as float32."""


@dataclass(frozen=True)
class _BuiltIn:
    """A built-in network: how it is made, one line about it, and which inputs it takes."""

    make: Callable[..., nn.Module]
    about: str
    spatial: int | None
    """How many dimensions follow the channels; None: any."""
    least: int = 1
    """The least size of each of these dimensions; below it, a layer has no output."""

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Return whether it takes inputs of ``shape``."""
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
        """The options that a user may set, with their defaults."""
        options = {}
        for name, parameter in inspect.signature(self.make).parameters.items():
            # The data determine the first two, the net's name the third.
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
    """Return the names of the built-in networks (nets)."""
    return tuple(_NETS)


def is_built_in(module: nn.Module) -> bool:
    """Return whether a module is of a built-in class, whose ``str`` shows all its settings.

    >>> is_built_in(build("mlp", (8,), 3, seed=0)), is_built_in(nn.Linear(1, 1))
    (True, False)
    """
    return type(module).__module__.startswith(f"{__name__}.")


def describe(name: str) -> str:
    """Describe a built-in network in one line: what it is, which inputs it takes, its options.

    >>> describe("mlp")
    'two hidden layers; takes any shape; options: hidden=64'
    """
    net = _built_in(name)
    options = ", ".join(f"{option}={default}" for option, default in net.options.items())
    if not options:
        options = "none"
    return f"{net.about}; takes {net.takes}; options: {options}"


def find_fitting(shape: tuple[int, ...]) -> tuple[str, ...]:
    """Return the names of the built-in networks that take inputs of ``shape``.

    >>> find_fitting((9, 128))
    ('har-cnn', 'mlp')
    """
    return tuple(name for name, net in _NETS.items() if net.fits(shape))


def build(
    net: str | nn.Module, shape: tuple[int, ...], classes: int, seed: int, **options: Any
) -> nn.Module:
    """Make a network, with initial weights that depend on ``seed`` alone, and try it once.

    Args:
        net: A name, perhaps with options ("bn-cnn2:norm=none"); ``path/file.py:Class``; or a
            module, which is copied and keeps its weights.
        shape: The shape of one input, without the batch dimension.
        classes: The number of outputs.
        seed: The seed of the initial weights. Torch's global random state does not change.
        options: Options of a built-in network, or arguments of a user's class.

    Returns:
        A module that gives ``(2, classes)`` for a batch of two.

    Raises:
        InputError: There is no such network, it does not take the shape, or it cannot be trained.

    >>> build("mlp", (8,), 3, seed=0, hidden=5).fc1
    Linear(in_features=8, out_features=5, bias=True)
    """
    check_size(shape, classes)
    shape = tuple(shape)
    name = net if isinstance(net, str) else type(net).__name__
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed: it would seed the accelerators too, which fork_rng does not restore
        # here.
        torch.default_generator.manual_seed(seed)
        module = _make(net, shape, classes, options)
        norms.drop_batch_counters(module)
        _check_tensors(module, name)
        _check_logits(probe(module, shape, batch=2), name, shape, classes)
        if not is_built_in(module):
            _check_training(module, name, shape, classes)
    return module


def check_size(shape: tuple[int, ...], classes: int) -> None:
    """Refuse inputs and numbers of classes that no network takes, before memory is allocated.

    Args:
        shape: The shape of one input, without the batch dimension.
        classes: The number of outputs.

    Raises:
        InputError: One of them is not positive or too large.

    >>> check_size((99999999, 99999999), 3)
    Traceback (most recent call last):
    fedgrove.errors.InputError: the shape of an input is (99999999, 99999999); it must be at most \
16777216 numbers.
    """
    shape_is_valid = bool(shape) and all(isinstance(n, int) and n > 0 for n in shape)
    check(shape_is_valid, "shape", shape, "positive whole numbers")
    at_most = f"at most {MAX_SIZE} numbers"
    check(math.prod(shape) <= MAX_SIZE, "the shape of an input", shape, at_most)
    check(0 < classes <= MAX_SIZE, "classes", classes, f"above 0 and at most {MAX_SIZE}")


def _make(
    net: str | nn.Module, shape: tuple[int, ...], classes: int, options: Mapping[str, Any]
) -> nn.Module:
    """Make a network from its name, file or module."""
    if isinstance(net, nn.Module):
        if options:
            raise InputError(
                f"options {', '.join(options)} were given with a finished module; "
                "set them where you make the module."
            )
        return copy.deepcopy(net)
    if not isinstance(net, str):
        what = f"the class {net.__name__}" if isinstance(net, type) else shown(net)
        made = net.__name__ if isinstance(net, type) else "MyNet"
        raise InputError(
            f"net is {what}; it must be a name, such as 'mlp', or a network that is made: "
            f"net={made}(...), for inputs of the shape {shape} and {classes} outputs."
        )
    if user_files.is_file_spec(net):
        return user_files.build_user_net(net, shape, classes, options)
    name, _, text = net.partition(":")
    built_in = _built_in(name)
    # An option given as an argument wins over one behind the name.
    options = {**_parse_options(name, text, built_in.options), **options}
    for option, value in options.items():
        if option not in built_in.options:
            raise unknown(f"option of net '{name}'", option, built_in.options)
        # All whole numbers are sizes: torch makes a layer of size 0, with a warning.
        is_size = type(built_in.options[option]) is int
        if is_size:
            check(value >= 1, f"{option} of net '{name}'", value, "1 or more")
            check(value <= MAX_SIZE, f"{option} of net '{name}'", value, f"at most {MAX_SIZE}")
    if not built_in.fits(shape):
        raise InputError(
            f"net '{name}' takes {built_in.takes} and was given {shape}; "
            f"nets that take this shape: {', '.join(find_fitting(shape))}."
        )
    make = functools.partial(built_in.make, shape, classes, **options)
    _check_parameter_count(make, net)
    return make()


def _check_parameter_count(make: Callable[[], nn.Module], name: str) -> None:
    """Refuse a network with more parameters than there is memory for, before it is made."""
    # Forked: this network draws its initial weights from the same generator. On the device "meta"
    # tensors have shapes and no memory.
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        module = make()
    count = sum(tensor.numel() for tensor in named_tensors(module).values())
    if count > MAX_PARAMETERS:
        raise InputError(
            f"net '{name}' has {count:,} parameters for these inputs; it must have at most "
            f"{MAX_PARAMETERS:,}: use smaller layers or smaller inputs."
        )


def _parse_options(name: str, text: str, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Read options, as in "norm=none,width=32", in the types of their defaults.

    Unknown options stay text: they are refused together with those given as arguments.
    """
    if not text:
        return {}
    # If an option is given twice the last one counts, before any is converted.
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
    tensors = named_tensors(module)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise InputError(
            f"net '{name}' has no parameter that is trained; it must have one with "
            "requires_grad=True."
        )
    for key, tensor in tensors.items():
        if tensor.is_complex():
            raise InputError(
                f"net '{name}' has '{key}' of type {tensor.dtype}; parameters are real: store the "
                "real and the imaginary part as two parameters, and combine them with "
                "torch.complex."
            )


def _check_training(module: nn.Module, name: str, shape: tuple[int, ...], classes: int) -> None:
    """Try a gradient on a copy, in train mode, where the forward pass may differ."""
    trial = copy.deepcopy(module).train()
    like = next(iter(named_tensors(trial).values()))
    x = torch.randn((2, *shape), dtype=like.dtype, device=like.device)
    parameters = []
    for parameter in trial.parameters():
        if parameter.requires_grad:
            parameters.append(parameter)
    try:
        out = trial(x)
        _check_logits(out, f"{name}, in train mode,", shape, classes)
        torch.autograd.grad(out.sum(), parameters, allow_unused=True)
    except InputError:
        raise
    except Exception as error:
        reason = first_line(error)
        raise InputError(
            f"net '{name}' cannot be trained: a batch of two with a gradient raised "
            f"{type(error).__name__}: {reason}; test it alone with loss.backward()."
        ) from error


def _check_logits(out: Any, name: str, shape: tuple[int, ...], classes: int) -> None:
    """Refuse an output for two inputs that is not two rows of logits."""
    if isinstance(out, tuple | list):
        raise InputError(
            f"net '{name}' gave a {type(out).__name__} of {len(out)} for two inputs of shape "
            f"{shape}; it must return only the logits, {(2, classes)}."
        )
    given = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
    if given != (2, classes):
        raise InputError(
            f"net '{name}' gave {given} for two inputs of shape {shape}; it must give "
            f"{(2, classes)}, one for each class, label or number: check its last layer."
        )


__getattr__ = find_old_names(__name__)
