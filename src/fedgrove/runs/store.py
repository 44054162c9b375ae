"""Trees on disk: safetensors files, a method's state without pickle, and what clients remember.

Nothing here is ever half-written: a file is written under another name and then renamed, and only
what the checkpoint's manifest names counts.
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
from ..parts.gate import is_plain_name
from ..trees import Tree


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file so that it is there whole or not at all."""
    partial = path.with_name(path.name + ".part")
    partial.write_bytes(data)
    os.replace(partial, path)


def write_tree(path: Path, tree: Mapping[str, Tensor]) -> None:
    """Write named tensors as one safetensors file."""
    partial = path.with_name(path.name + ".part")
    # Leaves may be views of one flat vector, which safetensors refuses: each gets its own storage.
    leaves = {name: leaf.detach().clone().contiguous() for name, leaf in tree.items()}
    # safetensors sorts names; their order, on which sums depend to the bit, goes into the metadata.
    # One key only: it writes several in no fixed order, and the same run must give the same bytes.
    save_file(leaves, partial, metadata={"order": json.dumps(list(tree))})
    os.replace(partial, path)


def read_tree(path: Path) -> Tree:
    """Read what :func:`write_tree` wrote, in the order it was written."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        order = json.loads(metadata.get("order", "null"))
        return {name: file.get_tensor(name) for name in order or file.keys()}


def write_trees(path: Path, forest: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Write several named trees as one file; tree and leaf are joined by a slash."""
    joined: Tree = {}
    for tree_name, tree in forest.items():
        for name, leaf in tree.items():
            joined[f"{tree_name}/{name}"] = leaf
    write_tree(path, joined)


def read_trees(path: Path) -> dict[str, Tree]:
    """Read what :func:`write_trees` wrote."""
    forest: dict[str, Tree] = {}
    for key, leaf in read_tree(path).items():
        tree_name, _, name = key.partition("/")
        forest.setdefault(tree_name, {})[name] = leaf
    return forest


# ---- a method's state as JSON and tensors --------------------------------------------------------


def freeze(value: Any, tensors: Tree, numbers: dict[int, str] | None = None) -> Any:
    """A state as plain JSON.

    Tensors go into ``tensors``, each once, and leave their number behind. ``numbers`` remembers
    which tensor has which number, so that several calls share one ``tensors``.
    """
    numbers = {} if numbers is None else numbers
    if isinstance(value, Tensor):
        number = numbers.setdefault(id(value), str(len(tensors)))
        tensors[number] = value
        return {"tensor": number}
    if dataclasses.is_dataclass(value):
        fields = {}
        for field in dataclasses.fields(value):
            fields[field.name] = freeze(getattr(value, field.name), tensors, numbers)
        return {"fields": fields}
    if isinstance(value, Mapping):
        pairs = []
        for key, item in value.items():
            _refuse_dataclass(item)
            pairs.append([freeze(key, tensors, numbers), freeze(item, tensors, numbers)])
        return {"pairs": pairs}
    # Named tuples would come back as plain ones, so the type must match exactly.
    if type(value) in (tuple, list):
        items = []
        for item in value:
            _refuse_dataclass(item)
            items.append(freeze(item, tensors, numbers))
        return {type(value).__name__: items}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise _not_allowed(value)


def _refuse_dataclass(item: Any) -> None:
    """A dataclass inside a container is refused: :func:`thaw` could not tell its type."""
    if dataclasses.is_dataclass(item):
        raise _not_allowed(item)


def _not_allowed(value: Any) -> TypeError:
    return TypeError(
        f"a method's state holds a {type(value).__name__}; it may hold numbers, strings, tensors "
        "and plain containers"
    )


def thaw(frozen: Any, tensors: Mapping[str, Tensor], like: Any = None) -> Any:
    """The state again. ``like``, the method's initial state, supplies the types."""
    if not isinstance(frozen, dict):
        return frozen
    # One key says what it is: nothing is evaluated.
    ((kind, body),) = frozen.items()
    if kind == "tensor":
        return tensors[body]
    if kind == "fields":
        _check_fields(body, like)
        fields = {}
        for name, value in body.items():
            fields[name] = thaw(value, tensors, getattr(like, name))
        return dataclasses.replace(like, **fields)
    if kind == "pairs":
        return {thaw(key, tensors): thaw(value, tensors) for key, value in body}
    items = [thaw(value, tensors) for value in body]
    return tuple(items) if kind == "tuple" else items


def _check_fields(body: Mapping[str, Any], like: Any) -> None:
    """A state of another version is not this one's with something left out."""
    known = {field.name for field in dataclasses.fields(like)}
    different = sorted(known ^ body.keys())
    if different:
        raise InputError(
            "the checkpoint is of another version of fedgrove or of the method: its state and "
            f"this one's differ in {', '.join(different)}; resume it with the version that wrote "
            "it, or run it again."
        )


# ---- what clients remember -----------------------------------------------------------------------


class Memory:
    """What clients keep between rounds: one file per client, a new version per write.

    Workers read and write the files themselves; only versions travel: short names, as "12.train".
    A version counts once the checkpoint's manifest names it. A killed round leaves versions that no
    manifest names; the next commit deletes them. The folder is made with the first file.
    """

    def __init__(self, folder: Path, files: Mapping[int, str] | None = None) -> None:
        self.folder = folder
        self.files: dict[int, str] = dict(files or {})

    def read(self, client: int, version: str | None) -> dict[str, Tree]:
        """The trees of one version; empty for a client that has never kept anything."""
        return read_trees(self.path(client, version)) if version else {}

    def path(self, client: int, version: str) -> Path:
        """The file of a version, which comes from a message and must not lead elsewhere."""
        if not is_plain_name(version):
            raise InputError(
                f"{version!r} is no version of what a client remembers; one looks like '12.train'."
            )
        return self.folder / f"client-{client:05d}.{version}.safetensors"

    def write(
        self,
        client: int,
        round: int,
        verb: str,
        forest: Mapping[str, Tree],
        current: str | None = None,
        attempt: int = 0,
    ) -> str:
        """Write a new version and return its name; it never overwrites the ``current`` one."""
        self.folder.mkdir(parents=True, exist_ok=True)
        version = version_of(round, verb, attempt)
        if version == current:
            # Another exchange of the same round, with the same verb.
            version = f"{version}.again"
        write_trees(self.path(client, version), forest)
        return version

    def accept(self, client: int, version: str | None) -> None:
        """The client's newest version, from now on."""
        if version:
            self.files[client] = version

    def sweep(self) -> None:
        """Delete the versions that no client has any more."""
        current = {self.path(client, version) for client, version in self.files.items()}
        for path in self.folder.glob("client-*"):
            if path not in current:
                path.unlink()


def version_of(round: int, verb: str, attempt: int = 0) -> str:
    """The version of what a client remembers after an exchange.

    An attempt has versions of its own: what a client writes too late, for one that was abandoned,
    must not replace what it wrote for the next.
    """
    return f"{round}.{verb}.{attempt}" if attempt else f"{round}.{verb}"
