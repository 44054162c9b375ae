"""Tasks, reports and questions as Flower's messages. Only this module and :mod:`.simulation` import
flwr.

A task is a message of type "train", and a question is a message of type "query". Both, and their
replies, have this content::

    "fedgrove"   ArrayRecord: "0000.head", then each packet, "0001.model", ...: one Array of
                 bytes each (stype: the codec's name). Flower stores equal objects once, so a packet
                 that goes to many clients is stored once.
    "note"       ConfigRecord: the name of the run and a nonce; in a reply, which task it answers,
                 or why there is no report. With a salt (:func:`make_salt`), which then begins
                 every array.

flwr is imported when it is needed, with its telemetry off.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

from ...errors import FedgroveError, InputError, UnexpectedReport, WireError
from ...wire.codec import Chain, Codec, CostByPart

TASK = "train"
QUESTION = "query"
HEAD = "0000.head"
SALT = "salt"
"""The entry of a note with the random bytes that begin every array (:func:`make_salt`)."""
SALT_BYTES = 8

MAX_QUESTION = 1 << 20
"""The longest question or answer to one that is read, in bytes."""
MAX_COST = 1 << 12
MOST_PARTS = 32
LONGEST_PART = 40
"""How long a client's list of bytes by part may be, how many parts it may have, and how long their
names may be: they reach the outputs of the run."""

Head = dict[str, Any]
"""A question or its answer, as a JSON object."""


def check_installed(*packages: str) -> None:
    """Refuse to continue without Flower, or without other packages that it needs.

    Raises:
        InputError: A package is not installed.
    """
    for package in ("flwr", *packages):
        if find_spec(package) is None:
            raise InputError(
                f"this needs Flower, and {package} is not installed; install it with: "
                "pip install 'fedgrove[flower]'"
            )
    # Read when flwr is imported: training must not send data about its use.
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")


# ---- letters -------------------------------------------------------------------------------------

Note = Mapping[str, str | int]
"""What is sent with a message but is not part of it: the run's name, why a task was lost."""


@dataclass(frozen=True)
class Letter:
    """A message of :mod:`fedgrove.wire.message` in parts, and a note.

    Head and packets, joined, are the message. They are sent separately, so that a packet that goes
    to many clients is stored once.
    """

    head: bytes = b""
    packets: Mapping[str, bytes] = field(default_factory=dict)
    codec: str = ""
    note: Note = field(default_factory=dict)

    @property
    def data(self) -> bytes:
        """The whole message of a letter that Flower carries."""
        return b"".join([self.head, *self.packets.values()])

    @property
    def task_id(self) -> str:
        """What the answer to a task's letter names: a hash of its run, its nonce and its head.

        The head has client, verb, round and attempt. The nonce differs for every letter, so that
        an old answer is recognised, even one to the same task of an earlier run.
        """
        note = f"{self.note.get('run', '')}\0{self.note.get('nonce', '')}\0"
        return blake2b(note.encode() + self.head, digest_size=16).hexdigest()

    @property
    def length(self) -> int:
        """The number of bytes of a letter's message that Flower carries, without the note."""
        return len(self.head) + sum(len(blob) for blob in self.packets.values())


def name_codec(codec: Codec) -> str:
    """Return the name of a codec in a Flower note: its class with its settings.

    The name of a chain has the names of its parts.

    >>> from fedgrove.wire.codec import Bitmap, Entropy
    >>> name_codec(Bitmap() >> Entropy())
    'Bitmap() >> Entropy(slack=0.015)'
    """
    if isinstance(codec, Chain):
        return f"{name_codec(codec.first)} >> {name_codec(codec.then)}"
    return repr(codec)


def write_cost(cost: CostByPart) -> str:
    """Return the bytes of a report by part as text, for the note of a Flower message."""
    return json.dumps(dict(cost))


