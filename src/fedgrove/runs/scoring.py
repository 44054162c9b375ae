"""How well clients are served: the stages that score them, and the figures made of their scores."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .. import methods, trees
from ..core import (
    AnyMethod,
    Batch,
    Batches,
    Carry,
    Client,
    Edit,
    ExpectedReport,
    Give,
    Measure,
    Outcome,
    Report,
    Stage,
    Task,
    Train,
    WithPrediction,
    WithTuning,
    count_paper_bytes,
)
from ..nets import Net
from ..nets.initial_weights import SCRATCH
from ..nets.layout import Layout
from ..parts.objective import ProblemLoss
from ..problems import ACCURACY, AnyProblem, Metric, MixedProblem
from ..trees import Tree
from ..wire.ledger import Ledger
from . import clock
from .guard import calling, server_metrics_of
from .purity import purity_of

if TYPE_CHECKING:
    from .run import Run

# ---- what a client does --------------------------------------------------------------------------


def evaluate_stages(method: AnyMethod, use: Sequence[Stage]) -> tuple[Stage, ...]:
    """Score the model the client would use now; ``use`` brings it into the carry."""
    measures = _score_stages(scorer(method), tuned_tree(method), 0)
    return (*use, *measures, _give_scores((0,), keep=False))


def tuned_tree(method: AnyMethod) -> str:
    """The tree of the carry that is scored, and fine-tuned."""
    if isinstance(method, WithPrediction) and isinstance(method, WithTuning):
        return method.tuned
    return "model"


def finetune_stages(
    method: AnyMethod, use: Sequence[Stage], lengths: Sequence[int], nets: Container[str]
) -> tuple[Stage, ...]:
    """Score the client's model after each number of epochs of fine-tuning; keep the last one.

    ``nets`` are the names of the method's networks.
    """
    score = scorer(method)
    start = tuned_tree(method)
    net = start if start in nets else "model"
    stages: list[Stage] = [*use]
    for epochs in lengths:
        if epochs == 0:
            stages.append(Edit(Untuned(start)))
        else:
            recipe = method.local
            if recipe is not None:
                recipe = replace(recipe, epochs=epochs)
            stages.append(Train(ProblemLoss(), recipe, start, f"tuned{epochs}", net=net))
        stages.extend(_score_stages(score, f"tuned{epochs}", epochs))
    return (*stages, _give_scores(lengths, keep=True))


def _give_scores(lengths: Sequence[int], keep: bool) -> Give:
    """The last stage: no packets, but a value of the metric for each length of fine-tuning."""

    def what_is_given(task: Task, net: Net) -> ExpectedReport:
        # A client without test examples has none of these.
        values = {f"test{epochs}": net.problem.value_range for epochs in lengths}
        numbers = {"density": (0.0, 1.0), "params": (0.0, math.inf)}
        return ExpectedReport(metrics=numbers, optional=values)

    return Give(_scores(lengths, keep), what_is_given)


@dataclass(frozen=True)
class Untuned:
    """The model after no fine-tuning: as it is."""

    tree: str

    def __call__(self, carry: Carry, client: Client) -> Carry:
        """Under the name that it would have after fine-tuning."""
        return {**carry, "tuned0": carry[self.tree]}


Score = Callable[[Net, Tree, Batch, Carry], Tree]


def _score_stages(score: Score, of: str, epochs: int) -> tuple[Measure, Measure]:
    return (
        Measure(f"test{epochs}", score, Batches("test"), of=of),
        Measure(f"validation{epochs}", score, Batches("validation"), of=of),
    )


@dataclass(frozen=True)
class Predicted:
    """Scores what the method itself predicts."""

    method: Any
    """A method that has ``predict``."""

    def __call__(self, net: Net, params: Tree, batch: Batch, carry: Carry) -> Tree:
        """As :func:`correct`."""
        tuned = {**carry, tuned_tree(self.method): params}
        with calling(self.method, "predict"):
            logits = self.method.predict(net, params, batch.x, tuned)
        return counts(net, logits, batch, carry)


def scorer(method: AnyMethod) -> Score:
    """How a client's predictions are scored: one pass of the model, unless the method predicts."""
    if isinstance(method, WithPrediction):
        return Predicted(method)
    return correct


