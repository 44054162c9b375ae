"""How good clients' models are: the stages that score them, and their scores over clients."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .. import trees
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
)
from ..metrics import ACCURACY, CLASS_SUMS, Metric, MetricSums
from ..nets import Net
from ..parts.objective import ProblemLoss
from ..problems import MixedProblem, name_class_sums
from ..trees import Tree
from .guard import explain_errors

if TYPE_CHECKING:
    from .run import Run

DIVERGED = "diverged"
"""The number of lengths of fine-tuning at which a client has the model before it, since training
diverged; a client that has none reports no such number."""

# ---- what a client does --------------------------------------------------------------------------


def evaluate_stages(method: AnyMethod, use: Sequence[Stage], outputs: int) -> tuple[Stage, ...]:
    """Return the stages of "evaluate": score the model that the client would use now.

    Args:
        method: The method.
        use: The stages of "use", which bring the model into the carry.
        outputs: The number of outputs of the network.
    """
    measures = _score_stages(choose_scorer(method), tuned_tree(method), 0)
    return (*use, *measures, _give_scores((0,), keep=False, outputs=outputs))


def finetune_stages(
    method: AnyMethod,
    use: Sequence[Stage],
    lengths: Sequence[int],
    nets: Container[str],
    outputs: int,
) -> tuple[Stage, ...]:
    """Return the stages of "finetune": score the model after each length; keep the last model.

    Args:
        method: The method.
        use: The stages of "use", which bring the model into the carry.
        lengths: Numbers of epochs of fine-tuning.
        nets: The names of the method's networks.
        outputs: The number of outputs of the network.
    """
    score = choose_scorer(method)
    start = tuned_tree(method)
    net = start if start in nets else "model"
    stages: list[Stage] = [*use]
    for epochs in lengths:
        if epochs == 0:
            stages.append(Edit(_CopyUntuned(start)))
        else:
            recipe = method.local
            if recipe is not None:
                # Fine-tuning is another training: it does not use the optimiser state of rounds.
                recipe = replace(recipe, epochs=epochs, keep_state=False)
            stages.append(Train(ProblemLoss(), recipe, start, f"tuned{epochs}", net=net))
            stages.append(Edit(_KeepFinite(start, f"tuned{epochs}")))
        stages.extend(_score_stages(score, f"tuned{epochs}", epochs))
    return (*stages, _give_scores(lengths, keep=True, outputs=outputs))


def tuned_tree(method: AnyMethod) -> str:
    """Return which tree of the carry a run scores and fine-tunes."""
    if isinstance(method, WithPrediction) and isinstance(method, WithTuning):
        return method.tuned
    return "model"


# Dataclasses and no lambdas: stages of two runs must compare equal, or batched cannot stack them.
@dataclass(frozen=True)
class _CopyUntuned:
    """Gives the model the name that it would have after fine-tuning."""

    tree: str

    def __call__(self, carry: Carry, client: Client) -> Carry:
        return {**carry, "tuned0": carry[self.tree]}


@dataclass(frozen=True)
class _KeepFinite:
    """Puts the model before fine-tuning in place of one whose fine-tuning diverged."""

    start: str
    end: str

    def __call__(self, carry: Carry, client: Client) -> Carry:
        if trees.is_finite(carry[self.end]):
            return carry
        return {**carry, self.end: carry[self.start], f"{self.end}.{DIVERGED}": {}}


Scorer = Callable[[Net, Tree, Batch, Carry], Tree]


def _score_stages(score: Scorer, of: str, epochs: int) -> tuple[Measure, Measure]:
    return (
        Measure(f"test{epochs}", score, Batches("test"), of=of),
        Measure(f"validation{epochs}", score, Batches("validation"), of=of),
    )


def choose_scorer(method: AnyMethod) -> Scorer:
    """Return how a run scores a batch: one pass of the model, or the method's prediction."""
    return _ScorePrediction(method) if isinstance(method, WithPrediction) else score_batch


def score_batch(net: Net, params: Tree, batch: Batch, carry: Carry) -> Tree:
    """Score a client's model on a batch: sums for the metric, of losses and of examples."""
    return _sum_scores(net, net(params, batch.x, train=False).logits, batch, carry)


@dataclass(frozen=True)
class _ScorePrediction:
    method: Any
    """A method that has ``predict``."""

    def __call__(self, net: Net, params: Tree, batch: Batch, carry: Carry) -> Tree:
        tuned = {**carry, tuned_tree(self.method): params}
        with explain_errors(self.method, "predict"):
            logits = self.method.predict(net, params, batch.x, tuned)
        return _sum_scores(net, logits, batch, carry)


