"""Flower's simulation as an engine: a node for each client, a Ray actor for each core.

Ray starts with the first exchange, in about 15 seconds, and ends with the engine. Actors read the
runs, with the clients' data, from a file: no message carries them.
"""

from __future__ import annotations

import logging
import os
import pickle
import queue
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from io import BytesIO
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from ...core import MOST_AT_ONCE, Answer, Job
from ...errors import EngineError, FedgroveError, InputError
from ...nets import user_files
from ...runs.gate import RecentLengths
from ...runs.run import Run
from ...wire.known_state import KnownState
from ..pool.engine import cores
from ..pool.packing import RunPickler, cannot_be_sent
from ..work import explained
from . import node
from .engine import WINDOW, Flower, ask
from .letter import Letter
from .messages import Head, check_installed, client_app, lost_letter, partition_of

END_SECONDS = 60.0
"""How long Ray may take to end."""


@dataclass(eq=False)
class Simulation:
    """Flower and Ray on this machine, started when they are needed.

    With a ``timeout`` there are no more tasks on their way than actors, so that a client's time
    does not pass while it waits for one.
    """

    timeout: float | None = None
    name: str = field(default="flower", init=False)

    def __post_init__(self) -> None:
        check_installed("ray")
        self._names: WeakKeyDictionary[Run, str] = WeakKeyDictionary()
        self._folder: Path | None = None
        self._ray: _Ray | None = None
        self._nodes: dict[int, int] = {}

    def map(self, jobs: Iterable[Job]) -> Iterator[tuple[Job, Answer]]:
        """Do the jobs on Ray's actors."""
        listed = list(jobs)
        if not listed:
            return
        clients = 0
        for run in {id(run): run for run, _ in listed}.values():
            clients = max(clients, max(run.federation.ids) + 1)
            self._write(run)
        ray = self._started(clients)
        yield from Flower(
            grid=ray.grid,
            nodes=lambda: self._nodes,
            name_of=self._names.__getitem__,
            timeout=self.timeout,
            window=WINDOW if self.timeout is None else cores(),
            check=ray.check,
        ).map(listed)

    def _write(self, run: Run) -> None:
        """Write a run for the actors, once."""
        if run in self._names:
            return
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="fedgrove-flower-"))
        name = f"run-{len(list(self._folder.iterdir()))}"
        # What the server believes of clients is not for them.
        bare = replace(run, known_state=KnownState(), lengths=RecentLengths())
        buffer = BytesIO()
        try:
            RunPickler(buffer, pickle.HIGHEST_PROTOCOL).dump(bare)
        except Exception as error:
            raise cannot_be_sent(error) from None
        data = buffer.getvalue()
        files = [str(file.absolute()) for file in user_files.find_files_in_pickle(data)]
        (self._folder / name).write_bytes(pickle.dumps((files, data)))
        self._names[run] = name

    def _started(self, clients: int) -> _Ray:
        """Ray with a node for each client, started anew if there are too few."""
        if self._ray is not None and len(self._nodes) >= clients:
            return self._ray
        if clients > MOST_AT_ONCE:
            raise InputError(
                f"there are {clients} clients, and Flower's simulation has a node for each; it "
                f"must be at most {MOST_AT_ONCE}: take --engine pool, or fewer clients."
            )
        self._end()
        assert self._folder is not None
        self._ray = _Ray(clients, self._folder)
        questions: dict[int, Head] = {number: {} for number in self._ray.node_ids(clients)}
        answers = ask(self._ray.grid, questions, check=self._ray.check)
        self._nodes = {int(answer["partition"]): n for n, answer in answers.items()}
        self._ray.processes = [answer["process"] for answer in answers.values()]
        return self._ray

    def _end(self) -> None:
        if self._ray is not None:
            self._ray.close()
            self._ray = None
            self._nodes = {}

    def close(self) -> None:
        """End Ray and its processes."""
        self._end()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
        self._names = WeakKeyDictionary()


