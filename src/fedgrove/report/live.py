"""A run as it stands while it trains: in a line, in a live table, and as a page that refreshes.

What is shown is read from the run folder by :mod:`fedgrove.runs.follow`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from .figures import Drawing, Series, xy
from .page import Page
from .tables import duration, mib

REFRESH = 2
"""Seconds after which a page asks for itself again."""
POINTS = 300
"""A curve is drawn with no more points than this; a run may have a hundred thousand rounds."""
ROWS = 200
"""Runs of a sweep that a page lists."""

OVER = ("finished", "stopped", "failed")
"""The states after which nothing more comes."""


@dataclass(frozen=True)
class Look:
    """What can be seen of a run from outside at one moment."""

    path: str
    method: str
    data: str
    state: str
    """``waiting`` for its first round, ``training``, ``scoring`` after its last one, ``finished``,
    ``failed`` (a run of a sweep), or ``stopped``: nobody trains it, and it has no result."""
    round: int = 0
    rounds: int = 0
    bytes: int = 0
    score: str = ""
    spent: float = 0.0
    """Seconds that its rounds have taken."""
    left: float | None = None
    """Seconds that the rest will take, if it goes on as in the last rounds."""
    why: str = ""
    """Of a run that failed, or the score of one that is finished."""
    scores: tuple[tuple[int, float], ...] = ()
    """The mean score after each round in which clients were scored."""
    traffic: tuple[tuple[int, float], ...] = ()
    """Mebibytes sent up to each round."""

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come."""
        return self.state in OVER


def line_of(look: Look) -> str:
    """A run in one line.

    >>> line_of(Look("runs/a", "ditto", "digits", "training", 3, 10, 2**20, "mae 0.5", 6, 14))
    'runs/a: training, round 3/10, mae 0.5, 1.0 MiB, 6 s, about 14 s left'
    """
    words = [look.state, f"round {look.round}/{look.rounds}"]
    if look.score:
        words.append(look.score)
    words.append(mib(look.bytes))
    words.append(duration(look.spent))
    if look.left is not None and not look.is_over:
        words.append(f"about {duration(look.left)} left")
    return f"{look.path}: {', '.join(words)}"


def ending(look: Look) -> str:
    """The last sentence about a run that is over."""
    if look.state == "finished":
        score = f" {look.why}." if look.why else ""
        return f"{look.path} is finished.{score} Its table: fedgrove compare {look.path}"
    if look.state == "failed":
        return f"{look.path} failed after {look.round} rounds: {look.why}"
    return (
        f"{look.path} was stopped after {look.round} of {look.rounds} rounds: no process trains "
        "it, and it has no result. It was killed, interrupted or failed. "
        f"Go on with: fedgrove resume {look.path}"
    )


def total(looks: Sequence[Look]) -> str:
    """All runs of a sweep in one line: what is left of each alone would say little.

    Runs in lockstep share their time, and others come one after another, so times add up.

    >>> one = Look("a", "ditto", "digits", "training", 4, 10, 2**20, spent=8)
    >>> total([one, Look("b", "ditto", "digits", "waiting", 0, 10)])
    '2 runs: 4 of 20 rounds, 1.0 MiB, 8 s, about 32 s left'
    """
    done = sum(look.round for look in looks)
    spent = sum(look.spent for look in looks)
    words = [f"{done:,} of {sum(look.rounds for look in looks):,} rounds"]
    failed = sum(look.state == "failed" for look in looks)
    if failed:
        words.append(f"{failed} failed")
    words += [mib(sum(look.bytes for look in looks)), duration(spent)]
    ahead = sum(look.rounds - look.round for look in looks if not look.is_over)
    if done and ahead > 0:
        words.append(f"about {duration(spent / done * ahead)} left")
    return f"{len(looks)} runs: {', '.join(words)}"


