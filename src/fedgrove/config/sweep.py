"""A sweep: many runs in lockstep, each in its own run folder under one folder.

::

    sweep.json        the grid, and how each run stands: done, failed (and why) or unfinished
    report.html       all runs on one page
    lock              while a process trains the sweep
    NAME/             a run folder (see :mod:`fedgrove.runs.folder`), the same as of a run alone
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import engines
from ..core import Engine
from ..engines.faulty import with_faults
from ..errors import DamageError, EngineError, InputError, check, spell_hint, spell_option
from ..notebook import show_table
from ..report.comparison_report import ComparedRun, make_comparison_report
from ..report.page import Page, write_if_possible
from ..report.progress import MergedProgress, show_progress
from ..report.seed_averages import average_over_seeds, name_group_cells, print_seed_averages
from ..report.tables import print_summaries
from ..report.terminal import print_pairs
from ..runs import files, schemas
from ..runs.files import PARTIAL, cannot_write, write_bytes
from ..runs.folder import RunFolder
from ..runs.lock import LOCK_FILE, check_free, locked
from ..runs.lockstep import Watch, ignore, train_together
from ..runs.report_html import REPORT_FILE as PAGE
from ..runs.report_html import write_run_report
from ..runs.result import Failure, Result, frame_of_runs
from .experiment import Experiment, Federations
from .plan import Plan, ended, made_here, plan
from .toml import (
    check_files,
    check_format,
    check_trust,
    from_toml,
    how_to_resume,
    made_in_python,
    same,
)

SWEEP_FILE = "sweep.json"


def sweep(
    experiments: Mapping[str, Experiment],
    out: str | Path,
    *,
    engine: str | Engine = "auto",
    data_dir: str | Path | None = None,
    federations: Federations | None = None,
    watch: Watch | None = None,
    grid: Mapping[str, Any] | None = None,
) -> list[Result | Failure]:
    """Run all experiments of a sweep in lockstep, each in ``out/NAME``; results in their order.

    Each result is the one the run would give alone. A run that fails leaves the others alone. On a
    folder that holds the same sweep, finished runs are taken as they are and all others continue
    from their last checkpoints. ``watch`` is called with every line of metrics, its run's name
    under "run". ``grid``, the request, is kept in sweep.json. ``federations`` that were read
    before are used again, in place of ``data_dir``.
    """
    folder = Path(out)
    if federations is None:
        federations = Federations(data_dir)
    plans = plan_all(experiments, folder, federations)
    chosen = engines.choose(engine) if isinstance(engine, str) else engine
    try:
        # Also before the lock: it is a file, and nothing is written to a folder of others.
        _check_folder(folder, plans)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise cannot_write(folder, error) from None
        with locked(folder):
            folders = _open_folders(folder, plans)
            return _train(folder, plans, folders, chosen, watch or ignore, grid or {})
    finally:
        if isinstance(engine, str):
            chosen.close()


def resume(
    out: str | Path,
    *,
    engine: str | Engine = "auto",
    data_dir: str | Path | None = None,
    trust: bool = False,
    watch: Watch | None = None,
) -> list[Result | Failure]:
    """Resume an interrupted sweep; a run that had failed tries its last exchange again.

    Runs whose config.toml names a file of code need ``trust``: that file is run.
    """
    try:
        experiments = experiments_of(out, trust)
    except DamageError:
        raise
    except InputError as error:
        raise InputError(
            f"{error} Or call fedgrove.config.sweep.sweep again with the same experiments."
        ) from None
    grid = read(out)["grid"]
    return sweep(experiments, out, engine=engine, data_dir=data_dir, watch=watch, grid=grid)


@dataclass(frozen=True, eq=False, repr=False)
class Sweep(Mapping[str, Result | Failure]):
    """How the runs of a sweep ended, by name, and the folder that holds them."""

    ends: Mapping[str, Result | Failure]
    path: Path

    def __getitem__(self, name: str) -> Result | Failure:
        return self.ends[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.ends)

    def __len__(self) -> int:
        return len(self.ends)

    def __repr__(self) -> str:
        failed = sum(isinstance(end, Failure) for end in self.ends.values())
        failures = f", {failed} failed" if failed else ""
        return f"Sweep({len(self)} runs{failures}, in {str(self.path)!r})"

    def _repr_html_(self) -> str:
        notes = []
        for name, end in self.ends.items():
            if isinstance(end, Failure):
                notes.append(f"{name} failed: {end.why}")
        return show_table(repr(self), name_group_cells(self.groups()), notes)

    @property
    def has_failures(self) -> bool:
        """Whether a run of the sweep could not be finished."""
        return any(isinstance(end, Failure) for end in self.ends.values())

    def summaries(self) -> dict[str, dict[str, Any] | None]:
        """The numbers of each run of the sweep; None for a run that failed."""
        ends = self.ends.items()
        return {name: end.summary if isinstance(end, Result) else None for name, end in ends}

    def groups(self) -> list[Any]:
        """Every method of the sweep with its settings, over its seeds."""
        return average_over_seeds(self.summaries())

    def frame(self) -> Any:
        """Return a row per run of the sweep as a DataFrame: its name, state and summary."""
        summaries = self.summaries()
        rows = []
        for name, end in self.ends.items():
            rows.append({"run": name, **state(end), **(summaries[name] or {})})
        return frame_of_runs(rows)

    def table(self) -> None:
        """Print every run of the sweep, then methods over seeds, then what failed and why."""
        summaries = self.summaries().items()
        rows = [{"run": name, **summary} for name, summary in summaries if summary is not None]
        if rows:
            print_summaries(rows)
        groups = self.groups()
        # Runs without a score are in the first table only.
        if groups:
            print()
            print_seed_averages(groups)
        failures = []
        for name, end in self.ends.items():
            if isinstance(end, Failure):
                saved = end.folder.rounds_saved()
                failures.append((name, f"failed after {saved} rounds: {end.why}"))
        print_pairs(failures)


def watched(
    out: Path,
    names: Iterable[str],
    total: int,
    run: Callable[..., list[Result | Failure]],
    quiet: bool,
) -> dict[str, Result | Failure]:
    """Run a sweep under one progress line; return how each run ended, by name."""
    names = list(names)
    merged = MergedProgress()
    past = []
    for name in names:
        for line in RunFolder(out / name).metrics_to_show():
            past.append(merged(name, line))
    with show_progress(total, past, quiet=quiet) as watch:
        ends = run(watch=lambda line: watch(merged(line["run"], line)))
    return dict(zip(names, ends, strict=True))


def members_of(path: str) -> list[str]:
    """Return the run folders of a sweep; any other folder is returned itself."""
    if not (Path(path) / SWEEP_FILE).is_file():
        return [path]
    return [str(Path(path) / name) for name in read(path)["members"]]


def read(out: str | Path) -> dict[str, Any]:
    """Read sweep.json: ``grid``, and ``members`` with the state of each run by name."""
    path = Path(out) / SWEEP_FILE
    if not path.is_file():
        raise InputError(
            f"{out} contains no sweep: it has no {SWEEP_FILE}. "
            f"`{spell_hint('fedgrove sweep --out DIR', 'fedgrove.sweep(out=DIR)')}` makes one."
        )
    content = files.read_sealed(files.check_inside(Path(out), SWEEP_FILE), new_keys=())
    schemas.check_content(content, schemas.SweepContent, path)
    for name in content["members"]:
        files.check_inside(Path(out), name)
    return content


def experiments_of(out: str | Path, trust: bool = False) -> dict[str, Experiment]:
    """The experiments of a sweep, rebuilt from its run folders; ``trust`` is for code they name."""
    experiments = {}
    for name in read(out)["members"]:
        folder = RunFolder.open(Path(out) / name)
        check_format(folder.config, folder.path)
        check_trust(folder.config, folder.path, trust)
        check_files(folder.config)
        experiments[name] = from_toml(folder.config)
    return experiments


def plan_all(
    experiments: Mapping[str, Experiment], out: Path, federations: Federations
) -> dict[str, Plan]:
    """Build and check all experiments of a sweep; nothing is written."""
    check(bool(experiments), "a sweep", {}, "one run or more")
    plans = {}
    for name, experiment in experiments.items():
        is_plain_name = name not in ("", ".", "..", SWEEP_FILE) and Path(name).name == name
        check(is_plain_name, "a run's name", name, "a plain file name")
        plans[name] = plan(experiment, out / name, federations)
    return plans


# ---- folders -------------------------------------------------------------------------------------


def _check_folder(out: Path, plans: Mapping[str, Plan]) -> dict[str, str]:
    """Refuse a folder that holds something else; the config.toml of each run."""
    configs = {name: planned.config for name, planned in plans.items()}
    if not _holds_this_sweep(out, configs):
        has_a_run = (out / SWEEP_FILE).is_file() or (out / "config.toml").is_file()
        how = spell_hint(f"fedgrove resume {out}", f"fedgrove.config.sweep.resume({str(out)!r})")
        way_out = f", or resume its sweep with: {how}" if has_a_run else "."
        raise InputError(
            f"{out} contains a different sweep or other files, and nothing is overwritten. Give a "
            f"different {spell_option('out')}{way_out}"
        )
    return configs


def _open_folders(out: Path, plans: Mapping[str, Plan]) -> dict[str, RunFolder]:
    """A folder for every run; one that exists must have the same run, and not be in training.

    All is checked before anything is made.
    """
    configs = _check_folder(out, plans)
    for name in configs:
        check_free(out / name)
    for path in out.glob(f"*{PARTIAL}"):
        path.unlink()
    folders = {}
    for name, config in configs.items():
        path = out / name
        if not path.exists():
            folders[name] = RunFolder.create(path, config)
            continue
        folders[name] = RunFolder(path)
        if not (path / "config.toml").is_file():
            # A kill came between the folder and its first file.
            folders[name].begin(config)
    return folders


def _holds_this_sweep(out: Path, configs: Mapping[str, str]) -> bool:
    """Whether a folder holds these runs, some of them, or nothing yet."""
    if not out.exists():
        return True
    if not out.is_dir():
        return False
    # A kill while the folders were made leaves some of them, and no sweep.json.
    if (out / SWEEP_FILE).is_file() and set(read(out)["members"]) != set(configs):
        return False
    names = {name for name in _names_in(out) - {SWEEP_FILE} if not name.endswith(".html")}
    if not names <= set(configs):
        return False
    return all(_holds_this_run(out / name, configs[name]) for name in names)


def _holds_this_run(path: Path, config: str) -> bool:
    """Whether a folder holds this run, or nothing yet."""
    if (path / "config.toml").is_file():
        check_format(RunFolder(path).config, path)
        return same(RunFolder(path).config, config)
    return path.is_dir() and _names_in(path) <= {files.CHECKSUMS}


def _names_in(folder: Path) -> set[str]:
    """What a folder holds, but for the traces of a process that was killed."""
    names = {path.name for path in folder.iterdir()} - {LOCK_FILE}
    return {name for name in names if not name.endswith(PARTIAL)}


# ---- running -------------------------------------------------------------------------------------


def _train(
    out: Path,
    plans: Mapping[str, Plan],
    folders: Mapping[str, RunFolder],
    engine: Engine,
    watch: Watch,
    grid: Mapping[str, Any],
) -> list[Result | Failure]:
    ends: dict[str, Result | Failure] = {}
    members = []
    for name, folder in folders.items():
        try:
            summary = folder.summary
        except DamageError as error:
            ends[name] = Failure(str(error), folder)
            continue
        if summary is not None:
            ends[name] = Result(summary, folder, **made_here(plans[name].experiment))
        else:
            member = plans[name].member(folder, watch, name)
            member.shared_by = len(plans)
            members.append(member)
    try:
        _write(out, grid, folders, ends)
        faulty = with_faults(engine, [member.run for member in members])
        for member in train_together(members, faulty):
            ends[member.name] = ended(member, plans[member.name].experiment)
            _write(out, grid, folders, ends)
    except (KeyboardInterrupt, EngineError) as stop:
        finished = sum(isinstance(end, Result) for end in ends.values())
        how = _how_to_resume(out, [planned.config for planned in plans.values()])
        hint = f"{finished} of {len(folders)} runs are finished; {how}"
        if isinstance(stop, EngineError):
            raise EngineError(f"{stop} {hint}") from stop
        raise KeyboardInterrupt(f"Interrupted. {hint}") from None
    # After all runs have ended, so that each report finds the others.
    for member in members:
        end = ends[member.name]
        write_run_report(end.folder, failure=end.why if isinstance(end, Failure) else "")
    ordered = {name: ends[name] for name in folders}
    write_sweep_page(out, ordered)
    return list(ordered.values())


def write_sweep_page(
    out: Path, ends: Mapping[str, Result | Failure], lead: str = ""
) -> Path | None:
    """Write the page of a sweep; its path, or None where that was not possible.

    ``lead`` is its first sentence, if not the usual one.
    """

    def make_page() -> Page:
        return make_comparison_report(compared_ends(out, ends), lead=lead)

    return write_if_possible(make_page, out / PAGE, force=True)


def compared_ends(out: Path, ends: Mapping[str, Result | Failure]) -> list[ComparedRun]:
    """Return how the runs of a sweep ended, as their common page takes it."""
    runs = []
    for name, end in ends.items():
        lines = end.folder.metrics_to_show()
        if isinstance(end, Failure):
            why = f"failed: {end.why}"
            runs.append(ComparedRun(str(out / name), None, lines, why, config=end.folder.config))
        else:
            runs.append(ComparedRun(str(out / name), end.summary, lines, config=end.folder.config))
    return runs


def _how_to_resume(out: Path, configs: Sequence[str]) -> str:
    if any(made_in_python(config) for config in configs):
        # What was made in Python is not in the folders; where it is given again, they are found.
        return "to continue, run the same sweep again from Python."
    # Any of those that name code says how.
    ways = {how_to_resume(config, out, "fedgrove.config.sweep.resume") for config in configs}
    return max(ways, key=len)


def _write(
    out: Path,
    grid: Mapping[str, Any],
    folders: Mapping[str, RunFolder],
    ends: Mapping[str, Result | Failure],
) -> None:
    """Write sweep.json: the grid, and the state of each run."""
    members = {name: state(ends.get(name)) for name in folders}
    content = files.seal_json({"grid": grid, "members": members}, indent=1)
    write_bytes(files.check_inside(out, SWEEP_FILE), content, sync=True)


def state(end: Result | Failure | None) -> dict[str, str]:
    """Return the state of a run of a sweep, as in sweep.json."""
    if end is None:
        return {"state": "unfinished"}
    if isinstance(end, Failure):
        return {"state": "failed", "why": end.why}
    return {"state": "done"}
