"""Tasks and reports as bytes: a JSON header with the lengths, then each packet as encoded.

``length of the header (4 bytes, little-endian) | header | packet | packet ...``; the header
contains verb, client, round, numbers, the version of the client's memory, and ``packets: [[name,
length], ...]``. A client that cannot read a task because it does not know a mask answers with a
:class:`ResendRequest`, and is sent the whole task again.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..core import ExpectedReport, Packet, Report, Task
from ..errors import (
    UnexpectedReport,
    UnexpectedTensors,
    UnknownMask,
    WireError,
    clean_text,
    list_some,
    shown,
)
from ..renamed import find_old_names
from .codec import Codec, CostByPart, Encoded, KnownMask

KnownMasks = Mapping[str, KnownMask | None]
"""By packet, the mask that a receiver knows from earlier messages."""
NO_KNOWN_MASKS: KnownMasks = {}
MAX_HEAD = 1 << 20
"""The longest header a reader accepts, in bytes."""
MAX_ANSWER_HEAD = 1 << 16
"""The longest header of a client's answer that the server accepts, in bytes."""
PER_TENSOR = 1 << 10
"""Bytes that a tensor may take in addition to its values and mask: its name, its entry in the
index."""
MALFORMED_FIELDS = (KeyError, TypeError, ValueError, OverflowError)
"""What reading the fields of a header can raise: one is missing, of another type, or infinite."""


@dataclass(frozen=True)
class ResendRequest:
    """A client's answer to a task that it cannot read: it does not know the masks of packets."""

    of: int
    packets: tuple[str, ...]


def task_head(task: Task) -> dict[str, Any]:
    """Return the header of a task, without the lengths of its packets."""
    head: dict[str, Any] = {"to": task.to, "verb": task.verb, "round": task.round}
    # What most tasks do not have is left out.
    if task.attempt:
        head["attempt"] = task.attempt
    if task.memory is not None:
        head["memory"] = task.memory
    return head | {"settings": dict(task.settings)}


def report_head(report: Report) -> dict[str, Any]:
    """Return the header of a report, without the lengths of its packets."""
    head: dict[str, Any] = {"of": report.of, "examples": report.examples}
    if report.memory is not None:
        head["memory"] = report.memory
    return head | {"metrics": dict(report.metrics)}


# ---- writing -------------------------------------------------------------------------------------


def measure(head: dict[str, Any], costs: Mapping[str, CostByPart]) -> dict[str, int]:
    """Return the length of a message by part, without joining its bytes.

    Args:
        head: The header, without lengths.
        costs: What each packet takes.
    """
    # The header contains the lengths of the packets. It comes first in the result, whatever the
    # codec counts.
    total = {"header": 0}
    lengths: dict[str, int] = {}
    for name, parts in costs.items():
        lengths[name] = sum(parts.values())
        for part, n in parts.items():
            total[part] = total.get(part, 0) + n
    total["header"] += len(_write_head(head, lengths))
    return total


def join_encoded(
    head: dict[str, Any], encoded: Mapping[str, Encoded]
) -> tuple[bytes, dict[str, bytes], CostByPart]:
    """Return a message as its head and its packets, which follow it, and its length by part."""
    packets: dict[str, bytes] = {}
    costs: dict[str, CostByPart] = {}
    for name, packet in encoded.items():
        packets[name] = packet.data
        costs[name] = packet.cost
    lengths = {name: len(data) for name, data in packets.items()}
    return _write_head(head, lengths), packets, measure(head, costs)


def _write(
    head: dict[str, Any], packets: Mapping[str, Packet], codec: Codec, known: KnownMasks
) -> bytes:
    """Return a whole message."""
    written: list[bytes] = []
    lengths: dict[str, int] = {}
    for name, packet in packets.items():
        data = codec.encode(packet, known.get(name)).data
        written.append(data)
        lengths[name] = len(data)
    return b"".join([_write_head(head, lengths), *written])


# Made once: json.dumps makes a new encoder at each call that sets separators.
_write_json = json.JSONEncoder(separators=(",", ":")).encode


