"""The rule: who goes on to more seeds, who is taken, and how sure that is.

All scores are of validation data: of each client, with the model that it would really use.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..export.size import model_bytes
from ..nets import Net
from ..report.seed_averages import strip_seed
from ..runs.folder import RunFolder
from ..runs.result import Failure, Result
from ..runs.scoring import spread

LEAST_ON = 2
"""At least this many methods go on by their scores, and as many by their predicted scores."""
CLEAR = 2.0
"""A lead of more standard errors than this is clear."""

Pair = tuple[int, int]
"""A seed and a client."""


def _list_by_seed(values: Mapping[Pair, float]) -> dict[int, list[float]]:
    """Return the values of the clients of each seed."""
    by_seed: dict[int, list[float]] = {}
    for (seed, _), value in values.items():
        by_seed.setdefault(seed, []).append(value)
    return by_seed


@dataclass(frozen=True)
class Trial:
    """The result of a few rounds of one method."""

    method: str
    rounds: int
    epochs: int
    """How long its clients fine-tuned: of the lengths that were tried, the best."""
    clients: Mapping[Pair, float]
    """The metric on validation data."""
    untuned: float
    """The mean before fine-tuning, at the end."""
    half: int = 0
    """The round in the middle at which clients were scored; 0: none."""
    untuned_at_half: float = 0.0
    more_is_better: bool = True
    bytes_each: float = 0.0
    """What a client would send and receive in the full run."""
    model_bytes: float | None = None
    seconds: float = 0.0

    @property
    def seeds(self) -> list[int]:
        """The seeds on which a candidate was tried."""
        return sorted(_list_by_seed(self.clients))

    @property
    def score(self) -> float:
        """A candidate's mean score over clients, then over seeds."""
        return self._over_seeds("mean")

    @property
    def worst_tenth(self) -> float:
        """A candidate's mean over the worst tenth of the clients, then over seeds."""
        return self._over_seeds("worst10")

    def _over_seeds(self, figure: str) -> float:
        # The prefix of the keys is empty, hence the bare underscore.
        by_seed = _list_by_seed(self.clients).values()
        return statistics.fmean(
            spread(own, "", self.more_is_better)[f"_{figure}"] for own in by_seed
        )

    @property
    def sign(self) -> int:
        """1 if more of the trial's metric is better, else -1."""
        return 1 if self.more_is_better else -1


def make_trial(
    name: str, results: Sequence[Result], rounds: int, full_rounds: int, net: Net
) -> Trial:
    """Return a candidate's trial: what its runs, one for each seed, scored on validation data."""
    first = results[0].summary
    more_is_better = bool(first.get("more_is_better", True))
    if "tasks" in first:
        # All have the same metric, which was checked before.
        more_is_better = bool(next(iter(first["tasks"].values()))["more_is_better"])
    sent = 0.0
    sizes = []
    for result in results:
        summary = result.summary
        sent += (summary["bytes_up"] + summary["bytes_down"]) / summary["clients"]
        size_of_run = model_bytes(result.folder, net)
        if size_of_run is not None:
            sizes.append(size_of_run)
    half, at_half = _find_middle_score([result.folder for result in results], rounds)
    lengths = list(map(int, first["validation_clients"]))
    if min(lengths) > 0:
        # Clients were not scored before fine-tuning, so there is no curve to go on.
        half = 0
    by_length = []
    for epochs in lengths:
        clients = {}
        for result in results:
            scores = result.summary["validation_clients"][str(epochs)]
            for client, value in scores.items():
                clients[result.summary["seed"], int(client)] = value
        by_length.append(
            Trial(
                method=name,
                rounds=rounds,
                epochs=epochs,
                clients=clients,
                untuned=0.0,
                half=half,
                untuned_at_half=at_half,
                more_is_better=more_is_better,
                bytes_each=sent / len(results) * full_rounds / rounds,
                model_bytes=sum(sizes) / len(sizes) if sizes else None,
                seconds=sum(result.summary["seconds"] for result in results),
            )
        )
    untuned = min(by_length, key=lambda each: each.epochs)
    # Of equal scores the shorter fine-tuning.
    best = max(by_length, key=lambda each: (each.sign * each.score, -each.epochs))
    return replace(best, untuned=untuned.score)


