"""Several runs in one table: what ``fedgrove compare`` shows, as rows."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from ..notebook import show_table
from ..report.charts import Chart
from ..report.comparison_report import ComparedRun, draw_comparison, make_comparison_report
from ..report.page import REPORT_FILE, Page
from ..report.seed_averages import average_over_seeds, print_seed_averages
from ..report.tables import OPTIONS_SHOWN, name_cells, print_causes, print_summaries
from ..report.terminal import split_common_folder
from ..runs.folder import RunFolder
from ..runs.result import frame_of_runs
from ..wire.ledger import sum_by_cause
from . import sweep
from .toml import read_run_table

PAGE = "compare.html"


@dataclass(frozen=True, repr=False)
class Comparison:
    """The numbers of several runs, one dictionary for each; unfinished runs are included."""

    rows: list[dict[str, Any]]
    of_sweeps: bool = False
    """Whether a sweep is among them, whose runs are also compared over seeds."""
    by_cause: bool = False
    """Whether bytes are shown by their causes in place of all numbers."""
    paths: Sequence[str] = ()
    """The run folders, where rows have other names."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        unfinished = sum(not row["finished"] for row in self.rows)
        more = f", {unfinished} unfinished" if unfinished else ""
        noun = "run" if len(self) == 1 else "runs"
        return f"Comparison({len(self)} {noun}{more})"

    def _repr_html_(self) -> str:
        _, names = split_common_folder([row["run"] for row in self.rows])
        rows = []
        for row, name in zip(self.rows, names, strict=True):
            rows.append(name_cells({**row, "run": name}))
        return show_table(repr(self), rows)

    def _folders(self) -> list[Path]:
        return list(map(Path, self.paths or [row["run"] for row in self.rows]))

    def table(self) -> None:
        """Print the compared experiments next to each other."""
        if self.by_cause:
            print_causes(self.rows)
            return
        print_summaries(self.rows)
        names = [row["run"] for row in self.rows]
        finished = self._finished(names)
        if self.of_sweeps and any(finished.values()):
            print()
            print_seed_averages(average_over_seeds(finished))

    def _finished(self, names: Sequence[str]) -> dict[str, dict[str, Any] | None]:
        """Return the rows by these names; None for a run that is not finished."""
        rows = zip(names, self.rows, strict=True)
        return {name: row if row["finished"] else None for name, row in rows}

    def groups(self) -> list[dict[str, Any]]:
        """Return every compared method with its settings, over its seeds."""
        _, names = split_common_folder([row["run"] for row in self.rows])
        return average_over_seeds(self._finished(names))

    def page(self) -> Page:
        """Return the HTML page of the compared runs; its method ``write`` makes the file."""
        return make_comparison_report(self._compared())

    def charts(self) -> list[Chart]:
        """Return the charts of the page, each to be written as a file for a paper."""
        return draw_comparison(self._compared())

    def _compared(self) -> list[ComparedRun]:
        """Return the compared runs as their page takes them."""
        runs = []
        for row, path in zip(self.rows, self._folders(), strict=True):
            folder = RunFolder(path)
            lines = folder.metrics_to_show()
            if row["finished"]:
                runs.append(ComparedRun(row["run"], row, lines, config=folder.config))
            else:
                how_far = f"unfinished: {row['rounds_done']} rounds"
                runs.append(ComparedRun(row["run"], None, lines, how_far, folder.config))
        return runs

    def place_of_page(self) -> Path:
        """Return where the comparison page is put by default: with the runs, if they are together.

        A sweep has its page already, which is written again.
        """
        parents = {path.parent for path in self._folders()}
        if len(self.rows) < 2 or len(parents) > 1:
            return Path(PAGE)
        folder = parents.pop()
        if self.of_sweeps and (folder / sweep.SWEEP_FILE).is_file():
            return folder / REPORT_FILE
        return folder / PAGE

    def frame(self) -> Any:
        """Return the compared runs as a DataFrame of pandas."""
        return frame_of_runs(self.rows)


def compare_runs(
    runs: Sequence[str], by_cause: bool = False, temporary: Collection[str] = ()
) -> Comparison:
    """Read the numbers and the config.toml of run folders; a sweep means all its runs.

    Runs in ``temporary`` folders are named by their method, settings and seed.
    """
    paths = list(chain.from_iterable(map(sweep.members_of, runs)))
    rows = [read_summary(path, by_cause) for path in paths]
    unnamed = [path for path in paths if path in temporary]
    names = dict(zip(unnamed, name_runs([RunFolder(Path(p)).config for p in unnamed]), strict=True))
    for path, row in zip(paths, rows, strict=True):
        row["run"] = names.get(path, path)
    return Comparison(rows, of_sweeps=len(rows) > len(runs), by_cause=by_cause, paths=paths)


def name_runs(configs: Sequence[str]) -> list[str]:
    """Return names of compared runs: the method, the settings in which it differs, and the seed.

    >>> one = '[run]\\nmethod = "fedprox"\\nseed = 0\\n[method]\\nmu = 0.1'
    >>> name_runs([one, one.replace("0.1", "0.5"), one.replace("fedprox", "local")])
    ['fedprox-mu=0.1-s0', 'fedprox-mu=0.5-s0', 'local-s0']
    """
    settings = [dict(_flatten(tomllib.loads(config))) for config in configs]
    methods = [str(each.get("run.method", "run")) for each in settings]
    counts: Counter[str] = Counter()
    names = []
    for method, own in zip(methods, settings, strict=True):
        alike = [each for name, each in zip(methods, settings, strict=True) if name == method]
        parts = [method]
        for key, value in own.items():
            is_same = all(each.get(key) == value for each in alike)
            if key != "run.seed" and not is_same:
                parts.append(f"{key.rpartition('.')[2]}={value}")
        label = "-".join(parts)
        name = f"{label}-s{own.get('run.seed', 0)}"
        counts[name] += 1
        # The same run again.
        names.append(name if counts[name] == 1 else f"{name} ({counts[name]})")
    return names


def _flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of a config.toml under dotted names."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def read_summary(path: str, by_cause: bool = False) -> dict[str, Any]:
    """Read a run's numbers, or how far it got, with the options of its config.toml."""
    folder = RunFolder.open(Path(path))
    table = read_run_table(folder.config).items()
    options = {name: value for name, value in table if name in OPTIONS_SHOWN}
    if by_cause:
        options["bytes_causes"] = sum_by_cause(folder.metrics())
    summary = folder.summary
    if summary is not None:
        return {"run": path, "finished": True, **options, **summary}
    folder.check()
    return {"run": path, "finished": False, **options, "rounds_done": folder.rounds_saved()}
