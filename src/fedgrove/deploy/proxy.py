"""``fedgrove proxy``: the port for nodes, in front of a SuperLink that only its machine reaches.

Flower has one port for nodes and for those who start runs, and requires no password of the latter.
So the SuperLink listens on loopback, and this proxy passes on what nodes need and nothing else::

    node --TLS--> proxy 0.0.0.0:8443 --TLS--> SuperLink 127.0.0.1:8000 <--TLS-- flwr run

A SuperLink reads a whole request before it checks who sent it. The proxy checks first: a request
must be signed with a key whose public half is in its folder, its body has a limit, and a node may
send a few requests at a time. So one node cannot fill the memory of the server, or keep the
database of the SuperLink busy.
"""

from __future__ import annotations

import asyncio
import base64
import re
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..errors import InputError, check
from .enrolment import LOG, show_log
from .keys import read_public_key

HOST = "0.0.0.0"
PORT = 8443
"""The port that nodes connect to."""
SUPERLINK = "127.0.0.1:8000"
MOST_BYTES = 32 * 2**20
"""The longest body of a request with a piece of a message: Flower sends pieces of 5 MiB."""
MOST_HEAD_BYTES = 2**16
"""The most bytes of a request before its body."""
PIECES = "/v1/fleet/push-object"
MOST_OTHER_BYTES = 2**16
"""The longest body of any other request. One that announces a message has 70 bytes for each of its
pieces; a SuperLink writes them into its database in one go, and nobody else can write meanwhile."""
MOST_AT_ONCE = 6
"""The most requests of a node that are read at a time: a SuperNode sends at most four. Others wait
until one of these is answered."""
SECONDS = 120.0
"""How long a request may take to arrive, and a SuperLink to answer it."""
MOST_AHEAD = 5.0
MOST_BEHIND = 305.0
"""Seconds that a node's clock may be ahead or behind: a SuperLink refuses more."""
WARN_AGAIN = 60.0
"""Seconds after which a wrong clock of a node is logged again."""
FOR_NODES = re.compile(rb"/v1/fleet/[a-z-]+")
PASSED_ON = re.compile(rb"flwr-.*|x-flwr-.*|content-type|accept|user-agent")
"""Headers that are passed on; the others belong to one connection."""

Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[Mapping[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True)
class Proxy:
    """An ASGI app that passes requests of known nodes on to a SuperLink.

    Args:
        folder: The folder with ``ca.crt`` and the nodes' public keys, ``*.pub``.
        client: A ``httpx.AsyncClient`` whose base address is the SuperLink.
    """

    folder: Path
    client: Any
    warned: dict[str, float] = field(default_factory=dict)
    """By node, when a sentence about its clock was last logged; only known nodes are in it."""
    turns: dict[str, asyncio.Semaphore] = field(default_factory=dict)
    """By node, how many more requests it may send now."""

    def _warn(self, name: str, sentence: str) -> None:
        """Log a warning about a node, but not too often."""
        now = time.monotonic()
        if now - self.warned.get(name, -WARN_AGAIN) >= WARN_AGAIN:
            self.warned[name] = now
            LOG.warning("%s: %s", name, sentence)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            # A web socket, which no node opens: returning ends it.
            return
        headers: Headers = list(scope["headers"])
        # The path as it was sent: a decoded one could hide %2e%2e.
        path: bytes = scope["raw_path"]
        if scope["method"] != "POST" or FOR_NODES.fullmatch(path) is None:
            await _answer(send, 403, b"this port is for nodes only")
        elif (signed := _find_signature(dict(headers), self.folder)) is None:
            # Before a byte of the body is read.
            await _answer(send, 401, b"this key is not known here")
        elif wrong := _describe_clock(signed.age):
            self._warn(signed.name, wrong)
            await _answer(send, 401, wrong.encode())
        else:
            await self._wait_for_turn(signed.name, path.decode(), headers, receive, send)

    async def _wait_for_turn(
        self, name: str, path: str, headers: Headers, receive: Receive, send: Send
    ) -> None:
        """Pass a request on as soon as its node has few enough others."""
        turn = self.turns.setdefault(name, asyncio.Semaphore(MOST_AT_ONCE))
        try:
            await asyncio.wait_for(turn.acquire(), SECONDS)
        except TimeoutError:
            await _answer(send, 429, b"this node sends too many requests at a time")
            return
        try:
            await self._pass_on(path, headers, receive, send)
        finally:
            turn.release()

    async def _pass_on(self, path: str, headers: Headers, receive: Receive, send: Send) -> None:
        import httpx

        try:
            most = MOST_BYTES if path == PIECES else MOST_OTHER_BYTES
            body = await asyncio.wait_for(_read(receive, most), SECONDS)
            kept = [each for each in headers if PASSED_ON.fullmatch(each[0])]
            got = await self.client.post(path, content=body, headers=kept)
        except TimeoutError:
            await _answer(send, 408, b"the request did not arrive in time")
        except OverflowError:
            await _answer(send, 413, b"the request is too large")
        except httpx.HTTPError:
            await _answer(send, 502, b"the SuperLink does not answer")
        else:
            back = [(name, value) for name, value in got.headers.raw if _is_passed_on(name)]
            await _answer(send, got.status_code, got.content, back)


def _is_passed_on(name: bytes) -> bool:
    return PASSED_ON.fullmatch(name.lower()) is not None


async def _read(receive: Receive, most: int) -> bytes:
    """The body of a request; OverflowError as soon as it is longer than ``most``."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise TimeoutError
        body += message.get("body", b"")
        if len(body) > most:
            raise OverflowError
        if not message.get("more_body", False):
            return bytes(body)


async def _answer(send: Send, status: int, body: bytes, headers: Headers | None = None) -> None:
    headers = [*(headers or []), (b"content-length", str(len(body)).encode())]
    if status in (401, 408, 413, 429):
        # What is left of the body is not read.
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@dataclass(frozen=True)
class _Signature:
    """The node that signed a request, and the seconds since then by the clock of this machine."""

    name: str
    age: float


def _find_signature(headers: Mapping[bytes, bytes], folder: Path) -> _Signature | None:
    """Return which known node has signed the time that a request names; None if none has.

    The SuperLink compares the key with its list again.
    """
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        public = base64.b64decode(headers[b"flwr-public-key"], validate=True)
        signature = base64.b64decode(headers[b"flwr-signature"], validate=True)
        name, key = _known_keys(folder, folder.stat().st_mtime_ns)[public]
        signed = headers[b"flwr-timestamp"]
        key.verify(signature, signed, ec.ECDSA(hashes.SHA256()))
        age = (datetime.now(UTC) - datetime.fromisoformat(signed.decode())).total_seconds()
    except (KeyError, ValueError, TypeError, InvalidSignature):
        return None
    return _Signature(name, age)


def _describe_clock(age: float) -> str:
    """Return a sentence if a SuperLink refuses a request that was signed so long ago; else ""."""
    if -MOST_AHEAD < age < MOST_BEHIND:
        return ""
    which = "ahead of" if age < 0 else "behind"
    return (
        f"the clock of this node is {abs(age):.0f} s {which} the server's; set it, for example "
        "with NTP"
    )


@lru_cache(maxsize=1)
def _known_keys(folder: Path, changed: int) -> dict[bytes, tuple[str, Any]]:
    """The nodes' names and public keys by what Flower sends; read again if the folder changes."""
    keys = {}
    for path in sorted(folder.glob("*.pub")):
        # Another file of that name admits nobody, and shuts nobody out.
        read = read_public_key(path)
        if read is not None:
            keys[read[0]] = (path.stem, read[1])
    return keys


def serve_nodes(
    folder: str | Path, host: str = HOST, port: int = PORT, superlink: str = SUPERLINK
) -> None:
    """Serve nodes until the process is ended.

    Args:
        folder: The folder with server.crt, server.key, ca.crt and the nodes' ``.pub`` files.
        host: The address to listen on.
        port: The port to listen on.
        superlink: HOST:PORT of the SuperLink.

    Raises:
        InputError: A file is missing, or the address of the SuperLink is none.
    """
    path = Path(folder)
    is_address = re.fullmatch(r"[\w.\[\]:-]+:\d{1,5}", superlink) is not None
    check(is_address, "superlink", superlink, f"HOST:PORT, as {SUPERLINK}")
    for name in ("server.crt", "server.key", "ca.crt"):
        if not (path / name).is_file():
            raise InputError(
                f"{path / name} does not exist; give the folder that fedgrove keys has made."
            )
    if not any(path.glob("*.pub")):
        raise InputError(
            f"{path} has no public key of a node (node-0.pub), so no node could connect; copy them "
            "from the folder that fedgrove keys has made."
        )
    try:
        import httpx
        import uvicorn
    except ImportError as error:
        raise InputError(
            f"this needs Flower, and {error.name} is not installed; get it with: "
            "pip install 'fedgrove[flower]'"
        ) from None
    show_log()
    trusted = ssl.create_default_context(cafile=str(path / "ca.crt"))
    client = httpx.AsyncClient(
        base_url=f"https://{superlink}",
        verify=trusted,
        timeout=SECONDS,
        # A proxy of the environment must not come between two programs of one machine.
        trust_env=False,
    )
    uvicorn.run(
        Proxy(path, client),
        host=host,
        port=port,
        ssl_certfile=path / "server.crt",
        ssl_keyfile=path / "server.key",
        lifespan="off",
        # uvicorn's other parser reads headers without a limit, before anyone has shown a key.
        http="h11",
        h11_max_incomplete_event_size=MOST_HEAD_BYTES,
        ws="none",
        server_header=False,
        log_level="warning",
    )
