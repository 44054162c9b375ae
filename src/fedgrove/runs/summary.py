"""The summary of a run: its scores, groups of clients, bytes and notes."""

from __future__ import annotations

import math
from collections import ChainMap, Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from .. import methods, trees
from ..core import Packet, Report, WithPrediction, count_paper_bytes
from ..errors import list_some
from ..nets.initial_weights import SCRATCH
from ..problems import CLASSES, MixedProblem
from ..report.tables import describe_finetuning, key_after, name_by_length
from ..wire.ledger import Ledger
from . import clock
from .guard import explain_errors, server_metrics_of
from .scoring import (
    DIVERGED,
    keep_scored,
    mean_if_reported,
    mean_of,
    spread_scores,
    summarise_tasks,
    tuned_tree,
)

if TYPE_CHECKING:
    from .run import Run

# ---- models and groups of clients ----------------------------------------------------------------


@dataclass(frozen=True)
class Delivery:
    """The packets that clients are delivered at the end of a run, by client."""

    packets: Mapping[int, Mapping[str, Packet]]

    def model(self, client: int) -> Packet | None:
        """Return the model that a client is delivered at the end of the run, or None.

        None means that the client uses its own model.
        """
        return self.packets[client].get("model")

    @cached_property
    def digests(self) -> dict[int, bytes]:
        """What tells the delivered models apart, for each client that is delivered one."""
        known = trees.Digests()
        digests = {}
        for client in self.packets:
            model = self.model(client)
            if model is not None:
                digests[client] = known.of(model.values)
        return digests

    def group_clients(self, names: Collection[str]) -> dict[int, int]:
        """Return the group of each client that is delivered a whole model which others get too.

        A single client's model is the server's as well. ``names`` are those of a whole model.
        """
        clients: dict[bytes, list[int]] = {}
        for client, digest in self.digests.items():
            model = self.model(client)
            if model is not None and model.values.keys() == set(names):
                clients.setdefault(digest, []).append(client)
        groups: dict[int, int] = {}
        number = 0
        for members in clients.values():
            if len(members) > 1 or len(self.packets) == 1:
                groups.update(dict.fromkeys(members, number))
                number += 1
        return groups


def group_sizes(state: Any, delivery: Delivery) -> list[int]:
    """Return how many clients of the run share each model, the largest group first.

    If the state has groups, these count. Otherwise clients that are delivered the same model are a
    group, and clients that only use their own are one each; before a method that forms groups has
    formed them, such clients are one group.
    """
    groups: Mapping[int, int] | None = getattr(state, "groups", None)
    if groups:
        return sorted(Counter(groups.values()).values(), reverse=True)
    labels: list[Hashable] = []
    for client in delivery.packets:
        alone = client if groups is None else "not grouped yet"
        labels.append(delivery.digests.get(client, alone))
    return sorted(Counter(labels).values(), reverse=True)


def purity(groups: Mapping[int, Hashable], truth: Mapping[int, Hashable]) -> float:
    """Return the purity of a run's groups: the share of clients of their group's main kind.

    Clients of which only the group or only the kind is known are left out; without clients it is 1.
    Groups of one client are pure, so compare the number of groups too.

    >>> purity({0: 0, 1: 0, 2: 0, 3: 1}, {0: "a", 1: "a", 2: "b", 3: "b"})
    0.75
    """
    kinds_of: dict[Hashable, Counter[Hashable]] = {}
    for client, group in groups.items():
        if client in truth:
            kinds_of.setdefault(group, Counter())[truth[client]] += 1
    known = sum(kinds.total() for kinds in kinds_of.values())
    if not known:
        return 1.0
    return sum(max(kinds.values()) for kinds in kinds_of.values()) / known


def find_true_kinds(run: Run, at_round: int) -> dict[int, str]:
    """Return what each client of a run really is: its task, or its kind in generated data.

    It is empty if that is not known, or all are the same. No method sees it.
    """
    federation = run.federation
    # Data that are made when they are needed would all be made for this.
    if federation.is_lazy:
        return {}
    truth = {}
    for k in federation.ids:
        data = federation.client(k, at_round)
        kind = data.info.task or data.kind
        if kind:
            truth[k] = kind
    if len(set(truth.values())) > 1:
        return truth
    return {}


