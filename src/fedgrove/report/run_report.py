"""The report of one run: how well clients are served, what it cost, and how to run it again.

It is made from plain values (:class:`RunRecord`), so it can be made for any run folder: finished,
unfinished, failed, or without a single round. What is not known is left out. The sections and their
texts are in ``templates/run.html``, which calls the methods of :class:`_Report` for charts.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from ..wire.ledger import sum_by_cause
from .charts import (
    Chart,
    Limits,
    Marks,
    Series,
    draw_bars,
    draw_heat_map,
    draw_rows,
    draw_xy,
    thin_out,
)
from .page import COLOURS, Page
from .tables import (
    Scores,
    Summary,
    bytes_per_device,
    describe_finetuning,
    finetune_epochs,
    format_bytes,
    format_duration,
    format_percent,
)

MESSAGE_PARTS = {
    "values": "values of weights",
    "mask": "masks",
    "scores": "evidence (scores)",
    "indices": "indices",
    "codebook": "codebooks",
    "header": "headers",
}
"""Names of the parts of messages, in the order they are drawn."""
CONDITIONS = {
    "clients": "{} clients",
    "cohort": "{} in each round",
    "rounds": "{} rounds",
    "seed": "seed {}",
    "partition": "partition {}",
    "scenario": "scenario {}",
    "split": "split {}",
    "net": "net {}",
}
"""The options that are listed below the headline."""
LAYER_DENSITY = "density:"
"""The start of the name of a method's own value that is the density of a layer."""
DENSE = 0.9995
"""From this density on, all weights count as kept."""
MOST_POINTS = 400
"""Points of a line; of more rounds, some are left out."""
MOST_GROUPS = 12
"""More groups than this have no colours."""

Line = Mapping[str, Any]
"""A line of metrics.jsonl."""
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
    """Return the whole page."""
    report = _Report(record)
    title = f"{report.method} on {report.data}"
    return Page(title, report.describe_state(), template="run.html", record=record, report=report)


def headline(summary: Summary, baselines: Mapping[str, Summary]) -> str:
    """Return the result in one sentence, compared with fedavg and with training alone."""
    method = str(summary["method"])
    if "tasks" in summary:
        means = []
        for name, task in summary["tasks"].items():
            scores = Scores.from_task(task)
            means.append(f"{scores.describe(scores.mean)} on {name}")
        return f"{method} gives clients {', '.join(means)}."
    scores = Scores.from_summary(summary)
    if scores.mean is None:
        return f"{method} was trained for {summary['rounds']} rounds; no client was scored."
    score = scores.describe(scores.mean)
    if scores.share:
        score += f" {scores.metric}"
    text = f"{method} gives its {summary['clients']:,} clients {score} on average"
    if summary["clients"] == 1:
        text = f"{method} gives its only client {score}"
    text += f" {describe_finetuning(finetune_epochs(summary))}"
    others = []
    for name, phrase in {"fedavg": "fedavg gives", "local": "training alone gives"}.items():
        other = Scores.from_summary(baselines.get(name, {}))
        if name != method and other.mean is not None:
            others.append(f"{phrase} {other.describe(other.mean)}")
    if others:
        text += f", where {' and '.join(others)}"
    costs = []
    sent = summary["bytes_up"] + summary["bytes_down"]
    fedavg = baselines.get("fedavg", {})
    fedavg_sent = fedavg.get("bytes_up", 0) + fedavg.get("bytes_down", 0)
    is_compared = method != "fedavg" and fedavg_sent > 0
    if is_compared:
        costs.append(f"{format_percent(sent / fedavg_sent)} of fedavg's bytes")
    if summary.get("density") is not None and summary["density"] < DENSE:
        costs.append(f"{format_percent(summary['density'])} of the weights")
    if costs:
        text += f", with {' and '.join(costs)}"
    if not is_compared:
        text += f"; {format_bytes(sent)} were sent in all"
    return f"{text}."


