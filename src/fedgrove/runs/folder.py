"""A run folder: never overwritten, never half-written, and what is damaged is noticed.

::

    config.toml       the resolved configuration: rebuilds the run by type name
    metrics.jsonl     one object per exchange
    checkpoint/       the last folded state, and what clients remember; the same of a time before
    models/           *.safetensors; index.json: which client uses which; preparation.json: how raw
                      inputs become what they take, and what their outputs mean
    checksums.txt     of config.toml; at the end, of everything but checkpoint/
    summary.json      written last
    report.html       a page to look at, made from the others (see :mod:`fedgrove.runs.report_html`)
    lock              while a process trains in the folder (see :mod:`fedgrove.runs.lock`)

A checkpoint is a manifest (latest.json, previous.json) and the files that it names, which are
written before it and never changed. How a file is checked: :mod:`fedgrove.runs.checksums`.
"""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from torch import Tensor

from ..core import Packet
from ..errors import DamageError, FedgroveError, FolderWarning, InputError, not_a_run
from ..trees import Digests, Tree
from ..wire.known_state import KnownState
from . import checksums
from .checksums import damaged, digest, inside
from .gate import is_plain_name
from .model import FILE as PREPARATION
from .model import FORMAT as PREPARATION_FORMAT
from .model import described
from .run import Run
from .store import (
    PARTIAL,
    Memory,
    cannot_write,
    freeze,
    memory_file,
    read_named,
    sync,
    thaw,
    tree_bytes,
    tree_of,
    write_bytes,
    write_named,
)
from .tree_files import STEM, TreeFiles

CHECKPOINT = "checkpoint"
"""The folder of states and of what clients remember, within a run folder."""
FORMAT = 3
"""Of checkpoints: raised when a manifest changes. Before there was a format, files had no
checksums."""
READABLE = (2, FORMAT)
"""Formats that are read; others are refused. In 2 no tree had a file of its own."""
SYNC_EVERY = 10.0
"""Seconds: a checkpoint is forced to the disk, which takes a while, no more often than this.

Only such a one is kept as the previous one. So a power cut, after which newer files may be empty,
costs no more than these seconds and a round.
"""


@dataclass(frozen=True)
class _Committed:
    """What a manifest says, as text: what it was made from may change."""

    text: bytes
    synced: bool
    files: set[str]
    """Those that it names."""

    @staticmethod
    def of(manifest: Mapping[str, Any]) -> _Committed:
        return _Committed(checksums.sealed(manifest), manifest["synced"], _files_of(manifest))


