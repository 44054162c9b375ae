"""``fedgrove bench``: what fedgrove costs, measured in turns with the plain way to do the same."""

from __future__ import annotations

import json as jsonlib
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from fedgrove.cli.parameters import add_command
from fedgrove.errors import check
from fedgrove.options.definition import Options, option, option_class, option_group
from fedgrove.options.groups import AT_LEAST_ONE, DataDirOption, JsonOption

from .paper import StoreOption

bench = typer.Typer(
    help="Measure speed, memory and bytes, and compare them.",
    add_completion=False,
    rich_markup_mode=None,
)


@option_group
class PlotOption:
    """Output: a page."""

    plot: str | None = option(None, "Also write an HTML page with charts.", "FILE.html")


@option_class
class BenchOptions(Options, JsonOption, StoreOption):
    """What every command of ``fedgrove bench`` takes."""


@option_class
class BenchDeviceOptions(BenchOptions, PlotOption):
    """Options of ``fedgrove bench device``."""

    net: str = option("all", "The network: har-cnn, bn-cnn4, resnet18, or all of these.", "NAME")
    repeats: int = option(11, "Number of measurements.", "N")


@option_class
class BenchEngineOptions(BenchOptions, PlotOption, DataDirOption):
    """Options of ``fedgrove bench engine``."""

    scene: str = option(
        "har", "Network and data: har, cnn, resnet, all (these three), or uci-har.", "NAME"
    )
    repeats: int = option(5, "Number of rounds measured for each variant.", "N", **AT_LEAST_ONE)
    starts: int = option(
        3,
        "Number of separate processes for each variant; 0: none.",
        "N",
        allowed="0 or more",
        check=lambda count: count >= 0,
    )
    device: str = option("auto", "Device for training: auto, cpu or cuda.", "NAME")
    cohort: int | None = option(None, "Number of clients that train in a round.", "M")


@option_class
class BenchLockstepOptions(BenchOptions, DataDirOption):
    """Options of ``fedgrove bench lockstep``."""

    seeds: int = option(20, "Number of runs in lockstep.", "N")
    repeats: int = option(4, "Number of rounds measured for each variant.", "N")


@option_class
class BenchWireOptions(BenchOptions, PlotOption, DataDirOption):
    """Options of ``fedgrove bench wire``."""

    rounds: int = option(5, "Number of rounds of fedavg that train the small model.", "N")
    steps: int = option(100, "Number of SGD steps that train ResNet-18.", "N")
    no_resnet: bool = option(False, "Leave ResNet-18 out.")
    quick: bool = option(False, "A quick run: generated data, one round, no ResNet-18.")


@option_class
class BenchScaleOptions(BenchOptions, PlotOption):
    """Options of ``fedgrove bench scale``."""

    sizes: str = option("1000,10000,100000,1000000", "Numbers of registered clients.", "N,N")
    methods: str = option("fedavg,ca-afp", "Methods to measure.", "NAME,NAME")
    engines: str = option("serial", "Engines to measure: serial, pool, batched.", "NAME,NAME")
    rounds: int = option(8, "Number of rounds in each process.", "N")
    repeats: int = option(2, "Number of processes for each combination.", "N")


@option_class
class BenchMethodsOptions(BenchOptions, PlotOption, DataDirOption):
    """Options of ``fedgrove bench methods``."""

    methods: str = option(
        "ca-afp,fedlayerprune,adfedwcp,safl,fedapta,grove",
        "Methods to compare with fedavg.",
        "NAME,NAME",
    )
    scene: str = option("uci-har", "A data set (fedgrove list data).", "NAME")
    engine: str = option(
        "batched", "Where clients are trained: batched, pool, serial or wired.", "NAME"
    )
    device: str = option("auto", "Device for training: auto, cpu or cuda.", "NAME")
    precision: str = option(
        "fp32", "Precision on CUDA: fp32, tf32 (faster matrix products) or bf16.", "NAME"
    )
    rounds: int = option(30, "Number of rounds of each run; methods divide them into phases.", "N")
    net: str | None = option(None, "A network (fedgrove list nets), or FILE.py:Class.", "NAME")
    cohort: int | None = option(None, "Number of clients that train in a round.", "M")
    no_split: bool = option(False, "Only measure times; leave out the second run with a profiler.")


