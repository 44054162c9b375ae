"""What the commands do, in Python: run, rerun, resume, load_run, compare, cost, sweep."""

from __future__ import annotations

import shutil
import tempfile
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, Protocol, cast, overload

from torch import nn

from . import engines, methods
from .config import sweep as sweeps
from .config.assemble import look_further, make_experiment
from .config.comparison import Comparison, compare_runs
from .config.cost import estimate_costs, forecast_work
from .config.experiment import Experiment, Federations
from .config.grid import PER_TASK, compare_four_methods, describe_grid, make_grid
from .config.plan import Plan, made_here, plan
from .config.smoke import smoke as make_smaller
from .config.sweep import SWEEP_FILE, Sweep
from .config.toml import (
    check_files,
    check_format,
    check_named_data,
    check_trust,
    from_toml,
    how_to_resume,
    read_run_table,
)
from .core import AnyMethod, Engine
from .engines.faulty import with_faults
from .errors import (
    DamageError,
    EngineError,
    FedgroveError,
    FolderTakenError,
    InputError,
    Refusals,
    check,
    shown,
    spell_hint,
    spell_option,
)
from .options import (
    CostOptions,
    FourMethodsOptions,
    RerunOptions,
    ResumeOptions,
    RunOptions,
    SweepOptions,
    TrainOptions,
)
from .options.definition import takes
from .options.groups import EngineOptions
from .report.progress import show_progress
from .report.terminal import show_status
from .runs.checkpoint import are_equal_states
from .runs.clock import NoClientInTime
from .runs.files import RUNS, cannot_write, fresh_name
from .runs.folder import RunFolder, has_nothing_saved
from .runs.lock import locked
from .runs.lockstep import Watch, train_alone
from .runs.report_html import write_run_report
from .runs.result import Failure, Result

P = ParamSpec("P")

__all__ = [
    "Comparison",
    "Experiment",
    "Failure",
    "Result",
    "Sweep",
    "compare",
    "cost",
    "load_run",
    "rerun",
    "resume",
    "run",
    "sweep",
    "train",
]


class RunFunction(Protocol[P]):
    """What type checkers see of :func:`run`: its arguments are those of its options."""

    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, method: AnyMethod | str, *args: P.args, **kwargs: P.kwargs
    ) -> Result: ...

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Sweep: ...


def _typed_by_method(
    without: Callable[P, FourMethodsOptions],
) -> Callable[[Callable[..., Result | Sweep]], RunFunction[P]]:
    """Tell type checkers that a call with a method gives a result, and one without it a sweep."""
    return lambda function: cast(RunFunction[P], function)


@_typed_by_method(FourMethodsOptions)
@takes(RunOptions)
def run(options: RunOptions) -> Result | Sweep:
    """Train a federation, as ``fedgrove run`` does.

    Without a method, local, fedavg, ca-afp and grove are compared on three seeds, and a sweep is
    returned in place of a result; on short rounds of motion, unless other options are given. None
    takes the data set's own choice. Without ``out`` the run is kept in a new folder under runs/.
    """
    federations = Federations(options.data_dir)
    if "method" not in options.given and not options.smoke:
        swept, experiments, folder = compare_four_methods(options, federations)
        return train_grid(experiments, federations, swept, folder)
    return _run(make_experiment(options, federations, engine=options), federations, options)


@takes(RerunOptions)
def rerun(options: RerunOptions) -> Result:
    """Run again what a run folder's config.toml, or a file such as run.toml, describes.

    Arguments that are given replace what the file has, as ``seed=3``; all others have the file's
    values. The same options give the same result. A file that names code (``net = "x.py:Net"``)
    needs ``trust``: that code is run. The old folder is not changed.
    """
    federations = Federations(options.data_dir)
    experiment = make_experiment(options, federations, options.path, options.trust, options)
    return _run(experiment, federations, options)


def _run(experiment: Experiment, federations: Federations, options: RunOptions) -> Result:
    """Train one experiment, or a small version of it for a smoke test."""
    if not options.smoke:
        return train_kept(experiment, federations, options)
    smaller = make_smaller(experiment, federations)
    return train_experiment(
        smaller, options.out, federations, options, options.progress, options.watch
    )


def train_kept(experiment: Experiment, federations: Federations, options: RunOptions) -> Result:
    """Train an experiment in the folder that the options name, or in a new one under runs/."""
    out = options.out
    while True:
        folder = _name_folder(experiment, options) if out is None else Path(out)
        try:
            return train_experiment(
                experiment,
                folder,
                federations,
                options,
                options.progress,
                options.watch,
                is_named=out is not None,
            )
        except FolderTakenError:
            # Another process took the name after it was found to be free.
            if out is not None:
                raise


