"""``fedgrove run`` alone: something worth seeing on a fresh machine, four methods side by side."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from .sweep import grid_of, print_plans, watched

if TYPE_CHECKING:
    from ..config.experiment import Experiment, Federations
    from ..report.tables import Summary
    from ..runs.result import Failure, Result

METHODS = ("local", "fedavg", "ca-afp", "grove")
DATA = "motion"
"""Built in, and its users are of three kinds: there are groups to be found."""
SEEDS = (0, 1, 2)
ROUNDS = 40
"""Many and short (see EPOCHS): what is coded, and groups, need reports more than epochs."""
EPOCHS = 1
BATCH = 32
LR = 5e-3
"""Larger than the data set's own, as batches are, which are for three epochs a round."""
FINETUNE = (0, 3)


def side_by_side(words: Mapping[str, Any]) -> None:
    """Train all on the same clients from the same start, and show them in one table and a page."""
    from ..config import sweep as library
    from ..config.experiment import Federations
    from ..config.plan import plan
    from ..export.size import model_bytes
    from ..report.terminal import print_text
    from ..runs.result import Failure
    from . import arguments

    federations = Federations(words["data_dir"])
    experiments = _experiments(words, federations)
    if words["dry_run"]:
        return print_plans(experiments, federations, words["json"])
    first = next(iter(experiments.values()))
    folder = _folder(first, words["out"])
    total = sum(experiment.rounds or 0 for experiment in experiments.values())
    with arguments.engine(words) as chosen:
        run = partial(library.sweep, experiments, folder, engine=chosen, federations=federations)
        ends = watched(folder, experiments, total, run, words["json"])
    summaries: dict[str, Summary] = {}
    sizes: dict[str, list[float]] = {}
    net = plan(first, folder, federations).run.net
    failed = False
    for name, end in ends.items():
        if isinstance(end, Failure):
            failed = True
            print_text(f"{name} failed after {end.folder.rounds_saved()} rounds: {end.why}")
        else:
            summaries[name] = end.summary
            size = model_bytes(end.folder, net)
            if size is not None:
                sizes.setdefault(end.summary["method"], []).append(size)
    mean_sizes = {method: sum(known) / len(known) for method, known in sizes.items()}
    _show(summaries, mean_sizes, folder, ends, words["json"])
    if failed:
        raise typer.Exit(1)


def _experiments(words: Mapping[str, Any], federations: Federations) -> dict[str, Experiment]:
    """The experiments by name; what was not given is chosen so that there is something to see."""
    from ..errors import InputError, check

    is_scored = words.get("score_on") != 0
    check(is_scored, "--score-on", 0, "1 or more without a METHOD, where accuracies are compared")
    seeds = SEEDS if words["seed"] is None else (words["seed"],)
    defaults: dict[str, Any] = {
        "data": DATA,
        "rounds": ROUNDS,
        "finetune": FINETUNE,
        # Scored at the end only: on the way it would take a third of the time.
        "evaluate": 0,
    }
    # Other data are trained by their own recipe.
    if words["data"] is None:
        defaults |= {"epochs": EPOCHS, "batch": BATCH, "lr": LR}
    grid_words = {
        **words,
        "methods": METHODS,
        "seeds": seeds,
        "vary": list(words["set"] or ()),
    }
    # A word may also be given as a setting: --set lr=0.1, --set local.epochs=2.
    settings = {text.partition("=")[0].rpartition(".")[2] for text in words["set"] or ()}
    for word, default in defaults.items():
        # Not `or`: 0 rounds were given, and are refused later.
        if words[word] is None and word not in settings:
            grid_words[word] = default
    experiments = grid_of(grid_words, federations)
    if len(experiments) > len(METHODS) * len(seeds):
        raise InputError(
            f"--set takes one value here; for several: fedgrove sweep {' '.join(METHODS)} "
            "--set KEY=V,V"
        )
    return experiments


def _folder(first: Experiment, out: str | None) -> Path:
    """A folder that does not exist yet."""
    from ..runs.files import folder_exists, fresh_name

    if out is None:
        data = Path(str(first.data)).stem
        return fresh_name(Path("runs"), f"{'-'.join(METHODS)}-{data}")
    if Path(out).exists():
        raise folder_exists(Path(out))
    return Path(out)


def _show(
    summaries: Mapping[str, Summary],
    sizes: Mapping[str, float],
    folder: Path,
    ends: Mapping[str, Result | Failure],
    json: bool,
) -> None:
    """One table, one sentence of what was gained, and the page."""
    from ..config.sweep import write_sweep_page
    from ..report.seed_averages import compare_methods, print_method_rows
    from ..report.terminal import print_text

    rows = [{"run": str(folder / name), **summary} for name, summary in summaries.items()]
    if json:
        print(jsonlib.dumps(rows, indent=1))
    if not rows:
        return
    by_method: dict[str, list[Summary]] = {}
    for row in rows:
        by_method.setdefault(row["method"], []).append(row)
    lines = compare_methods(by_method, sizes)
    sentence = ""
    # A method of which every seed failed cannot be compared with.
    if set(by_method) == set(METHODS):
        sentence = gained(by_method)
    page = write_sweep_page(folder, ends, sentence)
    if json:
        return
    print_method_rows(lines)
    print()
    if sentence:
        print_text(sentence)
    if page is not None:
        print(f"Page: {page}")


def gained(runs: Mapping[str, Sequence[Summary]]) -> str:
    """One sentence: grove against fedavg, ca-afp and training alone."""

    def mean(method: str, value: str) -> float:
        return float(sum(run[value] for run in runs[method]) / len(runs[method]))

    def delivered(method: str) -> str:
        # As delivered: fine-tuning helps every method, and hides what federation gives.
        scores: list[float] = []
        for run in runs[method]:
            shortest = next(iter(run["finetune"].values()))
            metric = run.get("metric") or "accuracy"
            scores.append(shortest[f"{metric}_mean"])
        score = sum(scores) / len(scores)
        if run.get("share", True):
            return f"{100 * score:.1f} %"
        return f"{metric} {score:.4g}"

    def sent(method: str) -> float:
        return mean(method, "bytes_up") + mean(method, "bytes_down")

    sizes = {"/".join(str(n) for n in run["group_sizes"]): None for run in runs["grove"]}
    share = 100 * sent("grove") / sent("fedavg")
    return (
        f"As delivered, grove gives clients {delivered('grove')} where fedavg gives "
        f"{delivered('fedavg')}, ca-afp {delivered('ca-afp')} and training alone "
        f"{delivered('local')}, with {share:.2g} % of fedavg's bytes "
        f"(ca-afp: {100 * sent('ca-afp') / sent('fedavg'):.0f} %); "
        f"sizes of the groups it found: {', '.join(sizes)}."
    )
