"""Replies over Flower that are none: each costs its own task, and delays no other.

The Grid is Flower's own; its connection is a SuperLink in this process that stores objects by their hashes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr")

import httpx
from flwr.app import Message
from flwr.proto.message_pb2 import ConfirmMessageReceivedResponse, ObjectTree, PullObjectResponse
from flwr.proto.runtime_pb2 import PullAppMessagesResponse, PushAppMessagesResponse
from flwr.supercore.constant import HEAD_BODY_DIVIDER, HEAD_VALUE_DIVIDER
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_id,
    get_object_tree,
)
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid.http_grid import HttpGrid

from fedgrove.engines.flower import mailbox as mailboxes
from fedgrove.engines.flower import messages
from fedgrove.engines.flower.engine import Flower, push
from fedgrove.engines.flower.mailbox import Limits, Mailbox
from fedgrove.engines.flower.messages import Letter, make_content, make_salt, read_letter
from fedgrove.errors import EngineError, UnexpectedReport, WireError

LIMITS = Limits(longest=1000)


@dataclass
class SuperLink:
    """What a Grid asks of a SuperLink, with the replies that are there."""

    replies: dict[str, tuple[str, ObjectTree]] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    confirmed: list[str] = field(default_factory=list)
    stumbles_over: set[str] = field(default_factory=set)
    asked: int = 0
    lock: Any = field(default_factory=threading.Lock)
    transfers: int = 0
    most_transfers: int = 0
    announced: set[str] = field(default_factory=set)
    """Objects that a node has announced with other contents: messages that have them are refused."""

    def PullMessages(self, request: Any) -> Any:
        self.asked += 1
        if self.stumbles_over & set(request.message_ids):
            raise _refused()
        found = PullAppMessagesResponse()
        for number in request.message_ids:
            if number in self.replies:
                root, tree = self.replies.pop(number)
                bare = found.messages_list.add()
                bare.metadata.message_id = root
                bare.metadata.reply_to_message_id = number
                found.message_object_trees.append(tree)
        return found

    def PullObject(self, request: Any) -> Any:
        content = self.objects.get(request.object_id)
        with self.lock:
            self.transfers += 1
            self.most_transfers = max(self.most_transfers, self.transfers)
        if content is not None:
            time.sleep(0.01)
        with self.lock:
            self.transfers -= 1
        # It was announced, and is not there yet.
        return PullObjectResponse(
            object_found=True,
            object_available=content is not None,
            object_content=content or b"",
        )

    def ConfirmMessageReceived(self, request: Any) -> Any:
        self.confirmed.append(request.message_object_id)
        return ConfirmMessageReceivedResponse()

    def PushMessages(self, request: Any) -> Any:
        for tree in request.message_object_trees:
            if self.announced & {each.object_id for each in _all_of(tree)}:
                raise _refused()
        ids = [each.metadata.message_id for each in request.messages_list]
        return PushAppMessagesResponse(message_ids=ids)

    def PushObject(self, request: Any) -> Any:
        raise AssertionError("it has all objects")

    def answer(self, number: str, reply: Message, leave_out: int = 0) -> None:
        """Store a reply, of which a few objects are never uploaded."""
        contents = {i: each.deflate() for i, each in get_all_nested_objects(reply).items()}
        kept = list(contents.items())[leave_out:]
        self.objects.update(kept)
        self.replies[number] = (reply.object_id, get_object_tree(reply))

    def answer_raw(self, number: str, kind: str, body: bytes, children: Iterable[str] = ()) -> None:
        """Store an object with contents of the sender's choice as a reply."""
        listed = ",".join(children)
        head = f"{kind}{HEAD_VALUE_DIVIDER}{listed}{HEAD_VALUE_DIVIDER}{len(body)}"
        content = head.encode() + HEAD_BODY_DIVIDER + body
        root = get_object_id(content)
        self.objects[root] = content
        self.replies[number] = (root, ObjectTree(object_id=root))


def _all_of(tree: Any) -> list[Any]:
    return [tree, *(each for child in tree.children for each in _all_of(child))]


def _refused() -> httpx.HTTPStatusError:
    request = httpx.Request("POST", "https://127.0.0.1/")
    return httpx.HTTPStatusError("500", request=request, response=httpx.Response(500))


