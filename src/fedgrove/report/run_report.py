"""The report of one run: how well clients are served, what it cost, and how to run it again.

It is made from plain values (:class:`RunRecord`), so it can be made for any run folder: finished,
unfinished, failed, or without a single round. What is not known is left out. The sections and their
texts are in ``templates/run.html``, which calls the methods of :class:`_Report` for charts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..wire.ledger import sum_by_cause
from . import charts, tables
from .charts import Chart, Limits, Series, thin_out
from .page import COLOURS, Page
from .tables import Line, Scores, Summary, read_column

MESSAGE_PARTS = {
    "values": "values of weights",
    "mask": "masks",
    "scores": "evidence (scores)",
    "indices": "indices",
    "codebook": "codebooks",
    "header": "headers",
}
"""Names of the parts of messages, in the order they are drawn."""
LAYER_DENSITY = "density:"
"""The start of the name of a method's own value that is the density of a layer."""
DENSE = 0.9995
"""From this density on, all weights count as kept."""
MOST_POINTS = 400
"""Points of a line; of more rounds, some are left out."""
MOST_GROUPS = 12
"""More groups than this have no colours."""
MOST_BARS = 60
"""More groups than this are not drawn."""
SCORES_BY_ROUND = {
    "mean": "mean",
    "worst tenth": "worst10",
    "worst client": "worst",
    "pooled": "pooled",
}
"""The lines of a chart of scores, and the fields of :class:`Scores`."""

Numbers = NDArray[np.float64]
Client = Mapping[str, Any]
"""``client``, ``name``, ``examples``, ``test``, ``score``, ``density``, ``group``, ``task``."""


@dataclass(frozen=True)
class RunRecord:
    """What is known about a run."""

    path: str
    options: Mapping[str, Any]
    """The table [run] of its config.toml."""
    config: str = ""
    lines: Sequence[Line] = ()
    summary: Summary | None = None
    clients: Sequence[Client] = ()
    layers: Mapping[str, float] = field(default_factory=dict)
    """By layer: the share of its weights that is not zero at the end, mean over models."""
    similarity: Sequence[Sequence[float]] = ()
    """The cosine between the models of each two clients in ``similar``, relative to their mean."""
    similar: Sequence[str] = ()
    baselines: Mapping[str, Summary] = field(default_factory=dict)
    """The summaries of local and fedavg on the same data, from folders next to this one."""
    failure: str = ""


def make_run_report(record: RunRecord) -> Page:
    """Return the whole HTML report of a run."""
    report = _Report(record)
    title = f"{report.method} on {report.data}"
    return Page(title, report.describe_state(), template="run.html", record=record, report=report)


def headline(summary: Summary, baselines: Mapping[str, Summary]) -> str:
    """Return the headline of a run's report, compared with fedavg and with training alone."""
    method = str(summary["method"])
    if "tasks" in summary:
        means = []
        for name, task in summary["tasks"].items():
            scores = Scores.from_task(task)
            means.append(f"{scores.describe(scores.mean)} on {name}")
        return f"{method} gives clients {', '.join(means)}."
    scores = Scores.from_summary(tables.scores_after(summary, tables.finetune_lengths(summary)[0]))
    if scores.mean is None:
        return f"{method} was trained for {summary['rounds']} rounds; no client was scored."
    score = scores.describe(scores.mean)
    if scores.share:
        score += f" {scores.metric}"
    text = f"{method} gives its {summary['clients']:,} clients {score} on average"
    if summary["clients"] == 1:
        text = f"{method} gives its only client {score}"
    first, *longer = tables.finetune_lengths(summary)
    text += f" {tables.describe_finetuning(first)}{_compare_baselines(method, baselines, first)}"
    if longer:
        tuned = Scores.from_summary(tables.scores_after(summary, longer[-1]))
        text += f"; {tables.describe_finetuning(longer[-1])} {tuned.describe(tuned.mean)}"
        text += _compare_baselines(method, baselines, longer[-1])
    costs = []
    sent = summary["bytes_up"] + summary["bytes_down"]
    fedavg = baselines.get("fedavg", {})
    fedavg_sent = fedavg.get("bytes_up", 0) + fedavg.get("bytes_down", 0)
    is_compared = method != "fedavg" and fedavg_sent > 0
    if is_compared:
        costs.append(f"{tables.format_percent(sent / fedavg_sent)} of fedavg's bytes")
    if summary.get("density") is not None and summary["density"] < DENSE:
        costs.append(f"{tables.format_percent(summary['density'])} of the weights")
    if costs:
        text += f", with {' and '.join(costs)}"
    if not is_compared:
        text += f"; {tables.format_bytes(sent)} were sent in total"
    return f"{text}."


