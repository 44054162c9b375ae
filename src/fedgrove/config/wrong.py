"""Everything that is wrong with what was asked for, found at once.

The library refuses at the first thing that it cannot use. Here it is asked about the rest as well,
each word by itself, so that a person corrects a command once and not five times. All of this runs
only where something was refused already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from .. import methods, nets
from ..core import AnyMethod
from ..data import Federation
from ..data.build import Choices
from ..data.devices import read_devices
from ..errors import InputError, Refusals, check
from ..nets.user_files import is_file_spec
from ..parts.local import SGD, Adam, LocalTraining
from .experiment import Experiment, Federations, Settings, with_settings


def assembled(
    method: AnyMethod | str,
    words: Mapping[str, Any],
    settings: Sequence[Settings],
    federations: Federations,
    refusals: Refusals,
    others: Iterable[Callable[[], object]] = (),
) -> Experiment:
    """The experiment of a method, words and settings; all that is wrong is refused at once.

    ``refusals`` holds what was wrong before, and ``others`` look for what else may be.
    """
    chosen: AnyMethod | None = None
    with refusals.collected():
        chosen = methods.make(method) if isinstance(method, str) else method
    experiment: Experiment | None = None
    # Any method will do to look at the words.
    with refusals.collected():
        experiment = Experiment(chosen or methods.FedAvg(), **words)
    if experiment is None:
        experiment = Experiment(chosen or methods.FedAvg(), **_good(words))
    given = [each for each in settings if each]
    if given and chosen is not None:
        experiment = _with_all_settings(experiment, given, federations, refusals)
    if refusals.sentences:
        for look in others:
            with refusals.collected():
                look()
        look_further(experiment, federations, refusals)
    refusals.check()
    return experiment


def _with_all_settings(
    experiment: Experiment,
    settings: Sequence[Settings],
    federations: Federations,
    refusals: Refusals,
) -> Experiment:
    recipe = None
    with refusals.collected():
        recipe = federations.recipe(experiment)
    # Where nobody knows how the data are trained, a setting may be one of what they bring: it is
    # refused if it is wrong whatever that is.
    likely = recipe or LocalTraining(optimiser=Adam())
    other = recipe or LocalTraining(optimiser=SGD())
    changed, wrong = _tried(experiment, settings, likely)
    _, wrong_too = _tried(experiment, settings, other)
    is_certain = {_beginning(sentence) for sentence in wrong_too}
    for sentence in wrong:
        if _beginning(sentence) in is_certain:
            refusals.add(InputError(sentence))
    return changed


def _tried(
    experiment: Experiment, settings: Sequence[Settings], recipe: LocalTraining
) -> tuple[Experiment, list[str]]:
    """The experiment with those settings that are right, and what is wrong with the others."""
    wrong = Refusals()
    for each in settings:
        with wrong.collected():
            method = with_settings(experiment.method, each, recipe)
            experiment = replace(experiment, method=method)
    return experiment, wrong.sentences


def _beginning(sentence: str) -> str:
    """What a sentence refuses, without what is allowed instead, which depends on the rest."""
    return sentence.partition(";")[0].partition(". There are")[0]


def _good(words: Mapping[str, Any]) -> dict[str, Any]:
    """The words that are right by themselves."""
    good = {}
    for word, value in words.items():
        try:
            Experiment(methods.FedAvg(), **{word: value})
        except InputError:
            continue
        good[word] = value
    return good


def look_further(
    experiment: Experiment,
    federations: Federations,
    refusals: Refusals,
    cannot_read: bool = False,
) -> None:
    """Look for what is wrong with the data, how they are dealt out, the net and the cohort.

    With ``cannot_read``, somebody tried to read the data, and ``refusals`` says why it failed.
    """
    dealt_is_right = _look_at_dealing(experiment, refusals)
    federation: Federation | None = None
    if not dealt_is_right:
        # Such words are refused before anybody looks at the name of the data.
        plain = replace(
            experiment, partition=None, scenario=None, split=None, profile=None, trace=None
        )
        with refusals.collected():
            federation = federations.of(plain)
    elif not cannot_read:
        # Otherwise not again: it may have tried to download them.
        with refusals.collected():
            federation = federations.of(experiment)
    net = experiment.net
    if isinstance(net, str) and not is_file_spec(net):
        with refusals.collected():
            nets.describe(net.partition(":")[0])
    if federation is not None and experiment.cohort is not None:
        clients = len(federation.clients)
        with refusals.collected():
            check(
                1 <= experiment.cohort <= clients,
                "cohort",
                experiment.cohort,
                f"between 1 and the number of clients, {clients}",
            )


def _look_at_dealing(experiment: Experiment, refusals: Refusals) -> bool:
    """Look at the words that say how data are dealt out; whether all are right."""
    data = experiment.data
    if isinstance(data, Federation):
        return True
    wrong = Refusals()
    # Of several sets, each may have its own of these words.
    if "+" not in data:
        for word in ("partition", "scenario", "split"):
            with wrong.collected():
                Choices(**{word: getattr(experiment, word)})
    with wrong.collected():
        read_devices(experiment.profile, experiment.trace)
    with refusals.collected():
        wrong.check()
    return not wrong.sentences