def read_cost(letter: Letter) -> CostByPart:
    """Return the bytes of a report by part, from the note of a Flower message.

    A client may lie about the parts, but not about the sum: if the sum or a name is wrong, the
    parts are only head and values.
    """
    head = len(letter.head)
    otherwise = {"header": head, "values": letter.length - head}
    try:
        text = str(letter.note["cost"])
        if len(text) > MAX_COST:
            return otherwise
        claimed = json.loads(text)
        are_counts = all(type(n) is int and n >= 0 for n in claimed.values())
        are_names = len(claimed) <= MOST_PARTS and all(map(_is_part, claimed))
        if not are_counts or not are_names or sum(claimed.values()) != letter.length:
            return otherwise
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        return otherwise
    return dict(claimed)


def _is_part(name: str) -> bool:
    return 0 < len(name) <= LONGEST_PART and name.isascii() and name.isprintable()


def make_content(letter: Letter, salt: bytes = b"") -> Any:
    """Return a letter as the content of a Flower message.

    Args:
        letter: The letter.
        salt: Random bytes, so that nobody can predict a part of the message.
    """
    from flwr import app

    arrays: dict[str, Any] = {}
    if letter.head:
        arrays[HEAD] = _array(salt + letter.head, letter.codec)
    for number, (name, blob) in enumerate(letter.packets.items(), start=1):
        arrays[f"{number:04d}.{name}"] = _array(salt + blob, letter.codec)
    record: Any = app.ArrayRecord(arrays)
    note: Any = dict(letter.note)
    if salt:
        note[SALT] = salt.hex()
    config: Any = app.ConfigRecord(note)
    return app.RecordDict({"fedgrove": record, "note": config})


def _array(data: bytes, codec: str) -> Any:
    from flwr import app

    return app.Array(dtype="bytes", shape=(len(data),), stype=codec, data=data)


def read_letter(content: Any, longest: int | None = None) -> Letter:
    """Read the letter in the content of a message, which may come from any sender.

    Args:
        content: The content of a Flower message.
        longest: The most bytes that it may have; None: any number, from a trusted sender.

    Raises:
        WireError: The content is not a letter.
        UnexpectedReport: It is too long.
    """
    try:
        record = content.array_records["fedgrove"]
        # Before anything is copied.
        length = sum(len(array.data) for array in record.values())
        if longest is not None and length > longest:
            sentence = f"{length} bytes; an answer has at most {longest}."
            raise UnexpectedReport("packets", sentence)
        note = {str(key): value for key, value in content.config_records["note"].items()}
        head = b""
        packets: dict[str, bytes] = {}
        codecs = set()
        salted = len(bytes.fromhex(str(note.pop(SALT, ""))))
        # The numbers in front give the order; a record may keep another one.
        for key in sorted(record):
            data = bytes(record[key].data)[salted:]
            codecs.add(str(record[key].stype))
            if key == HEAD:
                head = data
            else:
                packets[key.partition(".")[2]] = data
    except WireError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise WireError(f"a message was not made by fedgrove: it lacks {error}.") from None
    if len(codecs) > 1:
        raise WireError("the parts of a message name several codecs; they must name only one.")
    return Letter(head, packets, codecs.pop() if codecs else "", note)


def make_salt() -> bytes:
    """Return random bytes that make the parts of a Flower message unpredictable.

    A SuperLink stores objects under their hashes, and a node may announce any hash with contents of
    its own choice. If it announces a part of a message before the sender does, the SuperLink
    refuses the message. It cannot announce what it cannot predict.
    """
    return secrets.token_bytes(SALT_BYTES)


def make_task_message(letter: Letter, node: int, seconds: float | None, salt: bytes = b"") -> Any:
    """Make a Flower message to a node; Flower drops it after ``seconds``, if given."""
    from flwr import app

    message: Any = app.Message
    return message(make_content(letter, salt), node, TASK, ttl=seconds)


def make_reply(message: Any, letter: Letter) -> Any:
    """Make the reply to a Flower message, with a salt."""
    from flwr import app

    reply: Any = app.Message
    return reply(make_content(letter, make_salt()), reply_to=message)


