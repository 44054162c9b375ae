"""The page of one run: how well clients are served, what it cost, and how to run it again.

It is made from plain figures (:class:`Record`), so that it can be made of any run folder: finished
or not, failed, or without a single round. What is not known is left out, and what is wrong is said.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from ..wire.ledger import sum_by_cause
from .axes import short
from .figures import COLOURS, Drawing, Marks, Series, bars, heat, rows_of, xy
from .page import TALL, Page
from .tables import Scores, Summary, duration, each_round, kilobytes, mib, percent

MOST_POINTS = 400
"""Points of a line: of more rounds, some are left out."""
SMALL_PRINT = "Point at a dot or a bar to read it; click a name below a figure to hide it."
PARTS = {
    "values": "values of weights",
    "mask": "masks",
    "scores": "evidence (scores)",
    "indices": "indices",
    "codebook": "codebooks",
    "header": "headers",
}
"""Parts of messages as the page calls them, in the order they are drawn."""
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
"""What a run was trained with, in the order it is told."""
DENSITY = "density:"
"""How the name of a method's own figure begins that is the density of a layer."""
MOST_GROUPS = 12
"""More groups than this have no colours of their own."""


@dataclass(frozen=True)
class Record:
    """What is known of a run."""

    path: str
    words: Mapping[str, Any]
    """The table [run] of its config.toml."""
    config: str = ""
    lines: Sequence[Mapping[str, Any]] = ()
    """Of metrics.jsonl."""
    summary: Summary | None = None
    clients: Sequence[Mapping[str, Any]] = ()
    """``client``, ``name``, ``examples``, ``test``, ``score``, ``density``, ``group``, ``task``."""
    layers: Mapping[str, float] = field(default_factory=dict)
    """By layer: the share of its weights that is not zero at the end, over the models kept."""
    similarity: Sequence[Sequence[float]] = ()
    """Of the models of ``similar``: the cosine of what sets each apart from their mean."""
    similar: Sequence[str] = ()
    beside: Mapping[str, Summary] = field(default_factory=dict)
    """The summaries of local and fedavg on the same data, from folders beside this one."""
    failure: str = ""

    @property
    def method(self) -> str:
        """The method's name, also of a run that did not get far."""
        known = self.summary or {}
        return str(known.get("method") or self.words.get("method") or "a run")


def run_page(record: Record) -> Page:
    """The whole page."""
    page = Page(f"{record.method} on {_data(record)}", _warning(record))
    _head(page, record)
    _progress(page, record)
    _every_client(page, record)
    _groups(page, record)
    _layers(page, record)
    _bytes(page, record)
    _troubles(page, record)
    _time(page, record)
    _again(page, record)
    return page


def _data(record: Record) -> str:
    known = record.summary or {}
    return str(known.get("data") or record.words.get("data") or "data")


def _warning(record: Record) -> str:
    done = _rounds_done(record)
    of = record.words.get("rounds")
    how_far = f"{done} of {of} rounds" if of else f"{done} rounds"
    if record.failure:
        return f"failed after {how_far}"
    if record.summary is None:
        return f"unfinished: {how_far}"
    return ""


def _rounds_done(record: Record) -> int:
    return max((int(line.get("round", 0)) for line in record.lines), default=0)


# ---- above all -----------------------------------------------------------------------------------


def _head(page: Page, record: Record) -> None:
    if record.failure:
        page.paragraph(f"Why it failed: {record.failure}")
    if record.summary is not None:
        page.lead(headline(record.summary, record.beside))
        page.tiles(_tiles(record.summary))
        _lengths(page, record.summary)
        page.paragraph(small=_conditions(record))
        return
    if not record.lines:
        page.lead("No round was finished, so there is nothing to show yet.")
    page.paragraph(f"To go on: fedgrove resume {shlex.quote(record.path)}")
    page.paragraph(small=_conditions(record))


