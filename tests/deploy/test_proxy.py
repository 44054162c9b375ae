"""`fedgrove proxy` as a process of its own, under TLS, in front of a server that counts."""

from __future__ import annotations

import base64
import http.client
import json
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.deploy.processes import Site, free_port, wait_for

from fedgrove.deploy.keys import make_keys
from fedgrove.deploy.proxy import MOST_AT_ONCE, MOST_BYTES, MOST_OTHER_BYTES, serve_nodes
from fedgrove.errors import InputError

pytest.importorskip("flwr")
FLEET = "/v1/fleet/push-object"


class Counting(BaseHTTPRequestHandler):
    """A SuperLink's place: answers with what arrived."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        answer = json.dumps([self.path, len(body), self.headers["flwr-component-name"]]).encode()
        self.server.arrived.append(self.path)  # type: ignore[attr-defined]
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *words: Any) -> None:
        """Print nothing."""


class Doors:
    """A proxy on loopback, and the server behind it."""

    def __init__(self, path: Path) -> None:
        self.keys = path / "keys"
        make_keys(self.keys, 2)
        # The second node's key is not known here.
        (self.keys / "node-1.pub").unlink()
        self.behind = ThreadingHTTPServer(("127.0.0.1", 0), Counting)
        self.arrived: list[str] = []
        self.opened: list[ssl.SSLSocket] = []
        self.behind.arrived = self.arrived  # type: ignore[attr-defined]
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.keys / "server.crt", self.keys / "server.key")
        self.behind.socket = context.wrap_socket(self.behind.socket, server_side=True)
        threading.Thread(target=self.behind.serve_forever, daemon=True).start()
        self.site = Site(path)
        self.site.port = free_port()
        words = ("--host", "127.0.0.1", "--port", str(self.site.port))
        address = f"127.0.0.1:{self.behind.server_address[1]}"
        command = ("python", "-m", "fedgrove", "proxy", str(self.keys), *words)
        self.program = self.site.start("proxy", *command, "--superlink", address)
        wait_for("the proxy listens", self.site._listens, 30)

    def post(self, path: str, body: Any = b"x", node: int | None = 0, **headers: str) -> Any:
        """The status and the answer to a request that a node has signed, or nobody."""
        trusted = ssl.create_default_context(cafile=str(self.keys / "ca.crt"))
        connection = http.client.HTTPSConnection(
            "127.0.0.1", self.site.port, timeout=20, context=trusted
        )
        signed = self.signature(node) if node is not None else {}
        connection.request("POST", path, body, {**signed, **headers})
        response = connection.getresponse()
        answer = response.read()
        connection.close()
        return response.status, answer

    def begin_post(self, length: int) -> None:
        """Send all of a body but its last byte, as far as the proxy takes it."""
        trusted = ssl.create_default_context(cafile=str(self.keys / "ca.crt"))
        plain = socket.create_connection(("127.0.0.1", self.site.port), 20)
        connection = trusted.wrap_socket(plain, server_hostname="127.0.0.1")
        self.opened.append(connection)
        words = {"Host": "127.0.0.1", "Content-Length": str(length), **self.signature(0)}
        head = "".join(f"{name}: {value}\r\n" for name, value in words.items())
        with suppress(OSError):
            connection.sendall(f"POST {FLEET} HTTP/1.1\r\n{head}\r\n".encode())
            for _ in range(length // 2**20):
                connection.sendall(bytes(2**20 - 1))

    def signature(self, node: int, ahead: float = 0.0) -> dict[str, str]:
        """What a SuperNode sends along."""
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        key: Any = serialization.load_ssh_private_key(
            (self.keys / f"node-{node}").read_bytes(), None
        )
        public = key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        now = (datetime.now(UTC) + timedelta(seconds=ahead)).isoformat()
        signature = key.sign(now.encode(), ec.ECDSA(hashes.SHA256()))
        return {
            "flwr-public-key": base64.b64encode(public).decode(),
            "flwr-signature": base64.b64encode(signature).decode(),
            "flwr-timestamp": now,
        }


@pytest.fixture(scope="module")
def doors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doors]:
    made = Doors(tmp_path_factory.mktemp("doors"))
    try:
        yield made
    finally:
        made.site.close()
        made.behind.shutdown()
        made.behind.server_close()


def test_a_known_node_is_passed_on(doors: Doors) -> None:
    body = b"x" * (6 * 2**20)
    status, answer = doors.post(FLEET, body, **{"flwr-component-name": "supernode"})
    assert status == 200
    assert json.loads(answer) == [FLEET, len(body), "supernode"]


@pytest.mark.parametrize(
    "path",
    [
        "/v1/control/start-run",
        "/v1/control/register-node",
        "/v1/runtime/get-nodes",
        "/docs",
        "/v1/fleet/../control/start-run",
        "/v1/fleet/%2e%2e/control/start-run",
        "//v1/fleet/pull-messages",
    ],
)
def test_nothing_but_the_paths_of_nodes_is_passed_on(doors: Doors, path: str) -> None:
    before = len(doors.arrived)
    assert doors.post(path)[0] == 403
    assert len(doors.arrived) == before


def test_an_unknown_key_is_refused_before_its_body_is_read(doors: Doors) -> None:
    before = len(doors.arrived)
    assert doors.post(FLEET, node=None)[0] == 401
    assert doors.post(FLEET, node=1)[0] == 401
    other = doors.signature(1)["flwr-signature"]
    assert doors.post(FLEET, **{"flwr-signature": other})[0] == 401
    # It announces a terabyte and sends one byte: the answer comes without waiting for the rest.
    assert doors.post(FLEET, node=None, **{"Content-Length": str(10**12)})[0] == 401
    assert len(doors.arrived) == before


@pytest.mark.parametrize(("ahead", "which"), [(3600.0, "ahead of"), (-7200.0, "behind")])
def test_a_node_whose_clock_is_off_is_told_so(doors: Doors, ahead: float, which: str) -> None:
    before = len(doors.arrived)
    for _ in range(2):
        status, answer = doors.post(FLEET, node=None, **doors.signature(0, ahead))
        assert status == 401
        assert f"{abs(ahead):.0f} s {which} the server's".encode() in answer
    assert len(doors.arrived) == before
    # Once a minute, by the name of its key.
    assert doors.program.text.count("node-0: the clock of this node is") == 1
    assert doors.post(FLEET, node=None, **doors.signature(0, -200.0))[0] == 200


def test_a_body_has_a_limit(doors: Doors) -> None:
    before = len(doors.arrived)
    try:
        status, _ = doors.post(FLEET, b"x" * (MOST_BYTES + 2**20))
    except ConnectionError:
        # The connection is closed before all was sent.
        status = 413
    assert status == 413
    assert len(doors.arrived) == before


@pytest.mark.parametrize("path", ["push-messages", "pull-messages", "send-node-heartbeat"])
def test_only_pieces_of_messages_are_long(path: str, doors: Doors) -> None:
    """A message that announces ten thousand pieces would keep the SuperLink's database busy."""
    before = len(doors.arrived)
    assert doors.post(f"/v1/fleet/{path}", b"x" * (MOST_OTHER_BYTES + 1))[0] == 413
    assert len(doors.arrived) == before
    assert doors.post(f"/v1/fleet/{path}", b"x" * MOST_OTHER_BYTES)[0] == 200


