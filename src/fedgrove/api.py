"""The verbs of the command line in Python: run, resume, load_run, compare, cost, sweep."""

from __future__ import annotations

import shutil
import tempfile
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from . import engines, methods
from .config import estimates, grid
from .config import sweep as sweeps
from .config.compared import Comparison, compared
from .config.experiment import (
    SHORTHANDS,
    Experiment,
    Federations,
    Settings,
    shorthand_settings,
    with_own_data,
)
from .config.plan import Plan, made_here, plan
from .config.repeat import read_config
from .config.settings import coerce, hints
from .config.smoke import smoke as smoke_of
from .config.sweep import FILE as SWEEP_FILE
from .config.sweep import Sweep
from .config.toml import (
    check_files,
    check_format,
    check_named_data,
    check_trust,
    from_toml,
    how_to_resume,
    read_words,
)
from .config.wrong import assembled, look_further
from .core import AnyMethod, Engine
from .data import Federation
from .data.split import VALIDATION
from .engines.faulty import with_faults
from .errors import DamageError, EngineError, FedgroveError, InputError, Refusals, unknown
from .report.progress import show_progress
from .report.terminal import show_status
from .runs.clock import NobodyInTime
from .runs.files import cannot_write, fresh_name
from .runs.folder import RunFolder
from .runs.gate import NORM_BOUND
from .runs.lock import locked
from .runs.lockstep import Watch, train_alone
from .runs.report_html import write_run_report
from .runs.result import Failure, Result

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


def run(
    method: AnyMethod | str = "ca-afp",
    *,
    data: Any = "digits",
    label: Any = None,
    client: Any = None,
    window: int | None = None,
    stride: int | None = None,
    channels: int | str | Sequence[str] | None = None,
    time: str | None = None,
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
    privacy: str | None = None,
    init: str | Path | None = None,
    freeze: float = 0.0,
    per_task: bool = False,
    timeout: float | None = None,
    engine: str | Engine = "auto",
    device: str = "auto",
    precision: str = "fp32",
    data_dir: str | Path | None = None,
    out: str | Path | None = None,
    smoke: bool = False,
    progress: bool = True,
    watch: Watch | None = None,
) -> Result:
    """Train a federation. The words are those of ``fedgrove run``; None takes the data set's own.

    method: a name (``fedgrove list methods``), perhaps with a preset (``ca-afp:paper``),
        ``file.py:Class``, or a method made in Python.
    data: a name (``fedgrove list data``), a federation, or data of your own: a file or a folder of
        CSV, parquet or ``.npz``, a DataFrame, arrays (x, y) or (x, y, client), a torch or Hugging
        Face Dataset, a partitioner of flwr-datasets, or a dictionary of these by client.
    label, client, channels, time: of your own data, the columns to predict, of whose a row is, of
        inputs (else all others), and to sort recordings by.
    window, stride: cut recordings into windows of so many rows, so far apart (else half a window).
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
    privacy: clip what leaves a client and add noise, as ``"clip=1.0,noise=0.8"``; needs opacus.
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
    smoke: try every stage on a few examples, in seconds; the figures mean nothing.
    progress: whether to show progress on stderr: a live line on a terminal, else lines.
    watch: called with each line of metrics.jsonl as it is written.
    """
    refusals = Refusals()
    words = {
        "data": data,
        "label": label,
        "client": client,
        "window": window,
        "stride": stride,
        "channels": channels,
        "time": time,
        "net": net,
        "partition": partition,
        "scenario": scenario,
        "split": split,
        "validation": validation,
        "clients": clients,
        "cohort": cohort,
        "rounds": rounds,
        "profile": profile,
        "trace": trace,
        "standardise": standardise,
        "seed": seed,
        "evaluate": evaluate,
        "score_on": score_on,
        "quorum": quorum,
        "deadline": deadline,
        "norm_bound": norm_bound,
        "faults": faults,
        "privacy": privacy,
        "init": None if init is None else str(init),
        "freeze": freeze,
        "per_task": per_task,
    }
    words = with_own_data(words)
    with refusals.collected():
        # Coerced here, so that a bare number is refused with a sentence.
        words["finetune"] = coerce("finetune", finetune, tuple[int, ...])
    federations = Federations(data_dir)
    shorthands = shorthand_settings({"epochs": epochs, "batch": batch, "lr": lr})
    engine_words = partial(check_engine, engine, device, precision, timeout)
    experiment = assembled(method, words, (set, shorthands), federations, refusals, (engine_words,))
    if smoke:
        experiment = smoke_of(experiment, federations)
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