class _Report:
    """The charts and texts of a report, as its template asks for them."""

    def __init__(self, record: RunRecord) -> None:
        self.record = record
        self.summary = record.summary or {}
        self.options = {**record.options, **self.summary}
        self.method = str(self.options.get("method") or "a run")
        self.data = str(self.options.get("data") or "data")
        self.scores = Scores.from_summary(self.summary)
        self.is_mixed = "tasks" in self.summary
        self.when = describe_finetuning(finetune_epochs(self.summary))
        self.rounds = max((int(line.get("round", 0)) for line in record.lines), default=0)
        self.scored = [client for client in record.clients if client.get("score") is not None]
        self.groups: dict[int, list[Client]] = {}
        for client in record.clients:
            if client.get("group") is not None:
                self.groups.setdefault(client["group"], []).append(client)
        self.metrics: dict[str, Scores] = {}
        self.points: list[dict[str, Any]] = []
        self._read_points()

    def describe_state(self) -> str:
        """Return the warning of a run that is not finished."""
        rounds = self.record.options.get("rounds")
        of_all = f" of {rounds}" if rounds else ""
        if self.record.failure:
            return f"failed after {self.rounds}{of_all} rounds"
        if self.record.summary is None:
            return f"unfinished: {self.rounds}{of_all} rounds"
        return ""

    def headline(self) -> str:
        """Return the result in one sentence."""
        return headline(self.summary, self.record.baselines)

    def describe_conditions(self) -> str:
        """Return the most important options in one line."""
        parts = []
        for option, phrase in CONDITIONS.items():
            value = self.options.get(option)
            if isinstance(value, int):
                value = f"{value:,}"
            if value is not None and value != "none":
                parts.append(phrase.format(value))
        return ", ".join(parts).replace("1 clients", "1 client")

    def bytes_each(self) -> float | None:
        """Return the bytes of one device in one round, both ways."""
        up = bytes_per_device(self.summary, "up")
        down = bytes_per_device(self.summary, "down")
        return None if up is None or down is None else up + down

    def scores_after(self, epochs: str) -> Scores:
        """Return the scores after one of several lengths of fine-tuning."""
        return Scores.from_summary(self.summary, self.summary["finetune"][epochs])

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
            named = {"mean": Scores.from_summary(line)}
            if "tasks" in line:
                named = {
                    f"mean of {name}": Scores.from_task(t) for name, t in line["tasks"].items()
                }
            for name, scores in named.items():
                if scores.mean is None:
                    continue
                self.metrics.setdefault(scores.metric, scores)
                point[f"{scores.metric}/{name}"] = scores.factor * scores.mean
                if "tasks" not in line:
                    point[f"{scores.metric}/worst tenth"] = scores.factor * scores.worst10
                    point[f"{scores.metric}/worst client"] = scores.factor * scores.worst
            self.points.append(point)

    def round_charts(self) -> list[Chart]:
        """Draw the scores, bytes, density and loss by round."""
        charts = self._score_charts("round", "round", "by round")
        sent = {"up": "from devices (up)", "down": "to devices (down)"}
        charts += _draw_points("Bytes so far", self.points, sent, "MiB", y_from_zero=True)
        charts += self._score_charts("sent", "MiB sent, both ways", "against bytes")
        if self.rounds < 2:
            return charts
        densities = [point["density"] for point in self.points if point["density"] is not None]
        if min(densities, default=1.0) < DENSE:
            title = "share of weights"
            names = {"density": ""}
            charts += _draw_points("Weights kept", self.points, names, title, 2, y_from_zero=True)
        title = "loss, mean over clients"
        names = {"loss": ""}
        return charts + _draw_points(
            "Loss on test examples", self.points, names, title, 4, y_from_zero=True
        )

    def _score_charts(self, x_key: str, x_title: str, title: str) -> list[Chart]:
        """Draw a chart per metric; all scores by round, else the means only."""
        charts = []
        for metric, scores in self.metrics.items():
            names = {}
            for point in self.points:
                for key in point:
                    is_shown = x_key == "round" or key.startswith(f"{metric}/mean")
                    if key.startswith(f"{metric}/") and is_shown:
                        names[key] = key.removeprefix(f"{metric}/")
            charts += _draw_points(
                f"{scores.title} {title}, before fine-tuning",
                self.points,
                names,
                scores.name,
                x_key=x_key,
                x_title=x_title,
                y_within=scores.limits,
            )
        return charts

    # ---- clients and groups ----------------------------------------------------------------------

    def client_charts(self) -> list[Chart]:
        """Draw every client as a dot, and all clients from the worst to the best."""
        if self.is_mixed or len(self.scored) < 2:
            return []
        return [self._draw_clients(), self._draw_ranks()]

    def _draw_clients(self) -> Chart:
        """Draw each client's score against its density, or else against how much it trains on."""
        clients = self.scored
        key = "density"
        against = "density"
        x_title = "density: share of weights kept"
        within: Limits = (0.0, 1.0)
        densities = [client["density"] for client in clients if client.get("density") is not None]
        varies = len(densities) == len(clients) and max(densities) - min(densities) > 1e-6
        if not varies and clients[0].get("examples") is not None:
            key = "examples"
            against = "data it trains on"
            x_title = "training examples of the client"
            within = (0.0, None)
        x = _spread_out([float(client.get(key) or 0.0) for client in clients])
        size = 4.5
        if len(clients) > 200:
            # Many dots are a cloud, in which large ones would be one blot.
            size = 2.2 if len(clients) <= 2000 else 1.1
        series = []
        for i, (name, numbers) in enumerate(_group_positions(clients).items()):
            own = [clients[number] for number in numbers]
            series.append(
                Series(
                    f"{name} ({len(own):,})",
                    [x[number] for number in numbers],
                    [self.scores.factor * client["score"] for client in own],
                    i % COLOURS,
                    line=False,
                    tips=[self._describe_client(client) for client in own],
                    keys=[str(client["client"]) for client in own],
                    size=size,
                )
            )
        return draw_xy(
            f"{self.scores.title} of every client against {against}",
            series,
            x_title,
            self.scores.name,
            y_within=self.scores.limits,
            x_within=within,
            whole_x=key == "examples",
        )

    def _describe_client(self, client: Client) -> str:
        parts = [f"client {client['name']}", self.scores.describe(client["score"])]
        if client.get("density") is not None:
            parts.append(f"density {client['density']:.2f}")
        if client.get("group") is not None:
            parts.append(f"group {client['group']}")
        if client.get("examples") is not None:
            parts.append(f"{client['examples']} examples")
        return ", ".join(parts)

    def _draw_ranks(self) -> Chart:
        """Draw the clients from the worst to the best, next to those of local and fedavg."""
        methods = {self.method: [client["score"] for client in self.scored]}
        for name, summary in self.record.baselines.items():
            others = summary.get(f"{summary.get('metric') or 'accuracy'}_clients")
            if name != self.method and others:
                methods[name] = list(others.values())
        series = []
        for i, (name, values) in enumerate(methods.items()):
            ranked = sorted(values, reverse=not self.scores.more_is_better)
            ranks = thin_out(range(len(ranked)), MOST_POINTS)
            x = [100 * (rank + 1) / len(ranked) for rank in ranks]
            y = [self.scores.factor * ranked[rank] for rank in ranks]
            series.append(Series(name, x, y, i, size=_dot_size(len(x))))
        return draw_xy(
            "Clients from the worst to the best",
            series,
            "% of clients",
            self.scores.name,
            y_within=self.scores.limits,
            x_within=(0.0, 100.0),
        )

    def clients_table(self) -> tuple[list[str], list[list[str]]]:
        """Return the head and the rows of the table of clients."""
        columns = {
            "name": "client",
            "task": "task",
            "group": "group",
            "examples": "training examples",
            "test": "test examples",
            "score": f"{'score' if self.is_mixed else self.scores.name} {self.when}",
            "density": "density",
        }
        clients = self.record.clients
        for key in list(columns):
            if all(client.get(key) is None for client in clients):
                del columns[key]
        rows = []
        for client in clients:
            rows.append([self._format_cell(key, client.get(key)) for key in columns])
        return list(columns.values()), rows

    def _format_cell(self, key: str, value: Any) -> str:
        if value is None:
            return "-"
        if key == "density":
            return f"{value:.3f}"
        if key != "score":
            return str(value)
        # Tasks have different metrics.
        return f"{value:.4g}" if self.is_mixed else self.scores.format(value)

    def group_charts(self) -> list[Chart]:
        """Draw the score of each group, and how alike the clients' models are."""
        charts = []
        if 1 < len(self.groups) <= 60 and not self.is_mixed:
            means = {}
            for number, clients in sorted(self.groups.items()):
                known = [client["score"] for client in clients if client.get("score") is not None]
                noun = "client" if len(clients) == 1 else "clients"
                if known:
                    mean = statistics.fmean(known)
                    means[f"group {number}, {len(clients):,} {noun}"] = mean
            texts = [self.scores.format(mean, 1) for mean in means.values()]
            shown = {name: self.scores.factor * mean for name, mean in means.items()}
            title = f"{self.scores.title} of each group"
            charts.append(draw_bars(title, shown, self.scores.name, 2, texts=texts))
        if len(self.record.similarity) > 1:
            names = self.record.similar
            x_title = "clients, by group" if " (group " in names[0] else "clients"
            charts.append(
                draw_heat_map(
                    "How alike clients' models are",
                    self.record.similarity,
                    names,
                    names,
                    x_title=x_title,
                    ends=(-1.0, 1.0),
                )
            )
        return charts

    # ---- layers, bytes, losses and time ----------------------------------------------------------

    def layer_charts(self) -> list[Chart]:
        """Draw the densities of layers by round, where the method reports them, and at the end."""
        charts = []
        rounds: dict[int, dict[str, float]] = {}
        for line in self.record.lines:
            for name, value in (line.get("figures") or {}).items():
                if name.startswith(LAYER_DENSITY):
                    layers = rounds.setdefault(int(line["round"]), {})
                    layers[name.removeprefix(LAYER_DENSITY)] = float(value)
        if len(rounds) > 1:
            numbers = thin_out(list(rounds), MOST_POINTS)
            names = list(rounds[numbers[-1]])
            values = [[rounds[number].get(name) for number in numbers] for name in names]
            columns = [f"round {number}" for number in numbers]
            charts.append(
                draw_heat_map(
                    "Density by round", values, names, columns, x_title="rounds →", ends=(0.0, 1.0)
                )
            )
        if any(density < DENSE for density in self.record.layers.values()):
            kept = {name: 100 * density for name, density in self.record.layers.items()}
            charts.append(draw_bars("At the end", kept, "% of weights kept", 5, " %"))
        return charts

    def causes(self) -> dict[str, int]:
        """Return the bytes by cause, without those that cost nothing."""
        return {cause: count for cause, count in sum_by_cause(self.record.lines).items() if count}

    def byte_charts(self) -> list[Chart]:
        """Draw the bytes by what was sent and by cause."""
        by_part: dict[str, list[int]] = {part: [0, 0] for part in MESSAGE_PARTS}
        for line in self.record.lines:
            for i, direction in enumerate(("up", "down")):
                for part, count in (line.get(f"bytes_{direction}_parts") or {}).items():
                    by_part[part if part in MESSAGE_PARTS else "values"][i] += count
        marks = []
        for i, (part, counts) in enumerate(by_part.items()):
            if any(counts):
                name = MESSAGE_PARTS[part]
                tips = [f"{name}: {format_bytes(count)}" for count in counts]
                marks.append(Marks(name, [count / 2**20 for count in counts], i, tips=tips))
        charts = []
        if marks:
            labels = ["from devices", "to devices"]
            charts.append(draw_rows("By what was sent", labels, marks, "MiB", stacked=True))
        spent = self.causes()
        if len(spent) > 1:
            mebibytes = {}
            for cause, count in spent.items():
                mebibytes["outside rounds" if cause == "exchanges" else cause] = count / 2**20
            texts = [format_bytes(count) for count in spent.values()]
            charts.append(draw_bars("By cause, both ways", mebibytes, "MiB", 3, texts=texts))
        return charts

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
        names = {}
        for kind in ("lost", "refused"):
            if any(point[kind] for point in points.values()):
                names[kind] = kind
        if len(points) < 2:
            return []
        title = "Answers that did not count"
        return _draw_points(title, list(points.values()), names, "answers", 4, y_from_zero=True)

    def virtual_seconds(self) -> float:
        """Return the virtual time of all rounds, 0 if the run has no clock."""
        clocks = [point["clock"] for point in self.points if point["clock"] is not None]
        return clocks[-1] if clocks else 0.0

    def time_charts(self) -> list[Chart]:
        """Draw the scores over virtual time, and what rounds waited for."""
        charts = self._score_charts("clock", "virtual seconds", "against time")
        waited = {"to receive": 0.0, "to compute": 0.0, "to send": 0.0}
        for line in self.record.lines:
            slowest = line.get("slowest") or {}
            for name, key in zip(waited, ("down", "compute", "up"), strict=True):
                waited[name] += float(slowest.get(key) or 0.0)
        if any(waited.values()):
            title = "What rounds waited for, at the slowest device"
            texts = [format_duration(seconds) for seconds in waited.values()]
            charts.append(draw_bars(title, waited, "virtual seconds", 6, texts=texts))
        return charts


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
    """Draw the values of points over ``x_key``; nothing with fewer than two values.

    Args:
        title: The title of the chart.
        points: The points.
        names: The names of the lines in the legend, by key of the points.
        y_title: The title of the y axis.
        colour: The colour of the first line.
        x_key: The key of x.
        x_title: The title of the x axis.
        options: Options of :func:`draw_xy`.
    """
    shown = []
    for point in points:
        has_values = any(point.get(key) is not None for key in names)
        if has_values and point[x_key] is not None:
            shown.append(point)
    shown = thin_out(shown, MOST_POINTS)
    x = [float(point[x_key]) for point in shown]
    series = []
    for i, (key, name) in enumerate(names.items()):
        # A missing value, as of a task that was not scored in a round, leaves a gap.
        y = [point.get(key) for point in shown]
        is_dashed = name.startswith("worst")
        size = _dot_size(len(x))
        series.append(Series(name, x, y, colour + i, dashed=is_dashed, size=size))
    if not x:
        return []
    is_by_round = x_key == "round"
    options = {"whole_x": is_by_round, "x_from_zero": not is_by_round, **options}
    return [draw_xy(title, series, x_title, y_title, **options)]


def _dot_size(points: int) -> float:
    return 3.0 if points <= 40 else 1.6


def _group_positions(clients: Sequence[Client]) -> dict[str, list[int]]:
    """Return the positions of the clients by the name of their group."""
    groups = sorted({client["group"] for client in clients if client.get("group") is not None})
    if not groups or len(groups) > MOST_GROUPS:
        return {"clients": list(range(len(clients)))}
    positions: dict[str, list[int]] = {f"group {group}": [] for group in groups}
    for i, client in enumerate(clients):
        name = "in no group"
        if client.get("group") is not None:
            name = f"group {client['group']}"
        positions.setdefault(name, []).append(i)
    return positions


def _spread_out(x: Sequence[float]) -> list[float]:
    """Move dots a little to the side, if many would lie on top of each other."""
    values = sorted(set(x))
    if len(values) < 2 or 3 * len(values) > len(x):
        return list(x)
    closest = min(b - a for a, b in pairwise(values))
    # By the golden ratio: neighbours in number are never neighbours in place.
    return [value + closest * 0.6 * (i * 0.61803 % 1 - 0.5) for i, value in enumerate(x)]
