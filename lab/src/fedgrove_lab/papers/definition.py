"""Builds the studies of a paper from its TOML file, which holds all that is data.

A file has, in addition to ``cited`` and the ``data`` of a quick run:

- ``[full]`` and ``[quick]``: the scale, that of the paper or one that only shows that it works;
- ``[data.NAME]``: what differs between data sets, ``[data.default]`` for those without a table;
- ``[set]`` and ``[experiment]``: settings of every method (the value ``local`` is the training
  recipe) and fields of every experiment;
- ``[methods.NAME]``: how a method is called on the command line (``spec``), its label and settings;
- ``[reported.NAME]``: numbers that the paper prints, by data set and method;
- ``[notes]``: sentences under the tables, by name;
- ``[row]``: what all rows have in common;
- ``[table.N]`` and ``[figure.N]``: title, rows, measures, notes. ``row`` is what its rows have in
  common; with ``like = "table.4"`` keys that are not given are those of that part.

Everything may refer to values by name (:mod:`.scope`). Later tables win: full, data, the part's
``values``, quick, the part's ``quick_values``, what the command line gives. What is not data is a
function in the module of the paper's name: ``values(scope)``, ``row_values(scope)``,
``complete(row, scope)``, and those that a part names.
"""

from __future__ import annotations

import importlib
import math
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from fedgrove import methods
from fedgrove.config.experiment import Experiment, with_settings
from fedgrove.core import AnyMethod
from fedgrove.data import Federation
from fedgrove.parts.local import LocalTraining

from .scope import Scope
from .study import DataTable, Fact, Paper, Study, StudyOptions, StudyPart, StudyRow

FOLDER = Path(__file__).parent
Values = dict[str, Any]


class Definition(BaseModel):
    """A table of a TOML file; a key that it does not have is refused."""

    model_config = ConfigDict(extra="forbid")


class MethodDefinition(Definition):
    """A method that is compared, by the name of its row."""

    spec: str = "{method}"
    """As on the command line, ``NAME`` or ``NAME:PRESET``."""
    label: str = "{method}"
    reported_as: str = "{method}"
    """The name under which the paper's numbers stand."""
    set: Values = {}
    experiment: Values = {}


class RowDefinition(Definition):
    """One or more rows: one for each combination of the values in ``each``, the first outermost.

    A value that is a table has further values, or other fields of the row.
    """

    each: dict[str, Any] = {}
    method: str = "$method"
    name: str = "{method}"
    label: str = "{method_label}"
    panel: str = ""
    x: Any = None
    series: str = ""
    lead: bool | list[str] = False
    """Whether it leads, or the methods that do."""
    seeds: int | None = None
    layer: str = ""
    band: Any = None
    when: Any = True
    """Left out where this is false."""
    reported: list[str] = []
    """Names of tables of numbers; a later one wins."""
    reported_as: str = "$method_reported_as"
    set: Values = {}
    local: Values = {}
    experiment: Values = {}


class ReportedDefinition(Definition):
    """Numbers as a paper prints them."""

    columns: list[str]
    """Measures, several separated by commas where a number is that of each of them; after a space
    how the number becomes a value: ``%``, ``sparsity``, ``sparsity%`` or ``GB``."""
    across: str = ""
    """The value that numbers in a list are for, where there is one column; ``at`` lists it."""
    at: list[float] = []
    numbers: dict[str, dict[str, float | list[float]]]
    """By data set and method, ``all`` for every method; nan: not printed."""


class PartDefinition(Definition):
    """A table or a figure."""

    data: list[str]
    quick_data: str = ""
    """Where it is not the paper's."""
    title: str
    about: str
    rows: list[RowDefinition] = []
    values: Values = {}
    quick_values: Values = {}
    seeds: Any = "$seeds"
    measures: list[str] | None = None
    counted: list[str] | None = None
    drawn: list[str] | None = None
    base: str = ""
    over_rounds: bool = False
    against: str = ""
    lines: bool = False
    best: str = ""
    only_best: bool = False
    picked: dict[str, list[str]] = {}
    """By data set: the names of the rows that the paper calls the best of their panel."""
    matrices: str = ""
    """A function of the paper's module."""
    facts: str = ""
    """The same, for a table about the data, which has no rows."""
    numbers: str = ""
    """The table of numbers that ``facts`` gets."""
    notes: list[str] = []


