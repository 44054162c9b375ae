"""A node: enrols, builds its side of a run from the server's config and its own data, does tasks.

What a node needs after a restart is in its folder, ``HOME/client-00003/RUN``: the run's
config.toml, the client's memory, and the masks that it knows. The personal model never leaves that
folder.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import chdir
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..config.experiment import Experiment
from ..config.toml import check_files, from_toml, named_code, read_run_table, to_toml
from ..data import ClientData, Federation
from ..engines.flower import messages
from ..engines.flower import node as worker
from ..engines.flower.messages import Head, Letter, make_loss, read_partition
from ..engines.work import explain_error
from ..errors import FedgroveError, InputError
from ..problems import CLASSES
from ..runs.files import write_bytes
from ..runs.memory import Memory
from ..runs.run import Run
from . import enrolment
from .enrolment import LOG, show_log

OwnData = Callable[[int, Mapping[str, Any]], Federation]
"""Returns a node's data; gets its partition and its configuration."""


def client_app(
    data: OwnData, *, home: str | Path | None = None, code: str | Path | None = None
) -> Any:
    """Make a Flower ClientApp for every node of a run.

    Args:
        data: Returns a federation with the node's client: under its number, or as its only client.
        home: The folder for the client's memory. By default the node's configuration names it
            (``--node-config "home='/var/lib/fedgrove'"``), or FEDGROVE_HOME, or it is
            ``~/.fedgrove``.
        code: The folder with the files of your own method or net; by default the current folder.
    """
    show_log()
    node = Node(data, None if home is None else str(home), None if code is None else str(code))
    return messages.client_app(node.answer_question, node.do_task)


@dataclass(frozen=True)
class Node:
    """The node's side of all exchanges; no message makes it raise."""

    data: OwnData
    home: str | None = None
    code: str | None = None

    def answer_question(self, question: Head, node_config: Mapping[str, Any]) -> Head:
        """Answer a question of the server: who this node is, or whether it joins a run."""
        try:
            return self._answer(question, node_config)
        except FedgroveError as error:
            sentence = str(error)
        except Exception as error:
            sentence = f"the node could not answer: {explain_error(error)}"
        LOG.error("refused: %s", sentence)
        # The server names the client in its own sentence.
        return {"refused": sentence, "partition": node_config.get("partition-id")}

    def _answer(self, question: Head, node_config: Mapping[str, Any]) -> Head:
        """Answer a question of the deployed run's server."""
        asked = question.get("ask")
        if asked == "refused":
            # The server's sentence, for whoever looks at this node's log.
            LOG.error("the server refused this node: %s", question.get("why"))
            return {}
        enrolment.check_version(question.get("version"), "the server")
        partition = read_partition(node_config)
        if asked == "who":
            federation = own_federation(self.data, partition, node_config)
            return enrolment.describe_client(federation, partition) | {"time": time.time()}
        if asked == "join":
            return self._join(str(question.get("config")), partition, node_config)
        raise InputError(f"the server requests {asked!r}, which this version does not know.")

    def _join(self, config: str, partition: int, node_config: Mapping[str, Any]) -> Head:
        """Build this side of a run, and store its config for a restart of the node."""
        folder = self._folder(enrolment.name_run(config), partition, node_config)
        run = self._run(config, folder, partition, node_config)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"the node's folder {folder} cannot be made: {error.strerror or error}; set a "
                "different folder with FEDGROVE_HOME."
            ) from None
        write_bytes(folder / "config.toml", config.encode(), sync=True)
        LOG.info("client %d takes part in run %s", partition, folder.name)
        return enrolment.describe_built_run(
            run, to_toml(_experiment(config, run.federation, self.code))
        )

    def do_task(self, letter: Letter, node_config: Mapping[str, Any]) -> Letter:
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
        return answer

    def _folder(self, name: str, partition: int, node_config: Mapping[str, Any]) -> Path:
        """Return the folder in which a node keeps its files of a run."""
        # The name comes from the server: a slash or dots could lead out of the folder.
        if not name.isalnum():
            raise InputError(f"{name!r} is not the name of a run.")
        given = node_config.get("home", self.home) or os.environ.get("FEDGROVE_HOME")
        home = Path(str(given)) if given else Path.home() / ".fedgrove"
        return home / f"client-{partition:05d}" / name

    def _run(
        self, config: str, folder: Path, partition: int, node_config: Mapping[str, Any]
    ) -> Run:
        """Return a node's side of the run, built once per process."""
        return _build_run(self, config, folder, partition, tuple(sorted(node_config.items())))


