"""What papers ran and what they report, as data: ``fedgrove paper NAME`` runs it again beside their figures.

The folder is the registry: ``ca-afp`` on the command line is ``ca_afp.py``, which holds one :class:`Paper`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from ..config.experiment import Experiment
from ..errors import InputError, check, unknown


@dataclass(frozen=True)
class Row:
    """One line of a table or one point of a figure: what is run, and what the paper reports of it.

    ``reported`` is by measure, with the epochs of fine-tuning after a colon where it depends on them:
    ``{"accuracy_mean:3": 0.96, "mib_paper": 483}``; accuracies are fractions, as in a summary.
    """

    name: str
    """Its run folders are called so, with ``-sSEED``."""
    label: str
    experiment: Experiment
    reported: Mapping[str, float] = field(default_factory=dict)
    panel: str = ""
    """Rows of one panel stand together and share axes; a figure's x is called so."""
    x: float | None = None
    series: str = ""
    lead: bool = False
    """Whether it is tested against every other row on the same data: the paper's own method is."""
    picked: bool = False
    """Whether the paper calls it the best of its panel."""


@dataclass(frozen=True)
class Study:
    """A table or figure of a paper on one data set."""

    title: str
    about: str
    """One sentence: what is shown, under which setting."""
    rows: tuple[Row, ...]
    seeds: int
    measures: tuple[str, ...] = ("accuracy_mean", "accuracy_std", "accuracy_worst")
    drawn: tuple[str, ...] = ("accuracy_mean", "mib_paper")
    """What a figure shows over ``x``; where rows have no x, over the epochs of fine-tuning."""
    lines: bool = False
    """Whether it is a figure, drawn as lines over x, not a table."""
    best: str = ""
    """The measure by which the paper picks a row of each panel, if it does."""
    only_best: bool = False
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Setting:
    """What a person may choose of a study: the data, how they are split, and whether a look is enough."""

    data: str
    split: str | None = None
    quick: bool = False


@dataclass(frozen=True)
class Part:
    """A table or figure: the data it is on, and its study on one of them."""

    data: tuple[str, ...]
    study: Callable[[Setting], Study]
    look: str = "motion"
    """The built-in data of a quick look."""


@dataclass(frozen=True)
class Paper:
    """A paper's tables and figures, by number."""

    cited: str
    tables: Mapping[int, Part]
    figures: Mapping[int, Part]


def names() -> list[str]:
    """The papers there are, as the command line calls them."""
    return sorted(m.name.replace("_", "-") for m in pkgutil.iter_modules(__path__))


def find(name: str) -> Paper:
    """A paper by name.

    >>> sorted(find("ca-afp").tables)
    [2, 3, 4]
    """
    if name not in names():
        raise unknown("paper", name, names())
    found: Paper = importlib.import_module(f"{__name__}.{name.replace('-', '_')}").PAPER
    return found


def parts(name: str, table: int | None, figure: int | None) -> dict[str, Part]:
    """The parts of a paper that were asked for: ``table2`` and ``figure3``, for instance."""
    paper = find(name)
    if table is None and figure is None:
        tables, figures = (
            ", ".join(map(str, numbers)) for numbers in (paper.tables, paper.figures)
        )
        raise InputError(
            f"neither --table nor --figure was given; {name} has --table {tables} and --figure {figures}."
        )
    asked = (("table", table, paper.tables), ("figure", figure, paper.figures))
    return {
        f"{kind}{n}": _numbered(name, kind, n, there) for kind, n, there in asked if n is not None
    }


def _numbered(name: str, kind: str, n: int, there: Mapping[int, Part]) -> Part:
    check(
        n in there,
        f"--{kind}",
        n,
        f"one of {', '.join(map(str, there))}, those of {name} that are run here",
    )
    return there[n]


def experiments(study: Study, seeds: Iterable[int]) -> dict[str, Experiment]:
    """The runs of a study, by name: every row on every seed."""
    return {
        f"{row.name}-s{seed}": replace(row.experiment, seed=seed)
        for row in study.rows
        for seed in seeds
    }
