"""Trees on disk: safetensors files, a method's state without pickle, and what clients remember.

Nothing here is ever half-written: a file is written under another name and then renamed, and only
what the checkpoint's manifest names counts. A file that cannot be written, as on a full disk, is an
:class:`~fedgrove.errors.EngineError` and leaves nothing behind.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from threading import Lock, get_ident
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from ..errors import EngineError, InputError
from ..trees import Tree
from . import checksums
from .checksums import Piece, damaged
from .gate import is_plain_name
from .tensor_file import TensorFile, pieces_of

PARTIAL = ".part"
"""How the name of a file ends that is being written."""


def write_bytes(path: Path, data: bytes, sync: bool = False) -> None:
    """Write a file so that it is there whole or not at all.

    With ``sync`` it is on the disk before it has its name: a power cut leaves it whole too.
    """
    write_pieces(path, (data,), sync)


def write_pieces(path: Path, pieces: Iterable[Piece], sync: bool = False) -> None:
    """The same for a file that is given in pieces, which need not be joined."""
    # A worker that outlives its killed server may still write the same file, and an engine writes
    # in threads: each has a name of its own for it.
    partial = path.with_name(f"{path.name}.{os.getpid()}-{get_ident()}{PARTIAL}")
    try:
        with partial.open("wb") as file:
            for piece in pieces:
                file.write(piece)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException as error:
        with suppress(OSError):
            partial.unlink()
        if isinstance(error, OSError):
            raise cannot_write(path, error) from None
        raise


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    # Windows cannot open a folder, and keeps names safe by itself.
    if os.name == "nt" and path.is_dir():
        return
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise cannot_write(path, error) from None


def cannot_write(path: Path, error: OSError) -> EngineError:
    """The sentence for a file that could not be written, for one of the reasons a disk has."""
    advice = _ADVICE.get(error.errno or 0, "make sure that it can be written to.")
    return EngineError(f"{path} could not be written: {error.strerror or error}; {advice}")


_ADVICE = {
    errno.ENOSPC: "free some space on its disk.",
    errno.EDQUOT: "free some of your space on its disk.",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f).",
    errno.EIO: "the disk has errors: check it.",
}


def tree_bytes(tree: Mapping[str, Tensor]) -> bytes:
    """Named tensors as the content of one safetensors file."""
    return b"".join(pieces_of(tree))


def tree_of(data: bytes, path: Path) -> Tree:
    """The tree of a file whose bytes are read already, in the order it was written."""
    try:
        leaves = load(data)
        # load() gives no metadata: the header is JSON behind its length in 8 bytes.
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        order = json.loads(header.get("__metadata__", {}).get("order", "null"))
        return {name: leaves[name] for name in order or leaves}
    except (SafetensorError, ValueError, KeyError) as error:
        raise damaged(path, str(error).splitlines()[0]) from None


def write_tree(path: Path, tree: Mapping[str, Tensor]) -> None:
    """Write named tensors as one safetensors file."""
    write_bytes(path, tree_bytes(tree))


def read_tree(path: Path) -> Tree:
    """Read what :func:`write_tree` wrote, in the order it was written."""
    return tree_of(checksums.read(path), path)


def write_named(
    folder: Path, stem: str, tree: Mapping[str, Tensor], there: Collection[str] = ()
) -> str:
    """Write a tree as a file whose name holds its checksum, and return the name.

    Files that are ``there`` are left as they are.
    """
    pieces = pieces_of(tree)
    name = checksums.named(stem, *pieces)
    if name not in there:
        write_pieces(folder / name, pieces)
    return name


def read_named(folder: Path, name: str) -> Tree:
    """Read what :func:`write_named` wrote."""
    return tree_of(checksums.read_named(folder, name), folder / name)


def joined(forest: Mapping[str, Mapping[str, Tensor]]) -> Tree:
    """Several named trees as one; tree and leaf are joined by a slash."""
    tree: Tree = {}
    for tree_name, leaves in forest.items():
        if "/" in tree_name:
            raise ValueError(f"{tree_name!r} cannot be remembered: a name may hold no slash")
        for name, leaf in leaves.items():
            tree[f"{tree_name}/{name}"] = leaf
    return tree


def divided(tree: Mapping[str, Tensor]) -> dict[str, Tree]:
    """The trees again that :func:`joined` joined."""
    forest: dict[str, Tree] = {}
    for key, leaf in tree.items():
        tree_name, _, name = key.partition("/")
        forest.setdefault(tree_name, {})[name] = leaf
    return forest


# ---- a method's state as JSON and tensors --------------------------------------------------------


def freeze(
    value: Any,
    tensors: Tree,
    numbers: dict[int, str] | None = None,
    stand_in: Callable[[Mapping[Any, Any]], Any] | None = None,
) -> Any:
    """A state as plain JSON.

    Tensors go into ``tensors``, each once, and leave their number behind. ``numbers`` remembers
    which tensor has which number, so that several calls share one ``tensors``. Of a mapping within
    a mapping ``stand_in`` may give what is left behind instead, ``{"file": name}``.
    """
    # First what is most frequent: a state may hold a few numbers for every client.
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
            fields[field.name] = freeze(getattr(value, field.name), tensors, numbers, stand_in)
        return {"fields": fields}
    if isinstance(value, Mapping):
        pairs = []
        for key, item in value.items():
            _refuse_dataclass(item)
            frozen = None
            if stand_in is not None and isinstance(item, Mapping):
                frozen = stand_in(item)
            if frozen is None:
                frozen = freeze(item, tensors, numbers, stand_in)
            pairs.append([freeze(key, tensors, numbers), frozen])
        return {"pairs": pairs}
    # Named tuples would come back as plain ones, so the type must match exactly.
    if type(value) in (tuple, list):
        items = []
        for item in value:
            _refuse_dataclass(item)
            items.append(freeze(item, tensors, numbers, stand_in))
        return {type(value).__name__: items}
    if isinstance(value, int | float | str):
        return value
    raise _not_allowed(value)


_PLAIN = frozenset({type(None), bool, int, float, str})
"""Types that are JSON as they are."""


def _refuse_dataclass(item: Any) -> None:
    """A dataclass inside a container is refused: :func:`thaw` could not tell its type."""
    if type(item) not in _PLAIN and dataclasses.is_dataclass(item):
        raise _not_allowed(item)


def _not_allowed(value: Any) -> TypeError:
    return TypeError(
        f"a method's state holds a {type(value).__name__}; it may hold numbers, strings, tensors "
        "and plain containers"
    )


def thaw(
    frozen: Any,
    tensors: Mapping[str, Tensor],
    like: Any = None,
    read: Callable[[str], Tree] | None = None,
) -> Any:
    """The state again. ``like``, the method's initial state, supplies the types.

    ``read`` gives the tree of a file that :func:`freeze` left behind.
    """
    if not isinstance(frozen, dict):
        return frozen
    # One key says what it is: nothing is evaluated.
    ((kind, body),) = frozen.items()
    if kind == "tensor":
        return tensors[body]
    if kind == "file" and read is not None:
        # A mapping of its own: what is put into one must not be in another.
        return dict(read(body))
    if kind == "fields":
        _check_fields(body, like)
        fields = {}
        for name, value in body.items():
            fields[name] = thaw(value, tensors, getattr(like, name), read)
        return dataclasses.replace(like, **fields)
    if kind == "pairs":
        return {thaw(key, tensors): thaw(value, tensors, None, read) for key, value in body}
    items = [thaw(value, tensors, None, read) for value in body]
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


RECENT_BYTES = 1 << 26
"""What of clients' memories is kept at hand as tensors, beside the files."""