def headline(summary: Summary, beside: Mapping[str, Summary]) -> str:
    """What a reader should take home: the run against training alone and against fedavg."""
    method = str(summary["method"])
    if "tasks" in summary:
        each = []
        for name, task in summary["tasks"].items():
            scores = Scores.of_task(task)
            each.append(f"{_with_unit(scores, scores.mean)} on {name}")
        return f"{method} gives clients {', '.join(each)}."
    scores = Scores.of(summary, summary)
    if scores.mean is None:
        return f"{method} was trained for {summary['rounds']} rounds; no client was scored."
    others = {name: Scores.of(known, known) for name, known in beside.items()}
    words = {"fedavg": "fedavg gives", "local": "training alone gives"}
    against = []
    for name, phrase in words.items():
        other = others.get(name)
        if name != method and other is not None and other.mean is not None:
            against.append(f"{phrase} {_with_unit(other, other.mean)}")
    is_one = summary["clients"] == 1
    whom = "only client" if is_one else f"{summary['clients']:,} clients"
    text = f"{method} gives its {whom} {_with_unit(scores, scores.mean)}"
    text += f" {scores.metric}" if scores.share else ""
    text += "" if is_one else " on average"
    # With several lengths of fine-tuning the last one gives the headline.
    last = next(reversed(summary.get("finetune") or {"0": {}}))
    if last != "0":
        epochs = "epoch" if last == "1" else "epochs"
        text += f" after {last} {epochs} of fine-tuning"
    if against:
        text += f", where {' and '.join(against)}"
    costs = _costs(summary, beside.get("fedavg") if method != "fedavg" else None)
    return f"{text}{costs}."


def _costs(summary: Summary, fedavg: Summary | None) -> str:
    density = summary.get("density")
    weights = ""
    if density is not None and density < 0.9995:
        weights = f" and {percent(density)} of the weights"
    sent = summary["bytes_up"] + summary["bytes_down"]
    if fedavg is not None and fedavg["bytes_up"] + fedavg["bytes_down"] > 0:
        share = sent / (fedavg["bytes_up"] + fedavg["bytes_down"])
        return f", with {percent(share)} of fedavg's bytes{weights}"
    if weights:
        return f", with{weights.removeprefix(' and')}; {mib(sent)} were sent in all"
    return f"; {mib(sent)} were sent in all"


def _with_unit(scores: Scores, value: float | None) -> str:
    if value is None:
        return "no score"
    return f"{100 * value:.1f} %" if scores.share else f"{scores.metric} {value:.4g}"


def _tiles(summary: Summary) -> list[tuple[str, str]]:
    tiles = []
    if "tasks" not in summary:
        scores = Scores.of(summary, summary)
        if scores.mean is not None:
            spread = _with_unit(scores._replace(metric=""), scores.std).strip()
            mean = _with_unit(scores._replace(metric=""), scores.mean).strip()
            tenth = _with_unit(scores._replace(metric=""), scores.worst10).strip()
            tiles.append((mean, f"{scores.metric}, mean over clients (± {spread})"))
            tiles.append((tenth, f"{scores.metric}, mean of the worst tenth of clients"))
    up = each_round(summary, "up")
    down = each_round(summary, "down")
    if up is not None and down is not None:
        tiles.append((f"{kilobytes(up + down)} kB", "per device and round, both ways"))
    tiles.append((mib(summary["bytes_up"] + summary["bytes_down"]), "sent in all, both ways"))
    if summary.get("density") is not None:
        tiles.append((percent(summary["density"]), "of the weights are kept"))
    if summary.get("virtual_seconds"):
        tiles.append((duration(summary["virtual_seconds"]), "on the devices' own clock"))
    if summary.get("seconds") is not None:
        tiles.append((duration(summary["seconds"]), "to compute it here"))
    return tiles


