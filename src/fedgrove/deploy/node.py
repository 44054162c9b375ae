"""A node: it enrols, builds its half of a run from the server's config and its own data, and works.

What it must still know after it was started again is in its folder, ``HOME/client-00003/RUN``: the
run's config.toml, what its client remembers, and the masks that it holds. Its personal model never
leaves that folder.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import chdir
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..config.experiment import Experiment
from ..config.toml import check_files, from_toml, named_code, read_run_table, to_toml
from ..data import Federation
from ..engines.flower import messages
from ..engines.flower import node as worker
from ..engines.flower.messages import Head, Letter, make_loss, read_partition
from ..engines.work import explain_error
from ..errors import FedgroveError, InputError
from ..runs.files import write_bytes
from ..runs.memory import Memory
from ..runs.run import Run
from . import facts
from .log import LOG, show

OwnData = Callable[[int, Mapping[str, Any]], Federation]
"""Where a node's data come from: given its partition and its configuration."""


def client_app(
    data: OwnData, *, home: str | Path | None = None, code: str | Path | None = None
) -> Any:
    """A Flower ClientApp for every node of a run.

    data: gives a federation that holds the node's own client, with its number or alone.
    home: where the node keeps what its client remembers; else the node's configuration says so
        (``--node-config "home='/var/lib/fedgrove'"``), or FEDGROVE_HOME, or ``~/.fedgrove``.
    code: the folder in which the files of a method or net of your own lie; else the current one.
    """
    show()
    half = Half(data, None if home is None else str(home), None if code is None else str(code))
    return messages.client_app(half.asked, half.tasked)


@dataclass(frozen=True)
class Half:
    """The node's side of all exchanges; nothing that it is sent makes it raise."""

    data: OwnData
    home: str | None = None
    code: str | None = None

    def asked(self, question: Head, node_config: Mapping[str, Any]) -> Head:
        """Answer a question of the server's: who it is, and whether it takes part in a run."""
        try:
            return self._answer(question, node_config)
        except FedgroveError as error:
            sentence = str(error)
        except Exception as error:
            sentence = f"the node could not answer: {explain_error(error)}"
        LOG.error("refused: %s", sentence)
        return {"refused": sentence}

    def _answer(self, question: Head, node_config: Mapping[str, Any]) -> Head:
        asked = question.get("ask")
        if asked == "refused":
            # The server's sentence, for whoever looks at this node's log.
            LOG.error("the server refused this node: %s", question.get("why"))
            return {}
        facts.check_version(question.get("version"), "the server")
        partition = read_partition(node_config)
        if asked == "who":
            return facts.facts_of(own_federation(self.data, partition, node_config), partition)
        if asked == "join":
            return self._join(str(question.get("config")), partition, node_config)
        raise InputError(f"the server asks {asked!r}, which this version does not know.")

    def _join(self, config: str, partition: int, node_config: Mapping[str, Any]) -> Head:
        """Build this half of a run, and keep its config for when the node is started again."""
        folder = self._folder(facts.name_of(config), partition, node_config)
        run = self._run(config, folder, partition, node_config)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"the node's folder {folder} cannot be made: {error.strerror or error}; name "
                "another one by FEDGROVE_HOME."
            ) from None
        write_bytes(folder / "config.toml", config.encode(), sync=True)
        LOG.info("client %d takes part in run %s", partition, folder.name)
        return facts.half_of(run, to_toml(_experiment(config, run.federation, self.code)))

    def tasked(self, letter: Letter, node_config: Mapping[str, Any]) -> Letter:
        """Do a task of a run that this node has joined."""
        try:
            client = read_partition(node_config)
            folder = self._folder(str(letter.note.get("run")), client, node_config)
            path = folder / "config.toml"
            if not path.is_file():
                # The server then asks it to join, before the next exchange.
                sentence = f"client {client} has not joined this run, or has lost its folder."
                return make_loss("unsent", sentence)
            run = self._run(path.read_text(), folder, client, node_config)
        except Exception as error:
            sentence = explain_error(error)
            LOG.error("lost: %s", sentence)
            return make_loss("crashed", sentence)
        answer = worker.answer_letter(run, client, letter)
        if "lost" in answer.note:
            LOG.error("lost: %s", answer.note.get("detail"))
        worker.forget_old_versions(run, client)
        return answer

    def _folder(self, name: str, partition: int, node_config: Mapping[str, Any]) -> Path:
        if not name.isalnum():
            raise InputError(f"{name!r} is no name of a run.")
        given = node_config.get("home", self.home) or os.environ.get("FEDGROVE_HOME")
        home = Path(str(given)) if given else Path.home() / ".fedgrove"
        return home / f"client-{partition:05d}" / name

    def _run(
        self, config: str, folder: Path, partition: int, node_config: Mapping[str, Any]
    ) -> Run:
        return _built(self, config, folder, partition, tuple(sorted(node_config.items())))


# A process that does one task after another builds its half once.
@lru_cache(maxsize=4)
def _built(
    half: Half, config: str, folder: Path, partition: int, node_config: tuple[tuple[str, Any], ...]
) -> Run:
    federation = own_federation(half.data, partition, dict(node_config))
    experiment = _experiment(config, federation, half.code)
    with chdir(half.code or "."):
        # A net of the user's own is a file there too.
        return experiment.build(federation, Memory(folder), client_only=True)


def _experiment(config: str, federation: Federation, code: str | None) -> Experiment:
    """The experiment of a config, with files of the user's looked up in the folder of the code."""
    with chdir(code or "."):
        _check_inside(config)
        check_files(config)
        return from_toml(config, data=federation)


def _check_inside(config: str) -> None:
    """Refuse to run code, or to read weights, from anywhere but the folder of the app's code.

    The config comes from the server: it may name what was brought here, and no other file.
    """
    named = dict(named_code(config))
    init = read_run_table(config).get("init")
    if init is not None:
        named["init"] = str(init)
    for word, spec in named.items():
        # What stands behind a colon, as in x.py:Net, is part of the last name and does no harm.
        if not Path(spec).resolve().is_relative_to(Path.cwd().resolve()):
            raise InputError(
                f'the server\'s config has {word} = "{spec}", which is not in the folder of the '
                f"app's code, {Path.cwd()}; put the file there, and name it by its path within."
            )


def own_federation(data: OwnData, partition: int, node_config: Mapping[str, Any]) -> Federation:
    """The node's own data as a federation of its client alone."""
    federation = data(partition, node_config)
    if not isinstance(federation, Federation):
        raise InputError(
            f"the node's data are a {type(federation).__name__}; they must be a "
            "fedgrove.data.Federation, as fedgrove.data.from_arrays makes one."
        )
    if partition in federation.clients:
        client = federation.client(partition)
    elif len(federation.clients) == 1:
        client = next(iter(federation.clients.values()))
    else:
        raise InputError(
            f"this node is client {partition}, and its data have clients 0 to "
            f"{len(federation.clients) - 1}; give it data with that client, or with one alone."
        )
    if not len(client.train):
        raise InputError(f"client {partition} has no training examples; it cannot take part.")
    return replace(federation, clients={partition: client}, later={}, trace=None, files={})
