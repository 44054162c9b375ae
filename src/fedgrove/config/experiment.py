"""What a person asks for, in the words of the command line; and the federations it is run on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from ..core import AnyMethod
from ..data import Defaults, Federation, load
from ..data.sets import SETS
from ..data.split import VALIDATION, check_validation
from ..errors import InputError, Refusals, check, shown
from ..nets.freeze import check_frozen_share
from ..parts.local import LocalTraining
from ..runs.faults import NO_FAULTS, Faults
from ..runs.gate import NORM_BOUND, Gate
from ..runs.memory import Memory
from ..runs.privacy import Privacy
from ..runs.run import Run, build, make_recipe
from .settings import Draft, coerce, hints

NUMBER_WORDS = (
    "window",
    "stride",
    "clients",
    "cohort",
    "rounds",
    "finetune",
    "standardise",
    "validation",
    "seed",
    "evaluate",
    "score_on",
    "quorum",
    "deadline",
    "norm_bound",
    "freeze",
    "per_task",
)
"""The words of an experiment that are numbers, lists of numbers, or true or false."""
OWN_WORDS = ("label", "client", "window", "stride", "channels", "time")
"""Those that say how data of a person's own are read."""
TEXT_WORDS = (
    *("label", "client", "channels", "time"),
    *("partition", "scenario", "split", "profile", "trace", "faults", "privacy", "init"),
)
"""Those that are text; here "none" is a word like any other (``scenario="none"``), not None."""


