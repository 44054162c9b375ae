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
from .enrolment import TIMES_USUAL, describe_client
from .server import GRACE, TIMEOUT

PACKAGE = "fedgrove_app"
CODE = "code"
"""The folder of the user's own files, in the package."""
WAIT = 600
"""Seconds that the app's server waits for its nodes."""
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
    words = {
        "out": out,
        "clients": clients,
        # More than half: fewer would let a minority of the nodes decide what is usual.
        "quorum": clients // 2 + 1,
        "grace": round(GRACE),
        "wait": WAIT,
        "timeout": timeout or TIMEOUT,
        "most_examples": TIMES_USUAL,
        "keys": "",
    }
    code = "HERE"
    if own_files:
        code = f'HERE / "{CODE}"'
    texts = {
        "pyproject.toml": _pyproject(f"{name}-app", words),
        "README.md": _readme(name, clients, out, _is_own(experiment)),
        f"{PACKAGE}/__init__.py": f'"""{name} on Flower, written by fedgrove {__version__}."""\n',
        f"{PACKAGE}/data.py": _data_file(experiment, federation),
        f"{PACKAGE}/server.py": _SERVER.format(code=code),
        f"{PACKAGE}/client.py": _CLIENT.format(package=PACKAGE, code=code),
    }
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
        home = path / PACKAGE
        if own_files:
            home = home / CODE
        config = _config(planned, home)
        (path / PACKAGE / "config.toml").write_text(config)
    except OSError as error:
        raise InputError(
            f"{error.filename or path} cannot be written: {error.strerror or error}."
        ) from None
    carried = tuple(f"{PACKAGE}/{CODE}/{file}" for file in own_files)
    return App(path, clients, out, (*texts, f"{PACKAGE}/config.toml", *carried))


