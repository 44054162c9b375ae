"""What clients remember between rounds, in safetensors files; and named tensors as such files."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from threading import Lock

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from ..errors import InputError, first_line
from ..trees import Tree
from .files import (
    NAME_DIGITS,
    PARTIAL,
    cannot_write,
    compute_checksum,
    damaged,
    is_plain_name,
    name_with_checksum,
    read_bytes,
    read_named,
    write_bytes,
)
from .schemas import TensorsHeader, check_content

# ---- named tensors as safetensors files ----------------------------------------------------------

_DTYPES = {
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The format's names of dtypes, in the order of tensors in a file: the widest first, so that the
offset of each tensor is a multiple of its width."""
_RANKS = {dtype: rank for rank, dtype in enumerate(_DTYPES)}

_Row = tuple[str, torch.dtype, tuple[int, ...]]


def encode_tree(tree: Mapping[str, Tensor]) -> bytes:
    """Return a client's named tensors as the content of a safetensors file.

    The bytes are those of ``safetensors.torch.save``. It is written here because that function
    takes five times as long for a small client (143 against 29 µs), and refuses tensors that share
    memory.
    """
    rows = tuple((name, leaf.dtype, tuple(leaf.shape)) for name, leaf in tree.items())
    header, order = _make_header(rows)
    pieces: list[bytes | memoryview] = [header]
    for name in order:
        leaf = tree[name].detach()
        if leaf.dtype == torch.bfloat16:
            # NumPy has no bfloat16.
            leaf = leaf.view(torch.int16)
        pieces.append(leaf.numpy(force=True).reshape(-1).view(np.uint8).data)
    return b"".join(pieces)


# A run writes trees with the same names and shapes again and again.
@lru_cache(maxsize=64)
def _make_header(rows: tuple[_Row, ...]) -> tuple[bytes, tuple[str, ...]]:
    """Return the header with its length in front, and the names in the order of the file."""
    for name, dtype, _ in rows:
        if dtype not in _RANKS:
            allowed = ", ".join(str(known).removeprefix("torch.") for known in _DTYPES)
            raise TypeError(
                f"{name} has dtype {dtype}, which the files of a run cannot contain; allowed: "
                f"{allowed}"
            )
    # The file sorts names. Sums depend on their order to the bit, so it is kept as metadata.
    order = json.dumps([name for name, _, _ in rows])
    fields: dict[str, object] = {"__metadata__": {"order": order}}
    begin = 0
    for name, dtype, shape in sorted(rows, key=lambda row: (_RANKS[row[1]], row[0])):
        end = begin + dtype.itemsize * math.prod(shape)
        fields[name] = {"dtype": _DTYPES[dtype], "shape": shape, "data_offsets": (begin, end)}
        begin = end
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    # Padded, so that the first tensor begins at a multiple of eight bytes.
    text += b" " * (-len(text) % 8)
    names = tuple(name for name in fields if name != "__metadata__")
    return len(text).to_bytes(8, "little") + text, names


def decode_tree(data: bytes, path: Path) -> Tree:
    """Return the tree in a run's safetensors file, in the order it was written.

    Raises:
        DamageError: The content is not such a file; the message names ``path``.
    """
    try:
        leaves = load(data)
        # load() returns no metadata: the header is JSON after its length in 8 bytes.
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        order = json.loads((header.get("__metadata__") or {}).get("order", "null"))
        check_content({"order": order}, TensorsHeader, path)
        return {name: leaves[name] for name in order or leaves}
    except (SafetensorError, ValueError, KeyError) as error:
        raise damaged(path, first_line(error)) from None


def write_tree(path: Path, tree: Mapping[str, Tensor]) -> None:
    """Write named tensors as a safetensors file of a run."""
    write_bytes(path, encode_tree(tree))


def read_tree(path: Path) -> Tree:
    """Read a safetensors file of a run; tensors come in the order they were written."""
    return decode_tree(read_bytes(path), path)


def write_named_tree(
    folder: Path, stem: str, tree: Mapping[str, Tensor], there: Collection[str] = ()
) -> str:
    """Write a tree into a run folder as a file whose name has its checksum.

    Args:
        folder: Where to write it.
        stem: The beginning of the name.
        tree: The named tensors.
        there: Names of files that exist and must not be written again.

    Returns:
        The file's name.
    """
    data = encode_tree(tree)
    name = name_with_checksum(stem, data)
    if name not in there:
        write_bytes(folder / name, data)
    return name


def read_named_tree(folder: Path, name: str) -> Tree:
    """Read a file that :func:`write_named_tree` wrote, and check it."""
    return decode_tree(read_named(folder, name), folder / name)


def join_trees(forest: Mapping[str, Mapping[str, Tensor]]) -> Tree:
    """Return the trees of a client's memory as one, with names TREE/LEAF."""
    tree: Tree = {}
    for tree_name, leaves in forest.items():
        if "/" in tree_name:
            raise ValueError(f"{tree_name!r} cannot be stored: a name must not contain a slash")
        for name, leaf in leaves.items():
            tree[f"{tree_name}/{name}"] = leaf
    return tree


