"""A Flower Grid in this process: real messages, as the bytes that a network would carry, to a real ClientApp."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any
from uuid import uuid4

from flwr.app import Context, Error, Message, RecordDict
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Message as Proto
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from fedgrove.engines.flower import node
from fedgrove.engines.flower.engine import Flower, ask
from fedgrove.engines.flower.messages import Letter, client_app, read_partition
from fedgrove.runs.run import Run

Fate = Callable[[Message], str]
"""What becomes of a message: "" it arrives, "task" it is lost, "reply" its reply is, "silence" likewise but nobody
says so, "refused" it is not taken, "died" Flower says that the node is gone."""


class Loopback(Grid):
    """Nodes with numbers of their own, one for each partition; a message is answered when it is asked for."""

    def __init__(self, apps: dict[int, Any], fate: Fate | None = None) -> None:
        TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 1
        self.fate: Fate = fate or (lambda message: "")
        self.apps: dict[int, Any] = {}
        self.contexts: dict[int, Context] = {}
        # In no order that says anything of partitions.
        numbers = random.Random(5).sample(range(10**15), len(apps))
        for number, (partition, app) in zip(numbers, apps.items(), strict=True):
            self.add(number, partition, app)
        self.waiting: dict[str, bytes] = {}
        self.carried: list[tuple[str, RecordDict]] = []

    def add(self, number: int, partition: int, app: Any) -> None:
        """One more node."""
        config = {"partition-id": partition}
        self.apps[number] = app
        self.contexts[number] = Context(1, number, config, RecordDict(), {})

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Any:
        raise NotImplementedError

    def create_message(self, *_: Any, **__: Any) -> Message:
        raise NotImplementedError

    def send_and_receive(self, *_: Any, **__: Any) -> Iterable[Message]:
        raise AssertionError("it sleeps, and reads the wall clock")

    def get_node_ids(self) -> Iterable[int]:
        return list(self.apps)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        taken = []
        for message in messages:
            if self.fate(message) == "refused":
                # As Flower's own Grid answers where a message is too large.
                return []
            number = str(uuid4())
            message.metadata.__dict__["_message_id"] = number
            self.waiting[number] = message_to_proto(message).SerializeToString()
            self.carried.append(("down", message.content))
            taken.append(number)
        return taken

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = []
        for number in message_ids:
            if number not in self.waiting:
                continue
            message = message_from_proto(Proto.FromString(self.waiting.pop(number)))
            fate = self.fate(message)
            if fate in ("task", "died"):
                code = 5 if fate == "died" else 3
                replies.append(Message(Error(code, "it is not there"), reply_to=message))
                continue
            to = message.metadata.dst_node_id
            reply = self.apps[to](message, self.contexts[to])
            if fate == "reply":
                replies.append(Message(Error(4, "the reply is not there"), reply_to=message))
            elif fate != "silence":
                copied = message_from_proto(
                    Proto.FromString(message_to_proto(reply).SerializeToString())
                )
                self.carried.append(("up", copied.content))
                replies.append(copied)
        # Whoever goes by their order is wrong.
        return replies[::-1]


def looped(run: Run, fate: Fate | None = None, timeout: float | None = None) -> Flower:
    """The engine over such a Grid; its nodes share the run, as those of a simulation do."""

    def asked(question: dict[str, Any], config: Any) -> dict[str, Any]:
        return {"partition": read_partition(config)}

    def tasked(letter: Letter, config: Any) -> Letter:
        assert letter.note["run"] == "this"
        return node.answer_letter(run, read_partition(config), letter)

    app = client_app(asked, tasked)
    grid = Loopback(dict.fromkeys(run.federation.ids, app), fate)
    answers = ask(grid, {number: {} for number in grid.get_node_ids()})
    nodes = {answer["partition"]: number for number, answer in answers.items()}
    grid.carried.clear()
    return Flower(grid, lambda: nodes, lambda run: "this", timeout)


def payload(content: RecordDict) -> int:
    """The bytes of our own in a message, without the salt before each array."""
    salt = len(str(content.config_records["note"].get("salt", ""))) // 2
    return sum(len(array.data) - salt for array in content.array_records["fedgrove"].values())
