"""A Flower app for a method: files that ``flwr run`` takes as they are.

::

    pyproject.toml            what Flower must know, and the run's own words: out, clients, ...
    README.md                 the commands
    fedgrove_app/config.toml  the experiment, without its data
    fedgrove_app/data.py      where a node's own data come from: the one file to change
    fedgrove_app/server.py    the two halves
    fedgrove_app/client.py
    fedgrove_app/code/        a method or a network of the user's own, where there is one
"""

from __future__ import annotations

import re
import shutil
import sys
import tomllib
from contextlib import chdir, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tomli_w

from .. import __version__, methods
from ..config.experiment import DATA_NAMES, Experiment, Federations
from ..config.plan import Plan, plan
from ..config.toml import named_code, to_toml
from ..data import Federation
from ..data.sets import SETS
from ..errors import InputError, check
from ..nets.user_files import import_file, is_file_spec
from ..options.definition import options_of
from ..report.page import render
from .enrolment import TIMES_USUAL, describe_client
from .server import GRACE, TIMEOUT

PACKAGE = "fedgrove_app"
CODE = "code"
"""The folder of the user's own files, in the package."""
WAIT = 600
"""Seconds that the app's server waits for its nodes."""
FILES = {
    "pyproject.toml": "pyproject.toml.txt",
    "README.md": "README.md.txt",
    f"{PACKAGE}/__init__.py": "init.py.txt",
    f"{PACKAGE}/server.py": "server.py.txt",
    f"{PACKAGE}/client.py": "client.py.txt",
}
"""The files of every app, and their templates in the folder ``templates`` next to this file."""
NOT_CARRIED = re.compile(r"^test_.*\.py$|_test\.py$")
"""Files that Flower leaves out of an app, whatever they are."""


@dataclass(frozen=True)
class App:
    """An app that was written."""

    folder: Path
    clients: int
    out: str
    files: tuple[str, ...]


def write_app(
    experiment: Experiment,
    folder: str | Path,
    *,
    federations: Federations | None = None,
    timeout: float | None = None,
) -> App:
    """Write the Flower app of an experiment into a folder that is empty or not there yet.

    The data are read once, to check that all fits and to write down the names of the classes; they
    do not go along. ``timeout`` is how many seconds the server waits for a client's answer; by
    default :data:`fedgrove.deploy.server.TIMEOUT`.
    """
    path = Path(folder)
    _check_free(path)
    _check_fits_nodes(experiment)
    planned = plan(experiment, path, federations or Federations())
    federation = planned.run.federation
    # Data that cannot be described over a network are refused now, not when nodes enrol.
    describe_client(federation, federation.ids[0])
    own_files = _own_files(named_code(planned.config))
    name = re.sub(r"[^a-z0-9-]+", "-", methods.name_of(experiment.method).lower()).strip("-")
    out = f"runs/{name}-{re.sub(r'[^A-Za-z0-9-]+', '-', federation.name).strip('-') or 'own'}"
    clients = len(federation.clients)
    values = {
        "name": name,
        "version": __version__,
        "package": PACKAGE,
        "out": out,
        "clients": clients,
        "grace": round(GRACE),
        "wait": WAIT,
        "timeout": timeout or TIMEOUT,
        "most_examples": TIMES_USUAL,
        "code": f'HERE / "{CODE}"' if own_files else "HERE",
        **_describe_data(experiment, federation),
    }
    texts = {}
    for file, template in FILES.items():
        texts[file] = render(template, values, near=__file__)
    data_template = "own_data.py.txt" if _is_own(experiment) else "set_data.py.txt"
    texts[f"{PACKAGE}/data.py"] = render(data_template, values, near=__file__)
    try:
        for file, text in texts.items():
            place = path / file
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text)
        for file, source in own_files.items():
            place = path / PACKAGE / CODE / file
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, place)
        # After the user's files: it imports them from their new place.
        home = path / PACKAGE / CODE if own_files else path / PACKAGE
        config = _config(planned, home)
        (path / PACKAGE / "config.toml").write_text(config)
    except OSError as error:
        raise InputError(
            f"{error.filename or path} cannot be written: {error.strerror or error}."
        ) from None
    carried = tuple(f"{PACKAGE}/{CODE}/{file}" for file in own_files)
    return App(path, clients, out, (*texts, f"{PACKAGE}/config.toml", *carried))


def _check_free(path: Path) -> None:
    """Refuse to write a Flower app into a folder that is not empty."""
    if path.is_file() or (path.is_dir() and any(path.iterdir())):
        raise InputError(
            f"{path} is not empty; an app is only written into a folder that is empty or does not "
            "exist."
        )


