"""Tasks and reports as bytes: a JSON header with the lengths, then each packet as encoded.

``length of the header (4 bytes, little-endian) | header | packet | packet ...``; the header holds
verb, client, round, numbers, the version of what the client remembers, and ``packets: [[name,
length], ...]``. A client that cannot read a task because it does not hold a mask answers with
:class:`Lacks`, and is sent the task again, whole.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..core import Packet, Report, Task
from ..errors import NotHeld, WireError
from .codec import Codec, Known

Knows = Mapping[str, Known | None]
"""What a receiver holds of earlier messages, by packet."""
NOTHING: Knows = {}
Cost = Mapping[str, int]
MAX_HEAD = 1 << 20
"""The longest header a reader accepts, in bytes."""


@dataclass(frozen=True)
class Lacks:
    """A client's answer to a task that it cannot read: it lacks the masks of these packets."""

    of: int
    packets: tuple[str, ...]


def task_head(task: Task) -> dict[str, Any]:
    """The header of a task, without the lengths of its packets."""
    head: dict[str, Any] = {"to": task.to, "verb": task.verb, "round": task.round}
    # What most tasks do not have is left out.
    if task.attempt:
        head["attempt"] = task.attempt
    if task.memory is not None:
        head["memory"] = task.memory
    return head | {"settings": dict(task.settings)}


def report_head(report: Report) -> dict[str, Any]:
    """The header of a report, without the lengths of its packets."""
    head: dict[str, Any] = {"of": report.of, "examples": report.examples}
    if report.memory is not None:
        head["memory"] = report.memory
    return head | {"metrics": dict(report.metrics)}


# ---- writing -------------------------------------------------------------------------------------


def measure(
    head: dict[str, Any], packets: Mapping[str, Packet], cost: Callable[[str, Packet], Cost]
) -> dict[str, int]:
    """The length of a message by part of the cost, without joining its bytes."""
    # The lengths stand in the header, so the packets are measured before it. "header" comes first
    # in the result, whatever the codec counts.
    total = {"header": 0}
    lengths: dict[str, int] = {}
    for name, packet in packets.items():
        parts = cost(name, packet)
        lengths[name] = sum(parts.values())
        for part, n in parts.items():
            total[part] = total.get(part, 0) + n
    total["header"] += 4 + len(_head_bytes(head, lengths))
    return total


def write(
    head: dict[str, Any], packets: Mapping[str, Packet], codec: Codec, known: Knows = NOTHING
) -> bytes:
    """A whole message; ``known`` is what its receiver holds, by packet."""
    blobs: dict[str, bytes] = {}
    for name, packet in packets.items():
        blobs[name] = codec.encode(packet, known.get(name)).data
    return b"".join([write_head(head, blobs), *blobs.values()])


def write_head(head: dict[str, Any], packets: Mapping[str, bytes]) -> bytes:
    """The first part of a message; the encoded packets that follow it are ``packets``."""
    lengths = {name: len(blob) for name, blob in packets.items()}
    head_bytes = _head_bytes(head, lengths)
    return struct.pack("<I", len(head_bytes)) + head_bytes


# Made once: json.dumps makes a new encoder at each call that sets separators.
_write_json = json.JSONEncoder(separators=(",", ":")).encode


def _head_bytes(head: dict[str, Any], lengths: Mapping[str, int]) -> bytes:
    complete = head | {"packets": list(lengths.items())}
    return _write_json(complete).encode()


# ---- reading -------------------------------------------------------------------------------------


