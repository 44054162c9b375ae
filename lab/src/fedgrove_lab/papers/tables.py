"""Shows a comparison as tables, on a terminal and in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import IO, Any, NamedTuple

from fedgrove.report.terminal import Column, name_columns, print_table, print_text

from .compare import ComparedRow, Comparison
from .measures import digits_of, scale_of, title_of

SPREAD = "± over seeds. counted: the paper's own formula; sent: real messages, both ways."
QUICK = "QUICK: a quick run, not a measurement"
DATA_HEAD = ["data", "measure", "ours", "paper", "difference"]
"""The columns of a table about the data."""


class Section(NamedTuple):
    """The lines of a table that belong to one data set and panel."""

    title: str
    lines: list[list[str]]


# ---- on a terminal and in Markdown ---------------------------------------------------------------


def print_comparison(comparison: Comparison, file: IO[str] | None = None) -> None:
    """Print the table, the tests and the notes."""
    head, sections = lay_out(comparison)
    print_text(_title(comparison), file)
    print_text(comparison["about"], file)
    for title, lines in sections:
        print(file=file)
        print_text(title, file)
        # The columns stand in the order in which the paper has them: the first say most.
        print_table([*name_columns(head[0]), *number_columns(*head[1:])], lines, file, "table.md")
    print_text(SPREAD + explain_marks(comparison), file)
    if comparison["paired"]:
        print(file=file)
        print_text(
            "paired by seed, difference of accuracy in points, two-sided p, "
            "not corrected for several pairs:",
            file,
        )
        head, lines = lay_out_pairs(comparison)
        first_number = head.index("seeds")
        lengths = number_columns(*head[first_number + 1 :])
        columns = [*name_columns(*head[:first_number]), Column("seeds", 1 + len(lengths)), *lengths]
        print_table(columns, lines, file, "table.md")
    for note in comparison["notes"]:
        print_text(note, file)


def number_columns(*heads: str) -> list[Column]:
    """Return columns of numbers; the first are shown on the narrowest terminal."""
    return [Column(head, rank) for rank, head in enumerate(heads)]


def write_markdown(comparison: Comparison) -> str:
    """Return the table and the tests as they go into a docs page."""
    head, sections = lay_out(comparison)
    blocks = [f"**{_title(comparison)}.** {comparison['about']}"]
    for title, lines in sections:
        blocks += [title, pipe_table(head, lines)]
    blocks.append(SPREAD + explain_marks(comparison))
    if comparison["paired"]:
        head, lines = lay_out_pairs(comparison)
        blocks += ["Paired by seed: points of accuracy and two-sided p.", pipe_table(head, lines)]
    for note in comparison["notes"]:
        blocks.append(f"- {note}")
    return "\n\n".join(blocks) + "\n"


def print_data_table(comparison: Comparison, file: IO[str] | None = None) -> None:
    """Print a table about the data and its notes."""
    print_text(comparison["title"], file)
    print_text(comparison["about"], file)
    columns = [*name_columns(*DATA_HEAD[:2]), *number_columns(*DATA_HEAD[2:])]
    print_table(columns, _data_lines(comparison), file, "table.md")
    for note in comparison["notes"]:
        print_text(note, file)


def write_data_markdown(comparison: Comparison) -> str:
    """Return a table about the data as it goes into a docs page."""
    table = pipe_table(DATA_HEAD, _data_lines(comparison))
    blocks = [f"**{comparison['title']}.** {comparison['about']}", table]
    blocks += [f"- {note}" for note in comparison["notes"]]
    return "\n\n".join(blocks) + "\n"


def _data_lines(comparison: Comparison) -> list[list[str]]:
    lines = []
    for row in comparison["rows"]:
        digits = row["digits"]
        line = [row["data"], row["measure"], f"{row['ours']:.{digits}f}"]
        if row["paper"] is None:
            line += ["", ""]
        else:
            line += [f"{row['paper']:.{digits}f}", f"{row['difference']:+.{digits}f}"]
        lines.append(line)
    return lines


def pipe_table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    rows = []
    for cells in (head, ["---"] * len(head), *lines):
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _title(comparison: Comparison) -> str:
    """The title of the part, with a warning where the runs were quick ones."""
    title: str = comparison["title"]
    return f"{title}, {QUICK}" if comparison["quick"] else title


# ---- the table -----------------------------------------------------------------------------------


def lay_out(comparison: Comparison) -> tuple[list[str], list[Section]]:
    """Return the head of the table and its sections; columns that nothing fills are left out."""
    measures = comparison["measures"]
    counted = comparison["counted"]
    sections: dict[str, list[list[str]]] = {}
    # All lines are filled in before any is shown: sections share one head.
    lines: list[list[str]] = []
    several_lengths = False
    for row in comparison["rows"]:
        is_marked = row["best"] or row["picked"]
        if comparison["only_best"] and not is_marked:
            continue
        if len(row["lengths"]) > 1:
            several_lengths = True
        for length in row["lengths"]:
            line = _line(row, length, measures, counted)
            lines.append(line)
            sections.setdefault(section_title(row), []).append(line)

    head = _head(measures, counted)
    any_groups = any(_is_grouped(row) for row in comparison["rows"])
    kept = []
    for column, title in enumerate(head):
        if title == "fine-tuned" and not several_lengths:
            continue
        if title == "groups" and not any_groups:
            continue
        if any(line[column] for line in lines):
            kept.append(column)

    kept_sections = []
    for title, whole in sections.items():
        kept_lines = [_pick(line, kept) for line in whole]
        kept_sections.append(Section(title, kept_lines))
    return _pick(head, kept), kept_sections


def _is_grouped(row: ComparedRow) -> bool:
    """Whether clients share models with some others, neither with all nor with none."""
    return any(1 < len(sizes) < sum(sizes) for sizes in row["group_sizes"])


def _pick(cells: Sequence[str], columns: Sequence[int]) -> list[str]:
    return [cells[column] for column in columns]


def section_title(row: ComparedRow) -> str:
    """Return the data of a row, and its panel."""
    data = f"{row['data']}, {row['split'] or 'own'} split"
    return f"{data}: {row['panel']}" if row["panel"] else data


def _head(measures: Sequence[str], counted: Sequence[str]) -> list[str]:
    head = ["row", "fine-tuned", "seeds"]
    for measure in measures:
        head += [title_of(measure), "paper", "difference"]
    head.append("groups")
    for measure in counted:
        head += [title_of(measure), "paper", "difference"]
    return head


def _line(
    row: ComparedRow, length: int, measures: Sequence[str], counted: Sequence[str]
) -> list[str]:
    """A row at one length of fine-tuning, in the columns of :func:`_head`."""
    label = row["label"]
    if row["best"]:
        label += " *"
    if row["picked"]:
        label += " +"
    finished = len(row["seeds"])
    seeds = str(finished)
    if row["missing"]:
        seeds = f"{finished} of {finished + row['missing']}"
    line = [label, str(length), seeds]
    for measure in measures:
        line += _three_cells(row, f"{measure}:{length}")
    line.append(list_groups(row))
    for measure in counted:
        line += _three_cells(row, measure)
    return line


def _three_cells(row: ComparedRow, key: str) -> list[str]:
    """Ours, the paper's, and the difference."""
    scale = scale_of(key)
    digits = digits_of(key)
    # Counts hardly vary over seeds: their spread would only widen the table.
    shows_spread = digits is None
    if digits is None:
        digits = 2
    ours = row["ours"].get(key)
    cells = ["", "", ""]
    if ours is not None:
        cells[0] = f"{scale * ours['mean']:.{digits}f}"
        if shows_spread and ours["std"] is not None:
            cells[0] += f" ± {scale * ours['std']:.{digits}f}"
    if key in row["paper"]:
        cells[1] = f"{scale * row['paper'][key]:.{digits}f}"
    if key in row["difference"]:
        cells[2] = f"{scale * row['difference'][key]:+.{digits}f}"
    return cells


