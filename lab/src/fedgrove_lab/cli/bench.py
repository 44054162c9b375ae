"""``fedgrove bench``: what fedgrove costs, measured in turns with the plain way to do the same."""

from __future__ import annotations

import json as jsonlib
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from fedgrove.cli import options as o
from fedgrove.errors import check

from .paper import Store, option

bench = typer.Typer(
    help="Measure speed, memory and bytes, compared with the plain way.",
    add_completion=False,
    rich_markup_mode=None,
)


Plot = Annotated[str | None, option("--plot", "Write an HTML page with charts too.", "FILE.html")]
Nets = Annotated[str, option("--net", "har-cnn, bn-cnn4, resnet18, or all of these.", "NAME")]
Turns = Annotated[int, option("--repeats", "Turns that are timed.", "N")]
SceneName = Annotated[str, option("--scene", "har, cnn, resnet, all of these, or uci-har.", "NAME")]
Repeats = Annotated[int, option("--repeats", "Rounds measured of each variant, in turns.", "N")]
Processes = Annotated[int, option("--repeats", "Processes of each kind, in turns.", "N")]
Sizes = Annotated[str, option("--sizes", "Numbers of registered clients.", "N,N")]
ScaleMethods = Annotated[str, option("--methods", "Methods to measure.", "NAME,NAME")]
Engines = Annotated[str, option("--engines", "serial, pool, batched.", "NAME,NAME")]
BenchMethods = Annotated[str, option("--methods", "Methods to compare with fedavg.", "NAME,NAME")]
MethodsScene = Annotated[str, option("--scene", "A data set: fedgrove list data.", "NAME")]
MethodsEngine = Annotated[str, option("--engine", "batched, pool, serial or wired.", "NAME")]
MethodsRounds = Annotated[
    int, option("--rounds", "Rounds of each run; shares of them are phases.", "N")
]
NoSplit = Annotated[bool, option("--no-split", "Times only: no second run that is profiled.")]
ScaleRounds = Annotated[int, option("--rounds", "Rounds of a process.", "N")]
Starts = Annotated[int, option("--starts", "Processes of each variant; 0: none.", "N")]
Seeds = Annotated[int, option("--seeds", "Runs in lockstep.", "N")]
Rounds = Annotated[int, option("--rounds", "Rounds of fedavg behind the small model.", "N")]
Steps = Annotated[int, option("--steps", "Steps of SGD behind ResNet-18.", "N")]
NoResnet = Annotated[bool, option("--no-resnet", "Leave ResNet-18 out.")]
Quick = Annotated[bool, option("--quick", "A quick run: generated data, one round, no ResNet-18.")]


@bench.callback()
def top() -> None:
    """Measure speed, memory and bytes, compared with the plain way."""


@bench.command("device")
def device_bench(
    ctx: typer.Context,
    net: Nets = "all",
    repeats: Turns = 11,
    plot: Plot = None,
    store: Store = None,
    json: o.Json = False,
) -> None:
    """Training step and inference with 0, 30, 50 and 70 % of channels removed, to the dense net's;
    some minutes.
    """
    from ..bench import device, report

    def measure() -> dict[str, Any]:
        names = list(device.SETUPS) if net == "all" else [net]
        rows: list[device.DeviceRow] = []
        for name in names:
            rows += device.measure(name, repeats=repeats)
        return {"rows": [asdict(row) for row in rows], "checks": device.checks(rows)}

    _run(ctx, measure, report.print_device, report.write_device_page)


@bench.command()
def engine(
    ctx: typer.Context,
    scene: SceneName = "har",
    repeats: Repeats = 5,
    starts: Starts = 3,
    device: o.Device = "auto",
    cohort: o.Cohort = None,
    data_dir: o.DataDir = None,
    plot: Plot = None,
    store: Store = None,
    json: o.Json = False,
) -> None:
    """Seconds per round of our engines, a plain PyTorch loop, pfl-research and Flower's simulation.

    On CUDA pfl-research takes turns with ours on the same GPU; elsewhere, and Flower always, in
    their own processes (--starts). Packages that are not installed are left out, and named.
    """
    from fedgrove.engines import device_of

    from ..bench import engine as library
    from ..bench import report
    from ..bench.scenes import SCENES
    from ..bench.starts import measure_starts

    check(repeats >= 1, "repeats", repeats, "1 or more")
    check(starts >= 0, "starts", starts, "0 or more")
    used = device_of(device)

    def measure() -> dict[str, Any]:
        rows: list[dict[str, Any]] = []
        for name in list(SCENES) if scene == "all" else [scene]:
            rows += library.measure(name, used, repeats, cohort, data_dir, _print_progress)
            if starts:
                rows += measure_starts(name, used, starts, cohort, data_dir, _print_progress)
        return {"rows": rows}

    _run(ctx, measure, report.print_times, report.write_times_page)


@bench.command()
def lockstep(
    ctx: typer.Context,
    seeds: Seeds = 20,
    repeats: Repeats = 4,
    data_dir: o.DataDir = None,
    store: Store = None,
    json: o.Json = False,
) -> None:
    """Seconds per round of many seeds on a GPU: together, one after another, and as a plain
    loop.
    """
    from fedgrove.engines import device_of

    from ..bench import report
    from ..bench.engine import measure_lockstep

    used = device_of("cuda")

    def measure() -> dict[str, Any]:
        return {"rows": measure_lockstep(seeds, used, repeats, data_dir)}

    _run(ctx, measure, report.print_times)


