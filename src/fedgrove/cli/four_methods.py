"""``fedgrove run`` alone: a first result on a new machine, four methods compared."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

import typer

from ..options import RunOptions

if TYPE_CHECKING:
    from ..config.sweep import Sweep
    from ..report.tables import Summary


def run_four_methods(options: RunOptions, is_plan: bool, as_json: bool) -> None:
    """Run ``fedgrove run`` without a method: train four methods and print one table."""
    from .. import api
    from ..config.experiment import Federations
    from ..config.grid import compare_four_methods
    from ..config.plan import plan
    from ..export.size import model_bytes
    from ..report.terminal import print_text
    from ..runs.result import Failure
    from .sweep import print_plans

    federations = Federations(options.data_dir)
    swept, experiments, folder = compare_four_methods(options, federations)
    if is_plan:
        return print_plans(experiments, federations, as_json)
    first = next(iter(experiments.values()))
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


def _show(
    summaries: Mapping[str, Summary], sizes: Mapping[str, float], trained: Sweep, as_json: bool
) -> None:
    """Show one table, one sentence on what was gained, and the page."""
    from ..config.grid import FOUR_METHODS
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
    sentence = describe_gain(by_method) if set(by_method) == set(FOUR_METHODS) else ""
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
