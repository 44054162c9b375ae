"""What there is and whether it works: ``list``, ``show``, ``doctor``."""

from __future__ import annotations

import dataclasses
import importlib.util
import platform
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from ..errors import FedgroveError, unknown
from . import options as o

Kind = Annotated[str, typer.Argument(metavar="methods|data|nets|parts|engines", show_default=False)]
EXTRAS = {
    "flower": "flwr",
    "report": "plotly jinja2",
    "export": "onnx onnxscript onnxruntime",
    "edge": "executorch",
    "dp": "opacus",
    "track": "tensorboard",
}


def list_(kind: Kind) -> None:
    """Say what there is: methods, data, nets, parts or engines."""
    from ..report.tables import print_pairs

    lists: dict[str, Callable[[], list[tuple[str, str]]]] = {
        "methods": _methods,
        "data": _data,
        "nets": _nets,
        "parts": _parts,
        "engines": _engines,
    }
    if kind not in lists:
        raise unknown("list", kind, lists)
    print_pairs(lists[kind]())


def show(method: o.Method, data: o.Data = "digits", data_dir: o.DataDir = None) -> None:
    """Print a method's equations, and everything in it that --set can change."""
    from .. import methods
    from ..config.experiment import Experiment, Federations
    from ..config.settings import settable
    from ..report.tables import print_pairs

    made = methods.find(method)()
    recipe = Federations(data_dir).recipe(Experiment(made, str(data)))
    print(f"{_about(type(made).__module__)}\n\n--set takes, with the recipe of {data}:\n")
    print_pairs(
        [(path, f"{_short(value)}  ({said})") for path, value, said in settable(made, recipe)]
    )


def doctor(data_dir: o.DataDir = None) -> None:
    """Say what is installed, which data are at hand, and whether a small run works."""
    import torch

    from ..engines.pool.engine import cores
    from ..report.tables import print_pairs

    print_pairs(
        [
            ("python", platform.python_version()),
            ("torch", f"{torch.__version__}, {torch.get_num_threads()} threads"),
            ("cores", str(cores())),
            *((f"extra {name}", _extra(name, modules)) for name, modules in EXTRAS.items()),
            *_places(data_dir),
            ("a small run", _trial()),
        ]
    )


def _methods() -> list[tuple[str, str]]:
    from .. import methods

    return [
        (name, re.split(r" \(|\.\s", _about(methods.find(name).__module__))[0])
        for name in methods.names()
    ]


def _data() -> list[tuple[str, str]]:
    from .. import data

    return [(name, data.describe(name)) for name in data.names()]


def _nets() -> list[tuple[str, str]]:
    from .. import nets

    return [(name, nets.describe(name)) for name in nets.names()]


def _parts() -> list[tuple[str, str]]:
    """The parts by the field that takes them, over all methods."""
    from ..config.settings import fitting, method_types, walk
    from ..parts.local import LocalTraining

    found: dict[str, list[str]] = {}
    for cls in method_types().values():
        whole = cls(local=LocalTraining()) if hasattr(cls, "local") else cls()
        for setting in walk(whole):
            names = list(fitting(setting.hint))
            if names:
                role = setting.path.rpartition(".")[2]
                found[role] = [*dict.fromkeys([*found.get(role, []), *names])]
    return [(role, ", ".join(names)) for role, names in found.items()]


def _engines() -> list[tuple[str, str]]:
    from .. import engines

    said = {
        "auto": "batched where there is a GPU, else pool, or serial where there is one core",
        "batched": "all clients stacked, on a GPU or for comparison on a CPU",
        "pool": "a worker process per core",
        "serial": "one client after another in this process: the reference",
        "wired": "serial, with every message turned into bytes and read back",
    }
    return [(name, said.get(name, "")) for name in engines.names()]


def _about(module: str) -> str:
    return (importlib.import_module(module).__doc__ or "").strip()


def _short(value: object) -> str:
    """A part by its name; what it holds has rows of its own."""
    return type(value).__name__ if dataclasses.is_dataclass(value) else str(value)


def _extra(name: str, modules: str) -> str:
    missing = [m for m in modules.split() if importlib.util.find_spec(m) is None]
    return (
        f"not there ({', '.join(missing)}); pip install 'fedgrove[{name}]'" if missing else "there"
    )


def _places(data_dir: str | None) -> list[tuple[str, str]]:
    """Where data are looked for, and which sets are there."""
    from ..data.files import folders
    from ..data.sets import SETS

    try:
        places = folders(data_dir)
    except FedgroveError as error:
        return [("data", str(error))]
    rows = [("data looked for in", ", ".join(map(str, places)))]
    for name, known in SETS.items():
        there = not known.forms or any(
            _there(place, form.files) for place in places for form in known.forms
        )
        rows.append((f"data {name}", "there" if there else f"not there; {known.source}"))
    return rows


def _there(place: Path, files: tuple[str, ...]) -> bool:
    return all((place / f).exists() or (place / f.removesuffix(".gz")).exists() for f in files)


def _trial() -> str:
    from ..api import run
    from ..methods import FedAvg

    try:
        with tempfile.TemporaryDirectory() as scratch:
            small = run(
                FedAvg(), out=Path(scratch) / "run", engine="serial", clients=4, cohort=2, rounds=1
            ).summary
    except FedgroveError as error:
        return f"fails: {error}"
    return f"works: {100 * small['accuracy_mean']:.1f} % on digits after one round, {small['seconds']:.1f} s"
