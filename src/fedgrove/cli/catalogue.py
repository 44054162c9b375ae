"""``fedgrove list``, ``show`` and ``doctor``: what there is, and whether it works.

Methods, nets, data sets and parts are what their files define; to know them, all files must be
imported, which takes two seconds. That is done once: a file in the user's cache folder keeps the
answer, with a fingerprint of all source files, so that ``list``, ``show`` and completion need no
torch. When a source file is added or changed, the fingerprint changes and the index is rebuilt.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import inspect
import json
import os
import platform
import re
import sys
import tempfile
from contextlib import suppress
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import FedgroveError, MethodError, unknown
from ..options.definition import Options, argument, option, option_class
from ..options.groups import METHOD, DataDirOption, DataOptions

if TYPE_CHECKING:
    from ..core import AnyMethod
    from ..parts.local import LocalTraining

PACKAGE_FOLDER = Path(__file__).parents[1]
INDEX_FORMAT = 1
"""Raised when the form of the index file changes."""
Rows = list[tuple[str, str]]
"""Names, each with a description."""
EXTRAS = {
    "export": ("models as ONNX files", ("onnx", "onnxscript", "onnxruntime")),
    "edge": ("models as ExecuTorch files", ("executorch",)),
    "litert": ("models as LiteRT files", ("litert_torch",)),
    "track": ("numbers for TensorBoard and MLflow", ("tensorboard", "mlflow")),
    "flower": ("deployment with Flower, and benchmarks that compare with it", ("flwr",)),
    "dp": ("epsilon for --privacy", ("opacus",)),
}
"""What each extra of pyproject.toml is for, and the modules it brings."""


# ---- commands ------------------------------------------------------------------------------------


@option_class
class ListOptions(Options):
    """Options of ``fedgrove list``."""

    kind: str = field(
        metadata=argument(
            "What to list.", "methods|data|partitions|nets|parts|engines|faults", complete="kinds"
        )
    )


def list_(options: ListOptions) -> None:
    """List methods, data sets, partitions, nets, parts and more."""
    from ..report.terminal import print_pairs

    lists = read_index().lists
    if options.kind not in lists:
        raise unknown("list", options.kind, lists)
    print_pairs(lists[options.kind])


@option_class
class ShowOptions(Options, DataDirOption, DataOptions):
    """Options of ``fedgrove show``."""

    method: str = field(metadata=argument(METHOD, "METHOD", complete="methods"), kw_only=True)


def show(options: ShowOptions) -> None:
    """Print a method's equations and settings."""
    from ..report.terminal import make_console, print_pairs, print_text, wrap_docstring

    options.check()
    docstring, rows = _find_settings(options)
    print(wrap_docstring(docstring, make_console().width))
    print()
    print_text(f"Settings for --set, with their defaults on {options.data}:")
    print()
    print_pairs(rows)


def _find_settings(options: ShowOptions) -> tuple[str, Rows]:
    """A method's docstring and settings, from the index unless method or data are the user's."""
    known = read_index()
    if options.method in known.settings and options.data in known.recipes:
        settings = known.settings_with(options.method, options.data)
        return known.docstrings[options.method], settings
    from .. import methods
    from ..config.experiment import Experiment, Federations

    instance = methods.make(options.method)
    given = options.given_of(DataOptions)
    recipe = Federations(options.data_dir).recipe(Experiment(instance, **given))
    return _docstring(type(instance)), setting_rows(instance, recipe)


def make_index() -> Index:
    """Make the index of ``fedgrove list`` from all methods, data sets, nets and parts."""
    from .. import methods
    from ..data.partition import PARTITIONS
    from ..data.sets import SETS
    from ..parts.local import LocalTraining
    from ..runs.faults import FAULT_KINDS
    from ..runs.run import make_recipe

    lists = {
        "methods": _methods(),
        "data": _data(),
        "partitions": list(PARTITIONS.items()),
        "nets": _nets(),
        "parts": _parts(),
        "engines": _engines(),
        "faults": list(FAULT_KINDS.items()),
    }
    docstrings = {}
    settings = {}
    for name, _ in lists["methods"]:
        try:
            instance = methods.make(name)
        except MethodError:
            # It is listed with the reason.
            continue
        docstrings[name] = _docstring(type(instance))
        rows = setting_rows(instance, LocalTraining())
        if instance.local is None:
            rows = _without_recipe(rows)
        settings[name] = rows
    recipes = {}
    for name, known in SETS.items():
        # As part of a method that leaves its local training to the data set.
        whole = setting_rows(methods.FedAvg(), make_recipe(known.defaults))
        recipes[name] = [row for row in whole if _is_of_recipe(row[0])]
    return Index(lists, docstrings, settings, recipes)


def _is_of_recipe(path: str) -> bool:
    return path == "local" or path.startswith("local.")


def _without_recipe(rows: Rows) -> Rows:
    """The rows with one that is empty in place of those of local training."""
    without: Rows = []
    for path, text in rows:
        if path == "local":
            without.append(("", ""))
        elif not _is_of_recipe(path):
            without.append((path, text))
    return without