@dataclass(frozen=True)
class Experiment:
    """What a person asks for; None takes the data set's own default."""

    method: AnyMethod
    data: str | Federation = "digits"
    net: str | nn.Module | None = None
    label: str | None = None
    """Of data of one's own: the column to predict."""
    client: str | None = None
    """The column that says whose a row is; without it a file's name does."""
    window: int | None = None
    """Cut recordings into windows of so many rows."""
    stride: int | None = None
    """Rows from one window to the next; None: half a window."""
    channels: str | None = None
    """The columns that are inputs, with commas between; None: all others."""
    time: str | None = None
    """The column to sort recordings by."""
    partition: str | None = None
    scenario: str | None = None
    split: str | None = None
    validation: float = VALIDATION
    """Share held out for validation, of what is left after the test part; 0: none."""
    clients: int | None = None
    cohort: int | None = None
    rounds: int | None = None
    finetune: tuple[int, ...] = (0,)
    profile: str | None = None
    """What devices the clients have: a name, or a CSV file (:mod:`fedgrove.data.devices`)."""
    trace: str | None = None
    """A CSV file of how their bandwidths change."""
    standardise: bool = True
    seed: int = 0
    evaluate: int = 1
    """Score clients every so many rounds; 0: only at the end."""
    score_on: int | None = None
    """How many clients are scored, drawn from the seed; 0: none; None: all, or 1000 of many."""
    quorum: float = 0.0
    """The share of an exchange's clients that must report; at least one must."""
    deadline: float | None = None
    """Virtual seconds after which an exchange ends; who is later is lost."""
    norm_bound: float = NORM_BOUND
    """Refuse updates longer than so many times the recent median; 0: none."""
    faults: str | None = None
    """How clients fail or lie: kinds with their probabilities, as ``crash=0.1,late=0.2``."""
    privacy: str | None = None
    """Differential privacy of what leaves a client, as ``clip=1.0,noise=0.8``."""
    init: str | None = None
    """A file of weights to start from, ``FILE.safetensors`` or ``FILE.safetensors:body``."""
    freeze: float = 0.0
    """The share of the net's layers, from the first on, that is kept as it is."""
    per_task: bool = False
    """Keep the true tasks of a mixed federation apart: the method once for each."""

    def __post_init__(self) -> None:
        if isinstance(self.method, type):
            name = self.method.__name__
            raise InputError(f"method is the class {name}; make a method of it: {name}().")
        refusals = Refusals()
        for word in TEXT_WORDS:
            text = getattr(self, word)
            with refusals.collected():
                check(text is None or isinstance(text, str), word, text, "text, or None")
        kinds = _word_types()
        for word in NUMBER_WORDS:
            value = getattr(self, word)
            if isinstance(value, np.generic):
                value = value.item()
            with refusals.collected():
                # The class is frozen, and a value of another type is brought to the field's own.
                object.__setattr__(self, word, coerce(word, value, kinds[word]))
        # What is not even of its type cannot be compared with its limits.
        refusals.check()
        for check_word in self._limits():
            with refusals.collected():
                check_word()
        refusals.check()

    def _limits(self) -> Iterator[Callable[[], object]]:
        """What refuses a word beyond its limits, one for each word."""

        def limit(ok: bool, word: str, allowed: str) -> Callable[[], object]:
            return lambda: check(ok, word, getattr(self, word), allowed)

        yield limit(self.evaluate >= 0, "evaluate", "0 or more rounds")
        sample_is_valid = self.score_on is None or self.score_on >= 0
        yield limit(sample_is_valid, "score_on", "0 or more clients")
        yield limit(0 <= self.seed < 2**63, "seed", "0 or more, and below 2^63")
        rounds_are_valid = self.rounds is None or self.rounds >= 1
        yield limit(rounds_are_valid, "rounds", "1 or more")
        lengths_are_valid = bool(self.finetune) and min(self.finetune) >= 0
        yield limit(lengths_are_valid, "finetune", "lengths of 0 or more epochs")
        clients_are_valid = self.clients is None or self.clients >= 1
        yield limit(clients_are_valid, "clients", "1 or more")
        yield lambda: check_validation(self.validation)
        yield limit(0 <= self.quorum <= 1, "quorum", "a share between 0 and 1")
        deadline_is_valid = self.deadline is None or 0 < self.deadline < math.inf
        yield limit(deadline_is_valid, "deadline", "above 0 virtual seconds")
        bound_is_valid = self.norm_bound == 0 or self.norm_bound >= 1
        yield limit(bound_is_valid, "norm_bound", "0 (off) or 1 and more")
        yield lambda: check_frozen_share(self.freeze)
        # Parsed here only for the refusal, before any data are read.
        yield self.parsed_faults
        yield self.parsed_privacy

    def parsed_faults(self) -> Faults:
        """The faults as a run takes them."""
        return NO_FAULTS if self.faults is None else Faults.parse(self.faults)

    def parsed_privacy(self) -> Privacy | None:
        """The privacy as a run takes it."""
        return None if self.privacy is None else Privacy.parse(self.privacy)

    def federation(self, data_dir: str | Path | None = None) -> Federation:
        """The data, divided among clients."""
        return Federations(data_dir).of(self)

    def build(self, federation: Federation, memory: Memory, client_only: bool = False) -> Run:
        """The run that gives the result, or a client's own half of it; nothing is written."""
        return build(
            self.method,
            federation,
            memory,
            net=self.net,
            rounds=self.rounds,
            cohort=self.cohort,
            seed=self.seed,
            finetune=self.finetune,
            score_on=self.score_on,
            quorum=self.quorum,
            deadline=self.deadline,
            gate=Gate(self.norm_bound),
            faults=self.parsed_faults(),
            privacy=self.parsed_privacy(),
            init=self.init,
            freeze=self.freeze,
            per_task=self.per_task,
            client_only=client_only,
        )

    def resolved(self, run: Run) -> Experiment:
        """The same with nothing left open, as it is written to config.toml."""
        federation = run.federation
        net = federation.defaults.net if self.net is None else self.net
        return replace(
            self,
            method=run.method,
            net=net,
            partition=federation.partition,
            scenario=federation.scenario,
            split=federation.split,
            validation=federation.validation,
            rounds=run.rounds,
            cohort=run.cohort,
        )


@cache
def _word_types() -> dict[str, Any]:
    return hints(Experiment)


class Federations:
    """The federations of some experiments, each read and dealt once."""

    def __init__(self, data_dir: str | Path | None = None) -> None:
        self.data_dir = data_dir
        self._dealt: dict[tuple[Any, ...], Federation] = {}

    def of(self, experiment: Experiment) -> Federation:
        """The data of an experiment, divided among clients."""
        data = experiment.data
        if isinstance(data, Federation):
            check(
                experiment.trace is None,
                "trace",
                experiment.trace,
                "given to fedgrove.data.load, where data is a federation",
            )
            _check_nothing_else(experiment, data)
            return data
        # The words that decide a federation: experiments that agree in them share it.
        own_words = {word: getattr(experiment, word) for word in OWN_WORDS}
        key = (
            data,
            *own_words.values(),
            experiment.partition,
            experiment.scenario,
            experiment.split,
            experiment.validation,
            experiment.clients,
            experiment.profile,
            experiment.trace,
            experiment.standardise,
            experiment.seed,
        )
        if key not in self._dealt:
            self._dealt[key] = load(
                data,
                **own_words,
                partition=experiment.partition,
                scenario=experiment.scenario,
                split=experiment.split,
                validation=experiment.validation,
                clients=experiment.clients,
                profile=experiment.profile,
                trace=experiment.trace,
                standardise=experiment.standardise,
                seed=experiment.seed,
                data_dir=self.data_dir,
            )
        return self._dealt[key]

    def defaults(self, experiment: Experiment) -> Defaults:
        """How the data set is trained by default; a named set need not be read for that."""
        if isinstance(experiment.data, str) and experiment.data in SETS:
            return SETS[experiment.data].defaults
        return self.of(experiment).defaults

    def recipe(self, experiment: Experiment) -> LocalTraining:
        """How the data set trains a client by default."""
        return make_recipe(self.defaults(experiment))


