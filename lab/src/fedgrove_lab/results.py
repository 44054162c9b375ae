"""Published results: ``lab/results/NAME.json``, one file per table.

A file has the command, the commit, the date, the machine and every value, seed by seed::

    {
     "command": "fedgrove paper grove --table 1 --data uci-har",
     "commit": "0845d20", "date": "2026-11-18",
     "machine": "2 CPU cores", "torch": "2.9.1",
     "seeds": [0, 1, 2],
     "rows": [{"name": "fedavg", "data": "uci-har", "values": {"accuracy_mean:0": [0.93, ...]}}],
     "notes": []
    }

``fedgrove paper`` and ``fedgrove bench`` write one with ``--store NAME``. Finished run folders are
stored by ``python -m fedgrove_lab.results NAME FOLDER ... --command COMMAND``. Numbers in the docs
come from these files alone (:mod:`fedgrove_lab.tables`).
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from fedgrove.errors import InputError
from fedgrove.options.definition import Options, options_of

from .papers.measures import run_value

LAB = Path(__file__).parents[2]
"""The folder ``lab`` of a checkout."""
NOT_STORED = ("json", "store", "out", "data_dir", "plot")
"""Options that change no number; some are paths of one machine."""
LENGTH_MEASURES = ("accuracy_mean", "accuracy_std", "accuracy_worst10")
"""What is stored of a run at each length of fine-tuning."""
RUN_MEASURES = ("kb_each", "mib", "params", "density_end")
"""What is stored of a run as a whole."""


# ---- where a measurement comes from --------------------------------------------------------------


def describe_measurement(command: str) -> dict[str, Any]:
    """Return what makes a measurement repeatable: command, commit, date, machine and torch."""
    return {
        "command": command,
        "commit": find_commit(LAB),
        "date": datetime.date.today().isoformat(),
        "machine": describe_machine(),
        "torch": torch.__version__,
    }


def find_commit(folder: Path) -> str:
    """Return the commit of a checkout, with "+" behind it where files differ from it."""
    try:
        commit = _git(folder, "rev-parse", "--short=10", "HEAD")
        changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{commit}+" if changes else commit


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def describe_machine() -> str:
    """Return the number of cores, and the GPU where torch sees one."""
    cores = f"{os.cpu_count()} CPU cores"
    if torch.cuda.is_available():
        return f"one {torch.cuda.get_device_name()}, {cores}"
    return cores


def find_command(command: str, options: Options) -> str:
    """Return a command line with the options that were given and matter.

    Not from typer's context: newer versions of typer bring a click of their own, which the click
    that is installed knows nothing of.
    """
    parts = [command]
    for name, field in options_of(cast(type, type(options))).items():
        if name not in options.given or name in NOT_STORED:
            continue
        value = options.given[name]
        if not field.option.is_argument:
            parts.append(field.flag)
        if not isinstance(value, bool):
            is_list = isinstance(value, list | tuple | range)
            text = ",".join(str(item) for item in value) if is_list else str(value)
            parts.append(shlex.quote(text))
    return " ".join(parts)


# ---- writing and reading -------------------------------------------------------------------------


def write_result(
    name: str,
    measurement: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    seeds: Iterable[int] = (),
    notes: Iterable[str] = (),
    seconds: float | None = None,
) -> Path:
    """Write ``lab/results/NAME.json``.

    Args:
        name: The name of the file, and of the table.
        measurement: What :func:`describe_measurement` returned.
        rows: For each row its names, and ``values``: a list for each measure, one value per seed.
        seeds: The seeds, in the order of the values; none where nothing depends on a seed.
        notes: Sentences that belong to the numbers.
        seconds: How long it took. Only GPU minutes are stored: what a shared CPU takes says little.

    Raises:
        InputError: There is no folder for results, since this is not a checkout.
    """
    folder = LAB / "results"
    if not folder.is_dir():
        raise InputError(
            f"--store is {name}, and there is no folder {folder}; results are stored in a checkout "
            "of fedgrove's repository only."
        )
    result = dict(measurement)
    if seconds is not None and torch.cuda.is_available():
        result["gpu_minutes"] = round(seconds / 60, 1)
    result |= {"seeds": list(seeds), "rows": list(rows), "notes": list(notes)}
    path = folder / f"{name}.json"
    path.write_text(_write_json(result))
    return path


def _write_json(result: Mapping[str, Any]) -> str:
    """JSON with a line for each list of values, so that a change can be read."""
    text = json.dumps(result, indent=1)
    one_line = re.compile(r"\[\s+([^\[\]{}\"]+?)\s+\]")
    return one_line.sub(lambda match: f"[{' '.join(match[1].split())}]", text) + "\n"


def read_result(name: str) -> dict[str, Any]:
    """Read ``lab/results/NAME.json``."""
    result: dict[str, Any] = json.loads((LAB / "results" / f"{name}.json").read_text())
    return result


# ---- rows ----------------------------------------------------------------------------------------


def rows_of_comparisons(comparisons: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of what ``fedgrove paper --json`` prints."""
    rows = []
    for comparison in comparisons:
        for row in comparison["rows"]:
            if "measure" in row:
                # A line of a table about the data.
                values = {"ours": [row["ours"]]}
                names = {"data": row["data"], "name": row["measure"]}
                if row["paper"] is not None:
                    values["paper"] = [row["paper"]]
                rows.append({**names, "values": values})
                continue
            names = {key: row[key] for key in ("name", "label", "data", "split", "panel")}
            rows.append({**names, "seeds": row["seeds"], "values": row["values"]})
    return rows


