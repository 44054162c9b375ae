"""HTML pages, rendered from jinja2 templates: one self-contained file each.

A page contains its style and a small script, so it opens offline and can be sent by mail. The
script adds what a pointer can do: read a point, hide a series, sort a table, switch between light
and dark. Without scripts the page is complete as well. Every text is escaped: a name with markup in
it stays text.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from ..errors import FolderWarning, InputError, check, make_printable
from .tables import (
    describe_finetuning,
    format_bytes,
    format_duration,
    format_kilobytes,
    format_number,
    format_percent,
)

if TYPE_CHECKING:
    from jinja2 import Environment

    from .charts import Chart

COLOURS = 12
"""The number of colours of charts in style.css; the next series uses the first one again."""
UNIT = re.compile(r"(\d) (%|[KMG]iB|k?B|m?s|min|h)(?!\w)")
"""A number and its unit."""
REPORT_FILE = "report.html"
"""The name of the report in a run folder."""
PAGE_MARK = '<meta name="generator" content="fedgrove">'
"""What tells pages of fedgrove from other HTML files; base.html has it."""
MARK_WITHIN = 2000
"""How many bytes of a file are searched for its mark."""


def check_place(
    path: Path,
    option: str = "--plot",
    *,
    endings: Sequence[str] = (".html",),
    mark: str = PAGE_MARK,
    force: bool = False,
) -> None:
    """Check before any work is done that a file which the user names can be written.

    Every command and function that writes such a file asks here.

    Args:
        path: The file.
        option: What the path is called in the error message.
        endings: What its name may end with.
        mark: A text near the beginning of files that fedgrove wrote; these are replaced.
        force: Replace any other file too.

    Raises:
        InputError: The folder does not exist, ``path`` is a folder, has another ending, lies in a
            run folder and is not its report, or is a file that fedgrove did not write.
    """
    if not path.parent.is_dir():
        raise InputError(
            f"{option} is '{path}', and there is no folder '{path.parent}'; "
            "create it or name a different file."
        )
    check(not path.is_dir(), option, str(path), "a file, and this is a folder")
    allowed = " or ".join(filter(None, (", ".join(endings[:-1]), endings[-1])))
    check(path.suffix in endings, option, str(path), f"a name that ends with {allowed}")
    run = _find_run_folder(path)
    if run is not None:
        # The report is the only file there that fedgrove writes again.
        is_report = path.resolve() == run / REPORT_FILE and mark == PAGE_MARK
        check(is_report, option, str(path), f"outside the run folder '{run}', or its {REPORT_FILE}")
        return
    if path.exists() and not force and not _begins_with(path, mark):
        give = "--force" if option.startswith("--") else "force=True"
        raise InputError(
            f"{option} is '{path}', which exists and was not written by fedgrove; name a different "
            f"file, or give {give} to replace it."
        )


def _find_run_folder(path: Path) -> Path | None:
    """Return the run folder in which a file would lie, at any depth; None if there is none."""
    for folder in path.resolve().parents:
        # A config.toml alone may be an experiment that somebody wrote.
        has_results = (folder / "metrics.jsonl").exists() or (folder / "checksums.txt").exists()
        if has_results and (folder / "config.toml").is_file():
            return folder
    return None


def _begins_with(path: Path, mark: str) -> bool:
    """Whether a file has the mark in its first lines; not if it cannot be read."""
    try:
        with path.open("rb") as file:
            return mark.encode() in file.read(MARK_WITHIN)
    except OSError:
        return False


def render(template: str, values: Mapping[str, Any], near: str = __file__) -> str:
    """Return a template filled in with values, which are escaped in HTML.

    Args:
        template: The file's name.
        values: What it shows.
        near: The module that has it in the folder ``templates`` next to it.
    """
    return _environment(Path(near).parent / "templates").get_template(template).render(values)


@cache
def _environment(folder: Path) -> Environment:
    # Imported here: most commands write no page.
    from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

    environment = Environment(
        loader=FileSystemLoader(folder),
        autoescape=select_autoescape(["html", "svg"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "units": keep_units,
        "markdown": escape_markdown,
        "bytes": format_bytes,
        "kilobytes": format_kilobytes,
        "number": format_number,
        "percent": format_percent,
        "duration": format_duration,
        "when": describe_finetuning,
        "at": "{:.1f}".format,
        "quote": lambda value: shlex.quote(str(value)),
    }
    environment.tests["finite"] = is_finite
    environment.globals["colours"] = COLOURS
    return environment


def is_finite(value: float | None) -> TypeGuard[float]:
    """Return whether a value is known and can be drawn in a chart."""
    return value is not None and math.isfinite(value)


def keep_units(text: str) -> str:
    """Escape a text for HTML and keep each unit on the line of its number.

    >>> keep_units("3.0 MiB < 4 ± 1")
    Markup('3.0&nbsp;MiB &lt; 4 ±&nbsp;1')
    """
    from markupsafe import Markup, escape

    # As str: Markup would escape what the replacement inserts.
    escaped = str(escape(text))
    return Markup(UNIT.sub(r"\1&nbsp;\2", escaped).replace("± ", "±&nbsp;"))


def escape_markdown(text: str) -> str:
    r"""Return a text that people wrote as Markdown which shows it and nothing else.

    >>> print(escape_markdown("<b>walk_fast</b>"))
    \<b>walk_fast\</b>
    """
    line = make_printable(" ".join(text.split()))
    return re.sub(r"([\\`*<\[&])", r"\\\1", line)


class Page:
    """A page that grows from top to bottom and is then written.

    The methods add blocks, which the template ``page.html`` shows in order. A page with a template
    of its own gets ``values`` instead.

    >>> page = Page("Results", warning="two clients only")
    >>> page.paragraph("All methods.", small="Means over 3 seeds.")
    >>> page.table(["method", "accuracy %"], [["fedavg", "91.20"]])
    >>> "<td>91.20</td>" in page.html()
    True
    """

    def __init__(
        self, title: str, warning: str = "", template: str = "page.html", **values: Any
    ) -> None:
        """Begin a page.

        Args:
            title: The title.
            warning: A text in red below the title, and in the browser's tab.
            template: The template in ``templates/``.
            values: What the template shows.
        """
        self._template = template
        self._values = {**values, "title": title, "warning": warning}
        self._blocks: list[tuple[str, dict[str, Any]]] = []

    def _add(self, block: str, **values: Any) -> None:
        """Add a block, which is a macro of ``blocks.html``."""
        self._blocks.append((block, values))

    def heading(self, text: str) -> None:
        """Begin a section of the page."""
        self._add("heading", text=text)

    def paragraph(self, text: str = "", small: str = "") -> None:
        """Add a text to the page, and small print on a separate line below it."""
        self._add("paragraph", text=text, small=small)

    def lead(self, text: str) -> None:
        """Add the most important sentence to the page, in large print."""
        self._add("lead", text=text)

    def charts(self, *charts: Chart) -> None:
        """Add charts, next to each other where there is room."""
        self._add("charts", charts=charts)

    def figures(self, *charts: Chart) -> None:
        """Add charts: the old name of :meth:`charts`, for one release."""
        message = (
            "Page.figures is now Page.charts; the old name will be removed in the next release."
        )
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        self.charts(*charts)

    def table(
        self,
        head: Sequence[str],
        rows: Sequence[Sequence[str]],
        *,
        sortable: bool = False,
    ) -> None:
        """Add a table to the page, numbers aligned to the right.

        Args:
            head: The names of the columns.
            rows: The cells.
            sortable: Whether a click on a column sorts by it. A long sortable table shows its first
                rows until the reader clicks a button.
        """
        self._add("table", head=head, rows=rows, sortable=sortable)

    def notes(self, notes: Sequence[str]) -> None:
        """Add a list of notes to the page."""
        self._add("notes", notes=notes)

    def html(self) -> str:
        """Return the whole page as HTML."""
        return render(self._template, {**self._values, "blocks": self._blocks})

    def write(self, path: Path, *, force: bool = False) -> None:
        """Write the whole page or nothing; an earlier page stays until the new one is complete.

        Args:
            path: The file, whose name ends with .html (:func:`check_place`).
            force: Replace a file that fedgrove did not write.
        """
        check_place(path, "path", force=force)
        unfinished = path.with_name(path.name + ".part")
        try:
            # Bytes, because the page declares UTF-8 and a text file would follow the locale.
            unfinished.write_bytes(self.html().encode())
            os.replace(unfinished, path)
        finally:
            # It exists only if it was not renamed.
            with suppress(OSError):
                unfinished.unlink()


def write_if_possible(
    make_page: Callable[[], Page], path: Path, *, force: bool = False, quiet: bool = False
) -> Path | None:
    """Make the page of a run that is complete without it, and write it; warn if that fails.

    Args:
        make_page: Makes the page.
        path: The file.
        force: Replace a file that fedgrove did not write.
        quiet: Do not warn.

    Returns:
        The path; None if the page was not written.
    """
    try:
        make_page().write(path, force=force)
    # Whatever is wrong with the page, the run is not.
    except Exception as error:
        if not quiet:
            reason = str(error) or type(error).__name__
            warnings.warn(f"{path} was not written: {reason}", FolderWarning, stacklevel=3)
        return None
    return path