def correct(net: Net, params: Tree, batch: Batch, carry: Carry) -> Tree:
    """What one pass of the model gets right in a batch."""
    return counts(net, net(params, batch.x, train=False).logits, batch, carry)


def counts(net: Net, logits: Tensor, batch: Batch, carry: Carry) -> Tree:
    """Over a batch: what the metric is computed from, examples, and the sum of their losses."""
    return net.problem.sums(logits, batch.y, batch.weight, carry.get("client", {}))


def _scores(lengths: Sequence[int], keep: bool) -> Callable[[Carry, Client], Outcome]:
    """The last stage: the metric and the loss, and with ``keep`` the model to remember."""

    def give(carry: Carry, client: Client) -> Outcome:
        mask = carry.get("model.mask")
        metrics = {
            "density": client.layout.density(mask),
            "params": float(kept(client.layout.size, mask)),
        }
        for epochs in lengths:
            for split in ("test", "validation"):
                sums = carry[f"{split}{epochs}"]
                # No examples, no sums. Such a client says nothing of them: a 0 would count as a
                # bad accuracy, or as a perfect error.
                if not sums:
                    continue
                problem = client.net.problem
                numbers = problem.select_sums(sums, client.info.task)
                loss = numbers["loss"] / numbers["total"]
                metric = problem.for_task(client.info.task).metric
                metrics[f"{split}{epochs}"] = float(metric.value(numbers))
                # Weights may be finite and the loss still too large for a number.
                if math.isfinite(loss):
                    metrics[f"{split}_loss{epochs}"] = loss
        memory = {}
        if keep:
            memory["own"] = carry[f"tuned{lengths[-1]}"]
        return Outcome(metrics=metrics, memory=memory)

    return give


def kept(size: int, mask: Mapping[str, Tensor] | None) -> int:
    """How many of ``size`` parameters are left under a mask."""
    if mask is None:
        return size
    return size - sum(int((~leaf).sum()) for leaf in mask.values())


# ---- figures over clients ------------------------------------------------------------------------


def spread(
    values: Sequence[float], prefix: str = "accuracy", more_is_better: bool = True
) -> dict[str, float]:
    """Mean, standard deviation over clients (the papers' "fairness"), worst client, worst tenth.

    The worst tenth holds at least one client: ⌈K/10⌉ of K.

    >>> spread([0.5, 1.0, 0.9], "a")
    {'a_mean': 0.8, 'a_std': 0.21602469, 'a_worst': 0.5, 'a_worst10': 0.5}
    >>> spread([0.5, 1.0, 0.9], "e", more_is_better=False)["e_worst"]
    1.0
    """
    count = len(values)
    if not count:
        return {f"{prefix}_{key}": math.nan for key in ("mean", "std", "worst", "worst10")}
    ranked = sorted(values, reverse=not more_is_better)
    # fsum: the result does not depend on the order of clients.
    mean = math.fsum(ranked) / count
    std = math.sqrt(math.fsum((a - mean) ** 2 for a in ranked) / count)
    tenth = ranked[: math.ceil(count / 10)]
    return {
        f"{prefix}_mean": round(mean, 8),
        f"{prefix}_std": round(std, 8),
        f"{prefix}_worst": round(ranked[0], 8),
        f"{prefix}_worst10": round(math.fsum(tenth) / len(tenth), 8),
    }


def with_scores(reports: Sequence[Report], lengths: Sequence[int] = (0,)) -> list[Report]:
    """Those of clients that have test examples, and so a score after each of these epochs."""
    names = {f"test{epochs}" for epochs in lengths}
    return [report for report in reports if names <= report.metrics.keys()]


def untested(reports: Sequence[Report]) -> dict[str, list[int]]:
    """Why some clients that answered were not scored, as a line of metrics.jsonl says it."""
    others = [report.of for report in reports if "test0" not in report.metrics]
    return {"no test examples": others} if others else {}