def _write_head(head: dict[str, Any], lengths: Mapping[str, int]) -> bytes:
    """Return the header with the lengths of the packets, preceded by its own length."""
    complete = head | {"packets": list(lengths.items())}
    head_bytes = _write_json(complete).encode()
    return struct.pack("<I", len(head_bytes)) + head_bytes


# ---- reading -------------------------------------------------------------------------------------


def longest_answer(expected: ExpectedReport) -> int:
    """Return the most bytes that an answer may have: far more than any honest one.

    No codec of fedgrove writes more than the width of each number and a bit for its mask. Twice
    that leaves room for a codec of the user's own.
    """
    total = 4 + MAX_ANSWER_HEAD
    for form in expected.packets.values():
        total += PER_TENSOR
        for dtype, shape in form.tensors.values():
            total += PER_TENSOR + 2 * math.prod(shape) * (dtype.itemsize + 1)
    return total


def read(
    data: bytes,
    codec: Codec,
    known: KnownMasks = NO_KNOWN_MASKS,
    expected: ExpectedReport | None = None,
) -> tuple[dict[str, Any], dict[str, Packet]]:
    """Return the header and the packets of a message; every length is checked before it is used.

    Args:
        data: The message.
        codec: Reads the packets.
        known: The masks that the reader knows.
        expected: What the report must contain. With it nothing is allocated for packets or
            tensors that are not expected.

    Raises:
        WireError: The bytes are not a message.
        UnexpectedReport: They contain something else than ``expected``.
        UnknownMask: Packets refer to masks that are not ``known``; all of them are named.
    """
    if expected is not None and len(data) > longest_answer(expected):
        raise UnexpectedReport(
            "packets",
            f"{len(data)} bytes; an answer has at most {longest_answer(expected)}.",
        )
    head, lengths, body_start = _read_head(data, MAX_HEAD if expected is None else MAX_ANSWER_HEAD)
    if expected is not None:
        _check_names(head, lengths, expected)
    packets: dict[str, Packet] = {}
    unknown: list[str] = []
    at = body_start
    for name, length in lengths.items():
        like = None
        if expected is not None:
            like = expected.packets[name].tensors
        try:
            packets[name] = codec.decode(data[at : at + length], known.get(name), like)
        except UnknownMask:
            unknown.append(name)
        except UnexpectedTensors as error:
            raise UnexpectedReport("tensors", f"{name} with wrong tensors: {error}") from None
        at += length
    if unknown:
        raise UnknownMask(
            f"the reader of a message does not know the masks that {', '.join(unknown)} refer to; "
            "send it again in full.",
            tuple(unknown),
        )
    return head, packets


def _check_names(
    head: Mapping[str, Any], lengths: Mapping[str, int], expected: ExpectedReport
) -> None:
    """Refuse an answer with packets other than the expected ones, before any of them is read."""
    wanted: list[str] = []
    # A request for masks has no packets.
    if "lacks" not in head:
        wanted = list(expected.packets)
    if lengths.keys() == set(wanted):
        return
    given = list_some([clean_text(name, 60) for name in lengths]) or "nothing"
    raise UnexpectedReport(
        "packets", f"{given} where its answer must contain {list_some(wanted) or 'nothing'}."
    )


def _read_head(data: bytes, longest: int) -> tuple[dict[str, Any], dict[str, int], int]:
    """Return the header, the lengths of the packets, and where the first one begins."""
    if len(data) < 4:
        raise WireError(
            f"a message of {len(data)} bytes is shorter than its own length field; it was "
            "truncated."
        )
    (head_length,) = struct.unpack_from("<I", data)
    body_start = 4 + head_length
    if head_length > longest or body_start > len(data):
        raise WireError(
            f"a message header of {head_length} bytes is longer than {longest} bytes or than the"
            f" {len(data)} bytes received."
        )
    lengths: dict[str, int] = {}
    named_twice = False
    try:
        head = json.loads(data[4:body_start])
        for name, length in head.pop("packets"):
            named_twice = named_twice or str(name) in lengths
            lengths[str(name)] = int(length)
    # What JSON from an unknown sender can lead to, besides malformed fields: an object that is none
    # (AttributeError), and one that is nested too deep (RecursionError).
    except (*MALFORMED_FIELDS, AttributeError, RecursionError) as error:
        raise WireError(f"malformed message header: {error}.") from None
    if named_twice:
        raise WireError("a message names a packet twice.")
    # A negative length could make the sum right and still read a packet's bytes twice.
    any_negative = min(lengths.values(), default=0) < 0
    if any_negative or sum(lengths.values()) != len(data) - body_start:
        raise WireError(
            "the packets of a message do not add up to its length; it was truncated or altered."
        )
    return head, lengths, body_start