def test_a_header_has_a_limit(doors: Doors) -> None:
    """It is read before anyone has shown a key."""
    trusted = ssl.create_default_context(cafile=str(doors.keys / "ca.crt"))
    plain = socket.create_connection(("127.0.0.1", doors.site.port), 20)
    with trusted.wrap_socket(plain, server_hostname="127.0.0.1") as connection:
        connection.sendall(f"POST {FLEET} HTTP/1.1\r\nX-Long: ".encode())
        connection.settimeout(5)
        # It may be closed before all is sent; a proxy without a limit would wait for more.
        answer = b""
        with suppress(ConnectionError, ssl.SSLEOFError, ssl.SSLZeroReturnError):
            for _ in range(16):
                connection.sendall(b"x" * 2**20)
        with suppress(ConnectionError, ssl.SSLEOFError, ssl.SSLZeroReturnError):
            answer = connection.recv(100)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 400")
    assert doors.post(FLEET)[0] == 200


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="memory is read from /proc")
def test_one_key_cannot_fill_the_memory(doors: Doors) -> None:
    """Many requests of nearly the longest body, none of which is completed."""
    before = memory_of(doors)
    calls = [threading.Thread(target=doors.begin_post, args=(31 * 2**20,)) for _ in range(20)]
    doors.opened.clear()
    for call in calls:
        call.start()
    # Those that are read are there, and all others wait.
    wait_for("some are read", lambda: sum(not call.is_alive() for call in calls) >= 3, 60)
    for call in calls:
        call.join(0.5)
    highest = memory_of(doors)
    try:
        # All of them would take 620 MiB, and more while a body grows.
        assert highest - before < 31 * MOST_AT_ONCE * 2
    finally:
        for connection in doors.opened:
            connection.close()
    for call in calls:
        call.join(30)
    assert doors.post(FLEET)[0] == 200


def memory_of(doors: Doors) -> int:
    """Resident memory of the proxy in MiB."""
    status = Path(f"/proc/{doors.program.process.pid}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    return int(fields["VmRSS"].split()[0]) // 1024


def test_a_node_that_is_added_later_is_known(doors: Doors, tmp_path: Path) -> None:
    make_keys(tmp_path / "more", 1)
    (tmp_path / "more" / "node-0").rename(doors.keys / "node-7")
    assert doors.post(FLEET, node=7)[0] == 401
    (tmp_path / "more" / "node-0.pub").rename(doors.keys / "node-7.pub")
    assert doors.post(FLEET, node=7)[0] == 200


def test_a_folder_without_keys_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"server\.crt does not exist; give the folder"):
        serve_nodes(tmp_path)
    make_keys(tmp_path / "keys", 1)
    (tmp_path / "keys" / "node-0.pub").unlink()
    with pytest.raises(InputError, match="no public key of a node"):
        serve_nodes(tmp_path / "keys")
    with pytest.raises(InputError, match="superlink is"):
        serve_nodes(tmp_path / "keys", superlink="here")
