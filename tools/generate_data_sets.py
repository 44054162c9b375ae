"""What follows from the data sets: their table in docs/data.md."""

from __future__ import annotations

from generate import ROOT, Files, replace_block

from fedgrove.data.named_set import FileFormat, NamedSet
from fedgrove.data.sets import BROKEN, SETS

PAGE = ROOT / "docs" / "data.md"


def table() -> Files:
    """Return the page on data with a table of all named data sets."""
    for sentence in BROKEN.values():
        raise SystemExit(sentence)
    lines = ["| name | what | clients | files |", "|---|---|---|---|"]
    for name, named_set in SETS.items():
        cells = (f"`{name}`", named_set.about, _clients(named_set), _files(named_set))
        lines.append(f"| {' | '.join(cells)} |")
    return {PAGE: replace_block(PAGE.read_text(), "data-sets", "\n".join(lines))}


def _clients(named_set: NamedSet) -> str:
    if named_set.clients is None:
        return f"one per user, `{named_set.partition}`"
    return f"{named_set.clients:,}, `{named_set.partition}`"


def _files(named_set: NamedSet) -> str:
    if not named_set.needs_files:
        return "none"
    listed = ", or ".join(_list_files(each) for each in named_set.formats)
    if named_set.downloads:
        listed += " (downloaded if missing)"
    return listed


def _list_files(file_format: FileFormat) -> str:
    """Return the file, or the number of files and their folder."""
    first = file_format.files[0]
    count = len(file_format.files)
    if count == 1:
        return f"`{first}`"
    folder, _, _ = first.rpartition("/")
    if folder:
        return f"{count} files in `{folder}/`"
    return f"`{first}` and {count - 1} more"
