"""The verbs of the command line in Python: ``fedgrove.run(...)``, ``fedgrove.resume(...)``."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from . import engines, methods
from .config.experiment import (
    Experiment,
    Federations,
    Settings,
    shorthand_settings,
    with_settings,
)
from .config.plan import Plan, plan
from .config.settings import coerce
from .config.sweep import FILE as SWEEP_FILE
from .config.toml import (
    check_files,
    check_format,
    check_named_data,
    check_trust,
    from_toml,
    how_to_resume,
)
from .core import AnyMethod, Engine
from .data import Federation
from .data.split import VALIDATION
from .engines.faulty import with_faults
from .errors import DamageError, EngineError, FedgroveError, InputError
from .parts.gate import NORM_BOUND
from .report.progress import watching
from .runs.clock import NobodyInTime
from .runs.folder import RunFolder
from .runs.lock import locked
from .runs.lockstep import Watch, train_alone
from .runs.result import Failure, Result
from .runs.store import cannot_write

__all__ = ["Experiment", "Failure", "Result", "resume", "run", "train"]


def run(
    method: AnyMethod | str = "ca-afp",
    *,
    data: str | Path | Federation = "digits",
    net: str | nn.Module | None = None,
    partition: str | None = None,
    scenario: str | None = None,
    split: str | None = None,
    validation: float = VALIDATION,
    clients: int | None = None,
    cohort: int | None = None,
    rounds: int | None = None,
    epochs: int | None = None,
    batch: int | None = None,
    lr: float | None = None,
    finetune: Sequence[int] = (0,),
    profile: str | None = None,
    trace: str | None = None,
    standardise: bool = True,
    seed: int = 0,
    set: Settings = (),
    evaluate: int = 1,
    score_on: int | None = None,
    quorum: float = 0.0,
    deadline: float | None = None,
    norm_bound: float = NORM_BOUND,
    faults: str | None = None,
    init: str | Path | None = None,
    freeze: float = 0.0,
    per_task: bool = False,
    timeout: float | None = None,
    engine: str | Engine = "auto",
    device: str = "auto",
    precision: str = "fp32",
    data_dir: str | Path | None = None,
    out: str | Path | None = None,
    progress: bool = True,
    watch: Watch | None = None,
) -> Result:
    """Train a federation. The words are those of ``fedgrove run``; None takes the data set's own.

    method: a name (``fedgrove list methods``), perhaps with a preset (``ca-afp:paper``),
        ``file.py:Class``, or a method made in Python.
    data: a name (``fedgrove list data``), a file of arrays ``.npz``, or a federation.
    net: a name (``fedgrove list nets``), ``file.py:Class``, or a module.
    partition: natural, iid, dirichlet:ALPHA, classes:K or shards:K; the last two also with
        :grouped at the end.
    scenario: none, noisy, drift, flipped:SHARE or restricted:K.
    split: blocks or random.
    validation: share held out for validation, of what is left after the test part; 0 means none.
    clients: how many clients there are.
    cohort: how many of them train in a round.
    rounds: how many rounds.
    epochs, batch, lr: of local training; short for ``set={"local.epochs": ...}`` and so on.
    finetune: numbers of epochs of fine-tuning to report; the last one gives the headline.
    profile: what devices the clients have: uniform, phones, adfedwcp, or a file of them, ``.csv``.
    trace: a file ``.csv`` of how their bandwidths change over time.
    standardise: whether each client standardises its own channels.
    seed: all randomness follows from it.
    set: a method's fields or its parts', ``{"mu": 0.1}`` or ``["mu=0.1"]``.
    evaluate: score clients every so many rounds; 0: only at the end.
    score_on: how many clients are scored, fine-tuned and given a model file, drawn from the seed;
        0: none is scored; None: all, or 1000 where there are more than 10,000.
    quorum: the share of the clients asked that must report, or the exchange is tried again; at
        least one must.
    deadline: virtual seconds after which an exchange ends: a client that its device and bandwidth
        make later is lost; None: the slowest is waited for.
    norm_bound: refuse updates longer than so many times the recent median; 0: none.
    faults: make clients fail or lie, as ``"crash=0.1,late=0.2"`` (``fedgrove list faults``).
    init: start from the weights in a file, ``FILE.safetensors``, as in models/ of a run folder;
        with ``:body`` at the end the head keeps its random ones.
    freeze: the share of the net's layers, from the first on, that is kept as it is: not trained,
        sent or pruned; as 0.25.
    per_task: keep the true tasks of a mixed federation apart: the method runs once for each, as if
        the server were told who does what.
    timeout: seconds of real time after which a client that has not answered is lost.
    engine: auto, batched, flower, pool, serial or wired; or an engine, which is left open.
    device: auto, cpu or cuda.
    precision: on CUDA: fp32, tf32 or bf16.
    data_dir: where the data files are; by default the environment's FEDGROVE_DATA.
    out: the run folder to make; without it the folder is temporary, and ``Result.save`` keeps it.
    progress: whether to show progress on stderr.
    watch: called with each line of metrics.jsonl as it is written.
    """
    chosen = methods.make(method) if isinstance(method, str) else method
    experiment = Experiment(
        method=chosen,
        data=data if isinstance(data, Federation) else str(data),
        net=net,
        partition=partition,
        scenario=scenario,
        split=split,
        validation=validation,
        clients=clients,
        cohort=cohort,
        rounds=rounds,
        # Coerced here, so that a bare number is refused with a sentence.
        finetune=coerce("finetune", finetune, tuple[int, ...]),
        profile=profile,
        trace=trace,
        standardise=standardise,
        seed=seed,
        evaluate=evaluate,
        score_on=score_on,
        quorum=quorum,
        deadline=deadline,
        norm_bound=norm_bound,
        faults=faults,
        init=None if init is None else str(init),
        freeze=freeze,
        per_task=per_task,
    )
    federations = Federations(data_dir)
    shorthands = shorthand_settings({"epochs": epochs, "batch": batch, "lr": lr})
    for settings in (set, shorthands):
        if settings:
            experiment = configured(experiment, settings, federations)
    return train(
        experiment,
        out,
        federations=federations,
        engine=engine,
        device=device,
        precision=precision,
        timeout=timeout,
        progress=progress,
        watch=watch,
    )


def configured(experiment: Experiment, settings: Settings, federations: Federations) -> Experiment:
    """The experiment with its method's settings changed, from the data set's recipe."""
    recipe = federations.recipe(experiment)
    return replace(experiment, method=with_settings(experiment.method, settings, recipe))


def train(
    experiment: Experiment,
    out: str | Path | None = None,
    *,
    federations: Federations | None = None,
    engine: str | Engine = "auto",
    device: str = "auto",
    precision: str = "fp32",
    timeout: float | None = None,
    progress: bool = False,
    watch: Watch | None = None,
) -> Result:
    """Make the run folder and run to the end. Everything is checked before the folder is made.

    Without ``out`` the folder is temporary, and goes when the result goes, or with an error.
    """
    if federations is None:
        federations = Federations()
    with _engine(engine, device, precision, timeout) as chosen:
        if out is not None:
            planned = plan(experiment, Path(out), federations)
            folder = planned.create_folder()
            try:
                with _locked(folder):
                    return _finish(planned, folder, chosen, progress, watch)
            except NobodyInTime:
                # Nothing was trained, and the same folder is wanted for a longer deadline.
                shutil.rmtree(folder.path, ignore_errors=True)
                raise
        try:
            scratch = tempfile.mkdtemp(prefix="fedgrove-")
        except OSError as error:
            raise cannot_write(Path(tempfile.gettempdir()), error) from None
        try:
            planned = plan(experiment, Path(scratch) / "run", federations)
            folder = planned.create_folder()
            with locked(folder.path):
                result = _finish(planned, folder, chosen, progress, watch, is_temporary=True)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
        weakref.finalize(result, shutil.rmtree, scratch, ignore_errors=True)
        return result


def resume(
    path: str | Path,
    *,
    engine: str | Engine = "auto",
    device: str = "auto",
    precision: str = "fp32",
    timeout: float | None = None,
    method: AnyMethod | None = None,
    data: Federation | None = None,
    net: nn.Module | None = None,
    data_dir: str | Path | None = None,
    trust: bool = False,
    progress: bool = True,
    watch: Watch | None = None,
) -> Result:
    """Continue from a run's last checkpoint; the result is the one it would have had, to the bit.

    A run with a method, arrays or a module made in Python needs them again: ``method=``, ``data=``,
    ``net=``. Other data than it was started on are refused, as far as clients, shape, outputs and
    metric tell. A run whose config.toml names a file of code (``net = "x.py:Net"``, or a method's)
    needs ``trust``: that file is run. If the last checkpoint is damaged, the one before is taken.
    """
    folder = RunFolder.open(Path(path))
    with _locked(folder):
        # Behind the lock: another process may just have finished it.
        if folder.summary is not None:
            raise InputError(
                f"the run in {path} is finished; there is nothing to resume. "
                f"See: fedgrove compare {path}"
            )
        check_format(folder.config, folder.path)
        folder.check_format()
        # What is given takes the place of what is named.
        objects = {"net": net, "method": method}
        given = [name for name, value in objects.items() if value is not None]
        check_trust(folder.config, folder.path, trust, given)
        check_named_data(folder.config, data)
        check_files(folder.config)
        experiment = from_toml(folder.config, method=method, data=data, net=net)
        planned = plan(experiment, folder.path, Federations(data_dir))
        with _engine(engine, device, precision, timeout) as chosen:
            return _finish(planned, folder, chosen, progress, watch)


def _locked(folder: RunFolder) -> AbstractContextManager[None]:
    """The lock of a run; one of a sweep is refused while the sweep is trained."""
    parent = folder.path.parent
    is_of_a_sweep = (parent / SWEEP_FILE).is_file()
    return locked(folder.path, parent if is_of_a_sweep else None)


@contextmanager
def _engine(
    engine: str | Engine, device: str, precision: str, timeout: float | None
) -> Iterator[Engine]:
    """The engine of that name, closed at the end; an engine that was given is left open."""
    if not isinstance(engine, str):
        yield engine
        return
    chosen = engines.choose(engine, device, precision, timeout)
    try:
        yield chosen
    finally:
        chosen.close()


def _finish(
    planned: Plan,
    folder: RunFolder,
    engine: Engine,
    progress: bool,
    watch: Watch | None,
    is_temporary: bool = False,
) -> Result:
    """Run to the end from the folder's last checkpoint."""
    rounds = planned.run.rounds

    def what_now() -> str:
        if is_temporary:
            return "Nothing was kept: a run that can be resumed needs out=DIR."
        saved = folder.rounds_saved()
        how = how_to_resume(planned.config, folder.path)
        if planned.run.federation.elsewhere:
            how = "start the app again, with the same folder, to go on."
        return f"{saved} of {rounds} rounds are saved; {how}"

    try:
        with watching(rounds, folder.metrics_to_show(), quiet=not progress) as show:

            def watch_line(line: Mapping[str, Any]) -> None:
                show(line)
                if watch is not None:
                    watch(line)

            member = planned.member(folder, watch_line)
            summary = train_alone(member, with_faults(engine, [planned.run]))
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"Interrupted. {what_now()}") from None
    except (DamageError, NobodyInTime):
        # Its sentence says what to do; to resume is what failed.
        raise
    except (FedgroveError, OSError) as error:
        raise EngineError(f"{error} {what_now()}") from error
    return Result(summary, folder)