def setting_rows(method: AnyMethod, recipe: LocalTraining) -> Rows:
    """Return the rows of ``fedgrove show``: each setting with its value and what it may be."""
    from ..config.settings import settable

    rows = []
    for path, value, allowed in settable(method, recipe):
        # A part is shown by its name: its fields have their own rows.
        shown = type(value).__name__ if dataclasses.is_dataclass(value) else str(value)
        rows.append((path, f"{shown}  ({allowed})"))
    return rows


@option_class
class DoctorOptions(Options, DataDirOption):
    """Options of ``fedgrove doctor``."""

    deploy: str | None = option(
        None,
        "Only check the server that runs on this machine with the keys in this folder.",
        "KEYS",
    )


def doctor(options: DoctorOptions) -> None:
    """Check the installation, the data sets and a small run.

    With --deploy, check a running server: the exit code is 1 if there is a problem.
    """
    options.check()
    if options.deploy is not None:
        _check_deployment(options.deploy)
        return
    import torch

    from ..engines.pool.engine import cores
    from ..report.terminal import print_pairs

    rows = [
        ("python", platform.python_version()),
        ("torch", f"{torch.__version__}, {torch.get_num_threads()} threads"),
        ("cores", str(cores())),
    ]
    for name, (purpose, modules) in EXTRAS.items():
        rows.append((f"extra {name}", f"{purpose}: {_extra(modules)}"))
    rows.extend(_data_rows(options.data_dir))
    rows.append(("test run", _try_run()))
    print_pairs(rows)
    # Now that all is imported anyway, so that the next `list` comes at once.
    read_index()


def _check_deployment(keys: str) -> None:
    import typer

    from ..deploy.doctor import check_server
    from ..report.terminal import print_pairs

    checks = check_server(keys)
    rows = []
    for check in checks:
        problem = f"PROBLEM: {check.found}; {check.advice}."
        result = f"ok: {check.found}" if check.is_right else problem
        rows.append((check.name, result))
    print_pairs(rows)
    problems = sum(not check.is_right for check in checks)
    print(f"{len(checks)} checks, {problems} problems")
    if problems:
        raise typer.Exit(1)


def _methods() -> list[tuple[str, str]]:
    from .. import methods
    from ..report.terminal import strip_markup

    rows = []
    for name in methods.names():
        try:
            docstring = _module_docstring(methods.find(name).__module__)
        except MethodError as error:
            # A broken file takes no other method away.
            rows.append((name, str(error)))
            continue
        # Up to the citation in brackets, or to the end of the first sentence.
        rows.append((name, strip_markup(re.split(r"\s\(|\.\s", docstring)[0])))
        for preset, method in methods.presets(name).items():
            rows.append((f"{name}:{preset}", f"{name} with {_changes(method)}"))
    return rows


def _changes(preset: AnyMethod) -> str:
    """The fields in which a preset differs from the method's defaults, as --set takes them."""
    return " ".join(_words(type(preset)(), preset, ""))


def _words(default: Any, changed: Any, path: str) -> list[str]:
    """``path=value`` for all that differs; given one after the other they make ``changed``."""
    words = []
    for each in dataclasses.fields(changed):
        before = getattr(default, each.name)
        value = getattr(changed, each.name)
        where = f"{path}{each.name}"
        if value == before:
            continue
        if not dataclasses.is_dataclass(value):
            words.append(f"{where}={_typed(value)}")
            continue
        cls: Any = type(value)
        if type(before) is not cls:
            # A part of another kind is named first, and then what differs from its own defaults.
            words.append(f"{where}={cls.__name__}")
            before = cls()
        words += _words(before, value, f"{where}.")
    return words


def _typed(value: Any) -> str:
    """A value as a user writes it.

    >>> _typed((0.0, 0.2)), _typed(False), _typed(None), _typed(10.0)
    ('0,0.2', 'false', 'none', '10')
    """
    if isinstance(value, tuple):
        return ",".join(map(_typed, value))
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return str(value).removesuffix(".0")


def _data() -> list[tuple[str, str]]:
    from .. import data
    from ..data.sets import BROKEN

    rows = [(name, data.describe(name)) for name in data.names()]
    # A broken file takes no other data set away.
    rows.extend((f"{module}.py", sentence) for module, sentence in BROKEN.items())
    return rows


def _nets() -> list[tuple[str, str]]:
    from .. import nets

    return [(name, nets.describe(name)) for name in nets.names()]


def _parts() -> list[tuple[str, str]]:
    """The parts by the field that takes them, over all methods."""
    from .. import methods
    from ..config.settings import fitting, walk
    from ..parts.local import LocalTraining

    names_by_role: dict[str, dict[str, None]] = {}
    for cls in methods.classes().values():
        # With a recipe, so that its optimiser is listed too.
        method = cls(local=LocalTraining()) if hasattr(cls, "local") else cls()
        for setting in walk(method):
            names = fitting(setting.hint, setting.home)
            if names:
                role = setting.path.rpartition(".")[2]
                # A dictionary as an ordered set.
                names_by_role.setdefault(role, {}).update(dict.fromkeys(names))
    return [(role, ", ".join(names)) for role, names in names_by_role.items()]


