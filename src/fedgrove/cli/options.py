"""The words of the command line, each said once: flag, what it takes, what it means."""

from __future__ import annotations

import re
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from ..errors import together
from . import complete

WRONG = "fedgrove.wrong"
"""Where a context keeps what was wrong with the values of its options, one sentence each."""


class Gathering(TyperCommand):
    """A command that looks at all its options, and does not stop at the first that is wrong.

    One that goes on to look at the words in their turn (``gathers``) finds the sentences in the
    context; of any other they are raised here.
    """

    gathers = False

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse; an option whose value is wrong is noted, and taken out for the next try."""
        wrong: list[str] = []
        left = list(args)
        while True:
            try:
                rest = super().parse_args(ctx, list(left))
                break
            except typer.BadParameter as error:
                flags = [] if error.param is None else error.param.opts
                shorter = _without(left, flags)
                # By name: the errors of arguments that are missing and so on are of subclasses.
                if type(error).__name__ != "BadParameter" or shorter == left:
                    raise
                wrong.append(f"{flags[0]} {error.message}")
                left = shorter
                ctx.params.clear()
        if wrong and not self.gathers:
            raise together(wrong)
        ctx.meta[WRONG] = wrong
        return rest


class RunCommand(Gathering):
    """The command that says everything that is wrong, from a value to the data, at once."""

    gathers = True


def _without(args: list[str], flags: list[str]) -> list[str]:
    """Arguments without an option, each time that it is given."""
    left = []
    words = iter(args)
    for word in words:
        if word in flags:
            # Its value goes with it.
            next(words, None)
        elif not any(word.startswith(f"{flag}=") for flag in flags):
            left.append(word)
    return left


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


def option(flag: str, help: str, metavar: str, parser: Any = None, complete: Any = None) -> Any:
    """An option whose default the help text names itself."""
    return typer.Option(
        flag,
        help=help,
        metavar=metavar,
        parser=parser,
        autocompletion=complete,
        show_default=False,
    )


Method = Annotated[
    str,
    typer.Argument(
        metavar="METHOD",
        help="NAME or NAME:PRESET, see: fedgrove list methods; or FILE.py:Class",
        show_default=False,
        autocompletion=complete.methods,
    ),
]
Methods = Annotated[
    list[str],
    typer.Argument(
        metavar="METHOD...",
        help="NAME or NAME:PRESET, see: fedgrove list methods; or FILE.py:Class",
        show_default=False,
        autocompletion=complete.methods,
    ),
]
Run = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help="A run folder.", show_default=False, autocompletion=complete.runs
    ),
]
Unfinished = Annotated[
    str | None,
    typer.Argument(
        metavar="[RUN]",
        help="A run folder; else the newest unfinished one under runs.",
        show_default=False,
        autocompletion=complete.runs,
    ),
]
Runs = Annotated[
    list[str],
    typer.Argument(
        metavar="RUN...",
        help="Run folders, or folders of sweeps.",
        show_default=False,
        autocompletion=complete.runs,
    ),
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
ComparePage = Annotated[
    str | None,
    option("--page", "Where to write the page; else beside the runs, or here.", "FILE.html"),
]
Table = Annotated[
    str | None,
    option("--table", "Write a table for a paper too: .md, .tex or .csv.", "FILE"),
]

Data = Annotated[
    str | None,
    option(
        "--data",
        "A data set (fedgrove list data), a file or a folder of your own (.csv, .parquet, .npz), "
        "or several as mnist+digits; else digits.",
        "NAME|PATH",
        complete=complete.data,
    ),
]
Label = Annotated[str | None, option("--label", "Your own data: the column to predict.", "COLUMN")]
ClientColumn = Annotated[
    str | None,
    option(
        "--client",
        "Your own data: the column that says whose a row is; else a file or folder is a client.",
        "COLUMN",
    ),
]
Window = Annotated[
    int | None,
    option("--window", "Your own data: cut recordings into windows of N rows.", "N", whole),
]
Stride = Annotated[
    int | None,
    option("--stride", "Rows from one window to the next; else half a window.", "N", whole),
]
Channels = Annotated[
    str | None,
    option(
        "--channels",
        "Your own data: the columns that are inputs, as ax,ay,az; else all others.",
        "COLUMN,...",
    ),
]
TimeColumn = Annotated[
    str | None,
    option("--time", "Your own data: the column to sort recordings by.", "COLUMN"),
]
Net = Annotated[
    str | None,
    option(
        "--net",
        "A network (fedgrove list nets) or FILE.py:Class.",
        "NAME",
        complete=complete.nets,
    ),
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
Engine = Annotated[
    str,
    option(
        "--engine",
        "auto, batched, flower, pool, serial or wired.",
        "NAME",
        complete=complete.engines,
    ),
]
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
    option(
        "--set",
        "A method's field or a part's, as mu=0.1 (fedgrove show METHOD).",
        "KEY=VALUE",
        complete=complete.settings,
    ),
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
Privacy = Annotated[
    str | None,
    option(
        "--privacy",
        "Clip what leaves a client and add noise, as clip=1.0,noise=0.8; tells epsilon.",
        "clip=C,noise=Z",
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
Config = Annotated[
    str | None,
    option(
        "--config",
        "Words and settings from a file, or those of a run; what is given beside it counts.",
        "FILE.toml|RUN",
        complete=complete.runs,
    ),
]
Smoke = Annotated[
    bool,
    typer.Option("--smoke", help="Try every stage on a few examples, in seconds; keep nothing."),
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