def rows_of_bench(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of what ``fedgrove bench --json`` prints: names, and numbers as lists."""
    rows = []
    for row in content["rows"]:
        names = {}
        values = {}
        for key, value in _flatten(row):
            if isinstance(value, list):
                values[key] = value
            elif isinstance(value, bool | str):
                names[key] = value
            elif value is not None:
                values[key] = [value]
        rows.append({**names, "values": values})
    return rows


def _flatten(row: Mapping[str, Any], start: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in row.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{start}{key}.")
        else:
            yield f"{start}{key}", value


def rows_of_folders(folders: Iterable[Path]) -> list[dict[str, Any]]:
    """Return the rows of finished run folders: those of one name, up to ``-sSEED``, are a row."""
    summaries: dict[str, list[dict[str, Any]]] = {}
    for folder in folders:
        # A sweep's folder has its runs in folders; a run's folder has the summary itself.
        for path in sorted([*folder.glob("summary.json"), *folder.glob("*/summary.json")]):
            name = re.sub(r"-s\d+$", "", path.parent.name)
            summary = json.loads(path.read_text())
            summary["rounds_pure"] = count_pure_rounds(path.parent)
            summaries.setdefault(name, []).append(summary)
    rows = []
    for name, runs in summaries.items():
        runs.sort(key=lambda summary: int(summary["seed"]))
        values = {}
        for key in _keys(runs[0]):
            found = []
            for run in runs:
                value = run_value(run, key)
                if value is not None:
                    found.append(round(value, 8))
            # A measure that one of the seeds does not have is left out.
            if len(found) == len(runs):
                values[key] = found
        for task in runs[0].get("tasks", {}):
            values[f"{task}_mean"] = [round(run["tasks"][task]["mean"], 8) for run in runs]
        if "purity" in runs[0]:
            values["rounds_pure"] = [float(run["rounds_pure"]) for run in runs]
        seeds = [run["seed"] for run in runs]
        rows.append({"name": name, "data": runs[0]["data"], "seeds": seeds, "values": values})
    return rows


def count_pure_rounds(folder: Path) -> int:
    """Return the number of rounds of a run in which every group had clients of one kind only."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return sum(json.loads(line).get("purity") == 1 for line in lines)


def _keys(summary: Mapping[str, Any]) -> list[str]:
    keys = []
    # Tasks of different problems have no common scores: their means follow one by one.
    is_mixed = "tasks" in summary
    for length in () if is_mixed else summary["finetune"]:
        for measure in LENGTH_MEASURES:
            keys.append(f"{measure}:{length}")
    return [*keys, *RUN_MEASURES]


def main(arguments: Sequence[str] | None = None) -> None:
    """Store finished run folders as a result."""
    parser = argparse.ArgumentParser("python -m fedgrove_lab.results", description=main.__doc__)
    parser.add_argument("name", help="The name of the result.")
    parser.add_argument("folders", nargs="+", type=Path, help="Run folders, or a sweep's folder.")
    parser.add_argument("--command", required=True, help="The command that made the folders.")
    parser.add_argument("--commit", help="The commit that they were made with; else this one.")
    parser.add_argument("--machine", help="The machine that they were made on; else this one.")
    parser.add_argument("--torch", help="The version of torch there; else the one installed here.")
    parser.add_argument("--gpu-minutes", type=float, help="How long a GPU took.")
    given = parser.parse_args(arguments)
    rows = rows_of_folders(given.folders)
    if not rows:
        folders = ", ".join(str(folder) for folder in given.folders)
        parser.error(f"there is no summary.json of a finished run in {folders}")
    measurement = describe_measurement(given.command)
    for name in ("commit", "machine", "torch", "gpu_minutes"):
        value = getattr(given, name)
        if value is not None:
            measurement[name] = value
    print(write_result(given.name, measurement, rows, rows[0]["seeds"]))


if __name__ == "__main__":
    main()