@bench.callback()
def top() -> None:
    """Measure speed, memory and bytes, and compare them."""


def device_bench(options: BenchDeviceOptions) -> None:
    """Time training and inference with some channels removed.

    0, 30, 50 and 70 % of the channels are removed. Times are relative to the dense net. It takes a
    few minutes.
    """
    options.check()
    from ..bench import device, report

    def measure() -> dict[str, Any]:
        names = list(device.SETUPS) if options.net == "all" else [options.net]
        rows: list[device.DeviceRow] = []
        for name in names:
            rows += device.measure(name, repeats=options.repeats)
        return {"rows": [asdict(row) for row in rows], "checks": device.checks(rows)}

    _run("device", options, measure, report.print_device, report.write_device_page)


def engine(options: BenchEngineOptions) -> None:
    """Time rounds of our engines, a plain loop and other frameworks.

    The other frameworks are pfl-research and Flower's simulation; the plain loop is PyTorch code.

    Flower always runs in separate processes (--starts). So does pfl-research without CUDA; with
    CUDA it takes turns with our engines on one GPU. Packages that are not installed are reported.
    """
    options.check()
    from fedgrove.engines import device_of

    from ..bench import engine as library
    from ..bench import report
    from ..bench.scenes import SCENES
    from ..bench.starts import measure_starts

    used = device_of(options.device)
    shared = (options.cohort, options.data_dir, _print_progress)

    def measure() -> dict[str, Any]:
        rows: list[dict[str, Any]] = []
        for name in list(SCENES) if options.scene == "all" else [options.scene]:
            rows += library.measure(name, used, options.repeats, *shared)
            if options.starts:
                rows += measure_starts(name, used, options.starts, *shared)
        return {"rows": rows}

    _run("engine", options, measure, report.print_times, report.write_times_page)


def lockstep(options: BenchLockstepOptions) -> None:
    """Time rounds of many seeds on a GPU, in lockstep and one by one.

    A plain PyTorch loop is timed too.
    """
    options.check()
    from fedgrove.engines import device_of

    from ..bench import report
    from ..bench.engine import measure_lockstep

    used = device_of("cuda")

    def measure() -> dict[str, Any]:
        return {"rows": measure_lockstep(options.seeds, used, options.repeats, options.data_dir)}

    _run("lockstep", options, measure, report.print_times)


def wire(options: BenchWireOptions) -> None:
    """Compare encoded bytes with their entropy and a plain encoding.

    The plain encoding is a bitmap with zstandard, which is also compared in speed.

    The weights are trained first. It takes a few minutes.
    """
    options.check()
    from ..bench import report
    from ..bench import wire as library

    def measure() -> dict[str, Any]:
        if options.quick:
            models = [library.train_federated(1, options.data_dir, "motion")]
        else:
            models = [library.train_federated(options.rounds, options.data_dir)]
            if not options.no_resnet:
                models.append(library.train_resnet(options.steps, options.data_dir))
        rows: list[library.WireRow] = []
        for model in models:
            for row in library.measure(model, repeats=5 if options.quick else 51):
                rows.append(row)
                at = f"{row.model}, density {row.density:g}, {row.kind}"
                _print_progress(f"{at}: {row.share:.4f} of dense")
        return library.report(models, rows)

    _run("wire", options, measure, report.print_wire, report.write_wire_page)


