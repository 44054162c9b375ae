"""A run from a file: one written by hand, or the config.toml of a run that is to be repeated.

By hand it is short: the words of the command line, and settings as ``--set`` takes them::

    [run]
    method = "fedprox"
    data = "motion"
    rounds = 10

    [set]
    mu = 0.1
    lr = 0.01

A run folder's config.toml says everything, and its run is repeated to the bit on the same machine.
Relative paths in either are taken from where the command is given.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..core import AnyMethod
from ..errors import InputError, Refusals, unknown
from ..runs.folder import RunFolder
from .experiment import SHORTHANDS
from .toml import (
    FORMAT,
    check_files,
    check_trust,
    made_in_python,
    method_of,
    rebuilt_words,
)

TABLES = ("run", "method", "set", "data", "code", "files")


class Wanted(NamedTuple):
    """What a file asks for."""

    method: AnyMethod | None
    """None where another takes its place."""
    words: dict[str, Any]
    settings: dict[str, Any]


def read_config(
    path: str | Path, replaced: Mapping[str, Any], refusals: Refusals, trust: bool = False
) -> Wanted:
    """What a file, or a run folder, asks for; the words in ``replaced`` are not looked at.

    What is wrong is added to ``refusals``, but for a file that cannot be read at all.
    """
    place = Path(path)
    text = _text_of(place)
    document = _parsed(text, place)
    _check_format(document, place)
    for table in document:
        if table not in ("format", *TABLES):
            refusals.add(unknown(f"table of {place}", table, TABLES))
    run = _table(document, "run", place)
    kept = {word: value for word, value in run.items() if word not in replaced}
    settings = _flat(_table(document, "set", place))
    for word, setting in SHORTHANDS.items():
        if word in kept:
            settings[setting] = kept.pop(word)
    for word in made_in_python(text):
        if word not in replaced:
            kept.pop(word, None)
            refusals.add(_only_from_python(place, word))
    words = rebuilt_words(kept, refusals)
    method = None
    file = place / "config.toml" if place.is_dir() else place
    with refusals.collected():
        check_trust(text, file.parent, trust, tuple(replaced), file.name)
        if "method" not in replaced and "method" not in made_in_python(text):
            method = method_of(text)
    with refusals.collected():
        check_files(text, tuple(replaced))
    return Wanted(method, words, settings)


def _text_of(place: Path) -> str:
    if place.is_dir():
        return RunFolder.open(place).config
    try:
        return place.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(
            f"--config is {place}, and there is no such file or folder; give a file such as "
            "run.toml, or the folder of a run."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--config is {place}, which cannot be read: {error}.") from None


def _parsed(text: str, place: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InputError(
            f"{place} is not TOML: {error}. Words are written as: rounds = 10, and text in quotes: "
            'data = "digits".'
        ) from None


def _check_format(document: Mapping[str, Any], place: Path) -> None:
    # One that was written by hand need not name a format; a run folder's always does.
    given = document.get("format", FORMAT)
    if given != FORMAT:
        raise InputError(
            f"{place} is of format {given}, and this version of fedgrove reads format {FORMAT}, in "
            "which some names and defaults changed; write the words that matter to you into a new "
            "file, without a format."
        )


def _table(document: Mapping[str, Any], name: str, place: Path) -> dict[str, Any]:
    table = document.get(name, {})
    if not isinstance(table, dict):
        raise InputError(f"{name} of {place} is {table!r}; it must be a table: write [{name}].")
    return table


def _flat(table: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Settings by their dotted paths: TOML reads ``local.epochs = 2`` as a table in a table."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            flat.update(_flat(value, f"{path}{key}."))
        else:
            flat[f"{path}{key}"] = value
    return flat


def _only_from_python(place: Path, word: str) -> InputError:
    return InputError(
        f"the {word} of {place} was made in Python, which a file cannot hold; run the same script "
        f"again, or give another one beside the file."
    )