class PaperDefinition(Definition):
    """A paper's TOML file."""

    cited: str
    quick_data: str
    takes_rounds: bool = False
    takes_start: bool = False
    substitutes: dict[str, str] = {}
    full: Values
    quick: Values
    data: dict[str, Values] = {}
    set: Values = {}
    experiment: Values = {}
    methods: dict[str, MethodDefinition] = {}
    row: Values = {}
    reported: dict[str, ReportedDefinition] = {}
    notes: dict[str, str] = {}
    every_note: list[str] = []
    """Notes that stand under every part."""
    table: dict[str, Values] = Field(default_factory=dict)
    figure: dict[str, Values] = Field(default_factory=dict)

    def part(self, name: str) -> PartDefinition:
        """Return a part by name, ``table.2``, with what all rows of the paper have in common."""
        given = self._table(name)
        rows = given.pop("rows", [])
        in_common = given.pop("row", {})
        return PartDefinition(
            rows=[RowDefinition(**_merge(self.row, in_common, row)) for row in rows], **given
        )

    def _table(self, name: str) -> Values:
        """A part's table with the keys of the one that it is like."""
        kind, _, number = name.partition(".")
        given = dict(getattr(self, kind)[number])
        if "like" in given:
            return {**self._table(given.pop("like")), **given}
        return given


@cache
def load_definition(name: str) -> PaperDefinition:
    """Read a paper's TOML file.

    Args:
        name: The paper's name on the command line, ``ca-afp``.
    """
    text = (FOLDER / f"{name}.toml").read_text()
    return PaperDefinition(**tomllib.loads(text))


def build_paper(name: str) -> Paper:
    """Return a paper's tables and figures, whose studies are built on request."""
    paper = load_definition(name)
    parts: dict[str, dict[int, Any]] = {"table": {}, "figure": {}}
    for kind, found in parts.items():
        for number in getattr(paper, kind):
            found[int(number)] = _build_part(name, paper, f"{kind}.{number}")
    return Paper(paper.cited, parts["table"], parts["figure"])


def _build_part(name: str, paper: PaperDefinition, part_name: str) -> StudyPart | DataTable:
    part = paper.part(part_name)
    module = _module(name)
    if part.facts:
        find_facts: Callable[[str, Federation, Mapping[str, Any]], Sequence[Fact]]
        find_facts = getattr(module, part.facts)
        numbers = paper.reported[part.numbers].numbers

        def facts(data: str, federation: Federation) -> Sequence[Fact]:
            return find_facts(data, federation, numbers)

        scope = Scope(paper.full)
        return DataTable(
            tuple(part.data),
            part.title,
            part.about,
            facts,
            notes=tuple(_notes(paper, part.notes, scope)),
            quick_data=part.quick_data or paper.quick_data,
        )
    return StudyPart(
        tuple(part.data),
        partial(build_study, paper, part, module),
        part.quick_data or paper.quick_data,
        paper.substitutes,
        paper.takes_rounds,
        paper.takes_start,
    )


def _module(name: str) -> ModuleType | None:
    """The module with what is not data of a paper; not every paper has one."""
    dotted = f"{__package__}.{name.replace('-', '_')}"
    if find_spec(dotted) is None:
        return None
    return importlib.import_module(dotted)


# ---- one study -----------------------------------------------------------------------------------


def build_study(
    paper: PaperDefinition, part: PartDefinition, module: ModuleType | None, options: StudyOptions
) -> Study:
    """Build a part's study on the data, and at the scale, that a person chose."""
    scope = _scope(paper, part, options)
    find_values = getattr(module, "values", None)
    if find_values is not None:
        scope = scope.extend(find_values(scope))
    rows = []
    for row_scope, row in _expand(paper, part, scope, module):
        made = _build_row(paper, row, row_scope, module)
        is_picked = made.name in part.picked.get(options.data, ())
        rows.append(replace(made, picked=is_picked))
    lists = {}
    for key in ("measures", "counted", "drawn"):
        given = getattr(part, key)
        if given is not None:
            lists[key] = tuple(scope.fill(given))
    return Study(
        title=scope.fill(part.title),
        about=scope.fill(part.about),
        rows=tuple(rows),
        seeds=scope.fill(part.seeds),
        base=scope.fill(part.base),
        over_rounds=part.over_rounds,
        against=part.against,
        lines=part.lines,
        best=part.best,
        only_best=part.only_best,
        matrices=getattr(module, part.matrices) if part.matrices else None,
        notes=tuple(_notes(paper, [*paper.every_note, *part.notes], scope)),
        **lists,
    )


def _scope(paper: PaperDefinition, part: PartDefinition, options: StudyOptions) -> Scope:
    own = paper.data.get(options.data, paper.data.get("default", {}))
    layers: list[Values] = [{"printed_as": options.data}, paper.full, own, part.values]
    if options.quick:
        layers += [paper.quick, part.quick_values]
    given: Values = {
        "data": options.data,
        "split": options.split,
        "init": options.init,
        "is_quick": options.quick,
    }
    for key in ("rounds", "examples"):
        value = getattr(options, key)
        if value is not None:
            given[key] = value
    # What a value was before the command line changed it: some notes name the paper's.
    paper_values = {f"paper_{key}": value for key, value in paper.full.items()}
    return Scope(paper_values, *layers, given)


