"""``fedgrove doctor --deploy``: check a running server as somebody without a key would meet it.

What runs is read from /proc: which processes use the folder of keys, where they listen, and with
which umask. Each address is then tried with ``ca.crt`` alone. The requests only list nodes or are
refused: nothing is started, registered or changed.
"""

from __future__ import annotations

import http.client
import os
import re
import shlex
import ssl
import stat
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from http import HTTPStatus
from ipaddress import IPv4Address, IPv6Address, ip_address
from itertools import chain
from pathlib import Path
from typing import Any

from ..errors import InputError, list_some
from .server import TIMEOUT

PROC = Path("/proc")
SECONDS = 10.0
"""How long an address may take to answer."""
SOON = 30
"""Certificates that end within this many days are a problem."""
CONTROL = "/v1/control/list-nodes"
"""A request of those who start runs and register nodes; Flower protects all of them alike."""
FLEET = "/v1/fleet/activate-node"
"""A request of nodes; without a key it must be refused."""
PRIVATE = 0o077
"""The rights of group and others: nobody else may have any."""
DEPTH = 3
"""Run folders are looked for this many folders below the one in which a SuperLink was started."""


@dataclass(frozen=True)
class Check:
    """One check: what was checked, whether it is right, what was found, and what to do."""

    name: str
    is_right: bool
    found: str
    advice: str = ""


@dataclass(frozen=True)
class Program:
    """A running process that belongs to the server."""

    kind: str
    """``SuperLink``, ``proxy``, ``nginx`` or ``SuperNode``."""
    pid: int
    words: tuple[str, ...]
    """Its command line."""

    @property
    def folder(self) -> Path:
        """The folder in which it was started."""
        return Path(os.readlink(PROC / str(self.pid) / "cwd"))

    @property
    def environment(self) -> dict[str, str]:
        """The variables that it was started with."""
        text = (PROC / str(self.pid) / "environ").read_bytes().decode(errors="replace")
        return dict(line.split("=", 1) for line in text.split("\0") if "=" in line)

    def option(self, name: str) -> str | None:
        """Return the value of an option of its command line; None if it was not given."""
        for place, word in enumerate(self.words):
            if word == name and place + 1 < len(self.words):
                return self.words[place + 1]
            if word.startswith(f"{name}="):
                return word.partition("=")[2]
        return None

    def path(self, name: str) -> Path:
        """Return a path that it was given, as seen from the folder in which it was started."""
        return (self.folder / name).resolve()


def check_server(keys: str | Path) -> list[Check]:
    """Check the server that uses a folder of keys, on this machine.

    Args:
        keys: The folder with server.crt, server.key and ca.crt, as ``fedgrove keys`` makes it.

    Raises:
        InputError: The folder lacks a file, or this system has no /proc.
    """
    folder = Path(keys)
    for name in ("server.crt", "server.key", "ca.crt"):
        if not (folder / name).is_file():
            raise InputError(
                f"{folder / name} does not exist; give the folder of keys that the SuperLink uses."
            )
    if not (PROC / "self" / "net").exists():
        raise InputError("a running server is checked through /proc, which only Linux has.")
    programs = _find_programs(folder)
    checks = [_check_runs(folder, programs)]
    for program in programs:
        checks.extend(_check_program(program, folder))
    checks.extend(_check_certificates(folder))
    checks.extend(_check_modes(folder, programs))
    checks.append(check_timeouts(_find_flower_homes(programs)))
    return checks


# ---- what runs -----------------------------------------------------------------------------------


def _find_programs(folder: Path) -> list[Program]:
    """Find what uses the folder: SuperLink, proxy, nodes; all of nginx; SuperLinks without TLS."""
    here = os.stat(PROC / "self" / "ns" / "net").st_ino
    found = []
    for place in PROC.iterdir():
        # A process may end while it is looked at, or belong to another user.
        with suppress(OSError, ValueError):
            words = tuple((place / "cmdline").read_bytes().decode(errors="replace").split("\0"))
            is_reachable = os.stat(place / "ns" / "net").st_ino == here
            kind = _kind_of(words)
            if not kind or not is_reachable:
                continue
            program = Program(kind, int(place.name), words)
            if kind == "nginx" or _uses(program, folder.resolve()):
                found.append(program)
    order = ("SuperLink", "proxy", "nginx", "SuperNode")
    return sorted(found, key=lambda program: (order.index(program.kind), program.pid))