def _lengths(page: Page, summary: Summary) -> None:
    """What fine-tuning does, where several lengths of it were measured."""
    lengths = summary.get("finetune", {})
    if len(lengths) < 2 or "tasks" in summary:
        return
    first = Scores.of(summary, summary)
    percent = " %" if first.share else ""
    rows = []
    for epochs, figures in lengths.items():
        scores = Scores.of(summary, figures)
        if scores.mean is None:
            continue
        numbers = (scores.mean, scores.std, scores.worst10, scores.worst)
        rows.append([epochs, *(scores.shown(number) for number in numbers)])
    head = ["epochs of fine-tuning", f"{first.metric}{percent}", "± over clients"]
    page.table([*head, f"worst tenth{percent}", f"worst client{percent}"], rows)


def _conditions(record: Record) -> str:
    known = {**record.words, **(record.summary or {})}
    words = []
    for word, phrase in CONDITIONS.items():
        value = known.get(word)
        if value is not None and value != "none":
            shown = f"{value:,}" if isinstance(value, int) else value
            is_one_client = word == "clients" and value == 1
            words.append("1 client" if is_one_client else phrase.format(shown))
    return ", ".join(words)


# ---- round by round ------------------------------------------------------------------------------


def _progress(page: Page, record: Record) -> None:
    if not record.lines:
        return
    page.heading("Round by round")
    if _rounds_done(record) == 0:
        page.paragraph("No round was finished, so there is no curve.")
        return
    page.paragraph(small=SMALL_PRINT)
    drawings: list[Drawing] = []
    curves = _curves(record.lines)
    for curve in curves:
        drawings.append(_score_by_round(curve))
    drawings.append(_bytes_by_round(record.lines))
    for curve in curves:
        drawings.append(_score_against(curve, curve.sent, "MiB sent, both ways", "bytes"))
    density = _values(record.lines, "density")
    if len(density) > 1 and min(y for _, y in density) < 0.9995:
        drawings.append(_over_rounds("Weights kept", density, "share of weights", 2))
    loss = _values(record.lines, "loss_mean")
    if len(loss) > 1:
        drawings.append(_over_rounds("Loss on test examples", loss, "loss, mean over clients", 4))
    if not curves:
        page.paragraph("Clients were not scored on the way (--evaluate 0), so there is no curve.")
    page.figures(*drawings)


@dataclass
class _Curve:
    """A metric as it was scored on the way; several tasks of one metric share a curve."""

    scores: Scores
    rounds: list[int] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)
    """MiB so far."""
    clock: list[float] = field(default_factory=list)
    values: dict[str, list[float | None]] = field(default_factory=dict)

    @property
    def factor(self) -> float:
        return 100.0 if self.scores.share else 1.0

    @property
    def title(self) -> str:
        return f"{self.scores.metric} %" if self.scores.share else self.scores.metric

    @property
    def within(self) -> tuple[float | None, float | None]:
        return (0.0, 100.0) if self.scores.share else (None, None)


def _curves(lines: Sequence[Mapping[str, Any]]) -> list[_Curve]:
    curves: dict[str, _Curve] = {}
    sent = 0.0
    scored = []
    for line in lines:
        sent += (line.get("bytes_up", 0) + line.get("bytes_down", 0)) / 2**20
        found = _scores_of(line)
        if found:
            scored.append((line, sent, found))
    for line, so_far, found in _thinned(scored):
        for name, scores in found:
            curve = curves.setdefault(scores.metric, _Curve(scores))
            if not curve.rounds or curve.rounds[-1] != line["round"]:
                curve.rounds.append(line["round"])
                curve.sent.append(so_far)
                curve.clock.append(float(line.get("virtual_clock", math.nan)))
            names = {f"mean of {name}": scores.mean}
            if not name:
                tenth = scores.worst10
                names = {"mean": scores.mean, "worst tenth": tenth, "worst client": scores.worst}
            for kind, value in names.items():
                values = curve.values.setdefault(kind, [])
                # A task of which nobody was scored in a round leaves a gap.
                values += [None] * (len(curve.rounds) - 1 - len(values))
                values.append(None if value is None else curve.factor * value)
    for curve in curves.values():
        for values in curve.values.values():
            values += [None] * (len(curve.rounds) - len(values))
    return list(curves.values())