def _find_middle_score(folders: Sequence[RunFolder], rounds: int) -> tuple[int, float]:
    """The round in the middle in which clients were scored, and the mean then; 0 if none."""
    half = math.ceil(rounds / 2)
    means = []
    for folder in folders:
        for line in folder.metrics():
            mean = average_validation(line)
            if line["round"] == half and mean is not None:
                means.append(mean)
    if half >= rounds or len(means) != len(folders):
        return 0, 0.0
    return half, math.fsum(means) / len(means)


def average_validation(line: Mapping[str, Any]) -> float | None:
    """Return the mean validation score of a candidate, of a line of metrics.jsonl."""
    if "tasks" not in line:
        return line.get("validation_mean")
    known = [task for task in line["tasks"].values() if task["validation_mean"] is not None]
    clients = sum(task["clients"] for task in known)
    # No task has validation examples.
    if not clients:
        return None
    # Weighted by clients: each client counts once, whatever the size of its task.
    total = math.fsum(task["clients"] * task["validation_mean"] for task in known)
    return float(total / clients)


def predict_full_score(trial: Trial, full_rounds: int) -> float:
    """Predict a candidate's score after all rounds, if each doubling of rounds gains the same.

    v(T) = v(r) + log2(T / r) (v(r) - v(h)) / log2(r / h), of the scores v before fine-tuning in
    rounds h < r < T; never worse than the score that the method has already. It is a guess in
    favour of slow starters: most gain less with each doubling.
    """
    if not 0 < trial.half < trial.rounds:
        return trial.score
    # Scores before fine-tuning: fine-tuning hides how the shared model improves.
    gain = (trial.untuned - trial.untuned_at_half) / math.log2(trial.rounds / trial.half)
    # At least 0: a trial may be as long as the full run.
    doublings = math.log2(max(1.0, full_rounds / trial.rounds))
    guess = trial.untuned + doublings * gain
    # The sign turns "lower is better" into "higher is better" for the comparison, and back.
    return trial.sign * max(trial.sign * guess, trial.sign * trial.score)


def select_promising(trials: Sequence[Trial], full_rounds: int) -> list[str]:
    """Select the candidates that are tried on more seeds, in the order they were tried.

    A quarter by their scores and a quarter by :func:`predict_full_score`, so that a method that
    starts slowly is not dropped; often both quarters are the same methods.
    """
    # A quarter of the trials, but never one method alone: it would win without a comparison.
    each = max(LEAST_ON, math.ceil(len(trials) / 4))
    # Sorting is stable: of equal scores the method that was tried first goes on.
    by_score = sorted(trials, key=lambda t: -t.sign * t.score)
    by_heading = sorted(trials, key=lambda t: -t.sign * predict_full_score(t, full_rounds))
    chosen = {trial.method for trial in (*by_score[:each], *by_heading[:each])}
    return [trial.method for trial in trials if trial.method in chosen]


def rank_trials(trials: Sequence[Trial]) -> list[Trial]:
    """Sort trials: the best score first; of equal scores, the one that sends less."""
    return sorted(trials, key=lambda t: (-t.sign * t.score, t.bytes_each))


@dataclass(frozen=True)
class Margin:
    """By how much one method is better than another, over the clients of both."""

    lead: float
    """Positive if it is better, whichever way the metric goes."""
    error: float | None
    """The standard error of the mean difference; None with one client."""
    clients: int
    seeds: int
    seeds_ahead: int

    @property
    def is_clear(self) -> bool:
        """Whether the winner's margin is more than noise, on each of several seeds."""
        # Clients of one seed share a model, so that the error alone would be too sure.
        is_large = self.error is not None and self.lead > CLEAR * self.error
        return is_large and self.seeds_ahead == self.seeds and not self.is_one_seed

    @property
    def is_one_seed(self) -> bool:
        """Whether the margin of a choice has one seed only; another seed may differ."""
        return self.seeds <= 1

    @property
    def is_noise(self) -> bool:
        """Whether the winner's margin is below one standard error, or absent on most seeds."""
        is_on_most = 2 * self.seeds_ahead > self.seeds
        return self.error is None or self.lead <= self.error or not is_on_most


