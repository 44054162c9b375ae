"""The server of a run over real machines: enrols nodes and trains over them. It has no data.

The server asks nodes who they are and plans the run from their answers. Each node then builds its
side of the run and reports what it has built. Nodes that join later, or again, are asked before the
next exchange.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import chdir
from dataclasses import replace
from pathlib import Path
from typing import Any

from .. import __version__, api
from ..config.experiment import Experiment, Federations
from ..config.plan import plan
from ..config.toml import from_toml
from ..core import Lost
from ..data import Federation
from ..engines.flower import messages
from ..engines.flower.engine import Flower, ask
from ..engines.flower.messages import Head
from ..errors import EngineError, FedgroveError, InputError, check
from ..options.groups import VALIDATION
from ..runs.folder import RunFolder
from ..runs.lockstep import Watch
from ..runs.result import Result
from ..runs.run import Run
from . import enrolment
from .enrolment import LOG, EnrolledClient, show_log

WAIT = 600.0
"""Seconds that the server waits for all nodes to enrol."""
ANSWER = 120.0
"""Seconds that a node may take to enrol: it reads its data for that."""
RETURN = 30.0
"""Seconds that a node may take to enrol during a run, while the other nodes wait."""
AGAIN = 60.0
"""Seconds after which a node that was refused, or did not answer, is asked again."""


def server_app(
    config: str | Path | Experiment,
    *,
    out: str | Path | None = None,
    clients: int | None = None,
    wait: float | None = None,
    timeout: float | None = None,
    watch: Watch | None = None,
    code: str | Path | None = None,
) -> Any:
    """Make a Flower ServerApp that trains a run over the nodes of its Grid.

    Args:
        config: A config.toml or an experiment; the nodes have the data.
        out: The run folder; a folder with an unfinished run is resumed.
        clients: The number of nodes that must take part.
        wait: Seconds to wait for them.
        timeout: Seconds after which a task without an answer is lost; 0: never.
        watch: Called with each line of metrics.jsonl as it is written.
        code: The folder with the files of your own method or net; by default the current folder.

    ``out``, ``clients``, ``wait`` and ``timeout`` may be left to the app's own configuration
    (``[tool.flwr.app.config]`` and ``flwr run --run-config``).
    """
    given = {"out": out, "clients": clients, "wait": wait, "timeout": timeout}

    def main(grid: Any, context: Any) -> None:
        show_log()
        try:
            options = _read_options(given, context.run_config)
            serve(grid, config, **options, watch=watch, code=code)
        except FedgroveError as error:
            # In one line, before Flower shows where it was raised.
            LOG.error("%s", error)
            raise

    return messages.server_app(main)


def _read_options(given: Mapping[str, Any], run_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a run: as given, otherwise from the app's configuration."""
    options = {}
    for name, value in given.items():
        if value is None:
            value = run_config.get(name)
        options[name] = value
    out = options["out"]
    clients = options["clients"]
    wait = options["wait"]
    timeout = options["timeout"]
    check(isinstance(out, str | Path) and str(out) != "", "out", out, "the path of a run folder")
    # Flower parses its configuration from TOML, where a bool or a text may stand as well.
    check(type(clients) is int and clients >= 1, "clients", clients, "a whole number, 1 or more")
    if wait is None:
        wait = WAIT
    check(_is_seconds(wait), "wait", wait, "0 seconds or more")
    if timeout is None:
        timeout = 0
    check(_is_seconds(timeout), "timeout", timeout, "0 seconds or more, 0 for none")
    return {"out": out, "clients": clients, "wait": float(wait), "timeout": timeout or None}


