"""The words of the command line, each said once: flag, what it takes, what it means."""

from __future__ import annotations

import re
from typing import Annotated, Any

import typer


def whole(text: str) -> int:
    """A whole number."""
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"is '{text}'; it must be a whole number.") from None


def number(text: str) -> float:
    """A number."""
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"is '{text}'; it must be a number.") from None


def bound(text: str) -> float:
    """A number, or off."""
    return 0.0 if text.lower() == "off" else number(text)


def lengths(text: str) -> Any:
    """Whole numbers with commas between."""
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise typer.BadParameter(
            f"is '{text}'; it must be whole numbers with commas between, as 0,3,25."
        ) from None


def shape(text: str) -> Any:
    """A shape such as 3x200.

    >>> shape("1x28x28")
    (1, 28, 28)
    """
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", text):
        raise typer.BadParameter(
            f"is '{text}'; it must be a shape CxL or CxHxW, as 3x200 or 1x28x28."
        )
    return tuple(int(word) for word in text.split("x"))


def option(flag: str, help: str, metavar: str, parser: Any = None) -> Any:
    """An option whose default the help text names itself."""
    return typer.Option(flag, help=help, metavar=metavar, parser=parser, show_default=False)


Method = Annotated[
    str,
    typer.Argument(
        metavar="METHOD",
        help="NAME or NAME:PRESET, see: fedgrove list methods; or FILE.py:Class",
        show_default=False,
    ),
]
Methods = Annotated[
    list[str],
    typer.Argument(
        metavar="METHOD...",
        help="NAME or NAME:PRESET, see: fedgrove list methods; or FILE.py:Class",
        show_default=False,
    ),
]
Run = Annotated[str, typer.Argument(metavar="RUN", help="A run folder.", show_default=False)]
Runs = Annotated[
    list[str],
    typer.Argument(metavar="RUN...", help="Run folders, or folders of sweeps.", show_default=False),
]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust",
        help="Run the code that config.toml names, as net = FILE.py:Class; else it is refused.",
    ),
]
Bytes = Annotated[
    bool,
    typer.Option("--bytes", help="What the bytes were spent on, beside the paper's own count."),
]
Time = Annotated[
    bool,
    typer.Option("--time", help="Virtual time to an accuracy: the highest that all runs reach."),
]
To = Annotated[float | None, option("--to", "The accuracy for --time, as 0.9.", "SHARE", number)]
Plot = Annotated[
    str | None, option("--plot", "With --time, write a page with a plot too.", "FILE.html")
]