class _Recent:
    """What was written or first read last, by file; a file's name holds its checksum.

    Reading a file back, with its checksum, takes as long as writing it, and the clients of a small
    federation come again in every other round.
    """

    def __init__(self) -> None:
        self._files: dict[str, TensorFile] = {}
        self._used = 0
        # An engine may write for several clients at once.
        self._lock = Lock()

    def __reduce__(self) -> tuple[type[_Recent], tuple[()]]:
        # Pickled, it is empty: a worker reads the files.
        return _Recent, ()

    def get(self, name: str) -> Tree | None:
        """A copy of the tree of a file: whoever gets it may write into it."""
        with self._lock:
            file = self._files.get(name)
        return None if file is None else file.tree()

    def add(self, name: str, file: TensorFile) -> None:
        """Keep a file, and let those go that were kept for longest if all take too much."""
        with self._lock:
            self._drop(name)
            self._files[name] = file
            self._used += file.size
            while self._used > RECENT_BYTES:
                self._drop(next(iter(self._files)))

    def drop(self, name: str) -> None:
        """Let a file go."""
        with self._lock:
            self._drop(name)

    def _drop(self, name: str) -> None:
        if name in self._files:
            self._used -= self._files.pop(name).size


class Memory:
    """What clients keep between rounds: one file per client, a new version per write.

    Workers read and write the files themselves; only versions travel: short names with a checksum
    in them, as "12.train.0123456789abcdef".
    A version counts once the checkpoint's manifest names it. A killed round leaves versions that no
    manifest names; the next commit deletes them. The folder is made with the first file.

    With ``elsewhere`` the files are on the clients' own machines: the server knows their versions.
    """

    def __init__(
        self, folder: Path, files: Mapping[int, str] | None = None, elsewhere: bool = False
    ) -> None:
        self.folder = folder
        self.files: dict[int, str] = dict(files or {})
        self.elsewhere = elsewhere
        self._recent = _Recent()

    def read(self, client: int, version: str | None) -> dict[str, Tree]:
        """The trees of one version; empty for a client that has kept nothing, or not here."""
        if not version or self.elsewhere:
            return {}
        name = memory_file(client, version)
        tree = self._recent.get(name)
        if tree is None:
            tree = read_named(self.folder, name)
            self._recent.add(name, TensorFile.of(tree))
        return divided(tree)

    def write(
        self,
        client: int,
        round: int,
        verb: str,
        forest: Mapping[str, Tree],
        current: str | None = None,
    ) -> str:
        """Write a new version and return its name; it never overwrites another one."""
        file = TensorFile.of(joined(forest))
        version = version_of(round, verb, checksums.digest(*file.pieces))
        if version != current:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise cannot_write(self.folder, error) from None
            name = memory_file(client, version)
            write_pieces(self.folder / name, file.pieces)
            self._recent.add(name, file)
        return version

    def has(self, client: int, version: str) -> bool:
        """Whether a version was written, as far as one can tell from here."""
        if self.elsewhere:
            return is_plain_name(version)
        return (self.folder / memory_file(client, version)).is_file()

    def delete_unfinished(self, pid: int) -> None:
        """Delete what a process was writing when it was killed."""
        # On a disk with errors it stays: no manifest names it, and the next commit tries again.
        with suppress(OSError):
            for path in self.folder.glob(f"*.safetensors.{pid}-*{PARTIAL}"):
                path.unlink()

    def accept(self, client: int, version: str | None) -> None:
        """The client's newest version, from now on."""
        if not version:
            return
        before = self.files.get(client)
        if before and before != version:
            # No task names it any longer: it would only take the room of one that is read again.
            self._recent.drop(memory_file(client, before))
        self.files[client] = version


def version_of(round: int, verb: str, digest: str) -> str:
    """The version of what a client remembers after an exchange: no two contents share one."""
    # Some systems allow no colon in a file's name.
    plain_verb = verb.replace(":", "-")
    return f"{round}.{plain_verb}.{digest[: checksums.SHORT]}"


def memory_file(client: int | str, version: str) -> str:
    """The file of a version, which may come from a message and must not lead elsewhere."""
    if not is_plain_name(version):
        raise InputError(
            f"{version!r} is no version of what a client remembers; one looks like "
            "'12.train.0123456789abcdef'."
        )
    return f"client-{int(client):05d}.{version}.safetensors"
