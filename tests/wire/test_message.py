"""Tasks and reports as bytes."""

from __future__ import annotations

import json
import struct
import tracemalloc
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from fedgrove import trees
from fedgrove.core import ExpectedPacket, ExpectedReport, Packet, Report, Task
from fedgrove.errors import UnexpectedReport, UnknownMask, WireError
from fedgrove.wire import message
from fedgrove.wire.codec import Bitmap, Codec, Delta, Dense, KnownMask, Smallest, Zstd
from fedgrove.wire.message import (
    ResendRequest,
    read_answer,
    read_report,
    read_task,
    write_report,
    write_resend_request,
    write_task,
)

VALUES = {
    "w": torch.arange(6.0).view(2, 3),
    "b": torch.tensor([0.5, -1.5]),
    "n": torch.tensor([1, 2, 3]),
}
MASK = {"w": torch.tensor([[True, False, True], [False, True, True]])}
MASKED = Packet(trees.apply_mask(VALUES, MASK), MASK)
NOTHING = ExpectedReport()
TASK = Task(
    3, {"model": Packet(VALUES), "other": MASKED}, {"lr": 0.1, "phases": [1, 2]}, "cluster", 7
)
REPORT = Report(
    3,
    {"model": MASKED, "scores": Packet({"loss": torch.tensor(2.5)})},
    20,
    {"loss": 0.25, "steps": 4},
)
CODECS = [Dense(), Bitmap(), Smallest()]


def same(a: dict[str, Packet], b: dict[str, Packet]) -> bool:
    if list(a) != list(b):
        return False
    for name, packet in a.items():
        other = b[name]
        if not trees.identical(packet.values, other.values):
            return False
        if not trees.identical(packet.mask or {}, other.mask or {}):
            return False
    return True


def with_head(head: Any, rest: bytes = b"") -> bytes:
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    return struct.pack("<I", len(text)) + text + rest


# ---- round trips ---------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_a_task_comes_back(codec) -> None:
    back = read_task(write_task(TASK, codec), codec)
    assert (back.to, back.verb, back.round) == (3, "cluster", 7)
    assert back.settings == {"lr": 0.1, "phases": [1, 2]}
    assert same(dict(back.send), dict(TASK.send))
    assert back.send["model"].mask is None


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_a_report_comes_back(codec) -> None:
    back = read_report(write_report(REPORT, codec), codec)
    assert (back.of, back.examples, back.metrics) == (3, 20, {"loss": 0.25, "steps": 4})
    assert same(dict(back.give), dict(REPORT.give))


def test_the_version_of_memory_and_the_attempt_travel() -> None:
    task = Task(3, round=12, attempt=2, memory="11.train")
    assert read_task(write_task(task, Dense()), Dense()) == task
    report = Report(3, {}, 5, memory="12.train.2")
    assert read_report(write_report(report, Dense()), Dense()) == report


def test_what_a_version_adds_to_a_header() -> None:
    # ,"memory":"11.train" is 1 + 8 + 1 + 10 = 20 characters, ,"attempt":2 is 1 + 9 + 1 + 1 = 12
    plain = len(write_task(Task(3, round=12), Dense()))
    assert len(write_task(Task(3, round=12, memory="11.train"), Dense())) == plain + 20
    assert len(write_task(Task(3, round=12, attempt=2), Dense())) == plain + 12


def test_a_client_says_what_it_lacks() -> None:
    lacks = ResendRequest(3, ("model", "other"))
    data = write_resend_request(lacks, Dense())
    # 47 characters (0x2f, a slash)
    assert data == b'/\0\0\0{"of":3,"lacks":["model","other"],"packets":[]}'
    assert read_answer(data, Dense(), NOTHING) == lacks
    report = Report(3, {}, 5)
    assert read_answer(write_report(report, Dense()), Dense(), NOTHING) == report


def test_a_message_that_refers_to_masks_names_the_packets_that_do() -> None:
    codec = Delta()
    known = KnownMask.of(MASK)
    send = {"a": MASKED, "b": Packet(VALUES), "c": MASKED, "d": MASKED}
    data = write_task(Task(1, send), codec, {"a": known, "c": known})
    with pytest.raises(UnknownMask, match="does not know the masks that a, c refer to") as caught:
        read_task(data, codec)
    assert caught.value.packets == ("a", "c")
    other = KnownMask.of({"w": ~MASK["w"]})
    with pytest.raises(UnknownMask) as caught:
        read_task(data, codec, {"a": known, "c": other})
    assert caught.value.packets == ("c",)
    assert same(dict(read_task(data, codec, {"a": known, "c": known}).send), send)


def test_messages_without_packets() -> None:
    assert read_task(write_task(Task(1), Dense()), Dense()) == Task(1)
    assert read_report(write_report(Report(1, {}, 5), Dense()), Dense()) == Report(1, {}, 5)