def _name_folder(experiment: Experiment, options: RunOptions) -> Path:
    """A folder under runs that does not exist yet, named by method, data and seed."""
    method = options.given.get("method", experiment.method)
    label = methods.label_of(method)
    if experiment.per_task:
        label += PER_TASK
    return fresh_name(RUNS, f"{label}-{experiment.data_name}-s{experiment.seed}")


@takes(TrainOptions, home="fedgrove.api")
def train(options: TrainOptions) -> Result:
    """Make the run folder of an experiment and run it to the end.

    Everything is checked before the folder is made. A temporary folder is removed with the result,
    or with an error.
    """
    options.check()
    federations = options.federations or Federations()
    return train_experiment(
        options.experiment, options.out, federations, options, options.progress, options.watch
    )


def train_experiment(
    experiment: Experiment,
    out: str | Path | None,
    federations: Federations,
    options: EngineOptions,
    progress: bool = False,
    watch: Watch | None = None,
    is_named: bool = True,
) -> Result:
    """Train as :func:`train` does, with the engine that ``options`` name.

    Args:
        experiment: The experiment.
        out: The run folder to make; None: a temporary one.
        federations: Where the data are read, once each.
        options: The options of the engine.
        progress: Whether progress is shown.
        watch: Called with each new line of metrics.jsonl.
        is_named: Whether ``out`` is the folder that the user named, in which a run that saved
            nothing may be started again.

    Raises:
        InputError: Something is refused before anything is written.
        EngineError: The run could not be finished; the sentence says how to resume it.
    """
    try:
        opened = open_engine(options)
    except InputError as error:
        refusals = Refusals()
        refusals.add(error)
        look_further(experiment, federations, refusals)
        refusals.check()
        raise
    with opened as engine:
        if out is None:
            return _train_in_scratch(experiment, federations, engine, progress, watch)
        planned = _plan(experiment, Path(out), federations, progress)
        is_of_a_sweep = (planned.path.parent / SWEEP_FILE).is_file()
        folder = planned.create_folder(reuse=is_named and not is_of_a_sweep)
        try:
            with _locked(folder):
                return _finish(planned, folder, engine, progress, watch)
        except NoClientInTime:
            # Nothing was trained, and the folder is needed again for a longer deadline.
            shutil.rmtree(folder.path, ignore_errors=True)
            raise


def _train_in_scratch(
    experiment: Experiment,
    federations: Federations,
    engine: Engine,
    progress: bool,
    watch: Watch | None,
) -> Result:
    """Train in a temporary folder, which is removed with the result, or with an error."""
    try:
        scratch = tempfile.mkdtemp(prefix="fedgrove-")
    except OSError as error:
        raise cannot_write(Path(tempfile.gettempdir()), error) from None
    try:
        planned = _plan(experiment, Path(scratch) / "run", federations, progress)
        folder = planned.create_folder()
        with locked(folder.path):
            result = _finish(planned, folder, engine, progress, watch, is_temporary=True)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    weakref.finalize(result, shutil.rmtree, scratch, ignore_errors=True)
    return result


def _plan(experiment: Experiment, path: Path, federations: Federations, progress: bool) -> Plan:
    """Plan an experiment while a status line shows that its data are read."""
    with show_status("reading the data", quiet=not progress):
        return plan(experiment, path, federations)


@takes(ResumeOptions)
def resume(options: ResumeOptions) -> Result:
    """Continue from a run's last checkpoint; the result is the one it would have had, to the bit.

    With ``rounds`` a run, also a finished one, continues to this number of rounds, and ends as if
    it had been started with it. A method whose schedule depends on the number of rounds refuses.

    A run with a method, arrays or a module made in Python needs them again: ``method=``, ``data=``,
    ``net=``. Other data than it was started on are refused, as far as clients, shape, outputs and
    metric tell. A run whose config.toml names a file of code (``net = "x.py:Net"``, or a method's)
    needs ``trust``: that file is run. If the last checkpoint is damaged, the one before is taken.
    """
    options.check()
    folder = RunFolder.open(Path(options.path))
    with _locked(folder):
        # Behind the lock: another process may just have finished it.
        if folder.summary is not None and options.rounds is None:
            python = f"fedgrove.load_run({str(options.path)!r})"
            raise InputError(
                f"the run in {options.path} is finished; there is nothing to resume, unless you "
                f"give more rounds ({spell_option('rounds', 'N')}). "
                f"See: {spell_hint(f'fedgrove compare {options.path}', python)}"
            )
        try:
            experiment = _read_experiment(folder, options)
        except InputError as error:
            # A file may have been corrected after the first round failed.
            if not has_nothing_saved(folder.path):
                raise
            raise InputError(
                f"{error} Nothing is saved yet: the run can also be started again with "
                f"{spell_option('out', str(folder.path))}."
            ) from None
        federations = Federations(options.data_dir)
        planned = _plan(experiment, folder.path, federations, options.progress)
        if options.rounds is not None:
            planned = _take_more_rounds(planned, folder, options.rounds, federations)
        with open_engine(options) as engine:
            return _finish(planned, folder, engine, options.progress, options.watch)