# ---- replies -------------------------------------------------------------------------------------

MORE_BYTES = 1 << 20
"""Bytes that a reply may take besides its arrays: Flower's headers and the note."""
MOST_OBJECTS = 1 << 12
"""The most objects that a reply may be made of: Flower makes three of each array, and one for every
5 MiB of a large one."""


@dataclass(frozen=True)
class ClaimedReply:
    """A reply that has arrived at the SuperLink and was not read yet.

    Args:
        answers: The number of the message that it answers.
        fetch: Reads it; gets the most bytes of its arrays (None: any number), a function that
            tells whether it is too late to wait for the rest of it, and the threads that transfer
            its pieces.
    """

    answers: str
    fetch: Callable[[int | None, Callable[[], bool], Executor], Any]


def has_superlink(grid: Any) -> bool:
    """Whether a Flower Grid is that of a SuperLink; that of a simulation is in this process."""
    return hasattr(grid, "_runtime_client")


def claim_replies(grid: Any, numbers: Collection[str]) -> list[ClaimedReply]:
    """Ask a SuperLink which replies have arrived, and read none of them.

    Flower gives a reply to the first who asks for it.

    Args:
        grid: Flower's Grid of a SuperLink.
        numbers: The messages whose replies are wanted.
    """
    from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PullAppMessagesResponse

    client = grid._runtime_client
    found = client.PullMessages(PullAppMessagesRequest(message_ids=sorted(numbers)))
    claimed = []
    for message, tree in zip(found.messages_list, found.message_object_trees, strict=True):
        one = PullAppMessagesResponse(messages_list=[message], message_object_trees=[tree])
        answers = message.metadata.reply_to_message_id
        claimed.append(ClaimedReply(answers, partial(_fetch, grid, client, one)))
    return claimed


def _fetch(
    grid: Any,
    client: Any,
    claimed: Any,
    longest: int | None,
    is_over: Callable[[], bool],
    transfers: Executor,
) -> Any:
    """Read a reply that was claimed from a SuperLink."""
    from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest

    (message,) = claimed.messages_list
    number = message.metadata.message_id
    limited = _LimitedClient(client, claimed, longest, is_over, transfers)
    # What Flower's own function uses of the Grid.
    view = SimpleNamespace(_run=grid._run, node=grid.node, _runtime_client=limited)
    try:
        _check_objects(claimed.message_object_trees[0])
        (reply,) = type(grid).pull_messages(view, [number])
    except Exception:
        # The SuperLink keeps what was not confirmed until the end of the run.
        with suppress(Exception):
            client.ConfirmMessageReceived(
                ConfirmMessageReceivedRequest(
                    node=grid.node, run_id=grid._run.run_id, message_object_id=number
                )
            )
        raise
    return reply


def _check_objects(tree: Any) -> None:
    """Refuse a reply of very many objects: each takes a request."""
    waiting = [tree]
    count = 0
    while waiting:
        count += 1
        if count > MOST_OBJECTS:
            raise UnexpectedReport(
                "packets", f"a message of more than {MOST_OBJECTS} objects of Flower."
            )
        waiting.extend(waiting.pop().children)


@dataclass(eq=False)
class _LimitedClient:
    """Stands in for a Grid's connection: gives one reply, and stops where it gets too large."""

    client: Any
    claimed: Any
    longest: int | None
    is_over: Callable[[], bool]
    transfers: Executor
    read: int = 0

    def PullMessages(self, request: Any) -> Any:
        """Return the one reply."""
        return self.claimed

    def PullObject(self, request: Any) -> Any:
        """Return a part of the reply, also if its sender has not uploaded it yet."""
        if self.is_over():
            raise WireError("it was announced, and did not arrive in time.")
        part: Any = self.transfers.submit(self._transfer, request).result()
        if part is None:
            raise UnexpectedReport(
                "packets",
                f"more than {self.longest} bytes, where an answer has at most {self.longest}.",
            )
        return part

    def _transfer(self, request: Any) -> Any:
        """Pull a part; None: with it the reply is too large."""
        part = self.client.PullObject(request)
        self.read += len(part.object_content)
        if self.longest is not None and self.read > self.longest + MORE_BYTES:
            return None
        return part

    def ConfirmMessageReceived(self, request: Any) -> Any:
        """Let the SuperLink delete the reply."""
        return self.client.ConfirmMessageReceived(request)