def split_trees(tree: Mapping[str, Tensor]) -> dict[str, Tree]:
    """Return the trees that :func:`join_trees` joined."""
    forest: dict[str, Tree] = {}
    for key, leaf in tree.items():
        tree_name, _, name = key.partition("/")
        forest.setdefault(tree_name, {})[name] = leaf
    return forest


# ---- clients' memories ---------------------------------------------------------------------------

RECENT_BYTES = 1 << 26
"""How many bytes of clients' memories are cached."""


class Memory:
    """What clients keep between rounds: one file per client, a new version per write.

    Workers read and write the files themselves; messages only name versions, such as
    "12.train.0123456789abcdef" (round, verb, checksum). A version counts once the manifest of a
    checkpoint names it. A killed round leaves versions that no manifest names; the next commit
    deletes them. The folder is made with the first file.

    Args:
        folder: The folder of the files.
        files: The current version of each client.
        elsewhere: Whether the files are on the clients' machines, and only versions are known here.
    """

    def __init__(
        self, folder: Path, files: Mapping[int, str] | None = None, elsewhere: bool = False
    ) -> None:
        self.folder = folder
        self.files: dict[int, str] = dict(files or {})
        self.elsewhere = elsewhere
        self._recent = _RecentFiles()

    def read(self, client: int, version: str | None) -> dict[str, Tree]:
        """Return one version of a client's memory; empty without one, or if files are elsewhere.

        The tensors are new: the caller may change them.
        """
        if not version or self.elsewhere:
            return {}
        name = memory_file_name(client, version)
        data = self._recent.get(name)
        if data is None:
            data = read_named(self.folder, name)
            self._recent.add(name, data)
        return split_trees(decode_tree(data, self.folder / name))

    def write(
        self,
        client: int,
        round: int,
        verb: str,
        forest: Mapping[str, Tree],
        current: str | None = None,
    ) -> str:
        """Write a new version of a client's memory, which never overwrites another one.

        Args:
            client: The client.
            round: The round of its task.
            verb: The verb of its task.
            forest: The trees to remember, by name.
            current: The client's current version; if the content is equal, nothing is written.

        Returns:
            The name of the new version.
        """
        data = encode_tree(join_trees(forest))
        version = make_version(round, verb, compute_checksum(data))
        if version != current:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise cannot_write(self.folder, error) from None
            name = memory_file_name(client, version)
            write_bytes(self.folder / name, data)
            self._recent.add(name, data)
        return version

    def has(self, client: int, version: str) -> bool:
        """Whether a version of a client's memory was written, as far as can be known here."""
        if self.elsewhere:
            return is_plain_name(version)
        return (self.folder / memory_file_name(client, version)).is_file()

    def delete_unfinished(self, pid: int) -> None:
        """Delete the memory files that a killed process was writing."""
        # On a disk with errors they stay: no manifest names them, and the next commit tries again.
        with suppress(OSError):
            for path in self.folder.glob(f"*.safetensors.{pid}-*{PARTIAL}"):
                path.unlink()

    def accept(self, client: int, version: str | None) -> None:
        """Make a version the client's current memory; None changes nothing."""
        if not version:
            return
        before = self.files.get(client)
        if before and before != version:
            # No task names it any longer: it would only take cache space.
            self._recent.drop(memory_file_name(client, before))
        self.files[client] = version


class _RecentFiles:
    """The content of the files written or read last, by name.

    To read a file again and check it takes as long as to write it, and the clients of a small
    federation train in every other round.
    """

    def __init__(self) -> None:
        self._files: dict[str, bytes] = {}
        self._used = 0
        # An engine may write for several clients at once.
        self._lock = Lock()

    def __reduce__(self) -> tuple[type[_RecentFiles], tuple[()]]:
        # Pickled, it is empty: a worker reads the files.
        return _RecentFiles, ()

    def get(self, name: str) -> bytes | None:
        """Return a memory file's content, if it is cached."""
        return self._files.get(name)

    def add(self, name: str, data: bytes) -> None:
        """Cache a memory file; the oldest ones go if all take too much."""
        with self._lock:
            self._drop(name)
            self._files[name] = data
            self._used += len(data)
            while self._used > RECENT_BYTES:
                self._drop(next(iter(self._files)))

    def drop(self, name: str) -> None:
        """Drop a memory file from the cache."""
        with self._lock:
            self._drop(name)

    def _drop(self, name: str) -> None:
        self._used -= len(self._files.pop(name, b""))


def make_version(round: int, verb: str, checksum: str) -> str:
    """Return the version of what a client remembers after a task; each content has its own."""
    # Some systems allow no colon in a file's name.
    plain_verb = verb.replace(":", "-")
    return f"{round}.{plain_verb}.{checksum[:NAME_DIGITS]}"


def memory_file_name(client: int | str, version: str) -> str:
    """Return the file name of a version of a client's memory.

    Raises:
        InputError: The version, which may come from a message, could lead to another folder.
    """
    if not is_plain_name(version):
        raise InputError(
            f"{version!r} is not a version of a client's memory; a version looks like "
            "'12.train.0123456789abcdef'."
        )
    return f"client-{int(client):05d}.{version}.safetensors"