def _kind_of(words: Sequence[str]) -> str:
    """Return which program of a deployment a command line starts; empty if none."""
    if words[0].startswith("nginx: master"):
        return "nginx"
    # Programs of Python are called as `python flower-superlink ...` or `python -m fedgrove ...`.
    names = [Path(word).name for word in words[:3]]
    if "flower-superlink" in names:
        return "SuperLink"
    if "flower-supernode" in names:
        return "SuperNode"
    if "fedgrove" in names and "proxy" in words[:4]:
        return "proxy"
    return ""


def _uses(program: Program, folder: Path) -> bool:
    """Whether a program was started with the certificates of a folder."""
    if program.kind == "proxy":
        place = program.words.index("proxy") + 1
        return program.path(program.words[place]) == folder
    if program.kind == "SuperLink":
        certificate = program.option("--ssl-certfile")
        # One without a certificate could be anybody's; it is too open to be left out.
        return certificate is None or program.path(certificate).parent == folder
    certificate = program.option("--root-certificates")
    if certificate is None:
        return False
    # A node on this machine may have a copy.
    return program.path(certificate).read_bytes() == (folder / "ca.crt").read_bytes()


def _check_runs(folder: Path, programs: Sequence[Program]) -> Check:
    """Check that a SuperLink that uses a folder of keys is running."""
    running = [f"{program.kind} ({program.pid})" for program in programs]
    is_there = False
    for program in programs:
        has_certificate = program.option("--ssl-certfile") is not None
        is_there = is_there or (program.kind == "SuperLink" and has_certificate)
    return Check(
        "running",
        is_there,
        list_some(running, most=20) if running else "nothing",
        f"start a SuperLink with the certificates of {folder}, as fedgrove keys prints it; if it "
        "runs, repeat this command as its user or as root",
    )


def _listening(program: Program) -> list[tuple[IPv4Address | IPv6Address, int]]:
    """Return the addresses and ports on which a process and its children listen."""
    inodes = set()
    for pid in _family(program.pid):
        with suppress(OSError):
            for link in (PROC / str(pid) / "fd").iterdir():
                with suppress(OSError):
                    inodes.add(os.readlink(link))
    found = set()
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in (PROC / str(program.pid) / "net" / table).read_text().splitlines()[1:]:
                cells = line.split()
                # 0A: the socket waits for connections.
                if cells[3] == "0A" and f"socket:[{cells[9]}]" in inodes:
                    found.add(_address(cells[1]))
    return sorted(found, key=str)


def _family(pid: int) -> Iterator[int]:
    """Yield a process and all that it has started."""
    yield pid
    with suppress(OSError):
        for task in (PROC / str(pid) / "task").iterdir():
            for child in (task / "children").read_text().split():
                yield from _family(int(child))


def _address(text: str) -> tuple[IPv4Address | IPv6Address, int]:
    """Read an address of /proc/net/tcp: words of four bytes, each in this machine's order.

    >>> _address("0100007F:1F40")
    (IPv4Address('127.0.0.1'), 8000)
    """
    host, _, port = text.partition(":")
    packed = b"".join(bytes.fromhex(host[i : i + 8])[::-1] for i in range(0, len(host), 8))
    return ip_address(packed), int(port, 16)


# ---- what a stranger can do ----------------------------------------------------------------------


def _check_program(program: Program, folder: Path) -> Iterator[Check]:
    """Check one program of a deployment: its addresses, its umask and its files."""
    if program.kind in ("SuperLink", "proxy", "nginx"):
        for address, port in _listening(program):
            yield from _check_address(program, folder, address, port)
    if program.kind == "nginx":
        # It writes nothing that is secret.
        return
    umask = _read_umask(program.pid)
    yield Check(
        f"{program.kind}: umask",
        umask & PRIVATE == PRIVATE,
        f"{umask:03o}",
        "start it after `umask 077` (systemd: UMask=0077): other users can read the files that it "
        "writes",
    )


def _read_umask(pid: int) -> int:
    found = re.search(r"^Umask:\s*(\d+)", (PROC / str(pid) / "status").read_text(), re.MULTILINE)
    return int(found[1], 8) if found else 0


