"""``fedgrove new``: a small project of one's own that runs, to be changed file by file."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from ..errors import InputError

FILES = {
    "README.md": "README.md.txt",
    "make_data.py": "make_data.py.txt",
    "net.py": "net.py.txt",
    "method.py": "method.py.txt",
    "run.py": "run.py.txt",
    "test_project.py": "test_project.py.txt",
    ".gitignore": "gitignore.txt",
}
"""The files of a project, and where their texts are in the folder ``project`` beside this file.

They end in .txt there, as they are no modules of fedgrove's.
"""

Place = Annotated[
    str, typer.Argument(metavar="DIR", help="The folder to make.", show_default=False)
]


def new(folder: Place) -> None:
    """Make a project with data, a net, a method and a test of its own, which runs as it is."""
    place = Path(folder)
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise InputError(
            f"{place} exists, and nothing is overwritten; name a folder that is not there."
        )
    texts = files(__package__) / "project"
    try:
        place.mkdir(parents=True, exist_ok=True)
        for name, source in FILES.items():
            (place / name).write_bytes((texts / source).read_bytes())
    except OSError as error:
        raise InputError(f"{place} cannot be made: {error.strerror or error}.") from None
    print(f"Made {place}. It runs as it is:")
    print()
    print(f"    cd {place}")
    print("    python make_data.py    # six made-up users, until you have your own")
    print("    python run.py          # your method beside FedAvg and training alone")
    print("    python -m pytest       # what must be so")
    print()
    print("README.md says what to change.")
