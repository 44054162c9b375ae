"""Every option of fedgrove, defined once: name, type, default, help, limits and where it is taken.

An option is one field of a small dataclass, a group of options (:mod:`fedgrove.options.groups`). A
function or command takes the groups that its class inherits: those below, and those of commands
without a function in :mod:`fedgrove.cli`. From these fields follow

- flags, help and completion of the command line (:mod:`fedgrove.cli.parameters`),
- signatures and docstrings in Python (:func:`fedgrove.options.definition.takes`),
- the fields of :class:`fedgrove.config.experiment.Experiment`, and so config.toml,
- docs/options.md (``python tools/generate.py``).

To add an option, add a field to a group.

Dataclasses take the fields of the last base first: read the bases of a class from the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .definition import Options, argument, option, option_class
from .groups import (
    AT_LEAST_ONE,
    LENGTHS,
    METHOD,
    DataDirOption,
    DataOptions,
    DeviceOptions,
    EngineOptions,
    EvaluateOption,
    ExchangeOptions,
    MethodArgument,
    MoreRoundsOption,
    NetOptions,
    OutOption,
    ProgressOption,
    RoundOptions,
    ScoringOptions,
    SeedOption,
    SetOption,
    Settings,
    SmokeOption,
    SplitOptions,
    TrainingOptions,
    TrustOption,
    WatchOption,
    are_lengths,
    has_seeds,
    parse_names,
    parse_seeds,
    parse_shape,
)

if TYPE_CHECKING:
    from torch import nn

    from ..config.experiment import Experiment, Federations
    from ..core import AnyMethod
    from ..data import Federation


@option_class
class ExperimentOptions(
    ExchangeOptions,
    ScoringOptions,
    RoundOptions,
    NetOptions,
    DeviceOptions,
    SplitOptions,
    DataOptions,
):
    """What an experiment and a grid of experiments have in common."""


@option_class
class AnyMethodOptions(
    Options,
    DataDirOption,
    SetOption,
    TrainingOptions,
    SeedOption,
    EvaluateOption,
    ExperimentOptions,
):
    """What describes one run of any method."""


@option_class
class OneRunOptions(AnyMethodOptions, MethodArgument):
    """What describes one run, wherever it is trained."""


@option_class
class FourMethodsOptions(
    WatchOption, ProgressOption, SmokeOption, OutOption, EngineOptions, AnyMethodOptions
):
    """Options of ``fedgrove.run`` without a method, for type checkers."""


@option_class
class RunOptions(WatchOption, ProgressOption, SmokeOption, OutOption, EngineOptions, OneRunOptions):
    """Options of ``fedgrove.run``."""


@option_class
class PathArgument:
    """Run folder: the run to repeat or to resume."""

    path: str | Path = field(
        metadata=argument("A run folder, or a file such as run.toml.", "RUN", complete="runs")
    )


@option_class
class RerunOptions(TrustOption, RunOptions, PathArgument):
    """Options of ``fedgrove.rerun``."""


@option_class
class ResumeOptions(
    Options,
    WatchOption,
    ProgressOption,
    TrustOption,
    MoreRoundsOption,
    DataDirOption,
    EngineOptions,
    PathArgument,
):
    """Options of ``fedgrove.resume``."""

    _: KW_ONLY
    method: AnyMethod | None = option(
        None, "The method, if it was made in Python.", only="python", checked_as=Any
    )
    data: Federation | None = option(
        None, "The federation, if it was made in Python.", only="python", checked_as=Any
    )
    net: nn.Module | None = option(
        None, "The network, if it was made in Python.", only="python", checked_as=Any
    )


@option_class
class TrainOptions(Options, WatchOption, EngineOptions):
    """Options of ``fedgrove.api.train``."""

    experiment: Experiment = field(
        metadata=argument("The experiment to run.", "EXPERIMENT", checked_as=Any)
    )
    out: str | Path | None = option(
        None, "The run folder to create. Without it the folder is temporary."
    )
    _: KW_ONLY
    federations: Federations | None = option(
        None, "Federations that have been read already.", checked_as=Any
    )
    progress: bool = option(False, "Whether to show progress on stderr.")


@option_class
class MethodsArgument:
    """Methods: several federated algorithms."""

    methods: str | AnyMethod | Sequence[str | AnyMethod] = field(
        metadata=argument(
            METHOD,
            "METHOD...",
            python=f"{METHOD[:-1]}, a method made in Python, or a list of these.",
            complete="methods",
            is_repeated=True,
            checked_as=Any,
        )
    )


SEEDS: dict[str, Any] = {
    "allowed": "a number of seeds, such as 10, or the seeds themselves, such as 3,5,7 or 4,",
    "check": has_seeds,
    "parse": parse_seeds,
    "checked_as": int | tuple[int, ...],
}


@option_class
class SweepOptions(
    Options,
    ProgressOption,
    DataDirOption,
    EngineOptions,
    SetOption,
    TrainingOptions,
    EvaluateOption,
    ExperimentOptions,
    MethodsArgument,
):
    """Options of ``fedgrove.sweep``."""

    _: KW_ONLY
    seeds: int | Sequence[int] = option(
        1, "Number of seeds, from 0 on, or the seeds themselves, as in 3,5,7.", "N|S,S", **SEEDS
    )
    set: Settings = option(
        (),
        "A field and the values to try, as in mu=0.1,1; | separates values that are lists.",
        "KEY=VALUE,VALUE",
        python='Fields with the values to try: {"mu": [0.1, 1]} or ["mu=0.1,1"]; a method '
        "without a field is left as it is.",
        complete="settings",
        is_repeated=True,
        checked_as=Any,
    )
    out: str | Path | None = option(
        None,
        "The folder of the sweep; an unfinished sweep in it is continued.",
        "DIR",
        without="a new folder under runs/",
    )


@option_class
class CostMethodsArgument:
    """Methods: one or several federated algorithms."""

    methods: str | AnyMethod | Sequence[str | AnyMethod] = option(
        "ca-afp",
        METHOD,
        "METHOD...",
        python=f"{METHOD[:-1]}, a method made in Python, or a list of these.",
        complete="methods",
        is_argument=True,
        is_repeated=True,
        checked_as=Any,
    )


@option_class
class CostOptions(
    Options,
    DataDirOption,
    SetOption,
    TrainingOptions,
    SeedOption,
    EvaluateOption,
    ExperimentOptions,
    CostMethodsArgument,
):
    """Options of ``fedgrove.cost``; those of scoring and exchanges are the same as of a run."""

    _: KW_ONLY
    input: Sequence[int] | None = option(
        None,
        "Shape of one example, instead of --data: CxL or CxHxW.",
        "SHAPE",
        python="Shape of one example, instead of data; needs net and classes.",
        allowed="a shape CxL or CxHxW, such as 3x200 or 1x28x28",
        parse=parse_shape,
        checked_as=tuple[int, ...] | None,
    )
    classes: int | None = option(
        None, "Number of classes, with --input.", "N", python="Number of classes, with input."
    )
    examples: int | None = option(
        None,
        "Number of examples that a client trains on, with --input.",
        "N",
        without="500",
        python="Number of examples that a client trains on, with input.",
        allowed="1 to 1000000000",
        check=lambda value: 1 <= value <= 10**9,
    )


@option_class
class ChooseOptions(
    Options, ProgressOption, DataDirOption, EngineOptions, TrainingOptions, ExperimentOptions
):
    """Options of ``fedgrove.choose``."""

    _: KW_ONLY
    budget: str | None = option(
        None,
        "Bytes that one client may send and receive over the full run, on average, as in 8MB or "
        "500kB.",
        "SIZE",
        without="no limit",
    )
    size: str | None = option(
        None,
        "The most that a client's exported ONNX file may take, in float or else in int8, as in "
        "80kB.",
        "SIZE",
        without="no limit",
    )
    methods: Sequence[str] | None = option(
        None,
        "Methods to try, as in local,fedavg,ditto.",
        "NAME,...",
        without="all that may fit",
        parse=parse_names,
        complete="methods",
        checked_as=Any,
    )
    rounds: int | None = option(
        None,
        "Number of rounds of the full run, which --budget applies to; trials are shorter.",
        "N",
        without="depends on the data set",
        **AT_LEAST_ONE,
    )
    seeds: int | Sequence[int] = option(
        3,
        "Number of seeds, from 0 on, or the seeds themselves, as in 3,5,7; all methods are tried "
        "on the first seed, promising ones on all seeds.",
        "N|S,S",
        **SEEDS,
    )
    trial: int | None = option(
        None, "Number of rounds of a trial.", "N", without="half the rounds of the full run"
    )
    finetune: Sequence[int] = option(
        (0, 3),
        "Epochs of fine-tuning on the device; each method is judged by its best result.",
        "N,N",
        allowed=LENGTHS,
        check=are_lengths,
        checked_as=tuple[int, ...],
    )
    validation: float = option(
        0.2,
        "Share of the examples outside the test data that trials hold out for validation, up to "
        "0.5.",
        "SHARE",
        allowed="above 0, as the choice is made on validation data, and at most 0.5",
        check=lambda share: 0 < share <= 0.5,
    )
    hindsight: bool = option(
        False, "Also train all methods in full, and report on test data how good the choice was."
    )
    dry_run: bool = option(
        False, "Print which methods would be tried, and why others would not; train nothing."
    )
    out: str | Path | None = option(
        None,
        "The folder for all trials; an unfinished choice in it is continued.",
        "DIR",
        without="a new folder under runs/",
    )
