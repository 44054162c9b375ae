"""A run folder: never overwritten, never half-written, and damage is noticed.

::

    config.toml       the resolved configuration: rebuilds the run by type name
    metrics.jsonl     one object per exchange
    checkpoint/       the last folded state, and what clients remember; the same of an earlier time
    models/           *.safetensors; index.json: which client uses which; preparation.json: how raw
                      inputs become what they take, and what their outputs mean
    checksums.txt     of config.toml; at the end, of everything but checkpoint/
    summary.json      written last
    report.html       a page to look at, made from the others (see :mod:`fedgrove.runs.report_html`)
    lock              while a process trains in the folder (see :mod:`fedgrove.runs.lock`)

How files are written and checked: :mod:`fedgrove.runs.files`; what a checkpoint is made of:
:mod:`fedgrove.runs.checkpoint`.
"""

from __future__ import annotations

import json
import os
import shutil
import time
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import (
    DamageError,
    FedgroveError,
    FolderWarning,
    InputError,
    is_plain_text,
    not_a_run,
    spell_option,
)
from ..report.tables import SHARED, name_old_scores
from ..trees import Tree
from ..wire.known_state import KnownState
from . import files, schemas
from .checkpoint import (
    MANIFEST_FORMAT,
    STEM,
    Manifest,
    TreeFiles,
    find_manifest,
    read_manifest,
    state_from_json,
    state_to_json,
    versions_of,
)
from .files import CHECKSUMS, PARTIAL, cannot_write, damaged, write_bytes
from .lock import LOCK_FILE, locked
from .memory import decode_tree, encode_tree, read_named_tree, write_named_tree
from .model import PREPARATION_FILE, PREPARATION_FORMAT, describe_clients
from .run import Run
from .summary import Delivery

METRICS = "metrics.jsonl"
REPORT = "report.html"
NEXT_CONFIG = "config.next.toml"
"""The config.toml to come, while :meth:`RunFolder.replace_config` runs."""
CHECKPOINT = "checkpoint"
"""The folder of states and of what clients remember, within a run folder."""
SYNC_EVERY = 10.0
"""Seconds: a checkpoint is forced to the disk, which takes a while, no more often than this.

Only such a one is kept as the previous one. So a power cut, after which newer files may be empty,
costs no more than these seconds and a round.
"""


def has_nothing_saved(path: Path) -> bool:
    """Whether a folder is empty, or of a run that stopped before its first checkpoint.

    Nothing else may be in it.
    """
    if not path.is_dir():
        return False
    names = {name for name in os.listdir(path) if not name.endswith(PARTIAL)} - {LOCK_FILE}
    if not names:
        return True
    if not names <= {"config.toml", CHECKSUMS, METRICS, CHECKPOINT, REPORT}:
        return False
    try:
        # It lists more at the end of a run; another file of this name is not ours.
        is_begun = files.read_checksums(path).keys() == {"config.toml"}
    except DamageError:
        return False
    begun_checkpoint = path / CHECKPOINT
    has_checkpoint = begun_checkpoint.exists() and not all(
        map(_is_of_checkpoint, os.listdir(begun_checkpoint))
    )
    # Without its checkpoint, a run of several rounds is damaged, and not new.
    metrics = path / METRICS
    has_rounds = metrics.exists() and files.read_bytes(metrics).count(b"\n") > 1
    return is_begun and not has_checkpoint and not has_rounds


def _is_of_checkpoint(name: str) -> bool:
    """Whether a file of a checkpoint counts for nothing without a manifest."""
    return name.startswith(("state.", "client-", f"{STEM}.")) or name.endswith(PARTIAL)


def _clear(path: Path) -> None:
    """Delete what a run left that saved nothing, but for the lock."""
    try:
        shutil.rmtree(path / CHECKPOINT, ignore_errors=True)
        for each in path.iterdir():
            if each.name != LOCK_FILE:
                each.unlink()
    except OSError as error:
        raise cannot_write(path, error) from None


