"""Figures of runs for TensorBoard and MLflow: every number of metrics.jsonl, by round.

Both are extras. They are fed from run folders, so a run that trains, one that was finished long ago
and a whole sweep are all the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from ..errors import InputError, unknown

NEEDS = {"tensorboard": "tensorboard", "mlflow": "mlflow"}
"""What can be fed, and the module that it needs."""


class Tracker(Protocol):
    """Takes lines of metrics.jsonl."""

    place: str
    """Where the figures are, for people."""

    def take(self, path: str, line: Mapping[str, Any]) -> None:
        """Take a line of the run at ``path``."""

    def close(self) -> None:
        """Write what is left."""


def make_tracker(name: str, place: Path) -> Tracker:
    """TensorBoard or MLflow, by name; figures go into a folder or file called so at ``place``."""
    if name not in NEEDS:
        raise unknown("tracker", name, list(NEEDS))
    if find_spec(NEEDS[name]) is None:
        raise InputError(
            f"--track {name} was given and {name} is not installed; "
            f"get it with: pip install 'fedgrove[track]'"
        )
    if name == "tensorboard":
        return TensorBoard(place / "tensorboard")
    return MLflow(place / "mlflow.db")


def store(file: Path) -> str:
    """The address of MLflow's store in a file; it takes no plain folders any more."""
    return f"sqlite:///{file.resolve()}"


def numbers_of(line: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a line by name, those inside other objects as ``outer/inner``.

    >>> list(numbers_of({"round": 3, "counts": True, "accuracy_mean": 0.5, "slowest": {"up": 2}}))
    [('accuracy_mean', 0.5), ('slowest/up', 2.0)]
    """
    for name, value in line.items():
        if name == "round" and not prefix:
            continue
        if isinstance(value, Mapping):
            yield from numbers_of(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{name}", float(value)


class TensorBoard:
    """Event files, a folder for each run; a run that is read again gets new ones."""

    def __init__(self, folder: Path) -> None:
        self.place = f"{folder}; look at it with: tensorboard --logdir {folder}"
        self._folder = folder
        self._writers: dict[str, Any] = {}

    def take(self, path: str, line: Mapping[str, Any]) -> None:
        """Write the numbers of a line."""
        if path not in self._writers:
            from torch.utils.tensorboard import SummaryWriter

            # purge_step: what an earlier reading of the same run wrote does not count any more.
            writer: Any = SummaryWriter(str(self._folder / _name(path)), purge_step=0)
            self._writers[path] = writer
        for name, value in numbers_of(line):
            self._writers[path].add_scalar(name, value, line["round"])

    def close(self) -> None:
        """Write what is left."""
        for writer in self._writers.values():
            writer.close()


class MLflow:
    """A store of MLflow in a file, one of its runs for each of ours; read again, a run is new."""

    def __init__(self, file: Path) -> None:
        import mlflow

        self.place = f"{file}; look at it with: mlflow ui --backend-store-uri sqlite:///{file}"
        self._client = mlflow.MlflowClient(tracking_uri=store(file))
        self._runs: dict[str, str] = {}

    def take(self, path: str, line: Mapping[str, Any]) -> None:
        """Log the numbers of a line."""
        if path not in self._runs:
            run = self._client.create_run(experiment_id="0", run_name=_name(path))
            self._runs[path] = run.info.run_id
        for name, value in numbers_of(line):
            self._client.log_metric(self._runs[path], name, value, step=line["round"])

    def close(self) -> None:
        """Say that the runs have ended."""
        for run in self._runs.values():
            self._client.set_terminated(run)


def _name(path: str) -> str:
    """A run's folder and the one it is in: runs of several sweeps may be called alike."""
    return "-".join(Path(path).resolve().parts[-2:])