def _compare_baselines(method: str, baselines: Mapping[str, Summary], epochs: int) -> str:
    """Return what a report's baselines give after some epochs of fine-tuning."""
    others = []
    for name, phrase in {"fedavg": "fedavg gives", "local": "training alone gives"}.items():
        other = Scores.from_summary(tables.scores_after(baselines.get(name, {}), epochs))
        if name != method and other.mean is not None:
            others.append(f"{phrase} {other.describe(other.mean)}")
    return f", where {' and '.join(others)}" if others else ""


class _Report:
    """The charts and texts of a report, as its template asks for them."""

    def __init__(self, record: RunRecord) -> None:
        self.record = record
        self.summary = record.summary or {}
        self.options = {**record.options, **self.summary}
        self.method = str(self.options.get("method") or "a run")
        self.data = str(self.options.get("data") or "data")
        self.lengths = tables.finetune_lengths(self.summary)
        self.scores = self.scores_after(self.lengths[0])
        # Of older runs the scores before fine-tuning may not be known.
        self.score_key = tables.key_after("score", self.lengths[0])
        self.is_mixed = "tasks" in self.summary
        self.when = tables.describe_finetuning(self.lengths[0])
        self.metrics: dict[str, Scores] = {}
        self.points: list[dict[str, Any]] = []
        self._read_points()
        self.rounds = int(max(read_column(self.points, "round"), default=0))
        self.scored: list[Client] = []
        self.groups: dict[int, list[Client]] = {}
        for client in record.clients:
            if client.get(self.score_key) is not None:
                self.scored.append(client)
            if client.get("group") is not None:
                self.groups.setdefault(client["group"], []).append(client)

    def describe_state(self) -> str:
        """Return the warning of a run that is not finished."""
        rounds = str(self.rounds)
        if self.record.options.get("rounds"):
            rounds += f" of {self.record.options['rounds']}"
        if self.record.failure:
            return f"failed after {rounds} rounds"
        if self.record.summary is None:
            return f"unfinished: {rounds} rounds"
        return ""

    def headline(self) -> str:
        """Return the headline of the report: the result in one sentence."""
        return headline(self.summary, self.record.baselines)

    def scores_after(self, epochs: int) -> Scores:
        """Return the report's scores after one of several lengths of fine-tuning."""
        return Scores.from_summary(tables.scores_after(self.summary, epochs))

    # ---- round by round --------------------------------------------------------------------------

    def _read_points(self) -> None:
        """Read a point per line: sums so far, and scores as ``metric/name``."""
        up = 0.0
        down = 0.0
        for line in self.record.lines:
            up += line.get("bytes_up", 0) / 2**20
            down += line.get("bytes_down", 0) / 2**20
            point = {
                "round": line.get("round", 0),
                "up": up,
                "down": down,
                "sent": up + down,
                "clock": line.get("virtual_clock"),
                "density": line.get("density"),
                "loss": line.get("loss_mean"),
            }
            for name, value in (line.get("figures") or {}).items():
                if name.startswith(LAYER_DENSITY):
                    point[name] = value
            for name, task in line.get("tasks", {}).items():
                self._add_scores(point, {f"mean of {name}": "mean"}, Scores.from_task(task))
            if "tasks" not in line:
                self._add_scores(point, SCORES_BY_ROUND, Scores.from_summary(line))
            self.points.append(point)

    def _add_scores(self, point: dict[str, Any], names: Mapping[str, str], scores: Scores) -> None:
        if scores.mean is not None:
            self.metrics.setdefault(scores.metric, scores)
            for name, field_name in names.items():
                score = getattr(scores, field_name)
                if score is not None:
                    point[f"{scores.metric}/{name}"] = scores.factor * score

    def round_charts(self) -> list[Chart]:
        """Draw the scores, bytes, density and loss by round."""
        drawn = self._score_charts("round", "round", "by round")
        sent = {"up": "from devices (up)", "down": "to devices (down)"}
        drawn += _draw_points("Bytes so far", self.points, sent, "MiB", y_from_zero=True)
        drawn += self._score_charts("sent", "MiB sent, both ways", "against bytes")
        if self.rounds < 2:
            return drawn
        if np.any(read_column(self.points, "density") < DENSE):
            y_title = "share of weights"
            names = {"density": ""}
            drawn += _draw_points("Weights kept", self.points, names, y_title, 2, y_from_zero=True)
        title = "Loss on test examples"
        y_title = "loss, mean over clients"
        names = {"loss": ""}
        return drawn + _draw_points(title, self.points, names, y_title, 4, y_from_zero=True)

    def _find_keys(self, prefix: str) -> list[str]:
        """Return the keys of the points that begin with a prefix, in order of appearance."""
        keys = dict.fromkeys(chain.from_iterable(self.points))
        return [key for key in keys if key.startswith(prefix)]

    def _score_charts(self, x_key: str, x_title: str, title: str) -> list[Chart]:
        """Draw a chart per metric; all scores by round, else the means only."""
        drawn = []
        for metric, scores in self.metrics.items():
            prefix = f"{metric}/" if x_key == "round" else f"{metric}/mean"
            names = {key: key.removeprefix(f"{metric}/") for key in self._find_keys(prefix)}
            drawn += _draw_points(
                f"{scores.title} {title}, before fine-tuning",
                self.points,
                names,
                scores.name,
                x_key=x_key,
                x_title=x_title,
                y_within=scores.limits,
            )
        return drawn

    # ---- clients and groups ----------------------------------------------------------------------

    def client_charts(self) -> list[Chart]:
        """Draw every client as a dot, and all clients from the worst to the best."""
        if self.is_mixed or len(self.scored) < 2:
            return []
        return [self._draw_clients(), self._draw_ranks()]

    def _draw_clients(self) -> Chart:
        """Draw each client's score against its density, or else against how much it trains on."""
        key = "density"
        against = "density"
        x_title = "density: share of weights kept"
        within: Limits = (0.0, 1.0)
        # Not true where a density is unknown: it is NaN.
        varies = np.ptp(read_column(self.scored, "density")) > 1e-6
        if not varies and self.scored[0].get("examples") is not None:
            key = "examples"
            against = "data it trains on"
            x_title = "training examples of the client"
            within = (0.0, math.inf)
        x = np.nan_to_num(read_column(self.scored, key))
        x += _spread_dots(x, read_column(self.scored, "client"))
        series: list[Series] = []
        for name, chosen in self._find_groups().items():
            tips = []
            keys = []
            for i in chosen:
                tips.append(self._describe_client(self.scored[i]))
                keys.append(str(self.scored[i]["client"]))
            series.append(
                Series(
                    f"{name} ({len(chosen):,})",
                    x[chosen],
                    self.scores.factor * read_column(self.scored, self.score_key)[chosen],
                    len(series) % COLOURS,
                    line=False,
                    tips=tips,
                    keys=keys,
                    size=_client_size(len(x)),
                )
            )
        return charts.draw_xy(
            f"{self.scores.title} of every client against {against}",
            series,
            x_title,
            self.scores.name,
            y_within=self.scores.limits,
            x_within=within,
            whole_x=key == "examples",
        )

    def _find_groups(self) -> dict[str, NDArray[np.int64]]:
        """Return the positions of the scored clients by the name of their group."""
        numbers = read_column(self.scored, "group")
        groups = np.unique(numbers[~np.isnan(numbers)])
        if not 0 < len(groups) <= MOST_GROUPS:
            return {"clients": np.arange(len(numbers))}
        found = {f"group {group:g}": np.flatnonzero(numbers == group) for group in groups}
        if np.isnan(numbers).any():
            found["in no group"] = np.flatnonzero(np.isnan(numbers))
        return found

    def _describe_client(self, client: Client) -> str:
        parts = [f"client {client['name']}", self.scores.describe(client[self.score_key])]
        if client.get("density") is not None:
            parts.append(f"density {client['density']:.2f}")
        if client.get("group") is not None:
            parts.append(f"group {client['group']}")
        if client.get("examples") is not None:
            parts.append(f"{client['examples']} examples")
        return ", ".join(parts)

    def _draw_ranks(self) -> Chart:
        """Draw the clients from the worst to the best, next to those of local and fedavg."""
        methods = {self.method: read_column(self.scored, self.score_key)}
        for name, summary in self.record.baselines.items():
            tuned = tables.scores_after(summary, self.lengths[0])
            others = tuned.get(f"{summary.get('metric') or 'accuracy'}_clients")
            if name != self.method and others:
                methods[name] = np.array(list(others.values()))
        series: list[Series] = []
        for name, scores in methods.items():
            ranked = np.sort(scores)
            if not self.scores.more_is_better:
                ranked = ranked[::-1]
            ranks = np.array(thin_out(range(len(ranked)), MOST_POINTS))
            x = 100 * (ranks + 1) / len(ranked)
            y = self.scores.factor * ranked[ranks]
            series.append(Series(name, x, y, len(series), size=_dot_size(len(x))))
        return charts.draw_xy(
            "Clients from worst to best",
            series,
            "% of clients",
            self.scores.name,
            y_within=self.scores.limits,
            x_within=(0.0, 100.0),
        )

    def client_columns(self) -> dict[str, str]:
        """Return the columns of the table of clients: those of which anything is known."""
        # Tasks have different metrics.
        score = "score" if self.is_mixed else self.scores.name
        columns = {
            "name": "client",
            "task": "task",
            "group": "group",
            "examples": "training examples",
            "test": "test examples",
            **{
                tables.key_after("score", epochs): f"{score} {tables.describe_finetuning(epochs)}"
                for epochs in self.lengths
            },
            "density": "density",
        }
        known = {key for each in self.record.clients for key in each if each[key] is not None}
        return {key: name for key, name in columns.items() if key in known}

    def group_charts(self) -> list[Chart]:
        """Draw the score of each group, and the similarity of the clients' models."""
        drawn = []
        if 1 < len(self.groups) <= MOST_BARS and not self.is_mixed:
            means = {}
            for number, clients in sorted(self.groups.items()):
                noun = "client" if len(clients) == 1 else "clients"
                scores = read_column(clients, self.score_key)
                if not np.isnan(scores).all():
                    mean = float(np.nanmean(scores))
                    means[f"group {number}, {len(clients):,} {noun}"] = mean
            drawn.append(
                charts.draw_bars(
                    f"{self.scores.title} of each group",
                    means,
                    self.scores.name,
                    2,
                    partial(self.scores.format, digits=1),
                    scale=self.scores.factor,
                )
            )
        if len(self.record.similarity) > 1:
            names = self.record.similar
            drawn.append(
                charts.draw_heat_map(
                    "Similarity of clients' models",
                    self.record.similarity,
                    names,
                    names,
                    x_title="clients, by group" if " (group " in names[0] else "clients",
                    ends=(-1.0, 1.0),
                )
            )
        return drawn

    # ---- layers, bytes, losses and time ----------------------------------------------------------

    def layer_charts(self) -> list[Chart]:
        """Draw the densities of layers by round, where the method reports them, and at the end."""
        drawn = []
        keys = self._find_keys(LAYER_DENSITY)
        points = [point for point in self.points if not point.keys().isdisjoint(keys)]
        if len(points) > 1:
            points = thin_out(points, MOST_POINTS)
            names = [key.removeprefix(LAYER_DENSITY) for key in keys]
            values = [read_column(points, key) for key in keys]
            rounds = [f"round {point['round']}" for point in points]
            ends = (0.0, 1.0)
            title = "Density by round"
            drawn.append(
                charts.draw_heat_map(title, values, names, rounds, x_title="rounds →", ends=ends)
            )
        layers = self.record.layers
        if min(layers.values(), default=1.0) < DENSE:
            title = "At the end"
            x_title = "% of weights kept"
            drawn.append(charts.draw_bars(title, layers, x_title, 5, _format_density, scale=100))
        return drawn

    def causes(self) -> dict[str, int]:
        """Return the bytes by cause for a chart, without those that cost nothing."""
        causes = sum_by_cause(self.record.lines).items()
        return {cause.replace("exchanges", "outside rounds"): n for cause, n in causes if n}

    def byte_charts(self) -> list[Chart]:
        """Draw the bytes by what was sent and by cause."""
        counts: Counter[tuple[str, str]] = Counter()
        for line in self.record.lines:
            for direction in ("up", "down"):
                for part, count in (line.get(f"bytes_{direction}_parts") or {}).items():
                    # Parts that have no name of their own are values.
                    known = part if part in MESSAGE_PARTS else "values"
                    counts[known, direction] += count
        marks = []
        for i, (part, name) in enumerate(MESSAGE_PARTS.items()):
            up = counts[part, "up"]
            down = counts[part, "down"]
            if up or down:
                tips = [f"{name}: {tables.format_bytes(count)}" for count in (up, down)]
                marks.append(charts.Marks(name, [up / 2**20, down / 2**20], i, tips=tips))
        drawn = []
        if marks:
            labels = ["from devices", "to devices"]
            drawn.append(charts.draw_rows("By what was sent", labels, marks, "MiB", stacked=True))
        spent = self.causes()
        if len(spent) > 1:
            title = "By cause, both ways"
            drawn.append(
                charts.draw_bars(title, spent, "MiB", 3, tables.format_bytes, scale=2**-20)
            )
        return drawn

    def losses(self) -> list[list[str]]:
        """Return a row per reason for which reports were lost or refused."""
        counts: Counter[tuple[str, str]] = Counter()
        first_errors: dict[str, str] = {}
        for line in self.record.lines:
            for kind in ("lost", "refused"):
                for reason, clients in (line.get(kind) or {}).items():
                    counts[reason, kind] += len(clients)
            first_errors = {**(line.get("why") or {}), **first_errors}
        rows = []
        for (reason, kind), count in counts.items():
            rows.append([reason, kind, f"{count:,}", first_errors.get(reason, "")])
        return rows

    def loss_charts(self) -> list[Chart]:
        """Draw the lost and the refused answers by round."""
        # Several lines may have one round: exchanges that were no round.
        points: dict[int, dict[str, int]] = {}
        for line in self.record.lines:
            number = line["round"]
            point = points.setdefault(number, {"round": number, "lost": 0, "refused": 0})
            for kind in ("lost", "refused"):
                point[kind] += sum(map(len, (line.get(kind) or {}).values()))
        if len(points) < 2:
            return []
        rows = list(points.values())
        names = {kind: kind for kind in ("lost", "refused") if read_column(rows, kind).any()}
        title = "Answers that did not count"
        return _draw_points(title, rows, names, "answers", 4, y_from_zero=True)

    def virtual_seconds(self) -> float:
        """Return the virtual time of all rounds for the report, 0 if the run has no clock."""
        clocks = read_column(self.points, "clock")
        return float(np.nanmax(clocks, initial=0.0))

    def time_charts(self) -> list[Chart]:
        """Draw the scores over virtual time, and what rounds waited for."""
        drawn = self._score_charts("clock", "virtual seconds", "against time")
        waited = {"to receive": 0.0, "to compute": 0.0, "to send": 0.0}
        for line in self.record.lines:
            slowest = line.get("slowest") or {}
            for name, key in zip(waited, ("down", "compute", "up"), strict=True):
                waited[name] += float(slowest.get(key) or 0.0)
        if any(waited.values()):
            title = "What rounds waited for, at the slowest device"
            format_value = tables.format_duration
            drawn.append(charts.draw_bars(title, waited, "virtual seconds", 6, format_value))
        return drawn


