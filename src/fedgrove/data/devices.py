"""The clients' devices: a named profile, or a CSV file of one's own; and bandwidths over time.

A profile has a line per client, a trace one for each time that a client's bandwidth changes::

    client,up,down,speed,memory          client,second,up,down
    0,5,40,2.5,1073741824                0,0,5,40
    1,20,100,10,4294967296               0,60,0,0

Clients go by their numbers, or by their names where the data have such (``watch-07``).
Bandwidths are in Mbit/s, speeds in GMAC/s, memories in bytes. A trace's line holds from its second
on, 0 is an outage, and the last line holds for ever. Which of the two a file is, its columns say.
"""

from __future__ import annotations

import csv
import hashlib
import io
import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ..core import REFERENCE_GMACS, ClientInfo
from ..errors import InputError, check, unknown
from . import profile as profiles

PROFILE_COLUMNS = ("client", "up", "down", "speed", "memory")
TRACE_COLUMNS = ("client", "second", "up", "down")
LONGEST_NUMBER = 18
"""Digits of a whole number."""
LONGEST_SHOWN = 40
"""Letters of a wrong cell that are shown."""


D = TypeVar("D")
SLOWEST = 1e-6
FASTEST = 1e9
"""Of bandwidths (Mbit/s) and speeds (GMAC/s) that a file may name."""


class Device(NamedTuple):
    """A line of a profile."""

    up: float
    down: float
    speed: float
    """GMAC/s."""
    memory: int


@dataclass(frozen=True)
class Steps:
    """One client's bandwidth over time: from each second on, Mbit/s up and down."""

    seconds: tuple[float, ...]
    up: tuple[float, ...]
    down: tuple[float, ...]

    def __post_init__(self) -> None:
        begins = bool(self.seconds) and self.seconds[0] == 0
        check(begins, "first second of a trace", self.seconds[:1], "0")
        lasts = self.up[-1] > 0 and self.down[-1] > 0
        check(lasts, "last bandwidth of a trace", (self.up[-1], self.down[-1]), "above 0")


Trace = Mapping[int, Steps]


@dataclass(frozen=True)
class Devices:
    """What devices there are; nothing given: all equal."""

    name: str = "uniform"
    """Of a profile that comes with fedgrove; used where there are no ``lines``."""
    lines: Mapping[int, Device] | None = None
    trace: Trace | None = None
    trace_is_known: bool = False
    """Whether the server knows the first bandwidths of the trace: where no profile says others."""
    profile_file: str = ""
    trace_file: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    """The SHA-256 of each file that was read."""
    lines_by_name: Mapping[str, Device] = field(default_factory=dict)
    """Lines of clients that are named; :meth:`of_clients` numbers them."""
    trace_by_name: Mapping[str, Steps] = field(default_factory=dict)

    def of_clients(self, names: Mapping[int, str]) -> Devices:
        """The same with all lines by number, for clients that may have names.

        A name comes before a number: where clients are called 1, 2, 3, so does the file.
        """
        lines = _by_number(self.lines, self.lines_by_name, names, self.profile_file)
        trace = _by_number(self.trace, self.trace_by_name, names, self.trace_file)
        return replace(self, lines=lines, trace=trace, lines_by_name={}, trace_by_name={})

    def info(self, examples: int, client: int, seed: int) -> ClientInfo:
        """What the server knows of a client."""
        if self.lines is not None:
            device = self.lines[client]
            speed = device.speed / REFERENCE_GMACS
            return ClientInfo(examples, device.up, speed, device.memory, downlink=device.down)
        if self.trace is not None and self.trace_is_known:
            steps = self.trace[client]
            # A trace may begin with an outage, of which the server knows nothing.
            up = next(rate for rate in steps.up if rate > 0)
            down = next(rate for rate in steps.down if rate > 0)
            return ClientInfo(examples, up, downlink=down)
        return profiles.info(self.name, examples, client, seed)

    def check_all_there(self, clients: int) -> None:
        """Refuse files that lack one of the clients 0..clients-1; they may hold more."""
        if self.lines is not None:
            _check_has(f"the profile {self.profile_file}", self.lines, clients)
        if self.trace is not None:
            _check_has(f"the trace {self.trace_file}", self.trace, clients)