def test_the_bytes_of_the_smallest_task() -> None:
    # 60 characters (0x3c), little-endian, then the text
    text = b'{"to":1,"verb":"train","round":0,"settings":{},"packets":[]}'
    assert len(text) == 60
    assert write_task(Task(1), Dense()) == b"\x3c\x00\x00\x00" + text


@given(
    st.dictionaries(st.text(max_size=5), st.floats(allow_nan=False), max_size=3),
    st.integers(0, 10**6),
    st.text(),
)
def test_numbers_and_words_come_back_to_the_bit(
    numbers: dict[str, float], client: int, verb: str
) -> None:
    task = Task(client, {}, numbers, verb, client)
    assert read_task(write_task(task, Dense()), Dense()) == task


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_measured_parts_add_up_to_the_real_length(codec) -> None:
    cases = [
        (message.task_head(TASK), TASK.send, write_task(TASK, codec)),
        (message.report_head(REPORT), REPORT.give, write_report(REPORT, codec)),
        (message.task_head(Task(1)), {}, write_task(Task(1), codec)),
    ]
    for head, packets, data in cases:
        cost = message.measure(head, {name: codec.cost(packet) for name, packet in packets.items()})
        assert sum(cost.values()) == len(data)


# ---- bytes that are not what they claim to be ----------------------------------------------------

WHOLE = {codec: (write_task(TASK, codec), write_report(REPORT, codec)) for codec in CODECS}


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_every_way_of_cutting_a_message_short_is_refused(codec) -> None:
    for data, read in zip(WHOLE[codec], (read_task, read_report), strict=True):
        for n in range(len(data)):
            with pytest.raises(WireError):
                read(data[:n], codec)
        with pytest.raises(WireError):
            read(data + b"\0", codec)


@settings(max_examples=500, deadline=None)
@given(st.data())
def test_altered_bytes_are_read_or_refused_but_nothing_else(data: st.DataObject) -> None:
    codec = data.draw(st.sampled_from(CODECS))
    which = data.draw(st.integers(0, 1))
    bytes_ = bytearray(WHOLE[codec][which])
    for _ in range(data.draw(st.integers(1, 4))):
        bytes_[data.draw(st.integers(0, len(bytes_) - 1))] = data.draw(st.integers(0, 255))
    _harmless((read_task, read_report)[which], bytes(bytes_), codec)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=80), st.booleans())
def test_any_bytes_are_read_or_refused_but_nothing_else(body: bytes, headed: bool) -> None:
    data = with_head(body) if headed else body
    _harmless(read_task, data, Dense())
    _harmless(read_report, data, Dense())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=5,
)
KEYS = ("to", "verb", "round", "attempt", "memory", "settings", "packets")
KEYS += ("of", "examples", "metrics", "lacks")


@settings(max_examples=300, deadline=None)
@given(st.one_of(JSON, st.fixed_dictionaries({}, optional=dict.fromkeys(KEYS, JSON))))
def test_any_head_is_read_or_refused_but_nothing_else(head: Any) -> None:
    _harmless(read_task, with_head(head), Dense())
    _harmless(read_report, with_head(head), Dense())
    _harmless(partial(read_answer, expected=NOTHING), with_head(head), Dense())


def _harmless(read: Any, data: bytes, codec: Any) -> None:
    try:
        result = read(data, codec)
    except WireError:
        return
    assert isinstance(result, Task | Report | ResendRequest)


def good_task(**changes: Any) -> dict[str, Any]:
    return {"to": 1, "verb": "train", "round": 0, "settings": {}, "packets": []} | changes


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"not json",
        b"\xff\xfe",
        b"[" * 100_000,
        [],
        {},
        good_task(packets=[["a"]]),
        good_task(packets=[["a", -1], ["b", 1]]),
        good_task(packets=[["a", 10**9]]),
        good_task(packets="ab"),
        good_task(to="x"),
        good_task(settings=3),
        {k: v for k, v in good_task().items() if k != "verb"},
    ],
    ids=range(13),
)
def test_heads_that_are_not_heads(head: Any) -> None:
    with pytest.raises(WireError):
        read_task(with_head(head), Dense())


@pytest.mark.parametrize("number", ["Infinity", "1e999"])
@pytest.mark.parametrize("key", ["to", "round"])
def test_a_number_without_end_is_refused(key: str, number: str) -> None:
    text = json.dumps(good_task(**{key: "HERE"})).replace('"HERE"', number)
    with pytest.raises(WireError):
        read_task(with_head(text.encode()), Dense())


@pytest.mark.parametrize("metrics", [{"loss": "much"}, {"loss": [1]}, {"loss": None}, {"loss": {}}])
def test_a_metric_that_is_not_a_number_is_refused(metrics: Any) -> None:
    with pytest.raises(WireError):
        read_report(with_head({"of": 1, "examples": 2, "metrics": metrics, "packets": []}), Dense())