def _is_seconds(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


def serve(
    grid: Any,
    config: str | Path | Experiment,
    *,
    out: str | Path,
    clients: int,
    wait: float = WAIT,
    timeout: float | None = None,
    watch: Watch | None = None,
    code: str | Path | None = None,
) -> Result:
    """Train a deployed run over the nodes of a Grid; arguments as for :func:`server_app`."""
    # Before chdir: relative paths are those of the caller.
    path = Path(out).absolute()
    if not isinstance(config, Experiment):
        config = Path(config).absolute()
    # The user's own files are named by their paths from there.
    with chdir(code or "."):
        return _serve(grid, config, path, clients, wait, timeout, watch)


def _serve(
    grid: Any,
    config: Path | Experiment,
    path: Path,
    clients: int,
    wait: float,
    timeout: float | None,
    watch: Watch | None,
) -> Result:
    if isinstance(config, Experiment):
        experiment = config
    else:
        experiment = _read(config)
    roster = Roster(grid)
    federation = roster.enrol(clients, wait)
    experiment = drop_data_options(experiment, federation)
    planned = plan(experiment, path, Federations())
    is_begun = (path / "config.toml").is_file()
    if is_begun:
        _check_same(RunFolder.open(path).config, planned.config, path)
    roster.join(planned.run, planned.config)
    # Nodes are looked up before each exchange: they come and go.
    engine = Flower(
        grid, roster.nodes, lambda run: roster.name, timeout, note_loss=roster.note_loss
    )
    if is_begun:
        net = None
        if not isinstance(experiment.net, str | None):
            net = experiment.net
        return api.resume(
            path,
            engine=engine,
            data=federation,
            net=net,
            trust=True,
            progress=False,
            watch=_log_lines(watch),
        )
    return api.train(experiment, path, engine=engine, watch=_log_lines(watch))


def _check_same(begun: str, now: str, path: Path) -> None:
    if begun != now:
        raise InputError(
            f"{path} holds a run with another config.toml or other clients; give another folder, "
            "or the config and clients of that run."
        )


def _log_lines(watch: Watch | None) -> Watch:
    """Return a function that logs each exchange, and then calls ``watch``."""

    def log_line(line: Mapping[str, Any]) -> None:
        lost = sum(map(len, line.get("lost", {}).values()))
        LOG.info("round %s: %s bytes up, %s lost", line["round"], line["bytes_up"], lost)
        for sentence in line.get("why", {}).values():
            LOG.warning("%s", sentence)
        if watch is not None:
            watch(line)

    return log_line


def _read(path: Path) -> Experiment:
    try:
        text = path.read_text()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}.") from None
    return from_toml(text)


def drop_data_options(experiment: Experiment, federation: Federation) -> Experiment:
    """Return the experiment on the nodes' data, without options for loading and splitting data."""
    return replace(
        experiment,
        data=federation,
        label=None,
        client=None,
        window=None,
        stride=None,
        channels=None,
        time=None,
        partition=None,
        scenario=None,
        split=None,
        validation=VALIDATION,
        clients=None,
        profile=None,
        trace=None,
        standardise=True,
    )


