"""``fedgrove bench``: what fedgrove costs, measured beside the plain way in the same run."""

from __future__ import annotations

import json as jsonlib
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from fedgrove.cli import options as o
from fedgrove.errors import check

bench = typer.Typer(
    help="Measure fedgrove beside the plain way.", add_completion=False, rich_markup_mode=None
)
Plot = Annotated[
    str | None, typer.Option("--plot", help="Write a page of figures too.", metavar="FILE.html")
]
Nets = Annotated[
    str, typer.Option("--net", help="har-cnn, bn-cnn4, resnet18, or all of these.", metavar="NAME")
]
Turns = Annotated[int, typer.Option("--repeats", help="Turns that are timed.", metavar="N")]
Scene = Annotated[
    str, typer.Option("--scene", help="har, cnn, resnet, all of these, or uci-har.", metavar="NAME")
]
Repeats = Annotated[
    int, typer.Option("--repeats", help="Rounds measured of each variant, in turns.", metavar="N")
]
Processes = Annotated[
    int, typer.Option("--repeats", help="Processes of each kind, in turns.", metavar="N")
]
Sizes = Annotated[
    str, typer.Option("--sizes", help="Numbers of registered clients.", metavar="N,N")
]
ScaleMethods = Annotated[
    str, typer.Option("--methods", help="Methods to measure.", metavar="NAME,NAME")
]
Engines = Annotated[
    str, typer.Option("--engines", help="serial, pool, batched.", metavar="NAME,NAME")
]
BenchMethods = Annotated[
    str,
    typer.Option("--methods", help="Methods to measure beside fedavg.", metavar="NAME,NAME"),
]
MethodsScene = Annotated[
    str, typer.Option("--scene", help="A data set: fedgrove list data.", metavar="NAME")
]
MethodsEngine = Annotated[
    str, typer.Option("--engine", help="batched, pool, serial or wired.", metavar="NAME")
]
MethodsRounds = Annotated[
    int,
    typer.Option("--rounds", help="Rounds of each run; shares of them are phases.", metavar="N"),
]
NoSplit = Annotated[
    bool, typer.Option("--no-split", help="Times only: no second run that is looked at.")
]
ScaleRounds = Annotated[int, typer.Option("--rounds", help="Rounds of a process.", metavar="N")]
Starts = Annotated[
    int, typer.Option("--starts", help="Processes of each variant's own; 0: none.", metavar="N")
]
Seeds = Annotated[int, typer.Option("--seeds", help="Runs in lockstep.", metavar="N")]
Rounds = Annotated[
    int, typer.Option("--rounds", help="Rounds of fedavg behind the small model.", metavar="N")
]
Steps = Annotated[int, typer.Option("--steps", help="Steps of SGD behind ResNet-18.", metavar="N")]
NoResnet = Annotated[bool, typer.Option("--no-resnet", help="Leave ResNet-18 out.")]
Quick = Annotated[
    bool, typer.Option("--quick", help="A look: generated data, one round, no ResNet-18.")
]


@bench.callback()
def top() -> None:
    """Measure fedgrove beside the plain way."""


@bench.command("device")
def device_bench(
    net: Nets = "all", repeats: Turns = 11, plot: Plot = None, json: o.Json = False
) -> None:
    """Training step and inference with 0, 30, 50 and 70 % of channels removed, to the dense net's;
    some minutes.
    """
    from fedgrove.report.page import check_place

    from ..bench import device, show

    if plot:
        check_place(Path(plot))
    names = list(device.SETUPS) if net == "all" else [net]
    rows: list[device.Row] = []
    for name in names:
        rows += device.measure(name, repeats=repeats)
    if json:
        _print_json({"rows": [asdict(row) for row in rows], "checks": device.checks(rows)})
    else:
        show.print_device(rows)
    if plot:
        show.write_device_page(rows, Path(plot))


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
    """Seconds per round of our engines beside a plain PyTorch loop, pfl-research and Flower's
    simulation.

    On CUDA pfl-research takes turns with ours on the same card; elsewhere, and Flower always, in
    processes of their own (--starts). Whatever is not installed is left out, and named.
    """
    from fedgrove.engines import device_of
    from fedgrove.report.page import check_place

    from ..bench import page
    from ..bench.engine import measure
    from ..bench.scenes import SCENES
    from ..bench.starts import measure_starts

    if plot:
        check_place(Path(plot))
    check(repeats >= 1, "repeats", repeats, "1 or more")
    check(starts >= 0, "starts", starts, "0 or more")
    names = list(SCENES) if scene == "all" else [scene]
    device_used = device_of(device)
    rows: list[dict[str, Any]] = []
    for name in names:
        rows += measure(name, device_used, repeats, cohort, data_dir, say=_print_progress)
        if starts:
            rows += measure_starts(name, device_used, starts, cohort, data_dir, say=_print_progress)
    _print_times(rows, json)
    if plot:
        page.write_times(rows, Path(plot))


