"""A node without Flower's SuperNode: speaks to a SuperLink with a valid key, and sends what it likes.

``python raw_node.py PORT KEYS K KIND BOMBS APP``. One process for each node; an answer takes milliseconds,
because no process is started for a task. KIND is honest, replay, buyer, silent or bombs; or of those that
attack the transport: stuck, garbage, dateless or seer.
"""

from __future__ import annotations

import json
import math
import struct
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.constant import HEAD_BODY_DIVIDER, HEAD_VALUE_DIVIDER
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_id,
    get_object_tree,
    iterate_object_tree,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode.fleet_http_connection import http_request_response

from fedgrove.engines.flower.messages import Letter, make_content, read_letter

FEDGROVE = "fedgrove"


class Hostile:
    """Answers the messages of one node."""

    def __init__(self, kind: str, config: dict[str, Any], bombs: Path, app: Path) -> None:
        self.kind = kind
        self.config = config
        self.bombs = sorted(bombs.iterdir())
        self.app = app
        self.sent = 0
        self.first: Message | None = None

    def answer(self, message: Message, context: Context) -> Message | None:
        """The reply to a message; None: silence."""
        if self.kind == "silent":
            return None
        is_task = message.metadata.message_type == "train"
        if is_task and self.kind == "bombs":
            return self.bomb(message)
        if is_task and self.first is not None:
            return Message(self.first.content, reply_to=message)
        reply = self.honest(message, context)
        if is_task and self.kind == "replay":
            self.first = reply
        if self.kind == "buyer" and not is_task:
            self.claim(reply)
        return reply

    def honest(self, message: Message, context: Context) -> Message:
        """As fedgrove's own half."""
        from fedgrove import deploy

        sys.path.insert(0, str(self.app))
        from fedgrove_app.data import own_data  # type: ignore[import-not-found]

        made: Any = deploy.client_app(own_data, code=self.app / "fedgrove_app")
        reply: Message = made(message, context)
        return reply

    def claim(self, reply: Message) -> None:
        """Claim 10**9 examples."""
        head = json.loads(read_letter(reply.content).head)
        if "info" in head:
            head["info"]["examples"] = 10**9
            letter = Letter(json.dumps(head).encode(), codec="json")
            for name, record in make_content(letter).items():
                reply.content[name] = record

    def bomb(self, message: Message) -> Message:
        """One of the bombs, in turn; it names the task as an honest node does."""
        task = read_letter(message.content)
        arrays = {}
        for path in sorted(self.bombs[self.sent % len(self.bombs)].iterdir()):
            data = path.read_bytes()
            shape = (len(data),)
            arrays[path.name] = Array(dtype="bytes", shape=shape, stype=task.codec, data=data)
        self.sent += 1
        print("bomb", self.sent, flush=True)
        content: Any = {
            FEDGROVE: ArrayRecord(arrays),
            "note": ConfigRecord({"answers": task.task_id}),
        }
        return Message(RecordDict(content), reply_to=message)


TRANSPORT = ("stuck", "garbage", "dateless", "seer")


def attack(kind: str, task: Message, reply: Message, send: Any, push_object: Any) -> None:
    """Answer a task with a reply that Flower itself stumbles over."""
    print("attack", kind, flush=True)
    tree = get_object_tree(reply)
    contents = {i: each.deflate() for i, each in get_all_nested_objects(reply).items()}
    if kind == "garbage":
        # Flower inflates it to something that is no message.
        contents = dict([pack("ConfigRecord", b"")])
        tree = ObjectTree(object_id=next(iter(contents)))
    if kind == "dateless":
        reply.metadata.__dict__["_created_at"] = math.nan
    if kind == "seer":
        tree.children.extend(foresee(task))
    reply.metadata.__dict__["_message_id"] = tree.object_id
    wanted, session = send(reply, tree, 0.1)
    for object_id in wanted & contents.keys():
        # The others announce what they never upload.
        if kind not in ("stuck", "seer"):
            push_object(session, object_id, contents[object_id])


def foresee(task: Message) -> list[Any]:
    """What the server will send to others in the next rounds, as a tree with children that it does not have."""
    letter = read_letter(task.content)
    (length,) = struct.unpack_from("<I", letter.head)
    head = json.loads(letter.head[4 : 4 + length])
    (junk, _) = pack("ArrayChunk", b"junk")
    trees = []
    for to in range(10):
        for later in range(1, 5):
            text = json.dumps(
                {**head, "to": to, "round": head["round"] + later}, separators=(",", ":")
            ).encode()
            data = struct.pack("<I", len(text)) + text
            array = Array(dtype="bytes", shape=(len(data),), stype=letter.codec, data=data)
            children = [ObjectTree(object_id=junk)]
            trees.append(ObjectTree(object_id=array.object_id, children=children))
    return trees


def pack(kind: str, body: bytes) -> tuple[str, bytes]:
    """An object of Flower's without children: its id and its content."""
    head = f"{kind}{HEAD_VALUE_DIVIDER}{HEAD_VALUE_DIVIDER}{len(body)}"
    content = head.encode() + HEAD_BODY_DIVIDER + body
    return get_object_id(content), content


def pull(pull_object: Any, run: int, object_id: str) -> bytes:
    """Pull an object, which the server may not have sent completely yet."""
    for _ in range(100):
        try:
            found: bytes = pull_object(run, object_id)
        except Exception:
            time.sleep(0.3)
        else:
            return found
    raise TimeoutError(object_id)


def main(
    port: str, keys: str, number: str, partition: str, kind: str, bombs: str, app: str
) -> None:
    """Serve until the process is ended."""
    private: Any = serialization.load_ssh_private_key(
        (Path(keys) / f"node-{number}").read_bytes(), None
    )
    config: dict[str, Any] = {"partition-id": int(partition)}
    node = Hostile(kind, config, Path(bombs), Path(app))
    ca = (Path(keys) / "ca.crt").read_bytes()
    pair = (private, private.public_key())
    with http_request_response(f"127.0.0.1:{port}", False, ca, pair) as connection:
        node_id, receive, send, _, _, pull_object, push_object, confirm = connection
        print("connected", flush=True)
        while True:
            received = receive()
            if received is None:
                time.sleep(0.2)
                continue
            bare, tree = received
            run = bare.metadata.run_id
            TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = run, 1, node_id
            contents = {}
            for each in iterate_object_tree(tree):
                contents[each.object_id] = pull(pull_object, run, each.object_id)
            message: Any = inflate_object_from_contents(bare.metadata.message_id, contents)
            message.metadata.__dict__["_message_id"] = bare.metadata.message_id
            confirm(run, bare.metadata.message_id)
            reply = node.answer(message, Context(run, node_id, config, RecordDict(), {}))
            if reply is None:
                continue
            if kind in TRANSPORT and message.metadata.message_type == "train":
                attack(kind, message, reply, send, partial(push_object, run))
                continue
            reply.metadata.__dict__["_message_id"] = reply.object_id
            wanted, session = send(reply, get_object_tree(reply), 0.1)
            try:
                for object_id, made in get_all_nested_objects(reply).items():
                    if object_id in wanted:
                        push_object(run, session, object_id, made.deflate())
            except Exception as error:
                # The server has refused the reply before all of it was there.
                print("stopped", error, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
