"""The nginx configuration of examples/deploy in front of a SuperLink, with a node behind it."""

from __future__ import annotations

import http.client
import shutil
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.deploy.processes import Program, Site, free_port, wait_for

from fedgrove.deploy.doctor import check_server
from fedgrove.deploy.keys import make_keys

pytest.importorskip("flwr")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CONFIG = Path(__file__).parents[2] / "examples" / "deploy" / "nginx.conf"
MAIN = """
daemon off;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    {server}
}}
"""


class Doors(Site):
    """A site whose nodes come through nginx."""

    nginx = 0

    def start_nginx(self, program: str) -> None:
        self.nginx = free_port()
        server = CONFIG.read_text()
        changes = {
            "listen 8443": f"listen 127.0.0.1:{self.nginx}",
            "https://127.0.0.1:8000": f"https://127.0.0.1:{self.port}",
            "/etc/fedgrove/": f"{self.keys}/",
        }
        for old, new in changes.items():
            assert old in server
            server = server.replace(old, new)
        config = self.path / "nginx.conf"
        config.write_text(MAIN.format(folder=self.path, server=server))
        self.start("nginx", program, "-e", str(self.path / "start.log"), "-c", str(config))
        wait_for("nginx listens", self._nginx_listens, 30)

    def _nginx_listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.nginx)) == 0

    def start_node_behind(self, k: int) -> Program:
        """A node that knows the port of nginx only."""
        link = self.port
        self.port = self.nginx
        try:
            return self.start_node(k)
        finally:
            self.port = link

    def status(self, path: str, size: int = 0) -> int:
        """The status of a request without a key, through nginx."""
        trusted = ssl.create_default_context(cafile=str(self.keys / "ca.crt"))
        connection = http.client.HTTPSConnection(
            "127.0.0.1", self.nginx, timeout=30, context=trusted
        )
        headers = {"Content-Type": "application/protobuf"}
        if size:
            headers["Content-Length"] = str(size)
        try:
            connection.request("POST", path, b"", headers)
            return connection.getresponse().status
        finally:
            connection.close()


@pytest.fixture
def doors(tmp_path: Path) -> Iterator[Doors]:
    program = shutil.which("nginx")
    if program is None:
        pytest.skip("nginx is not installed: its configuration is not tried")
    made = Doors(tmp_path)
    try:
        make_keys(made.keys, 2)
        made.start_link()
        made.start_nginx(program)
        yield made
    finally:
        made.close()


def test_a_node_joins_through_nginx_and_nothing_else_passes(doors: Doors) -> None:
    doors.register(1)
    node = doors.start_node_behind(0)
    wait_for(
        "the node is online",
        lambda: "online" in doors.done("flwr", "supernode", "list", "mine"),
        90,
    )
    # Its key is not registered.
    stranger = doors.start_node_behind(1)
    assert stranger.process.wait(90) != 0
    assert node.process.poll() is None, node.text
    for path in ("/v1/control/start-run", "/v1/control/register-node", "/docs", "/"):
        assert doors.status(path) == 403, path
    # nginx resolves the dots before it compares paths.
    assert doors.status("/v1/fleet/%2e%2e/control/list-nodes") == 403
    assert doors.status("/v1/fleet/../control/list-nodes") == 403
    assert doors.status("/v1/fleet/pull-messages") == 401
    assert doors.status("/v1/fleet/pull-messages", size=10**12) == 413
    checks = {check.name: check for check in check_server(doors.keys)}
    assert f"127.0.0.1:{doors.nginx} refuses it" in checks["nginx: control"].found
    assert checks["nginx: control"].is_right
    assert checks["nginx: nodes"].is_right