def measure_purity(run: Run, state: Any, at_round: int) -> dict[str, float | int]:
    """Return purity and number of the groups in a state, as metrics.jsonl has them.

    It is empty without groups, or if the truth is not known. The groups were made from the data of
    ``at_round``.
    """
    groups: Mapping[int, int] | None = getattr(state, "groups", None)
    truth = find_true_kinds(run, at_round) if groups else {}
    if not groups or not truth:
        return {}
    return {"groups": len(set(groups.values())), "purity": round(purity(groups, truth), 8)}


# ---- the summary of a run ------------------------------------------------------------------------


def summarise(
    run: Run,
    lines: Sequence[Mapping[str, Any]],
    engine: str,
    state: Any,
    reports: Sequence[Report],
    delivery: Delivery,
    delivery_bytes: Ledger,
    without_memory: Collection[int] = (),
) -> dict[str, Any]:
    """Return the summary of a finished run without its seconds.

    Args:
        run: The run.
        lines: The lines of metrics.jsonl.
        engine: The engine's name.
        state: The last state.
        reports: The reports on the final fine-tuning.
        delivery: What clients were delivered for it.
        delivery_bytes: What its messages cost.
        without_memory: The clients that remembered nothing before it.
    """
    training = Ledger()
    for line in lines:
        training.add({"up": line["bytes_up_parts"], "down": line["bytes_down_parts"]})
    sizes = group_sizes(state, delivery)
    federation = run.federation
    layout = run.net.layout
    scored = keep_scored(reports, run.finetune)
    problem = federation.problem
    metric = "metric" if isinstance(problem, MixedProblem) else problem.metric.name
    summary = {
        "method": run.label,
        "data": federation.name,
        **federation.division,
        "engine": engine,
        "seed": run.seed,
        "rounds": run.rounds,
        "clients": len(run.infos),
        "cohort": run.cohort,
        **_count_train_examples(run, max(0, state.round - 1), scored),
        **_describe_start(run),
        "groups": len(sizes),
        "group_sizes": sizes,
        "scored": len(scored),
    }
    # Of the data that the last round worked on: the groups were made from these.
    found = measure_purity(run, state, max(0, state.round - 1))
    if found:
        summary["purity"] = found["purity"]
    summary |= {
        **_headline(run, state.round, scored, lines),
        "density": round(mean_of(reports, "density"), 8) if reports else None,
        "params": layout.size,
    }
    if layout.frozen_size:
        summary["params_frozen"] = layout.frozen_size
    with explain_errors(run.method, "paper_bytes"):
        paper = count_paper_bytes(run.method, run.net, len(run.infos), run.cohort, run.rounds)
    summary |= {
        "params_mean": mean_of(reports, "params") if reports else None,
        "macs": layout.macs,
        **training.totals(),
        **training.parts(),
        "bytes_paper": paper,
        # A line of an exchange after which no client was scored has no such key.
        "bytes_evaluate_up": sum(line.get("bytes_evaluate_up", 0) for line in lines),
        "bytes_evaluate_down": sum(line.get("bytes_evaluate_down", 0) for line in lines),
        **delivery_bytes.totals("bytes_deliver"),
        "lost": _count_reasons(lines, "lost"),
        "refused": _count_reasons(lines, "refused"),
        "abandoned": sum("abandoned" in line for line in lines),
        "virtual_seconds": clock.clock_of(lines),
        **{key_after(f"{metric}_clients", n): _by_client(scored, f"test{n}") for n in run.finetune},
        "validation_clients": {str(n): _by_client(scored, f"validation{n}") for n in run.finetune},
    }
    densities = _by_client(reports, "density")
    if len(set(densities.values())) > 1:
        summary["density_clients"] = densities
    summary |= server_metrics_of(run.method, state)
    diverged = _find_diverged(lines, reports, delivery, without_memory)
    if diverged:
        summary["diverged"] = diverged
    if isinstance(run.method, WithPrediction):
        # A client's model is not all that it predicts with: export refuses it.
        summary["prediction"] = "own"
    summary["notes"] = _make_notes(run, lines, sizes, reports, scored)
    summary["notes"] += _note_diverged(run, diverged)
    summary["notes"] += _note_chance(run, state.round, scored)
    return summary