def _sum_scores(net: Net, logits: Tensor, batch: Batch, carry: Carry) -> Tree:
    return net.problem.sums(logits, batch.y, batch.weight, carry.get("client", {}))


def _give_scores(lengths: Sequence[int], keep: bool, outputs: int) -> Give:
    """Return the last stage: the metric and the loss after each length, and no packets.

    With ``keep`` the client remembers the last model.
    """

    def give(carry: Carry, client: Client) -> Outcome:
        mask = carry.get("model.mask")
        metrics = {
            "density": client.layout.density(mask),
            "params": float(count_kept(client.layout.size, mask)),
        }
        problem = client.net.problem
        for epochs in lengths:
            for split in ("test", "validation"):
                sums = carry[f"{split}{epochs}"]
                # Without examples there are no sums. Such a client reports nothing: a 0 would
                # count as a bad accuracy, or as a perfect error.
                if not sums:
                    continue
                numbers = problem.select_sums(sums, client.info.task)
                metric = problem.for_task(client.info.task).metric
                metrics[f"{split}{epochs}"] = float(metric.value(numbers))
                if split == "test":
                    metrics |= _report_sums(epochs, numbers)
                loss = numbers["loss"] / numbers["total"]
                # Weights may be finite and the loss still too large for a number.
                if math.isfinite(loss):
                    metrics[f"{split}_loss{epochs}"] = loss
        memory = {}
        if keep:
            memory = {"own": carry[f"tuned{lengths[-1]}"]}
            diverged = sum(f"tuned{epochs}.{DIVERGED}" in carry for epochs in lengths)
            if diverged:
                metrics[DIVERGED] = float(diverged)
        return Outcome(metrics=metrics, memory=memory)

    def expected(task: Task, net: Net) -> ExpectedReport:
        # A client without examples of a split has no value for it.
        values = {DIVERGED: (0.0, float(len(lengths)))}
        for epochs in lengths:
            for split in ("test", "validation"):
                values[f"{split}{epochs}"] = net.problem.value_range
                values[f"{split}_loss{epochs}"] = (-math.inf, math.inf)
            values[f"test{epochs}.total"] = (1.0, math.inf)
            # Declared: the gate allows few other numbers, and these may be many.
            for name in name_class_sums(net.problem, outputs):
                values[f"test{epochs}.{name}"] = (0.0, math.inf)
        numbers = {"density": (0.0, 1.0), "params": (0.0, float(net.layout.size))}
        return ExpectedReport(metrics=numbers, optional=values)

    return Give(give, expected)


def _report_sums(epochs: int, sums: MetricSums) -> dict[str, float]:
    """Return what a client reports of its test examples, for :func:`pool_scores`.

    The sums that its score is computed from, and ``total``, the number of examples. Of sums by
    class those that are not 0, as ``test0.hits.3`` for class 3.
    """
    reported = {}
    for name, value in sums.items():
        if isinstance(value, Mapping):
            for label, count in value.items():
                if count:
                    reported[f"test{epochs}.{name}.{label}"] = count
        # A sum may be too large for a number where the score, such as 1 / (1 + sum), is not.
        elif name != "loss" and math.isfinite(value):
            reported[f"test{epochs}.{name}"] = value
    return reported


def count_kept(size: int, mask: Mapping[str, Tensor] | None) -> int:
    """Return how many of ``size`` parameters a scored client keeps under its mask."""
    if mask is None:
        return size
    return size - sum(int((~leaf).sum()) for leaf in mask.values())


# ---- scores over clients -------------------------------------------------------------------------