def _notes(paper: PaperDefinition, names: Sequence[str], scope: Scope) -> Iterator[str]:
    """Notes by name, or as they are; names of values splice what those hold. Empty ones go."""
    for note in scope.fill(list(names)):
        text = scope.fill(paper.notes.get(note, note))
        if text:
            yield text


def _expand(
    paper: PaperDefinition, part: PartDefinition, scope: Scope, module: ModuleType | None
) -> Iterator[tuple[Scope, RowDefinition]]:
    """Each row with its own values: one for every combination of what its definition lists."""
    find_values = getattr(module, "row_values", None)
    for definition in part.rows:
        names = list(definition.each)
        choices = [scope.fill(listed) for listed in definition.each.values()]
        for chosen in product(*choices):
            own: Values = {}
            changed = definition.model_dump(exclude_unset=True)
            for name, value in zip(names, chosen, strict=True):
                if not isinstance(value, dict):
                    own[name] = value
                    continue
                for key, item in value.items():
                    if key in RowDefinition.model_fields:
                        changed = _merge(changed, {key: item})
                    else:
                        own[key] = item
            row = RowDefinition(**changed)
            row_scope = scope.extend(own)
            method = row_scope.fill(row.method)
            entry = paper.methods.get(method, MethodDefinition())
            row_scope = row_scope.extend(
                {
                    "method": method,
                    "method_label": entry.label,
                    "method_reported_as": entry.reported_as,
                }
            )
            if find_values is not None:
                row_scope = row_scope.extend(find_values(row_scope))
            if row_scope.fill(row.when):
                yield row_scope, row


def _build_row(
    paper: PaperDefinition, row: RowDefinition, scope: Scope, module: ModuleType | None
) -> StudyRow:
    entry = paper.methods.get(scope["method"], MethodDefinition())
    local = scope.fill({**scope.get("local", {}), **row.local})
    settings = scope.fill({**paper.set, **entry.set, **row.set})
    if local:
        settings["local"] = _recipe(local)
    method = with_settings(methods.make(scope.fill(entry.spec)), settings)
    fields = scope.fill({**paper.experiment, **entry.experiment, **row.experiment})
    band = scope.fill(row.band)
    made = StudyRow(
        name=scope.fill(row.name),
        label=scope.fill(row.label),
        experiment=_experiment(method, fields, scope),
        reported=_reported(paper, row, scope),
        panel=scope.fill(row.panel),
        x=scope.fill(row.x),
        series=scope.fill(row.series),
        lead=row.lead if isinstance(row.lead, bool) else scope["method"] in row.lead,
        seeds=row.seeds,
        layer=scope.fill(row.layer),
        band=None if band is None else tuple(band),
    )
    complete = getattr(module, "complete", None)
    return made if complete is None else complete(made, scope)


def _experiment(method: AnyMethod, fields: Values, scope: Scope) -> Experiment:
    given = {"data": scope["data"], "split": scope["split"], **fields}
    if "finetune" in given:
        given["finetune"] = tuple(given["finetune"])
    return Experiment(method, **given)


def _recipe(settings: Values) -> LocalTraining:
    made: Any = with_settings(LocalTraining(), settings)  # type: ignore[arg-type]
    return made  # type: ignore[no-any-return]


def _reported(paper: PaperDefinition, row: RowDefinition, scope: Scope) -> dict[str, float]:
    """What the paper reports of a row, by measure."""
    found: dict[str, float] = {}
    for name in row.reported:
        block = paper.reported[name]
        by_method = block.numbers.get(scope["printed_as"], {})
        printed = by_method.get(scope.fill(row.reported_as), by_method.get("all", []))
        numbers = printed if isinstance(printed, list) else [printed]
        if block.across:
            at = scope[block.across]
            chosen = zip(block.at, numbers, strict=False)
            numbers = [number for value, number in chosen if value == at]
        # A row may have fewer numbers than there are columns: the first ones.
        for column, number in zip(block.columns, numbers, strict=False):
            keys, _, unit = column.partition(" ")
            for key in keys.split(","):
                if not math.isnan(number):
                    found[key] = _value(number, unit)
    return found


def _value(number: float, unit: str) -> float:
    """A number as a summary would have it.

    >>> _value(95.24, "%"), _value(0.4, "sparsity"), _value(2, "GB")
    (0.9524, 0.6, 2048.0)
    """
    # Rounded, because 95.24 / 100 is 0.9523999999999999.
    match unit:
        case "%":
            return round(number / 100, 6)
        case "sparsity":
            return round(1 - number, 6)
        case "sparsity%":
            return round(1 - number / 100, 6)
        case "GB":
            return number * 1024.0
    return number


def _merge(*tables: Values) -> Values:
    """Tables in one, a later one wins; tables in them are merged as well."""
    merged: Values = {}
    for table in tables:
        for key, value in table.items():
            both_are_tables = isinstance(value, dict) and isinstance(merged.get(key), dict)
            if both_are_tables and key != "each":
                merged[key] = {**merged[key], **value}
            else:
                merged[key] = value
    return merged
