"""From options, and perhaps a file, to an experiment; everything that is wrong is found at once.

The library refuses at the first thing that it cannot use. Here the rest is checked as well, each
option by itself, so that a person corrects a command once and not five times. These extra checks
run only where something was refused already.

A file that is written by hand is short: options under [run], and settings as ``--set`` takes them::

    [run]
    method = "fedprox"
    data = "motion"
    rounds = 10

    [set]
    mu = 0.1
    lr = 0.01

A run folder's config.toml has everything, and its run is repeated to the bit on the same machine.
Relative paths in either are taken from the current folder.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from .. import engines, methods, nets
from ..core import AnyMethod
from ..data import Federation
from ..data.build import Choices
from ..data.devices import read_devices
from ..errors import InputError, Refusals, check, clean_text, unknown
from ..nets.user_files import is_file_spec
from ..options import OneRunOptions
from ..options.groups import EngineOptions, Settings
from ..parts.local import SGD, Adam, LocalTraining
from ..runs.folder import RunFolder
from .experiment import (
    SHORTHANDS,
    Experiment,
    Federations,
    load_own_data,
    shorthand_settings,
    with_settings,
)
from .toml import CONFIG_FORMAT, check_files, check_trust, made_in_python, method_of, read_options

TABLES = ("run", "method", "set", "data", "code", "files")


def make_experiment(
    options: OneRunOptions,
    federations: Federations,
    config: str | Path | None = None,
    trust: bool = False,
    engine: EngineOptions | None = None,
) -> Experiment:
    """Make the experiment that options describe, as config.toml has it.

    Args:
        options: What was given.
        federations: Where data are read.
        config: A file or a run folder; options that were given replace what it has.
        trust: Whether code that the file names may be run.
        engine: Checked too, where something else is wrong.

    Raises:
        InputError: Everything that is wrong, a sentence for each.
    """
    refusals = Refusals(options.mistakes)
    values = options.values_of(Experiment)
    method = options.method
    settings: list[Settings] = []
    if config is not None:
        file = read_config(config, options.given, refusals, trust)
        values = {**file.options, **options.given_of(Experiment)}
        settings.append(file.settings)
        if "method" not in options.given:
            # A method that could not be made was refused; any will do to check the rest.
            method = file.method or methods.FedAvg()
    settings += [options.set, shorthand_settings(vars(options))]
    return assemble(method, load_own_data(values), settings, federations, refusals, engine)


def assemble(
    method: AnyMethod | str,
    values: Mapping[str, Any],
    settings: Sequence[Settings],
    federations: Federations,
    refusals: Refusals,
    engine: EngineOptions | None = None,
) -> Experiment:
    """Make an experiment of a method, options and settings; all errors are reported at once.

    ``refusals`` holds what was wrong before.
    """
    chosen: AnyMethod | None = None
    with refusals.collected():
        chosen = methods.make(method)
    # Any method will do to check the options.
    any_method = chosen or methods.FedAvg()
    try:
        experiment = Experiment(any_method, **values)
    except InputError as error:
        refusals.add(error)
        experiment = Experiment(any_method, **_keep_right(values))
    given = [each for each in settings if each]
    if given and chosen is not None:
        experiment = _apply_settings(experiment, given, federations, refusals)
    if refusals.sentences:
        with refusals.collected():
            _check_engine(engine)
        look_further(experiment, federations, refusals)
    refusals.check()
    return experiment


def _check_engine(options: EngineOptions | None) -> None:
    """Refuse an engine that cannot be had; one that was made in Python is taken as it is."""
    if options is not None and isinstance(options.engine, str):
        engines.choose(options.engine, options.device, options.precision, options.timeout).close()


def _keep_right(values: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are right by themselves."""
    right = {}
    for name, value in values.items():
        try:
            Experiment(methods.FedAvg(), **{name: value})
        except InputError:
            continue
        right[name] = value
    return right


# ---- settings ------------------------------------------------------------------------------------


def _apply_settings(
    experiment: Experiment,
    settings: Sequence[Settings],
    federations: Federations,
    refusals: Refusals,
) -> Experiment:
    recipe = None
    with refusals.collected():
        recipe = federations.recipe(experiment)
    if recipe is not None:
        changed, wrong = _try_settings(experiment, settings, recipe)
    else:
        # Without the data their recipe is unknown: a setting is refused
        # if it is wrong with either optimiser.
        changed, wrong = _try_settings(experiment, settings, LocalTraining(optimiser=Adam()))
        _, wrong_too = _try_settings(experiment, settings, LocalTraining(optimiser=SGD()))
        certain = {_refused_part(sentence) for sentence in wrong_too}
        wrong = [sentence for sentence in wrong if _refused_part(sentence) in certain]
    for sentence in wrong:
        refusals.add(sentence)
    return changed


def _try_settings(
    experiment: Experiment, settings: Sequence[Settings], recipe: LocalTraining
) -> tuple[Experiment, list[str]]:
    """The experiment with those settings that are right, and what is wrong with the others."""
    wrong = Refusals()
    for each in settings:
        with wrong.collected():
            method = with_settings(experiment.method, each, recipe)
            experiment = replace(experiment, method=method)
    return experiment, wrong.sentences