def _by_number(
    numbered: Mapping[int, D] | None,
    named: Mapping[str, D],
    names: Mapping[int, str],
    file: str,
) -> dict[int, D] | None:
    """What a file says of clients, by their numbers."""
    if numbered is None:
        return None
    numbers = {name: number for number, name in names.items()}
    strangers = [name for name in named if name not in numbers]
    if strangers:
        there = ", ".join(list(numbers)[:12]) or "numbered from 0"
        raise InputError(
            f"{file} has a line for client '{strangers[0][:LONGEST_SHOWN]}', and the clients are "
            f"{there}; call each as the data do."
        )
    found = {}
    for k, said in numbered.items():
        found[numbers.get(str(k), k)] = said
    for name, said in named.items():
        found[numbers[name]] = said
    return found


def _check_has(file: str, held: Collection[int], clients: int) -> None:
    missing = [client for client in range(clients) if client not in held]
    if missing:
        shown = ", ".join(str(client) for client in missing[:5])
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise InputError(
            f"{file} has no line for client {shown}{more}, and there are {clients} clients, "
            "numbered from 0; add a line for each, or take fewer clients."
        )


def read(profile: str | None = None, trace: str | None = None) -> Devices:
    """The devices that the words ``--profile`` and ``--trace`` describe.

    Either may be a file of either kind; two of one kind are refused.
    """
    given = []
    if profile is not None:
        if not profile.endswith(".csv") and profile not in profiles.NAMES:
            raise unknown("profile", profile, [*profiles.NAMES, "FILE.csv"])
        if profile.endswith(".csv"):
            given.append(_File.read(profile))
    if trace is not None:
        given.append(_File.read(trace))
    of_devices = [file for file in given if not file.is_trace]
    of_times = [file for file in given if file.is_trace]
    for kind, files in (("profiles", of_devices), ("traces", of_times)):
        if len(files) > 1:
            raise InputError(
                f"{files[0].path} and {files[1].path} are both {kind}; give one profile (columns "
                f"{', '.join(PROFILE_COLUMNS)}) and one trace (columns {', '.join(TRACE_COLUMNS)})."
            )
    is_named = profile is not None and not profile.endswith(".csv")
    if is_named and of_devices:
        raise InputError(
            f"--profile is {profile} and {of_devices[0].path} is a profile too; give one of them."
        )
    lines: dict[str, Device] = _profile(of_devices[0]) if of_devices else {}
    steps: dict[str, Steps] = _trace(of_times[0]) if of_times else {}
    return Devices(
        name=profile if is_named and profile is not None else "uniform",
        lines=_numbered(lines) if of_devices else None,
        trace=_numbered(steps) if of_times else None,
        lines_by_name=_named(lines),
        trace_by_name=_named(steps),
        trace_is_known=not is_named and not of_devices,
        profile_file=of_devices[0].path if of_devices else "",
        trace_file=of_times[0].path if of_times else "",
        files={file.path: file.sha256 for file in (*of_devices, *of_times)},
    )


def _numbered(lines: Mapping[str, D]) -> dict[int, D]:
    return {int(client): line for client, line in lines.items() if client.isdecimal()}


def _named(lines: Mapping[str, D]) -> dict[str, D]:
    return {client: line for client, line in lines.items() if not client.isdecimal()}


# ---- files ---------------------------------------------------------------------------------------


class _Line(NamedTuple):
    """A line of a file, and where it stands."""

    place: str
    cells: Mapping[str, str]

    def number(self, column: str, least: float, allowed: str) -> float:
        """A finite number of at least so much."""
        text = self.cells[column]
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value >= least):
            raise self.wrong(column, allowed)
        return value

    def positive(self, column: str, unit: str) -> float:
        """A number above 0, within what any device has: beyond it a round would take for ever."""
        allowed = f"a number above 0, in {unit}, from {SLOWEST:g} to {FASTEST:g}"
        value = self.number(column, 0, allowed)
        if not SLOWEST <= value <= FASTEST:
            raise self.wrong(column, allowed)
        return value

    def whole(self, column: str, least: int) -> int:
        """A whole number of at least so much."""
        text = self.cells[column].strip()
        allowed = f"a whole number of {least} or more"
        is_whole = text.isascii() and text.isdecimal() and len(text) <= LONGEST_NUMBER
        if not is_whole or int(text) < least:
            raise self.wrong(column, allowed)
        return int(text)

    def client(self) -> str:
        """The client's number, without zeros in front, or its name."""
        text = self.cells["client"].strip()
        # What is written like a number must be one that a client can have.
        is_like_a_number = re.fullmatch(r"[+-]?[\d.]*(e[+-]?\d+)?", text) is not None
        return str(self.whole("client", 0)) if is_like_a_number else text

    def wrong(self, column: str, allowed: str) -> InputError:
        """The refusal of a cell."""
        given = self.cells[column][:LONGEST_SHOWN]
        return InputError(f"{self.place}: {column} is '{given}'; it must be {allowed}.")