def test_a_packet_named_twice_is_refused() -> None:
    blob = Dense().encode(Packet({"w": torch.ones(1)})).data
    with pytest.raises(WireError):
        read_task(with_head(good_task(packets=[["a", len(blob)]] * 2), blob * 2), Dense())


def test_a_head_longer_than_the_limit_is_refused() -> None:
    data = struct.pack("<I", message.MAX_HEAD + 1) + b" " * (message.MAX_HEAD + 1)
    with pytest.raises(WireError, match="longer than"):
        message.read(data, Dense())


# ---- answers of clients that may be malicious ----------------------------------------------------

EXPECTED = ExpectedReport({"model": ExpectedPacket.of({"w": torch.zeros(100)})})
"""What the server waits for: 400 bytes of numbers."""


def peak_while_reading(data: bytes, codec: Codec, reason: str) -> int:
    """Read an answer that must be refused for a reason; return the most bytes allocated."""
    tracemalloc.start()
    try:
        with pytest.raises(UnexpectedReport) as refusal, _MadeTensors() as made:
            read_answer(data, codec, EXPECTED)
        assert refusal.value.reason == reason
        assert len(str(refusal.value)) < 1000
        return tracemalloc.get_traced_memory()[1] + made.bytes
    finally:
        tracemalloc.stop()


class _MadeTensors(TorchDispatchMode):
    """Counts the bytes of all tensors that are made; tracemalloc sees those of Python and NumPy."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.bytes += made.nbytes
        return made


@pytest.mark.parametrize("codec", [Dense(), Bitmap(), Smallest(), Zstd()])
def test_a_small_answer_that_decodes_to_much_is_refused_before_it_is_decoded(codec: Codec) -> None:
    mask = {"w": torch.zeros(20_000_000, dtype=torch.bool)}
    packet = Packet({"w": torch.zeros(20_000_000)}, mask)
    data = write_report(Report(1, {"model": packet}, 5), codec)
    reason = "tensors"
    if len(data) > message.longest_answer(EXPECTED):
        reason = "packets"
    assert peak_while_reading(data, codec, reason) < 4_000_000


def test_a_thousand_packets_are_refused_before_any_is_decoded() -> None:
    packet = Packet({"w": torch.zeros(100)})
    give = {f"p{i}": packet for i in range(1000)} | {"model": packet}
    data = write_report(Report(1, give, 5), Zstd())
    assert peak_while_reading(data, Zstd(), "packets") < 4_000_000


def test_a_long_uncompressed_answer_is_refused_unread() -> None:
    data = bytes(40_000_000)
    assert peak_while_reading(data, Dense(), "packets") < 1_000_000


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"w": torch.zeros(99)}, "99"),
        ({"w": torch.zeros(100, dtype=torch.float64)}, "float64"),
        ({"w": torch.zeros(10, 10)}, "10"),
        ({"v": torch.zeros(100)}, "v"),
        ({}, "w"),
    ],
    ids=["length", "dtype", "shape", "name", "none"],
)
def test_an_answer_with_other_tensors_is_refused(values: trees.Tree, word: str) -> None:
    data = write_report(Report(1, {"model": Packet(values)}, 5), Dense())
    with pytest.raises(UnexpectedReport, match=word) as refusal:
        read_answer(data, Dense(), EXPECTED)
    assert refusal.value.reason == "tensors"


@pytest.mark.parametrize(
    "name", ["\ud800", "\x1b[2J", "\x00", "\u202e", "n" * 30_000], ids=range(5)
)
def test_a_name_from_a_client_is_cleaned_and_cut_in_the_refusal(name: str) -> None:
    head = {"of": 1, "examples": 2, "metrics": {}, "packets": [[name, 0]]}
    with pytest.raises(WireError) as refusal:
        read_answer(with_head(head), Dense(), EXPECTED)
    text = str(refusal.value)
    text.encode()
    assert text.isprintable()
    assert len(text) < 1000


@pytest.mark.parametrize("number", [1.9, True, "1", None, [1]])
@pytest.mark.parametrize("field", ["of", "examples"])
def test_a_count_that_is_no_integer_is_refused(field: str, number: Any) -> None:
    head = {"of": 1, "examples": 2, "metrics": {}, "packets": []} | {field: number}
    with pytest.raises(WireError, match=field):
        read_answer(with_head(head), Dense(), NOTHING)


def test_every_honest_answer_is_shorter_than_the_longest() -> None:
    for codec in (Dense(), Bitmap(), Smallest(), Delta(), Zstd()):
        for packet in (MASKED, Packet(VALUES), Packet({"w": torch.randn(1)})):
            data = write_report(Report(1, {"model": packet}, 5), codec)
            form = ExpectedPacket.of(packet.values, packet.mask)
            assert len(data) <= message.longest_answer(ExpectedReport({"model": form}))