def rerun(
    path: str | Path,
    *,
    set: Settings = (),
    timeout: float | None = None,
    engine: str | Engine = "auto",
    device: str = "auto",
    precision: str = "fp32",
    data_dir: str | Path | None = None,
    out: str | Path | None = None,
    trust: bool = False,
    smoke: bool = False,
    progress: bool = True,
    watch: Watch | None = None,
    **changes: Any,
) -> Result:
    """Run again what a run folder's config.toml, or a file such as run.toml, describes.

    ``changes`` are words of :func:`run` that take the place of the file's, as ``seed=3``; ``set``
    changes its method's settings. The same words give the same result. A file that names code
    (``net = "x.py:Net"``) needs ``trust``: that code is run. The old folder is not touched.
    """
    refusals = Refusals()
    shorthands = {word: changes.pop(word) for word in SHORTHANDS if word in changes}
    kinds = hints(Experiment)
    for word in list(changes):
        if word not in kinds:
            refusals.add(unknown("word of rerun", word, [*kinds, *SHORTHANDS]))
            changes.pop(word)
    wanted = read_config(path, changes, refusals, trust)
    federations = Federations(data_dir)
    words = {**wanted.words, **changes}
    # A method that could not be made was refused; any will do to look at the rest.
    method = words.pop("method", wanted.method) or "fedavg"
    settings = (wanted.settings, set, shorthand_settings(shorthands))
    engine_words = partial(check_engine, engine, device, precision, timeout)
    experiment = assembled(method, words, settings, federations, refusals, (engine_words,))
    if smoke:
        experiment = smoke_of(experiment, federations)
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


def check_engine(engine: str | Engine, device: str, precision: str, timeout: float | None) -> None:
    """Refuse an engine that cannot be had; one that was given is taken as it is."""
    if isinstance(engine, str):
        engines.choose(engine, device, precision, timeout).close()


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
    refusals = Refusals()
    with refusals.collected():
        check_engine(engine, device, precision, timeout)
    if refusals.sentences:
        look_further(experiment, federations, refusals)
    refusals.check()
    with _engine(engine, device, precision, timeout) as chosen:
        if out is not None:
            with show_status("reading the data", quiet=not progress):
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
            with show_status("reading the data", quiet=not progress):
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
        with show_status("reading the data", quiet=not progress):
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


def _title(planned: Plan, folder: RunFolder) -> str:
    """What is about to be trained, for the first line of a log."""
    run = planned.run
    clients = len(run.federation.clients)
    return (
        f"round {folder.rounds_saved()}/{run.rounds}  {run.label} on {run.federation.name}, "
        f"{run.cohort} of {clients} clients in a round"
    )


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
        past = folder.metrics_to_show()
        title = _title(planned, folder)
        with show_progress(rounds, past, quiet=not progress, title=title) as show:

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
        if not is_temporary:
            write_run_report(folder, failure=" ".join(str(error).split()))
        raise EngineError(f"{error} {what_now()}") from error
    # A temporary folder gets its page when it is saved.
    if not is_temporary:
        write_run_report(folder)
    return Result(summary, folder, **made_here(planned.experiment))


# ---- what is there already -----------------------------------------------------------------------