@dataclass(frozen=True)
class _File:
    """A CSV file whose columns are those of a profile or of a trace."""

    path: str
    sha256: str
    is_trace: bool
    rows: tuple[_Line, ...]

    @classmethod
    def read(cls, path: str) -> _File:
        """Read and check the columns."""
        try:
            data = Path(path).read_bytes()
        except OSError as error:
            raise InputError(
                f"the devices in {path} cannot be read: {error.strerror or error}; give the path "
                "of a CSV file."
            ) from None
        try:
            # With or without the mark that spreadsheets put first.
            text = data.decode("utf-8-sig")
        except UnicodeDecodeError:
            raise InputError(f"{path} is not text; it must be a CSV file in UTF-8.") from None
        rows = csv.reader(io.StringIO(text))
        try:
            head = [name.strip() for name in next(rows, [])]
            is_trace = "second" in head
            _check_columns(path, head, TRACE_COLUMNS if is_trace else PROFILE_COLUMNS)
            lines = tuple(_lines(path, head, rows))
        except csv.Error as error:
            raise InputError(f"{path} is not a CSV file: {error}.") from None
        if not lines:
            raise InputError(f"{path} has no line but its first; it must have one for each client.")
        return cls(path, hashlib.sha256(data).hexdigest(), is_trace, lines)


def _check_columns(path: str, head: list[str], allowed: tuple[str, ...]) -> None:
    if sorted(head) != sorted(allowed):
        raise InputError(
            f"{path} has the columns {', '.join(head) or 'none'}; a profile has "
            f"{', '.join(PROFILE_COLUMNS)} and a trace {', '.join(TRACE_COLUMNS)}: name them in "
            "the first line."
        )


def _lines(path: str, head: list[str], rows: Any) -> Iterator[_Line]:
    """The lines of a csv reader that has read the first one; empty ones are left out."""
    for row in rows:
        if not row:
            continue
        place = f"{path}, line {rows.line_num}"
        if len(row) != len(head):
            raise InputError(
                f"{place}: {len(row)} values; it must have {len(head)}, one for each column "
                f"({', '.join(head)})."
            )
        yield _Line(place, dict(zip(head, row, strict=True)))


def _profile(file: _File) -> dict[str, Device]:
    """A line per client."""
    devices: dict[str, Device] = {}
    for line in file.rows:
        client = line.client()
        if client in devices:
            raise InputError(f"{line.place}: client {client} has a line already; give it one.")
        devices[client] = Device(
            up=line.positive("up", "Mbit/s"),
            down=line.positive("down", "Mbit/s"),
            speed=line.positive("speed", "GMAC/s"),
            memory=line.whole("memory", 1),
        )
    return devices


def _trace(file: _File) -> dict[str, Steps]:
    """Each client's lines, which begin at second 0 and stand in order of time."""
    seconds: dict[str, list[float]] = {}
    up: dict[str, list[float]] = {}
    down: dict[str, list[float]] = {}
    for line in file.rows:
        client = line.client()
        second = line.number("second", 0, "a number of 0 or more")
        before = seconds.setdefault(client, [])
        if not before and second > 0:
            raise InputError(
                f"{line.place}: client {client} begins at second {second:g}; its first line must "
                "be of second 0, or nobody knows its bandwidth before."
            )
        if before and second <= before[-1]:
            raise InputError(
                f"{line.place}: client {client} is at second {second:g} after second "
                f"{before[-1]:g}; put its lines in order of time, each second once."
            )
        before.append(second)
        allowed = "a number of 0 (an outage) or more, in Mbit/s"
        up.setdefault(client, []).append(line.number("up", 0, allowed))
        down.setdefault(client, []).append(line.number("down", 0, allowed))
    trace = {}
    for client in seconds:
        if not (up[client][-1] > 0 and down[client][-1] > 0):
            raise InputError(
                f"the trace {file.path} ends with an outage of client {client}, and its last line "
                "holds for ever; add a line with bandwidths above 0."
            )
        trace[client] = Steps(tuple(seconds[client]), tuple(up[client]), tuple(down[client]))
    return trace