@bench.command()
def wire(
    ctx: typer.Context,
    rounds: Rounds = 5,
    steps: Steps = 100,
    no_resnet: NoResnet = False,
    quick: Quick = False,
    data_dir: o.DataDir = None,
    plot: Plot = None,
    store: Store = None,
    json: o.Json = False,
) -> None:
    """Bytes against their entropy, and speed against bitmap + zstandard, on trained weights; takes
    some minutes.
    """
    from ..bench import report
    from ..bench import wire as library

    def measure() -> dict[str, Any]:
        if quick:
            models = [library.train_federated(1, data_dir, "motion")]
        else:
            models = [library.train_federated(rounds, data_dir)]
            if not no_resnet:
                models.append(library.train_resnet(steps, data_dir))
        rows: list[library.WireRow] = []
        for model in models:
            for row in library.measure(model, repeats=5 if quick else 51):
                rows.append(row)
                at = f"{row.model}, density {row.density:g}, {row.kind}"
                _print_progress(f"{at}: {row.share:.4f} of dense")
        return library.report(models, rows)

    _run(ctx, measure, report.print_wire, report.write_wire_page)


@bench.command()
def scale(
    ctx: typer.Context,
    sizes: Sizes = "1000,10000,100000,1000000",
    methods: ScaleMethods = "fedavg,ca-afp",
    engines: Engines = "serial",
    rounds: ScaleRounds = 8,
    repeats: Processes = 2,
    plot: Plot = None,
    store: Store = None,
    json: o.Json = False,
) -> None:
    """Memory and seconds of a round with a thousand to a million clients, a hundred in each round;
    some minutes.
    """
    from ..bench import report
    from ..bench import scale as library

    def measure() -> dict[str, Any]:
        rows = library.measure(
            _split_names(methods, "methods"),
            _split_names(engines, "engines"),
            _split_counts(sizes, "sizes"),
            rounds=rounds,
            repeats=repeats,
            report=_print_progress,
        )
        return {"rows": rows, "checks": library.checks(rows)}

    _run(ctx, measure, report.print_scale, report.write_scale_page)


@bench.command("methods")
def methods_bench(
    ctx: typer.Context,
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
    store: Store = None,
    json: o.Json = False,
) -> None:
    """Milliseconds of a round of methods compared with fedavg's, and what they go into.

    Rounds are those of real runs without scoring, in turns. Every method runs twice, once timed and
    once profiled. On a GPU it takes a minute or two, on a CPU many; there, --scene digits
    --rounds 12 is a quick run.
    """
    from ..bench import methods as library
    from ..bench import report

    def measure() -> dict[str, Any]:
        options = library.MethodsOptions(
            scene=scene,
            methods=_split_names(methods, "methods"),
            engine=engine,
            device=device,
            precision=precision,
            rounds=rounds,
            net=net,
            cohort=cohort,
            split=not no_split,
            data_dir=data_dir,
        )
        rows = library.measure(options, _print_progress)
        return {"rows": rows, "checks": library.checks(rows)}

    _run(ctx, measure, report.print_methods, report.write_methods_page)


def _run(
    ctx: typer.Context,
    measure: Callable[[], Mapping[str, Any]],
    show: Callable[[Mapping[str, Any]], None],
    write_page: Callable[[Mapping[str, Any], Path], None] | None = None,
) -> None:
    """Measure; then print, write and store what was measured, as the options say."""
    from fedgrove.report.page import check_place

    from ..results import describe_measurement, find_command, rows_of_bench, write_result

    plot = ctx.params.get("plot")
    # Before anything is measured.
    if plot:
        check_place(Path(plot))
    began = time.monotonic()
    content = {**describe_measurement(find_command(ctx)), **measure()}
    seconds = time.monotonic() - began
    if ctx.params["json"]:
        print(jsonlib.dumps(content, indent=1))
    else:
        show(content)
    if plot and write_page is not None:
        write_page(content, Path(plot))
    if ctx.params["store"]:
        rows = rows_of_bench(content)
        measurement = {key: content[key] for key in describe_measurement("")}
        notes = [f"{name}: {about}" for name, about in content.get("weights", {}).items()]
        path = write_result(ctx.params["store"], measurement, rows, notes=notes, seconds=seconds)
        _print_progress(str(path))


def _split_names(text: str, option: str) -> list[str]:
    """Names with commas between."""
    names = [name.strip() for name in text.split(",")]
    check(all(names), option, text, "names with commas between, as a,b")
    return names


def _split_counts(text: str, option: str) -> list[int]:
    """Whole numbers with commas between; 1e6 is one too.

    >>> _split_counts("1000,1e6", "sizes")
    [1000, 1000000]
    """
    counts = []
    for part in text.split(","):
        try:
            number = float(part)
        except ValueError:
            number = 0.5
        check(number.is_integer(), option, text, "whole numbers with commas, as 1e3,1e6")
        counts.append(int(number))
    return counts


def _print_progress(line: str) -> None:
    # Not on stdout, which belongs to the table, or to the JSON alone.
    print(line, file=sys.stderr)
