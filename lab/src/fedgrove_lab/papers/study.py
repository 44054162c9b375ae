"""What a part of a paper is: its rows, what is measured, and the numbers that the paper reports.

:mod:`fedgrove_lab.papers.definition` builds these from a paper's TOML file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fedgrove.config.experiment import Experiment
from fedgrove.data import Federation
from fedgrove.runs.run import Run


@dataclass(frozen=True)
class StudyRow:
    """One line of a table or one point of a figure: what is run, and what the paper reports of it.

    ``reported`` is by measure, with the epochs of fine-tuning after a colon where it depends on
    them: ``{"accuracy_mean:3": 0.96, "mib_paper": 483}``; accuracies are fractions, as in a
    summary.
    """

    name: str
    """The run folders have this name, with ``-sSEED``. Rows of one name are of the same runs."""
    label: str
    experiment: Experiment
    reported: Mapping[str, float] = field(default_factory=dict)
    panel: str = ""
    """Rows of one panel stand together and share axes; it names the x axis of a figure."""
    x: float | None = None
    series: str = ""
    lead: bool = False
    """Whether it is tested against each other row on the same data: the paper's own method is."""
    picked: bool = False
    """Whether the paper calls it the best of its panel."""
    seeds: int | None = None
    """Only the first n seeds, where it takes too long for all of them."""
    layer: str = ""
    """The weight tensor that the measure ``pruned`` is of: rows of one run may differ in it."""
    band: tuple[float, float] | None = None
    """The uplinks (Mbit/s, the upper end not included but for the fastest) of the clients that the
    measure ``accuracy_band`` is of."""


@dataclass(frozen=True)
class Matrix:
    """A square of numbers, such as how similar devices are, drawn as a heat map."""

    title: str
    labels: tuple[str, ...]
    """Of rows and columns alike."""
    values: tuple[tuple[float, ...], ...]
    about: str = ""
    """What to see in it, in numbers."""


@dataclass(frozen=True)
class Study:
    """A table or figure of a paper on one data set."""

    title: str
    about: str
    """One sentence: what is shown, under which setting."""
    rows: tuple[StudyRow, ...]
    seeds: int
    measures: tuple[str, ...] = (
        "accuracy_mean",
        "accuracy_pooled",
        "accuracy_std",
        "accuracy_worst",
    )
    counted: tuple[str, ...] = ("mib_paper", "mib")
    """What does not depend on fine-tuning: bytes, sizes of models, and what is measured over the
    rounds, such as ``rounds_to@0.85`` or ``accuracy_mean@10`` (after round 10)."""
    base: str = ""
    """The row whose bytes are 100 % where ``counted`` has shares or reductions."""
    drawn: tuple[str, ...] = ("accuracy_mean", "mib_paper")
    """What a figure shows over ``x``; where rows have no x, over the epochs of fine-tuning."""
    over_rounds: bool = False
    """Whether a figure shows it over the rounds instead: clients must be scored in each of them."""
    against: str = ""
    """What a figure shows accuracy against where that is measured, as ``share``; else it is x."""
    lines: bool = False
    """Whether it is a figure, drawn as lines over x, not a table."""
    best: str = ""
    """The measure by which the paper picks a row of each panel, if it does."""
    only_best: bool = False
    matrices: Callable[[Run, Any], Sequence[Matrix]] | None = None
    """Made of each row's run of the first seed and the method's state at its end."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class StudyOptions:
    """What a person may choose of a study: the data, how they are split, and a quick run."""

    data: str
    split: str | None = None
    quick: bool = False
    rounds: int | None = None
    """None: the number that the paper has."""
    examples: int | None = None
    """Examples of each class that are dealt in all, for parts that take it; None: the default."""
    init: str | None = None
    """Weights to start from, for parts that take them; None: from scratch."""


@dataclass(frozen=True)
class StudyPart:
    """A table or figure that is trained: the data sets it is on, and its study on one of them."""

    data: tuple[str, ...]
    study: Callable[[StudyOptions], Study]
    quick_data: str = "motion"
    """The built-in data of a quick run."""
    substitutes: Mapping[str, str] = field(default_factory=dict)
    """What replaces data that are not found, and what replaces that in turn."""
    takes_rounds: bool = False
    """Whether it may be run in any number of rounds; in others a method has phases."""
    takes_start: bool = False
    """Whether it takes weights to start from, and a number of examples."""


@dataclass(frozen=True)
class Fact:
    """One line of a table about the data: a measure, our value, and the paper's."""

    measure: str
    ours: float
    paper: float | None = None
    digits: int = 0


@dataclass(frozen=True)
class DataTable:
    """A table about the data, with nothing trained: the sets it is on, and its lines on one."""

    data: tuple[str, ...]
    title: str
    about: str
    facts: Callable[[str, Federation], Sequence[Fact]]
    """From a data set's name and its federation, whose inputs are not standardised."""
    notes: tuple[str, ...] = ()
    quick_data: str = "motion"
    """The built-in data of a quick run."""


@dataclass(frozen=True)
class Paper:
    """A paper's tables and figures, by number."""

    cited: str
    tables: Mapping[int, StudyPart | DataTable]
    figures: Mapping[int, StudyPart]


def experiments(study: Study, seeds: Iterable[int]) -> dict[str, Experiment]:
    """Return the runs of a study, by name: each row on each seed that it is run on."""
    wanted = list(seeds)
    runs = {}
    for row in study.rows:
        for seed in wanted:
            if row.seeds is None or seed < row.seeds:
                runs[f"{row.name}-s{seed}"] = replace(row.experiment, seed=seed)
    return runs