def load_run(path: str | Path, *, net: nn.Module | None = None, trust: bool = False) -> Result:
    """A finished run from its folder: its figures and its models, as ``run`` gave them.

    A run with a module made in Python needs it again for its models: ``net=``. One whose
    config.toml names a file of code (``net = "x.py:Net"``) needs ``trust``: that file is run.
    """
    if (Path(path) / SWEEP_FILE).is_file():
        names = list(sweeps.read(path)["members"])
        raise InputError(
            f"{path} holds a sweep of {len(names)} runs; load one of them, as "
            f"{str(Path(path) / names[0])!r}, or show all of them: fedgrove.compare."
        )
    folder = RunFolder.open(Path(path))
    summary = folder.summary
    if summary is None:
        rounds = read_words(folder.config).get("rounds", "its")
        raise InputError(
            f"the run in {path} is not finished: {folder.rounds_saved()} of {rounds} rounds are "
            f"saved; {how_to_resume(folder.config, folder.path)}"
        )
    named = str(read_words(folder.config).get("net", ""))
    is_given_again = named.startswith("<")
    if net is not None and not is_given_again:
        raise InputError(f"the run's net is {named}, which is made again by name; leave net= out.")
    trusted = named if trust and not is_given_again else None
    return Result(summary, folder, net if is_given_again else trusted)


def compare(*runs: str | Path | Result | RunFolder | Sweep, bytes: bool = False) -> Comparison:
    """Runs side by side, as ``fedgrove compare``: ``.table()`` prints them, ``.rows`` holds them.

    Results and run folders, finished or not; a sweep stands for all its runs, and is also compared
    over seeds. With ``bytes``, what was sent and what it was spent on.
    """
    if not runs:
        raise InputError("compare got no run; give results or run folders, one or more.")
    paths = []
    for run in runs:
        if isinstance(run, Result):
            paths.append(str(run.folder.path))
        elif isinstance(run, RunFolder | Sweep):
            paths.append(str(run.path))
        else:
            paths.append(str(run))
    return compared(paths, bytes)


# ---- before a run, and many of them --------------------------------------------------------------


def cost(
    methods: str | AnyMethod | Sequence[str | AnyMethod] = "ca-afp",
    *,
    data: Any = None,
    net: str | nn.Module | None = None,
    input: Sequence[int] | None = None,
    classes: int | None = None,
    examples: int | None = None,
    clients: int | None = None,
    cohort: int | None = None,
    rounds: int | None = None,
    epochs: int | None = None,
    batch: int | None = None,
    lr: float | None = None,
    profile: str | None = None,
    trace: str | None = None,
    seed: int = 0,
    freeze: float = 0.0,
    set: Settings = (),
    data_dir: str | Path | None = None,
    **words: Any,
) -> Any:
    """What a method would send and need, and how long its devices take; nothing is trained.

    One method gives a dictionary, a list of them a list (:mod:`fedgrove.costs.estimate` explains
    the figures). The words are those of ``fedgrove cost``: ``data`` as for :func:`run`, or
    ``input``, the shape of one input, together with ``net``, ``classes`` and perhaps ``examples``
    in its place. ``words`` are others that decide the data, as label, client, window, partition or
    split.
    """
    is_one = isinstance(methods, str) or not isinstance(methods, Sequence)
    asked: Sequence[Any] = [methods]
    if isinstance(methods, Sequence) and not isinstance(methods, str):
        asked = methods
    if not asked:
        raise InputError("cost got no method; give a name, as fedavg, or a list of names.")
    chosen = [_variant(method) for method in asked]
    settings = [
        *_texts(set, several=False),
        *shorthand_settings({"epochs": epochs, "batch": batch, "lr": lr}),
    ]
    given = {
        "net": net,
        "clients": clients,
        "cohort": cohort,
        "rounds": rounds,
        "profile": profile,
        "trace": trace,
        "seed": seed,
        "freeze": freeze,
    }

    def base() -> Experiment:
        return _experiment(chosen[0].method, "digits" if data is None else data, given, words)

    shape = None if input is None else tuple(int(size) for size in input)
    of_shape = {"data": data, "input": shape, "classes": classes, "examples": examples}
    rows = estimates.costs(
        chosen, settings, {**given, **of_shape, "data_dir": data_dir}, base, _warn
    )
    return rows[0] if is_one else rows