def _scores_of(line: Mapping[str, Any]) -> list[tuple[str, Scores]]:
    """The scores in a line: one, or one for each task of a mixed federation."""
    if "tasks" in line:
        return [(name, Scores.of_task(_task_words(task))) for name, task in line["tasks"].items()]
    scores = Scores.of(line, line)
    return [] if scores.mean is None else [("", scores)]


def _task_words(task: Mapping[str, Any]) -> dict[str, Any]:
    return {name: task[name] for name in Scores._fields}


def _thinned(items: Sequence[Any]) -> list[Any]:
    """At most so many of them, the last one always."""
    every = max(1, math.ceil(len(items) / MOST_POINTS))
    last = len(items) - 1
    return [item for i, item in enumerate(items) if (last - i) % every == 0]


def _size(points: int) -> float:
    return 3.0 if points <= 40 else 1.6


def _score_by_round(curve: _Curve) -> Drawing:
    series = []
    size = _size(len(curve.rounds))
    rounds = [float(r) for r in curve.rounds]
    for i, (name, values) in enumerate(curve.values.items()):
        # The mean is what is meant; the others go with it.
        series.append(Series(name, rounds, values, i, dashed=i > 0, size=size))
    name = curve.scores.metric
    return xy(
        f"{name[:1].upper()}{name[1:]} by round, as delivered",
        series,
        "round",
        curve.title,
        whole_x=True,
        y_within=curve.within,
    )


def _score_against(curve: _Curve, x: Sequence[float], x_title: str, what: str) -> Drawing:
    name, values = next(iter(curve.values.items()))
    series = [Series(name, x, values, 0, size=_size(len(x)))]
    if name != "mean":
        series = []
        for i, (each, own) in enumerate(curve.values.items()):
            series.append(Series(each, x, own, i, size=_size(len(x))))
    metric = curve.scores.metric
    title = f"{metric[:1].upper()}{metric[1:]} against {what}"
    return xy(title, series, x_title, curve.title, x_from_zero=True, y_within=curve.within)


def _bytes_by_round(lines: Sequence[Mapping[str, Any]]) -> Drawing:
    """All that was sent so far, by direction."""
    totals = {"up": 0.0, "down": 0.0}
    points = []
    for line in lines:
        for direction in totals:
            totals[direction] += line.get(f"bytes_{direction}", 0) / 2**20
        points.append((float(line.get("round", 0)), dict(totals)))
    points = _thinned(points)
    x = [at for at, _ in points]
    words = {"up": "from devices (up)", "down": "to devices (down)"}
    series = []
    for i, (direction, name) in enumerate(words.items()):
        y: list[float | None] = [so_far[direction] for _, so_far in points]
        series.append(Series(name, x, y, i, size=_size(len(x))))
    return xy("Bytes so far", series, "round", "MiB", whole_x=True, y_from_zero=True)


def _values(lines: Iterable[Mapping[str, Any]], key: str) -> list[tuple[int, float]]:
    found = []
    for line in lines:
        if line.get(key) is not None:
            found.append((int(line["round"]), float(line[key])))
    return _thinned(found)


def _over_rounds(
    title: str, points: Sequence[tuple[int, float]], y_title: str, colour: int
) -> Drawing:
    x = [float(at) for at, _ in points]
    y: list[float | None] = [value for _, value in points]
    series = [Series("", x, y, colour, size=_size(len(x)))]
    return xy(title, series, "round", y_title, whole_x=True, y_from_zero=True)


# ---- clients -------------------------------------------------------------------------------------


def _every_client(page: Page, record: Record) -> None:
    clients = record.clients
    if not clients:
        return
    summary = record.summary or {}
    scores = Scores.of(summary, summary)
    page.heading("Every client" if len(clients) > 1 else "The only client")
    scored = [client for client in clients if client.get("score") is not None]
    if not scored:
        page.paragraph("No client was scored.")
    is_mixed = "tasks" in summary
    if len(scored) > 1 and not is_mixed:
        page.paragraph(small="A dot is a client; click it to find its row in the table.")
        page.figures(_dots(scored, scores), _ranked(record, scored, scores))
    _table_of_clients(page, clients, scores, is_mixed)