def measure_margin(trial: Trial, other: Trial) -> Margin:
    """Measure a candidate's margin over another: the mean difference by seed and client.

    d_sk = a_sk - b_sk;  lead = mean(d);  error = sd(d) / sqrt(n). Clients of one seed have a model
    in common, so that the error is rather too small; hence also on how many seeds it is ahead.
    """
    gaps = {}
    for pair, value in trial.clients.items():
        if pair in other.clients:
            gaps[pair] = trial.sign * (value - other.clients[pair])
    by_seed = _list_by_seed(gaps)
    ahead = sum(math.fsum(own) > 0 for own in by_seed.values())
    lead = math.fsum(gaps.values()) / max(1, len(gaps))
    # Of paired differences: how hard a client is cancels out.
    return Margin(lead, _standard_error(gaps.values()), len(gaps), len(by_seed), ahead)


def _standard_error(gaps: Collection[float]) -> float | None:
    """Return the standard error of the mean; None of one number."""
    return statistics.stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else None


# ---- afterwards ----------------------------------------------------------------------------------


def assess_choice(
    ends: Mapping[str, Result | Failure],
    found: Mapping[str, Any],
    budget: float | None,
    clients: int,
    more_is_better: bool,
) -> dict[str, Any]:
    """Compare the choice with all methods trained in full, by test data that it never saw.

    Each method is taken at its best number of fine-tuning epochs on test data; the choice keeps the
    number that it was chosen with. A method with a failed run is listed, but not compared, because
    the means of the others are over all seeds.

    Returns:
        The methods in full, best first, and how far behind the best one the choice is.
    """
    sign = 1 if more_is_better else -1
    scores: dict[tuple[str, int], dict[int, float]] = {}
    sent: dict[str, list[float]] = {}
    seconds = 0.0
    failed: dict[str, str] = {}
    for name, end in ends.items():
        if isinstance(end, Failure):
            # The first reason; further seeds mostly fail for the same one.
            failed.setdefault(strip_seed(name), end.why)
            continue
        summary = end.summary
        label = strip_seed(name)
        seconds += summary["seconds"]
        # Of one client, as budgets are.
        each = (summary["bytes_up"] + summary["bytes_down"]) / clients
        sent.setdefault(label, []).append(each)
        for length, scores_of_run in summary["finetune"].items():
            scores.setdefault((label, int(length)), {})[summary["seed"]] = _mean_over_clients(
                summary, scores_of_run
            )
    rows: list[dict[str, Any]] = []
    for label, taken in sent.items():
        if label in failed:
            continue
        own = {length: by_seed for (of, length), by_seed in scores.items() if of == label}
        # Of equal scores the shorter fine-tuning.
        best = max(own, key=lambda length: (sign * _mean(own[length]), -length))
        each = math.fsum(taken) / len(taken)
        rows.append(
            {
                "method": label,
                "epochs": best,
                "test": round(_mean(own[best]), 6),
                "bytes_each": round(each),
                "within_budget": budget is None or each <= budget,
            }
        )
    rows.sort(key=lambda row: -sign * row["test"])
    fitting = [row for row in rows if row["within_budget"]]
    assessed = {
        "rows": rows,
        "failed": failed,
        "pick": found["pick"],
        "seconds": round(seconds, 1),
    }
    if not fitting:
        return assessed
    best_row = fitting[0]
    assessed["best"] = best_row["method"]
    assessed["best_test"] = best_row["test"]
    if found["label"] in failed:
        return assessed
    # With its own number of epochs: it was fixed before any test score was known.
    picked = scores[(found["label"], found["epochs"])]
    best_scores = scores[(best_row["method"], best_row["epochs"])]
    gaps = [sign * (best_scores[seed] - picked[seed]) for seed in picked]
    error = _standard_error(gaps)
    return {
        **assessed,
        "pick_test": round(_mean(picked), 6),
        "behind": round(math.fsum(gaps) / len(gaps), 6),
        "behind_error": None if error is None else round(error, 6),
    }


def _mean(by_seed: Mapping[int, float]) -> float:
    """Return a candidate's mean over seeds."""
    return math.fsum(by_seed.values()) / len(by_seed)


def _mean_over_clients(summary: Mapping[str, Any], scores_of_run: Mapping[str, Any]) -> float:
    """The mean over the clients of a run, for one number of epochs."""
    if "tasks" not in scores_of_run:
        return float(scores_of_run[f"{summary['metric']}_mean"])
    tasks = scores_of_run["tasks"].values()
    clients = sum(task["clients"] for task in tasks)
    # Weighted by clients: each client counts once, whatever the size of its task.
    return float(math.fsum(task["clients"] * task["mean"] for task in tasks) / clients)
