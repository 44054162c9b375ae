"""The rule: who goes on to more seeds, who is taken, and how sure that is.

All scores are of validation data: of each client, with the model that it would really use.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..runs.scoring import spread

LEAST_ON = 2
"""So many go on by their scores, and as many by where they are heading, at least."""
CLEAR = 2.0
"""A lead of so many standard errors is clear."""

Pair = tuple[int, int]
"""A seed and a client."""


@dataclass(frozen=True)
class Trial:
    """What some rounds of one method showed."""

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
        """The seeds that were tried."""
        return sorted({seed for seed, _ in self.clients})

    @property
    def score(self) -> float:
        """The mean over clients, then over seeds."""
        return self._over_seeds("mean")

    @property
    def worst_tenth(self) -> float:
        """The mean of the tenth of the clients that are served worst, then over seeds."""
        return self._over_seeds("worst10")

    def _over_seeds(self, figure: str) -> float:
        figures = []
        for seed in self.seeds:
            own = [value for (of, _), value in self.clients.items() if of == seed]
            figures.append(spread(own, "", self.more_is_better)[f"_{figure}"])
        return math.fsum(figures) / len(figures)

    @property
    def sign(self) -> int:
        """1 if more is better, else -1."""
        return 1 if self.more_is_better else -1


def heading(trial: Trial, full_rounds: int) -> float:
    """Where a method would be after all rounds, if every doubling of them gave as much again.

    v(T) = v(r) + log2(T / r) (v(r) - v(h)) / log2(r / h), of the scores v before fine-tuning in
    rounds h < r < T; never worse than the score that the method has already. It is a guess in
    favour of slow starters: most gain less with each doubling.
    """
    if not 0 < trial.half < trial.rounds:
        return trial.score
    gain = (trial.untuned - trial.untuned_at_half) / math.log2(trial.rounds / trial.half)
    doublings = math.log2(max(1.0, full_rounds / trial.rounds))
    guess = trial.untuned + doublings * gain
    return trial.sign * max(trial.sign * guess, trial.sign * trial.score)


def go_on(trials: Sequence[Trial], full_rounds: int) -> list[str]:
    """The methods that are tried on more seeds, in the order they were tried.

    A quarter by their scores and a quarter by where they are :func:`heading`, so that one that
    starts slowly is not lost; often these are the same.
    """
    each = max(LEAST_ON, math.ceil(len(trials) / 4))
    by_score = sorted(trials, key=lambda t: -t.sign * t.score)
    by_heading = sorted(trials, key=lambda t: -t.sign * heading(t, full_rounds))
    chosen = {trial.method for trial in (*by_score[:each], *by_heading[:each])}
    return [trial.method for trial in trials if trial.method in chosen]


def ranked(trials: Sequence[Trial]) -> list[Trial]:
    """The best score first; of equal ones, who sends less."""
    return sorted(trials, key=lambda t: (-t.sign * t.score, t.bytes_each))


@dataclass(frozen=True)
class Margin:
    """By how much one method is better than another, over the clients that both served."""

    lead: float
    """Positive if it is better, whichever way the metric goes."""
    error: float | None
    """The standard error of the mean difference; None with one client."""
    clients: int
    seeds: int
    seeds_ahead: int

    @property
    def is_clear(self) -> bool:
        """Whether it is more than noise would give, and so on every one of several seeds."""
        is_large = self.error is not None and self.lead > CLEAR * self.error
        return is_large and self.seeds_ahead == self.seeds and not self.is_one_seed

    @property
    def is_one_seed(self) -> bool:
        """Whether another seed might say something else: clients of one seed share a model."""
        return self.seeds <= 1

    @property
    def is_noise(self) -> bool:
        """Whether it is not even one standard error, or not there on most of the seeds."""
        is_on_most = 2 * self.seeds_ahead > self.seeds
        return self.error is None or self.lead <= self.error or not is_on_most


def margin(trial: Trial, other: Trial) -> Margin:
    """The mean difference, paired by seed and client.

    d_sk = a_sk - b_sk;  lead = mean(d);  error = sd(d) / sqrt(n). Clients of one seed have a model
    in common, so that the error is rather too small; hence also on how many seeds it is ahead.
    """
    gaps = {}
    for pair, value in trial.clients.items():
        if pair in other.clients:
            gaps[pair] = trial.sign * (value - other.clients[pair])
    seeds = sorted({seed for seed, _ in gaps})
    ahead = 0
    for seed in seeds:
        own = [gap for (of, _), gap in gaps.items() if of == seed]
        ahead += math.fsum(own) > 0
    error = None
    if len(gaps) > 1:
        error = statistics.stdev(gaps.values()) / math.sqrt(len(gaps))
    lead = math.fsum(gaps.values()) / max(1, len(gaps))
    return Margin(lead, error, len(gaps), len(seeds), ahead)
