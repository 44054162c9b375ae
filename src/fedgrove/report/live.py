"""A run as it stands while it trains: in a line, in a live table, and as a page that refreshes.

What is shown is read from the run folder by :mod:`fedgrove.runs.follow`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

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


def in_terminal(looks: Sequence[Look], height: int = 20) -> RenderableType:
    """Runs as a table, at most so many lines of them; those that train come first."""
    table = Table(box=None, pad_edge=False)
    for head in ("run", "state", "round", "", "score", "sent", "time", "left"):
        table.add_column(head, no_wrap=True, overflow="ellipsis")
    order = sorted(looks, key=lambda look: (look.is_over, look.state == "waiting"))
    for look in order[:height]:
        left = "" if look.left is None or look.is_over else duration(look.left)
        table.add_row(
            # Text, or a folder called [red] would be taken for a colour.
            Text(look.path),
            look.state,
            f"{look.round}/{look.rounds}",
            ProgressBar(total=max(1, look.rounds), completed=look.round, width=16),
            Text(look.score),
            mib(look.bytes),
            duration(look.spent),
            left,
        )
    if len(order) <= height:
        return table
    return Group(table, Text(f"... and {len(order) - height} more"))


# ---- a page --------------------------------------------------------------------------------------

STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.3rem; overflow-wrap: anywhere }
h2 { font-size: 1rem; margin: 1.5rem 0 0 }
progress { width: 100%; height: 1rem }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem }
dd { margin: 0 }
.scroll { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { text-align: left; padding: .2rem .8rem .2rem 0; white-space: nowrap }
svg { width: 100%; height: auto; max-height: 16rem; font-size: 14px }
polyline { fill: none; stroke: #2a9d4b; stroke-width: 2 }
line { stroke: #8888 }
text { fill: currentColor }
"""


def page_of(title: str, looks: Sequence[Look]) -> str:
    """Runs as a page that asks for itself again until all are over; whatever is a name is text."""
    is_over = all(look.is_over for look in looks)
    refresh = "" if is_over else f'<meta http-equiv="refresh" content="{REFRESH}">'
    blocks = [f"<h1>{escape(title)}</h1>"]
    if len(looks) == 1:
        blocks.extend(_one(looks[0]))
    else:
        blocks.extend(_several(looks))
    if is_over:
        blocks.append("<p>This page does not change any more.</p>")
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"{refresh}<title>{escape(title)}</title><style>{STYLE}</style>"
    )
    body = "".join(blocks)
    return f"<!doctype html><html lang=en><head>{head}</head><body>{body}</body></html>\n"


def _one(look: Look) -> list[str]:
    figures = [
        ("state", look.state),
        ("method", look.method),
        ("data", look.data),
        ("round", f"{look.round} of {look.rounds}"),
        ("score", look.score or "nobody was scored yet"),
        ("sent", mib(look.bytes)),
        ("time", duration(look.spent)),
    ]
    if look.left is not None and not look.is_over:
        figures.append(("left", f"about {duration(look.left)}"))
    rows = "".join(f"<dt>{name}</dt><dd>{escape(text)}</dd>" for name, text in figures)
    blocks = [
        f"<progress max={max(1, look.rounds)} value={look.round}></progress>",
        f"<dl>{rows}</dl>",
    ]
    if look.is_over:
        blocks.append(f"<p>{escape(ending(look))}</p>")
    blocks.append(_curve("mean score by round", look.scores))
    blocks.append(_curve("MiB sent by round", look.traffic))
    return blocks


def _several(looks: Sequence[Look]) -> list[str]:
    rows = []
    for look in looks[:ROWS]:
        cells = (
            look.path,
            look.state,
            f"{look.round}/{look.rounds}",
            look.score,
            mib(look.bytes),
            duration(look.spent),
        )
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    heads = "".join(
        f"<th>{head}</th>" for head in ("run", "state", "round", "score", "sent", "time")
    )
    blocks = [f"<div class=scroll><table><tr>{heads}</tr>{''.join(rows)}</table></div>"]
    if len(looks) > ROWS:
        blocks.append(f"<p>and {len(looks) - ROWS} more</p>")
    for look in looks:
        if look.state == "failed":
            blocks.append(f"<p>{escape(ending(look))}</p>")
    return blocks


def _curve(title: str, points: Sequence[tuple[int, float]]) -> str:
    """A line in SVG, which needs no script."""
    if len(points) < 2:
        return ""
    points = thinned(points)
    first = points[0][0]
    last = points[-1][0]
    low = min(value for _, value in points)
    high = max(value for _, value in points)
    # A curve that does not move lies in the middle.
    height = (high - low) or 1.0
    places = []
    for step, value in points:
        x = 60 + 720 * (step - first) / max(1, last - first)
        y = 180 - 160 * (value - low) / height
        places.append(f"{x:.1f},{y:.1f}")
    return (
        f"<h2>{title}</h2><svg viewBox='0 0 800 210' role=img aria-label='{title}'>"
        "<line x1=60 y1=180 x2=780 y2=180 /><line x1=60 y1=20 x2=60 y2=180 />"
        f"<text x=52 y=24 text-anchor=end>{high:.3g}</text>"
        f"<text x=52 y=184 text-anchor=end>{low:.3g}</text>"
        f"<text x=60 y=200>{first}</text><text x=780 y=200 text-anchor=end>{last}</text>"
        f"<polyline points='{' '.join(places)}' /></svg>"
    )


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