def read(
    data: bytes, codec: Codec, known: Knows = NOTHING
) -> tuple[dict[str, Any], dict[str, Packet]]:
    """The header and the packets of a message; every length is checked before it is used.

    Raises :class:`~fedgrove.errors.NotHeld` with the names of all packets that refer to a mask
    which is not ``known``.
    """
    if len(data) < 4:
        raise WireError(
            f"a message of {len(data)} bytes is shorter than its own length field; it was cut"
            " short."
        )
    (head_length,) = struct.unpack_from("<I", data)
    body_start = 4 + head_length
    if head_length > MAX_HEAD or body_start > len(data):
        raise WireError(
            f"a message header of {head_length} bytes does not fit in the {len(data)} bytes"
            " received."
        )
    lengths: list[tuple[str, int]] = []
    try:
        head = json.loads(data[4:body_start])
        for name, length in head.pop("packets"):
            lengths.append((str(name), int(length)))
    # What a stranger's JSON can lead to: text that is no JSON (ValueError), nested too deep
    # (RecursionError), no object (AttributeError, TypeError), no "packets" (KeyError), an infinite
    # length (OverflowError).
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
        OverflowError,
    ) as error:
        raise WireError(f"malformed message header: {error}.") from None

    seen: set[str] = set()
    total = 0
    any_negative = False
    for name, length in lengths:
        if name in seen:
            raise WireError("a message names a packet twice.")
        seen.add(name)
        total += length
        any_negative = any_negative or length < 0
    # A negative length could make the sum right and still read a packet's bytes twice.
    if any_negative or total != len(data) - body_start:
        raise WireError(
            "the packets of a message do not add up to its length; it was cut short or altered."
        )

    packets: dict[str, Packet] = {}
    lacking: list[str] = []
    at = body_start
    for name, length in lengths:
        try:
            packets[name] = codec.decode(data[at : at + length], known.get(name))
        except NotHeld:
            lacking.append(name)
        at += length
    if lacking:
        raise NotHeld(
            f"the reader of a message lacks the masks that {', '.join(lacking)} refer to; send it"
            " again, whole.",
            tuple(lacking),
        )
    return head, packets


# ---- tasks and reports ---------------------------------------------------------------------------


def write_task(task: Task, codec: Codec, known: Knows = NOTHING) -> bytes:
    """A task as bytes."""
    return write(task_head(task), task.send, codec, known)


def read_task(data: bytes, codec: Codec, known: Knows = NOTHING) -> Task:
    """A task from bytes."""
    head, packets = read(data, codec, known)
    try:
        return Task(
            to=int(head["to"]),
            send=packets,
            settings=dict(head["settings"]),
            verb=str(head["verb"]),
            round=int(head["round"]),
            attempt=int(head.get("attempt", 0)),
            memory=_version(head),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise WireError(
            f"the header of a task lacks a field or has a malformed one: {error}."
        ) from None


def write_report(report: Report, codec: Codec, known: Knows = NOTHING) -> bytes:
    """A report as bytes."""
    return write(report_head(report), report.give, codec, known)


def read_report(data: bytes, codec: Codec, known: Knows = NOTHING) -> Report:
    """A report from bytes."""
    head, packets = read(data, codec, known)
    return _report(head, packets)


def write_lacks(lacks: Lacks, codec: Codec) -> bytes:
    """What a client lacks, as bytes."""
    return write({"of": lacks.of, "lacks": list(lacks.packets)}, {}, codec)


def read_answer(data: bytes, codec: Codec, known: Knows = NOTHING) -> Report | Lacks:
    """What a client answers: a report, or what it lacks to read its task."""
    head, packets = read(data, codec, known)
    if "lacks" not in head:
        return _report(head, packets)
    try:
        return Lacks(int(head["of"]), tuple(str(name) for name in head["lacks"]))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise WireError(f"the header of an answer is malformed: {error}.") from None


def _report(head: dict[str, Any], packets: dict[str, Packet]) -> Report:
    try:
        metrics = {str(k): float(v) for k, v in dict(head["metrics"]).items()}
        return Report(
            of=int(head["of"]),
            give=packets,
            examples=int(head["examples"]),
            metrics=metrics,
            memory=_version(head),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise WireError(
            f"the header of a report lacks a field or has a malformed one: {error}."
        ) from None


def _version(head: dict[str, Any]) -> str | None:
    """The version of a client's memory, as a header names it."""
    given = head.get("memory")
    return None if given is None else str(given)