# ---- tasks and reports ---------------------------------------------------------------------------


def write_task(task: Task, codec: Codec, known: KnownMasks = NO_KNOWN_MASKS) -> bytes:
    """Write a task as bytes; ``known`` are the masks that its client knows."""
    return _write(task_head(task), task.send, codec, known)


def read_task(data: bytes, codec: Codec, known: KnownMasks = NO_KNOWN_MASKS) -> Task:
    """Read a task from bytes; ``known`` are the masks that this client knows."""
    head, packets = read(data, codec, known)
    try:
        return Task(
            to=int(head["to"]),
            send=packets,
            settings=dict(head["settings"]),
            verb=str(head["verb"]),
            round=int(head["round"]),
            attempt=int(head.get("attempt", 0)),
            memory=_memory_version(head),
        )
    except MALFORMED_FIELDS as error:
        raise WireError(
            f"the header of a task lacks a field or has a malformed one: {error}."
        ) from None


def write_report(report: Report, codec: Codec, known: KnownMasks = NO_KNOWN_MASKS) -> bytes:
    """Write a report as bytes; ``known`` are the masks that the server knows."""
    return _write(report_head(report), report.give, codec, known)


def read_report(data: bytes, codec: Codec, known: KnownMasks = NO_KNOWN_MASKS) -> Report:
    """Read a report from trusted bytes; ``known`` are the masks that the server knows."""
    head, packets = read(data, codec, known)
    return _make_report(head, packets)


def write_resend_request(request: ResendRequest, codec: Codec) -> bytes:
    """Write a request to send a task again, whole."""
    # "lacks" is part of the format: nodes of other versions send and read it.
    return _write({"of": request.of, "lacks": list(request.packets)}, {}, codec, NO_KNOWN_MASKS)


def read_answer(
    data: bytes, codec: Codec, expected: ExpectedReport, known: KnownMasks = NO_KNOWN_MASKS
) -> Report | ResendRequest:
    """Read a client's answer: a report, or the request to send its task again.

    The client may be malicious, so names, types, shapes and sizes are compared with what is
    ``expected`` before anything is allocated. Arguments and errors are those of :func:`read`.
    """
    head, packets = read(data, codec, known, expected)
    if "lacks" not in head:
        return _make_report(head, packets)
    lacking = head["lacks"]
    is_list = isinstance(lacking, list) and all(isinstance(name, str) for name in lacking)
    if not is_list:
        raise WireError("the header of an answer is malformed: lacks must be a list of names.")
    return ResendRequest(_whole(head, "of"), tuple(lacking))


def _make_report(head: dict[str, Any], packets: dict[str, Packet]) -> Report:
    try:
        metrics = {str(k): float(v) for k, v in dict(head["metrics"]).items()}
        return Report(
            of=_whole(head, "of"),
            give=packets,
            examples=_whole(head, "examples"),
            metrics=metrics,
            memory=_memory_version(head),
        )
    except MALFORMED_FIELDS as error:
        raise WireError(
            f"the header of a report lacks a field or has a malformed one: {error}."
        ) from None


def _whole(head: Mapping[str, Any], field: str) -> int:
    """Return a whole number of a header; 1.9 and true are none."""
    number = head.get(field)
    if type(number) is not int:
        raise WireError(f"the header of an answer has {field} = {shown(number)}, not an integer.")
    return number


def _memory_version(head: dict[str, Any]) -> str | None:
    """Return the version of the client's memory that a header names."""
    version = head.get("memory")
    return None if version is None else str(version)


__getattr__ = find_old_names(__name__)
