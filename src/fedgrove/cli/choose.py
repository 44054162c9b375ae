"""``fedgrove choose``: which method to take, tried on the data themselves."""

from __future__ import annotations

import json as jsonlib
from typing import Annotated, Any

import typer

from ..report.terminal import load_torch
from . import complete
from . import options as o
from .sweep import seeds_of


def names_of(text: str) -> Any:
    """Methods with commas between.

    >>> names_of("fedavg, ditto")
    ['fedavg', 'ditto']
    """
    return [word.strip() for word in text.split(",") if word.strip()]


Budget = Annotated[
    str | None,
    o.option(
        "--budget",
        "Bytes that one client may send and receive in the whole full run, on average: 8MB, 500kB.",
        "SIZE",
    ),
]
Names = Annotated[
    Any,
    o.option(
        "--methods",
        "Which to try, as local,fedavg,ditto; else those that may fit.",
        "NAME,...",
        names_of,
        complete.methods,
    ),
]
Rounds = Annotated[
    int | None,
    o.option(
        "--rounds",
        "Those of the full run, which decide its bytes; else the data set's own.",
        "N",
        o.whole,
    ),
]
Trial = Annotated[
    int | None,
    o.option("--trial", "Rounds of a trial; else half of the full run's.", "N", o.whole),
]
Seeds = Annotated[
    Any,
    o.option(
        "--seeds",
        "How many, from 0 on, or which: 3,5,7; all methods on the first, the promising on all; "
        "else 3.",
        "N|S,S",
        seeds_of,
    ),
]
Finetune = Annotated[
    Any,
    o.option(
        "--finetune",
        "Epochs of fine-tuning on the device; each method is taken at the best of them; else 0,3.",
        "N,N",
        o.lengths,
    ),
]
Validation = Annotated[
    float | None,
    o.option(
        "--validation",
        "Share held out for validation, after test, up to 0.5; else 0.2 in trials.",
        "SHARE",
        o.number,
    ),
]
Hindsight = Annotated[
    bool,
    typer.Option(
        "--hindsight",
        help="Train all of them in full too, and say on test data how good the choice was.",
    ),
]
Out = Annotated[
    str | None, o.option("--out", "The folder; the same choice in it is continued.", "DIR")
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Say who would be tried and who not; train nothing.")
]


def choose(
    ctx: typer.Context,
    data: o.Data = None,
    budget: Budget = None,
    profile: o.Profile = None,
    methods: Names = None,
    rounds: Rounds = None,
    seeds: Seeds = None,
    trial: Trial = None,
    finetune: Finetune = None,
    hindsight: Hindsight = False,
    label: o.Label = None,
    client: o.ClientColumn = None,
    window: o.Window = None,
    stride: o.Stride = None,
    channels: o.Channels = None,
    time: o.TimeColumn = None,
    net: o.Net = None,
    init: o.Init = None,
    freeze: o.Freeze = None,
    partition: o.Partition = None,
    scenario: o.Scenario = None,
    split: o.Split = None,
    validation: Validation = None,
    clients: o.Clients = None,
    cohort: o.Cohort = None,
    epochs: o.Epochs = None,
    batch: o.BatchSize = None,
    lr: o.Lr = None,
    trace: o.Trace = None,
    deadline: o.Deadline = None,
    faults: o.Faults = None,
    privacy: o.Privacy = None,
    score_on: o.ScoreOn = None,
    no_standardise: o.NoStandardise = False,
    engine: o.Engine = "auto",
    device: o.Device = "auto",
    precision: o.Precision = "fp32",
    timeout: o.Timeout = None,
    data_dir: o.DataDir = None,
    out: Out = None,
    dry_run: DryRun = False,
    json: o.Json = False,
) -> None:
    """Try the methods that fit for a few rounds; say which to take and why, by validation data.

    --budget and --profile rule out who cannot keep to them; each is told with a sentence. Below
    the table stand the choice, why, and the command that runs it in full.
    """
    load_torch(quiet=json)
    from ..choosing import choose as library

    words = {word: value for word, value in ctx.params.items() if value is not None}
    words.pop("json")
    if words.pop("no_standardise"):
        words["standardise"] = False
    found = library.choose(**words, progress=not json)
    if json:
        print(jsonlib.dumps(found.found, indent=1))
    else:
        found.table()
