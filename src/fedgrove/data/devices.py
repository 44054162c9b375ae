"""The clients' devices: a named profile, or a CSV file; and bandwidths that change over time.

A profile file has one line per client, a trace one line for each change of a client's bandwidth::

    client,up,down,speed,memory          client,second,up,down
    0,5,40,2.5,1073741824                0,0,5,40
    1,20,100,10,4294967296               0,60,0,0

Clients are given by their numbers, or by their names if the data have names (``watch-07``).
Bandwidths are in Mbit/s, speeds in GMAC/s, memory is in bytes. A line of a trace is valid from its
second on, 0 is an outage, and the last line stays valid. The columns tell a profile from a trace.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from ..core import REFERENCE_GMACS, ClientInfo
from ..errors import InputError, check, check_has_end, list_some, unknown
from ..renamed import find_old_names
from ..seeds import numpy_rng

if TYPE_CHECKING:
    import pandas as pd

PROFILES = ("adfedwcp", "phones", "uniform")
"""The profiles that come with fedgrove."""
TIERS = (
    # An old phone, a common one, a new one.
    (0.3, 5.0, 0.25, 1 << 28),
    (0.4, 20.0, 0.5, 1 << 30),
    (0.3, 100.0, 1.0, 1 << 32),
)
"""Share of clients, bandwidth, speed and memory of each tier of the profile phones: round numbers
of ours, not a survey."""
PROFILE_COLUMNS = ("client", "up", "down", "speed", "memory")
TRACE_COLUMNS = ("client", "second", "up", "down")
SLOWEST = 1e-6
FASTEST = 1e9
"""The range of bandwidths (Mbit/s) and speeds (GMAC/s) in a file. Beyond it a round would take for
ever."""
MAX_SHOWN = 40
"""The number of letters of a wrong cell that a message shows."""

D = TypeVar("D")


class Device(NamedTuple):
    """A line of a profile."""

    up: float
    down: float
    speed: float
    """GMAC/s."""
    memory: int


@dataclass(frozen=True)
class Steps:
    """The bandwidth of one client over time: from each second on, Mbit/s up and down."""

    seconds: tuple[float, ...]
    up: tuple[float, ...]
    down: tuple[float, ...]

    def __post_init__(self) -> None:
        begins_at_0 = bool(self.seconds) and self.seconds[0] == 0
        check(begins_at_0, "first second of a trace", self.seconds[:1], "0")
        ends_connected = self.up[-1] > 0 and self.down[-1] > 0
        last = (self.up[-1], self.down[-1])
        check(ends_connected, "last bandwidth of a trace", last, "above 0")

    def at(self, second: float) -> tuple[float, float]:
        """Return the Mbit/s up and down that a server knows of a device in a second of the trace.

        In an outage these are the bandwidths before it, or after it if the trace begins with one.

        >>> steps = Steps((0.0, 60.0, 90.0), up=(5.0, 0.0, 1.0), down=(40.0, 0.0, 4.0))
        >>> steps.at(59.9), steps.at(60.0), steps.at(90.0)
        ((5.0, 40.0), (5.0, 40.0), (1.0, 4.0))
        """
        step = bisect_right(self.seconds, second) - 1
        return _last_above_0(self.up, step), _last_above_0(self.down, step)


def _last_above_0(rates: Sequence[float], step: int) -> float:
    """Return the last rate above 0 up to a step of a trace, or else the first one behind it."""
    for rate in reversed(rates[: step + 1]):
        if rate > 0:
            return rate
    return next(rate for rate in rates if rate > 0)


BandwidthTraces = Mapping[int, Steps]


def draw_device(profile: str, examples: int, client: int, seed: int) -> ClientInfo:
    """Return the device of one client in a named profile; it depends on seed and client alone.

    `uniform`: all equal. `adfedwcp`: bandwidth ~ N(52.5, 15.83²), rounded, clipped to 5..100.
    `phones`: three tiers.

    Args:
        profile: The name of the profile.
        examples: The client's number of training examples.
        client: The client's number.
        seed: The seed of the run.

    Raises:
        InputError: There is no such profile.

    >>> draw_device("uniform", 7, client=0, seed=0)
    ClientInfo(examples=7, bandwidth=52.5, speed=1.0, memory=1073741824, task='', downlink=None)
    """
    rng = numpy_rng(seed, "profile", client)
    match profile:
        case "uniform":
            return ClientInfo(examples)
        case "adfedwcp":
            drawn = round(rng.normal(52.5, 15.83))
            return ClientInfo(examples, bandwidth=float(min(max(drawn, 5), 100)))
        case "phones":
            tier = rng.choice(len(TIERS), p=[share for share, *_ in TIERS])
            _, bandwidth, speed, memory = TIERS[tier]
            return ClientInfo(examples, bandwidth, speed, memory)
    raise unknown("profile", profile, PROFILES)


@dataclass(frozen=True)
class Devices:
    """The devices of all clients; by default all are equal.

    Args:
        name: The named profile; used if there are no ``lines``.
        lines: The lines of a profile file, by the number or the name of the client.
        trace: The bandwidths of a trace file, by the number or the name of the client.
        trace_is_known: Whether the server knows the first bandwidths of the trace: if no profile
            gives others.
        profile_file: The path of the profile file.
        trace_file: The path of the trace file.
        files: The SHA-256 of each file.
    """

    name: str = "uniform"
    lines: Mapping[int | str, Device] | None = None
    trace: Mapping[int | str, Steps] | None = None
    trace_is_known: bool = False
    profile_file: str = ""
    trace_file: str = ""
    files: Mapping[str, str] = field(default_factory=dict)

    def number_clients(self, names: Mapping[int, str]) -> Devices:
        """Replace the names of clients in a device file by their numbers.

        A name comes before a number: if clients are called 1, 2, 3, so are they in the file.

        Args:
            names: The names of the clients by number; empty if they have none.

        Raises:
            InputError: A file has a name that no client has.
        """
        return replace(
            self,
            lines=_number_keys(self.lines, names, self.profile_file),
            trace=_number_keys(self.trace, names, self.trace_file),
        )

    @property
    def numbered_trace(self) -> BandwidthTraces | None:
        """The trace by numbers, after :meth:`number_clients`."""
        if self.trace is None:
            return None
        return {int(client): steps for client, steps in self.trace.items()}

    def info(self, examples: int, client: int, seed: int) -> ClientInfo:
        """Return the device that the server knows of a client, with its number of examples."""
        if self.lines is not None:
            device = self.lines[client]
            speed = device.speed / REFERENCE_GMACS
            return ClientInfo(examples, device.up, speed, device.memory, downlink=device.down)
        if self.trace is not None and self.trace_is_known:
            up, down = self.trace[client].at(0.0)
            return ClientInfo(examples, up, downlink=down)
        return draw_device(self.name, examples, client, seed)

    def check_clients(self, clients: int) -> None:
        """Refuse device files that lack one of the clients 0..clients-1; they may have more."""
        if self.lines is not None:
            _check_has_clients(f"the profile {self.profile_file}", self.lines, clients)
        if self.trace is not None:
            _check_has_clients(f"the trace {self.trace_file}", self.trace, clients)


def _number_keys(
    lines: Mapping[int | str, D] | None, names: Mapping[int, str], file: str
) -> dict[int | str, D] | None:
    if lines is None:
        return None
    numbers = {name: number for number, name in names.items()}
    found: dict[int | str, D] = {}
    for client, line in lines.items():
        if str(client) in numbers:
            found[numbers[str(client)]] = line
        elif isinstance(client, int):
            found[client] = line
        else:
            known = ", ".join(list(numbers)[:12]) or "numbered from 0"
            raise InputError(
                f"{file} has a line for client '{client[:MAX_SHOWN]}', and the clients are "
                f"{known}; use the names in the data."
            )
    return found


def _check_has_clients(file: str, lines: Collection[int | str], clients: int) -> None:
    missing = [str(client) for client in range(clients) if client not in lines]
    if missing:
        raise InputError(
            f"{file} has no line for client {list_some(missing)}, and there are "
            f"{clients} clients, numbered from 0; add a line for each, or use fewer clients."
        )


# ---- reading files -------------------------------------------------------------------------------


def read_devices(profile: str | None = None, trace: str | None = None) -> Devices:
    """Read the devices of the options ``--profile`` and ``--trace``.

    Args:
        profile: A named profile, or a CSV file of either kind.
        trace: A CSV file of either kind.

    Raises:
        InputError: A file cannot be used, or both are of the same kind.
    """
    is_file = profile is not None and profile.endswith(".csv")
    is_named = profile is not None and not is_file
    if is_named and profile not in PROFILES:
        raise unknown("profile", str(profile), [*PROFILES, "FILE.csv"])
    paths = [path for path in (profile if is_file else None, trace) if path is not None]
    profiles: dict[str, pd.DataFrame] = {}
    traces: dict[str, pd.DataFrame] = {}
    for path in paths:
        frame = _read_file(path)
        found = traces if "second" in frame else profiles
        if found:
            kind = "traces" if found is traces else "profiles"
            raise InputError(
                f"{next(iter(found))} and {path} are both {kind}; give one profile (columns "
                f"{', '.join(PROFILE_COLUMNS)}) and one trace (columns {', '.join(TRACE_COLUMNS)})."
            )
        found[path] = frame
    if is_named and profiles:
        raise InputError(
            f"--profile is {profile} and {next(iter(profiles))} is a profile too; give one of them."
        )
    devices = Devices(
        name=str(profile) if is_named else "uniform",
        trace_is_known=not is_named and not profiles,
        files={path: hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in paths},
    )
    for path, frame in profiles.items():
        devices = replace(devices, lines=_read_profile(path, frame), profile_file=path)
    for path, frame in traces.items():
        devices = replace(devices, trace=_read_trace(path, frame), trace_file=path)
    return devices


def _read_file(path: str) -> pd.DataFrame:
    """Read a CSV file as text and check its columns; the index is the line in the file."""
    # Imported here because pandas takes half a second, and most runs have no files of devices.
    from .csv_files import read_csv

    check_has_end("a file of devices", Path(path))
    try:
        texts = read_csv(Path(path), path, all_text=True).frame
        frame = texts.fillna("").apply(lambda column: column.str.strip())
    except OSError as error:
        raise InputError(
            f"the devices in {path} cannot be read: {error.strerror or error}; give the path of a "
            "CSV file."
        ) from None
    columns = list(map(str, frame.columns))
    allowed = TRACE_COLUMNS if "second" in columns else PROFILE_COLUMNS
    if sorted(columns) != sorted(allowed):
        raise InputError(
            f"{path} has the columns {', '.join(columns) or 'none'}; a profile has "
            f"{', '.join(PROFILE_COLUMNS)} and a trace {', '.join(TRACE_COLUMNS)}: name them in "
            "the first line."
        )
    if frame.empty:
        raise InputError(f"{path} has only its first line; it must have a line for each client.")
    return frame


def _refuse_cells(
    path: str, frame: pd.DataFrame, column: str, is_valid: pd.Series, allowed: str
) -> None:
    """Refuse the first cell of a column that is not valid."""
    if is_valid.all():
        return
    line = is_valid.idxmin()
    given = frame.loc[line, column][:MAX_SHOWN]
    raise InputError(f"{path}, line {line}: {column} is '{given}'; it must be {allowed}.")


def _read_numbers(
    path: str, frame: pd.DataFrame, column: str, least: float, most: float, allowed: str
) -> pd.Series:
    """Read a column of finite numbers in a range."""
    import pandas as pd

    values = pd.to_numeric(frame[column], errors="coerce").astype(float)
    # NaN, of cells that are not numbers, compares as false.
    is_valid = (values >= least) & (values <= most) & np.isfinite(values)
    _refuse_cells(path, frame, column, is_valid, allowed)
    return values


def _read_whole_numbers(path: str, frame: pd.DataFrame, column: str, least: int) -> pd.Series:
    is_whole = frame[column].str.fullmatch(r"[0-9]{1,18}")
    allowed = f"a whole number of {least} or more"
    _refuse_cells(path, frame, column, is_whole, allowed)
    values = frame[column].map(int)
    _refuse_cells(path, frame, column, values >= least, allowed)
    return values


def _read_clients(path: str, frame: pd.DataFrame) -> pd.Series:
    """Read the client of each line: a number, or a name."""
    # A cell that looks like a number must be one that a client can have.
    like_number = frame["client"].str.fullmatch(r"[+-]?[\d.]*(e[+-]?\d+)?")
    numbers = _read_whole_numbers(path, frame[like_number], "client", 0)
    clients = frame["client"].astype(object)
    clients[numbers.index] = numbers
    return clients


def _read_profile(path: str, frame: pd.DataFrame) -> dict[int | str, Device]:
    """Read one device per client."""
    clients = _read_clients(path, frame)
    speeds = {}
    for column, unit in (("up", "Mbit/s"), ("down", "Mbit/s"), ("speed", "GMAC/s")):
        allowed = f"a number above 0, in {unit}, from {SLOWEST:g} to {FASTEST:g}"
        speeds[column] = _read_numbers(path, frame, column, SLOWEST, FASTEST, allowed)
    memory = _read_whole_numbers(path, frame, "memory", 1)
    is_repeated = clients.duplicated()
    if is_repeated.any():
        line = is_repeated.idxmax()
        raise InputError(
            f"{path}, line {line}: client {clients[line]} already has a line; give it only one."
        )
    columns = (speeds["up"], speeds["down"], speeds["speed"], memory)
    lines = zip(*(column.tolist() for column in columns), strict=True)
    return dict(zip(clients, map(Device._make, lines), strict=True))


def _read_trace(path: str, frame: pd.DataFrame) -> dict[int | str, Steps]:
    """Read the lines of each client, which begin at second 0 and are in order of time."""
    clients = _read_clients(path, frame)
    second = _read_numbers(path, frame, "second", 0, np.inf, "a number of 0 or more")
    allowed = "a number of 0 (an outage) or more, in Mbit/s"
    up = _read_numbers(path, frame, "up", 0, np.inf, allowed)
    down = _read_numbers(path, frame, "down", 0, np.inf, allowed)
    trace: dict[int | str, Steps] = {}
    for client, lines in frame.groupby(clients, sort=False).groups.items():
        _check_times(f"client {client}", path, second[lines])
        if not (up[lines[-1]] > 0 and down[lines[-1]] > 0):
            raise InputError(
                f"the trace {path} ends with an outage of client {client}, and its last line "
                "applies until the end; add a line with bandwidths above 0."
            )
        trace[client] = Steps(
            tuple(second[lines].tolist()), tuple(up[lines].tolist()), tuple(down[lines].tolist())
        )
    return trace


def _check_times(client: str, path: str, second: pd.Series) -> None:
    if second.iloc[0] > 0:
        raise InputError(
            f"{path}, line {second.index[0]}: {client} begins at second {second.iloc[0]:g}; its "
            "first line must have second 0, or its bandwidth before is not known."
        )
    is_later = second.diff().iloc[1:] > 0
    if not is_later.all():
        line = is_later.idxmin()
        before = second.shift()[line]
        raise InputError(
            f"{path}, line {line}: {client} is at second {second[line]:g} after second "
            f"{before:g}; put its lines in order of time, each second once."
        )


__getattr__ = find_old_names(__name__)
