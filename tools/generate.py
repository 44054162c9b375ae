"""Writes the files, and the blocks of docs pages, that follow from code and stored results.

::

    python tools/generate.py              write all
    python tools/generate.py methods      write what one generator makes
    python tools/generate.py --check      write nothing; exit 1 if something is not current

A generator is a function without arguments that returns the new text of each file it writes. Add
one to :data:`GENERATORS`. A block of a page stands between two comments::

    <!-- begin methods: tools/generate.py -->
    <!-- end methods -->

or in YAML ``# begin methods: tools/generate.py`` and ``# end methods``.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path

from fedgrove.errors import FedgroveError

ROOT = Path(__file__).parents[1]
Files = dict[Path, str]

GENERATORS = {
    "stub": "generate_methods:stub",
    "methods": "generate_methods:pages",
    "data-sets": "generate_data_sets:table",
    "options": "generate_options:page",
    # Tables and the picture from lab/results.
    "results": "fedgrove_lab.tables:find_changes",
}
"""Each generator as ``module:function``, imported only when it is needed."""


def replace_block(text: str, name: str, block: str) -> str:
    """A text with another block between its two comments.

    >>> page = "<!-- begin x: tools/generate.py -->\\nold\\n<!-- end x -->"
    >>> print(replace_block(page, "x", "new"))
    <!-- begin x: tools/generate.py -->
    new
    <!-- end x -->
    """
    begin = re.search(rf"^.*\bbegin {name}: tools/generate\.py.*\n", text, re.MULTILINE)
    end = re.search(rf"^.*\bend {name}\b.*$", text, re.MULTILINE)
    if begin is None or end is None:
        raise SystemExit(f"no block '{name}': see how to mark it in tools/generate.py")
    return text[: begin.end()] + block.strip("\n") + "\n" + text[end.start() :]


def find_generator(name: str) -> Callable[[], Files]:
    """The function of a generator."""
    module, _, function = GENERATORS[name].partition(":")
    sys.path.insert(0, str(Path(__file__).parent))
    try:
        found: Callable[[], Files] = getattr(importlib.import_module(module), function)
    finally:
        sys.path.pop(0)
    return found


def outdated(names: list[str]) -> Files:
    """The new text of every file that is not as its generator would write it."""
    files: Files = {}
    for name in names:
        for path, text in find_generator(name)().items():
            if not path.exists() or path.read_text() != text:
                files[path] = text
    return files


def main() -> int:
    """Write the files, or with ``--check`` say which are outdated."""
    parser = argparse.ArgumentParser(description=re.split(r"\n\n", __doc__ or "")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(GENERATORS))
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 if outdated")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.names) - set(GENERATORS))
    if unknown:
        parser.error(
            f"there is no generator {', '.join(unknown)}; there are: {', '.join(GENERATORS)}"
        )
    names = arguments.names or list(GENERATORS)
    try:
        return write_outdated(names, arguments.check)
    except FedgroveError as error:
        # A broken method or data set: its sentence says what is wrong, and a traceback does not.
        raise SystemExit(str(error)) from None


def write_outdated(names: list[str], check: bool) -> int:
    """Write every file that is not current, or with ``check`` only print its name; 1 if any is."""
    for name in names:
        # One after another: several generators may write blocks of one page.
        for path, text in outdated([name]).items():
            print(path.relative_to(ROOT), "is not current" if check else "written")
            if not check:
                path.write_text(text)
    return int(check and bool(outdated(names)))


if __name__ == "__main__":
    sys.exit(main())
