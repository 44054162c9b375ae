"""The options in groups: what they are called, what they mean, and which values they take.

Each group is a dataclass; its docstring begins with the heading that the group has in the docs. A
group whose options decide the result of a run is part of an experiment, and so its options are
written to config.toml. The docstring of any other group says that they are not.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .definition import option, option_class, option_group

if TYPE_CHECKING:
    from torch import nn

    from ..core import AnyMethod, Engine
    from ..runs.lockstep import Watch

Settings = Mapping[str, Any] | Sequence[str]
"""Settings of a method: ``{"mu": 0.1}``, or ``["mu=0.1"]`` as the command line has them."""

VALIDATION = 0.0
"""Share held out for validation by default: clients train on everything that is not test data."""
NORM_BOUND = 100.0
"""How many times longer than the recent median an update may be by default. Clients with many times
the examples of others make updates several times as long; harmful ones are far longer."""


# ---- reading what is typed -----------------------------------------------------------------------


def parse_seeds(text: str) -> int | tuple[int, ...]:
    """Parse the option seeds: their number, or the seeds themselves, separated by commas.

    >>> parse_seeds("3"), parse_seeds("3,5,7"), parse_seeds("4,")
    (3, (3, 5, 7), (4,))
    """
    items = text.removesuffix(",").split(",")
    if not all(item.strip().isdecimal() for item in items):
        raise ValueError(text)
    if "," in text:
        return tuple(int(item) for item in items)
    return int(text)


def parse_shape(text: str) -> tuple[int, ...]:
    """Parse an option that is a shape.

    >>> parse_shape("1x28x28")
    (1, 28, 28)
    """
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", text):
        raise ValueError(text)
    return tuple(int(size) for size in text.split("x"))


def parse_names(text: str) -> list[str]:
    """Parse an option of names separated by commas.

    >>> parse_names("fedavg, ditto")
    ['fedavg', 'ditto']
    """
    return [name.strip() for name in text.split(",") if name.strip()]


METRICS = ("accuracy", "balanced_accuracy", "macro_f1")
"""The metrics of classes that the option metric takes (:mod:`fedgrove.metrics`)."""


def parse_bound(text: str) -> float:
    """Parse an option that is a number, or off."""
    return 0.0 if text.lower() == "off" else float(text)


def has_seeds(seeds: int | Sequence[int]) -> bool:
    """Whether an option has one seed or more."""
    return seeds > 0 if isinstance(seeds, int) else len(seeds) > 0


def are_lengths(lengths: Sequence[int]) -> bool:
    """Whether an option has numbers of epochs, one or more."""
    return bool(lengths) and min(lengths) >= 0


LENGTHS = "whole numbers of epochs, 0 or more, such as 0,3,25"
AT_LEAST_ONE: dict[str, Any] = {"allowed": "1 or more", "check": lambda value: value >= 1}
MOST_ROUNDS = 1_000_000
"""A cost estimate goes through all rounds."""
METHOD = "A method, as NAME or NAME:PRESET (fedgrove list methods), or FILE.py:Class."


# ---- groups that decide the result of a run: written to config.toml ------------------------------


@option_class
class MethodArgument:
    """Method: the federated algorithm."""

    method: AnyMethod | str = option(
        "ca-afp",
        METHOD,
        "[METHOD]",
        python=f"{METHOD[:-1]}, or a method made in Python.",
        without="compare local, fedavg, ca-afp and grove",
        complete="methods",
        is_argument=True,
        checked_as=Any,
    )


@option_class
class DataOptions:
    """Data: which examples, and how your own files are read.

    Each is an argument of :func:`fedgrove.data.load` too.
    """

    data: Any = option(
        "digits",
        "A data set (fedgrove list data), or your own file or folder (.csv, .parquet, .npz); "
        "several are joined with +, as in mnist+digits.",
        "NAME|PATH",
        python="A data set (fedgrove list data), a federation, or your own data: a file or folder "
        "of CSV, parquet or .npz, a DataFrame, arrays (x, y) or (x, y, client), a torch or Hugging "
        "Face Dataset, a partitioner of flwr-datasets, or a dictionary of these by client.",
        complete="data",
    )
    _: KW_ONLY
    label: Any = option(None, "Your own data: the column to predict.", "COLUMN")
    client: Any = option(
        None,
        "Your own data: the column with the client id.",
        "COLUMN",
        without="one client per file or folder",
    )
    window: int | None = option(None, "Your own data: cut recordings into windows of N rows.", "N")
    stride: int | None = option(
        None, "Number of rows from one window to the next.", "N", without="half a window"
    )
    channels: int | str | Sequence[str] | None = option(
        None,
        "Your own data: the input columns, as in ax,ay,az.",
        "COLUMN,...",
        without="all other columns",
        checked_as=Any,
    )
    time: str | None = option(None, "Your own data: the column to sort recordings by.", "COLUMN")


@option_group
class SplitOptions:
    """Clients: how examples are divided among them and held out.

    Each is an argument of :func:`fedgrove.data.load` too.
    """

    partition: str | None = option(
        None,
        "How examples are divided among clients: natural, iid, dirichlet:ALPHA, classes:K and "
        "others (fedgrove list partitions).",
        "KIND",
        without="depends on the data set",
        complete="partitions",
    )
    scenario: str | None = option(
        None,
        "What makes clients differ: none, noisy, drift, flipped:SHARE, restricted:K or "
        "switch:ROUND:PAIRS.",
        "KIND",
        without="none",
    )
    split: str | None = option(
        None,
        "How test data are held out: blocks, random, or official (a client is tested on all "
        "examples of its classes in the test part that the data set was published with).",
        "KIND",
        without="blocks if the data have blocks",
    )
    validation: float = option(
        VALIDATION,
        "Share of the examples outside the test data that is held out for validation: 0 (none) to "
        "0.5.",
        "SHARE",
        allowed="between 0 (none) and 0.5",
        check=lambda share: 0 <= share <= 0.5,
    )
    clients: int | None = option(
        None, "Number of clients.", "K", without="depends on the data set", **AT_LEAST_ONE
    )
    standardise: bool = option(
        True,
        "Do not standardise each client's channels.",
        python="Whether each client standardises its channels.",
    )


@option_group
class DeviceOptions:
    """Devices: speed, memory and bandwidth of the clients.

    Each is an argument of :func:`fedgrove.data.load` too.
    """

    profile: str | None = option(
        None,
        "Devices of the clients: uniform, phones, adfedwcp, or FILE.csv.",
        "NAME",
        without="uniform",
    )
    trace: str | None = option(
        None,
        "Bandwidths over time: a CSV file with the columns client, second, up, down.",
        "FILE.csv",
    )


@option_class
class NetOptions:
    """Network: what is trained, and from which weights."""

    net: str | nn.Module | None = option(
        None,
        "A network (fedgrove list nets), or FILE.py:Class.",
        "NAME",
        without="depends on the data set",
        python="A network (fedgrove list nets), FILE.py:Class, or a torch module.",
        complete="nets",
        checked_as=Any,
    )
    _: KW_ONLY
    init: str | Path | None = option(
        None,
        "Initial weights, as in RUN/models/client-00000.safetensors; with :body at the end, for "
        "all layers except the head.",
        "FILE[:body]",
        checked_as=str | None,
    )
    freeze: float = option(
        0.0,
        "Share of the layers, counted from the first, that is not trained, sent or pruned.",
        "SHARE",
        allowed="a share of the layers, at least 0 and below 1",
        check=lambda share: 0 <= share < 1,
    )


@option_group
class RoundOptions:
    """Rounds: how many, and how many clients train in each."""

    cohort: int | None = option(
        None, "Number of clients that train in a round.", "M", without="depends on the data set"
    )
    rounds: int | None = option(
        None,
        "Number of rounds.",
        "N",
        without="depends on the data set",
        allowed=f"1 to {MOST_ROUNDS}",
        check=lambda value: 1 <= value <= MOST_ROUNDS,
    )
    per_task: bool = option(
        False, "Data with several tasks: run the method separately on each true task."
    )


@option_group
class ScoringOptions:
    """Scoring: which clients, by which metric, after how much fine-tuning."""

    metric: str | None = option(
        None,
        "What a client's score is, for data with classes: accuracy, balanced_accuracy or macro_f1.",
        "NAME",
        without="accuracy for classes; other data have their own",
        allowed="accuracy, balanced_accuracy or macro_f1; leave it out for data without classes",
        check=lambda name: name in METRICS,
        complete="metrics",
    )
    finetune: Sequence[int] = option(
        (0,),
        "Epochs of fine-tuning to report, as in 0,3,25; the last one gives the headline score.",
        "N,N",
        allowed=LENGTHS,
        check=are_lengths,
        checked_as=tuple[int, ...],
    )
    score_on: int | None = option(
        None,
        "Number of clients to score, drawn with the seed; 0: none.",
        "N",
        without="all, or 1000 if there are more than 10,000",
        allowed="0 or more",
        check=lambda count: count >= 0,
    )


@option_group
class EvaluateOption:
    """Scoring: how often."""

    evaluate: int = option(
        1,
        "Score clients every N rounds; 0: only at the end.",
        "N",
        allowed="0 or more",
        check=lambda rounds: rounds >= 0,
    )


@option_group
class ExchangeOptions:
    """Reliability and privacy: clients that fail, lie or are late."""

    quorum: float = option(
        0.0,
        "Share of an exchange's clients that must report (always at least one); otherwise the "
        "exchange is repeated.",
        "SHARE",
        allowed="a share between 0 and 1",
        check=lambda share: 0 <= share <= 1,
    )
    deadline: float | None = option(
        None,
        "Virtual seconds after which an exchange ends; late clients are dropped.",
        "S",
        without="wait for the slowest client",
        allowed="above 0",
        check=lambda seconds: 0 < seconds < math.inf,
    )
    norm_bound: float = option(
        NORM_BOUND,
        "Refuse updates with a norm above N times the recent median; off: no limit.",
        "N|off",
        python="Refuse updates with a norm above this many times the recent median; 0: no limit.",
        allowed="1 or more, or 0 (off)",
        check=lambda bound: bound == 0 or bound >= 1,
        parse=parse_bound,
    )
    faults: str | None = option(
        None,
        "Make clients fail or send false updates, as in crash=0.1,late=0.2 (fedgrove list faults).",
        "KIND=P,...",
    )
    privacy: str | None = option(
        None,
        "Clip what a client sends and add noise to it, as in clip=1.0,noise=0.8; the run reports "
        "epsilon. Needs opacus.",
        "clip=C,noise=Z",
    )


@option_group
class SeedOption:
    """Seeds: the source of all randomness."""

    seed: int = option(
        0,
        "Random seed.",
        "S",
        allowed="0 or more, and below 2^63",
        check=lambda seed: 0 <= seed < 2**63,
    )


# ---- all other groups: not written to config.toml ------------------------------------------------


@option_group
class TrainingOptions:
    """Local training: how a client trains in a round.

    Not written to config.toml: what they set is written there with the method.
    """

    epochs: int | None = option(
        None,
        "Local epochs; short for --set local.epochs=E.",
        "E",
        without="depends on the data set",
        setting="local.epochs",
    )
    batch: int | None = option(
        None,
        "Batch size; short for --set local.batch=B.",
        "B",
        without="depends on the data set",
        setting="local.batch",
    )
    lr: float | None = option(
        None,
        "Learning rate; short for --set local.optimiser.lr=L.",
        "L",
        without="depends on the data set",
        setting="local.optimiser.lr",
    )


@option_group
class SetOption:
    """Settings of the method: its fields and those of its parts.

    Not written to config.toml: what they set is written there with the method.
    """

    set: Settings = option(
        (),
        "A field of the method or of its parts, as in mu=0.1 (fedgrove show METHOD).",
        "KEY=VALUE",
        python='Fields of the method or of its parts: {"mu": 0.1} or ["mu=0.1"].',
        complete="settings",
        is_repeated=True,
        checked_as=Any,
    )


@option_group
class TimeoutOption:
    """Engine: clients that do not answer.

    Not written to config.toml.
    """

    timeout: float | None = option(
        None, "Seconds after which a client that has not answered is dropped.", "S"
    )


@option_group
class MoreRoundsOption:
    """Rounds: more than the run was started with.

    Not written to config.toml by itself: it replaces the rounds there.
    """

    rounds: int | None = option(
        None,
        "Continue to this number of rounds, also from the end of a finished run.",
        "N",
        without="the rounds of the run",
        allowed=f"1 to {MOST_ROUNDS}",
        check=lambda value: 1 <= value <= MOST_ROUNDS,
    )


@option_group
class EngineOptions(TimeoutOption):
    """Engine: where clients are trained.

    Not written to config.toml.
    """

    engine: str | Engine = option(
        "auto",
        "Where clients are trained: auto, batched, flower, pool, serial or wired.",
        "NAME",
        python="Where clients are trained: auto, batched, flower, pool, serial or wired; or an "
        "engine, which is left open.",
        complete="engines",
        checked_as=Any,
    )
    device: str = option("auto", "Device for training: auto, cpu or cuda.", "NAME")
    precision: str = option(
        "fp32", "Precision on CUDA: fp32, tf32 (faster matrix products) or bf16.", "NAME"
    )


@option_group
class DataDirOption:
    """Data: where the files are.

    Not written to config.toml.
    """

    data_dir: str | Path | None = option(
        None, "Folder with the data files.", "DIR", without="the environment variable FEDGROVE_DATA"
    )


@option_group
class OutOption:
    """Output: the run folder.

    Not written to config.toml.
    """

    out: str | Path | None = option(
        None,
        "The run folder to create; an existing folder is never changed.",
        "DIR",
        without="a new folder under runs/",
    )


@option_group
class ProgressOption:
    """Output: progress.

    Not written to config.toml.
    """

    progress: bool = option(True, "Whether to show progress on stderr.", only="python")


@option_group
class WatchOption:
    """Output: a function that is called with every line of metrics.

    Not written to config.toml.
    """

    watch: Watch | None = option(
        None,
        "A function that is called with each line of metrics.jsonl.",
        only="python",
        checked_as=Any,
    )


@option_group
class SmokeOption:
    """Running: a quick test.

    Not written to config.toml.
    """

    smoke: bool = option(
        False,
        "Quick test: run every stage on a few examples; takes seconds and keeps nothing.",
        python="Quick test: run every stage on a few examples; takes seconds. The scores are "
        "meaningless.",
    )


@option_group
class TrustOption:
    """Running: code that a run folder refers to.

    Not written to config.toml.
    """

    trust: bool = option(False, "Allow a config.toml to run code, as in net = FILE.py:Class.")


@option_group
class DryRunOption:
    """Running: a dry run.

    Not written to config.toml.
    """

    dry_run: bool = option(
        False,
        "Print the complete configuration and the cost; nothing is kept. Of one run with coded "
        "messages, train at most five rounds to measure them.",
        only="command line",
    )


@option_group
class JsonOption:
    """Output: for programs.

    Not written to config.toml.
    """

    json: bool = option(False, "Print only JSON on stdout.", only="command line")