class RunFolder:
    """The files of one run.

    Args:
        path: The folder. :meth:`create` makes a new one; :meth:`open` checks that it has a run.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._synced_at = -SYNC_EVERY
        self._model_checksums: dict[str, str] = {}
        self._trees = TreeFiles()
        # The latest manifest and the previous one, if this process wrote them.
        self._committed: tuple[Manifest | None, Manifest | None] = (None, None)
        self._paths: dict[str, Path] = {}

    @classmethod
    def create(cls, path: Path, config: str, reuse: bool = False) -> RunFolder:
        """Make a new run folder.

        Args:
            path: The folder, which must not exist.
            config: The content of config.toml.
            reuse: Whether the folder may be that of a run that saved nothing.

        Raises:
            InputError: The folder exists or cannot be made.
        """
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            if not (reuse and has_nothing_saved(path)):
                raise files.folder_exists(path) from None
            # The process that made it may still be at its first round.
            with locked(path):
                _clear(path)
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
                (path / CHECKSUMS).unlink(missing_ok=True)
                path.rmdir()
            raise
        return folder

    def begin(self, config: str) -> None:
        """Write the first files of a run into its folder."""
        if not is_plain_text(config):
            raise InputError(
                "the path of a file that the run uses has characters that cannot be stored; rename "
                "the file, or its folder."
            )
        # Its checksum first: a config.toml without one has lost it.
        checksums = {"config.toml": files.compute_checksum(config.encode())}
        write_bytes(self._inside(CHECKSUMS), files.format_checksums(checksums), sync=True)
        write_bytes(self._inside("config.toml"), config.encode(), sync=True)

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """Return a folder that has a run; another one raises :class:`InputError`."""
        if not (path / "config.toml").is_file():
            if has_nothing_saved(path) and any(path.iterdir()):
                raise InputError(
                    f"{path} has nothing of a run yet: its process ended before config.toml was "
                    f"written; start the run again with {spell_option('out', str(path))}."
                )
            raise not_a_run(path)
        folder = cls(path)
        folder._take_next_config()
        return folder

    def _inside(self, name: str) -> Path:
        # Checked once: it looks at every folder above, and a round uses these paths a dozen times.
        if name not in self._paths:
            self._paths[name] = files.check_inside(self.path, name)
        return self._paths[name]

    def read(self, name: str) -> bytes:
        """Return the content of a file in the run folder that checksums.txt lists.

        Args:
            name: ``config.toml``, or a file of a finished run.

        Raises:
            DamageError: The file is missing, or not what was written.
        """
        if not (self.path / CHECKSUMS).exists() and self._is_older_than_checksums():
            return files.read_bytes(self._inside(name))
        return files.read_listed(self.path, name, files.read_checksums(self.path))

    def _is_older_than_checksums(self) -> bool:
        try:
            manifest = files.parse_json(files.read_bytes(self._latest), self._latest)
        except DamageError:
            # Before its first checkpoint a run has nothing to lose.
            return not self._latest.exists()
        return isinstance(manifest, dict) and "format" not in manifest

    @property
    def config(self) -> str:
        """The text of the run's config.toml."""
        return files.decode_text(self.read("config.toml"), self.path / "config.toml")

    @property
    def options(self) -> dict[str, Any]:
        """The table [run] of the run's config.toml."""
        return files.read_run_options(self.config, self.path / "config.toml")

    @property
    def summary(self) -> dict[str, Any] | None:
        """The content of summary.json; None for a run that is not finished."""
        path = self.path / "summary.json"
        if not path.exists():
            return None
        summary: dict[str, Any] = files.parse_json(self.read("summary.json"), path)
        schemas.check_content(summary, schemas.Summary, path)
        self._check_against_checkpoint(summary, path)
        shared_by = _count_sweep(self.path)
        if shared_by > 1:
            # Older versions do not state it.
            summary.setdefault(SHARED, shared_by)
        return name_old_scores(summary)

    def _check_against_checkpoint(self, summary: Mapping[str, Any], path: Path) -> None:
        """Refuse a summary of a run other than that of the checkpoint that is kept next to it."""
        # A finished run needs no checkpoint: one that is gone or damaged refuses nothing.
        manifest = find_manifest(self._latest)
        if manifest is None:
            return
        done = manifest.content["round"]
        if summary["rounds"] > done:
            reason = f"rounds is {summary['rounds']}, and the checkpoint is of round {done}"
            raise damaged(path, reason)
        if not self._is_of_this_run(manifest):
            raise damaged(path, f"{self._latest} belongs to a run with a different config.toml")

    def _is_of_this_run(self, manifest: Manifest) -> bool:
        """Whether a checkpoint was made under the run's config.toml, or for the one to come."""
        content = manifest.content
        return self._config_checksum() in (content["config"], content.get("config_before"))

    def replace_config(self, config: str) -> None:
        """Go on under another config.toml, for more rounds; a finished run is unfinished then.

        Whenever the process is killed, the folder is a run that can be resumed: the one that it
        was, or the longer one.

        Raises:
            DamageError: The last checkpoint cannot be used. Nothing was changed.
        """
        manifest = None
        lines = self._read_lines()
        if lines or self._latest.exists():
            manifest, _ = self._check_manifest(self._latest, lines)
        before = self._config_checksum()
        after = files.compute_checksum(config.encode())
        try:
            # First of all: with its result, it would be the result of another number of rounds.
            (self.path / "summary.json").unlink(missing_ok=True)
            write_bytes(self._inside(NEXT_CONFIG), config.encode(), sync=True)
            if manifest is not None:
                content = {**manifest.content, "config": after, "config_before": before}
                write_bytes(self._latest, Manifest(content).text, sync=True)
                # It knows nothing of the new config.toml.
                self._previous.unlink(missing_ok=True)
            # From this rename on the new config.toml counts.
            checksums = files.format_checksums({"config.toml": after})
            write_bytes(self._inside(CHECKSUMS), checksums, sync=True)
        except OSError as error:
            raise cannot_write(self.path, error) from None
        self._take_next_config()

    def _take_next_config(self) -> None:
        """Finish :meth:`replace_config`, also where its process was killed."""
        path = self.path / NEXT_CONFIG
        # Somebody who looks at the folder may finish it first.
        with suppress(OSError, DamageError):
            is_due = files.compute_checksum(path.read_bytes()) == self._config_checksum()
            if is_due:
                os.replace(path, self.path / "config.toml")

    # ---- metrics ---------------------------------------------------------------------------------

    @property
    def _metrics_path(self) -> Path:
        return self._inside("metrics.jsonl")

    def _read_lines(self) -> list[bytes]:
        path = self._metrics_path
        if not path.exists():
            return []
        return files.read_bytes(path).splitlines(keepends=True)

    def metrics(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl, one object per exchange so far, after checking them.

        Raises:
            DamageError: They are not what was written.
        """
        lines = self._read_lines()
        if (self.path / "summary.json").exists():
            self.read("metrics.jsonl")
        else:
            manifest = self._read_newest_manifest()
            if manifest is not None:
                self._check_lines(lines, manifest)
        return self._parse_lines(lines)

    def metrics_to_show(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl unchecked, for progress; none if one is unreadable."""
        try:
            return self._parse_lines(self._read_lines())
        except DamageError:
            return []

    def _parse_lines(self, lines: list[bytes]) -> list[dict[str, Any]]:
        parsed = []
        for number, line in enumerate(lines, start=1):
            # A last line without its newline was cut short by a kill, and does not count.
            if not line.endswith(b"\n"):
                continue
            content: dict[str, Any] = files.parse_json(line, self._metrics_path)
            place = self._metrics_path.with_name(f"{METRICS}, line {number},")
            parsed.append(schemas.check_content(content, schemas.MetricsLine, place))
        return parsed

    def _check_lines(self, lines: list[bytes], manifest: Manifest) -> bytes:
        """Return the lines that a manifest counts."""
        committed = b"".join(lines[: manifest.content["lines"]])
        if files.compute_checksum(committed) != manifest.content["metrics"]:
            # Raises if the file is missing.
            files.read_bytes(self._metrics_path)
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

    # ---- writing a checkpoint --------------------------------------------------------------------

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
        """Commit a state, what clients remember and hold, and the metrics so far, all at once.

        Args:
            run: The run.
            state: The method's state.
            attempt: How often the next exchange was abandoned so far.
        """
        checkpoint = self._make_folder(self._checkpoint)
        tensors: Tree = {}
        # Shared by both calls: what occurs in both is written once.
        numbers: dict[int, str] = {}
        self._trees.start()
        plain_state = state_to_json(state, tensors, numbers, self._trees.stand_in)
        plain_known = state_to_json(run.known_state.state(), tensors, numbers)
        self._trees.write(checkpoint)
        lines = self._read_lines()
        stem = f"state.{len(lines):06d}"
        self._commit(
            {
                "round": state.round,
                "config": self._config_checksum(),
                "attempt": attempt,
                "lengths": run.lengths.by_kind,
                "state": plain_state,
                "held": plain_known,
                "tensors": write_named_tree(checkpoint, stem, tensors),
                "trees": self._trees.names,
                **versions_of(run.memory),
                "lines": len(lines),
                "metrics": files.compute_checksum(b"".join(lines)),
            }
        )

    def _make_folder(self, path: Path) -> Path:
        try:
            path.mkdir(exist_ok=True)
        except OSError as error:
            raise cannot_write(path, error) from None
        return path

    def _commit(self, content: Mapping[str, Any]) -> None:
        """Make a manifest the latest one; all files that it names are written."""
        old, previous = self._committed
        if old is None:
            old = find_manifest(self._latest)
            previous = find_manifest(self._previous)
        is_due = time.monotonic() - self._synced_at >= SYNC_EVERY
        new = Manifest({"format": MANIFEST_FORMAT, "synced": is_due, **content})
        if is_due:
            on_disk = [known.files for known in (old, previous) if known and known.synced]
            self._sync(new.files.difference(*on_disk))
        # Until all is written, it is unknown what is there.
        self._committed = (None, None)
        # From this rename on the new checkpoint counts.
        write_bytes(self._latest, new.text, sync=is_due)
        if old is not None and (old.synced or previous is None):
            # After the other, or for a moment both would be the same, and one damage too many.
            previous = old
            write_bytes(self._previous, old.text, sync=True)
            files.sync_path(self._checkpoint)
        # What no manifest names can go now.
        kept = new.files | (previous.files if previous else set())
        self._delete_all_but(kept)
        self._trees.there = kept
        self._committed = (new, previous)

    def _sync(self, names: Iterable[str]) -> None:
        """Force a checkpoint to the disk; ``names`` are its files that are not there yet."""
        checkpoint = self._checkpoint
        for name in sorted(names):
            files.sync_path(checkpoint / name)
        if self._metrics_path.exists():
            files.sync_path(self._metrics_path)
        files.sync_path(checkpoint)
        files.sync_path(self.path)
        self._synced_at = time.monotonic()

    def _delete_all_but(self, names: set[str]) -> None:
        """Delete what a killed process left behind, and what only an older manifest named."""
        checkpoint = self._checkpoint
        left_over = []
        for name in os.listdir(checkpoint) if checkpoint.is_dir() else ():
            if _is_of_checkpoint(name) and name not in names:
                left_over.append(checkpoint / name)
        # Not glob(), which takes as long as to delete ten files.
        left_over += [self.path / name for name in os.listdir(self.path) if name.endswith(PARTIAL)]
        for path in left_over:
            # Something else may have deleted it; and it does no harm.
            with suppress(OSError):
                path.unlink()

    # ---- reading a checkpoint --------------------------------------------------------------------

    def restore(self, run: Run) -> tuple[Any, int]:
        """Take a run back to its last checkpoint, or to the one before if that is damaged.

        What clients remember and hold is restored too; metrics of rounds that do not count are cut
        off.

        Args:
            run: The run; its memory, known masks and recent lengths are set.

        Returns:
            The state, None without a checkpoint; and the attempt at the next exchange.

        Raises:
            DamageError: No checkpoint can be used. Nothing was changed.
        """
        # Links may have been made since they were looked at.
        self._paths.clear()
        manifest = self._settle()
        self._trees.forget()
        # They were read, and are what their names say.
        self._trees.there = set() if manifest is None else manifest.files
        self._committed = (None, None)
        # A run that was used before may hold what was never committed.
        run.memory.files.clear()
        run.lengths.by_kind.clear()
        run.known_state.restore(KnownState().state())
        if manifest is None:
            return None, 0
        content = manifest.content
        try:
            for key in ("memory", "memory_elsewhere"):
                for client, version in content.get(key, {}).items():
                    run.memory.accept(int(client), version)
            tensors = read_named_tree(self._checkpoint, content["tensors"])
            known = state_from_json(content["held"], tensors)
            schemas.check_content(known, schemas.KnownMasks, self._latest)
            run.known_state.restore(known)
            run.lengths.by_kind.update(content["lengths"])
            # Each file once: trees that were one are one again.
            read = cache(partial(read_named_tree, self._checkpoint))
            state = state_from_json(content["state"], tensors, run.initial_state, read)
            if state.round != content["round"]:
                raise damaged(self._latest, f"its state is of round {state.round}")
            return state, int(content["attempt"])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            if isinstance(error, FedgroveError):
                raise
            raise damaged(self._latest, "it does not describe a checkpoint") from error

    def _settle(self) -> Manifest | None:
        """Choose the checkpoint to continue from, and make the folder agree with it.

        Returns:
            The manifest of the chosen one; None at the beginning of a run.
        """
        lines = self._read_lines()
        if not self._latest.exists() and not self._previous.exists():
            # A run that was killed in its first exchange may have logged that one.
            if len(lines) > 1:
                raise DamageError(
                    f"{self._latest} is missing, and {self._metrics_path} is not that of a run "
                    "that has just begun; restore the folder from a copy, or run it again."
                )
            manifest, committed = None, b""
        else:
            manifest, committed = self._choose_checkpoint(lines)
        if b"".join(lines) != committed:
            write_bytes(self._metrics_path, committed)
        known = filter(None, (manifest, find_manifest(self._previous)))
        self._delete_all_but(set().union(*(each.files for each in known)))
        return manifest

    def _choose_checkpoint(self, lines: list[bytes]) -> tuple[Manifest, bytes]:
        """Return the manifest to continue from, and the metrics that it counts."""
        try:
            return self._check_manifest(self._latest, lines)
        except DamageError as error:
            latest_is_damaged = error
        if not self._previous.exists():
            raise DamageError(
                f"{latest_is_damaged} There is no previous checkpoint. Nothing was changed."
            ) from None
        try:
            manifest, committed = self._check_manifest(self._previous, lines)
        except DamageError as error:
            reason = f"The previous checkpoint cannot be used either: {error}"
            if str(error) == str(latest_is_damaged):
                reason = "The previous checkpoint needs that file too."
            raise DamageError(f"{latest_is_damaged} {reason} Nothing was changed.") from None
        warnings.warn(
            f"{latest_is_damaged} The run continues from the previous checkpoint, of round "
            f"{manifest.content['round']}.",
            FolderWarning,
            stacklevel=2,
        )
        # First this, then the metrics: a kill in between leaves lines that do not count.
        write_bytes(self._latest, manifest.text, sync=True)
        return manifest, committed

    def _check_manifest(self, path: Path, lines: list[bytes]) -> tuple[Manifest, bytes]:
        """Read a manifest; all its files, and the metrics that it counts, are what was written."""
        manifest = read_manifest(path)
        if not self._is_of_this_run(manifest):
            raise damaged(
                path, f"it belongs to a run with a different config.toml, not to {self.path}"
            )
        for name in sorted(manifest.files):
            files.read_named(self._checkpoint, name)
        return manifest, self._check_lines(lines, manifest)

    def rounds_saved(self) -> int:
        """Return the number of rounds in the last checkpoint that can be read."""
        for path in (self._latest, self._previous):
            manifest = find_manifest(path)
            if manifest is not None:
                return int(manifest.content["round"])
        return 0

    def check_format(self) -> None:
        """Refuse checkpoints of another version of the run folder."""
        for path in (self._latest, self._previous):
            # Damage is reported by restore().
            with suppress(DamageError):
                read_manifest(path)

    def check(self) -> None:
        """Refuse an unfinished run of which no checkpoint can be read."""
        self._read_newest_manifest()

    def _read_newest_manifest(self) -> Manifest | None:
        """Return the last manifest that can be read; None before the first checkpoint."""
        if not self._latest.exists() and not self._previous.exists():
            return None
        try:
            return read_manifest(self._latest)
        except DamageError as error:
            previous = find_manifest(self._previous)
            if previous is None:
                raise
            warnings.warn(f"{error} The previous checkpoint is used.", FolderWarning, stacklevel=2)
            return previous

    # ---- results ---------------------------------------------------------------------------------

    def save_models(self, run: Run, delivery: Delivery) -> None:
        """Write the models of a finished run: each client's own, or the delivered one, once.

        Files have the frozen parameters of the net too, so that each is a whole model. A model that
        several clients are delivered is kept next to their own. ``preparation.json`` says how raw
        inputs become what the models take, and what their outputs mean (:mod:`.model`).

        Args:
            run: The run.
            delivery: What the clients whose models are kept are delivered.
        """
        folder = self._make_folder(self._inside("models"))
        index: dict[str, str] = {}
        self._model_checksums = {}
        constants = run.net.constants()

        def write(name: str, tree: Mapping[str, Tensor]) -> None:
            # Even over a file that is there: a process that was killed may have left it.
            if f"models/{name}" not in self._model_checksums:
                is_model = tree.keys() == run.net.layout.shapes.keys()
                whole = {**constants, **tree} if is_model else tree
                self._write_model(name, encode_tree(whole))

        groups = delivery.group_clients(run.net.layout.shapes)
        group_files = {group: f"group-{group:03d}.safetensors" for group in groups.values()}
        for client in run.served:
            packet = delivery.model(client)
            own = run.memory.read(client, run.memory.files.get(client)).get("own")
            if client in groups and packet is not None:
                write(group_files[groups[client]], packet.values)
            if own is not None:
                name = f"client-{client:05d}.safetensors"
                write(name, own)
            elif client in groups:
                name = group_files[groups[client]]
            elif packet is not None:
                name = f"client-{client:05d}.safetensors"
                write(name, packet.values)
            else:
                continue
            index[str(client)] = name
        self._write_model("index.json", json.dumps(index, indent=1).encode())
        about = describe_clients(run, groups, group_files)
        self._write_model(PREPARATION_FILE, json.dumps(about, indent=1).encode())
        for path in folder.glob(f"*{PARTIAL}"):
            path.unlink()

    def models(self) -> dict[int, str]:
        """Return the file name of each client's model, of a finished run."""
        path = self.path / "models" / "index.json"
        if not path.is_file():
            raise InputError(
                f"{self.path} has no models/index.json, so its models cannot be matched to "
                "clients; run it again."
            )
        index: dict[str, str] = files.parse_json(self.read("models/index.json"), path)
        schemas.check_content(index, schemas.Index, path)
        return {int(client): name for client, name in index.items()}

    def preparation(self) -> dict[str, Any] | None:
        """Return models/preparation.json; None for a run of a version that did not write it."""
        name = f"models/{PREPARATION_FILE}"
        listed = files.read_checksums(self.path) if (self.path / CHECKSUMS).exists() else {}
        if name not in listed and not (self.path / name).exists():
            return None
        about: dict[str, Any] = files.parse_json(self.read(name), self.path / name)
        schemas.check_content(about, schemas.PreparationContent, self.path / name)
        if about["format"] != PREPARATION_FORMAT:
            raise damaged(self.path / name, "it does not describe models of this version")
        return about

    def tree(self, name: str) -> Tree:
        """Return the weights in a file of the run's ``models/``, in float32."""
        content = self.read(f"models/{name}")
        tree = decode_tree(content, self.path / "models" / name)
        return {leaf: value.float() for leaf, value in tree.items()}

    def _write_model(self, name: str, data: bytes) -> None:
        write_bytes(self._inside(f"models/{name}"), data, sync=True)
        self._model_checksums[f"models/{name}"] = files.compute_checksum(data)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json, and the checksums of all results before it."""
        text = (json.dumps(summary, indent=1) + "\n").encode()
        checksums = {
            "config.toml": self._config_checksum(),
            "metrics.jsonl": files.compute_checksum(b"".join(self._read_lines())),
            **self._model_checksums,
            "summary.json": files.compute_checksum(text),
        }
        # Before the summary, from which on they are checked.
        write_bytes(self._inside(CHECKSUMS), files.format_checksums(checksums), sync=True)
        write_bytes(self._inside("summary.json"), text, sync=True)
        files.sync_path(self.path)

    def _config_checksum(self) -> str:
        """Return the checksum of config.toml from when the run began; it may be changed since."""
        try:
            return files.read_checksums(self.path)["config.toml"]
        except (DamageError, KeyError):
            return files.compute_checksum(files.read_bytes(self._inside("config.toml")))


def _count_sweep(path: Path) -> int:
    """Return the number of runs of the sweep that a run folder belongs to; 1: of none."""
    try:
        members = json.loads((path.parent / "sweep.json").read_bytes())["members"]
    except (OSError, ValueError, KeyError, TypeError):
        return 1
    return len(members) if isinstance(members, dict) and path.name in members else 1