def spread(
    values: Sequence[float], prefix: str = "accuracy", more_is_better: bool = True
) -> dict[str, float]:
    """Return the mean of a run's scores, their deviation, worst client and worst tenth.

    The standard deviation is what papers call fairness. The worst tenth has at least one client:
    ⌈K/10⌉ of K.

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


def keep_scored(reports: Sequence[Report], lengths: Sequence[int] = (0,)) -> list[Report]:
    """Return the reports of clients that have test examples, and so a score at each length."""
    names = {f"test{epochs}" for epochs in lengths}
    return [report for report in reports if names <= report.metrics.keys()]


def summarise_scores(run: Run, at_round: int, reports: Sequence[Report]) -> dict[str, Any]:
    """Return the entries of a line of metrics.jsonl for the scores of a round.

    Args:
        run: The run.
        at_round: The round.
        reports: The reports on "evaluate".
    """
    problem = run.federation.problem
    density = {"density": round(mean_of(reports, "density"), 8)}
    reports = keep_scored(reports)
    if not reports:
        return density
    if isinstance(problem, MixedProblem):
        return {"tasks": summarise_tasks(run, at_round, problem, reports, 0), **density}
    # A line without a metric has accuracies.
    words = {} if problem.metric == ACCURACY else problem.metric.describe()
    return {
        **words,
        **spread_scores(problem.metric, reports, 0),
        "validation_mean": mean_if_reported(reports, "validation0"),
        "loss_mean": mean_if_reported(reports, "test_loss0"),
        **density,
    }


def spread_scores(metric: Metric, reports: Sequence[Report], epochs: int) -> dict[str, float]:
    """Return a run's scores after some epochs of fine-tuning: their spread, and the pooled one."""
    values = [report.metrics[f"test{epochs}"] for report in reports]
    found = spread(values, metric.name, metric.more_is_better)
    pooled = pool_scores(metric, reports, epochs)
    if pooled is not None:
        found[f"{metric.name}_pooled"] = round(pooled, 8)
    return found


def pool_scores(metric: Metric, reports: Sequence[Report], epochs: int) -> float | None:
    """Return the score of a run over all test examples of the scored clients together.

    The metric of the clients' added sums: for accuracy sum_k correct_k / sum_k n_k, the mean over
    clients weighted by their numbers n_k of test examples. None if a client did not report its
    sums, or they give no score.

    >>> few = Report(0, metrics={"test0.correct": 1, "test0.total": 1})
    >>> many = Report(1, metrics={"test0.correct": 3, "test0.total": 9})
    >>> pool_scores(ACCURACY, [few, many], 0)
    0.4
    """
    prefix = f"test{epochs}."
    terms: dict[str, list[float]] = {}
    for report in reports:
        for name, value in report.metrics.items():
            if name.startswith(prefix):
                terms.setdefault(name.removeprefix(prefix), []).append(value)
    # fsum: the result does not depend on the order of clients.
    sums: dict[str, Any] = {}
    for name, values in terms.items():
        sum_name, _, label = name.rpartition(".")
        if metric.by_class and label.isdecimal():
            sums.setdefault(sum_name, {})[int(label)] = math.fsum(values)
        elif len(values) < len(reports):
            return None
        else:
            sums[name] = math.fsum(values)
    if "total" not in sums:
        return None
    for name in CLASS_SUMS if metric.by_class else ():
        # What is 0 for every class is not reported.
        sums.setdefault(name, {})
    try:
        pooled = float(metric.value(sums))
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError):
        # The sums come from clients, which may report anything.
        return None
    lowest, highest = metric.value_range
    is_score = math.isfinite(pooled) and lowest <= pooled <= highest
    return pooled if is_score else None


def summarise_tasks(
    run: Run, at_round: int, problem: MixedProblem, reports: Sequence[Report], epochs: int
) -> dict[str, dict[str, Any]]:
    """Return the scores of each task of a mixed federation, after some epochs of fine-tuning."""
    found: dict[str, dict[str, Any]] = {}
    by_task: dict[str, list[Report]] = {}
    for report in reports:
        by_task.setdefault(run.task_of(report.of, at_round), []).append(report)
    for task in problem.tasks:
        own = by_task.get(task.name)
        # A sample may have no client of a task, or none could be scored.
        if not own:
            continue
        metric = task.problem.metric
        numbers = spread_scores(metric, own, epochs)
        found[task.name] = {
            **metric.describe(),
            "clients": len(own),
            **{name.removeprefix(f"{metric.name}_"): number for name, number in numbers.items()},
            "validation_mean": mean_if_reported(own, f"validation{epochs}"),
            "loss_mean": mean_if_reported(own, f"test_loss{epochs}"),
        }
    return found


def mean_if_reported(reports: Sequence[Report], name: str) -> float | None:
    """Return the mean of a number over the scored clients that reported it, or None.

    A client without validation examples does not report their metric; nor does any client a loss
    that is not finite.
    """
    numbers = [report.metrics[name] for report in reports if name in report.metrics]
    if not numbers:
        return None
    return round(math.fsum(sorted(numbers)) / len(numbers), 8)


def mean_of(reports: Sequence[Report], name: str) -> float:
    """Return the mean of a number that all scored clients of a run report."""
    return sum(report.metrics[name] for report in reports) / len(reports)


def name_tasks(run: Run) -> Callable[[Task], str] | None:
    """Return what tells a message's task in a mixed federation; None for other federations."""
    if not isinstance(run.federation.problem, MixedProblem):
        return None
    return lambda task: run.task_of(task.to, task.round)