def scale(options: BenchScaleOptions) -> None:
    """Measure memory and time with a thousand to a million clients.

    A hundred clients train in each round. It takes a few minutes.
    """
    options.check()
    from ..bench import report
    from ..bench import scale as library

    def measure() -> dict[str, Any]:
        rows = library.measure(
            _split_names(options.methods, "methods"),
            _split_names(options.engines, "engines"),
            _split_counts(options.sizes, "sizes"),
            rounds=options.rounds,
            repeats=options.repeats,
            report=_print_progress,
        )
        return {"rows": rows, "checks": library.checks(rows)}

    _run("scale", options, measure, report.print_scale, report.write_scale_page)


def methods_bench(options: BenchMethodsOptions) -> None:
    """Time rounds of methods compared with fedavg, and profile them.

    Methods take turns; they do complete runs, but without scoring. Every method runs twice, once
    timed and once profiled. This takes one or two minutes on a GPU and much longer on a CPU, where
    --scene digits --rounds 12 is a quick run.
    """
    options.check()
    from ..bench import methods as library
    from ..bench import report

    def measure() -> dict[str, Any]:
        chosen = library.MethodsOptions(
            scene=options.scene,
            methods=_split_names(options.methods, "methods"),
            engine=options.engine,
            device=options.device,
            precision=options.precision,
            rounds=options.rounds,
            net=options.net,
            cohort=options.cohort,
            split=not options.no_split,
            data_dir=options.data_dir,
        )
        rows = library.measure(chosen, _print_progress)
        return {"rows": rows, "checks": library.checks(rows)}

    _run("methods", options, measure, report.print_methods, report.write_methods_page)


def _run(
    name: str,
    options: BenchOptions,
    measure: Callable[[], Mapping[str, Any]],
    show: Callable[[Mapping[str, Any]], None],
    write_page: Callable[[Mapping[str, Any], Path], None] | None = None,
) -> None:
    """Measure; then print, write and store what was measured, as the options say."""
    from fedgrove.report.page import check_place

    from ..results import describe_measurement, find_command, rows_of_bench, write_result

    plot = getattr(options, "plot", None)
    # Before anything is measured.
    if plot:
        check_place(Path(plot))
    began = time.monotonic()
    command = find_command(f"fedgrove bench {name}", options)
    content = {**describe_measurement(command), **measure()}
    seconds = time.monotonic() - began
    if options.json:
        print(jsonlib.dumps(content, indent=1))
    else:
        show(content)
    if plot and write_page is not None:
        write_page(content, Path(plot))
    if options.store:
        rows = rows_of_bench(content)
        measurement = {key: content[key] for key in describe_measurement("")}
        notes = [f"{name}: {about}" for name, about in content.get("weights", {}).items()]
        path = write_result(options.store, measurement, rows, notes=notes, seconds=seconds)
        _print_progress(str(path))


def _split_names(text: str, option: str) -> list[str]:
    """Names separated by commas."""
    names = [name.strip() for name in text.split(",")]
    check(all(names), option, text, "names separated by commas, as in a,b")
    return names


def _split_counts(text: str, option: str) -> list[int]:
    """Whole numbers separated by commas; 1e6 is one too.

    >>> _split_counts("1000,1e6", "sizes")
    [1000, 1000000]
    """
    counts = []
    for part in text.split(","):
        try:
            number = float(part)
        except ValueError:
            number = 0.5
        check(number.is_integer(), option, text, "whole numbers separated by commas, as in 1e3,1e6")
        counts.append(int(number))
    return counts


def _print_progress(line: str) -> None:
    # Not on stdout, which belongs to the table, or to the JSON alone.
    print(line, file=sys.stderr)


add_command(bench, "device", BenchDeviceOptions, device_bench)
add_command(bench, "engine", BenchEngineOptions, engine)
add_command(bench, "lockstep", BenchLockstepOptions, lockstep)
add_command(bench, "wire", BenchWireOptions, wire)
add_command(bench, "scale", BenchScaleOptions, scale)
add_command(bench, "methods", BenchMethodsOptions, methods_bench)