def sweep(
    methods: str | Sequence[str],
    *,
    seeds: int | Sequence[int] = 1,
    data: Any = "digits",
    set: Mapping[str, Any] | Sequence[str] = (),
    epochs: int | None = None,
    batch: int | None = None,
    lr: float | None = None,
    out: str | Path | None = None,
    engine: str | Engine = "auto",
    device: str = "auto",
    precision: str = "fp32",
    timeout: float | None = None,
    data_dir: str | Path | None = None,
    progress: bool = True,
    **words: Any,
) -> Sweep:
    """Train every method with every value of every setting on every seed, all of them together.

    seeds: how many, from 0 on, or the seeds themselves.
    set: fields of methods with the values to try, ``{"mu": [0.1, 1]}``, or texts as on the command
        line, ``["mu=0.1,1"]``; a method without a field is left as it is.
    out: the sweep's folder, which ``fedgrove resume`` continues; by default a new one under runs/,
        as on the command line.
    words: the others of :func:`run`, the same for all.
    """
    names = [methods] if isinstance(methods, str) else list(methods)
    chosen_seeds = range(seeds) if isinstance(seeds, int) else list(seeds)
    if not names:
        raise InputError("sweep got no method; give a name, as fedavg, or a list of names.")
    base = _experiment(_variant(names[0]).method, data, {}, words)
    federations = Federations(data_dir)
    texts = [
        *_texts(set, several=True),
        *shorthand_settings({"epochs": epochs, "batch": batch, "lr": lr}),
    ]
    experiments = grid.grid(names, base, chosen_seeds, texts, federations.recipe(base))
    name = base.data.name if isinstance(base.data, Federation) else Path(base.data).stem
    folder = fresh_name(Path("runs"), f"sweep-{name}") if out is None else Path(out)
    rounds = base.rounds or federations.defaults(base).rounds
    asked = {"methods": names, "seeds": list(chosen_seeds), "set": texts}
    with _engine(engine, device, precision, timeout) as chosen:
        train_all = partial(
            sweeps.sweep, experiments, folder, engine=chosen, federations=federations, grid=asked
        )
        ends = sweeps.watched(
            folder, experiments, rounds * len(experiments), train_all, not progress
        )
    return Sweep(ends, folder)


def _variant(method: str | AnyMethod) -> grid.Variant:
    """A method with what it is called."""
    if isinstance(method, str):
        return grid.Variant(method, methods.make(method))
    return grid.Variant(methods.name_of(method), method)


def _experiment(
    method: AnyMethod,
    data: Any,
    given: Mapping[str, Any],
    words: Mapping[str, Any],
) -> Experiment:
    """An experiment of the words that were given; an unknown one is refused with a suggestion."""
    known = [each.name for each in fields(Experiment) if each.name not in ("method", "data")]
    for word in words:
        if word not in known:
            raise unknown("word", word, known)
    chosen = {**given, **words}
    if "finetune" in chosen:
        chosen["finetune"] = coerce("finetune", chosen["finetune"], tuple[int, ...])
    if chosen.get("init") is not None:
        chosen["init"] = str(chosen["init"])
    return Experiment(method=method, **with_own_data({"data": data, **chosen}))


def _texts(settings: Settings, several: bool) -> list[str]:
    """Settings as the command line has them; with ``several``, a list holds values to try.

    >>> _texts({"mu": [0.1, 1], "densities": [(0.5, 0.2)]}, several=True)
    ['mu=0.1|1', 'densities=0.5,0.2']
    """
    if not isinstance(settings, Mapping):
        if isinstance(settings, str):
            raise InputError(
                f"set is {settings!r}; it must be a list of texts as mu=0.1, or a dictionary of "
                "values."
            )
        return list(settings)
    texts = []
    for key, value in settings.items():
        values = value if several and isinstance(value, list) else [value]
        texts.append(f"{key}={'|'.join(_text(each) for each in values)}")
    return texts


def _text(value: Any) -> str:
    if isinstance(value, tuple | list):
        return ",".join(str(item) for item in value)
    return str(value)


def _warn(sentence: str) -> None:
    # At the line of the caller of `cost`.
    warnings.warn(sentence, UserWarning, stacklevel=5)
