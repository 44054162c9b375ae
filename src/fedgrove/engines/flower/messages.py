"""Letters as Flower's messages, and back; with :mod:`.simulation` all that imports flwr.

A task is a message of type "train" and a question one of type "query". The content of either, and
of a reply, is::

    "fedgrove"   ArrayRecord: "0000.head", then each packet, "0001.model", ...: one Array of our own
                 bytes each (stype: the codec's name). Objects are stored by their contents, so a
                 packet that many clients are sent is stored once.
    "note"       ConfigRecord: the name of the run; in a reply, why there is none.

flwr is imported when it is needed, and never sends anything to its makers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

from ...errors import InputError, WireError
from .letter import Letter, Note

TASK = "train"
QUESTION = "query"
HEAD = "0000.head"

Head = dict[str, Any]
"""A question, or its answer: what JSON can hold."""


def check_installed(*packages: str) -> None:
    """Refuse to go on without Flower, or without a package that a part of it needs."""
    for package in ("flwr", *packages):
        if find_spec(package) is None:
            raise InputError(
                f"Flower is needed for this, and {package} is not installed; get it with: "
                "pip install 'fedgrove[flower]'"
            )
    # Read when flwr is imported: training must not send anything anywhere.
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")


# ---- letters -------------------------------------------------------------------------------------


def content_of(letter: Letter) -> Any:
    """A letter as the content of a Flower message."""
    from flwr import app

    arrays: dict[str, Any] = {}
    if letter.head:
        arrays[HEAD] = _array(letter.head, letter.codec)
    for number, (name, blob) in enumerate(letter.packets.items(), start=1):
        arrays[f"{number:04d}.{name}"] = _array(blob, letter.codec)
    record: Any = app.ArrayRecord(arrays)
    note: Any = app.ConfigRecord(dict(letter.note))
    return app.RecordDict({"fedgrove": record, "note": note})


def _array(data: bytes, codec: str) -> Any:
    from flwr import app

    return app.Array(dtype="bytes", shape=(len(data),), stype=codec, data=data)


def letter_of(content: Any) -> Letter:
    """The letter in the content of a message, which may come from anybody."""
    try:
        record = content.array_records["fedgrove"]
        note = {str(key): value for key, value in content.config_records["note"].items()}
        head = b""
        packets: dict[str, bytes] = {}
        codecs = set()
        # The numbers in front are the order, whatever order a record keeps.
        for key in sorted(record):
            data = bytes(record[key].data)
            codecs.add(str(record[key].stype))
            if key == HEAD:
                head = data
            else:
                packets[key.partition(".")[2]] = data
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise WireError(f"a message is not one of fedgrove's: it lacks {error}.") from None
    if len(codecs) > 1:
        raise WireError("the parts of a message name several codecs; they must name one.")
    return Letter(head, packets, codecs.pop() if codecs else "", note)


def task_message(letter: Letter, node: int, seconds: float | None) -> Any:
    """A letter to a node; with ``seconds`` Flower forgets it then."""
    from flwr import app

    message: Any = app.Message
    return message(content_of(letter), node, TASK, ttl=seconds)


def reply_to(message: Any, letter: Letter) -> Any:
    """A letter as the answer to a message."""
    from flwr import app

    reply: Any = app.Message
    return reply(content_of(letter), reply_to=message)


# ---- questions -----------------------------------------------------------------------------------


def question_message(head: Head, node: int, seconds: float | None) -> Any:
    """A question to a node, in JSON."""
    from flwr import app

    message: Any = app.Message
    letter = Letter(json.dumps(head).encode(), codec="json")
    return message(content_of(letter), node, QUESTION, ttl=seconds)


def head_of(message: Any) -> Head:
    """The question, or the answer to one, in a message."""
    try:
        head = json.loads(letter_of(message.content).head)
    except (ValueError, RecursionError) as error:
        raise WireError(f"a message holds no question and no answer: {error}.") from None
    if not isinstance(head, dict):
        raise WireError("a question, or its answer, must be a JSON object.")
    return head


# ---- a node's app --------------------------------------------------------------------------------

Asked = Callable[[Head, Mapping[str, Any]], Head]
"""Answers a question; it is given the node's own configuration."""
Tasked = Callable[[Letter, Mapping[str, Any]], Letter]
"""Does a task."""


def client_app(asked: Asked, tasked: Tasked) -> Any:
    """A ClientApp that answers questions and does tasks. What it is given must not raise."""
    check_installed()
    from functools import partial

    from flwr.clientapp import ClientApp

    client: Any = ClientApp()
    client.query()(partial(_on_question, asked))
    client.train()(partial(_on_task, tasked))
    return client


def server_app(main: Callable[[Any, Any], None]) -> Any:
    """A ServerApp that does ``main(grid, context)``."""
    check_installed()
    from flwr.serverapp import ServerApp

    server: Any = ServerApp()
    server.main()(main)
    return server


def _on_question(asked: Asked, message: Any, context: Any) -> Any:
    try:
        answer = asked(head_of(message), context.node_config)
    except WireError as error:
        answer = {"refused": str(error)}
    return reply_to(message, Letter(json.dumps(answer).encode(), codec="json"))


def _on_task(tasked: Tasked, message: Any, context: Any) -> Any:
    try:
        letter = tasked(letter_of(message.content), context.node_config)
    except WireError as error:
        letter = lost_letter("unreadable", str(error))
    return reply_to(message, letter)


def lost_letter(reason: str, sentence: str) -> Letter:
    """The answer of a client that has no report, and says why."""
    note: Note = {"lost": reason, "detail": sentence}
    return Letter(note=note)


def partition_of(node_config: Mapping[str, Any]) -> int:
    """Which client a node is, from the configuration that it was started with."""
    given = node_config.get("partition-id")
    if type(given) is not int or given < 0:
        raise InputError(
            f"this node's partition-id is {given!r}; it must be the number of its client, 0 or "
            'more: start it with --node-config "partition-id=0".'
        )
    return given