def list_groups(row: ComparedRow) -> str:
    """Return the sizes of the groups of clients, of several seeds where they differ.

    >>> list_groups({"group_sizes": [[28, 1, 1], [28, 1, 1]]})
    '28/1/1'
    >>> list_groups({"group_sizes": [[1] * 30]})
    '30 x 1'
    """
    different: list[str] = []
    for sizes in row["group_sizes"]:
        all_equal = len(set(sizes)) == 1
        if len(sizes) > 5 and all_equal:
            text = f"{len(sizes)} x {sizes[0]}"
        else:
            text = "/".join(str(size) for size in sizes)
        if text not in different:
            different.append(text)
    # Ten seeds can give ten groupings: three show how much they differ.
    more = " ..." if len(different) > 3 else ""
    return ", ".join(different[:3]) + more


def explain_marks(comparison: Comparison) -> str:
    """Return what the marks behind a row's name mean, those that are used."""
    text = ""
    if any(row["best"] for row in comparison["rows"]):
        text += " * ours, the best."
    if any(row["picked"] for row in comparison["rows"]):
        text += " + the paper's choice."
    return text


# ---- paired tests --------------------------------------------------------------------------------


def lay_out_pairs(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """Return head and lines of the paired tests: a column per length of fine-tuning.

    Where there are panels, a column says which one.
    """
    pairs = comparison["paired"]
    has_panels = any(_where(pair) for pair in pairs)
    lengths: list[int] = []
    cells: dict[tuple[str, ...], dict[int, str]] = {}
    for pair in pairs:
        if pair["finetune"] not in lengths:
            lengths.append(pair["finetune"])
        own = [pair["data"], pair["row"], pair["against"], str(pair["seeds"])]
        if has_panels:
            own.insert(1, _where(pair))
        text = f"{100 * pair['difference']:+.2f}"
        if pair["p"] is not None:
            text += f" (p {pair['p']:.2g})"
        # The lengths of one pair share a line, though each is a test by itself.
        cells.setdefault(tuple(own), {})[pair["finetune"]] = text

    head = ["data", "row", "minus", "seeds"]
    if has_panels:
        head.insert(1, "at")
    head += [f"fine-tuned {length}" for length in lengths]
    lines = []
    for key, by_length in cells.items():
        line = list(key)
        for length in lengths:
            line.append(by_length.get(length, ""))
        lines.append(line)
    return head, lines


def _where(pair: Mapping[str, Any]) -> str:
    """The panel of a pair, and where on its axis."""
    panel: str = pair["panel"]
    return panel if pair["x"] is None else f"{panel} {pair['x']:g}"