def _take_more_rounds(
    planned: Plan, folder: RunFolder, rounds: int, federations: Federations
) -> Plan:
    """Make the run of a folder a longer one, which it would have been from the beginning."""
    now = planned.run.rounds
    if rounds == now and folder.summary is None:
        # The process that made it longer was interrupted.
        return planned
    check(rounds > now, "rounds", rounds, f"above {now}, the rounds that the run has")
    instead = "start the longer one in a new folder, with rerun"
    if (folder.path.parent / SWEEP_FILE).is_file():
        raise InputError(
            f"rounds is {rounds}, and {folder.path} is a run of a sweep, whose runs are equally "
            f"long; {instead}."
        )
    longer = plan(replace(planned.experiment, rounds=rounds), folder.path, federations)
    # A method learns the number of rounds here and nowhere else.
    if not are_equal_states(planned.run.initial_state, longer.run.initial_state):
        raise InputError(
            f"{planned.run.label} made its schedule for {now} rounds, and with {rounds} it would "
            f"have trained otherwise from the beginning; {instead}."
        )
    folder.replace_config(longer.config)
    return longer


def _read_experiment(folder: RunFolder, options: ResumeOptions) -> Experiment:
    """The experiment of a run that is resumed; code and files are still what they were."""
    check_format(folder.config, folder.path)
    folder.check_format()
    # What is given takes the place of what is named.
    given = [name for name in ("net", "method") if getattr(options, name) is not None]
    check_trust(folder.config, folder.path, options.trust, given)
    check_named_data(folder.config, options.data)
    check_files(folder.config)
    return from_toml(folder.config, options.data, options.net, options.method)


def _locked(folder: RunFolder) -> AbstractContextManager[None]:
    """The lock of a run; one of a sweep is refused while the sweep is trained."""
    parent = folder.path.parent
    is_of_a_sweep = (parent / SWEEP_FILE).is_file()
    return locked(folder.path, parent if is_of_a_sweep else None)


def open_engine(options: EngineOptions) -> AbstractContextManager[Engine]:
    """The engine that options name, closed at the end; one made in Python is left open."""
    if not isinstance(options.engine, str):
        return nullcontext(options.engine)
    engine = engines.choose(options.engine, options.device, options.precision, options.timeout)
    return closing(engine)


def _title(planned: Plan, folder: RunFolder) -> str:
    """What is about to be trained, for the first line of a log."""
    run = planned.run
    clients = len(run.federation.clients)
    return (
        f"round {folder.rounds_saved()}/{run.rounds}  {run.label} on {run.federation.name}, "
        f"{run.cohort} of {clients} clients in a round"
    )


def _forecast(planned: Plan, engine: Engine) -> Callable[[], list[float]] | None:
    """What finds how the work of a run is spread over its rounds; None: nothing can."""
    net = planned.experiment.net
    # Flower has threads of its own, which a forked process would not have.
    is_elsewhere = planned.run.federation.elsewhere or engine.name == "flower"
    if net is None or is_elsewhere or planned.run.per_task:
        return None
    return partial(forecast_work, planned.run, net)


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

    def resume_hint() -> str:
        if is_temporary:
            out = spell_option("out", "DIR")
            return f"Nothing was kept: to be able to resume a run, give {out}."
        how = how_to_resume(planned.config, folder.path)
        if not folder.path.is_dir():
            # How many rounds are saved is written there.
            return how
        if planned.run.federation.elsewhere:
            how = "to continue, start the app again with the same folder."
        return f"{folder.rounds_saved()} of {rounds} rounds are saved; {how}"

    try:
        past = folder.metrics_to_show()
        title = _title(planned, folder)
        show_all = partial(show_progress, rounds, past, quiet=not progress, title=title)
        with show_all(forecast=_forecast(planned, engine)) as show:

            def watch_line(line: Mapping[str, Any]) -> None:
                show(line)
                if watch is not None:
                    watch(line)

            member = planned.member(folder, watch_line)
            summary = train_alone(member, with_faults(engine, [planned.run]))
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"Interrupted. {resume_hint()}") from None
    except (DamageError, NoClientInTime):
        # Its sentence says what to do; to resume is what failed.
        raise
    except (FedgroveError, OSError) as error:
        if not is_temporary:
            write_run_report(folder, failure=" ".join(str(error).split()))
        raise EngineError(f"{error} {resume_hint()}") from error
    # A temporary folder gets its page when it is saved.
    if not is_temporary:
        write_run_report(folder)
    return Result(summary, folder, **made_here(planned.experiment), is_temporary=is_temporary)