# Cached, so that a process that does many tasks builds the run once.
@lru_cache(maxsize=4)
def _build_run(
    node: Node, config: str, folder: Path, partition: int, node_config: tuple[tuple[str, Any], ...]
) -> Run:
    # The data are read anew only when a run is built, not for each task.
    federation = own_federation(node.data, partition, dict(node_config))
    experiment = _experiment(config, federation, node.code)
    with chdir(node.code or "."):
        # The user's own net is a file in that folder too.
        return experiment.build(federation, Memory(folder), client_only=True)


def _experiment(config: str, federation: Federation, code: str | None) -> Experiment:
    """Read the experiment in a config; the user's files are in the folder ``code``."""
    with chdir(code or "."):
        _check_inside(config)
        check_files(config)
        return from_toml(config, data=federation)


def _check_inside(config: str) -> None:
    """Refuse code and weights outside the folder of the app's code.

    The config comes from the server, which may name only files that were installed with the app.
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
    """Return the node's data as a federation with only its client.

    Raises:
        InputError: The data cannot be read, are not a federation, or do not have this client.
    """
    try:
        federation = data(partition, node_config)
    except Exception as error:
        # The reason may name files of this machine, so it stays here.
        LOG.error("own_data: %s", explain_error(error))
        raise InputError(
            f"client {partition} cannot read its data ({type(error).__name__}); the log of its "
            "node gives the reason."
        ) from error
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
            f"{len(federation.clients) - 1}; give it data with that client, or with only one "
            "client."
        )
    if not len(client.train):
        raise InputError(f"client {partition} has no training examples; it cannot take part.")
    # Everything that belongs to other clients is dropped.
    return replace(federation, clients={partition: client}, later={}, trace=None, files={})


# ---- one numbering of classes on all nodes -------------------------------------------------------


def with_labels(federation: Federation, labels: Sequence[str]) -> Federation:
    """Return a node's data with classes numbered by their position in the server's ``labels``.

    Each node numbers the classes in its own files, so that "walk" may be 0 on one node and 2 on
    another. Data whose targets are not classes must have these labels already.

    >>> from fedgrove import data
    >>> own = data.from_arrays([[0.0], [1.0]] * 8, ["sit", "walk"] * 8, [0] * 16)
    >>> with_labels(own, ["run", "sit", "walk"]).client(0).train.y.unique().tolist()
    [1, 2]
    """
    known = tuple(map(str, labels))
    if federation.labels == known:
        return federation
    others = [label for label in federation.labels if label not in known]
    if federation.problem != CLASSES or others:
        named = ", ".join(others or federation.labels)
        raise InputError(
            f"this node's data have the labels {named}, and the app knows {', '.join(known)}; "
            "leave the examples out, or write the app again with data that have them all."
        )
    number = torch.tensor([known.index(label) for label in federation.labels])
    preparation = replace(federation.preparation, labels=known)
    clients = {k: _renumber(client, number, known) for k, client in federation.clients.items()}
    return replace(
        federation, clients=clients, classes=len(known), labels=known, preparation=preparation
    )


def _renumber(client: ClientData, number: Tensor, labels: tuple[str, ...]) -> ClientData:
    own = None if client.labels is None else tuple(int(number[label]) for label in client.labels)
    preparation = client.preparation
    if preparation is not None:
        preparation = replace(preparation, labels=labels)
    # The labels first, which are checked against the targets.
    client = replace(client, labels=None, preparation=preparation)
    return replace(client.map_parts(lambda part: replace(part, y=number[part.y])), labels=own)