def _check_address(
    program: Program, folder: Path, address: IPv4Address | IPv6Address, port: int
) -> Iterator[Check]:
    """Check one address with ca.crt and without a key."""
    shown = f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"
    control, is_encrypted = _ask(address, port, folder, CONTROL)
    fleet, _ = _ask(address, port, folder, FLEET)
    if control is None and program.kind != "SuperLink":
        # Another site of nginx, or no HTTP.
        return
    if program.kind == "SuperLink":
        yield Check(
            "SuperLink: listens",
            address.is_loopback,
            f"{shown}, {'this machine only' if address.is_loopback else 'open to the network'}",
            "start it with --host 127.0.0.1 and let nodes connect to fedgrove proxy or nginx",
        )
    can_control = control == HTTPStatus.OK
    is_local = address.is_loopback and program.kind == "SuperLink"
    found = f"{shown} refuses it to anyone who only has ca.crt ({control})"
    if can_control:
        found = f"{shown} lets everyone {'on this machine ' if is_local else ''}start runs"
        found += " and register nodes, with only ca.crt"
    yield Check(
        f"{program.kind}: control",
        not can_control or is_local,
        found,
        "an app is code that all nodes run: close this port to others, and put the SuperLink on "
        "127.0.0.1 behind fedgrove proxy or nginx",
    )
    is_refused = fleet in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
    found = f"{shown} refuses anyone who only has ca.crt ({fleet})"
    if not is_refused:
        found = f"{shown} admits anyone who only has ca.crt ({fleet})"
    if program.kind == "SuperLink" and "--enable-supernode-auth" not in program.words:
        # It asks for a key, and takes any. To try one would register it.
        is_refused = False
        found = f"{shown} admits every key, even one that was not registered"
    advice = "start the SuperLink with --enable-supernode-auth"
    yield Check(f"{program.kind}: nodes", is_refused, found, advice)
    if not is_encrypted:
        yield Check(f"{program.kind}: TLS", False, "none", "start it with certificates")


def _ask(
    address: IPv4Address | IPv6Address, port: int, folder: Path, path: str
) -> tuple[int | None, bool]:
    """Return the status that a request gets without a key, and whether TLS was spoken."""
    host = str(address)
    if address.is_unspecified:
        host = "::1" if address.version == 6 else "127.0.0.1"
    trusted = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    # Which names the certificate has is checked on its own.
    trusted.check_hostname = False
    for context in (trusted, None):
        connection: http.client.HTTPConnection
        if context is None:
            connection = http.client.HTTPConnection(host, port, timeout=SECONDS)
        else:
            connection = http.client.HTTPSConnection(host, port, timeout=SECONDS, context=context)
        try:
            connection.request("POST", path, b"", {"Content-Type": "application/protobuf"})
            return connection.getresponse().status, context is not None
        except (ssl.SSLError, http.client.HTTPException, ConnectionError):
            continue
        except OSError:
            break
        finally:
            connection.close()
    return None, True


# ---- files ---------------------------------------------------------------------------------------


def _check_certificates(folder: Path) -> Iterator[Check]:
    """Check dates, names and issuer of the certificates."""
    from cryptography import x509

    read: dict[str, Any] = {}
    now = datetime.now(UTC)
    for name in ("ca.crt", "server.crt"):
        try:
            read[name] = x509.load_pem_x509_certificate((folder / name).read_bytes())
        except (ValueError, OSError) as error:
            yield Check(name, False, f"cannot be read ({error})", "make new keys: fedgrove keys")
            continue
        ends = read[name].not_valid_after_utc
        begins = read[name].not_valid_before_utc
        yield Check(
            f"{name}: dates",
            begins <= now and (ends - now).days >= SOON,
            f"valid from {begins:%Y-%m-%d} to {ends:%Y-%m-%d}",
            "make new keys (fedgrove keys), or set the clock of this machine",
        )
    if len(read) < 2:
        return
    try:
        names = read["server.crt"].extensions.get_extension_for_class(x509.SubjectAlternativeName)
        hosts = [str(each.value) for each in names.value]
    except x509.ExtensionNotFound:
        hosts = []
    others = [host for host in hosts if host not in ("localhost", "127.0.0.1")]
    has_local = bool({"localhost", "127.0.0.1"} & set(hosts))
    advice = "make keys with --host NAME" if not others else "make keys that include localhost"
    yield Check("server.crt: names", has_local, ", ".join(hosts) or "none", advice)
    try:
        read["server.crt"].verify_directly_issued_by(read["ca.crt"])
        is_issued = True
    except Exception:
        # Each way not to be issued by it has its own error.
        is_issued = False
    found = "ca.crt" if is_issued else "another authority"
    yield Check("server.crt: issuer", is_issued, found, "use ca.crt and server.crt of one folder")


