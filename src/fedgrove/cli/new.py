"""``fedgrove new``: a small project that runs, to be changed file by file."""

from __future__ import annotations

from dataclasses import field
from importlib.resources import files
from pathlib import Path

from ..errors import InputError
from ..options.definition import Options, argument, option_class

FILES = {
    "README.md": "README.md.txt",
    "make_data.py": "make_data.py.txt",
    "net.py": "net.py.txt",
    "method.py": "method.py.txt",
    "run.py": "run.py.txt",
    "test_project.py": "test_project.py.txt",
    ".gitignore": "gitignore.txt",
}
"""The files of a project, and where their texts are in the folder ``project`` next to this file.

They end in .txt there, because they are not modules of fedgrove.
"""


@option_class
class NewOptions(Options):
    """Options of ``fedgrove new``."""

    folder: str = field(metadata=argument("The folder to create.", "DIR"))


def new(options: NewOptions) -> None:
    """Create a small project with data, net, method and test."""
    from ..report.page import render

    place = Path(options.folder)
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise InputError(
            f"{place} exists, and nothing is overwritten; give a folder that does not exist."
        )
    texts = files(__package__) / "project"
    try:
        place.mkdir(parents=True, exist_ok=True)
        for name, source in FILES.items():
            (place / name).write_bytes((texts / source).read_bytes())
    except OSError as error:
        raise InputError(f"{place} cannot be created: {error.strerror or error}.") from None
    print(render("new.txt", {"place": place}, near=__file__), end="")