def scores(run: Run, at_round: int, reports: Sequence[Report]) -> dict[str, Any]:
    """What a line of metrics.jsonl says of a round's evaluation in which these clients answered."""
    problem = run.federation.problem
    density = {"density": round(_mean(reports, "density"), 8)}
    reports = with_scores(reports)
    if not reports:
        return density
    if isinstance(problem, MixedProblem):
        return {"tasks": _by_task(run, at_round, problem, reports, 0), **density}
    # A line without a metric is of accuracies.
    words = {} if problem.metric == ACCURACY else problem.metric.describe()
    return {
        **words,
        **_spread_of(problem.metric, reports, 0),
        "validation_mean": _mean_of_those_who_say(reports, "validation0"),
        "loss_mean": _mean_of_those_who_say(reports, "test_loss0"),
        **density,
    }


def _spread_of(metric: Metric, reports: Sequence[Report], epochs: int) -> dict[str, float]:
    """The figures of one metric after so many epochs of fine-tuning."""
    return spread(_metric(reports, f"test{epochs}"), metric.name, metric.more_is_better)


def _by_task(
    run: Run, at_round: int, problem: MixedProblem, reports: Sequence[Report], epochs: int
) -> dict[str, dict[str, Any]]:
    """The figures of each task of a mixed federation of which clients were scored."""
    found: dict[str, dict[str, Any]] = {}
    task_of = {report.of: run.task_of(report.of, at_round) for report in reports}
    for task in problem.tasks:
        own = [report for report in reports if task_of[report.of] == task.name]
        # Nobody of a task may be in a sample, or could be scored.
        if not own:
            continue
        metric = task.problem.metric
        figures = spread(_metric(own, f"test{epochs}"), "", metric.more_is_better)
        found[task.name] = {
            **metric.describe(),
            "clients": len(own),
            **{name.removeprefix("_"): figure for name, figure in figures.items()},
            "validation_mean": _mean_of_those_who_say(own, f"validation{epochs}"),
            "loss_mean": _mean_of_those_who_say(own, f"test_loss{epochs}"),
        }
    return found


def task_names(run: Run) -> Callable[[Task], str] | None:
    """Which task of a mixed federation a message belongs to; None where there is one."""
    if not isinstance(run.federation.problem, MixedProblem):
        return None
    return lambda task: run.task_of(task.to, task.round)


def bytes_of_tasks(ledger: Ledger) -> dict[str, dict[str, dict[str, int]]]:
    """What a line of metrics.jsonl says of each task's bytes; nothing where there is one task."""
    if not ledger.by_name:
        return {}
    return {"bytes_tasks": {name: own.totals() for name, own in sorted(ledger.by_name.items())}}