def _varies(clients: Sequence[Mapping[str, Any]], key: str) -> bool:
    known = [client[key] for client in clients if client.get(key) is not None]
    return len(known) == len(clients) and max(known) - min(known) > 1e-6


def _dots(clients: Sequence[Mapping[str, Any]], scores: Scores) -> Drawing:
    """Every client's score against its density, or else against how much it trains on."""
    key = "density"
    x_title = "density: share of weights kept"
    within: tuple[float | None, float | None] = (0.0, 1.0)
    if not _varies(clients, "density") and clients[0].get("examples") is not None:
        key = "examples"
        x_title = "training examples of the client"
        within = (0.0, None)
    factor = 100.0 if scores.share else 1.0
    of_groups: dict[str, list[Mapping[str, Any]]] = {}
    numbers = sorted({client["group"] for client in clients if client.get("group") is not None})
    for number in numbers if len(numbers) <= MOST_GROUPS else ():
        of_groups[f"group {number}"] = []
    # Decided once: the first client without a group would make a kind of its own.
    others = "in no group" if of_groups else "clients"
    for client in clients:
        name = f"group {client.get('group')}"
        if name not in of_groups:
            name = others
        of_groups.setdefault(name, []).append(client)
    aside = _aside(clients, key)
    series = []
    size = 4.5
    if len(clients) > 200:
        # Many dots are a cloud, in which the largest would be one blot.
        size = 2.2 if len(clients) <= 2000 else 1.1
    for i, (name, own) in enumerate(of_groups.items()):
        series.append(
            Series(
                f"{name} ({len(own):,})",
                [float(client.get(key) or 0.0) + aside(client) for client in own],
                [factor * client["score"] for client in own],
                i % COLOURS,
                line=False,
                tips=[_said(client, scores) for client in own],
                keys=[str(client["client"]) for client in own],
                size=size,
            )
        )
    percent = " %" if scores.share else ""
    top = (0.0, 100.0) if scores.share else (None, None)
    against = "density" if key == "density" else "data it trains on"
    return xy(
        f"{scores.metric[:1].upper()}{scores.metric[1:]} of every client against {against}",
        series,
        x_title,
        f"{scores.metric}{percent}",
        y_within=top,
        x_within=within,
        whole_x=key == "examples",
    )


def _aside(clients: Sequence[Mapping[str, Any]], key: str) -> Callable[[Mapping[str, Any]], float]:
    """How far a client's dot is moved to the side, where many would lie on top of each other."""
    values = sorted({float(client.get(key) or 0.0) for client in clients})
    if len(values) < 2 or 3 * len(values) > len(clients):
        return lambda client: 0.0
    closest = min(b - a for a, b in pairwise(values))
    # By the golden ratio: neighbours in number are never neighbours in place.
    return lambda client: closest * 0.6 * (client["client"] * 0.61803 % 1 - 0.5)


def _said(client: Mapping[str, Any], scores: Scores) -> str:
    words = [f"client {client['name']}", _with_unit(scores, client["score"])]
    if client.get("density") is not None:
        words.append(f"density {client['density']:.2f}")
    if client.get("group") is not None:
        words.append(f"group {client['group']}")
    if client.get("examples") is not None:
        words.append(f"{client['examples']} examples")
    return ", ".join(words)


