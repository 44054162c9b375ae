"""Tasks and reports as bytes: a JSON head with the lengths, then each packet as its codec writes it.

``length of the head (4 bytes, little-endian) | head | packet | packet ...``; the head names verb, client, round,
numbers, and ``packets: [[name, length], ...]``.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from typing import Any

from ..core import Packet, Report, Task
from ..errors import WireError
from .codec import Codec, Known

Knows = Mapping[str, Known | None]
"""What a receiver holds of earlier messages, by packet."""
NOTHING: Knows = {}
Cost = Mapping[str, int]
MAX_HEAD = 1 << 20


def task_head(task: Task) -> dict[str, Any]:
    """What a task says beside its packets."""
    return {"to": task.to, "verb": task.verb, "round": task.round, "settings": dict(task.settings)}


def report_head(report: Report) -> dict[str, Any]:
    """What a report says beside its packets."""
    return {"of": report.of, "examples": report.examples, "metrics": dict(report.metrics)}


def measure(
    head: dict[str, Any], packets: Mapping[str, Packet], cost: Callable[[str, Packet], Cost]
) -> dict[str, int]:
    """The length of a message by part of the cost, without joining its bytes."""
    costs = {name: cost(name, packet) for name, packet in packets.items()}
    total = {"header": 4 + len(_head(head, {name: sum(c.values()) for name, c in costs.items()}))}
    for parts in costs.values():
        for part, n in parts.items():
            total[part] = total.get(part, 0) + n
    return total


def write(
    head: dict[str, Any], packets: Mapping[str, Packet], codec: Codec, known: Knows = NOTHING
) -> bytes:
    """A whole message; ``known`` is what its receiver holds, by packet."""
    blobs = {name: codec.encode(packet, known.get(name)).data for name, packet in packets.items()}
    top = _head(head, {name: len(blob) for name, blob in blobs.items()})
    return b"".join([struct.pack("<I", len(top)), top, *blobs.values()])


def _head(head: dict[str, Any], lengths: Mapping[str, int]) -> bytes:
    return json.dumps(head | {"packets": list(lengths.items())}, separators=(",", ":")).encode()


def read(
    data: bytes, codec: Codec, known: Knows = NOTHING
) -> tuple[dict[str, Any], dict[str, Packet]]:
    """The head and the packets of a message; every length is checked before it is used."""
    if len(data) < 4:
        raise WireError(
            f"a message of {len(data)} bytes is shorter than its own length field; it was cut short."
        )
    (n,) = struct.unpack_from("<I", data)
    if n > min(MAX_HEAD, len(data) - 4):
        raise WireError(
            f"a message head of {n} bytes does not fit in the {len(data)} bytes received."
        )
    try:
        head = json.loads(data[4 : 4 + n])
        lengths = [(str(name), int(size)) for name, size in head.pop("packets")]
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
        OverflowError,
    ) as error:
        raise WireError(f"a message head is not what it should be: {error}.") from None
    if len({name for name, _ in lengths}) < len(lengths):
        raise WireError("a message names a packet twice.")
    if (
        any(size < 0 for _, size in lengths)
        or sum(size for _, size in lengths) != len(data) - 4 - n
    ):
        raise WireError(
            "the packets of a message do not add up to its length; it was cut short or altered."
        )
    packets, at = {}, 4 + n
    for name, size in lengths:
        packets[name] = codec.decode(data[at : at + size], known.get(name))
        at += size
    return head, packets


def write_task(task: Task, codec: Codec, known: Knows = NOTHING) -> bytes:
    """A task as bytes."""
    return write(task_head(task), task.send, codec, known)


def read_task(data: bytes, codec: Codec, known: Knows = NOTHING) -> Task:
    """A task from bytes."""
    head, packets = read(data, codec, known)
    try:
        return Task(
            int(head["to"]), packets, dict(head["settings"]), str(head["verb"]), int(head["round"])
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise WireError(f"a task lacks or garbles {error}.") from None


def write_report(report: Report, codec: Codec, known: Knows = NOTHING) -> bytes:
    """A report as bytes."""
    return write(report_head(report), report.give, codec, known)


def read_report(data: bytes, codec: Codec, known: Knows = NOTHING) -> Report:
    """A report from bytes."""
    head, packets = read(data, codec, known)
    try:
        metrics = {str(k): float(v) for k, v in dict(head["metrics"]).items()}
        return Report(int(head["of"]), packets, int(head["examples"]), metrics)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise WireError(f"a report lacks or garbles {error}.") from None