def _find_diverged(
    lines: Sequence[Mapping[str, Any]],
    reports: Sequence[Report],
    delivery: Delivery,
    without_memory: Collection[int],
) -> dict[str, list[int]]:
    """Return the clients whose training or fine-tuning diverged; nothing if none did.

    "initial" are those of the first that neither remember nor are delivered a model: theirs is the
    network's initial one.
    """
    training: set[int] = set()
    for line in lines:
        training.update(line.get("lost", {}).get("diverged", ()))
        training.update(line.get("refused", {}).get("not finite", ()))
    finetuning = {report.of for report in reports if DIVERGED in report.metrics}
    undelivered = {client for client, packets in delivery.packets.items() if not packets}
    initial = training & set(without_memory) & undelivered
    found = {"training": training, "finetuning": finetuning, "initial": initial}
    return {name: sorted(clients) for name, clients in found.items() if clients}


LOWER_LR = "a lower learning rate (lr) or a gradient clip may help"


def _note_diverged(run: Run, diverged: Mapping[str, Sequence[int]]) -> list[str]:
    """Return the notes on training that diverged, and on which model its clients have."""
    sentences = {
        "training": "training diverged at {}: such a report is lost, and the client keeps its last "
        f"finite model; {LOWER_LR}",
        "finetuning": f"fine-tuning diverged at {{}}: the model before it is kept; {LOWER_LR}",
        "initial": "no training of {} ended with finite weights: the model is the initial one",
    }
    notes = []
    for name, clients in diverged.items():
        names = [run.federation.name_of(client) for client in clients]
        count = f"{len(clients)} of {len(run.infos)} clients ({list_some(names)})"
        notes.append(sentences[name].format(count))
    return notes


LEAST_PER_CLASS = 30
"""Test examples per class below which nothing is said about chance: too few to tell."""
CHANCE = 1.645
"""Standard errors above chance that an accuracy must be to be better: 95 %, one-sided."""


def _note_chance(run: Run, at_round: int, scored: Sequence[Report]) -> list[str]:
    """Return a note if clients' models classify no better than a constant would.

    Chance is 1 / classes, or the share of the most frequent class among the training examples of
    the scored clients if that is larger. The accuracy over all their test examples must be higher
    by :data:`CHANCE` standard errors, sqrt(p (1 - p) / n).
    """
    federation = run.federation
    if federation.is_lazy or federation.problem != CLASSES:
        return []
    last = f"test{run.finetune[-1]}"
    labels = torch.zeros(federation.classes, dtype=torch.long)
    right = 0.0
    tested = 0
    for report in scored:
        client = federation.client(report.of, at_round)
        labels += torch.bincount(client.train.y.long(), minlength=federation.classes)
        right += report.metrics[last] * len(client.test)
        tested += len(client.test)
    if tested < LEAST_PER_CLASS * federation.classes:
        return []
    most_frequent = float(labels.max()) / max(1, int(labels.sum()))
    chance = max(1 / federation.classes, most_frequent)
    error = math.sqrt(chance * (1 - chance) / tested)
    accuracy = right / tested
    if accuracy > chance + CHANCE * error:
        return []
    epochs = run.finetune[-1]
    when = f" {describe_finetuning(epochs)}" if epochs else ""
    return [
        f"the accuracy over all test examples{when}, {accuracy:.1%}, is not clearly better than "
        f"chance ({chance:.1%}, always the same class): no learning can be seen; try a different "
        "learning rate (lr), or more rounds"
    ]


def _describe_start(run: Run) -> dict[str, Any]:
    """Return where the weights came from, and the share of layers that kept them."""
    if run.origin is None:
        return {"init": SCRATCH, "freeze": run.frozen}
    return {"init": str(run.origin), "init_sha256": run.origin.sha256, "freeze": run.frozen}


def _count_train_examples(run: Run, at_round: int, scored: Sequence[Report]) -> dict[str, Any]:
    """Return how many examples each client trained on in a round, and their mean.

    Of data that are made when they are needed, as the scored clients report it: there may be a
    million clients, and the data of some may be impossible to make.
    """
    federation = run.federation
    if federation.is_lazy:
        counts = {str(report.of): report.examples for report in scored}
    else:
        counts = {str(k): federation.info(k, at_round).examples for k in federation.ids}
    mean = sum(counts.values()) / len(counts) if counts else None
    return {
        "train_examples": None if mean is None else round(mean, 8),
        "train_examples_clients": counts,
    }


