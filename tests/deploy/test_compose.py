"""The commands of the compose file, each with the files that its container gets and no others.

No container is started: paths, ports and the name of the server are replaced by those of this machine.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.deploy.processes import Program, Site, free_port, wait_for

from fedgrove.cli import main

pytest.importorskip("flwr")
yaml = pytest.importorskip("yaml", reason="yaml is not installed: the compose file is not read")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

DEPLOY = Path(__file__).parents[2] / "examples" / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
COMPOSE = (DEPLOY / "compose.yaml").read_text()
SERVICES: dict[str, Any] = yaml.safe_load(COMPOSE)["services"]
TYPED = re.findall(r"^#   (\S.*?)(?: {3,}.*)?$", COMPOSE, re.MULTILINE)
"""The commands in the first lines of the file."""


class Containers(Site):
    """A site with a folder for each service."""

    nodes_port = 0

    def here(self, service: str, text: str) -> str:
        """Return a text of a container with paths and ports of this machine."""
        text = re.sub(r"(?<![\w/.])/(keys|data|app|state)\b", rf"{self.path / service}/\1", text)
        text = text.replace("superlink:8443", f"localhost:{self.nodes_port}")
        text = text.replace("--port=8443", f"--port={self.nodes_port}")
        return re.sub(r"(127\.0\.0\.1:|--port=)8000\b", rf"\g<1>{self.port}", text)

    def make(self, service: str) -> None:
        """Copy what a container gets, and write what its image has in /state."""
        state = self.path / service / "state"
        state.mkdir(parents=True)
        for volume in SERVICES[service]["volumes"]:
            source, place, *_ = volume.split(":")
            copy = self.path / service / place.removeprefix("/")
            copy.parent.mkdir(parents=True, exist_ok=True)
            if (self.path / source).is_dir() and source.startswith("./"):
                shutil.copytree(self.path / source, copy)
            elif source.startswith("./"):
                shutil.copy(self.path / source, copy)
        [step] = re.findall(r"^RUN (mkdir flwr (?:.*\\\n)*.*)$", DOCKERFILE, re.MULTILINE)
        step = self.here(service, step.replace("\\\n", ""))
        subprocess.run(["sh", "-c", step], cwd=state, check=True)

    def begin(self, service: str, words: list[str], name: str) -> Program:
        """Start a command in a container."""
        [variables] = re.findall(r"^ENV (.*)$", DOCKERFILE, re.MULTILINE)
        env = dict(self.env)
        for each in variables.split():
            key, _, value = self.here(service, each).partition("=")
            env[key] = value
        words = [self.here(service, word) for word in words]
        program = Program(words, self.path / f"{name}.log", env, self.path / service / "state")
        self.programs.append(program)
        return program

    def begin_service(self, service: str) -> Program:
        words = list(SERVICES[service]["command"])
        if words[0] == "fedgrove":
            # Not open to the network, as its container is; and to the port of this SuperLink.
            words = ["python", "-m", *words, "--host=127.0.0.1", "--superlink=127.0.0.1:8000"]
        if words[0] == "flower-supernode":
            # Each container has a loopback of its own.
            words += ["--host=127.0.0.1", f"--port={free_port()}"]
        return self.begin(service, words, service)

    def listens_to_nodes(self) -> bool:
        own = self.port
        try:
            self.port = self.nodes_port
            return self._listens()
        finally:
            self.port = own


@pytest.fixture
def containers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Containers]:
    monkeypatch.chdir(tmp_path)
    made = Containers(tmp_path)
    made.nodes_port = free_port()
    try:
        yield made
    finally:
        made.close()


def test_the_commands_train_a_run_over_both_nodes(containers: Containers) -> None:
    [keys, app, up, *others] = TYPED
    assert up == "docker compose up --detach"
    rows = "".join(f"{k % 7},{k % 5},{'ab'[k % 2]}\n" for k in range(40))
    for k in range(2):
        for folder in ("data", f"data-{k}"):
            Path(folder).mkdir(exist_ok=True)
            (Path(folder) / f"{k}.csv").write_text(f"x,y,label\n{rows}")
    words = app.replace("METHOD", "fedavg").replace("FOLDER ...", "data/ --label label --rounds 2")
    for command in (keys, words):
        assert main(shlex.split(command)[1:]) == 0
    for service in SERVICES:
        containers.make(service)
    assert not list(containers.path.glob("*/keys/ca.key"))
    containers.begin_service("superlink")
    wait_for("the SuperLink listens", containers._listens, 90)
    containers.begin_service("proxy")
    wait_for("the proxy listens", containers.listens_to_nodes, 90)
    names = [name for name in SERVICES if name.startswith("node-")]
    nodes = {name: containers.begin_service(name) for name in names}

    def has_ended(program: Program) -> bool:
        for name, node in nodes.items():
            # One that starts before its key is registered ends; it is started again.
            if node.process.poll() is not None:
                assert SERVICES[name]["restart"] == "unless-stopped"
                nodes[name] = containers.begin_service(name)
        return program.process.poll() is not None

    for number, command in enumerate(others):
        *before, service, program = shlex.split(command)[:5]
        assert before == ["docker", "compose", "exec"]
        done = containers.begin(service, [program, *shlex.split(command)[5:]], f"typed-{number}")
        wait_for(f"{command} ends", partial(has_ended, done), 300)
        assert done.process.returncode == 0, done.text
    assert "round 2: " in done.text, done.text
    assert ", 0 lost" in done.text
    # Each node may be the client of its key only.
    assert "any node may take part" not in done.text
    for node in nodes.values():
        assert node.process.poll() is None, node.text
    [run] = (containers.path / "superlink" / "state" / "runs").iterdir()
    assert (run / "summary.json").is_file()
    assert os.stat(run).st_mode & 0o077 == 0
