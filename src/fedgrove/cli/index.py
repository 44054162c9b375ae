"""What there is, remembered: so that ``list``, ``show`` and completion need not import torch.

Methods, nets, data sets and parts are what their files define, and to know that they must be
imported, which takes two seconds. That is done once; then a file in the user's cache folder holds
the answer, and a fingerprint of all our source files. A file that was added or changed changes the
fingerprint, and the index is made anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

PACKAGE = Path(__file__).parents[1]
FORMAT = 1
"""Raised when the file's form changes."""

Rows = list[tuple[str, str]]
"""Names, and what is said of each."""


class Index(NamedTuple):
    """What there is."""

    lists: dict[str, Rows]
    """What ``fedgrove list KIND`` prints, by kind."""
    docstrings: dict[str, str]
    """Of each method, by name; and by NAME:PRESET."""
    settings: dict[str, Rows]
    """What ``--set`` takes for each of them. A row with an empty name stands for the recipe."""
    recipes: dict[str, Rows]
    """The settings of local training, by data set."""

    def settings_with(self, method: str, data: str) -> Rows:
        """What ``--set`` takes for a method on a data set."""
        rows = []
        for path, text in self.settings[method]:
            rows.extend([(path, text)] if path else self.recipes[data])
        return rows


def index() -> Index:
    """What there is: as it was remembered, or found out now and remembered."""
    print_ = fingerprint()
    place = _place()
    known = _read(place, print_)
    if known is not None:
        return known
    # Imports everything.
    from .about import find_out

    found = find_out()
    _write(place, print_, found)
    return found


def fingerprint() -> str:
    """Of all that an answer depends on: our source files, and the version of Python."""
    hashed = hashlib.sha256(f"{FORMAT} {sys.version}".encode())
    for path in sorted(PACKAGE.rglob("*.py")):
        facts = path.stat()
        hashed.update(f"{path} {facts.st_size} {facts.st_mtime_ns}\n".encode())
    return hashed.hexdigest()


def _place() -> Path:
    """The file of this installation in the user's cache folder."""
    here = hashlib.sha256(str(PACKAGE).encode()).hexdigest()[:8]
    root = os.environ.get("FEDGROVE_CACHE")
    if not root:
        # Not pooch's folder, which is the same on Linux: to import pooch takes a while.
        caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        root = str(Path(caches) / "fedgrove")
    return Path(root) / f"index-{here}.json"


def _read(place: Path, print_: str) -> Index | None:
    """The index in a file; None if there is none, or it is of other source files, or damaged."""
    try:
        content = json.loads(place.read_bytes())
        if content["fingerprint"] != print_:
            return None
        return Index(
            lists=_all_pairs(content["lists"]),
            docstrings=dict(content["docstrings"]),
            settings=_all_pairs(content["settings"]),
            recipes=_all_pairs(content["recipes"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _all_pairs(tables: dict[str, Any]) -> dict[str, Rows]:
    return {name: [(key, text) for key, text in rows] for name, rows in tables.items()}


def _write(place: Path, print_: str, found: Index) -> None:
    """Remember; where that cannot be, the next command finds out again."""
    with suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        # Another process may read it just now: it finds the old file or the new one, whole.
        with tempfile.NamedTemporaryFile("w", dir=place.parent, delete=False) as file:
            json.dump({"fingerprint": print_, **found._asdict()}, file)
        os.replace(file.name, place)
