"""The server of a run over real machines: enrols nodes and trains over them. It has no data.

The server asks nodes who they are and plans the run from their answers. Each node then builds its
side of the run and reports what it has built (:mod:`.roster`).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import chdir, closing
from pathlib import Path
from typing import Any

from .. import api
from ..config.experiment import Experiment, Federations
from ..config.plan import plan
from ..config.toml import from_toml
from ..engines.flower import messages
from ..engines.flower.engine import Flower
from ..errors import FedgroveError, InputError, check
from ..runs.folder import RunFolder
from ..runs.lockstep import Watch
from ..runs.result import Result
from .enrolment import LOG, TIMES_USUAL, show_log
from .keys import read_declared_keys
from .roster import Roster

WAIT = 600.0
"""Seconds that the server waits for all nodes to enrol."""
GRACE = 60.0
"""Seconds that the server waits for all nodes, if a quorum of them is enough."""
TIMEOUT = 600
"""Seconds after which a task without an answer is lost, unless another number is given.

A node that is connected and never answers would hold up the run for ever.
"""


def server_app(
    config: str | Path | Experiment,
    *,
    out: str | Path | None = None,
    clients: int | None = None,
    wait: float | None = None,
    timeout: float | None = None,
    quorum: int | None = None,
    grace: float | None = None,
    most_examples: float | None = None,
    keys: str | Path | None = None,
    watch: Watch | None = None,
    code: str | Path | None = None,
) -> Any:
    """Make a Flower ServerApp that trains a run over the nodes of its Grid.

    Args:
        config: A config.toml or an experiment; the nodes have the data.
        out: The run folder; a folder with an unfinished run is resumed.
        clients: The number of clients of the run.
        wait: Seconds to wait for them.
        timeout: Seconds after which a task without an answer is lost; 0: never. By default
            :data:`TIMEOUT`.
        quorum: This many clients suffice to start; the others may join during the run. None: all.
        grace: Seconds to wait for the others before a quorum is enough.
        most_examples: A client is refused if it reports more than this many times the median
            number of examples.
        keys: The folder with the nodes' public keys and ``partitions.toml``
            (:mod:`fedgrove.deploy.keys`); a node may then be the clients of its key only. None or
            "": any client.
        watch: Called with each line of metrics.jsonl as it is written.
        code: The folder with the files of your own method or net; by default the current folder.

    All but ``config``, ``watch`` and ``code`` may be left to the app's own configuration
    (``[tool.flwr.app.config]`` and ``flwr run --run-config``).
    """
    given = {
        "out": out,
        "clients": clients,
        "wait": wait,
        "timeout": timeout,
        "quorum": quorum,
        "grace": grace,
        "most_examples": most_examples,
        "keys": keys,
    }

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


DEFAULTS = {
    "wait": WAIT,
    "timeout": TIMEOUT,
    "grace": GRACE,
    "most_examples": TIMES_USUAL,
    "keys": "",
}
"""Options of a deployed run that may be left out; without ``quorum`` all clients must enrol."""
NAMES = ("out", "clients", "quorum", *DEFAULTS)


def _read_options(given: Mapping[str, Any], run_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a run: as given, otherwise from the app's configuration."""
    options: dict[str, Any] = {}
    for name in NAMES:
        options[name] = given.get(name)
        if options[name] is None:
            options[name] = run_config.get(name, DEFAULTS.get(name))
    out = options["out"]
    check(isinstance(out, str | Path) and str(out) != "", "out", out, "the path of a run folder")
    # Flower parses its configuration from TOML, where a bool or a text may stand as well.
    clients = options["clients"]
    check(type(clients) is int and clients >= 1, "clients", clients, "a whole number, 1 or more")
    if options["quorum"] is None:
        options["quorum"] = clients
    quorum = options["quorum"]
    is_quorum = type(quorum) is int and 1 <= quorum <= clients
    check(is_quorum, "quorum", quorum, f"a whole number from 1 to clients, {clients}")
    check(_is_seconds(options["wait"]), "wait", options["wait"], "0 seconds or more")
    check(_is_seconds(options["grace"]), "grace", options["grace"], "0 seconds or more")
    timeout = options["timeout"]
    check(_is_seconds(timeout), "timeout", timeout, "0 seconds or more, 0 for none")
    options["timeout"] = timeout or None
    times = options["most_examples"]
    is_factor = _is_seconds(times) and times >= 1
    check(is_factor, "most_examples", times, "1 or more, times the median of the clients")
    keys = options["keys"]
    check(isinstance(keys, str | Path), "keys", keys, 'the path of a folder with keys, or ""')
    return options


def _is_seconds(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


def serve(
    grid: Any,
    config: str | Path | Experiment,
    *,
    out: str | Path,
    clients: int,
    wait: float = WAIT,
    timeout: float | None = TIMEOUT,
    quorum: int | None = None,
    grace: float = GRACE,
    most_examples: float = TIMES_USUAL,
    keys: str | Path = "",
    watch: Watch | None = None,
    code: str | Path | None = None,
) -> Result:
    """Train a deployed run over the nodes of a Grid; arguments as for :func:`server_app`.

    ``timeout`` None: never.
    """
    # Before chdir: relative paths are those of the caller.
    path = Path(out).absolute()
    if not isinstance(config, Experiment):
        config = Path(config).absolute()
    declared = None
    if keys:
        declared = read_declared_keys(keys)
    else:
        LOG.warning(
            "any node may take part as any client; with keys = the folder of fedgrove keys, each "
            "node may only be the client of its key."
        )
    roster = Roster(grid, clients, quorum, grace, most_examples, declared)
    # The user's own files are named by their paths from there.
    with chdir(code or "."), closing(roster):
        experiment = config if isinstance(config, Experiment) else _read(config)
        _check_cohort(experiment, config, clients)
        federation = roster.enrol(wait)
        experiment = experiment.on(federation)
        planned = plan(experiment, path, Federations())
        is_begun = (path / "config.toml").is_file()
        if is_begun:
            _check_same(RunFolder.open(path).config, planned.config, path)
        roster.join(planned.run, planned.config)
        # Nodes are looked up before each exchange: they come and go.
        engine = Flower(
            roster.grid,
            roster.nodes,
            lambda run: roster.name,
            timeout,
            check=roster.poll_while_waiting,
            note_answer=roster.note_answer,
            absence=roster.explain_absence,
        )
        with closing(engine):
            if is_begun:
                net = None if isinstance(experiment.net, str) else experiment.net
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


def _check_cohort(experiment: Experiment, config: Path | Experiment, clients: int) -> None:
    """Refuse a cohort that is larger than the number of clients, before anybody is waited for."""
    cohort = experiment.cohort
    if cohort is not None and cohort > clients:
        where = "the experiment"
        if isinstance(config, Path):
            where = f"{config.parent.name}/{config.name} of the app"
        raise InputError(
            f"cohort is {cohort}, and the app is for {clients} clients; change cohort in {where}, "
            "or clients in its pyproject.toml (or --run-config)."
        )


def _check_same(begun: str, now: str, path: Path) -> None:
    """Refuse to resume a deployed run with a different config.toml or different clients."""
    if begun != now:
        raise InputError(
            f"{path} contains a run with a different config.toml or different clients; give a "
            "different folder, or the config and clients of that run."
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
    """Read the experiment of a deployed run from its config.toml."""
    try:
        text = path.read_text()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}.") from None
    return from_toml(text)