class _Ray:
    """Flower's simulation in a thread; its Grid is used from here."""

    def __init__(self, clients: int, folder: Path) -> None:
        self._over = threading.Event()
        self._grids: queue.Queue[Any] = queue.Queue()
        self._error: BaseException | None = None
        self.processes: list[list[str | int]] = []
        self._python_path = os.environ.get("PYTHONPATH")
        # It tells of every step, and of what it will no longer do some day.
        self._log = logging.getLogger("flwr")
        self._log_level = self._log.level
        self._thread = threading.Thread(target=self._simulate, args=(clients, folder), daemon=True)
        self._thread.start()
        self.grid: Any = None
        while self.grid is None:
            try:
                self.grid = self._grids.get(timeout=0.2)
            except queue.Empty:
                self.check()

    def _simulate(self, clients: int, folder: Path) -> None:
        try:
            from flwr.serverapp import ServerApp
            from flwr.simulation import run_simulation as simulate

            self._log.setLevel(logging.CRITICAL)
            # Or it warns, at every start, of what it will do otherwise some day.
            os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
            server: Any = ServerApp()
            server.main()(self._serve)
            app = client_app(partial(_asked), partial(_tasked, str(folder)))
            init: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
            if "RAY_ADDRESS" not in os.environ:
                # A cluster that is there knows its cores, and refuses to be told.
                init["num_cpus"] = cores()
            resources: Any = {
                "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
                "init_args": init,
            }
            simulate(server, app, num_supernodes=clients, backend_config=resources)
        except BaseException as error:
            self._error = error

    def _serve(self, grid: Any, context: Any) -> None:
        """The server's app: it lends its Grid until all is over."""
        self._grids.put(grid)
        self._over.wait()

    def node_ids(self, clients: int) -> list[int]:
        """The numbers of all nodes, once they are there."""
        while True:
            found = sorted(self.grid.get_node_ids())
            if len(found) == clients:
                return found
            self.check()
            self._over.wait(0.05)

    def check(self) -> None:
        """Raise if the simulation has ended by itself."""
        if self._thread.is_alive():
            return
        reason = "it ended." if self._error is None else explained(_cause(self._error))
        raise EngineError(f"Flower's simulation could not go on: {reason} Take --engine pool.")

    def close(self) -> None:
        """End it, and wait until its processes have ended."""
        self._over.set()
        self._thread.join(END_SECONDS)
        # Actors are told to end, and take a moment.
        end = time.monotonic() + END_SECONDS
        while time.monotonic() < end and any(map(_is_here, self.processes)):
            time.sleep(0.05)
        self._log.setLevel(self._log_level)
        # Flower adds the folders of this process to it.
        if self._python_path is None:
            os.environ.pop("PYTHONPATH", None)
        else:
            os.environ["PYTHONPATH"] = self._python_path


def _is_here(process: list[str | int]) -> bool:
    """Whether a process of this machine is there still."""
    host, number = process
    if host != socket.gethostname():
        return False
    try:
        os.kill(int(number), 0)
    except OSError:
        return False
    return True


def _cause(error: BaseException) -> BaseException:
    """What an error comes from in the end."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


# ---- in an actor ---------------------------------------------------------------------------------


def _asked(question: Head, node_config: Mapping[str, Any]) -> Head:
    return {"partition": partition_of(node_config), "process": process()}


def process() -> list[str | int]:
    """This process, on whatever machine it is."""
    return [socket.gethostname(), os.getpid()]


def _tasked(folder: str, letter: Letter, node_config: Mapping[str, Any]) -> Letter:
    client = partition_of(node_config)
    try:
        run = _run(folder, str(letter.note["run"]))
    except FedgroveError as error:
        return lost_letter("crashed", f"client {client} could not read its run: {error}")
    return node.answer(run, client, letter)


@lru_cache(maxsize=4)
def _run(folder: str, name: str) -> Run:
    """A run as the server wrote it; actors do the tasks of all clients."""
    files, data = pickle.loads((Path(folder) / name).read_bytes())
    for file in files:
        user_files.import_file(Path(file))
    run: Run = pickle.loads(data)
    return run
