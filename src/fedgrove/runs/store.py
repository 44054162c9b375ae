"""Trees on disk: safetensors files, a method's state without pickle, and what clients remember.

Nothing here is ever half-written: a file is written under another name and then renamed, and what counts is what the
checkpoint's manifest names.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..errors import InputError
from ..wire.codec import Known
from ..trees import Mask, Tree


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file so that it is there whole or not at all."""
    rough = path.with_name(path.name + ".part")
    rough.write_bytes(data)
    os.replace(rough, path)


def write_tree(path: Path, tree: Mapping[str, Tensor]) -> None:
    """Write named tensors as one safetensors file."""
    rough = path.with_name(path.name + ".part")
    # Leaves may be views of one flat vector, which safetensors refuses: each gets storage of its own.
    # It also sorts names, so their order, on which sums depend to the bit, goes along.
    leaves = {k: v.detach().clone().contiguous() for k, v in tree.items()}
    # One key only: safetensors writes several in no fixed order, and the same run must give the same bytes.
    save_file(leaves, rough, metadata={"order": json.dumps(list(tree))})
    os.replace(rough, path)


def read_tree(path: Path) -> Tree:
    """Read what :func:`write_tree` wrote, in the order it was written."""
    with safe_open(path, framework="pt") as file:
        order = json.loads((file.metadata() or {}).get("order", "null"))
        return {k: file.get_tensor(k) for k in order or file.keys()}


def write_trees(path: Path, forest: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Write several named trees as one file; tree and leaf are joined by a slash."""
    write_tree(path, {f"{name}/{k}": v for name, tree in forest.items() for k, v in tree.items()})


def read_trees(path: Path) -> dict[str, Tree]:
    """Read what :func:`write_trees` wrote."""
    forest: dict[str, Tree] = {}
    for key, value in read_tree(path).items():
        name, _, leaf = key.partition("/")
        forest.setdefault(name, {})[leaf] = value
    return forest


# ---- a method's state as JSON and tensors --------------------------------------------------------------------------


def freeze(value: Any, tensors: Tree, numbers: dict[int, str] | None = None) -> Any:
    """A state as plain JSON; tensors go into ``tensors``, each once, and leave their number behind."""
    numbers = {} if numbers is None else numbers
    if isinstance(value, Tensor):
        number = numbers.setdefault(id(value), str(len(tensors)))
        tensors[number] = value
        return {"tensor": number}
    if dataclasses.is_dataclass(value):
        return {"fields": {f.name: freeze(getattr(value, f.name), tensors, numbers) for f in dataclasses.fields(value)}}
    if isinstance(value, Mapping | tuple | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            _refuse(item, dataclasses.is_dataclass(item))  # thaw could not tell its type
    if isinstance(value, Mapping):
        return {"pairs": [[freeze(k, tensors, numbers), freeze(v, tensors, numbers)] for k, v in value.items()]}
    if type(value) in (tuple, list):
        return {type(value).__name__: [freeze(v, tensors, numbers) for v in value]}
    _refuse(value, not (value is None or isinstance(value, bool | int | float | str)))
    return value


def _refuse(value: Any, bad: bool) -> None:
    if bad:
        kind = type(value).__name__
        raise TypeError(f"a method's state holds a {kind}; it may hold numbers, strings, tensors and plain containers")


def thaw(frozen: Any, tensors: Mapping[str, Tensor], like: Any = None) -> Any:
    """The state again. ``like``, the method's initial state, supplies the types; nothing is evaluated."""
    if not isinstance(frozen, dict):
        return frozen
    ((kind, body),) = frozen.items()
    if kind == "tensor":
        return tensors[body]
    if kind == "fields":
        _check_fields(body, like)
        return dataclasses.replace(like, **{k: thaw(v, tensors, getattr(like, k)) for k, v in body.items()})
    if kind == "pairs":
        return {thaw(k, tensors): thaw(v, tensors) for k, v in body}
    return (tuple if kind == "tuple" else list)(thaw(v, tensors) for v in body)


def _check_fields(body: Mapping[str, Any], like: Any) -> None:
    """A state of another version is not this one's with something left out."""
    known = {field.name for field in dataclasses.fields(like)}
    if strange := sorted(known ^ body.keys()):
        raise InputError(
            f"the checkpoint is of another version of fedgrove or of the method: its state and this one's differ in "
            f"{', '.join(strange)}; go on with the version that wrote it, or run it again."
        )


# ---- what clients hold of what was sent -----------------------------------------------------------------------------


class Held:
    """The mask of the last packet each client got, by name: what lets a sender leave out a mask that did not change."""

    def __init__(self, masks: Mapping[tuple[int, str], Mask] | None = None) -> None:
        self.masks: dict[tuple[int, str], Mask] = dict(masks or {})
        self._known: dict[int, tuple[Mask, Known]] = {}

    def known(self, client: int, packet: str) -> Known | None:
        """What the client holds, with its digest."""
        mask = self.masks.get((client, packet))
        return None if mask is None else self.digest(mask)

    def note(self, client: int, packet: str, mask: Mask | None) -> None:
        """The client has got a packet with this mask."""
        if mask is not None:
            self.masks[client, packet] = mask

    def digest(self, mask: Mask) -> Known:
        """A mask with its digest; taken once for the mask that a whole group holds."""
        if id(mask) not in self._known:
            alive = {id(m) for m in self.masks.values()}
            self._known = {k: v for k, v in self._known.items() if k in alive}
            self._known[id(mask)] = (mask, Known.of(mask))
        return self._known[id(mask)][1]


# ---- what clients remember -----------------------------------------------------------------------------------------


class Memory:
    """What clients keep between rounds: one file per client, a new version per write, counted only once committed.

    Workers read and write the files themselves; only file names travel. A killed round leaves versions that no
    manifest names; the next commit sweeps them away.
    """

    def __init__(self, folder: Path, files: Mapping[int, str] | None = None) -> None:
        self.folder = folder
        self.files: dict[int, str] = dict(files or {})
        folder.mkdir(parents=True, exist_ok=True)

    def read(self, name: str | None) -> dict[str, Tree]:
        """The trees of one version; none for a client that has never kept anything."""
        return read_trees(self.folder / name) if name else {}

    def write(self, client: int, round: int, verb: str, forest: Mapping[str, Tree], held: str | None = None) -> str:
        """A new version; it counts once it is accepted and committed, and never overwrites the one that does."""
        stem = f"client-{client:05d}.{round:06d}.{verb}"
        name = next(n for n in (f"{stem}.safetensors", f"{stem}.2.safetensors") if n != held)
        write_trees(self.folder / name, forest)
        return name

    def accept(self, client: int, name: str | None) -> None:
        """The client's newest version, from now on."""
        if name:
            self.files[client] = name

    def sweep(self) -> None:
        """Delete the versions that no client has any more."""
        held = set(self.files.values())
        for path in self.folder.glob("client-*"):
            if path.name not in held:
                path.unlink()