def _check_fits_nodes(experiment: Experiment) -> None:
    """Refuse what nodes cannot have."""
    check(
        isinstance(experiment.data, str) and "+" not in experiment.data,
        "data",
        experiment.data,
        "one data set, file or folder; over a network all clients have one task",
    )
    no_module = experiment.net is None or isinstance(experiment.net, str)
    check(no_module, "net", experiment.net, "a name, or FILE.py:Class, which can be sent")
    named_words = {
        "init": "left out: an app carries no file of weights",
        "trace": "left out: a device's bandwidth is what its node reports",
        "faults": "left out: real devices fail by themselves",
    }
    for word, allowed in named_words.items():
        given = getattr(experiment, word)
        check(given is None, word, given, allowed)
    is_file = experiment.profile is not None and experiment.profile.lower().endswith(".csv")
    allowed = "a name, or left out: a node describes its own device (Info, in own_data)"
    check(not is_file, "profile", experiment.profile, allowed)
    privacy = experiment.parsed_privacy()
    # The server knows the seed, and could take away again what was drawn from it.
    is_secret = privacy is None or privacy.noise == 0 or privacy.secret
    check(is_secret, "privacy", experiment.privacy, "given with secret=1, over a network")
    check(not experiment.per_task, "per_task", True, "left out: all clients have one task")


# ---- the user's own code -------------------------------------------------------------------------


def _own_files(named: dict[str, str]) -> dict[str, Path]:
    """Files of the user's that the app needs, by their names in it; with what these import."""
    found: dict[str, Path] = {}
    for spec in dict.fromkeys(named.values()):
        file = _file_of(spec).resolve()
        # Imported by now; and so is what it imports from its own folder.
        import_file(file)
        for name, source in {file.name: file, **_imported_from(file.parent)}.items():
            other = found.setdefault(name, source)
            # Equal contents are fine: two specs may name one file.
            if other.read_bytes() != source.read_bytes():
                raise InputError(
                    f"{other} and {source} have the same name, and an app has one folder for "
                    "code; rename one of them."
                )
            if NOT_CARRIED.search(Path(name).name):
                raise InputError(
                    f"{source} looks like a test, which Flower leaves out of an app; rename it."
                )
    return found


def _file_of(spec: str) -> Path:
    """The file of FILE.py or FILE.py:Class."""
    if ":" in spec:
        # The last colon: a path may have one of its own.
        spec = spec.rpartition(":")[0]
    return Path(spec)


def _imported_from(folder: Path) -> dict[str, Path]:
    """Modules that lie in a folder under their own names, by their paths from it."""
    found = {}
    # A copy: other threads may import meanwhile.
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file is None:
            continue
        place = Path(file)
        inner = Path(*name.split("."))
        with suppress(OSError):
            if place.resolve() in (folder / f"{inner}.py", folder / inner / "__init__.py"):
                found[place.resolve().relative_to(folder).as_posix()] = place.resolve()
    return found


def _config(planned: Plan, code: Path) -> str:
    """The experiment as the app has it: without options for data, its code by names in ``code``."""
    experiment = planned.experiment
    named = named_code(planned.config)
    with chdir(code):
        for spec in named.values():
            # The same text under its new name: config.toml records where it was imported last.
            import_file(Path(_file_of(spec).name))
        if isinstance(experiment.net, str) and is_file_spec(experiment.net):
            file, _, rest = experiment.net.rpartition(":")
            experiment = replace(experiment, net=f"{Path(file).name}:{rest}")
        document = tomllib.loads(to_toml(experiment))
    for word in DATA_NAMES:
        document["run"].pop(word, None)
    return tomli_w.dumps(document)


# ---- the files -----------------------------------------------------------------------------------


def _is_own(experiment: Experiment) -> bool:
    """Whether the data are files of the user's own."""
    return str(experiment.data).partition(":")[0] not in SETS


def _describe_data(experiment: Experiment, federation: Federation) -> dict[str, Any]:
    """What data.py shows: options of :func:`fedgrove.data.load` and names, written as code."""
    options: dict[str, Any] = {}
    for name in DATA_NAMES:
        value = getattr(experiment, name)
        if name != "data" and value != options_of(Experiment)[name].default:
            options[name] = value
    options["seed"] = experiment.seed
    is_own = _is_own(experiment)
    if is_own:
        options.setdefault("partition", federation.partition)
    else:
        # Everybody deals the same set to as many clients, and takes its own part.
        options["clients"] = len(federation.clients)
    return {
        "is_own": is_own,
        "data": _as_code(experiment.data),
        "place": _as_code(str(Path(experiment.data).resolve())),
        "labels": list(map(_as_code, federation.labels)),
        "options": {name: _as_code(value) for name, value in options.items()},
    }


def _as_code(value: Any) -> str:
    """A value as code; a text in double quotes where they do."""
    plain = repr(value)
    # repr escapes what must be escaped; only a text without any of that may change its quotes.
    if plain == f"'{value}'" and '"' not in plain:
        return f'"{value}"'
    return plain
