"""Small things for every day: trying a run out, and finding the one to resume."""

from __future__ import annotations

import json as jsonlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError

if TYPE_CHECKING:
    from ..config.experiment import Experiment, Federations

SMOKED = "ca-afp"
"""What is tried out where no method is named: it has the most stages."""


def try_out(experiment: Experiment, federations: Federations, words: Mapping[str, Any]) -> None:
    """Go through every stage once on a few examples, and say so; nothing is kept without --out."""
    from .. import api, methods
    from ..config.smoke import smoke
    from ..data import Federation
    from ..report.terminal import print_pairs
    from ..runs.files import read_checksums

    name = methods.name_of(experiment.method)
    begun = time.monotonic()
    small = smoke(experiment, federations)
    planned_at = time.monotonic()
    ends: list[float] = []

    def note(line: Mapping[str, Any]) -> None:
        ends.append(time.monotonic())

    result = api.train(
        small,
        words["out"],
        federations=federations,
        engine=words["engine"],
        device=words["device"],
        precision=words["precision"],
        timeout=words["timeout"],
        watch=note,
    )
    trained_at = time.monotonic()
    # Every file, compared with its checksum: what was saved can be read.
    for file in read_checksums(result.folder.path):
        result.folder.read(file)
    seconds = {
        "data, net, method": planned_at - begun,
        "first round": ends[0] - planned_at,
        "other rounds": ends[-1] - ends[0],
        "fine-tuning, scoring, saving": trained_at - ends[-1],
        "reading back": time.monotonic() - trained_at,
    }
    if words["json"]:
        rounded = {stage: round(spent, 3) for stage, spent in seconds.items()}
        print(jsonlib.dumps({"method": name, "works": True, "seconds": rounded}, indent=1))
        return
    print_pairs([(stage, f"{spent:.1f} s") for stage, spent in seconds.items()])
    clients = len(small.data.clients) if isinstance(small.data, Federation) else 0
    kept = "nothing was kept" if words["out"] is None else f"in {words['out']}"
    print(f"{name} works: {small.rounds} rounds, {clients} clients, {kept}.")


def newest_unfinished(place: Path) -> Path:
    """The run or sweep under a folder that was written to last and is not finished.

    One that another process trains in just now is left out.
    """
    unfinished = [path for path in runs_in(place) if not _is_finished(path)]
    free = [path for path in unfinished if _is_free(path)]
    if not free:
        busy = f" ({len(unfinished)} being trained just now)" if unfinished else ""
        raise InputError(
            f"there is no unfinished run under {place}{busy}; name the folder of one: "
            "fedgrove resume RUN"
        )
    return max(free, key=last_written)


def runs_in(place: Path) -> list[Path]:
    """The run folders and sweeps in a folder."""
    found = []
    for path in sorted(place.glob("*")):
        if (path / "config.toml").is_file() or (path / "sweep.json").is_file():
            found.append(path)
    return found


def _is_finished(path: Path) -> bool:
    if (path / "sweep.json").is_file():
        return all(_is_finished(member.parent) for member in path.glob("*/config.toml"))
    return (path / "summary.json").is_file()


def _is_free(path: Path) -> bool:
    from ..runs.lock import check_free

    try:
        check_free(path)
    except InputError:
        return False
    return True


def last_written(path: Path) -> float:
    """When anything in a folder was last written."""
    times = [path.stat().st_mtime]
    for pattern in ("*", "*/*"):
        times.extend(each.stat().st_mtime for each in path.glob(pattern))
    return max(times)