def _check_free(path: Path) -> None:
    if path.is_file() or (path.is_dir() and any(path.iterdir())):
        raise InputError(
            f"{path} is there and not empty; an app is only written into a folder that is empty or "
            "not there yet."
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


def _data_file(experiment: Experiment, federation: Federation) -> str:
    words: dict[str, Any] = {}
    for word in DATA_NAMES:
        value = getattr(experiment, word)
        if word != "data" and value != options_of(Experiment)[word].default:
            words[word] = value
    words["seed"] = experiment.seed
    if not _is_own(experiment):
        # Everybody deals the same set to as many clients, and takes its own part.
        words["clients"] = len(federation.clients)
        return _NAMED.format(name=experiment.data, words=_listed(words))
    words.setdefault("partition", federation.partition)
    return _OWN.format(
        place=str(Path(str(experiment.data)).resolve()),
        words=_listed(words),
        labels=", ".join(f"{_quoted(label)}" for label in federation.labels),
    )


def _listed(words: dict[str, Any]) -> str:
    lines = []
    for word, value in words.items():
        if isinstance(value, str):
            text = _quoted(value)
        else:
            text = repr(value)
        lines.append(f"        {word}={text},\n")
    return "".join(lines)


def _quoted(text: str) -> str:
    """A text as code, in double quotes where they do."""
    plain = repr(text)
    # repr escapes what must be escaped; only a text without any of that may change its quotes.
    if plain == f"'{text}'" and '"' not in text:
        return f'"{text}"'
    return plain


_NAMED = '''"""Where a node's own data come from. This is the file to change."""

from fedgrove import data


def own_data(partition, node_config):
    """The data of client number `partition`, from its own files: a fedgrove.data.Federation.

    As it is written here, every node deals out the same data set and takes its own part, which is
    good for a try. Data of your own: data.load("/folder/on/this/node", label=...), or
    data.from_arrays(x, y). `node_config` is what the node was started with (--node-config).
    """
    return data.load(
        "{name}",
{words}        data_dir=node_config.get("data-dir"),
    )
'''

_OWN = '''"""Where a node's own data come from. This is the file to change."""

from fedgrove import data, deploy

PLACE = "{place}"
LABELS = [{labels}]


def own_data(partition, node_config):
    """The data of client number `partition`, from its own files: a fedgrove.data.Federation.

    A node that has files of its own, and no other's, is started with the path of their folder:
    --node-config "partition-id=0 data='/folder/on/this/node'". A folder with the files of all
    clients will do for a try: each node takes the client with its number, in the order of names.
    """
    found = data.load(
        node_config.get("data", PLACE),
{words}    )
    # On all nodes the same class must have the same number, also where a node never saw it.
    return deploy.with_labels(found, LABELS)
'''

_SERVER = '''"""The server's half: it has no data."""

import os
from pathlib import Path

from fedgrove import deploy

HERE = Path(__file__).parent
# Run folders are for the user of the server only.
os.umask(0o077)

app = deploy.server_app(HERE / "config.toml", code={code})
'''

_CLIENT = '''"""A node's half."""

import os
from pathlib import Path

from fedgrove import deploy

from {package}.data import own_data

HERE = Path(__file__).parent
# Personal models are for the user of this node only.
os.umask(0o077)

app = deploy.client_app(own_data, code={code})
'''


def _pyproject(name: str, words: dict[str, Any]) -> str:
    document = {
        "build-system": {"requires": ["hatchling"], "build-backend": "hatchling.build"},
        "project": {
            "name": name,
            "version": "1.0.0",
            "description": f"Written by fedgrove {__version__}.",
            "dependencies": [f"fedgrove[flower]=={__version__}"],
        },
        "tool": {
            "hatch": {"build": {"targets": {"wheel": {"packages": [PACKAGE]}}}},
            "flwr": {
                "app": {
                    "publisher": "fedgrove",
                    "components": {
                        "serverapp": f"{PACKAGE}.server:app",
                        "clientapp": f"{PACKAGE}.client:app",
                    },
                    "config": words,
                }
            },
        },
    }
    return tomli_w.dumps(document)


def _readme(name: str, clients: int, out: str, is_own: bool) -> str:
    return _README.format(name=name, clients=clients, out=out, own=_ELSEWHERE if is_own else "")


_ELSEWHERE = """
It reads the files that the app was written with. A node that has files of its own is told where:
`--node-config "partition-id=0 data='/folder/on/this/node'"`.
"""

_README = """# {name} on Flower

An app for {clients} clients. Every machine has fedgrove and Flower, the same version everywhere
(`pip install 'path/to/fedgrove[flower]'`, where path/to/fedgrove is a clone). The app itself goes
to the server with `flwr run`, and from there to the nodes.

- `fedgrove_app/data.py`: where a node's own data come from. **This is the file to change.**
- `fedgrove_app/config.toml`: method, network, rounds, settings.
- `pyproject.toml`, under `[tool.flwr.app.config]`: `out` (the run folder, on the server), `clients`
  (how many there are), `quorum` (this many are enough to start, after `grace` seconds), `wait`
  (seconds after which a run without a quorum ends), `timeout` (seconds after which a client that
  has not answered is lost; longer than a slow device trains), `most_examples` (a client that
  reports more than this many times the median is refused), `keys` (the folder of `fedgrove keys` on
  the server: each node may then be the clients of its key only).

## A try on this machine, without TLS

In one terminal, the server:

```sh
umask 077
flower-superlink --insecure --disable-runtime-dependency-installation --database superlink.db
```

In another, for each client a node with its number and a port of its own (9100, 9101, ...):

```sh
flower-supernode --insecure --superlink 127.0.0.1:8000 --port 9100 --node-config "partition-id=0"
```
{own}
In a third, once: tell `flwr` where the server is, in `~/.flwr/config.toml`:

```toml
[superlink.try]
address = "127.0.0.1:8000"
insecure = true
```

Then, in this folder:

```sh
flwr run . try --stream
```

The run folder is `{out}`, where the server was started; `fedgrove compare {out}` shows it.
To go on after the server was stopped, type the last command again. For another run:

```sh
flwr run . try --stream --run-config "out='{out}-2'"
```

## On real machines

With TLS and a key for each node, so that nobody reads along and nobody else joins:

```sh
fedgrove keys keys --nodes {clients} --host fl.example.org
```

It prints the commands. More: docs/deploy.md of fedgrove.
"""
