"""Flower's own programs on this machine: a SuperLink under TLS, SuperNodes with keys, ``flwr run``.

All ports are free ones, all processes are ended by their numbers, all waiting has an end.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fedgrove

BIN = Path(sys.executable).parent
STARTED = 60.0
"""Seconds that a program may take to start."""


def free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])


def wait_for(what: str, test: Callable[[], Any], seconds: float) -> Any:
    """What a test gives as soon as it is true."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = test()
        if found:
            return found
        time.sleep(0.2)
    raise AssertionError(f"not within {seconds:g} s: {what}")


@dataclass
class Program:
    """A program with its log; its own session, so that what it starts can be ended with it."""

    words: list[str]
    log: Path
    env: dict[str, str]
    cwd: Path

    def __post_init__(self) -> None:
        with self.log.open("ab") as file:
            self.process = subprocess.Popen(
                [str(BIN / self.words[0]), *self.words[1:]],
                stdout=file,
                stderr=subprocess.STDOUT,
                env=self.env,
                cwd=self.cwd,
                start_new_session=True,
            )

    @property
    def text(self) -> str:
        # Flower's colours are no part of what it says.
        return re.sub(r"\x1b\[\d+m", "", self.log.read_text(errors="replace"))

    def kill(self) -> None:
        """kill -9, for it and what it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)

    def end(self) -> None:
        """Politely, then not."""
        if self.process.poll() is None:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
        self.kill()


@dataclass
class Site:
    """A folder with an app's keys, a SuperLink, and its nodes."""

    path: Path
    port: int = field(default_factory=free_port)
    programs: list[Program] = field(default_factory=list)

    @property
    def env(self) -> dict[str, str]:
        return os.environ | {
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_HOME": str(self.path / "flwr"),
            "FEDGROVE_HOME": str(self.path / "home"),
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(Path(fedgrove.__file__).parents[1]),
            "OMP_NUM_THREADS": "1",
        }

    @property
    def keys(self) -> Path:
        return self.path / "keys"

    def start(self, name: str, *words: str) -> Program:
        program = Program(list(words), self.path / f"{name}.log", self.env, self.path)
        self.programs.append(program)
        return program

    def done(self, *words: str, cwd: Path | None = None, seconds: float = 60.0) -> str:
        """What a command says that must come to a good end."""
        got = subprocess.run(
            [str(BIN / words[0]), *words[1:]],
            capture_output=True,
            text=True,
            env=self.env,
            cwd=cwd or self.path,
            timeout=seconds,
        )
        assert got.returncode == 0, got.stdout + got.stderr
        return got.stdout + got.stderr

    def start_link(self) -> Program:
        """The SuperLink, as `fedgrove keys` says it is started; and where flwr finds it."""
        home = self.path / "flwr"
        home.mkdir(exist_ok=True)
        (home / "config.toml").write_text(
            f'[superlink.mine]\naddress = "127.0.0.1:{self.port}"\n'
            f'root-certificates = "{self.keys / "ca.crt"}"\n'
        )
        link = self.start(
            "superlink",
            *("flower-superlink", "--ssl-ca-certfile", str(self.keys / "ca.crt")),
            *("--ssl-certfile", str(self.keys / "server.crt")),
            *("--ssl-keyfile", str(self.keys / "server.key"), "--enable-supernode-auth"),
            *("--host", "127.0.0.1", "--port", str(self.port), "--database", "superlink.db"),
            "--disable-runtime-dependency-installation",
        )
        wait_for("the SuperLink listens", self._listens, STARTED)
        return link

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def register(self, nodes: int) -> None:
        for k in range(nodes):
            self.done("flwr", "supernode", "register", str(self.keys / f"node-{k}.pub"), "mine")

    def start_node(self, k: int, *words: str, name: str = "", config: str = "") -> Program:
        """A node with its key under TLS; ``words`` take the place of both."""
        secured = (
            *("--root-certificates", str(self.keys / "ca.crt")),
            *("--auth-supernode-private-key", str(self.keys / f"node-{k}")),
        )
        return self.start(
            name or f"node-{k}",
            *("flower-supernode", "--superlink", f"127.0.0.1:{self.port}"),
            *("--host", "127.0.0.1", "--port", str(free_port())),
            *("--node-config", config or f"partition-id={k}"),
            *(words or secured),
        )

    def start_run(self, app: Path, name: str, **words: Any) -> Program:
        """``flwr run``, whose log is that of the server's half; it ends with the run."""
        given = " ".join(f"{word}={value!r}" for word, value in words.items())
        run_config = ("--run-config", given) if given else ()
        return self.start(name, "flwr", "run", str(app), "mine", "--stream", *run_config)

    def close(self) -> None:
        for program in reversed(self.programs):
            program.end()
