"""``fedgrove watch``: how far a run is, in the terminal or in a browser, until it ends."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ..errors import InputError, check
from ..options.definition import Options, option, option_class

if TYPE_CHECKING:
    from http.server import BaseHTTPRequestHandler

    from ..report.progress import RunStatus
    from ..runs.follow import Following

EVERY = 1.0
"""Seconds between two readings of the run folder."""
SAY_EVERY = 5.0
"""Seconds between two lines where the output is not a terminal."""
LINGER = 60.0
"""Seconds for which a page is still served after the run has ended."""
LOOPBACK = "127.0.0.1"
"""The loopback address: other machines cannot reach it."""


@option_class
class WatchOptions(Options):
    """Options of ``fedgrove watch``."""

    run: str | None = option(
        None,
        "The folder of a run or a sweep; by default the newest under runs/.",
        "[RUN]",
        complete="runs",
        is_argument=True,
    )
    _: KW_ONLY
    browser: bool = option(False, "Serve a web page on this machine, until Ctrl-C.")
    port: int | None = option(
        None,
        "With --browser: the port of the web page.",
        "N",
        without="any free port",
        allowed="between 1 and 65535",
        check=lambda port: 0 < port < 65536,
    )
    track: str | None = option(None, "Also send every number to tensorboard or mlflow.", "NAME")
    json: bool = option(False, "Print the current state as JSON, and exit.")


def watch(options: WatchOptions) -> None:
    """Show the progress of a run or a sweep until it ends.

    Nothing in its folder is changed.
    """
    options.check()
    is_served = options.port is None or options.browser
    check(is_served, "port", options.port, "given together with --browser")
    path = newest(Path("runs")) if options.run is None else Path(options.run)
    try:
        with _fed(path, options.track) as following:
            if options.json:
                print(json.dumps(list(map(asdict, following.read_statuses())), indent=1))
                return
            statuses = _serve(following, options.port or 0) if options.browser else _show(following)
    except KeyboardInterrupt:
        print("fedgrove: no longer watching; the run continues.", file=sys.stderr)
        return
    _say_the_end(statuses)
    if any(status.state != "finished" for status in statuses):
        raise typer.Exit(1)


def newest(place: Path) -> Path:
    """Find the run that ``fedgrove watch`` shows: the one that was written to last."""
    from .run import find_runs, last_written

    found = find_runs(place)
    if not found:
        raise InputError(f"there is no run under {place}; give a run folder: fedgrove watch RUN")
    return max(found, key=last_written)


@contextmanager
def _fed(path: Path, track: str | None) -> Iterator[Following]:
    """Follow a run; with ``track`` every line goes to a tracker too."""
    from ..report.track import make_tracker
    from ..runs.follow import Following

    if track is None:
        yield Following(path)
        return
    fed = make_tracker(track, Path())
    print(f"fedgrove: numbers go to {fed.place}", file=sys.stderr)
    try:
        yield Following(path, fed.log)
    finally:
        fed.close()


def _is_over(statuses: list[RunStatus]) -> bool:
    # A sweep that has no run yet has just begun.
    return bool(statuses) and all(status.is_over for status in statuses)


# ---- in the terminal -----------------------------------------------------------------------------


def _show(following: Following) -> list[RunStatus]:
    """Show how it goes until it is over."""
    from ..report.progress import status_table
    from ..report.terminal import is_live_terminal

    if not is_live_terminal(sys.stdout):
        return _say(following)
    from rich.console import Console
    from rich.live import Live

    console = Console()
    statuses = following.read_statuses()
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while not _is_over(statuses):
            live.update(status_table(statuses, max(3, console.height - 4)), refresh=True)
            time.sleep(EVERY)
            statuses = following.read_statuses()
    return statuses


def _say(following: Following) -> list[RunStatus]:
    """The same as lines, when something has changed and not too often."""
    from ..report.progress import describe_sweep, status_line

    said: dict[str, str] = {}
    said_at = 0.0
    while True:
        statuses = following.read_statuses()
        is_over = _is_over(statuses)
        if time.monotonic() - said_at >= SAY_EVERY or is_over:
            said_at = time.monotonic()
            for status in statuses:
                # Runs of a sweep share the machine: the time left is shown for all together.
                is_one = len(statuses) == 1
                line = status_line(status if is_one else replace(status, left=None))
                if said.get(status.path) != line:
                    said[status.path] = line
                    print(line, flush=True)
            if len(statuses) > 1:
                print(describe_sweep(statuses), flush=True)
        if is_over:
            return statuses
        time.sleep(EVERY)


def _say_the_end(statuses: list[RunStatus]) -> None:
    from ..report.progress import describe_end

    for status in statuses:
        print(describe_end(status))


# ---- in a browser --------------------------------------------------------------------------------


def _serve(following: Following, port: int) -> list[RunStatus]:
    """Serve a page until Ctrl-C, or until a while after the run is over."""
    # Imported late: it takes a while, and all other commands do without.
    from http.server import ThreadingHTTPServer

    class Server(ThreadingHTTPServer):
        """Ends without waiting for browsers that keep their connections open."""

        daemon_threads = True
        block_on_close = False

    latest = following.read_statuses()
    # Requests run in other threads and share the last statuses.
    seen = {"statuses": latest}
    try:
        server = Server((LOOPBACK, port), handler_of(str(following.path), lambda: seen["statuses"]))
    except OSError as error:
        raise InputError(
            f"--port is {port}, which cannot be used: {error.strerror or error}; choose a "
            "different port."
        ) from None
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.2})
    thread.start()
    try:
        address = f"http://{LOOPBACK}:{server.server_port}/"
        print(f"Open {address} in a browser on this machine. Press Ctrl-C to stop.", flush=True)
        over_at = None
        while over_at is None or time.monotonic() - over_at < LINGER:
            time.sleep(EVERY)
            seen["statuses"] = following.read_statuses()
            if over_at is None and _is_over(seen["statuses"]):
                over_at = time.monotonic()
                print(f"The run has ended; the web page stops in {LINGER:.0f} s.", flush=True)
        return seen["statuses"]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def handler_of(title: str, statuses: Callable[[], list[RunStatus]]) -> type[BaseHTTPRequestHandler]:
    """Return the handler of requests for ``fedgrove watch``: the page, and nothing else."""
    from http.server import BaseHTTPRequestHandler

    from ..report.progress import status_page

    class Handler(BaseHTTPRequestHandler):
        timeout = 10
        """Seconds after which a connection that says nothing is closed."""

        def do_GET(self) -> None:
            host = self.headers.get("Host", "").partition(":")[0]
            # Another site that calls itself by our address must not read it in the user's browser.
            if host not in (LOOPBACK, "localhost"):
                self.send_error(403)
            elif self.path != "/":
                self.send_error(404)
            else:
                self._answer(status_page(title, statuses()).encode())

        def _answer(self, page: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(page)))
            self.send_header("Cache-Control", "no-store")
            # No script runs, whatever a run is called.
            self.send_header(
                "Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'"
            )
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing: a page sends a request every two seconds."""

    return Handler
