"""What a checkpoint is made of: a state as JSON, trees with their own files, and a manifest.

A checkpoint is a manifest (latest.json or previous.json) and the files that it names, which are
written before it and never changed. :mod:`fedgrove.runs.folder` writes and reads them.
"""

from __future__ import annotations

import dataclasses
import os
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import starmap
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError
from torch import Tensor

from ..errors import InputError, MethodError, clean_text
from ..renamed import read_tables
from ..trees import Tree
from . import schemas
from .files import read_sealed, seal_json
from .memory import Memory, memory_file_name, write_named_tree

# ---- a method's state as JSON and tensors --------------------------------------------------------


def state_to_json(
    value: Any,
    tensors: Tree,
    numbers: dict[int, str] | None = None,
    stand_in: Callable[[Mapping[Any, Any]], Any] | None = None,
) -> Any:
    """Return a method's state as plain JSON for a checkpoint, with numbers for tensors.

    Args:
        value: The state, or a part of it.
        tensors: Gets every tensor of the state once, by its number.
        numbers: The number of each tensor by its id, so that several calls share ``tensors``.
        stand_in: May return what replaces a mapping within a mapping, ``{"file": name}``, or None.

    Raises:
        MethodError: The state has a value of a type that :class:`fedgrove.core.State` does not
            allow.
    """
    # The most frequent case first: a state may have a few numbers for every client.
    if type(value) in _PLAIN:
        return value
    numbers = {} if numbers is None else numbers
    if isinstance(value, Tensor):
        number = numbers.setdefault(id(value), str(len(tensors)))
        tensors[number] = value
        return {"tensor": number}
    if dataclasses.is_dataclass(value):
        fields = {}
        for field in dataclasses.fields(value):
            fields[field.name] = state_to_json(
                getattr(value, field.name), tensors, numbers, stand_in
            )
        return {"fields": fields}
    if isinstance(value, Mapping):
        pairs = []
        for key, item in value.items():
            _refuse_dataclass(item)
            plain = stand_in(item) if stand_in and isinstance(item, Mapping) else None
            if plain is None:
                plain = state_to_json(item, tensors, numbers, stand_in)
            pairs.append([state_to_json(key, tensors, numbers), plain])
        return {"pairs": pairs}
    # Named tuples would come back as plain ones, so the type must match exactly.
    if type(value) in (tuple, list):
        items = []
        for item in value:
            _refuse_dataclass(item)
            items.append(state_to_json(item, tensors, numbers, stand_in))
        return {type(value).__name__: items}
    if isinstance(value, int | float | str):
        return value
    raise _not_allowed(value)


_PLAIN = frozenset({type(None), bool, int, float, str})
"""Types that are JSON without a change."""


def _refuse_dataclass(item: Any) -> None:
    """Refuse a dataclass inside a container: :func:`state_from_json` could not know its type."""
    if type(item) not in _PLAIN and dataclasses.is_dataclass(item):
        raise _not_allowed(item)


def _not_allowed(value: Any) -> MethodError:
    return MethodError(
        f"the method's state contains a {type(value).__name__}; it may contain numbers, strings, "
        "tensors and tuples, lists and dictionaries of these."
    )


def state_from_json(
    plain: Any,
    tensors: Mapping[str, Tensor],
    like: Any = None,
    read: Callable[[str], Tree] | None = None,
) -> Any:
    """Return the state in a checkpoint that :func:`state_to_json` turned into JSON.

    Args:
        plain: The JSON.
        tensors: The tensors by number.
        like: The method's initial state, which has the types of dataclasses.
        read: Returns the tree of a file that a ``stand_in`` named.

    Raises:
        InputError: The state differs from ``like`` in its fields: a different version wrote it.
    """
    if not isinstance(plain, dict):
        return plain
    # The only key says what it is: nothing is evaluated.
    ((kind, body),) = plain.items()
    if kind == "tensor":
        return tensors[body]
    if kind == "file" and read is not None:
        # A new mapping each time: a change of one must not change another.
        return dict(read(body))
    if kind == "fields":
        new_names = read_tables()["state_fields"]
        body = {new_names.get(name, name): value for name, value in body.items()}
        _check_fields(body, like)
        fields = {}
        for name, value in body.items():
            initial = getattr(like, name)
            fields[name] = state_from_json(value, tensors, initial, read)
            if not _is_alike(fields[name], initial):
                raise ValueError(f"{name} of the state has a different type than at the start")
            if not _is_as_declared(fields[name], type(like), name):
                raise ValueError(f"{name} of the state does not have the type it is declared with")
        return dataclasses.replace(like, **fields)
    if kind == "pairs":
        pairs = {}
        for key, value in body:
            pairs[state_from_json(key, tensors)] = state_from_json(value, tensors, None, read)
        return pairs
    items = [state_from_json(value, tensors, None, read) for value in body]
    return tuple(items) if kind == "tuple" else items