# ---- what is there already -----------------------------------------------------------------------


def load_run(path: str | Path, *, net: nn.Module | None = None, trust: bool = False) -> Result:
    """Load a finished run from its folder: its numbers and models, as ``run`` returned them.

    Args:
        path: The run folder.
        net: The network again, for the models of a run with a module made in Python.
        trust: Whether a file of code that config.toml names (``net = "x.py:Net"``) may be run.

    Raises:
        InputError: The folder has no finished run, or several, or needs no ``net``.
    """
    if (Path(path) / SWEEP_FILE).is_file():
        names = list(sweeps.read(path)["members"])
        raise InputError(
            f"{path} contains a sweep of {len(names)} runs; load one of them, such as "
            f"{str(Path(path) / names[0])!r}, or show all of them: fedgrove.compare."
        )
    folder = RunFolder.open(Path(path))
    summary = folder.summary
    if summary is None:
        rounds = read_run_table(folder.config).get("rounds", "its")
        raise InputError(
            f"the run in {path} is not finished: {folder.rounds_saved()} of {rounds} rounds are "
            f"saved; {how_to_resume(folder.config, folder.path)}"
        )
    named = str(read_run_table(folder.config).get("net", ""))
    is_given_again = named.startswith("<")
    if net is not None and not is_given_again:
        raise InputError(
            f"the run's net is {named}, which is built again from its name; leave net= out."
        )
    trusted = named if trust and not is_given_again else None
    return Result(summary, folder, net if is_given_again else trusted)


RunToCompare = str | Path | Result | RunFolder | Sweep
"""A run to compare: its result or its folder; or a sweep."""


def compare(*runs: RunToCompare | Sequence[RunToCompare], bytes: bool = False) -> Comparison:
    """Runs side by side, as ``fedgrove compare``: ``.table()`` prints them, ``.rows`` holds them.

    Results and run folders, finished or not, or lists of them; a sweep means all its runs, and is
    also compared over seeds. With ``bytes``, what was sent and what it was spent on.
    """
    listed: list[Any] = []
    for run in runs:
        listed.extend(run if isinstance(run, list | tuple) else [run])
    if not listed:
        raise InputError("compare was given no run; give one or more results or run folders.")
    paths = []
    temporary = set()
    for run in listed:
        path = str(_find_folder(run))
        paths.append(path)
        if isinstance(run, Result) and run.is_temporary:
            temporary.add(path)
    return compare_runs(paths, bytes, temporary)


def _find_folder(run: Any) -> str | Path:
    """The folder of a run to compare."""
    match run:
        case Result():
            return run.folder.path
        case RunFolder() | Sweep():
            return run.path
        case str() | Path():
            return run
    raise InputError(f"compare was given {shown(run)}; give results or run folders.")


# ---- before a run, and many of them --------------------------------------------------------------


@takes(CostOptions)
def cost(options: CostOptions) -> Any:
    """What a method would send and need, and how long its devices take; nothing is trained.

    One method gives a dictionary, a list of them a list (:func:`fedgrove.config.cost.estimate_cost`
    explains the numbers). The shape of an ``input`` can stand in for data, together with ``net``,
    ``classes`` and perhaps ``examples``. Options of scoring, reliability and privacy are checked
    with the data, and do not change the cost.
    """
    rows = estimate_costs(options, _warn)
    is_several = isinstance(options.methods, Sequence) and not isinstance(options.methods, str)
    return rows if is_several else rows[0]


@takes(SweepOptions)
def sweep(options: SweepOptions) -> Sweep:
    """Train every method with every value of every setting on every seed, all of them together.

    Arguments that are not explained here are those of :func:`run`, the same for all runs.
    """
    federations = Federations(options.data_dir)
    return train_grid(make_grid(options, federations), federations, options, options.out)


def train_grid(
    experiments: Mapping[str, Experiment],
    federations: Federations,
    options: SweepOptions,
    out: str | Path | None,
) -> Sweep:
    """Train the runs of a sweep under one progress line."""
    base = next(iter(experiments.values()))
    folder = fresh_name(RUNS, f"sweep-{base.data_name}") if out is None else Path(out)
    rounds = base.rounds or federations.defaults(base).rounds
    with open_engine(options) as engine:
        train_all = partial(
            sweeps.sweep,
            experiments,
            folder,
            engine=engine,
            federations=federations,
            grid=describe_grid(options, experiments),
        )
        total = rounds * len(experiments)
        ends = sweeps.watched(folder, experiments, total, train_all, not options.progress)
    return Sweep(ends, folder)


def _warn(sentence: str) -> None:
    """Warn at the line that called :func:`cost`."""
    # At the line of the caller of `cost`.
    warnings.warn(sentence, UserWarning, stacklevel=6)