def _headline(
    run: Run, at_round: int, reports: Sequence[Report], lines: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the scores before fine-tuning, and those after every length of it."""
    problem = run.federation.problem
    if not reports:
        if isinstance(problem, MixedProblem):
            words = {"metric": None}
        else:
            words = problem.metric.describe()
        return {**words, "validation_mean": None, "finetune": {}}
    if isinstance(problem, MixedProblem):
        # Different metrics have no common mean.
        finetune = {}
        for n in run.finetune:
            tasks = summarise_tasks(run, at_round, problem, reports, n)
            for name, numbers in tasks.items():
                numbers |= _sum_task_bytes(name, lines)
            finetune[str(n)] = {"tasks": tasks}
        return {"metric": None, **name_by_length(finetune), "finetune": finetune}
    after = {str(n): spread_scores(problem.metric, reports, n) for n in run.finetune}
    named = name_by_length(after)
    for n in run.finetune:
        named[key_after("validation_mean", n)] = mean_if_reported(reports, f"validation{n}")
    return {**problem.metric.describe(), **named, "finetune": after}


def _sum_task_bytes(task: str, lines: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    sums = {"bytes_up": 0, "bytes_down": 0}
    for line in lines:
        for key, count in line.get("bytes_tasks", {}).get(task, {}).items():
            sums[key] += count
    return sums


def _by_client(reports: Sequence[Report], name: str) -> dict[str, float]:
    """Return a number of every client that reported it."""
    reported = [report for report in reports if name in report.metrics]
    return {str(report.of): round(report.metrics[name], 8) for report in reported}


def _count_reasons(lines: Sequence[Mapping[str, Any]], key: str) -> dict[str, int]:
    """Return how many answers of a run were lost or refused, by reason."""
    counts: Counter[str] = Counter()
    for line in lines:
        for reason, clients in line.get(key, {}).items():
            counts[reason] += len(clients)
    return dict(sorted(counts.items()))


def _make_notes(
    run: Run,
    lines: Sequence[Mapping[str, Any]],
    sizes: Sequence[int],
    reports: Sequence[Report],
    scored: Sequence[Report],
) -> list[str]:
    """Return the notes on groups, on clients that were not scored, and on answers not folded."""
    notes = [*run.federation.notes]
    alone = sizes.count(1)
    groups_clients = hasattr(run.method, "clusters") and len(sizes) < len(run.served)
    if alone and groups_clients:
        subject = "a group has" if alone == 1 else f"{alone} groups have"
        notes.append(
            f"{subject} one client only: fewer clusters, or a warm-up before they are formed, may "
            "give more balanced ones"
        )
    clients = len(run.infos)
    requested = len(run.scored)
    if requested == 0:
        notes.append("no client was scored (--score-on 0)")
    elif requested < clients:
        notes.append(f"scored on a sample of {requested:,} of {clients:,} clients (--score-on)")
    unscored = requested - len(reports)
    if unscored:
        notes.append(f"{unscored} of {requested} clients could not be scored at the end")
    untested = len(reports) - len(scored)
    if untested:
        verb = "has" if untested == 1 else "have"
        notes.append(f"{untested} of {len(reports)} clients {verb} no test examples: not scored")
    # The earliest line has precedence.
    first_sentences = ChainMap(*(line.get("why", {}) for line in lines))
    for key in ("lost", "refused"):
        counts = _count_reasons(lines, key)
        if counts:
            reasons = ", ".join(f"{reason} {count}" for reason, count in counts.items())
            notes.append(f"{sum(counts.values())} answers {key}: {reasons}")
        for reason in counts:
            if reason in first_sentences:
                notes.append(f"{reason}: {first_sentences[reason]}")
    if isinstance(run.method, WithPrediction):
        notes.append(
            f"{methods.name_of(run.method)} has its own way to predict, perhaps with several "
            f"models: models/ contains only the tree '{tuned_tree(run.method)}' and cannot be "
            "exported"
        )
    notes += clock.make_notes(run, clock.clock_of(lines))
    return notes