def _is_alike(value: Any, initial: Any) -> bool:
    """Whether a field of a state has the kind of value that it has in the initial state."""
    # None and an empty container say nothing about what may follow.
    if initial is None:
        return True
    if dataclasses.is_dataclass(initial):
        return type(value) is type(initial)
    if isinstance(initial, Mapping):
        is_tree = initial and all(isinstance(leaf, Tensor) for leaf in initial.values())
        if not is_tree:
            return value is None or isinstance(value, Mapping)
        return isinstance(value, Mapping) and all(
            isinstance(name, str) and isinstance(leaf, Tensor) for name, leaf in value.items()
        )
    if isinstance(initial, Tensor):
        return isinstance(value, Tensor)
    kinds: tuple[tuple[type, ...], ...] = ((bool,), (int, float), (str,), (tuple, list))
    for kind in kinds:
        if isinstance(initial, kind):
            is_other_kind = isinstance(value, bool) and kind != (bool,)
            return value is None or (isinstance(value, kind) and not is_other_kind)
    return True


def _is_as_declared(value: Any, kind: type, name: str) -> bool:
    """Whether a field of a state has the type that its dataclass declares, to the last number."""
    adapter = _find_adapter(kind, name)
    if adapter is None:
        return True
    try:
        adapter.validate_python(value)
    except ValidationError:
        return False
    return True


@lru_cache(maxsize=256)
def _find_adapter(kind: type, name: str) -> TypeAdapter[Any] | None:
    """Return what checks a field of a state; None if its annotation cannot be relied on."""
    # A user's own method may annotate its state loosely, and must not lose its runs for that.
    if not kind.__module__.startswith("fedgrove."):
        return None
    hint = get_type_hints(kind)[name]
    # A dataclass in a state is a field of its own, whose fields have been checked.
    if any(dataclasses.is_dataclass(part) for part in (hint, *get_args(hint))):
        return None
    return TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True, strict=True))


def _check_fields(body: Mapping[str, Any], like: Any) -> None:
    known = set()
    needed = set()
    for field in dataclasses.fields(like):
        known.add(field.name)
        # An older version did not write a field that was added as optional.
        if not field.metadata.get("optional", False):
            needed.add(field.name)
    different = sorted((body.keys() - known) | (needed - body.keys()))
    if different:
        raise InputError(
            "the checkpoint was written by a different version of fedgrove or of the method: the "
            f"states differ in {', '.join(different)}; resume it with the version that wrote it, "
            "or run it again."
        )


# ---- trees with their own files ------------------------------------------------------------------