class RunFolder:
    """The files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._synced_at = -SYNC_EVERY
        self._model_digests: dict[str, str] = {}
        self._trees = TreeFiles()
        # The latest manifest and the previous one, where this process wrote them.
        self._committed: tuple[_Committed | None, _Committed | None] = (None, None)

    @classmethod
    def create(cls, path: Path, config: str) -> RunFolder:
        """A new folder; one that exists is not touched."""
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            raise exists(path) from None
        except OSError as error:
            raise InputError(
                f"the run folder {path} cannot be made: {error.strerror or error}."
            ) from None
        folder = cls(path)
        try:
            folder.begin(config)
        except FedgroveError:
            # Or the same command would be refused when there is space again.
            with suppress(OSError):
                (path / checksums.FILE).unlink(missing_ok=True)
                path.rmdir()
            raise
        return folder

    def begin(self, config: str) -> None:
        """Write the first files of a run into its folder."""
        # Its checksum first: a config.toml without one has lost it.
        digests = {"config.toml": digest(config.encode())}
        write_bytes(self._inside(checksums.FILE), checksums.listed(digests), sync=True)
        write_bytes(self._inside("config.toml"), config.encode(), sync=True)

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """A folder that holds a run."""
        if not (path / "config.toml").is_file():
            raise not_a_run(path)
        return cls(path)

    def _inside(self, name: str) -> Path:
        return inside(self.path, name)

    def read(self, name: str) -> bytes:
        """The bytes of a file that checksums.txt lists: ``config.toml``, or one of a finished run.

        What is missing or not what was written is refused.
        """
        if not (self.path / checksums.FILE).exists() and self._is_from_before_checksums():
            return checksums.read(self._inside(name))
        return checksums.read_listed(self.path, name, checksums.read_list(self.path))

    def _is_from_before_checksums(self) -> bool:
        try:
            manifest = checksums.read_json(self._latest)
        except DamageError:
            # Before its first checkpoint a run has nothing to lose.
            return not self._latest.exists()
        return isinstance(manifest, dict) and "format" not in manifest

    @property
    def config(self) -> str:
        """The text of config.toml."""
        try:
            return self.read("config.toml").decode()
        except UnicodeDecodeError:
            raise damaged(self.path / "config.toml", "it is not text") from None

    @property
    def summary(self) -> dict[str, Any] | None:
        """The result, once there is one."""
        path = self.path / "summary.json"
        if not path.exists():
            return None
        figures = checksums.parsed(self.read("summary.json"), path)
        if not isinstance(figures, dict):
            raise damaged(path)
        return figures

    # ---- metrics ---------------------------------------------------------------------------------

    @property
    def _metrics_path(self) -> Path:
        return self._inside("metrics.jsonl")

    def _lines(self) -> list[bytes]:
        path = self._metrics_path
        if not path.exists():
            return []
        return checksums.read(path).splitlines(keepends=True)

    def metrics(self) -> list[dict[str, Any]]:
        """One object per exchange so far."""
        lines = self._lines()
        if (self.path / "summary.json").exists():
            self.read("metrics.jsonl")
        else:
            manifest = self._newest_manifest()
            if manifest is not None:
                self._check_lines(lines, manifest)
        return self._parsed(lines)

    def metrics_to_show(self) -> list[dict[str, Any]]:
        """The same for a progress line: unchecked, up to the first line that cannot be read."""
        try:
            return self._parsed(self._lines())
        except DamageError:
            return []

    def _parsed(self, lines: list[bytes]) -> list[dict[str, Any]]:
        # A last line without its newline was cut short by a kill, and does not count.
        return [
            checksums.parsed(line, self._metrics_path) for line in lines if line.endswith(b"\n")
        ]

    def _check_lines(self, lines: list[bytes], manifest: Mapping[str, Any]) -> bytes:
        """The lines that a manifest counts."""
        committed = b"".join(lines[: manifest["lines"]])
        if digest(committed) != manifest["metrics"]:
            if not self._metrics_path.exists():
                raise DamageError(
                    f"{self._metrics_path} is missing; restore it from a copy, or run it again."
                )
            raise damaged(self._metrics_path)
        return committed

    def log(self, line: Mapping[str, Any]) -> None:
        """Add a line to metrics.jsonl; it counts once the next checkpoint is written."""
        path = self._metrics_path
        size = path.stat().st_size if path.exists() else 0
        try:
            with path.open("ab") as file:
                file.write(json.dumps(line).encode() + b"\n")
        except OSError as error:
            # Not half a line.
            with suppress(OSError):
                os.truncate(path, size)
            raise cannot_write(path, error) from None

    # ---- checkpoints -----------------------------------------------------------------------------

    @property
    def _checkpoint(self) -> Path:
        return self._inside(CHECKPOINT)

    @property
    def _latest(self) -> Path:
        return self._inside(f"{CHECKPOINT}/latest.json")

    @property
    def _previous(self) -> Path:
        return self._inside(f"{CHECKPOINT}/previous.json")

    def save(self, run: Run, state: Any, attempt: int = 0) -> None:
        """Commit a state, what clients remember and hold, and the metrics so far, all at once."""
        checkpoint = self._checkpoint
        try:
            checkpoint.mkdir(exist_ok=True)
        except OSError as error:
            raise cannot_write(checkpoint, error) from None
        tensors: Tree = {}
        # Shared by both calls: what occurs in both is written once.
        numbers: dict[int, str] = {}
        self._trees.start()
        frozen_state = freeze(state, tensors, numbers, self._trees.stand_in)
        frozen_held = freeze(run.known_state.state(), tensors, numbers)
        self._trees.write(checkpoint)
        lines = self._lines()
        stem = f"state.{len(lines):06d}"
        self._commit(
            {
                "round": state.round,
                "config": self._config_digest(),
                "attempt": attempt,
                "lengths": run.lengths.by_kind,
                "state": frozen_state,
                "held": frozen_held,
                "tensors": write_named(checkpoint, stem, tensors),
                "trees": self._trees.names,
                **_versions(run.memory),
                "lines": len(lines),
                "metrics": digest(b"".join(lines)),
            }
        )

    def _commit(self, content: Mapping[str, Any]) -> None:
        """Make a manifest the latest one; all that it names is written."""
        old, previous = self._committed
        if old is None:
            old = self._read_committed(self._latest)
            previous = self._read_committed(self._previous)
        is_due = time.monotonic() - self._synced_at >= SYNC_EVERY
        new = _Committed.of({"format": FORMAT, "synced": is_due, **content})
        if is_due:
            on_disk = [known.files for known in (old, previous) if known and known.synced]
            self._sync(new.files.difference(*on_disk))
        # Until all is written, nobody knows what is there.
        self._committed = (None, None)
        # From this rename on the new checkpoint counts.
        write_bytes(self._latest, new.text, sync=is_due)
        if old is not None and (old.synced or previous is None):
            # After the other, or for a moment both would be the same, and one damage too many.
            previous = old
            write_bytes(self._previous, old.text, sync=True)
            sync(self._checkpoint)
        # What no manifest names can go now.
        kept = new.files | (previous.files if previous else set())
        self._delete_all_but(kept)
        self._trees.there = kept
        self._committed = (new, previous)

    def _read_committed(self, path: Path) -> _Committed | None:
        manifest = self._manifest_or_none(path)
        return None if manifest is None else _Committed.of(manifest)

    def _sync(self, names: Iterable[str]) -> None:
        """Force a checkpoint to the disk; ``names``: of its files those that are not there yet."""
        checkpoint = self._checkpoint
        for name in sorted(names):
            sync(checkpoint / name)
        if self._metrics_path.exists():
            sync(self._metrics_path)
        sync(checkpoint)
        sync(self.path)
        self._synced_at = time.monotonic()

    def _delete_all_but(self, names: set[str]) -> None:
        """Delete what a killed process left behind, and what only an older manifest named."""
        checkpoint = self._checkpoint
        left_over = []
        for name in os.listdir(checkpoint) if checkpoint.is_dir() else ():
            is_ours = name.startswith(("state.", "client-", f"{STEM}."))
            if (is_ours and name not in names) or name.endswith(PARTIAL):
                left_over.append(checkpoint / name)
        # Not glob(), which takes as long as to delete ten files.
        left_over += [self.path / name for name in os.listdir(self.path) if name.endswith(PARTIAL)]
        for path in left_over:
            # Something else may have deleted it; and it does no harm.
            with suppress(OSError):
                path.unlink()

    def restore(self, run: Run) -> tuple[Any, int]:
        """Take the run back to its last checkpoint: its state and the attempt at the next exchange.

        The state is None if there is no checkpoint.

        If the last one is damaged, to the one before. What clients remember and hold is restored
        too; metrics of rounds that did not count are cut off.
        """
        manifest = self._settle()
        self._trees.forget()
        # They were read, and are what their names say.
        self._trees.there = _files_of(manifest)
        self._committed = (None, None)
        # A run that was used before may hold what was never committed.
        run.memory.files.clear()
        run.lengths.by_kind.clear()
        run.known_state.restore(KnownState().state())
        if manifest is None:
            return None, 0
        try:
            for key in ("memory", "memory_elsewhere"):
                for client, version in manifest.get(key, {}).items():
                    run.memory.accept(int(client), version)
            tensors = read_named(self._checkpoint, manifest["tensors"])
            run.known_state.restore(thaw(manifest["held"], tensors))
            run.lengths.by_kind.update(manifest["lengths"])
            # Each file once: trees that were one are one again.
            read = cache(partial(read_named, self._checkpoint))
            state = thaw(manifest["state"], tensors, run.initial_state, read)
            return state, int(manifest["attempt"])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            if isinstance(error, FedgroveError):
                raise
            raise damaged(self._latest, "it does not describe a checkpoint") from error

    def _settle(self) -> dict[str, Any] | None:
        """Choose the checkpoint to continue from, and make the folder agree with it.

        The manifest of the chosen one; None at the beginning of a run.
        """
        lines = self._lines()
        if not self._latest.exists() and not self._previous.exists():
            # A run that was killed in its first exchange may have logged that one.
            if len(lines) > 1:
                raise DamageError(
                    f"{self._latest} is missing, and {self._metrics_path} is not of a run that "
                    "has just begun; restore the folder from a copy, or run it again."
                )
            manifest, committed = None, b""
        else:
            manifest, committed = self._chosen(lines)
        if b"".join(lines) != committed:
            write_bytes(self._metrics_path, committed)
        previous = self._manifest_or_none(self._previous)
        self._delete_all_but(_files_of(manifest) | _files_of(previous))
        return manifest

    def _chosen(self, lines: list[bytes]) -> tuple[dict[str, Any], bytes]:
        """The latest checkpoint and its metrics; the previous one if the latest is damaged."""
        try:
            return self._checked(self._latest, lines)
        except DamageError as error:
            latest_is_damaged = error
        if not self._previous.exists():
            raise DamageError(
                f"{latest_is_damaged} There is no checkpoint before it. Nothing was changed."
            ) from None
        try:
            manifest, committed = self._checked(self._previous, lines)
        except DamageError as error:
            reason = f"The checkpoint before it cannot be used either: {error}"
            if str(error) == str(latest_is_damaged):
                reason = "The checkpoint before it needs that file too."
            raise DamageError(f"{latest_is_damaged} {reason} Nothing was changed.") from None
        warnings.warn(
            f"{latest_is_damaged} The run goes on from the checkpoint before, of round "
            f"{manifest['round']}.",
            FolderWarning,
            stacklevel=2,
        )
        # First this, then the metrics: a kill in between leaves lines that do not count.
        write_bytes(self._latest, checksums.sealed(manifest), sync=True)
        return manifest, committed

    def _checked(self, path: Path, lines: list[bytes]) -> tuple[dict[str, Any], bytes]:
        """A manifest and the metrics it counts, when all its files are what was written."""
        manifest = self._manifest(path)
        if manifest["config"] != self._config_digest():
            raise damaged(path, f"it is of a run with another config.toml than {self.path}")
        for name in sorted(_files_of(manifest)):
            checksums.read_named(self._checkpoint, name)
        return manifest, self._check_lines(lines, manifest)

    def rounds_saved(self) -> int:
        """How many rounds the last checkpoint that can be read holds."""
        for path in (self._latest, self._previous):
            manifest = self._manifest_or_none(path)
            if manifest is not None:
                return int(manifest["round"])
        return 0

    def check_format(self) -> None:
        """Refuse checkpoints of another version."""
        for path in (self._latest, self._previous):
            # What is damaged is for restore() to tell.
            with suppress(DamageError):
                self._manifest(path)

    def check(self) -> None:
        """Refuse an unfinished run of which no checkpoint can be read."""
        self._newest_manifest()

    def _newest_manifest(self) -> dict[str, Any] | None:
        """The last manifest that can be read; None before the first checkpoint."""
        if not self._latest.exists() and not self._previous.exists():
            return None
        try:
            return self._manifest(self._latest)
        except DamageError as error:
            previous = self._manifest_or_none(self._previous)
            if previous is None:
                raise
            warnings.warn(f"{error} The one before is used.", FolderWarning, stacklevel=2)
            return previous

    def _manifest(self, path: Path) -> dict[str, Any]:
        manifest = checksums.read_sealed(path, new_keys=("format", "synced"))
        format = manifest.get("format", 1)
        if format not in READABLE:
            formats = " and ".join(map(str, READABLE))
            raise InputError(
                f"{path} is a checkpoint of format {format}; this version of fedgrove reads format "
                f"{formats}. Resume the run with the version that wrote it, or start it again."
            )
        if not _is_whole(manifest):
            raise damaged(path, "it does not describe a checkpoint")
        return manifest

    def _manifest_or_none(self, path: Path) -> dict[str, Any] | None:
        try:
            return self._manifest(path)
        except InputError:
            return None

    # ---- results ---------------------------------------------------------------------------------

    def save_models(self, run: Run, state: Any) -> None:
        """Each client's own model where it has one, otherwise the delivered model, written once.

        With what is frozen in the net, so that a file is a whole model. A model that several
        clients are delivered is kept beside their own. ``preparation.json`` says how raw inputs
        become what the models take, and what their outputs mean (:mod:`.model`).
        """
        folder = self._inside("models")
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            raise cannot_write(folder, error) from None
        index: dict[str, str] = {}
        self._model_digests = {}
        constants = run.net.constants()

        def write(name: str, tree: Mapping[str, Tensor]) -> None:
            # Even over a file that is there: a process that was killed may have left it.
            if f"models/{name}" not in self._model_digests:
                is_model = tree.keys() == run.net.layout.shapes.keys()
                whole = {**constants, **tree} if is_model else tree
                self._write_model(name, tree_bytes(whole))

        # All at once, so that each is alive as long as its id is known.
        delivered = {k: run.deliver(state, k).get("model") for k in run.served}
        groups, files = _shared(run, delivered)
        for client, packet in delivered.items():
            own = run.memory.read(client, run.memory.files.get(client)).get("own")
            if client in groups and packet is not None:
                write(files[groups[client]], packet.values)
            if own is not None:
                name = f"client-{client:05d}.safetensors"
                write(name, own)
            elif client in groups:
                name = files[groups[client]]
            elif packet is not None:
                name = f"client-{client:05d}.safetensors"
                write(name, packet.values)
            else:
                continue
            index[str(client)] = name
        self._write_model("index.json", json.dumps(index, indent=1).encode())
        about = described(run, groups, files)
        self._write_model(PREPARATION, json.dumps(about, indent=1).encode())
        for path in folder.glob(f"*{PARTIAL}"):
            path.unlink()

    def models(self) -> dict[int, str]:
        """The file name of each client's model; of a finished run."""
        path = self.path / "models" / "index.json"
        if not path.is_file():
            raise InputError(
                f"{self.path} has no models/index.json, so its models cannot be matched to "
                "clients; run it again."
            )
        index = checksums.parsed(self.read("models/index.json"), path)
        try:
            files = {int(client): name for client, name in index.items()}
        except (AttributeError, ValueError):
            raise damaged(path, "it does not name clients") from None
        if not files or not all(checksums.is_plain(name) for name in files.values()):
            raise damaged(path, "it does not name files of its folder")
        return files

    def preparation(self) -> dict[str, Any] | None:
        """What is known of the models beside their weights; None where it was not kept yet."""
        name = f"models/{PREPARATION}"
        listed = checksums.read_list(self.path) if (self.path / checksums.FILE).exists() else {}
        if name not in listed and not (self.path / name).exists():
            return None
        about = checksums.parsed(self.read(name), self.path / name)
        is_ours = isinstance(about, dict) and about.get("format") == PREPARATION_FORMAT
        if not is_ours:
            raise damaged(self.path / name, "it does not describe models of this version")
        return dict(about)

    def tree(self, name: str) -> Tree:
        """The weights in a file of ``models/``, in float32."""
        content = self.read(f"models/{name}")
        tree = tree_of(content, self.path / "models" / name)
        return {leaf: value.float() for leaf, value in tree.items()}

    def _write_model(self, name: str, data: bytes) -> None:
        write_bytes(self._inside(f"models/{name}"), data, sync=True)
        self._model_digests[f"models/{name}"] = digest(data)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write the result."""
        text = (json.dumps(summary, indent=1) + "\n").encode()
        digests = {
            "config.toml": self._config_digest(),
            "metrics.jsonl": digest(b"".join(self._lines())),
            **self._model_digests,
            "summary.json": digest(text),
        }
        # Before the summary, with which they begin to be looked at.
        write_bytes(self._inside(checksums.FILE), checksums.listed(digests), sync=True)
        write_bytes(self._inside("summary.json"), text, sync=True)
        sync(self.path)

    def _config_digest(self) -> str:
        """Of when the run began: a config.toml that was changed since must not pass for whole."""
        try:
            return checksums.read_list(self.path)["config.toml"]
        except (DamageError, KeyError):
            return digest(checksums.read(self._inside("config.toml")))


def _versions(memory: Memory) -> dict[str, dict[str, str]]:
    """What clients remember, as a manifest names it: files of the checkpoint, or of others."""
    versions = {str(client): version for client, version in memory.files.items()}
    if memory.elsewhere:
        return {"memory": {}, "memory_elsewhere": versions}
    return {"memory": versions}


def _is_whole(manifest: Mapping[str, Any]) -> bool:
    """Whether a manifest has what is read of it before the run is known."""
    memory = manifest.get("memory")
    if not isinstance(memory, dict) or not isinstance(manifest.get("tensors"), str):
        return False
    trees = manifest.get("trees", [])
    if not isinstance(trees, list) or not all(isinstance(name, str) for name in trees):
        return False
    names_versions = all(
        client.isdecimal() and isinstance(version, str) and is_plain_name(version)
        for client, version in memory.items()
    )
    numbers = ("round", "attempt", "lines", "synced")
    has_numbers = all(isinstance(manifest.get(key), int) for key in numbers)
    has_rest = {"state", "held", "lengths", "metrics", "config"} <= manifest.keys()
    return names_versions and has_numbers and has_rest


def _files_of(manifest: Mapping[str, Any] | None) -> set[str]:
    """The names of the files of a checkpoint."""
    if manifest is None:
        return set()
    names = {manifest["tensors"], *manifest.get("trees", ())}
    for client, version in manifest["memory"].items():
        names.add(memory_file(client, version))
    return names


def _shared(
    run: Run, delivered: Mapping[int, Packet | None]
) -> tuple[dict[int, int], dict[int, str]]:
    """The group of each client that is delivered a whole model which others get too; its files.

    Where there is one client only, its model is the server's all the same.
    """
    known = Digests()
    clients: dict[bytes, list[int]] = {}
    for client, packet in delivered.items():
        if packet is not None and packet.values.keys() == run.net.layout.shapes.keys():
            clients.setdefault(known.of(packet.values), []).append(client)
    groups: dict[int, int] = {}
    files: dict[int, str] = {}
    for members in clients.values():
        if len(members) > 1 or len(delivered) == 1:
            number = len(files)
            files[number] = f"group-{number:03d}.safetensors"
            groups.update(dict.fromkeys(members, number))
    return groups, files


def exists(path: Path) -> InputError:
    """The refusal to write into a folder that is there."""
    return InputError(
        f"the run folder {path} exists; runs are never overwritten. "
        f"Give another --out, or resume it with: fedgrove resume {path}"
    )


def fresh_name(root: Path, stem: str) -> Path:
    """A folder name under ``root`` that is not taken: ``stem``, ``stem-2``, ``stem-3``, ..."""
    # A colon (the data set "emnist:letters") may not stand in a folder's name on every system.
    stem = stem.replace(":", "-")
    path = root / stem
    n = 2
    while path.exists():
        path = root / f"{stem}-{n}"
        n += 1
    return path