def _check_modes(folder: Path, programs: Sequence[Program]) -> Iterator[Check]:
    """Check that only the user can read keys, databases, run folders and nodes' homes."""
    node_keys = sorted(path.with_suffix("") for path in folder.glob("*.pub"))
    secret = [folder, *folder.glob("*.key"), *filter(Path.is_file, node_keys)]
    yield _check_mode("keys", secret)
    databases: list[Path] = []
    runs: list[Path] = []
    homes: list[Path] = []
    for program in programs:
        with suppress(OSError):
            if program.kind == "SuperLink":
                database = program.option("--database")
                if database and database != ":flwr-in-memory:":
                    path = program.path(database)
                    databases.extend(sorted(path.parent.glob(f"{path.name}*")))
                runs.extend(_find_runs(program.folder))
            elif program.kind == "SuperNode":
                homes.extend(_find_homes(program))
    yield _check_mode("databases", databases)
    yield _check_mode("run folders", runs)
    if homes:
        yield _check_mode("node homes on this machine", homes)


def _find_runs(top: Path) -> list[Path]:
    """Find run folders below the folder in which a SuperLink was started."""
    configs = chain.from_iterable(top.glob("*/" * n + "config.toml") for n in range(DEPTH + 1))
    folders = sorted(config.parent for config in configs)
    return [folder for folder in folders if (folder / "checksums.txt").is_file()]


def _find_homes(program: Program) -> list[Path]:
    """Find the folders with the personal models of a node."""
    given = re.search(r"home='([^']*)'", program.option("--node-config") or "")
    home = given[1] if given else program.environment.get("FEDGROVE_HOME", "")
    usual = Path(program.environment.get("HOME", str(Path.home()))) / ".fedgrove"
    path = program.path(home or str(usual))
    return [path] if path.exists() else []


def _check_mode(name: str, paths: Sequence[Path]) -> Check:
    """Check that group and others have no rights."""
    present = filter(Path.exists, paths)
    open_paths = [path for path in present if stat.S_IMODE(path.stat().st_mode) & PRIVATE]
    if not paths:
        return Check(f"permissions: {name}", True, "none found")
    if not open_paths:
        return Check(f"permissions: {name}", True, f"{len(paths)} for the user only")
    first = open_paths[0]
    shown = [f"{path} ({stat.S_IMODE(path.stat().st_mode):03o})" for path in open_paths]
    return Check(
        f"permissions: {name}",
        False,
        f"other users have rights to {list_some(shown, most=3)}",
        f"chmod go= {shlex.quote(str(first))}, and start the programs with umask 077",
    )


def _find_flower_homes(programs: Sequence[Program]) -> list[Path]:
    """Find the folders in which the SuperLinks' Flower keeps the apps that ran."""
    homes = []
    for program in programs:
        if program.kind == "SuperLink":
            environment = program.environment
            usual = Path(environment.get("HOME", str(Path.home()))) / ".flwr"
            homes.append(program.path(environment.get("FLWR_HOME", str(usual))))
    return homes


def check_timeouts(homes: Sequence[Path]) -> Check:
    """Check that no app that ran waits for a silent node for ever.

    Args:
        homes: The folders in which Flower keeps apps (FLWR_HOME).
    """
    timeouts = {}
    for home in homes:
        for path in sorted(home.glob("apps/**/pyproject.toml")):
            with suppress(OSError, tomllib.TOMLDecodeError, KeyError):
                config = tomllib.loads(path.read_text())["tool"]["flwr"]["app"]["config"]
                timeouts[path.parent.name] = config.get("timeout", TIMEOUT)
    without = [name for name, seconds in timeouts.items() if not seconds]
    found = "no app has run yet"
    if without:
        found = f"{list_some(without, most=3)}: none"
    elif timeouts:
        found = list_some([f"{name}: {seconds:g} s" for name, seconds in timeouts.items()], most=3)
    return Check(
        "apps: timeout",
        not without,
        found,
        "set timeout in [tool.flwr.app.config] of the app's pyproject.toml: otherwise a silent "
        "node delays the run forever",
    )
