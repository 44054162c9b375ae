"""The same verbs as the command line, in Python: ``fedgrove.run(...)``, ``fedgrove.resume(...)``."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from torch import nn

from . import engines, methods
from .core import AnyMethod, Engine
from .data import Federation, load
from .errors import EngineError, FedgroveError, InputError, check, unknown
from .runs.folder import RunFolder
from .runs.lockstep import Member, Watch, together
from .runs.rounds import Run, build
from .runs.store import Memory


@dataclass(frozen=True)
class Experiment:
    """What a person asks for, in the words of the command line; None takes the data set's own default."""

    method: AnyMethod
    data: str | Federation = "digits"
    net: str | nn.Module | None = None
    partition: str | None = None
    scenario: str | None = None
    split: str | None = None
    clients: int | None = None
    cohort: int | None = None
    rounds: int | None = None
    finetune: tuple[int, ...] = (0,)
    profile: str | None = None
    standardise: bool = True
    seed: int = 0
    evaluate: int = 1
    """Score all clients every so many rounds; 0: only at the end."""

    def __post_init__(self) -> None:
        check(self.evaluate >= 0, "evaluate", self.evaluate, "0 or more rounds")
        check(self.seed >= 0, "seed", self.seed, "0 or more")
        check(self.clients is None or self.clients >= 1, "clients", self.clients, "1 or more")

    def federation(self, data_dir: str | Path | None = None) -> Federation:
        """The data, shared out among clients."""
        if isinstance(self.data, Federation):
            return self.data
        return load(
            self.data,
            partition=self.partition,
            scenario=self.scenario,
            split=self.split,
            clients=self.clients,
            profile=self.profile,
            standardise=self.standardise,
            seed=self.seed,
            data_dir=data_dir,
        )

    def build(self, federation: Federation, memory: Memory) -> Run:
        """The run that gives the result."""
        return build(
            self.method,
            federation,
            memory,
            net=self.net,
            rounds=self.rounds,
            cohort=self.cohort,
            seed=self.seed,
            finetune=self.finetune,
        )

    def resolved(self, run: Run) -> Experiment:
        """The same with nothing left open, as it is written to config.toml."""
        net = self.net if self.net is not None else run.federation.defaults.net
        d = run.federation
        dealt = replace(self, partition=d.partition, scenario=d.scenario, split=d.split)
        return replace(dealt, method=run.method, net=net, rounds=run.rounds, cohort=run.cohort)


@dataclass(frozen=True)
class Result:
    """A finished run: its figures, and its folder."""

    summary: dict[str, Any]
    folder: RunFolder

    def table(self) -> None:
        """Print the figures."""
        from .report.tables import print_summaries

        print_summaries([self.summary])

    def save(self, path: str | Path) -> RunFolder:
        """Copy the run folder; a folder that exists is not touched."""
        target = Path(path)
        if target.exists():
            raise InputError(
                f"the run folder {target} exists; runs are never overwritten: give another name."
            )
        shutil.copytree(self.folder.path, target)
        return RunFolder(target)


def run(
    method: AnyMethod | str = "ditto",
    *,
    data: str | Path | Federation = "digits",
    out: str | Path | None = None,
    engine: str | Engine = "auto",
    data_dir: str | Path | None = None,
    watch: Watch | None = None,
    **words: Any,
) -> Result:
    """Train a federation. ``words`` are those of :class:`Experiment`, which are those of the command line.

    Without ``out`` the run folder is temporary; :meth:`Result.save` keeps it.
    """
    chosen = methods.find(method)() if isinstance(method, str) else method
    known = {f.name for f in fields(Experiment)} - {"method", "data"}
    for word in words:
        if word not in known:
            raise unknown("word of run", word, known)
    experiment = Experiment(chosen, data if isinstance(data, Federation) else str(data), **words)
    return begin(experiment, out, engine=engine, data_dir=data_dir, watch=watch)


def begin(
    experiment: Experiment,
    out: str | Path | None,
    *,
    engine: str | Engine = "auto",
    data_dir: str | Path | None = None,
    watch: Watch | None = None,
) -> Result:
    """Make the run folder and run to the end. Everything is checked before the folder is made."""
    from .config.toml import to_toml

    federation = experiment.federation(data_dir)
    with tempfile.TemporaryDirectory() as trial_folder:
        trial = experiment.build(federation, Memory(Path(trial_folder)))
    scratch = None if out is not None else tempfile.mkdtemp(prefix="fedgrove-")
    chosen = engines.choose(engine) if isinstance(engine, str) else engine
    experiment = experiment.resolved(trial)
    folder = RunFolder.create(Path(scratch or "", out or "run"), to_toml(experiment))
    result = _finish(experiment, federation, folder, chosen, watch, own=isinstance(engine, str))
    if scratch:  # goes when the result goes
        weakref.finalize(result, shutil.rmtree, scratch, ignore_errors=True)
    return result


def resume(
    path: str | Path,
    *,
    engine: str | Engine = "auto",
    method: AnyMethod | None = None,
    data: Federation | None = None,
    net: nn.Module | None = None,
    data_dir: str | Path | None = None,
    watch: Watch | None = None,
) -> Result:
    """Go on from a run's last checkpoint; the result is the one it would have had, to the bit.

    A run of a method, on arrays or on a module of your own needs them again: ``method=``, ``data=``, ``net=``.
    """
    from .config.toml import from_toml

    folder = RunFolder.open(Path(path))
    if folder.summary is not None:
        raise InputError(
            f"the run in {path} is finished; there is nothing to resume. See: fedgrove compare {path}"
        )
    experiment = from_toml(folder.config, method=method, data=data, net=net)
    chosen = engines.choose(engine) if isinstance(engine, str) else engine
    return _finish(
        experiment,
        experiment.federation(data_dir),
        folder,
        chosen,
        watch,
        own=isinstance(engine, str),
    )


def _finish(
    experiment: Experiment,
    federation: Federation,
    folder: RunFolder,
    engine: Engine,
    watch: Watch | None,
    own: bool,
) -> Result:
    run = experiment.build(federation, folder.memory())
    try:
        return Result(
            execute(run, folder, engine, experiment.evaluate, watch or (lambda line: None)), folder
        )
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"Interrupted. {_way_on(folder, run)}") from None
    except (FedgroveError, OSError) as error:
        raise EngineError(f"{error} {_way_on(folder, run)}") from error
    finally:
        if own:
            engine.close()


def _way_on(folder: RunFolder, run: Run) -> str:
    done = folder.rounds_saved()
    return f"{done} of {run.rounds} rounds are saved; go on with: fedgrove resume {folder.path}"


def execute(
    run: Run, folder: RunFolder, engine: Engine, every: int, watch: Watch
) -> dict[str, Any]:
    """Run to the end from the folder's last checkpoint, commit after every exchange, and write the result."""
    member = Member(run, folder, every, watch)
    for _ in together([member], engine):
        if member.error is not None:
            raise member.error
    assert member.summary is not None
    return member.summary