def _refused_part(sentence: str) -> str:
    """What a sentence refuses, without what is allowed instead, which depends on the rest."""
    return sentence.partition(";")[0].partition(". There are")[0]


# ---- data, net and cohort ------------------------------------------------------------------------


def look_further(
    experiment: Experiment,
    federations: Federations,
    refusals: Refusals,
    cannot_read: bool = False,
) -> None:
    """Check an experiment's data, partition, net and cohort, each by itself.

    With ``cannot_read``, reading the data has failed already, and ``refusals`` says why.
    """
    federation: Federation | None = None
    wrong = _check_division(experiment)
    for sentence in wrong.sentences:
        refusals.add(sentence)
    if wrong.sentences:
        # Such options are refused before the name of the data is looked at.
        experiment = replace(
            experiment, partition=None, scenario=None, split=None, profile=None, trace=None
        )
        cannot_read = False
    # Not again where it failed: it may have tried to download them.
    if not cannot_read:
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


def _check_division(experiment: Experiment) -> Refusals:
    """What is wrong with the options that say how data are divided."""
    data = experiment.data
    wrong = Refusals()
    if isinstance(data, Federation):
        return wrong
    # Of several sets, each may have its own value of these options.
    if "+" not in data:
        for name in ("partition", "scenario", "split"):
            with wrong.collected():
                Choices(**{name: getattr(experiment, name)})
    with wrong.collected():
        read_devices(experiment.profile, experiment.trace)
    return wrong


# ---- files ---------------------------------------------------------------------------------------


LONGEST_CONFIG = 1 << 24
"""The most bytes that a file of options may have."""


class ConfigFile(NamedTuple):
    """What a file has."""

    method: AnyMethod | None
    """None where another takes its place."""
    options: dict[str, Any]
    settings: dict[str, Any]


def read_config(
    path: str | Path, replaced: Mapping[str, Any], refusals: Refusals, trust: bool = False
) -> ConfigFile:
    """Read config.toml from a file or a run folder, without the options in ``replaced``.

    What is wrong is added to ``refusals``, but for a file that cannot be read at all.
    """
    place = Path(path)
    text = _read_text(place, "config" in replaced)
    document = _parse(text, place)
    for table in document:
        if table not in ("format", *TABLES):
            refusals.add(unknown(f"table of {place}", table, TABLES))
    run = _table(document, "run", place)
    kept = {name: value for name, value in run.items() if name not in replaced}
    settings = _flatten(_table(document, "set", place))
    for name, setting in SHORTHANDS.items():
        if name in kept:
            settings[setting] = kept.pop(name)
    for name in made_in_python(text):
        if name not in replaced:
            kept.pop(name, None)
            refusals.add(
                f"the {name} of {place} was made in Python, which a file cannot contain; run the "
                "same script again, or give a different one together with the file."
            )
    options = read_options(kept, refusals)
    method = None
    file = place / "config.toml" if place.is_dir() else place
    with refusals.collected():
        check_trust(text, file.parent, trust, tuple(replaced), file.name)
        if "method" not in replaced and "method" not in made_in_python(text):
            method = method_of(text)
    with refusals.collected():
        check_files(text, tuple(replaced))
    return ConfigFile(method, options, settings)


def _read_text(place: Path, is_option: bool) -> str:
    """The text of a file or of a run folder's config.toml.

    With ``is_option`` it was given as ``--config``, and not by position.
    """
    if place.is_dir():
        return RunFolder.open(place).config
    try:
        with place.open("rb") as file:
            # Not all at once: a device may have no end.
            data = file.read(LONGEST_CONFIG + 1)
        if len(data) > LONGEST_CONFIG:
            raise InputError(
                f"{place} is longer than {LONGEST_CONFIG} bytes; give a file of options."
            )
        return data.decode("utf-8")
    except FileNotFoundError:
        what = f"there is no file or folder {place}"
        if is_option:
            what = f"config is {place}, and there is no such file or folder"
        raise InputError(f"{what}; give a file such as run.toml, or a run folder.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{place} cannot be read: {error}.") from None


def _parse(text: str, place: Path) -> dict[str, Any]:
    """Parse the TOML of a configuration, and check its format."""
    try:
        document = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InputError(
            f"{place} is not TOML: {error}. Options are written as: rounds = 10, and text in "
            'quotes: data = "digits".'
        ) from None
    # A file that was written by hand need not name a format; a run folder's always does.
    given = document.get("format", CONFIG_FORMAT)
    if given != CONFIG_FORMAT:
        raise InputError(
            f"{place} is of format {clean_text(str(given))}, and this version of fedgrove reads "
            f"format {CONFIG_FORMAT}, in which some names and defaults changed; write the "
            "options that you need into a new file, without a format."
        )
    return document


def _table(document: Mapping[str, Any], name: str, place: Path) -> dict[str, Any]:
    """Return a table of a configuration; refuse anything else under its name."""
    table = document.get(name, {})
    if not isinstance(table, dict):
        raise InputError(f"{name} of {place} is {table!r}; it must be a table: write [{name}].")
    return table


def _flatten(table: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Settings by their dotted paths: TOML reads ``local.epochs = 2`` as a table in a table."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            flat.update(_flatten(value, f"{path}{key}."))
        else:
            flat[f"{path}{key}"] = value
    return flat
