"""Send the numbers of runs to TensorBoard or MLflow: every number of metrics.jsonl, by round.

Both are extras. The numbers are read from run folders, so it does not matter whether a run trains,
was finished long ago, or belongs to a sweep.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from ..errors import InputError, unknown

TRACKER_MODULES = {"tensorboard": "tensorboard", "mlflow": "mlflow"}
"""The trackers, and the module that each needs."""


class Tracker(Protocol):
    """Logs lines of metrics.jsonl."""

    place: str
    """Where the numbers are, and how to view them."""

    def log(self, path: str, line: Mapping[str, Any]) -> None:
        """Log a line of the run at ``path`` to TensorBoard or MLflow."""

    def close(self) -> None:
        """Write what is left to TensorBoard or MLflow."""


def make_tracker(name: str, place: Path) -> Tracker:
    """Return a tracker that logs to TensorBoard or MLflow in ``place``.

    Args:
        name: tensorboard or mlflow.
        place: The folder; the tracker makes a folder or file of its name there.

    Raises:
        InputError: The name is unknown, or the package is not installed.
    """
    if name not in TRACKER_MODULES:
        raise unknown("tracker", name, list(TRACKER_MODULES))
    if find_spec(TRACKER_MODULES[name]) is None:
        raise InputError(
            f"--track {name} was given and {name} is not installed; "
            f"get it with: pip install 'fedgrove[track]'"
        )
    if name == "tensorboard":
        return TensorBoard(place / "tensorboard")
    return MLflow(place / "mlflow.db")


def store_address(file: Path) -> str:
    """Return the address of MLflow's store in a file; MLflow takes no plain folders any more."""
    return f"sqlite:///{file.resolve()}"


def find_numbers(line: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers to log of a line by name; nested ones as ``outer/inner``.

    >>> list(find_numbers({"round": 3, "counts": True, "accuracy_mean": 0.5, "slowest": {"up": 2}}))
    [('accuracy_mean', 0.5), ('slowest/up', 2.0)]
    """
    for name, value in line.items():
        if name == "round" and not prefix:
            continue
        if isinstance(value, Mapping):
            yield from find_numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{name}", float(value)


class TensorBoard:
    """Writes event files, a folder for each run; a run that is read again gets new ones."""

    def __init__(self, folder: Path) -> None:
        self.place = f"{folder}; view it with: tensorboard --logdir {folder}"
        self._folder = folder
        self._writers: dict[str, Any] = {}

    def log(self, path: str, line: Mapping[str, Any]) -> None:
        """Write the numbers of a line to TensorBoard's event files."""
        if path not in self._writers:
            from torch.utils.tensorboard import SummaryWriter

            # purge_step: what was written when the run was read before does not count any more.
            writer: Any = SummaryWriter(str(self._folder / _name_run(path)), purge_step=0)
            self._writers[path] = writer
        for name, value in find_numbers(line):
            self._writers[path].add_scalar(name, value, line["round"])

    def close(self) -> None:
        """Write what is left to TensorBoard's event files."""
        for writer in self._writers.values():
            writer.close()


class MLflow:
    """Writes an MLflow store in a file; a run that is read again is a new run there."""

    def __init__(self, file: Path) -> None:
        import mlflow

        self.place = f"{file}; view it with: mlflow ui --backend-store-uri sqlite:///{file}"
        self._client = mlflow.MlflowClient(tracking_uri=store_address(file))
        self._runs: dict[str, str] = {}

    def log(self, path: str, line: Mapping[str, Any]) -> None:
        """Log the numbers of a line to MLflow."""
        if path not in self._runs:
            run = self._client.create_run(experiment_id="0", run_name=_name_run(path))
            self._runs[path] = run.info.run_id
        for name, value in find_numbers(line):
            self._client.log_metric(self._runs[path], name, value, step=line["round"])

    def close(self) -> None:
        """Mark the runs as ended in MLflow."""
        for run in self._runs.values():
            self._client.set_terminated(run)


def _name_run(path: str) -> str:
    """Return a run's folder with its parent: runs of several sweeps may have one name."""
    return "-".join(Path(path).resolve().parts[-2:])