@bench.command()
def lockstep(
    seeds: Seeds = 20, repeats: Repeats = 4, data_dir: o.DataDir = None, json: o.Json = False
) -> None:
    """Seconds per round of many seeds on a GPU: together, one after another, and as a plain
    loop.
    """
    from fedgrove.engines import device_of

    from ..bench.engine import lockstep as measure

    rows = measure(seeds, device_of("cuda"), repeats, data_dir)
    _print_times(rows, json)


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
    """Bytes against their entropy, and speed against bitmap + zstandard, on trained weights; takes
    some minutes.
    """
    from fedgrove.report.page import check_place

    from ..bench import show, weights
    from ..bench.wire import Row, measure, report

    if plot:
        check_place(Path(plot))
    if quick:
        repeats = 5
        models = [weights.federated(1, data_dir, "motion")]
    else:
        repeats = 51
        models = [weights.federated(rounds, data_dir)]
        if not no_resnet:
            models.append(weights.resnet(steps, data_dir))
    rows: list[Row] = []
    for model in models:
        for row in measure(model, repeats=repeats):
            rows.append(row)
            _print_progress(
                f"{row.model}, density {row.density:g}, {row.kind}: {row.share:.4f} of dense"
            )
    content = report(models, rows)
    if json:
        _print_json(content)
    else:
        show.print_wire(rows, content)
    if plot:
        show.write_wire_page(rows, content, Path(plot))


@bench.command()
def scale(
    sizes: Sizes = "1000,10000,100000,1000000",
    methods: ScaleMethods = "fedavg,ca-afp",
    engines: Engines = "serial",
    rounds: ScaleRounds = 8,
    repeats: Processes = 2,
    plot: Plot = None,
    json: o.Json = False,
) -> None:
    """Memory and seconds of a round with a thousand to a million clients, a hundred in each round;
    some minutes.
    """
    from fedgrove.report.page import check_place

    from ..bench import show
    from ..bench.scale import checks, measure

    if plot:
        check_place(Path(plot))
    rows = measure(
        _words(methods, "methods"),
        _words(engines, "engines"),
        _counts(sizes, "sizes"),
        rounds=rounds,
        repeats=repeats,
        say=_print_progress,
    )
    if json:
        _print_json({"rows": rows, "checks": checks(rows)})
    else:
        show.print_scale(rows)
    if plot:
        show.write_scale_page(rows, Path(plot))


@bench.command("methods")
def methods_bench(
    methods: BenchMethods = "ca-afp,fedlayerprune,adfedwcp,safl,fedapta,grove",
    scene: MethodsScene = "uci-har",
    engine: MethodsEngine = "batched",
    device: o.Device = "auto",
    precision: o.Precision = "fp32",
    rounds: MethodsRounds = 30,
    net: o.Net = None,
    cohort: o.Cohort = None,
    no_split: NoSplit = False,
    data_dir: o.DataDir = None,
    plot: Plot = None,
    json: o.Json = False,
) -> None:
    """Milliseconds of a round of methods beside fedavg's, and what they go into: real runs without
    scoring, in turns.

    Every method runs twice, once timed and once looked at. On a GPU it takes a minute or two, on a
    CPU many; there, --scene digits --rounds 12 is a look.
    """
    from fedgrove.report.page import check_place

    from ..bench import show
    from ..bench.methods import Asked, checks, measure

    if plot:
        check_place(Path(plot))
    asked = Asked(
        scene=scene,
        methods=_words(methods, "methods"),
        engine=engine,
        device=device,
        precision=precision,
        rounds=rounds,
        net=net,
        cohort=cohort,
        split=not no_split,
        data_dir=data_dir,
    )
    rows = measure(asked, say=_print_progress)
    if json:
        _print_json({"rows": rows, "checks": checks(rows)})
    else:
        show.print_methods(rows)
    if plot:
        show.write_methods_page(rows, Path(plot))


def _words(text: str, option: str) -> list[str]:
    """Names with commas between."""
    words = [word.strip() for word in text.split(",")]
    check(all(words), option, text, "names with commas between, as a,b")
    return words


def _counts(text: str, option: str) -> list[int]:
    """Whole numbers with commas between; 1e6 is one too.

    >>> _counts("1000,1e6", "sizes")
    [1000, 1000000]
    """
    counts = []
    for word in text.split(","):
        try:
            number = float(word)
        except ValueError:
            number = 0.5
        check(number.is_integer(), option, text, "whole numbers with commas, as 1e3,1e6")
        counts.append(int(number))
    return counts


def _print_times(rows: list[dict[str, Any]], json: bool) -> None:
    from ..bench.show import print_times

    if json:
        _print_json(rows)
    else:
        print_times(rows)


def _print_json(content: Any) -> None:
    print(jsonlib.dumps(content, indent=1))


def _print_progress(line: str) -> None:
    # Not on stdout, which belongs to the table, or to the JSON alone.
    print(line, file=sys.stderr)