# ---- questions -----------------------------------------------------------------------------------


def make_question(head: Head, node: int, seconds: float | None) -> Any:
    """Make a question to a Flower node, in JSON, with a salt."""
    from flwr import app

    message: Any = app.Message
    letter = Letter(json.dumps(head).encode(), codec="json")
    return message(make_content(letter, make_salt()), node, QUESTION, ttl=seconds)


def read_head(message: Any) -> Head:
    """Read the question, or the answer to one, in a Flower message.

    Raises:
        WireError: The message has neither.
    """
    try:
        head = json.loads(read_letter(message.content, MAX_QUESTION).head)
    except (ValueError, RecursionError) as error:
        raise WireError(f"a message has no question and no answer: {error}.") from None
    if not isinstance(head, dict):
        raise WireError("a question, or its answer, must be a JSON object.")
    return head


# ---- a node's app --------------------------------------------------------------------------------

AnswerQuestion = Callable[[Head, Mapping[str, Any]], Head]
"""Answers a question; also gets the node's configuration."""
DoTask = Callable[[Letter, Mapping[str, Any]], Letter]
"""Does a task and returns the reply; also gets the node's configuration."""


def client_app(answer: AnswerQuestion, do_task: DoTask) -> Any:
    """Make a Flower ClientApp that answers questions and does tasks; both must not raise."""
    check_installed()
    from flwr.clientapp import ClientApp

    client: Any = ClientApp()
    client.query()(partial(_on_question, answer))
    client.train()(partial(_on_task, do_task))
    return client


def server_app(main: Callable[[Any, Any], None]) -> Any:
    """Make a Flower ServerApp that calls ``main(grid, context)``."""
    check_installed()
    from flwr.serverapp import ServerApp

    # Flower logs every error of an app with its traceback.
    logging.getLogger("flwr").addFilter(drop_traceback)
    server: Any = ServerApp()
    server.main()(main)
    return server


def drop_traceback(record: logging.LogRecord) -> bool:
    """Drop the traceback of fedgrove's own errors from a line of Flower's log.

    They are sentences for the user, and have been logged already.
    """
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, FedgroveError):
        record.exc_info = None
        record.exc_text = None
    return True


def _on_question(answer: AnswerQuestion, message: Any, context: Any) -> Any:
    try:
        head = answer(read_head(message), context.node_config)
    except WireError as error:
        head = {"refused": str(error)}
    return make_reply(message, Letter(json.dumps(head).encode(), codec="json"))


def _on_task(do_task: DoTask, message: Any, context: Any) -> Any:
    try:
        letter = do_task(read_letter(message.content), context.node_config)
    except WireError as error:
        letter = make_loss("unreadable", str(error))
    return make_reply(message, letter)


def make_loss(reason: str, sentence: str) -> Letter:
    """Make the Flower reply of a client without a report; ``reason`` is in ``LOST_REASONS``."""
    note: Note = {"lost": reason, "detail": sentence}
    return Letter(note=note)


def read_partition(node_config: Mapping[str, Any]) -> int:
    """Return the number of a Flower node's client, from the configuration of the node.

    Raises:
        InputError: The configuration has no valid ``partition-id``.
    """
    given = node_config.get("partition-id")
    if type(given) is not int or given < 0:
        raise InputError(
            f"this node's partition-id is {given!r}; it must be the number of its client, 0 or "
            'more: start it with --node-config "partition-id=0".'
        )
    return given