@pytest.fixture
def link() -> SuperLink:
    TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 1
    return SuperLink()


@pytest.fixture
def mailbox(link: SuperLink) -> Iterator[Mailbox]:
    made = Mailbox(grid_of(link))
    yield made
    made.close()


def grid_of(link: SuperLink) -> Any:
    grid: Any = HttpGrid(token="none", insecure=True)
    grid._client = link
    grid._run = SimpleNamespace(run_id=1)
    return grid


def reply(data: bytes = b"hello") -> Message:
    return Message(make_content(Letter(data, codec="Dense()")), 7, "train")


def pulled(mailbox: Mailbox, numbers: Iterable[str], seconds: float = 10.0) -> dict[str, Any]:
    """What arrives until all is there or the time is over."""
    wanted = set(numbers)
    found: dict[str, Any] = {}
    end = time.monotonic() + seconds
    while wanted - found.keys() and time.monotonic() < end:
        found.update(mailbox.pull(wanted - found.keys(), lambda number: LIMITS))
        time.sleep(0.01)
    return found


def test_a_reply_is_read_and_confirmed(link: SuperLink, mailbox: Mailbox) -> None:
    link.answer("a", reply())
    found = pulled(mailbox, "ab", 1.0)
    assert list(found) == ["a"]
    assert read_letter(found["a"].content).head == b"hello"
    assert len(link.confirmed) == 1


RAW = {
    "no message": ("ConfigRecord", b"", ()),
    "no protobuf": ("Message", b"\xff\xff\xff", ()),
    "an unknown class": ("Nonsense", b"", ()),
    "a child that is not there": ("Message", b"", ("0" * 64,)),
    "no record": ("RecordDict", b"\xff{", ()),
}


@pytest.mark.parametrize("what", RAW)
def test_what_flower_cannot_read_is_lost_and_nothing_else(
    what: str, link: SuperLink, mailbox: Mailbox
) -> None:
    kind, body, children = RAW[what]
    link.answer_raw("bad", kind, body, children)
    link.answer("good", reply())
    found = pulled(mailbox, ["bad", "good"])
    assert isinstance(found["bad"], WireError)
    assert "is not a message of Flower" in str(found["bad"])
    assert read_letter(found["good"].content).head == b"hello"
    # Both: or the SuperLink would keep the bad one until the end of the run.
    assert len(set(link.confirmed)) == 2


def test_a_reply_that_is_announced_and_never_uploaded_delays_nobody(
    link: SuperLink, mailbox: Mailbox
) -> None:
    link.answer("never", reply(b"never"), leave_out=1)
    assert pulled(mailbox, ["never"], 0.5) == {}
    link.answer("later", reply())
    started = time.monotonic()
    assert list(pulled(mailbox, ["never", "later"], 2.0)) == ["later"]
    assert time.monotonic() - started < 3


def test_a_reply_that_comes_too_late_is_not_waited_for(link: SuperLink, mailbox: Mailbox) -> None:
    link.answer("never", reply(), leave_out=1)
    end = time.monotonic() + 10
    found: list[tuple[str, Any]] = []
    limits = Limits(1000, time.monotonic() - 1)
    while not found and time.monotonic() < end:
        found = mailbox.pull(["never"], lambda number: limits)
    ((number, error),) = found
    assert (number, str(error)) == ("never", "it was announced, and did not arrive in time.")


def test_a_reply_that_is_too_large_is_not_read_to_its_end(
    link: SuperLink, mailbox: Mailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "MORE_BYTES", 1000)
    link.answer("large", reply(bytes(20_000)))
    error = pulled(mailbox, ["large"])["large"]
    assert isinstance(error, UnexpectedReport)
    assert error.reason == "packets"
    assert "more than 1000 bytes" in str(error)


def test_a_few_pieces_are_transferred_at_a_time(link: SuperLink, mailbox: Mailbox) -> None:
    """A piece may be far larger than its reply may be, and is counted after it was transferred."""
    numbers = [f"n{i}" for i in range(12)]
    for number in numbers:
        link.answer(number, reply(number.encode()))
    # This one is not uploaded, and takes nobody's place.
    link.answer("never", reply(b"never"), leave_out=1)
    assert sorted(pulled(mailbox, numbers)) == sorted(numbers)
    assert 1 <= link.most_transfers <= mailboxes.MOST_TRANSFERS


