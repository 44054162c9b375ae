"""A run folder: never overwritten, never half-written.

::

    config.toml       the resolved configuration: rebuilds the run by type name
    metrics.jsonl     one object per exchange
    checkpoint/       the last folded state, and what clients remember
    models/           *.safetensors, and index.json: which client uses which
    summary.json      written last
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..trees import Tree
from .run import Run
from .store import freeze, read_tree, thaw, write_bytes, write_tree

CHECKPOINT = "checkpoint"
"""The folder of states and of what clients remember, within a run folder."""


class RunFolder:
    """The files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path

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
        write_bytes(path / "config.toml", config.encode())
        return cls(path)

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """A folder that holds a run."""
        if not (path / "config.toml").is_file():
            what = "has no config.toml" if path.is_dir() else "does not exist"
            raise InputError(
                f"{path} is not a run folder: it {what}. `fedgrove run --out DIR` makes one."
            )
        return cls(path)

    @property
    def config(self) -> str:
        """The text of config.toml."""
        return (self.path / "config.toml").read_text()

    @property
    def summary(self) -> dict[str, Any] | None:
        """The result, once there is one."""
        path = self.path / "summary.json"
        if not path.is_file():
            return None
        figures: dict[str, Any] = json.loads(path.read_text())
        return figures

    def metrics(self) -> list[dict[str, Any]]:
        """One object per exchange so far."""
        # A last line without its newline was cut short by a kill, and does not count.
        return [json.loads(line) for line in self._lines() if line.endswith(b"\n")]

    def _lines(self) -> list[bytes]:
        path = self.path / "metrics.jsonl"
        if not path.is_file():
            return []
        return path.read_bytes().splitlines(keepends=True)

    def log(self, line: Mapping[str, Any]) -> None:
        """Add a line to metrics.jsonl; it counts once the next checkpoint is written."""
        with (self.path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    # ---- checkpoints -----------------------------------------------------------------------------

    @property
    def _checkpoint(self) -> Path:
        return self.path / CHECKPOINT

    @property
    def _manifest_path(self) -> Path:
        return self._checkpoint / "latest.json"

    def save(self, run: Run, state: Any, attempt: int = 0) -> None:
        """Commit a state, what clients remember and hold, and the metrics so far, all at once."""
        tensors: Tree = {}
        # Shared by both calls: what occurs in both is written once.
        numbers: dict[int, str] = {}
        frozen_state = freeze(state, tensors, numbers)
        frozen_held = freeze(run.held.state(), tensors, numbers)
        lines = len(self._lines())
        tensor_file = f"state.{lines:06d}.safetensors"
        self._checkpoint.mkdir(exist_ok=True)
        write_tree(self._checkpoint / tensor_file, tensors)
        manifest = {
            "round": state.round,
            "attempt": attempt,
            "lengths": run.lengths.by_kind,
            "state": frozen_state,
            "held": frozen_held,
            "tensors": tensor_file,
            "memory": run.memory.files,
            "lines": lines,
        }
        # From this rename on the new checkpoint counts; what only the old one named can go.
        write_bytes(self._manifest_path, json.dumps(manifest).encode())
        run.memory.sweep()
        for path in self._checkpoint.glob("state.*"):
            if path.name != tensor_file:
                path.unlink()

    def restore(self, run: Run) -> tuple[Any, int]:
        """Take the run back to its last checkpoint: its state and the attempt at the next exchange.

        The state is None if there is no checkpoint.

        What clients remember and hold is restored too; metrics of rounds that did not count are
        cut off.
        """
        manifest = self._manifest()
        committed_lines = self._lines()[: manifest.get("lines", 0)]
        write_bytes(self.path / "metrics.jsonl", b"".join(committed_lines))
        if not manifest:
            return None, 0
        for client, file in manifest["memory"].items():
            run.memory.accept(int(client), file)
        tensors = read_tree(self._checkpoint / manifest["tensors"])
        run.held.restore(thaw(manifest["held"], tensors))
        run.lengths.by_kind.update(manifest["lengths"])
        state = thaw(manifest["state"], tensors, like=run.initial_state)
        return state, manifest["attempt"]

    def rounds_saved(self) -> int:
        """How many rounds the last checkpoint holds."""
        return int(self._manifest().get("round", 0))

    def _manifest(self) -> dict[str, Any]:
        if not self._manifest_path.is_file():
            return {}
        manifest: dict[str, Any] = json.loads(self._manifest_path.read_text())
        return manifest

    # ---- results ---------------------------------------------------------------------------------

    def save_models(self, run: Run, state: Any) -> None:
        """Each client's own model where it has one, otherwise the delivered model, written once."""
        folder = self.path / "models"
        folder.mkdir(exist_ok=True)
        index: dict[str, str] = {}
        shared: dict[int, str] = {}
        # All at once, so that each is alive as long as its id is a key.
        delivered = {k: run.method.deliver(state, k).get("model") for k in run.infos}
        for client, packet in delivered.items():
            own = run.memory.read(client, run.memory.files.get(client)).get("own")
            if own is not None:
                tree = own
                name = f"client-{client:05d}.safetensors"
            elif packet is not None:
                tree = packet.values
                name = shared.setdefault(id(tree), f"group-{len(shared):03d}.safetensors")
            else:
                continue
            index[str(client)] = name
            if not (folder / name).exists():
                write_tree(folder / name, tree)
        write_bytes(folder / "index.json", json.dumps(index, indent=1).encode())

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write the result."""
        text = json.dumps(summary, indent=1) + "\n"
        write_bytes(self.path / "summary.json", text.encode())


def exists(path: Path) -> InputError:
    """The refusal to write into a folder that is there."""
    return InputError(
        f"the run folder {path} exists; runs are never overwritten. "
        f"Give another --out, or resume it with: fedgrove resume {path}"
    )


def fresh_name(root: Path, stem: str) -> Path:
    """A folder name under ``root`` that is not taken: ``stem``, ``stem-2``, ``stem-3``, ..."""
    path = root / stem
    n = 2
    while path.exists():
        path = root / f"{stem}-{n}"
        n += 1
    return path
