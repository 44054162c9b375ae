"""Initial weights from a safetensors file, in place of random ones."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor, nn

from ..errors import InputError, check_has_end, first_line
from ..trees import Tree
from .layout import Layout, frozen_parameters, named_tensors

SCRATCH = "scratch"
"""The origin of weights without a file."""
BODY_SUFFIX = ":body"
"""At the end of a path: all but the head is taken from the file."""
COUNTER = "num_batches_tracked"
"""BatchNorm's count of batches, which files of torch contain and nets here do without."""
MOST_NAMED = 4
"""How many tensors an error names."""


@dataclass(frozen=True)
class WeightsOrigin:
    """The file that initial weights come from."""

    path: str
    """As the user gave it."""
    sha256: str
    body: bool = False
    """Whether the head keeps its random weights."""

    def __str__(self) -> str:
        return f"{self.path}{BODY_SUFFIX}" if self.body else self.path


def remove_suffix(spec: str) -> str:
    """Return the path of a network's file of initial weights, without ``:body``.

    >>> remove_suffix("a.safetensors:body"), remove_suffix("a.safetensors")
    ('a.safetensors', 'a.safetensors')
    """
    return spec.removesuffix(BODY_SUFFIX)


def read_weights(spec: str) -> tuple[WeightsOrigin, Tree]:
    """Read ``FILE.safetensors`` or ``FILE.safetensors:body``.

    Raises:
        InputError: There is no such file, not a safetensors file, or its numbers are not finite.
    """
    path = remove_suffix(spec)
    place = Path(path)
    if place.is_dir():
        raise InputError(
            f"init is the folder {path}; give a file, such as one of a run: "
            "RUN/models/client-00000.safetensors."
        )
    check_has_end("init", place)
    try:
        data = place.read_bytes()
    except FileNotFoundError:
        raise InputError(
            f"init is {path}, and there is no such file; give a file of weights that exists."
        ) from None
    except OSError as error:
        raise InputError(
            f"init is {path}, which cannot be read: {error.strerror or error}; give a file that "
            "can be read."
        ) from None
    try:
        tensors = load(data)
    except (SafetensorError, ValueError, KeyError) as error:
        reason = first_line(error)
        raise InputError(
            f"init is {path}, which is not a safetensors file ({reason}); give a safetensors file, "
            "such as those in models/ of a run folder, or write one with "
            "safetensors.torch.save_file."
        ) from None
    tensors = {name: t for name, t in tensors.items() if name.rpartition(".")[2] != COUNTER}
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise InputError(
                f"'{name}' of {path} is {tensor.dtype}; weights must be floating-point numbers."
            )
        if not bool(torch.isfinite(tensor).all()):
            raise InputError(
                f"'{name}' of {path} contains numbers that are not finite (NaN or infinity); give "
                "weights of a model that has not diverged."
            )
    digest = hashlib.sha256(data).hexdigest()
    return WeightsOrigin(path, digest, body=spec != path), tensors


def load_weights(
    origin: WeightsOrigin, tensors: Mapping[str, Tensor], module: nn.Module, shape: tuple[int, ...]
) -> None:
    """Fill a module with the weights of a file; all names and shapes must agree.

    With ``:body`` the head, the last linear layer that runs, keeps its random weights, and the
    file's tensors of these names are ignored. Parameters that the module itself has frozen
    (``requires_grad=False``) may be in the file or not.

    Args:
        origin: The file, and whether only its body is used.
        tensors: The contents of the file, by name.
        module: The module to fill, in place.
        shape: The shape of one input, without the batch.

    Raises:
        InputError: A name or shape is missing, unknown or different.
    """
    net = type(module).__name__
    layer = Layout.of(module, shape).head_layer
    head = () if layer is None else layer.names
    if origin.body and not head:
        raise InputError(
            f"init is {origin.path}{BODY_SUFFIX}, and {net} has no linear layer that could be its "
            f"head; leave {BODY_SUFFIX} out."
        )
    required = dict(named_tensors(module))
    left_out = head if origin.body else ()
    for name in left_out:
        del required[name]
    tensors = {name: t for name, t in tensors.items() if name not in left_out}
    own = required | frozen_parameters(module)
    # All differences, by name, before the first tensor is changed.
    wrong: dict[str, str] = {}
    for name, tensor in own.items():
        if name in tensors and tensors[name].shape != tensor.shape:
            given = tuple(tensors[name].shape)
            wrong[name] = f"'{name}' is {given} and in the net {tuple(tensor.shape)}"
        elif name not in tensors and name in required:
            wrong[name] = f"'{name}' is not in it"
    for name in tensors:
        if name not in own:
            wrong[name] = f"'{name}' is not in the net"
    if wrong:
        raise InputError(
            f"init is {origin.path}, which does not fit net {net}: "
            f"{_list_some(list(wrong.values()))}. {_give_advice(origin, wrong, head)}"
        )
    with torch.no_grad():
        for name, tensor in tensors.items():
            own[name].copy_(tensor)


def _give_advice(origin: WeightsOrigin, wrong: Mapping[str, str], head: Sequence[str]) -> str:
    if set(wrong) <= set(head):
        return (
            "Only the head differs, for example because the classes differ: to load everything "
            f"except the head, give {origin.path}{BODY_SUFFIX}."
        )
    return "Give weights of exactly this net, with its options, or name the net of these weights."


def _list_some(sentences: Sequence[str]) -> str:
    shown = "; ".join(sentences[:MOST_NAMED])
    more = len(sentences) - MOST_NAMED
    return f"{shown}; and {more} more" if more > 0 else shown