def in_terminal(looks: Sequence[Look], height: int = 20) -> RenderableType:
    """Runs as a table, at most so many lines of them; those that train come first."""
    table = Table(box=None, pad_edge=False)
    is_one = len(looks) == 1
    for head in ("run", "state", "round", "", "score", "sent", "time"):
        table.add_column(head, no_wrap=True, overflow="ellipsis")
    if is_one:
        table.add_column("left", no_wrap=True, overflow="ellipsis")
    order = sorted(looks, key=lambda look: (look.is_over, look.state == "waiting"))
    for look in order[:height]:
        cells: list[RenderableType] = [
            # Text, or a folder called [red] would be taken for a colour.
            Text(look.path),
            look.state,
            f"{look.round}/{look.rounds}",
            ProgressBar(total=max(1, look.rounds), completed=look.round, width=16),
            Text(look.score),
            mib(look.bytes),
            duration(look.spent),
        ]
        if is_one:
            cells.append("" if look.left is None or look.is_over else duration(look.left))
        table.add_row(*cells)
    parts: list[RenderableType] = [table]
    if len(order) > height:
        parts.append(Text(f"... and {len(order) - height} more"))
    if not is_one:
        parts.append(Text(total(looks)))
    return Group(*parts)


# ---- a page --------------------------------------------------------------------------------------


def page_of(title: str, looks: Sequence[Look]) -> str:
    """Runs as a page that asks for itself again until all are over; whatever is a name is text."""
    page = Page(title)
    if len(looks) == 1:
        _one(page, looks[0])
    else:
        _several(page, looks)
    is_over = all(look.is_over for look in looks)
    if is_over:
        page.paragraph("This page does not change any more.")
    return page.html_without_script(refresh=None if is_over else REFRESH)


def _one(page: Page, look: Look) -> None:
    page.lead(f"{look.method} on {look.data}: {look.state}")
    page.progress(look.round, look.rounds)
    tiles = [
        (f"{look.round} of {look.rounds}", "rounds"),
        (look.score or "-", "mean over clients" if look.score else "nobody was scored yet"),
        (mib(look.bytes), "sent, both ways"),
        (duration(look.spent), "so far"),
    ]
    if look.left is not None and not look.is_over:
        tiles.append((f"about {duration(look.left)}", "left"))
    page.tiles(tiles)
    if look.is_over:
        page.paragraph(ending(look))
    drawings = []
    # What a score is called is known in words only; one in percent is kept as a share.
    is_share = look.score.endswith("%")
    unit = "score %" if is_share else "score"
    scores = [(at, 100 * value if is_share else value) for at, value in look.scores]
    for name, points, y_title in (
        ("Mean score by round", scores, unit),
        ("Sent so far", look.traffic, "MiB, both ways"),
    ):
        if len(points) > 1:
            drawings.append(_curve(name, points, y_title))
    page.figures(*drawings)


def _several(page: Page, looks: Sequence[Look]) -> None:
    page.lead(total(looks))
    page.progress(sum(look.round for look in looks), sum(look.rounds for look in looks))
    rows = []
    for look in looks[:ROWS]:
        rows.append(
            [
                look.path,
                look.state,
                f"{look.round}/{look.rounds}",
                look.score or "-",
                mib(look.bytes),
                duration(look.spent),
            ]
        )
    if rows:
        page.table(["run", "state", "round", "score", "sent", "time"], rows)
    if len(looks) > ROWS:
        page.paragraph(f"and {len(looks) - ROWS} more")
    for look in looks:
        if look.state == "failed":
            page.paragraph(ending(look))


def _curve(title: str, points: Sequence[tuple[int, float]], y_title: str) -> Drawing:
    points = thinned(points)
    x = [float(at) for at, _ in points]
    y: list[float | None] = [value for _, value in points]
    series = [Series("", x, y, marker="", size=1)]
    return xy(title, series, "round", y_title, whole_x=True)


def thinned(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """At most :data:`POINTS` of the points and the last one.

    >>> len(thinned([(i, 0.0) for i in range(100_000)])) <= POINTS + 1
    True
    >>> thinned([(1, 0.5), (2, 0.75)])
    [(1, 0.5), (2, 0.75)]
    """
    every = -(-len(points) // POINTS)
    kept = list(points[::every])
    if points and kept[-1] != points[-1]:
        kept.append(points[-1])
    return kept