class Roster:
    """Which node has which partition, and what is known about it."""

    def __init__(self, grid: Any, check: Callable[[], None] = lambda: None) -> None:
        self.name = ""
        self.refused: dict[int, str] = {}
        """Why nodes were refused, by their numbers."""
        self._grid = grid
        self._check = check
        self._known: dict[int, EnrolledClient] = {}
        self._node_of: dict[int, int] = {}
        self._kind = ""
        self._config = ""
        self._half: Head = {}
        self._infos: dict[int, Any] = {}
        self._suspects: set[int] = set()
        self._asked_at: dict[int, float] = {}

    # ---- before the run --------------------------------------------------------------------------

    def enrol(self, clients: int, wait: float) -> Federation:
        """Wait until ``clients`` nodes with different partitions have enrolled.

        Returns:
            Their federation, without examples.

        Raises:
            EngineError: There are fewer after ``wait`` seconds.
        """
        started = time.monotonic()
        while True:
            self._greet(self._newcomers())
            self._kind = ""
            # Decided anew each time: the first node may be the odd one.
            if self._known:
                self._kind = enrolment.find_usual_kind(self._known)
            # A copy: a refused node is removed from the dictionary.
            for node in list(self._known):
                self._try(node, self._check_kind)
            if len(self._node_of) >= clients:
                break
            if time.monotonic() - started > wait:
                raise EngineError(self._too_few(clients, wait))
            # Flower has no event for a new node, so it is polled.
            time.sleep(0.5)
        by_partition = {p: self._known[node] for p, node in self._node_of.items()}
        self._infos = {p: each.info for p, each in by_partition.items()}
        return enrolment.make_federation(by_partition, self._kind)

    def join(self, run: Run, config: str) -> None:
        """Let every node build its side of the run; a node that builds another run ends it."""
        self._config = enrolment.config_for_nodes(config)
        self.name = enrolment.name_run(self._config)
        self._half = enrolment.describe_half(run, config)
        asked = len(self._node_of)
        self._join(list(self._node_of.values()))
        if len(self._node_of) < asked:
            raise EngineError(self._too_few(asked))

    def _too_few(self, clients: int, wait: float | None = None) -> str:
        waited = ""
        if wait is not None:
            waited = f" within {wait:g} s"
        sentence = f"{len(self._node_of)} of {clients} clients take part{waited}."
        if self.refused:
            return f"{sentence} Refused: {' '.join(sorted(set(self.refused.values())))}"
        return f"{sentence} Start the other nodes, or ask for fewer clients."

    # ---- during the run --------------------------------------------------------------------------

    def nodes(self) -> Mapping[int, int]:
        """Return the node of each partition; new nodes and lost ones are asked to join first."""
        present = set(self._grid.get_node_ids())
        # A copy: entries are deleted on the way.
        for partition, node in list(self._node_of.items()):
            if node not in present or node in self._suspects:
                # A restarted node may have lost its folder.
                del self._node_of[partition]
                self._known.pop(node, None)
                # It is asked at once, not after AGAIN seconds.
                self._asked_at.pop(node, None)
        self._suspects.clear()
        newcomers = self._newcomers()
        if newcomers:
            self._greet(newcomers, RETURN)
            greeted = []
            for n in newcomers:
                if n in self._node_of.values():
                    greeted.append(n)
            for node in greeted:
                self._try(node, self._check_same_client)
            self._join([n for n in greeted if n in self._node_of.values()])
        return dict(self._node_of)

    def note_loss(self, node: int, lost: Lost) -> None:
        """Note a lost task; before its next task, the node is asked to join again."""
        # Other losses, such as a refused report, say nothing about whether the node is
        # still there.
        if lost.reason in ("died", "late", "unsent"):
            self._suspects.add(node)

    def _check_kind(self, node: int) -> None:
        enrolment.check_kind(self._known[node], self._kind)

    def _check_same_client(self, node: int) -> None:
        self._check_kind(node)
        known = self._known[node]
        if known.partition not in self._infos:
            raise InputError(
                f"client {known.partition} enrolled after the run had begun; it can take part in "
                "the next run."
            )
        enrolled_with = self._infos[known.partition].examples
        if known.info.examples != enrolled_with:
            raise InputError(
                f"client {known.partition} has {known.info.examples} examples, and enrolled with "
                f"{enrolled_with}; give it the data that it began with."
            )

    # ---- asking ----------------------------------------------------------------------------------

    def _newcomers(self) -> list[int]:
        """Return the nodes to ask: new ones, and after a while refused or silent ones."""
        now = time.monotonic()
        newcomers = []
        # Sorted, so that of two nodes with one partition the same one is refused each
        # time.
        for node in sorted(self._grid.get_node_ids()):
            is_known = node in self._node_of.values()
            if not is_known and now - self._asked_at.get(node, -AGAIN) >= AGAIN:
                self._asked_at[node] = now
                newcomers.append(node)
        return newcomers

    def _greet(self, nodes: list[int], seconds: float = ANSWER) -> None:
        """Ask nodes who they are, and note those that may take part."""
        question = {"ask": "who", "version": __version__}
        answers = ask(self._grid, dict.fromkeys(nodes, question), seconds, self._check)

        def note(node: int) -> None:
            self._note(node, answers[node])

        for node in nodes:
            if node in answers:
                self._try(node, note)

    def _note(self, node: int, said: Head) -> None:
        if "refused" in said:
            raise InputError(f"a node refused to take part: {said['refused']}")
        known = enrolment.read_enrolment(said)
        other = self._node_of.get(known.partition)
        if other is not None and other != node:
            raise InputError(
                f"two nodes report that they are client {known.partition}; the first one takes "
                "part. Give every node a different partition-id."
            )
        self._known[node] = known
        self._node_of[known.partition] = node
        self.refused.pop(node, None)

    def _join(self, nodes: list[int]) -> None:
        """Let nodes build their sides of the run, and compare them with the server's."""
        question = {"ask": "join", "version": __version__, "config": self._config}
        answers = ask(self._grid, dict.fromkeys(nodes, question), ANSWER, self._check)

        def check(node: int) -> None:
            said = answers.get(node)
            client = self._known[node].partition
            if said is None:
                raise InputError(f"client {client} did not say whether it takes part.")
            if "refused" in said:
                raise InputError(f"client {client} refused to take part: {said['refused']}")
            enrolment.check_half(said, self._half)

        for node in nodes:
            self._try(node, check)

    def _try(self, node: int, step: Callable[[int], None]) -> None:
        """Take a step with a node; if it is refused, log the reason on both sides."""
        try:
            step(node)
        except FedgroveError as error:
            sentence = str(error)
            LOG.error("%s", sentence)
            self.refused[node] = sentence
            known = self._known.pop(node, None)
            if known is not None and self._node_of.get(known.partition) == node:
                del self._node_of[known.partition]
            # The node logs the reason, where its owner looks; 10 s, as no answer is
            # needed.
            ask(self._grid, {node: {"ask": "refused", "why": sentence}}, 10.0, self._check)