def test_a_reply_of_many_objects_is_refused(
    link: SuperLink, mailbox: Mailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "MOST_OBJECTS", 5)
    link.answer("many", reply())
    error = pulled(mailbox, ["many"])["many"]
    assert "a message of more than 5 objects" in str(error)


def test_a_superlink_that_stumbles_over_one_reply_gives_the_others(
    link: SuperLink, mailbox: Mailbox
) -> None:
    link.stumbles_over = {"bad"}
    link.answer("good", reply())
    found = pulled(mailbox, ["bad", "good"])
    assert isinstance(found["bad"], WireError)
    assert read_letter(found["good"].content).head == b"hello"


def test_a_superlink_may_be_busy_for_a_while(link: SuperLink, mailbox: Mailbox) -> None:
    link.stumbles_over = {"a", "b"}
    link.answer("a", reply())
    for _ in range(mailboxes.MOST_FAILURES):
        assert mailbox.pull("ab", lambda number: LIMITS) == []
    link.stumbles_over = set()
    assert list(pulled(mailbox, ["a", "b"], 1.0)) == ["a"]
    # Together again: one request for both.
    asked = link.asked
    mailbox.pull(["b", "c"], lambda number: LIMITS)
    assert link.asked == asked + 1


def test_a_superlink_that_is_gone_ends_the_run(link: SuperLink) -> None:
    grid = grid_of(link)
    grid._client = SimpleNamespace()
    with pytest.raises(EngineError, match="SuperLink cannot be reached"):
        Mailbox(grid).pull(["a"])


def test_an_error_in_the_limits_is_of_this_task(link: SuperLink, mailbox: Mailbox) -> None:
    def fails(number: str) -> Limits:
        raise RuntimeError("of a method")

    link.answer("a", reply())
    ((_, error),) = mailbox.pull(["a"], fails)
    assert "of a method" in str(error)


# ---- what nobody can predict ---------------------------------------------------------------------


def test_a_letter_with_a_salt_is_the_letter_without_it() -> None:
    letter = Letter(b"head", {"model": b"weights"}, "Dense()", {"run": "r"})
    salted = make_content(letter, make_salt())
    assert read_letter(salted) == read_letter(make_content(letter)) == letter
    plain_objects = get_all_nested_objects(make_content(letter)).keys()
    assert not plain_objects & get_all_nested_objects(salted).keys()


@pytest.mark.parametrize("salt", ["x", "0", 3.5, [1]])
def test_a_salt_that_is_none_is_no_letter(salt: Any) -> None:
    content = make_content(Letter(b"head", codec="json", note={"salt": salt}))
    with pytest.raises(WireError, match="not made by fedgrove"):
        read_letter(content)


def test_questions_and_answers_have_a_salt(link: SuperLink) -> None:
    first, second = (messages.make_question({"ask": "who"}, 7, 60.0) for _ in range(2))
    shared = get_all_nested_objects(first).keys() & get_all_nested_objects(second).keys()
    assert not shared
    assert messages.read_head(first) == {"ask": "who"}
    first, second = (messages.make_reply(first, Letter(b"{}", codec="json")) for _ in range(2))
    assert not get_all_nested_objects(first).keys() & get_all_nested_objects(second).keys()


def test_a_message_that_is_refused_does_not_end_the_run(link: SuperLink) -> None:
    message = messages.make_question({"ask": "who"}, 7, 60.0)
    link.announced = set(get_all_nested_objects(message.content))
    assert push(grid_of(link), message) is None


def test_a_task_that_is_refused_is_sent_again_with_a_salt(link: SuperLink) -> None:
    """Or a node that predicts what another one is sent could keep it from taking part."""
    letter = Letter(b"head", {"model": b"weights"}, "Dense()", {"run": "r", "nonce": "n"})
    engine = Flower(grid_of(link), lambda: {}, lambda run: "r")
    link.announced = set(get_all_nested_objects(make_content(letter)))
    assert engine._push(letter, 7) is not None