def _check_nothing_else(experiment: Experiment, federation: Federation) -> None:
    """Refuse words that say how data are dealt out beside data that are dealt out already.

    What they are dealt out as may be said again, as the config.toml of such a run does.
    """
    allowed: dict[str, tuple[Any, ...]] = {
        **dict.fromkeys(OWN_WORDS, (None,)),
        "partition": (None, federation.partition),
        "scenario": (None, federation.scenario),
        "split": (None, federation.split),
        "validation": (VALIDATION, federation.validation),
        "clients": (None, len(federation.clients)),
        "profile": (None,),
        "standardise": (True,),
    }
    for word, values in allowed.items():
        given = getattr(experiment, word)
        if given not in values:
            raise InputError(
                f"{word} is {shown(given)}, and data is a federation that is dealt out already "
                f"({federation.name}); say so where you make it, as in data.load(..., "
                f"{word}={shown(given)}), and leave it out here."
            )


DEALING_WORDS = ("partition", "scenario", "split", "validation", "clients", "profile", "trace")
"""Those that say how data are dealt out."""


def with_own_data(words: Mapping[str, Any]) -> dict[str, Any]:
    """The words of an experiment, with data that were made in Python dealt out already.

    A data frame, arrays or a Dataset become a federation, and the words that say how are then said;
    a name, a file or a folder is left to be read when it is needed, and again when the run is
    resumed.
    """
    made = dict(words)
    data = made.get("data")
    if data is None or isinstance(data, Federation):
        return made
    if isinstance(data, str | Path):
        made["data"] = str(data)
        channels = made.get("channels")
        if channels is not None and not isinstance(channels, str):
            # As the command line has them.
            listed = [channels] if isinstance(channels, int) else channels
            made["channels"] = ",".join(str(each) for each in listed)
        return made
    said = {}
    for word in (*OWN_WORDS, *DEALING_WORDS, "standardise"):
        if word in made:
            said[word] = made.pop(word)
    made["data"] = load(data, **said, seed=made.get("seed", 0))
    return made


SHORTHANDS = {"epochs": "local.epochs", "batch": "local.batch", "lr": "local.optimiser.lr"}
"""Words of the command line that are short for a setting."""


def shorthand_settings(words: Mapping[str, Any]) -> list[str]:
    """``epochs``, ``batch`` and ``lr`` as settings, those that were given.

    >>> shorthand_settings({"epochs": 2, "lr": None})
    ['local.epochs=2']
    """
    settings = []
    for word, path in SHORTHANDS.items():
        if words.get(word) is not None:
            settings.append(f"{path}={words[word]}")
    return settings


Settings = Mapping[str, Any] | Sequence[str]
"""Settings of a method: ``{"mu": 0.1}``, or ``["mu=0.1"]`` as the command line has them."""


def with_settings(
    method: AnyMethod, settings: Settings, recipe: LocalTraining | None = None
) -> AnyMethod:
    """The method after all settings, in their order; they are checked together.

    >>> from fedgrove.methods import FedProx
    >>> with_settings(FedProx(), ["mu=0.5", "lr=0.1"], LocalTraining()).local.optimiser.lr
    0.1
    """
    draft = Draft(method)
    refusals = Refusals()
    if isinstance(settings, Mapping):
        for key, value in settings.items():
            with refusals.collected():
                draft = draft.put(key, value, recipe)
    elif isinstance(settings, str) or not all(isinstance(text, str) for text in settings):
        raise InputError(
            f"set is {settings!r}; it must be a list of texts as mu=0.1, or a dictionary of values."
        )
    else:
        for text in settings:
            with refusals.collected():
                draft = draft.assign(text, recipe)
    with refusals.collected():
        method = draft.checked()
    refusals.check()
    return method