def _ranked(record: Record, clients: Sequence[Mapping[str, Any]], scores: Scores) -> Drawing:
    """From the worst client to the best, beside the same of local and fedavg."""
    ours = [client["score"] for client in clients]
    kinds = {record.method: ours}
    for name, summary in record.beside.items():
        others = summary.get(f"{summary.get('metric') or 'accuracy'}_clients")
        if name != record.method and others:
            kinds[name] = list(others.values())
    factor = 100.0 if scores.share else 1.0
    series = []
    for i, (name, values) in enumerate(kinds.items()):
        ranked = sorted(values, reverse=not scores.more_is_better)
        x = [100 * (k + 1) / len(ranked) for k in range(len(ranked))]
        points = _thinned(list(zip(x, ranked, strict=True)))
        series.append(
            Series(
                name,
                [at for at, _ in points],
                [factor * value for _, value in points],
                i,
                size=_size(len(points)),
            )
        )
    percent = " %" if scores.share else ""
    within = (0.0, 100.0) if scores.share else (None, None)
    title = "Clients from the worst to the best"
    y_title = f"{scores.metric}{percent}"
    return xy(title, series, "% of clients", y_title, y_within=within, x_within=(0.0, 100.0))


def _table_of_clients(
    page: Page, clients: Sequence[Mapping[str, Any]], scores: Scores, is_mixed: bool
) -> None:
    percent = " %" if scores.share and not is_mixed else ""
    columns = {
        "name": "client",
        "task": "task",
        "group": "group",
        "examples": "training examples",
        "test": "test examples",
        "score": "score" if is_mixed else f"{scores.metric}{percent}",
        "density": "density",
    }
    shown = []
    for key in columns:
        if any(client.get(key) is not None for client in clients):
            shown.append(key)
    rows = []
    for client in clients:
        cells = []
        for key in shown:
            value = client.get(key)
            if value is None:
                cells.append("-")
            elif key == "score":
                cells.append(f"{value:.4g}" if is_mixed else scores.shown(value))
            elif key == "density":
                cells.append(f"{value:.3f}")
            else:
                cells.append(str(value))
        rows.append(cells)
    keys = [str(client["client"]) for client in clients]
    scrolls = f"{len(clients):,} clients: scroll in the table to see all. "
    page.paragraph(
        small=f"{scrolls if len(clients) > TALL else ''}Click the head of a column to sort by it."
    )
    page.table([columns[key] for key in shown], rows, sortable=True, keys=keys)


def _groups(page: Page, record: Record) -> None:
    drawings = []
    members: dict[int, list[Mapping[str, Any]]] = {}
    for client in record.clients:
        if client.get("group") is not None:
            members.setdefault(client["group"], []).append(client)
    summary = record.summary or {}
    if 1 < len(members) <= 60 and "tasks" not in summary:
        drawings.append(_group_bars(members, Scores.of(summary, summary)))
    if len(record.similarity) > 1:
        drawings.append(_similarity(record))
    if not drawings:
        return
    is_grouped = len(members) > 1
    page.heading("Groups and how alike models are" if is_grouped else "How alike models are")
    words = []
    if is_grouped:
        words.append(f"The clients are in {len(members)} groups, which train a model each.")
        if summary.get("purity") is not None:
            words.append(
                f"Purity {summary['purity']:.2f}: the share of clients that are of the commonest "
                "kind in their group (1: every group has one kind only)."
            )
    if record.similarity:
        words.append(
            "The map has a row and a column for each client. A cell compares what sets two "
            "clients' last models apart from the mean of all models, by their cosine: 1 is alike, "
            "0 unrelated, -1 opposite."
        )
    page.paragraph(small=" ".join(words))
    page.figures(*drawings)


def _group_bars(members: Mapping[int, Sequence[Mapping[str, Any]]], scores: Scores) -> Drawing:
    factor = 100.0 if scores.share else 1.0
    labels = []
    values: list[float | None] = []
    texts = []
    for number, clients in sorted(members.items()):
        own = [client["score"] for client in clients if client.get("score") is not None]
        of = "1 client" if len(clients) == 1 else f"{len(clients):,} clients"
        labels.append(f"group {number}, {of}")
        mean = factor * math.fsum(own) / len(own) if own else None
        values.append(mean)
        texts.append("" if mean is None else f"{mean:.1f}" if scores.share else f"{mean:.4g}")
    percent = " %" if scores.share else ""
    marks = [Marks("mean", values, 2, texts=texts)]
    title = f"{scores.metric[:1].upper()}{scores.metric[1:]} of each group"
    return rows_of(title, labels, marks, f"{scores.metric}{percent}")


