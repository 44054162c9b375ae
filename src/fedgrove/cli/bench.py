"""``fedgrove bench``: what fedgrove costs, measured beside the plain way in the same run."""

from __future__ import annotations

import json as jsonlib
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import check
from . import options as o
from .bench_device import device as device_bench

bench = typer.Typer(
    help="Measure fedgrove beside the plain way.", add_completion=False, rich_markup_mode=None
)
Rounds = Annotated[
    int, typer.Option("--rounds", help="Rounds of fedavg behind the small model.", metavar="N")
]
Steps = Annotated[int, typer.Option("--steps", help="Steps of SGD behind ResNet-18.", metavar="N")]
NoResnet = Annotated[bool, typer.Option("--no-resnet", help="Leave ResNet-18 out.")]
Quick = Annotated[
    bool, typer.Option("--quick", help="A look: generated data, one round, no ResNet-18.")
]
Plot = Annotated[
    str | None, typer.Option("--plot", help="Write a page of figures too.", metavar="FILE.html")
]


bench.command("device")(device_bench)


@bench.callback()
def top() -> None:
    """Measure fedgrove beside the plain way."""


Scene = Annotated[
    str, typer.Option("--scene", help="har, cnn, resnet, all of these, or uci-har.", metavar="NAME")
]
Repeats = Annotated[
    int, typer.Option("--repeats", help="Rounds measured of each variant, in turns.", metavar="N")
]
Starts = Annotated[
    int, typer.Option("--starts", help="Processes of each variant's own; 0: none.", metavar="N")
]
Seeds = Annotated[int, typer.Option("--seeds", help="Runs in lockstep.", metavar="N")]


@bench.command()
def engine(
    scene: Scene = "har",
    repeats: Repeats = 5,
    starts: Starts = 3,
    device: o.Device = "auto",
    cohort: o.Cohort = None,
    data_dir: o.DataDir = None,
    plot: Plot = None,
    json: o.Json = False,
) -> None:
    """Seconds per round of our engines beside a plain PyTorch loop, Flower's simulation and pfl-research."""
    from ..bench import page, show
    from ..bench.engine import measure
    from ..bench.scenes import SCENES
    from ..bench.starts import measure_starts
    from ..engines import device_of

    if plot:
        show.need_plotly(Path(plot))
    check(repeats >= 1, "repeats", repeats, "1 or more")
    check(starts >= 0, "starts", starts, "0 or more")
    at, rows = device_of(device), list[dict[str, Any]]()
    for name in list(SCENES) if scene == "all" else [scene]:
        rows += measure(name, at, repeats, cohort, data_dir)
        if starts:
            rows += measure_starts(
                name, at, starts, cohort, data_dir, say=lambda line: print(line, file=sys.stderr)
            )
    _show(rows, json)
    if plot:
        page.write_times(rows, Path(plot))


@bench.command()
def lockstep(
    seeds: Seeds = 20, repeats: Repeats = 4, data_dir: o.DataDir = None, json: o.Json = False
) -> None:
    """Seconds per round of many seeds on a GPU: together, one after another, and as a plain loop."""
    from ..bench.engine import lockstep as measure
    from ..engines import device_of

    _show(measure(seeds, device_of("cuda"), repeats, data_dir), json)


def _show(rows: list[dict[str, Any]], json: bool) -> None:
    from ..bench.show import print_times

    if json:
        print(jsonlib.dumps(rows, indent=1))
    else:
        print_times(rows)


@bench.command()
def wire(
    rounds: Rounds = 5,
    steps: Steps = 100,
    no_resnet: NoResnet = False,
    quick: Quick = False,
    data_dir: o.DataDir = None,
    plot: Plot = None,
    json: o.Json = False,
) -> None:
    """Bytes against their entropy, and speed against bitmap + zstandard, on trained weights; takes some minutes."""
    from ..bench import show, weights
    from ..bench.wire import Row, measure, report

    if plot:
        show.need_plotly(Path(plot))
    models = [
        weights.federated(1, data_dir, "motion") if quick else weights.federated(rounds, data_dir)
    ]
    if not (no_resnet or quick):
        models.append(weights.resnet(steps, data_dir))
    rows: list[Row] = []
    for model in models:
        for row in measure(model, repeats=5 if quick else 51):
            rows.append(row)
            print(
                f"{row.model}, density {row.density:g}, {row.kind}: {row.share:.4f} of dense",
                file=sys.stderr,
            )
    found = report(models, rows)
    if json:
        print(jsonlib.dumps(found, indent=1))
    else:
        show.print_rows(rows, found)
    if plot:
        show.write_page(rows, found, Path(plot))
