"""``fedgrove run`` alone: a first result on a new machine, four methods compared."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import typer

from ..errors import InputError, check
from ..options import RunOptions, SweepOptions
from ..options.definition import make_options

if TYPE_CHECKING:
    from ..config.experiment import Experiment, Federations
    from ..config.sweep import Sweep
    from ..report.tables import Summary

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


def run_four_methods(options: RunOptions, is_plan: bool, as_json: bool) -> None:
    """Run ``fedgrove run`` without a method: train four methods and print one table."""
    from .. import api
    from ..config.experiment import Federations
    from ..config.plan import plan
    from ..export.size import model_bytes
    from ..report.terminal import print_text
    from ..runs.result import Failure
    from .sweep import print_plans

    federations = Federations(options.data_dir)
    swept = _make_sweep(options)
    experiments = _make_grid(swept, federations)
    if is_plan:
        return print_plans(experiments, federations, as_json)
    first = next(iter(experiments.values()))
    folder = _choose_folder(first, options.out)
    trained = api.train_grid(experiments, federations, swept, folder)
    summaries: dict[str, Summary] = {}
    sizes: dict[str, list[float]] = {}
    net = plan(first, folder, federations).run.net
    for name, end in trained.items():
        if isinstance(end, Failure):
            print_text(f"{name} failed after {end.folder.rounds_saved()} rounds: {end.why}")
            continue
        summaries[name] = end.summary
        size = model_bytes(end.folder, net)
        if size is not None:
            sizes.setdefault(end.summary["method"], []).append(size)
    _show(summaries, {name: fmean(known) for name, known in sizes.items()}, trained, as_json)
    if trained.has_failures:
        raise typer.Exit(1)


def _make_sweep(options: RunOptions) -> SweepOptions:
    """The options of the sweep; those not given are chosen so that there is something to see."""
    is_scored = options.score_on != 0
    check(is_scored, "score_on", 0, "1 or more without a METHOD, where accuracies are compared")
    defaults: dict[str, Any] = {
        "data": DATA,
        "rounds": ROUNDS,
        "finetune": FINETUNE,
        # Scored at the end only: on the way it would take a third of the time.
        "evaluate": 0,
    }
    # Other data are trained by their own recipe.
    if "data" not in options.given:
        defaults |= {"epochs": EPOCHS, "batch": BATCH, "lr": LR}
    # An option may also be given as a setting: --set lr=0.1, --set local.epochs=2.
    for text in options.set:
        defaults.pop(text.partition("=")[0].rpartition(".")[2], None)
    seeds = (options.seed,) if "seed" in options.given else SEEDS
    values = {**defaults, **options.given_of(SweepOptions), "methods": METHODS, "seeds": seeds}
    return make_options(SweepOptions, values, "run")


def _make_grid(swept: SweepOptions, federations: Federations) -> dict[str, Experiment]:
    from ..config.grid import list_seeds, make_grid

    experiments = make_grid(swept, federations)
    if len(experiments) > len(METHODS) * len(list_seeds(swept.seeds)):
        raise InputError(
            f"--set takes one value here; for several: fedgrove sweep {' '.join(METHODS)} "
            "--set KEY=V,V"
        )
    return experiments


def _choose_folder(first: Experiment, out: str | Path | None) -> Path:
    """A folder that does not exist yet."""
    from ..runs.files import folder_exists, fresh_name

    if out is None:
        return fresh_name(Path("runs"), f"{'-'.join(METHODS)}-{first.data_name}")
    if Path(out).exists():
        raise folder_exists(Path(out))
    return Path(out)


def _show(
    summaries: Mapping[str, Summary], sizes: Mapping[str, float], trained: Sweep, as_json: bool
) -> None:
    """Show one table, one sentence on what was gained, and the page."""
    from ..config.sweep import write_sweep_page
    from ..report.seed_averages import compare_methods, print_method_rows
    from ..report.terminal import print_text

    rows = [{"run": str(trained.path / name), **each} for name, each in summaries.items()]
    if as_json:
        print(json.dumps(rows, indent=1))
    if not rows:
        return
    by_method: dict[str, list[Summary]] = {}
    for row in rows:
        by_method.setdefault(row["method"], []).append(row)
    lines = compare_methods(by_method, sizes)
    # A method of which every seed failed cannot be compared with.
    sentence = describe_gain(by_method) if set(by_method) == set(METHODS) else ""
    page = write_sweep_page(trained.path, trained, sentence)
    if as_json:
        return
    print_method_rows(lines)
    print()
    if sentence:
        print_text(sentence)
    if page is not None:
        print(f"Page: {page}")


def describe_gain(runs: Mapping[str, Sequence[Summary]]) -> str:
    """Return one sentence for the terminal: grove against fedavg, ca-afp and training alone."""
    from ..report.tables import Scores

    def delivered(method: str) -> str:
        # Before fine-tuning: fine-tuning helps every method, and hides what federation gives.
        scores = list(map(Scores.from_summary, runs[method]))
        return scores[0].describe(fmean(each.mean or 0.0 for each in scores))

    def sent(method: str) -> float:
        return fmean(run["bytes_up"] + run["bytes_down"] for run in runs[method])

    sizes = {"/".join(map(str, run["group_sizes"])): None for run in runs["grove"]}
    share = 100 * sent("grove") / sent("fedavg")
    return (
        f"Before fine-tuning, grove gives clients {delivered('grove')} where fedavg gives "
        f"{delivered('fedavg')}, ca-afp {delivered('ca-afp')} and training alone "
        f"{delivered('local')}, with {share:.2g} % of fedavg's bytes "
        f"(ca-afp: {100 * sent('ca-afp') / sent('fedavg'):.0f} %); "
        f"sizes of the groups it found: {', '.join(sizes)}."
    )