def _similarity(record: Record) -> Drawing:
    return heat(
        "How alike clients' models are",
        record.similarity,
        record.similar,
        record.similar,
        x_title="clients, by group" if " (group " in "".join(record.similar[:1]) else "clients",
        ends=(-1.0, 1.0),
    )


# ---- layers --------------------------------------------------------------------------------------


def _layers(page: Page, record: Record) -> None:
    over_rounds = _layers_over_rounds(record.lines)
    drawings = []
    if over_rounds is not None:
        drawings.append(over_rounds)
    if any(density < 0.9995 for density in record.layers.values()):
        shown = {name: 100 * density for name, density in record.layers.items()}
        drawings.append(bars("At the end", shown, "% of weights kept", 5, " %"))
    if not drawings:
        return
    page.heading("Layer by layer")
    page.paragraph(small="The share of each layer's weights that is kept, mean over models.")
    page.figures(*drawings)


def _layers_over_rounds(lines: Sequence[Mapping[str, Any]]) -> Drawing | None:
    """The densities that the method itself reports, where it does."""
    rounds: dict[int, Mapping[str, float]] = {}
    for line in lines:
        own = {}
        for name, value in (line.get("figures") or {}).items():
            if name.startswith(DENSITY):
                own[name.removeprefix(DENSITY)] = float(value)
        if own:
            rounds[int(line["round"])] = own
    if len(rounds) < 2:
        return None
    points = _thinned(list(rounds.items()))
    layers = list(points[-1][1])
    values = []
    for layer in layers:
        values.append([own.get(layer) for _, own in points])
    columns = [f"round {number}" for number, _ in points]
    title = "Density by round"
    return heat(title, values, layers, columns, x_title="rounds →", ends=(0.0, 1.0))


# ---- costs and troubles --------------------------------------------------------------------------


def _bytes(page: Page, record: Record) -> None:
    if not record.lines:
        return
    page.heading("Where the bytes went")
    by_part: dict[str, list[float | None]] = {}
    for line in record.lines:
        for i, direction in enumerate(("up", "down")):
            for part, count in (line.get(f"bytes_{direction}_parts") or {}).items():
                name = part if part in PARTS else "values"
                sums = by_part.setdefault(name, [0.0, 0.0])
                sums[i] = (sums[i] or 0.0) + count / 2**20
    marks = []
    for i, (part, name) in enumerate(PARTS.items()):
        values = by_part.get(part)
        if values and any(values):
            tips = [f"{name}: {mib(round((value or 0) * 2**20))}" for value in values]
            marks.append(Marks(name, values, i, tips=tips))
    drawings = []
    if marks:
        labels = ["from devices", "to devices"]
        drawings.append(rows_of("By what was sent", labels, marks, "MiB", stacked=True))
    spent = {cause: count for cause, count in sum_by_cause(record.lines).items() if count}
    if len(spent) > 1:
        named = {}
        for cause, count in spent.items():
            named["outside rounds" if cause == "exchanges" else cause] = count / 2**20
        texts = [mib(count) for count in spent.values()]
        drawings.append(bars("By cause, both ways", named, "MiB", 3, texts=texts))
        if "exchanges" in spent:
            page.paragraph(
                small="Outside rounds: messages of grouping and probing, and of exchanges that "
                "were abandoned, counted whole."
            )
    page.figures(*drawings)
    summary = record.summary
    if summary is not None:
        scoring = summary.get("bytes_evaluate_up", 0) + summary.get("bytes_evaluate_down", 0)
        last = summary.get("bytes_deliver_up", 0) + summary.get("bytes_deliver_down", 0)
        page.paragraph(
            small=f"Not counted, as only an experiment needs it: {mib(scoring)} to score clients "
            f"on the way, {mib(last)} to hand out the last models."
        )