def _draw_points(
    title: str,
    points: Sequence[Mapping[str, Any]],
    names: Mapping[str, str],
    y_title: str,
    colour: int = 0,
    x_key: str = "round",
    x_title: str = "round",
    **options: Any,
) -> list[Chart]:
    """Draw the values of points over ``x_key``; nothing without values.

    Args:
        title: The title of the chart.
        points: The points.
        names: The names of the lines in the legend, by key of the points.
        y_title: The title of the y axis.
        colour: The colour of the first line.
        x_key: The key of x.
        x_title: The title of the x axis.
        options: Options of :func:`.charts.draw_xy`.
    """
    x = read_column(points, x_key)
    lines = {}
    is_known = np.zeros(len(points), dtype=bool)
    for key, name in names.items():
        # A missing value, as of a task that was not scored in a round, is NaN and leaves a gap.
        lines[name] = read_column(points, key)
        is_known |= ~np.isnan(lines[name])
    shown = thin_out(np.flatnonzero(is_known & ~np.isnan(x)).tolist(), MOST_POINTS)
    if not shown:
        return []
    series: list[Series] = []
    for name, y in lines.items():
        is_dashed = name.startswith("worst")
        size = _dot_size(len(shown))
        series.append(
            Series(name, x[shown], y[shown], colour + len(series), dashed=is_dashed, size=size)
        )
    is_by_round = x_key == "round"
    options = {"whole_x": is_by_round, "x_from_zero": not is_by_round, **options}
    return [charts.draw_xy(title, series, x_title, y_title, **options)]


def _format_density(density: float) -> str:
    return f"{tables.format_number(100 * density, 3)} %"


def _dot_size(points: int) -> float:
    return 3.0 if points <= 40 else 1.6


def _client_size(clients: int) -> float:
    if clients <= 200:
        return 4.5
    # Many dots are a cloud, in which large ones would be a blot.
    return 2.2 if clients <= 2000 else 1.1


def _spread_dots(x: Numbers, clients: Numbers) -> Numbers:
    """Return how far dots are moved to the side, if many would lie on top of each other."""
    values = np.unique(x)
    if len(values) < 2 or 3 * len(values) > len(x):
        return np.zeros(len(x))
    # By the golden ratio: neighbours in number are never neighbours in place.
    aside = clients * 0.61803 % 1 - 0.5
    return 0.6 * float(np.diff(values).min()) * aside