Data = Annotated[
    str | None,
    option(
        "--data",
        "A data set (fedgrove list data) or FILE.npz, or several as mnist+digits; else digits.",
        "NAME",
    ),
]
Net = Annotated[
    str | None, option("--net", "A network (fedgrove list nets) or FILE.py:Class.", "NAME")
]
Init = Annotated[
    str | None,
    option(
        "--init",
        "Weights to start from, as RUN/models/client-00000.safetensors; :body: all but the head.",
        "FILE[:body]",
    ),
]
Freeze = Annotated[
    float | None,
    option(
        "--freeze",
        "Keep the first layers as they are, as 0.25: not trained, sent or pruned; else 0.",
        "SHARE",
        number,
    ),
]
Partition = Annotated[
    str | None,
    option(
        "--partition",
        "natural, iid, dirichlet:ALPHA, classes:K or shards:K; the last two also with :grouped.",
        "KIND",
    ),
]
Scenario = Annotated[
    str | None,
    option(
        "--scenario",
        "none, noisy, drift, flipped:SHARE, restricted:K or switch:ROUND:PAIRS.",
        "KIND",
    ),
]
Split = Annotated[str | None, option("--split", "blocks or random.", "KIND")]
Validation = Annotated[
    float | None,
    option(
        "--validation",
        "Share held out for validation, after test: 0 (none) to 0.5; else 0.1.",
        "SHARE",
        number,
    ),
]
Clients = Annotated[int | None, option("--clients", "How many clients there are.", "K", whole)]
Cohort = Annotated[int | None, option("--cohort", "How many train in a round.", "M", whole)]
Rounds = Annotated[int | None, option("--rounds", "How many rounds.", "N", whole)]
Epochs = Annotated[
    int | None, option("--epochs", "Local epochs; short for --set local.epochs=E.", "E", whole)
]
BatchSize = Annotated[
    int | None, option("--batch", "Batch size; short for --set local.batch=B.", "B", whole)
]
Lr = Annotated[
    float | None,
    option("--lr", "Learning rate; short for --set local.optimiser.lr=L.", "L", number),
]
Finetune = Annotated[
    Any, option("--finetune", "Epochs of fine-tuning to report, as 0,3,25.", "N,N", lengths)
]
Profile = Annotated[
    str | None,
    option("--profile", "Devices: uniform, phones, adfedwcp, or FILE.csv.", "NAME"),
]
Trace = Annotated[
    str | None,
    option("--trace", "Bandwidths over time: columns client, second, up, down.", "FILE.csv"),
]
Deadline = Annotated[
    float | None,
    option(
        "--deadline",
        "Virtual seconds an exchange lasts at most: who is later is lost; else the slowest counts.",
        "S",
        number,
    ),
]
Seed = Annotated[
    int | None, option("--seed", "All randomness follows from it; 0 by default.", "S", whole)
]
Engine = Annotated[str, option("--engine", "auto, batched, flower, pool, serial or wired.", "NAME")]
Precision = Annotated[
    str, option("--precision", "On CUDA: fp32, tf32 (shorter products) or bf16.", "NAME")
]
Device = Annotated[str, option("--device", "auto, cpu or cuda.", "NAME")]
DataDir = Annotated[
    str | None, option("--data-dir", "Where the data files are; else FEDGROVE_DATA.", "DIR")
]
Out = Annotated[
    str | None, option("--out", "The run folder to make; one that exists is never touched.", "DIR")
]
Set = Annotated[
    list[str] | None,
    option("--set", "A method's field or a part's, as mu=0.1 (fedgrove show METHOD).", "KEY=VALUE"),
]
Evaluate = Annotated[
    int | None,
    option("--evaluate", "Score clients every N rounds; 0: at the end.", "N", whole),
]
ScoreOn = Annotated[
    int | None,
    option(
        "--score-on",
        "Score so many clients, drawn from the seed; 0: none; else all, or 1000 of over 10,000.",
        "N",
        whole,
    ),
]
Quorum = Annotated[
    float | None,
    option(
        "--quorum",
        "Share of the clients asked that must report, or the exchange is tried again; else one.",
        "SHARE",
        number,
    ),
]
Timeout = Annotated[
    float | None,
    option("--timeout", "Seconds after which a client that has not answered is lost.", "S", number),
]
NormBound = Annotated[
    float | None,
    option(
        "--norm-bound",
        "Refuse updates longer than so many times the recent median; off: none; else 100.",
        "N|off",
        bound,
    ),
]
Faults = Annotated[
    str | None,
    option(
        "--faults",
        "Make clients fail or lie, as crash=0.1,late=0.2 (fedgrove list faults).",
        "KIND=P,...",
    ),
]
PerTask = Annotated[
    bool,
    typer.Option(
        "--per-task", help="Mixed data: keep the true tasks apart, the method once for each."
    ),
]
NoStandardise = Annotated[
    bool, typer.Option("--no-standardise", help="Leave each client's channels as they are.")
]
DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="Print the whole configuration and the cost; train nothing."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, alone, on stdout.")]
Input = Annotated[
    Any,
    option("--input", "The shape of one example, in place of data: CxL or CxHxW.", "SHAPE", shape),
]
Classes = Annotated[int | None, option("--classes", "How many classes, with --input.", "N", whole)]
TrainedExamples = Annotated[
    int | None,
    option("--examples", "How many a client trains on, with --input; else 500.", "N", whole),
]