def _with_bytes(
    by_task: Mapping[str, Mapping[str, Any]], lines: Sequence[Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """The figures of each task, with the bytes that its clients' rounds took."""
    found = {}
    for name, figures in by_task.items():
        sums = {"bytes_up": 0, "bytes_down": 0}
        for line in lines:
            for key, count in line.get("bytes_tasks", {}).get(name, {}).items():
                sums[key] += count
        found[name] = {**figures, **sums}
    return found


def _mean_of_those_who_say(reports: Sequence[Report], name: str) -> float | None:
    """The mean of a number over the clients that gave it; None, in JSON null, if none did.

    A client without validation examples says nothing of them, nor of a loss that is not finite.
    """
    numbers = [report.metrics[name] for report in reports if name in report.metrics]
    if not numbers:
        return None
    return round(math.fsum(sorted(numbers)) / len(numbers), 8)


def _metric(reports: Sequence[Report], name: str) -> list[float]:
    return [report.metrics[name] for report in reports]


def _mean(reports: Sequence[Report], name: str) -> float:
    return sum(_metric(reports, name)) / len(reports)


def summarise(
    run: Run,
    lines: Sequence[Mapping[str, Any]],
    engine: str,
    state: Any,
    reports: Sequence[Report],
    delivery: Ledger,
) -> dict[str, Any]:
    """The figures of a finished run, all but its seconds.

    ``lines`` are those of metrics.jsonl, ``reports`` those of the final fine-tuning, and
    ``delivery`` what it cost.
    """
    training = Ledger()
    for line in lines:
        training.add({"up": line["bytes_up_parts"], "down": line["bytes_down_parts"]})
    # With several lengths of fine-tuning the last one gives the headline.
    last = run.finetune[-1]
    sizes = group_sizes(run, state)
    clients = len(run.infos)
    federation = run.federation
    layout = run.net.layout
    scored = with_scores(reports, run.finetune)
    return {
        "method": run.label,
        "data": federation.name,
        "partition": federation.partition,
        "scenario": federation.scenario,
        "split": federation.split,
        "validation": federation.validation,
        "engine": engine,
        "seed": run.seed,
        "rounds": run.rounds,
        "clients": clients,
        "cohort": run.cohort,
        **_start_of(run),
        "groups": len(sizes),
        "group_sizes": sizes,
        "scored": len(scored),
        **_purity(run, state),
        **_headline(run, state.round, federation.problem, scored, lines),
        "density": round(_mean(reports, "density"), 8) if reports else None,
        "params": layout.size,
        **_frozen_params(layout),
        "params_mean": _mean(reports, "params") if reports else None,
        "macs": layout.macs,
        **training.totals(),
        **training.parts(),
        "bytes_paper": _paper_bytes(run),
        # A line of an exchange after which nobody was scored has no such key.
        "bytes_evaluate_up": sum(line.get("bytes_evaluate_up", 0) for line in lines),
        "bytes_evaluate_down": sum(line.get("bytes_evaluate_down", 0) for line in lines),
        **delivery.totals("bytes_deliver"),
        "lost": _counted(lines, "lost"),
        "refused": _counted(lines, "refused"),
        "abandoned": sum("abandoned" in line for line in lines),
        "virtual_seconds": clock.clock_of(lines),
        f"{_prefix(federation.problem)}_clients": {
            str(report.of): round(report.metrics[f"test{last}"], 8) for report in scored
        },
        "validation_clients": {str(n): _validation(scored, n) for n in run.finetune},
        **_densities(reports),
        **server_metrics_of(run.method, state),
        **_own_prediction(run),
        "notes": [
            *federation.notes,
            *_lonely_groups(run, sizes),
            *_sampled(len(run.scored), clients),
            *_unscored(len(reports), len(run.scored)),
            *_untested(len(reports) - len(scored), len(reports)),
            *_not_folded(lines),
            *_partly_kept(run),
            *clock.notes(run, clock.clock_of(lines)),
        ],
    }


def _start_of(run: Run) -> dict[str, Any]:
    """Where the weights came from, and the share of the layers that kept them."""
    if run.origin is None:
        return {"init": SCRATCH, "freeze": run.frozen}
    return {"init": str(run.origin), "init_sha256": run.origin.sha256, "freeze": run.frozen}


def _frozen_params(layout: Layout) -> dict[str, int]:
    return {"params_frozen": layout.frozen_size} if layout.frozen_size else {}


def _purity(run: Run, state: Any) -> dict[str, float]:
    """That of the groups; their number is told anyway."""
    # Of the data that the last round worked on: the groups were made from these.
    found = purity_of(run, state, max(0, state.round - 1))
    return {"purity": found["purity"]} if found else {}


def _headline(
    run: Run,
    at_round: int,
    problem: AnyProblem,
    reports: Sequence[Report],
    lines: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """The figures that a table shows, and those of every length of fine-tuning."""
    last = str(run.finetune[-1])
    if not reports:
        words = {"metric": None} if isinstance(problem, MixedProblem) else problem.metric.describe()
        return {**words, "validation_mean": None, "finetune": {}}
    if isinstance(problem, MixedProblem):
        # Different metrics have no common mean.
        by_task = {}
        for n in run.finetune:
            figures = _by_task(run, at_round, problem, reports, n)
            by_task[str(n)] = _with_bytes(figures, lines)
        finetune = {length: {"tasks": tasks} for length, tasks in by_task.items()}
        return {"metric": None, "tasks": by_task[last], "finetune": finetune}
    after = {str(n): _spread_of(problem.metric, reports, n) for n in run.finetune}
    return {
        **problem.metric.describe(),
        **after[last],
        "validation_mean": _mean_of_those_who_say(reports, f"validation{last}"),
        "finetune": after,
    }


def _prefix(problem: AnyProblem) -> str:
    return "metric" if isinstance(problem, MixedProblem) else problem.metric.name


def _validation(reports: Sequence[Report], epochs: int) -> dict[str, float]:
    """Every client's own metric on its validation data; those who have none are not there."""
    name = f"validation{epochs}"
    return {
        str(report.of): round(report.metrics[name], 8)
        for report in reports
        if name in report.metrics
    }


def _densities(reports: Sequence[Report]) -> dict[str, dict[str, float]]:
    """Every client's density, where they differ."""
    own = {str(report.of): round(report.metrics["density"], 8) for report in reports}
    return {"density_clients": own} if len(set(own.values())) > 1 else {}


def _paper_bytes(run: Run) -> int | None:
    with calling(run.method, "paper_bytes"):
        return count_paper_bytes(run.method, run.net, len(run.infos), run.cohort, run.rounds)


def _own_prediction(run: Run) -> dict[str, str]:
    """A mark where a client's model is not all that it predicts with: export refuses it."""
    return {"prediction": "own"} if isinstance(run.method, WithPrediction) else {}


def _partly_kept(run: Run) -> list[str]:
    """A note that says so."""
    if not isinstance(run.method, WithPrediction):
        return []
    return [
        f"{methods.name_of(run.method)} predicts in its own way, perhaps with several models: "
        f"models/ holds the tree '{tuned_tree(run.method)}' alone, and cannot be exported"
    ]


def _counted(lines: Sequence[Mapping[str, Any]], key: str) -> dict[str, int]:
    """How many answers of a run were lost or refused, by reason."""
    counts: Counter[str] = Counter()
    for line in lines:
        for reason, clients in line.get(key, {}).items():
            counts[reason] += len(clients)
    return dict(sorted(counts.items()))


def _sampled(asked: int, clients: int) -> list[str]:
    """A note where not all clients are scored, as was wanted."""
    if asked == clients:
        return []
    if asked == 0:
        return ["no client was scored (--score-on 0)"]
    return [f"scored on a sample of {asked:,} of {clients:,} clients (--score-on)"]


def _unscored(scored: int, clients: int) -> list[str]:
    """A note where some clients could not be scored at the end."""
    if scored == clients:
        return []
    return [f"{clients - scored} of {clients} clients could not be scored at the end"]


def _untested(untested: int, clients: int) -> list[str]:
    """A note where some clients have nothing to be scored on."""
    if not untested:
        return []
    verb = "has" if untested == 1 else "have"
    return [f"{untested} of {clients} clients {verb} no test examples: not scored"]


def _not_folded(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """A note of how many answers never reached the model."""
    notes = []
    for key in ("lost", "refused"):
        counts = _counted(lines, key)
        if counts:
            reasons = ", ".join(f"{reason} {count}" for reason, count in counts.items())
            notes.append(f"{sum(counts.values())} answers {key}: {reasons}")
        for reason in counts:
            notes.extend(_first_sentence(lines, reason))
    return notes


def _first_sentence(lines: Sequence[Mapping[str, Any]], reason: str) -> list[str]:
    """What was said when an answer was first lost or refused for this reason."""
    for line in lines:
        if reason in line.get("why", {}):
            return [f"{reason}: {line['why'][reason]}"]
    return []


NOT_DIVIDED = -1
"""The label of all clients where groups may come, and have not."""


def group_sizes(run: Run, state: Any) -> list[int]:
    """How many clients share each model, of those whose models are kept; the largest group first.

    A method whose state says who is in which group is believed. Otherwise clients that are
    delivered the same model are a group, and clients that only use their own are one each; those
    of a method that forms groups, but has not yet, are one group.
    """
    groups: Mapping[int, int] | None = getattr(state, "groups", None)
    if groups:
        return sorted(Counter(groups.values()).values(), reverse=True)
    labels: list[int | bytes] = []
    known = trees.Digests()
    for k in run.served:
        packet = run.deliver(state, k).get("model")
        if packet is not None:
            labels.append(known.of(packet.values))
        elif groups is not None:
            labels.append(NOT_DIVIDED)
        else:
            labels.append(k)
    return sorted(Counter(labels).values(), reverse=True)


def _lonely_groups(run: Run, sizes: Sequence[int]) -> list[str]:
    """A warning where a grouping left clients on their own."""
    alone = sizes.count(1)
    groups_clients = hasattr(run.method, "clusters") and len(sizes) < len(run.served)
    if not alone or not groups_clients:
        return []
    subject = "a group has" if alone == 1 else f"{alone} groups have"
    return [
        f"{subject} one client only: fewer clusters, or a warm-up before they are formed, may give "
        "more even ones"
    ]