STEM = "tree"
"""The beginning of these files' names."""
LEAST = 1 << 16
"""The smallest tree in bytes that has its own file; smaller ones are faster to write again."""
WRITERS = max(1, min(4, (os.cpu_count() or 1) // 2))
"""How many files are written at once: checksums and writes release Python's lock. Half the cores,
because more threads than free cores are slower than one."""

_Key = tuple[tuple[str, int], ...]
"""Names and ids of tensors."""


class _WrittenTree(NamedTuple):
    tensors: tuple[weakref.ref[Tensor], ...]
    marks: tuple[tuple[int, int], ...]
    """The :func:`mark_tensor` of each."""
    name: str


class TreeFiles:
    """The files of large trees in a run's checkpoints; a tree that stays is written once.

    A state may have a tree for every group or client, of which few change in a round. To write all
    of them each time would be most of a checkpoint's work.
    """

    def __init__(self) -> None:
        self._requested: dict[_Key, tuple[Mapping[str, Tensor], dict[str, str]]] = {}
        self._now: dict[_Key, _WrittenTree] = {}
        self._before: dict[_Key, _WrittenTree] = {}
        self.there: set[str] = set()
        """Files that a checked manifest names. They are never written again, not even with the same
        bytes: these might not be on the disk yet when the power fails."""

    def start(self) -> None:
        """Begin a checkpoint. Files that the previous one did not name may have been deleted."""
        self._before = self._now
        self._now = {}
        self._requested = {}

    def forget(self) -> None:
        """Forget which checkpoint files were written, because the folder was changed."""
        self._now = {}

    @property
    def names(self) -> list[str]:
        """The files of the last checkpoint, each once."""
        return sorted({written.name for written in self._now.values()})

    def stand_in(self, value: Mapping[Any, Any]) -> dict[str, str] | None:
        """Return what replaces a large tree in a checkpoint's manifest; None for other mappings.

        :meth:`write` fills in the name of the file.
        """
        if not _is_large_tree(value):
            return None
        key = tuple((name, id(leaf)) for name, leaf in value.items())
        if key not in self._requested:
            self._requested[key] = (value, {"file": ""})
        return self._requested[key][1]

    def write(self, folder: Path) -> None:
        """Write the checkpoint's trees requested since :meth:`start` that changed or are new."""
        changed = {}
        for key, (tree, _) in self._requested.items():
            written = self._before.get(key)
            if written is not None and _is_unchanged(written, tree):
                self._now[key] = written
            else:
                changed[key] = tree
        if changed:
            # New threads each time: a fork must not find idle ones.
            with ThreadPoolExecutor(WRITERS) as threads:
                write = partial(_write_tree, folder=folder, there=self.there)
                self._now.update(zip(changed, threads.map(write, changed.values()), strict=True))
        for key, (_, stand_in) in self._requested.items():
            stand_in["file"] = self._now[key].name
        # Or the trees would stay in memory until the next checkpoint.
        self._requested = {}


def _write_tree(tree: Mapping[str, Tensor], folder: Path, there: set[str]) -> _WrittenTree:
    """Write a tree, unless its file is there."""
    refs = tuple(weakref.ref(leaf) for leaf in tree.values())
    marks = tuple(map(mark_tensor, tree.values()))
    return _WrittenTree(refs, marks, write_named_tree(folder, STEM, tree, there))


def _is_large_tree(value: Mapping[Any, Any]) -> bool:
    size = 0
    for name, leaf in value.items():
        # Torch does not count writes into tensors of its inference mode.
        if not isinstance(name, str) or not isinstance(leaf, Tensor) or leaf.is_inference():
            return False
        size += leaf.nbytes
    return size >= LEAST


def mark_tensor(leaf: Tensor) -> tuple[int, int]:
    """Return numbers that tell a checkpoint whether a tensor was written to.

    They are torch's count of writes, and a sum of bits.

    Torch does not count writes by its fused optimisers, BatchNorm, ``.data`` or numpy.
    """
    bits = leaf.detach()
    if leaf.dtype.itemsize == 4:
        # Elements of the same width can be read in place, which takes half the calls.
        return leaf._version, int(bits.view(torch.int32).sum())
    flat = bits.contiguous().view(-1)
    # Not elements as wide as the sum: two changes of their highest bits, the signs, would cancel.
    begin = flat.storage_offset() * flat.element_size()
    fits = begin % 4 == 0 and flat.nbytes % 4 == 0
    element = torch.int32 if fits else torch.uint8
    return leaf._version, int(flat.view(element).sum())


def _is_unchanged(written: _WrittenTree, tree: Mapping[str, Tensor]) -> bool:
    """Whether these are the tensors that were written, with the values they had."""
    # An id belongs to a tensor only while it lives.
    for ref, mark, leaf in zip(written.tensors, written.marks, tree.values(), strict=True):
        if ref() is not leaf or mark_tensor(leaf) != mark:
            return False
    return True


# ---- manifests -----------------------------------------------------------------------------------

MANIFEST_FORMAT = 3
"""Raised when manifests change. Before there was a format, files had no checksums."""
READABLE = (2, MANIFEST_FORMAT)
"""Formats that are read; others are refused. In format 2 no tree had its own file."""


def are_equal_states(one: Any, other: Any) -> bool:
    """Whether two states of a method are equal to the bit.

    >>> are_equal_states({"w": torch.zeros(2)}, {"w": torch.zeros(2)}), are_equal_states(1, 2)
    (True, False)
    """
    tensors: Tree = {}
    other_tensors: Tree = {}
    if state_to_json(one, tensors) != state_to_json(other, other_tensors):
        return False
    for number, tensor in tensors.items():
        alike = other_tensors[number]
        if tensor.dtype != alike.dtype or not torch.equal(tensor, alike):
            return False
    return True


@dataclass(frozen=True)
class Manifest:
    """The manifest of a checkpoint."""

    content: Mapping[str, Any]

    @cached_property
    def text(self) -> bytes:
        """The content of a checkpoint's manifest file."""
        # Kept: parts of the content may change in later rounds, when it becomes previous.json.
        return seal_json(self.content)

    @property
    def synced(self) -> bool:
        """Whether the checkpoint was forced to the disk."""
        return bool(self.content["synced"])

    @cached_property
    def files(self) -> set[str]:
        """The names of the checkpoint's files."""
        memories = starmap(memory_file_name, self.content["memory"].items())
        return {self.content["tensors"], *self.content.get("trees", ()), *memories}


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of a checkpoint.

    Raises:
        DamageError: It is missing or damaged.
        InputError: It has a format that this version does not read.
    """
    content = read_sealed(path, new_keys=("format", "synced"))
    number = content.get("format", 1)
    if number not in READABLE:
        formats = " and ".join(map(str, READABLE))
        raise InputError(
            f"{path} is a checkpoint of format {clean_text(str(number))}; this version of fedgrove "
            f"reads format {formats}. Resume the run with the version that wrote it, or start it "
            "again."
        )
    return Manifest(schemas.check_content(content, schemas.ManifestContent, path))


def find_manifest(path: Path) -> Manifest | None:
    """Read the manifest of a checkpoint; None if it cannot be used."""
    try:
        return read_manifest(path)
    except InputError:
        return None


def versions_of(memory: Memory) -> dict[str, dict[str, str]]:
    """Return a manifest's entries for clients' memories: files of the checkpoint, or elsewhere."""
    versions = {str(client): version for client, version in memory.files.items()}
    if memory.elsewhere:
        return {"memory": {}, "memory_elsewhere": versions}
    return {"memory": versions}
