"""A sweep: many runs in lockstep, each in a run folder of its own under one folder.

::

    sweep.json        the grid, and how each run stands: done, failed (and why) or unfinished
    NAME/             a run folder (see :mod:`fedgrove.runs.folder`), the same as if the run had been alone
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .. import engines
from ..api import Experiment, Result
from ..core import Engine
from ..data import Federation
from ..errors import InputError, check
from ..runs.folder import RunFolder
from ..runs.lockstep import Member, Watch, together
from ..runs.rounds import Run
from ..runs.store import Memory, write_bytes
from .toml import from_toml, same, to_toml

FILE = "sweep.json"
DEALT = ("data", "partition", "scenario", "split", "clients", "profile", "standardise", "seed")
"""The words that decide a federation: runs that agree in them share it."""


@dataclass(frozen=True)
class Failure:
    """A run that could not be finished, and why; its folder holds what was saved."""

    why: str
    folder: RunFolder


@dataclass(frozen=True)
class Planned:
    """An experiment with nothing left open, and its run, which has no place of its own yet."""

    experiment: Experiment
    run: Run


def sweep(
    experiments: Mapping[str, Experiment],
    out: str | Path,
    *,
    engine: str | Engine = "auto",
    data_dir: str | Path | None = None,
    watch: Watch | None = None,
    grid: Mapping[str, Any] | None = None,
) -> list[Result | Failure]:
    """Run all experiments in lockstep, each in ``out/NAME``; the results in their order.

    Each result is the one the run would give alone. A run that fails leaves the others alone. On a folder that holds
    the same sweep, finished runs are taken as they are and all others go on from their last checkpoints. ``watch`` is
    called with every line of metrics, its run's name under "run". ``grid``, what was asked for, is kept in sweep.json.
    """
    with planned(experiments, data_dir) as plans:
        chosen = engines.choose(engine) if isinstance(engine, str) else engine
        folders = _folders(Path(out), {name: to_toml(p.experiment) for name, p in plans.items()})
        try:
            return _finish(
                Path(out), plans, folders, chosen, watch or (lambda line: None), grid or {}
            )
        finally:
            if isinstance(engine, str):
                chosen.close()


def resume(
    out: str | Path,
    *,
    engine: str | Engine = "auto",
    data_dir: str | Path | None = None,
    watch: Watch | None = None,
) -> list[Result | Failure]:
    """Go on with an interrupted sweep; a run that had failed tries its last exchange again."""
    try:
        found = experiments_of(out)
    except InputError as error:
        raise InputError(
            f"{error} Or call fedgrove.config.sweep.sweep again with the same experiments."
        ) from None
    return sweep(found, out, engine=engine, data_dir=data_dir, watch=watch, grid=read(out)["grid"])


def read(out: str | Path) -> dict[str, Any]:
    """What sweep.json says: ``grid``, and ``members``: the state of each run by name."""
    path = Path(out) / FILE
    if not path.is_file():
        raise InputError(
            f"{out} holds no sweep: it has no {FILE}. `fedgrove sweep --out DIR` makes one."
        )
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def experiments_of(out: str | Path) -> dict[str, Experiment]:
    """The experiments of a sweep, rebuilt from its run folders."""
    return {
        name: from_toml(RunFolder.open(Path(out) / name).config) for name in read(out)["members"]
    }


@contextmanager
def planned(
    experiments: Mapping[str, Experiment], data_dir: str | Path | None = None
) -> Iterator[dict[str, Planned]]:
    """Everything built and checked, nothing written; runs on the same data share one federation."""
    check(bool(experiments), "a sweep", {}, "one run or more")
    for name in experiments:
        check(
            name not in ("", ".", "..", FILE) and Path(name).name == name,
            "a run's name",
            name,
            "a plain file name",
        )
    dealt: dict[Any, Federation] = {}
    with tempfile.TemporaryDirectory() as scratch:
        yield {
            name: _plan(e, dealt, data_dir, Memory(Path(scratch)))
            for name, e in experiments.items()
        }


def _plan(
    asked: Experiment, dealt: dict[Any, Federation], data_dir: str | Path | None, memory: Memory
) -> Planned:
    if isinstance(asked.data, Federation):
        run = asked.build(asked.data, memory)
    else:
        key = tuple(getattr(asked, word) for word in DEALT)
        if key not in dealt:
            dealt[key] = asked.federation(data_dir)
        run = asked.build(dealt[key], memory)
    return Planned(asked.resolved(run), run)


# ---- folders -------------------------------------------------------------------------------------------------------


def _folders(out: Path, configs: Mapping[str, str]) -> dict[str, RunFolder]:
    """A folder for every run; one that is there must hold the same run. All is checked before anything is made."""
    told = set(read(out)["members"]) if (out / FILE).is_file() else set(configs)
    # A kill while the folders were made leaves some of them, and no sweep.json.
    there = (
        {path.name for path in out.iterdir()} - {FILE, FILE + ".part"} if out.is_dir() else set()
    )
    same = told == set(configs) and there <= told and not (out.exists() and not out.is_dir())
    if not same or not all(_is(out / name, configs[name]) for name in there):
        held = any((out / file).is_file() for file in (FILE, "config.toml"))
        way = f", or continue what it holds with: fedgrove resume {out}" if held else "."
        raise InputError(
            f"{out} holds another sweep or other files, and nothing is overwritten. Give another --out{way}"
        )
    return {name: _folder(out / name, config) for name, config in configs.items()}


def _is(path: Path, config: str) -> bool:
    """Whether a folder holds this run, or nothing yet."""
    if (path / "config.toml").is_file():
        return same(RunFolder(path).config, config)
    return path.is_dir() and {p.name for p in path.iterdir()} <= {"config.toml.part"}


def _folder(path: Path, config: str) -> RunFolder:
    if not path.exists():
        return RunFolder.create(path, config)
    if not (path / "config.toml").is_file():
        write_bytes(path / "config.toml", config.encode())
    return RunFolder(path)


# ---- running -------------------------------------------------------------------------------------------------------


def _finish(
    out: Path,
    plans: Mapping[str, Planned],
    folders: Mapping[str, RunFolder],
    engine: Engine,
    watch: Watch,
    grid: Mapping[str, Any],
) -> list[Result | Failure]:
    ends = {
        n: Result(summary, folder)
        for n, folder in folders.items()
        if (summary := folder.summary) is not None
    }
    found: dict[str, Result | Failure] = dict(ends)
    _write(out, grid, folders, found)
    members = [_member(n, p, folders[n], watch) for n, p in plans.items() if n not in found]
    try:
        for member in together(members, engine):
            found[member.name] = _end(member)
            _write(out, grid, folders, found)
    except KeyboardInterrupt:
        done = sum(isinstance(end, Result) for end in found.values())
        said = f"{done} of {len(folders)} runs are finished; go on with: fedgrove resume {out}"
        raise KeyboardInterrupt(f"Interrupted. {said}") from None
    return [found[name] for name in folders]


def _member(name: str, plan: Planned, folder: RunFolder, watch: Watch) -> Member:
    run = replace(plan.run, memory=folder.memory())
    return Member(
        run, folder, plan.experiment.evaluate, lambda line: watch({"run": name, **line}), name
    )


def _end(member: Member) -> Result | Failure:
    if member.summary is not None:
        return Result(member.summary, member.folder)
    return Failure(" ".join(str(member.error).split()), member.folder)


def _write(
    out: Path,
    grid: Mapping[str, Any],
    folders: Mapping[str, RunFolder],
    found: Mapping[str, Result | Failure],
) -> None:
    members = {name: state(found.get(name)) for name in folders}
    write_bytes(
        out / FILE, (json.dumps({"grid": grid, "members": members}, indent=1) + "\n").encode()
    )


def state(end: Result | Failure | None) -> dict[str, str]:
    """How a run stands, as sweep.json says it."""
    if isinstance(end, Failure):
        return {"state": "failed", "why": end.why}
    return {"state": "unfinished" if end is None else "done"}