def _troubles(page: Page, record: Record) -> None:
    if not record.lines:
        return
    page.heading("Losses and refusals")
    counts: dict[tuple[str, str], int] = {}
    why: dict[str, str] = {}
    by_round: dict[str, dict[int, int]] = {"lost": {}, "refused": {}}
    for line in record.lines:
        for kind, of_rounds in by_round.items():
            for reason, clients in (line.get(kind) or {}).items():
                number = len(clients)
                counts[kind, reason] = counts.get((kind, reason), 0) + number
                at = int(line["round"])
                of_rounds[at] = of_rounds.get(at, 0) + number
        for reason, sentence in (line.get("why") or {}).items():
            why.setdefault(reason, str(sentence))
    abandoned = [line for line in record.lines if "abandoned" in line]
    if not counts and not abandoned:
        page.paragraph("Nothing was lost or refused: every device answered each time.")
        return
    rows = []
    for (kind, reason), count in counts.items():
        rows.append([reason, kind, f"{count:,}", why.get(reason, "")])
    if rows:
        page.table(["reason", "answers were", "times", "what was said first"], rows)
    rounds = sorted({int(line["round"]) for line in record.lines})
    series = []
    for i, (kind, of_rounds) in enumerate(by_round.items()):
        if of_rounds:
            y: list[float | None] = [float(of_rounds.get(at, 0)) for at in rounds]
            series.append(Series(kind, [float(at) for at in rounds], y, 4 if i == 0 else 1, size=2))
    if series and len(rounds) > 1:
        title = "Answers that did not count"
        page.figures(xy(title, series, "round", "answers", whole_x=True, y_from_zero=True))
    if abandoned:
        verb = "exchange was" if len(abandoned) == 1 else "exchanges were"
        page.paragraph(f"{len(abandoned)} {verb} abandoned. First: {abandoned[0]['abandoned']}")


def _time(page: Page, record: Record) -> None:
    lines = [line for line in record.lines if line.get("virtual_clock") is not None]
    if not lines or not lines[-1]["virtual_clock"]:
        return
    page.heading("Time on the devices")
    page.paragraph(
        small="A virtual clock: how long the rounds would take with the devices of the run's "
        "profile. A round lasts as long as its slowest device."
    )
    drawings = []
    for curve in _curves(record.lines):
        if not any(math.isnan(at) for at in curve.clock):
            title = "virtual seconds"
            drawings.append(_score_against(curve, curve.clock, title, "time"))
    waited = {"to receive": 0.0, "to compute": 0.0, "to send": 0.0}
    for line in lines:
        slowest = line.get("slowest") or {}
        for words, key in zip(waited, ("down", "compute", "up"), strict=True):
            waited[words] += float(slowest.get(key) or 0.0)
    if any(waited.values()):
        title = "What rounds waited for, at the slowest device"
        texts = [duration(seconds) for seconds in waited.values()]
        drawings.append(bars(title, waited, "virtual seconds", 6, texts=texts))
    page.figures(*drawings)
    page.paragraph(small=f"All rounds together: {duration(lines[-1]['virtual_clock'])}.")


# ---- again ---------------------------------------------------------------------------------------


def _again(page: Page, record: Record) -> None:
    page.heading("Run it again")
    path = shlex.quote(record.path)
    commands = [f"fedgrove rerun {path}", f"fedgrove rerun {path} --seed 1"]
    if record.summary is None:
        commands.append(f"fedgrove resume {path}")
    elif record.method != "fedavg":
        commands.append(f"fedgrove rerun {path} fedavg")
    page.code("\n".join(commands))
    if record.config:
        page.folded("config.toml: everything that decides the result", record.config)
    own = (record.summary or {}).get("figures") or {}
    if own:
        rows = [[name, short(float(f"{value:.4g}"))] for name, value in own.items()]
        page.paragraph("The method's own figures at the end:")
        page.table(["figure", "value"], rows)
    notes = (record.summary or {}).get("notes") or []
    if notes:
        page.paragraph("Notes")
        # What is noted is often of the data: "generated, not measured" alone would say nothing.
        page.notes([f"{_data(record)}: {note}" for note in notes])
    page.paragraph(small=f"Run folder: {record.path}")