def _engines() -> list[tuple[str, str]]:
    from .. import engines

    descriptions = {
        "auto": "batched with a GPU, else pool, or serial with only one core",
        "batched": "all clients stacked, on a GPU or for comparison on a CPU",
        "flower": "Flower's simulation on Ray, a node per client; needs fedgrove[flower]",
        "pool": "a worker process per core",
        "serial": "one client after another in this process: the reference",
        "wired": "serial, with every message turned into bytes and read back",
    }
    return [(name, descriptions[name]) for name in engines.names()]


def _module_docstring(module: str) -> str:
    return (importlib.import_module(module).__doc__ or "").strip()


def _docstring(method: type) -> str:
    """Of its file, and of the class where the file has none: a user's own may."""
    return _module_docstring(method.__module__) or inspect.getdoc(method) or method.__name__


def _extra(modules: tuple[str, ...]) -> str:
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    return f"not installed; pip install {' '.join(missing)}" if missing else "installed"


def _data_rows(data_dir: str | Path | None) -> list[tuple[str, str]]:
    """Where data are looked for, and which sets are there."""
    from ..data.named_set import data_folders, find_files
    from ..data.sets import SETS

    try:
        places = data_folders(data_dir)
    except FedgroveError as error:
        return [("data", str(error))]
    rows = [("data folders", ", ".join(map(str, places)))]
    for name, known in SETS.items():
        is_there = not known.needs_files or find_files(places, known.formats) is not None
        state = "available" if is_there else f"not found; get it from {known.source}"
        # Variants of a set come from the same address, which is listed once.
        is_same = rows[-1][0].partition(":")[0] == f"data {name.partition(':')[0]}"
        if is_there or not is_same or rows[-1][1] != state:
            rows.append((f"data {name}", state))
    return rows


def _try_run() -> str:
    from ..api import run
    from ..methods import FedAvg

    try:
        with tempfile.TemporaryDirectory() as scratch:
            result = run(
                FedAvg(),
                clients=4,
                cohort=2,
                rounds=1,
                engine="serial",
                out=Path(scratch) / "run",
                progress=False,
            )
    except FedgroveError as error:
        return f"fails: {error}"
    accuracy = 100 * result.summary["accuracy_mean"]
    seconds = result.summary["seconds"]
    return f"works: {accuracy:.1f} % on digits after one round, {seconds:.1f} s"


# ---- the index file ------------------------------------------------------------------------------


class Index(NamedTuple):
    """Names and descriptions of what there is."""

    lists: dict[str, Rows]
    """What ``fedgrove list KIND`` prints, by kind."""
    docstrings: dict[str, str]
    """Of each method, by name; and by NAME:PRESET."""
    settings: dict[str, Rows]
    """What ``--set`` takes for each of them. A row with an empty name stands for the recipe."""
    recipes: dict[str, Rows]
    """The settings of local training, by data set."""

    def settings_with(self, method: str, data: str) -> Rows:
        """Return what ``--set`` takes for a method on a data set, for completion."""
        rows = []
        for path, text in self.settings[method]:
            rows.extend([(path, text)] if path else self.recipes[data])
        return rows


def read_index() -> Index:
    """Read the index of commands' completion from its file, or make and write it."""
    now = fingerprint()
    place = _index_file()
    known = _load_index(place, now)
    if known is None:
        known = make_index()
        _save_index(place, now, known)
    return known


def fingerprint() -> str:
    """Return a fingerprint of all that completion's index depends on: sources and Python."""
    hashed = hashlib.sha256(f"{INDEX_FORMAT} {sys.version}".encode())
    for path in sorted([*PACKAGE_FOLDER.rglob("*.py"), *PACKAGE_FOLDER.rglob("*.toml")]):
        facts = path.stat()
        hashed.update(f"{path} {facts.st_size} {facts.st_mtime_ns}\n".encode())
    return hashed.hexdigest()


def _index_file() -> Path:
    """The file of this installation in the user's cache folder."""
    here = hashlib.sha256(str(PACKAGE_FOLDER).encode()).hexdigest()[:8]
    root = os.environ.get("FEDGROVE_CACHE")
    if not root:
        # Not pooch's folder, which is the same on Linux: to import pooch takes a while.
        caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        root = str(Path(caches) / "fedgrove")
    return Path(root) / f"index-{here}.json"


def _load_index(place: Path, now: str) -> Index | None:
    """The index in a file; None if there is none, or it is of other source files, or damaged."""
    try:
        content = json.loads(place.read_bytes())
        if content["fingerprint"] != now:
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


def _save_index(place: Path, now: str, found: Index) -> None:
    """Write the index; where that is not possible, the next command makes it again."""
    from ..runs.files import write_bytes

    with suppress(OSError, FedgroveError):
        place.parent.mkdir(parents=True, exist_ok=True)
        # Another process may read it just now: it finds the old file or the new one, whole.
        write_bytes(place, json.dumps({"fingerprint": now, **found._asdict()}).encode())
