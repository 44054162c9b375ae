"""A run folder: never overwritten, never half-written.

::

    config.toml       what was asked, resolved: rebuilds the run by type name
    metrics.jsonl     one object per round
    checkpoint/       the last folded state, and what clients remember
    models/           *.safetensors, and index.json: which client uses which
    summary.json      written last
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import InputError
from .rounds import Run
from .store import Memory, freeze, read_tree, thaw, write_bytes, write_tree
from ..trees import Tree


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
            raise InputError(
                f"the run folder {path} exists; runs are never overwritten. "
                f"Give another --out, or continue it with: fedgrove resume {path}"
            ) from None
        except OSError as error:
            raise InputError(f"the run folder {path} cannot be made: {error.strerror or error}.") from None
        write_bytes(path / "config.toml", config.encode())
        return cls(path)

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """A folder that holds a run."""
        if not (path / "config.toml").is_file():
            what = "has no config.toml" if path.is_dir() else "does not exist"
            raise InputError(f"{path} is not a run folder: it {what}. `fedgrove run --out DIR` makes one.")
        return cls(path)

    @property
    def config(self) -> str:
        """The text of config.toml."""
        return (self.path / "config.toml").read_text()

    @property
    def summary(self) -> dict[str, Any] | None:
        """The result, once there is one."""
        path = self.path / "summary.json"
        return json.loads(path.read_text()) if path.is_file() else None

    def metrics(self) -> list[dict[str, Any]]:
        """One object per exchange so far; a line that a killed run left half-written does not count."""
        return [json.loads(line) for line in self._lines() if line.endswith(b"\n")]

    def _lines(self) -> list[bytes]:
        path = self.path / "metrics.jsonl"
        return path.read_bytes().splitlines(keepends=True) if path.is_file() else []

    def log(self, line: Mapping[str, Any]) -> None:
        """Add a line to metrics.jsonl; it counts once the next checkpoint is written."""
        with (self.path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    @property
    def _latest(self) -> Path:
        return self.path / "checkpoint" / "latest.json"

    def memory(self) -> Memory:
        """What clients remembered at the last checkpoint."""
        files = {int(k): v for k, v in self._manifest().get("memory", {}).items()}
        return Memory(self.path / "checkpoint", files)

    def save(self, run: Run, state: Any) -> None:
        """Commit a state, what clients remember and hold, and the metrics so far, all at once."""
        tensors: Tree = {}
        numbers: dict[int, str] = {}
        frozen, held = (freeze(value, tensors, numbers) for value in (state, run.held.masks))
        memory = run.memory
        lines = len(self._lines())
        name = f"state.{lines:06d}.safetensors"
        write_tree(self._latest.parent / name, tensors)
        manifest = {
            "round": state.round,
            "state": frozen,
            "held": held,
            "tensors": name,
            "memory": memory.files,
            "lines": lines,
        }
        write_bytes(self._latest, json.dumps(manifest).encode())
        memory.sweep()
        for path in self._latest.parent.glob("state.*"):
            if path.name != name:
                path.unlink()

    def restore(self, run: Run) -> Any:
        """The state of the last checkpoint, or None; metrics of rounds that did not count are cut off."""
        manifest = self._manifest()
        write_bytes(self.path / "metrics.jsonl", b"".join(self._lines()[: manifest.get("lines", 0)]))
        if not manifest:
            return None
        tensors = read_tree(self._latest.parent / manifest["tensors"])
        run.held.masks.update(thaw(manifest["held"], tensors))
        return thaw(manifest["state"], tensors, run.method.init(run.start))

    def rounds_saved(self) -> int:
        """How many rounds the last checkpoint holds."""
        return int(self._manifest().get("round", 0))

    def _manifest(self) -> dict[str, Any]:
        return json.loads(self._latest.read_text()) if self._latest.is_file() else {}

    # ---- results -------------------------------------------------------------------------------------------------

    def save_models(self, run: Run, state: Any) -> None:
        """Each client's own model where it has one, else the delivered model, written once."""
        folder = self.path / "models"
        folder.mkdir(exist_ok=True)
        index: dict[str, str] = {}
        shared: dict[int, str] = {}
        # All at once, so that each is alive as long as its identity is a key.
        delivered = {k: run.method.deliver(state, k).get("model") for k in run.infos}
        for client, packet in delivered.items():
            own = run.memory.read(run.memory.files.get(client)).get("own")
            if own is None and packet is not None:
                tree, name = packet.values, shared.setdefault(id(packet.values), f"group-{len(shared):03d}.safetensors")
            elif own is not None:
                tree, name = own, f"client-{client:05d}.safetensors"
            else:
                continue
            index[str(client)] = name
            if not (folder / name).exists():
                write_tree(folder / name, tree)
        write_bytes(folder / "index.json", json.dumps(index, indent=1).encode())

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write the result."""
        write_bytes(self.path / "summary.json", (json.dumps(summary, indent=1) + "\n").encode())


def fresh_name(root: Path, stem: str) -> Path:
    """A folder name under ``root`` that nobody has: ``stem``, ``stem-2``, ``stem-3`` ..."""
    return next(path for path in _candidates(root, stem) if not path.exists())


def _candidates(root: Path, stem: str) -> Iterator[Path]:
    yield root / stem
    n = 2
    while True:
        yield root / f"{stem}-{n}"
        n += 1
