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

from ..errors import InputError
from ..trees import Tree
from .layout import Layout, tensors_of

SCRATCH = "scratch"
"""Where weights come from that no file was given for."""
BODY = ":body"
"""At the end of a path: all but the head is taken from the file."""
COUNTER = "num_batches_tracked"
"""BatchNorm's count of batches, which files of torch hold and nets here do without."""
SHOWN = 4
"""How many tensors a sentence names."""


@dataclass(frozen=True)
class Origin:
    """The file that initial weights come from."""

    path: str
    """As it was given."""
    sha256: str
    body: bool = False
    """Whether the head keeps its random weights."""

    def __str__(self) -> str:
        return f"{self.path}{BODY}" if self.body else self.path


def path_of(spec: str) -> str:
    """The path of a file of weights, without the word that says what to take.

    >>> path_of("a.safetensors:body"), path_of("a.safetensors")
    ('a.safetensors', 'a.safetensors')
    """
    return spec.removesuffix(BODY)


def read(spec: str) -> tuple[Origin, Tree]:
    """Read ``FILE.safetensors`` or ``FILE.safetensors:body``; what cannot be used is refused."""
    path = path_of(spec)
    place = Path(path)
    if place.is_dir():
        raise InputError(
            f"init is the folder {path}; give a file, as a run's own: "
            "RUN/models/client-00000.safetensors."
        )
    try:
        data = place.read_bytes()
    except FileNotFoundError:
        raise InputError(
            f"init is {path}, and there is no such file; give a file of weights that exists."
        ) from None
    except OSError as error:
        raise InputError(
            f"init is {path}, which cannot be read: {error.strerror or error}; give a file that "
            "can."
        ) from None
    try:
        tensors = load(data)
    except (SafetensorError, ValueError, KeyError) as error:
        reason = (str(error).strip() or "no reason given").splitlines()[0]
        raise InputError(
            f"init is {path}, which is not a safetensors file ({reason}); give one that is, as "
            "those in models/ of a run folder, or write one with safetensors.torch.save_file."
        ) from None
    tensors = {name: t for name, t in tensors.items() if name.rpartition(".")[2] != COUNTER}
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise InputError(
                f"'{name}' of {path} is {tensor.dtype}; weights must be floating-point numbers."
            )
        if not bool(torch.isfinite(tensor).all()):
            raise InputError(
                f"'{name}' of {path} holds numbers that are not finite (NaN or infinity); give "
                "weights of a model that has not diverged."
            )
    digest = hashlib.sha256(data).hexdigest()
    return Origin(path, digest, body=spec != path), tensors


def put(
    origin: Origin, tensors: Mapping[str, Tensor], module: nn.Module, shape: tuple[int, ...]
) -> None:
    """Fill a module with the weights; names and shapes must be its own, all of them.

    With ``:body`` the head, the last linear layer that runs, keeps its random weights; what the
    file has under these names, of whatever width, is left out. Parameters that the module itself
    has frozen (``requires_grad=False``) may be in the file or not.
    """
    net = type(module).__name__
    layer = Layout.of(module, shape).head_layer
    head = () if layer is None else layer.names
    if origin.body and not head:
        raise InputError(
            f"init is {origin.path}{BODY}, and {net} has no linear layer that could be its head; "
            f"leave {BODY} out."
        )
    wanted = dict(tensors_of(module))
    optional = {n: p for n, p in module.named_parameters() if not p.requires_grad}
    left_out = head if origin.body else ()
    for name in left_out:
        del wanted[name]
    tensors = {name: t for name, t in tensors.items() if name not in left_out}
    # All that differs, name by name, before the first tensor is changed.
    wrong: dict[str, str] = {}
    for name, own in wanted.items():
        if name not in tensors:
            wrong[name] = f"'{name}' is not in it"
        elif tensors[name].shape != own.shape:
            given_shape = tuple(tensors[name].shape)
            wrong[name] = f"'{name}' is {given_shape} and in the net {tuple(own.shape)}"
    for name, tensor in tensors.items():
        known = wanted.get(name, optional.get(name))
        if known is None:
            wrong[name] = f"'{name}' is not in the net"
        elif name not in wrong and tensor.shape != known.shape:
            wrong[name] = f"'{name}' is {tuple(tensor.shape)} and in the net {tuple(known.shape)}"
    if wrong:
        raise InputError(
            f"init is {origin.path}, which does not fit net {net}: "
            f"{_listed(list(wrong.values()))}. {_advice(origin, wrong, head)}"
        )
    with torch.no_grad():
        for name, tensor in tensors.items():
            own = wanted[name] if name in wanted else optional[name]
            own.copy_(tensor)


def _advice(origin: Origin, wrong: Mapping[str, str], head: Sequence[str]) -> str:
    if set(wrong) <= set(head):
        return (
            "Only the head differs, as where there are other classes: to take all but the head, "
            f"give {origin.path}{BODY}."
        )
    return "Give the weights of this very net, with its options, or name the net that they are of."


def _listed(sentences: Sequence[str]) -> str:
    shown = "; ".join(sentences[:SHOWN])
    more = len(sentences) - SHOWN
    return f"{shown}; and {more} more" if more > 0 else shown
