"""An experiment: the options that decide a result, and the federations it is run on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .. import methods
from ..core import AnyMethod
from ..data import Defaults, Federation, load
from ..data.sets import SETS
from ..errors import InputError, Refusals, check, shown
from ..options import ExperimentOptions
from ..options.definition import names_of, options_of
from ..options.groups import (
    DataOptions,
    DeviceOptions,
    EvaluateOption,
    MethodArgument,
    SeedOption,
    Settings,
    SplitOptions,
    TrainingOptions,
)
from ..parts.local import LocalTraining
from ..runs.faults import NO_FAULTS, Faults
from ..runs.gate import Gate
from ..runs.memory import Memory
from ..runs.privacy import Privacy
from ..runs.run import Run, build, make_recipe
from .settings import Draft

DATA_NAMES = names_of(DataOptions, SplitOptions, DeviceOptions)
"""The options that decide a federation, together with the seed."""


@dataclass(frozen=True)
class Experiment(SeedOption, EvaluateOption, ExperimentOptions, MethodArgument):
    """The options of a run that decide its result (:mod:`fedgrove.options` explains them).

    None takes the data set's own default.
    """

    method: AnyMethod = field()

    def __post_init__(self) -> None:
        methods.make(self.method)
        refusals = Refusals()
        for name, option in options_of(Experiment).items():
            with refusals.collected():
                # The class is frozen; a value of another type is brought to the option's own.
                object.__setattr__(self, name, option.convert(getattr(self, name)))
        for name in ("label", "client", "channels"):
            text = getattr(self, name)
            with refusals.collected():
                check(text is None or isinstance(text, str), name, text, "text, or None")
        # Parsed here only for the refusal, before any data are read.
        if isinstance(self.faults, str):
            with refusals.collected():
                Faults.parse(self.faults)
        if isinstance(self.privacy, str):
            with refusals.collected():
                Privacy.parse(self.privacy)
        refusals.check()

    @property
    def data_name(self) -> str:
        """The name of the data, for the experiment's folder."""
        return self.data.name if isinstance(self.data, Federation) else Path(self.data).stem

    def parsed_faults(self) -> Faults:
        """The experiment's faults as a run takes them."""
        return NO_FAULTS if self.faults is None else Faults.parse(self.faults)

    def parsed_privacy(self) -> Privacy | None:
        """The experiment's privacy as a run takes it."""
        return None if self.privacy is None else Privacy.parse(self.privacy)

    def federation(self, data_dir: str | Path | None = None) -> Federation:
        """Load the experiment's data, divided among clients."""
        return Federations(data_dir).of(self)

    def on(self, federation: Federation) -> Experiment:
        """The experiment on data that are divided already, without options on how to do that."""
        defaults = {name: options_of(Experiment)[name].default for name in DATA_NAMES}
        return replace(self, **{**defaults, "data": federation})

    def build(self, federation: Federation, memory: Memory, client_only: bool = False) -> Run:
        """Build the run of an experiment, or a client's own half of it; nothing is written."""
        return build(
            self.method,
            federation.scored_by(self.metric),
            memory,
            net=self.net,
            rounds=self.rounds,
            cohort=self.cohort,
            seed=self.seed,
            finetune=tuple(self.finetune),
            score_on=self.score_on,
            quorum=self.quorum,
            deadline=self.deadline,
            gate=Gate(self.norm_bound),
            faults=self.parsed_faults(),
            privacy=self.parsed_privacy(),
            init=None if self.init is None else str(self.init),
            freeze=self.freeze,
            per_task=self.per_task,
            client_only=client_only,
        )

    def resolved(self, run: Run) -> Experiment:
        """The experiment with nothing left open, as it is written to config.toml."""
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
            train_examples=federation.train_examples,
            rounds=run.rounds,
            cohort=run.cohort,
        )


# ---- federations ---------------------------------------------------------------------------------


class Federations:
    """The federations of some experiments, each loaded and divided once."""

    def __init__(self, data_dir: str | Path | None = None) -> None:
        self.data_dir = data_dir
        self._dealt: dict[tuple[Any, ...], Federation] = {}

    def of(self, experiment: Experiment) -> Federation:
        """Return the data of an experiment, divided among clients, read once."""
        if isinstance(experiment.data, Federation):
            _check_nothing_else(experiment, experiment.data)
            return experiment.data.scored_by(experiment.metric)
        # Experiments that agree in these options share a federation.
        deciding = {name: getattr(experiment, name) for name in (*DATA_NAMES, "seed")}
        key = tuple(deciding.values())
        if key not in self._dealt:
            self._dealt[key] = load(**deciding, data_dir=self.data_dir)
        return self._dealt[key].scored_by(experiment.metric)

    def defaults(self, experiment: Experiment) -> Defaults:
        """Return how an experiment's data set is trained by default.

        A named set need not be read for that.
        """
        if isinstance(experiment.data, str) and experiment.data in SETS:
            return SETS[experiment.data].defaults
        return self.of(experiment).defaults

    def recipe(self, experiment: Experiment) -> LocalTraining:
        """Return how an experiment's data set trains a client by default."""
        return make_recipe(self.defaults(experiment))


def _check_nothing_else(experiment: Experiment, federation: Federation) -> None:
    """Refuse options on how to divide data that are a federation already.

    What the federation was made with may be given again, as the config.toml of such a run does.
    """
    made_with = {
        **federation.division,
        "train_examples": federation.train_examples,
        "clients": len(federation.clients),
    }
    options = options_of(Experiment)
    for name in DATA_NAMES:
        given = getattr(experiment, name)
        is_allowed = name == "data" or given in (options[name].default, made_with.get(name))
        if not is_allowed:
            raise InputError(
                f"{name} is {shown(given)}, and data is a federation that is divided among clients "
                f"already ({federation.name}); give it where the federation is made, as in "
                f"data.load(..., {name}={shown(given)}), and leave it out here."
            )


def load_own_data(values: Mapping[str, Any]) -> dict[str, Any]:
    """The options of an experiment, with data that were made in Python divided among clients.

    A data frame, arrays or a Dataset become a federation, and the options that say how are used up;
    a name, a file or a folder is left to be read when it is needed, and again when the run is
    resumed.
    """
    found = dict(values)
    data = found.get("data")
    if data is None or isinstance(data, Federation):
        return found
    if isinstance(data, str | Path):
        found["data"] = str(data)
        channels = found.get("channels")
        if channels is not None and not isinstance(channels, str):
            # As the command line has them.
            listed = [channels] if isinstance(channels, int) else channels
            found["channels"] = ",".join(str(each) for each in listed)
        return found
    used = {name: found.pop(name) for name in DATA_NAMES if name in found}
    found["data"] = load(**used, seed=found.get("seed", 0))
    return found


# ---- settings of the method ----------------------------------------------------------------------

SHORTHANDS = {
    name: option.option.setting
    for name, option in options_of(TrainingOptions).items()
    if option.option.setting
}
"""Options that are short for a setting: ``epochs`` for ``local.epochs``."""


def shorthand_settings(values: Mapping[str, Any]) -> list[str]:
    """``epochs``, ``batch`` and ``lr`` as settings, those that are given.

    >>> shorthand_settings({"epochs": 2, "lr": None})
    ['local.epochs=2']
    """
    given = [name for name in SHORTHANDS if values.get(name) is not None]
    return [f"{SHORTHANDS[name]}={values[name]}" for name in given]


def with_settings(
    method: AnyMethod, settings: Settings, recipe: LocalTraining | None = None
) -> AnyMethod:
    """Return the experiment's method after all ``--set`` settings, checked together.

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
