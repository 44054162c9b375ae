"""Flower's simulation as an engine: one node per client, one Ray actor per core.

Ray starts with the first exchange, which takes about 15 seconds, and ends with the engine. Actors
read the runs and the clients' data from a file; they are in no message.
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
from ..pool.message import RunPickler, explain_unpicklable
from ..work import explain_error
from . import node
from .engine import WINDOW, Flower, ask
from .messages import Head, Letter, check_installed, client_app, make_loss, read_partition

END_SECONDS = 60.0
"""Seconds that Ray may take to end."""


@dataclass(eq=False)
class Simulation:
    """Runs tasks on Flower and Ray on this machine, started when they are needed.

    With a ``timeout`` there are at most as many open tasks as actors, so that a client's time does
    not pass while it waits for an actor.
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
        ray = self._start_ray(clients)
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
        # Clients do not get what the server knows about others.
        bare = replace(run, known_state=KnownState(), lengths=RecentLengths())
        buffer = BytesIO()
        try:
            RunPickler(buffer, pickle.HIGHEST_PROTOCOL).dump(bare)
        except Exception as error:
            raise explain_unpicklable(error) from None
        data = buffer.getvalue()
        files = [str(file.absolute()) for file in user_files.find_files_in_pickle(data)]
        (self._folder / name).write_bytes(pickle.dumps((files, data)))
        self._names[run] = name

    def _start_ray(self, clients: int) -> _Ray:
        """Return Ray with one node per client, restarted if it has too few nodes."""
        if self._ray is not None and len(self._nodes) >= clients:
            return self._ray
        if clients > MOST_AT_ONCE:
            raise InputError(
                f"there are {clients} clients, and Flower's simulation supports at most "
                f"{MOST_AT_ONCE}; use --engine pool, or fewer clients."
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
    """Flower's simulation in a thread; its Grid is used from the main thread."""

    def __init__(self, clients: int, folder: Path) -> None:
        self._over = threading.Event()
        self._grids: queue.Queue[Any] = queue.Queue()
        self._error: BaseException | None = None
        self.processes: list[list[str | int]] = []
        self._python_path = os.environ.get("PYTHONPATH")
        # flwr logs every step and every deprecation.
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
            # Without this, Ray warns at every start about a future default.
            os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
            server: Any = ServerApp()
            server.main()(self._serve)
            app = client_app(partial(_answer), partial(_do_task, str(folder)))
            init: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
            if "RAY_ADDRESS" not in os.environ:
                # A running cluster knows its cores, and refuses this option.
                init["num_cpus"] = cores()
            resources: Any = {
                "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
                "init_args": init,
            }
            simulate(server, app, num_supernodes=clients, backend_config=resources)
        except BaseException as error:
            self._error = error

    def _serve(self, grid: Any, context: Any) -> None:
        """Run as the ServerApp: pass on its Grid, and wait until the end."""
        self._grids.put(grid)
        self._over.wait()

    def node_ids(self, clients: int) -> list[int]:
        """Return the ids of all simulated Flower nodes, once all have started."""
        while True:
            found = sorted(self.grid.get_node_ids())
            if len(found) == clients:
                return found
            self.check()
            self._over.wait(0.05)

    def check(self) -> None:
        """Raise if the Flower simulation has ended by itself."""
        if self._thread.is_alive():
            return
        reason = "it ended." if self._error is None else explain_error(_find_cause(self._error))
        raise EngineError(f"Flower's simulation stopped: {reason} Use --engine pool.")

    def close(self) -> None:
        """End the Flower simulation, and wait until its processes have ended."""
        self._over.set()
        self._thread.join(END_SECONDS)
        # Actors take a moment to end.
        end = time.monotonic() + END_SECONDS
        while time.monotonic() < end and any(map(_is_running, self.processes)):
            time.sleep(0.05)
        self._log.setLevel(self._log_level)
        # Flower adds the folders of this process to PYTHONPATH.
        if self._python_path is None:
            os.environ.pop("PYTHONPATH", None)
        else:
            os.environ["PYTHONPATH"] = self._python_path


def _is_running(process: list[str | int]) -> bool:
    """Whether a process on this machine still runs."""
    host, number = process
    if host != socket.gethostname():
        return False
    try:
        os.kill(int(number), 0)
    except OSError:
        return False
    return True


def _find_cause(error: BaseException) -> BaseException:
    """Return the first error in a chain of causes."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


# ---- in an actor ---------------------------------------------------------------------------------


def _answer(question: Head, node_config: Mapping[str, Any]) -> Head:
    """Answer the question for a simulated node's partition and process."""
    return {"partition": read_partition(node_config), "process": describe_process()}


def describe_process() -> list[str | int]:
    """Return the host and the id of this process of Flower's simulation."""
    return [socket.gethostname(), os.getpid()]


def _do_task(folder: str, letter: Letter, node_config: Mapping[str, Any]) -> Letter:
    client = read_partition(node_config)
    try:
        run = _read_run(folder, str(letter.note["run"]))
    except FedgroveError as error:
        return make_loss("crashed", f"client {client} could not read its run: {error}")
    return node.answer_letter(run, client, letter)


@lru_cache(maxsize=4)
def _read_run(folder: str, name: str) -> Run:
    """Read a run that the server wrote; cached, because an actor does tasks of many clients."""
    files, data = pickle.loads((Path(folder) / name).read_bytes())
    for file in files:
        user_files.import_file(Path(file))
    run: Run = pickle.loads(data)
    return run
