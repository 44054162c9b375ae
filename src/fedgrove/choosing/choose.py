"""Trials: every method that fits on one seed, the promising ones on all, then a choice.

::

    choice.json       the request; at the end also the result
    report.html       the methods that were tried on all seeds, by validation scores
    first/            all methods on the first seed, a sweep (:mod:`fedgrove.config.sweep`)
    second/           those that went on, on the other seeds
    full/             with ``hindsight``, every method on every seed in full

All trials are equally long: half of the full run's rounds. A fifth of the rounds predicts poorly
which method is best in the end (docs/evidence/choosing.md). Methods that are far behind on the
first seed are not tried on the others.

The same call on such a folder goes on where it was interrupted.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

from torch import nn

from .. import methods
from ..api import open_engine
from ..config import sweep as sweeps
from ..config.experiment import Experiment, Federations, load_own_data, shorthand_settings
from ..config.grid import list_seeds, plain
from ..config.plan import plan
from ..core import Engine
from ..data import ClientData, Federation
from ..errors import DamageError, EngineError, InputError, check, spell_hint, spell_option
from ..export.formats import ExportRequest
from ..export.size import measure_dense_file, measure_largest_file
from ..export.source import opened
from ..nets import Net
from ..options import ChooseOptions, ExperimentOptions
from ..options.definition import takes
from ..options.groups import DataDirOption, EngineOptions, TrainingOptions
from ..problems import MixedProblem
from ..runs.files import RUNS, cannot_write, fresh_name, parse_json, read_bytes, write_bytes
from ..runs.result import Failure, Result
from ..runs.run import Run
from ..runs.schemas import ChoiceContent, check_content
from ..trees import digest
from . import choice_report
from .candidates import Chosen, count, fitting, parse_budget, size
from .decision import Trial, assess_choice, make_trial, rank_trials, select_promising

CHOICE_FILE = "choice.json"
SHARE = 0.5
"""Of the full run's rounds, in a trial."""
LAZY_CLIENTS_READ = 100
"""Clients of a lazy federation that its fingerprint reads: there may be a million."""
LEAST_ROUNDS = 2
"""A trial scores clients in the middle and at the end."""


@dataclass(frozen=True)
class Choice:
    """A recommendation: ``pick``, ``command``, ``rows`` and ``left_out``; ``table()`` prints it."""

    found: Mapping[str, Any]
    """What choice.json holds."""
    path: Path | None
    trials: Sequence[Trial] = field(default=(), repr=False)
    """Those that were tried on all seeds first, the best before the others."""

    @property
    def pick(self) -> str:
        """The method that was chosen."""
        return str(self.found["pick"])

    @property
    def command(self) -> str:
        """The command that runs the chosen method in full."""
        return str(self.found["command"])

    @property
    def rows(self) -> list[dict[str, Any]]:
        """A dictionary for each candidate method that was tried."""
        return list(self.found["rows"])

    @property
    def left_out(self) -> dict[str, str]:
        """Why each other method was not tried in the choice."""
        return dict(self.found["left_out"])

    def table(self) -> None:
        """Print the candidates, the choice and why, and the command."""
        choice_report.print_choice(self.found, self.path)


@dataclass(frozen=True)
class ChoicePlan:
    """A request with all its defaults filled in."""

    base: Experiment
    run_options: Mapping[str, Any]
    """The options of ``fedgrove run`` that were given."""
    settings: Sequence[str]
    budget: float | None
    budget_text: str | None
    seeds: tuple[int, ...]
    rounds: int
    trial: int
    """Rounds of a trial."""
    chosen: Sequence[Chosen]
    left_out: Mapping[str, str]
    full_data: Any
    """The data of full runs, from which nothing is held out unless it is a user's federation."""
    federations: Federations
    net: Net
    clients: int
    file: ExportRequest | None = None
    """How models would be exported, with the most that a file may take; None: any size."""
    is_file_checked: bool = False
    """Whether the file of a trained model has to be measured: that of the whole net is too large,
    and what a method removes shows in its trial."""
    running: Mapping[str, Any] = field(default_factory=dict)
    """The options given that do not change the outcome, such as ``engine``."""

    def trials(self, names: Sequence[str], seeds: Sequence[int]) -> dict[str, Experiment]:
        """Plan the trials of a choice: a short run for each method and seed."""
        half = math.ceil(self.trial / 2)
        # Scored in the middle too: `predict_full_score` needs two points.
        base = replace(self.base, rounds=self.trial, evaluate=half)
        return self._each(names, seeds, self.trial, base)

    def in_full(self) -> dict[str, Experiment]:
        """Plan the candidates in full, as the command that is printed would run them."""
        base = replace(
            self.base,
            data=self.full_data,
            rounds=self.rounds,
            evaluate=0,
            # Only trials hold data out.
            validation=0.0,
        )
        if isinstance(self.full_data, Federation):
            base = replace(base, validation=self.full_data.validation)
        names = [fit.method for fit in self.chosen]
        return self._each(names, self.seeds, self.rounds, base)

    def _each(
        self, names: Sequence[str], seeds: Sequence[int], rounds: int, base: Experiment
    ) -> dict[str, Experiment]:
        """Return an experiment for each candidate method and seed."""
        recipe = self.federations.recipe(self.base)
        experiments = {}
        for fit in self.chosen:
            if fit.method not in names:
                continue
            # A shorter run gets its share of the budget, so that it sends as much a
            # round as the full run.
            method = fit.made(self.settings, recipe, self.budget, rounds / self.rounds)
            for seed in seeds:
                name = f"{methods.label_of(fit.method)}-s{seed}"
                experiments[name] = replace(base, method=method, seed=seed)
        return experiments


@takes(ChooseOptions)
def choose(options: ChooseOptions) -> Choice:
    """Try the methods that fit for a few rounds, and recommend one by validation data.

    Methods that cannot keep to the budget, or give every device the whole net where some cannot
    hold it, are not tried. Arguments that are not explained here are those of :func:`fedgrove.run`.
    """
    return choose_method(options)


def choose_method(options: ChooseOptions) -> Choice:
    """Do what :func:`choose` does."""
    planned = plan_choice(options)
    if options.dry_run:
        return Choice(choice_report.describe_plan(planned), None)
    folder = _folder(planned, options.out)
    with open_engine(options) as engine:
        _begin(folder, planned)
        with _advise_on_interrupt(folder):
            return _find(planned, folder, engine, options.progress, options.hindsight)


# ---- the plan ------------------------------------------------------------------------------------


def plan_choice(options: ChooseOptions) -> ChoicePlan:
    """Check the request and plan the trials; nothing is written."""
    options.check()
    settings = shorthand_settings(vars(options))
    wanted = parse_budget(options.budget)
    names = [options.methods] if isinstance(options.methods, str) else options.methods
    check(names is None or bool(names), "methods", names, "one name or more, or left out")
    if names is not None:
        are_names = all(isinstance(name, str) for name in names)
        check(are_names, "methods", names, 'a list of names, as in ["fedavg", "ditto"]')
        labels = set(map(methods.label_of, names))
        check(len(labels) == len(names), "methods", ",".join(names), "each of them once")
    seeds = list_seeds(options.seeds)
    check(len(set(seeds)) == len(seeds), "seeds", options.seeds, "each of them once")
    check(options.score_on != 0, "score_on", 0, "1 or more: clients are compared")
    values = options.values_of(ExperimentOptions)
    # A federation is divided already, and has its own share.
    if isinstance(options.data, Federation) and "validation" not in options.given:
        del values["validation"]
    base = Experiment(method=methods.make("local"), **load_own_data(values))
    federations = Federations(options.data_dir)
    rounds = federations.defaults(base).rounds if options.rounds is None else options.rounds
    base = replace(base, rounds=rounds)
    base_plan = plan(base, Path(), federations)
    _check_can_be_judged(base_plan.run, isinstance(options.data, Federation))
    file = None if options.size is None else ExportRequest(size=options.size)
    too_large = _why_file_too_large(base_plan.run, base, file)
    chosen, left_out = fitting(base, names, settings, wanted, federations, too_large)
    if not chosen:
        reasons = " ".join(f"{name}: {why}" for name, why in left_out.items())
        raise InputError(
            f"none of the methods fits. {reasons} Give more budget, a larger size, fewer rounds, a "
            "smaller net or other methods."
        )
    run_options = {"data": options.data, "finetune": options.finetune}
    run_options |= options.given_of(ExperimentOptions, TrainingOptions)
    # The rounds of the full run are a field of the plan: they may be the data set's default.
    run_options.pop("rounds", None)
    return ChoicePlan(
        base=base,
        run_options=run_options,
        settings=settings,
        budget=wanted,
        budget_text=options.budget,
        seeds=tuple(seeds),
        rounds=rounds,
        trial=_choose_trial_rounds(options.trial, rounds),
        chosen=chosen,
        left_out=left_out,
        full_data=load_own_data({**values, "validation": 0.0})["data"],
        federations=federations,
        net=base_plan.run.net,
        clients=len(base_plan.run.infos),
        file=file,
        is_file_checked=bool(too_large),
        running=options.given_of(EngineOptions, DataDirOption),
    )


def _why_file_too_large(run: Run, base: Experiment, file: ExportRequest | None) -> str:
    """Return why a method whose models keep their width is not tried; "" if it may be."""
    if file is None or file.most_bytes is None:
        return ""
    dense = measure_dense_file(run.net, run.federation, base, run.scored[0], file)
    if dense.bytes <= file.most_bytes:
        return ""
    return (
        f"the exported file of the whole net takes {dense}; the size is {file.size}, and it "
        "removes no channels."
    )


def _choose_trial_rounds(trial: int | None, rounds: int) -> int:
    """The rounds of a trial."""
    if trial is None:
        return min(rounds, max(LEAST_ROUNDS, math.ceil(SHARE * rounds)))
    check(1 <= trial <= rounds, "trial", trial, f"from 1 to {rounds} rounds")
    return trial


def _check_can_be_judged(run: Any, is_divided: bool) -> None:
    """Refuse data on which methods cannot be compared.

    Args:
        run: A run on the data.
        is_divided: Whether a federation was given, whose clients are divided already.
    """
    federation = run.federation
    if len(run.infos) < 2:
        raise InputError("there is only one client; train it alone: fedgrove run local.")
    problem = federation.problem
    if isinstance(problem, MixedProblem):
        metrics = sorted({task.problem.metric.name for task in problem.tasks})
        if len(metrics) > 1:
            raise InputError(
                f"the tasks are measured by {' and '.join(metrics)}, which have no mean that "
                "methods could be ranked by; choose for each task separately."
            )
    has_validation = any(len(federation.clients[k].validation.y) for k in run.scored)
    if not has_validation:
        remedy = f"give {spell_option('validation', '0.2')}"
        if is_divided:
            remedy = "load the federation with validation=0.2"
        raise InputError(
            f"no client has validation examples, and the choice is made on these; {remedy}, or "
            "clients with more examples."
        )


# ---- the folder ----------------------------------------------------------------------------------


def _describe_request(planned: ChoicePlan) -> dict[str, Any]:
    """What decides the outcome, as choice.json keeps it."""
    request = {name: plain(value) for name, value in planned.run_options.items()}
    prints = {}
    if isinstance(planned.base.data, Federation):
        prints["data"] = fingerprint_data(planned.base.data)
    if isinstance(planned.base.net, nn.Module):
        prints["net"] = fingerprint_net(planned.base.net)
    # Only for what was made in Python: a name identifies its data set or net.
    if prints:
        request["fingerprints"] = prints
    return {
        **request,
        "budget": planned.budget_text,
        "methods": [fit.method for fit in planned.chosen],
        "rounds": planned.rounds,
        "trial": planned.trial,
        "seeds": list(planned.seeds),
        # Folders of before have no such entry.
        **({} if planned.file is None else {"size": planned.file.size}),
    }


def fingerprint_data(federation: Federation) -> str:
    """Return a fingerprint of the data of a choice: equal examples and devices share it."""
    summed = blake2b(digest_size=16)
    # NUL ends each field, so that two different pairs of fields never join to the same bytes.
    summed.update(f"{len(federation.clients)}\0{federation.labels}\0".encode())
    if federation.is_lazy:
        for k in islice(federation.ids, LAZY_CLIENTS_READ):
            summed.update(_fingerprint_client(federation.client(k)))
    else:
        for data in federation.all_data():
            summed.update(_fingerprint_client(data))
    return summed.hexdigest()


def _fingerprint_client(data: ClientData) -> bytes:
    tensors: dict[str, Any] = {}
    for name in ("train", "validation", "test"):
        examples = getattr(data, name)
        tensors |= {f"{name}.x": examples.x, f"{name}.y": examples.y}
    # The device is part of it: methods fit models to devices.
    return digest(tensors) + repr(data.info).encode()


def fingerprint_net(net: nn.Module) -> str:
    """Return a fingerprint of the net of a choice: equal layers and parameters share it."""
    # The layers too: an activation has no parameters, and would be missed.
    return blake2b(repr(net).encode() + digest(net.state_dict()), digest_size=16).hexdigest()


def _folder(planned: ChoicePlan, out: str | Path | None) -> Path:
    """The folder, if it is free or holds the same choice."""
    if out is None:
        return fresh_name(RUNS, f"choose-{planned.base.data_name}")
    folder = Path(out)
    if not folder.exists():
        return folder
    if not folder.is_dir() or not (folder / CHOICE_FILE).is_file():
        # An empty folder is as good as none.
        if folder.is_dir() and not any(folder.iterdir()):
            return folder
        raise InputError(
            f"{folder} contains other files, and nothing is overwritten; give a different folder."
        )
    try:
        asked = _read_choice(folder)["asked"]
    except DamageError:
        raise InputError(
            f"{folder / CHOICE_FILE} cannot be read; give a different folder."
        ) from None
    wanted = _describe_request(planned)
    if _without_fingerprints(asked) == _without_fingerprints(wanted) and asked != wanted:
        raise InputError(
            f"{folder} contains a choice for a different data set or net that was made in Python, "
            "and nothing is overwritten; give a different out, or the same data and net to "
            "continue."
        )
    if asked != wanted:
        raise InputError(
            f"{folder} contains a different choice, and nothing is overwritten; give a different "
            f"{spell_option('out')}, or the same options as before to continue."
        )
    return folder


def _read_choice(folder: Path) -> dict[str, Any]:
    """Return the content of choice.json, after checking it."""
    place = folder / CHOICE_FILE
    content: dict[str, Any] = parse_json(read_bytes(place), place)
    return check_content(content, ChoiceContent, place)


def _without_fingerprints(asked: Mapping[str, Any]) -> dict[str, Any]:
    return {word: value for word, value in asked.items() if word != "fingerprints"}


def _begin(folder: Path, planned: ChoicePlan) -> None:
    """Start the choice.json of an unfinished choice, unless the folder has one."""
    if not (folder / CHOICE_FILE).is_file():
        _write(folder, {"asked": _describe_request(planned), "state": "unfinished"})


def _write(folder: Path, content: Mapping[str, Any]) -> None:
    """Write choice.json."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Synced, since it decides whether a later call continues this folder or is
        # refused.
        write_bytes(folder / CHOICE_FILE, json.dumps(content, indent=1).encode(), sync=True)
    except OSError as error:
        raise cannot_write(folder, error) from None


@contextmanager
def _advise_on_interrupt(folder: Path) -> Iterator[None]:
    """Make an interruption say how to continue the choice, not one of its sweeps."""
    again = spell_hint(
        f"repeat the command with --out {folder}", f"call it again with out={str(folder)!r}"
    )
    how = f"Finished training is kept; to continue, {again}."
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"Interrupted. {how}") from None
    except EngineError as error:
        raise EngineError(f"{error} {how}") from error


# ---- trials --------------------------------------------------------------------------------------


def _find(
    planned: ChoicePlan, folder: Path, engine: Engine, progress: bool, with_hindsight: bool
) -> Choice:
    """Run both trials and choose; if requested, train all methods in full."""
    names = [fit.method for fit in planned.chosen]
    left_out = dict(planned.left_out)
    # All methods on one seed only: most are clearly behind after it.
    first, *others = planned.seeds
    ends = _train(planned.trials(names, [first]), folder / "first", planned, engine, progress)
    early = _judge(planned, names, [first], ends, left_out)
    going_on = names
    if others:
        going_on = select_promising(list(early.values()), planned.rounds)
        runs = planned.trials(going_on, others)
        if runs:
            ends |= _train(runs, folder / "second", planned, engine, progress)
    still = [name for name in going_on if name in early]
    later = _judge(planned, still, planned.seeds, ends, left_out)
    if not later:
        # All that went on failed, or took too much: what one seed says of the rest.
        later = {name: each for name, each in early.items() if name not in left_out}
    if not later:
        reasons = " ".join(f"{name}: {why}" for name, why in left_out.items())
        raise EngineError(f"no method could be judged. {reasons}")
    behind = [each for name, each in early.items() if name not in {*later, *left_out}]
    # Ranked apart: scores of one seed and of all seeds are not compared.
    trials = [*rank_trials(list(later.values())), *rank_trials(behind)]
    finished = [end for end in ends.values() if isinstance(end, Result)]
    cost = {
        "rounds": planned.trial * len(ends),
        "rounds_in_full": planned.rounds * len(names) * len(planned.seeds),
        "seconds": round(sum(end.summary["seconds"] for end in finished), 1),
    }
    found = choice_report.describe_choice(planned, trials, len(later), left_out, cost)
    page = choice_report.write_page(ends, trials[: len(later)], found, folder)
    found = {"asked": _describe_request(planned), "state": "done", "page": page, **found}
    before = _read_hindsight(folder, found)
    if before is not None:
        # Full runs take long: their result stays until they are run again.
        found["hindsight"] = before
    _write(folder, found)
    if with_hindsight:
        # Written before the full runs, so that the choice is there while they train, or
        # if they fail.
        whole = _train(planned.in_full(), folder / "full", planned, engine, progress)
        found["hindsight"] = assess_choice(
            whole, found, planned.budget, planned.clients, trials[0].more_is_better
        )
        _write(folder, found)
    return Choice(found, folder, trials)


def _read_hindsight(folder: Path, found: Mapping[str, Any]) -> dict[str, Any] | None:
    """What an earlier call with the same choice found in full runs."""
    try:
        before = _read_choice(folder)
    except DamageError:
        return None
    if any(before.get(word) != found[word] for word in ("asked", "pick", "epochs")):
        return None
    kept: dict[str, Any] | None = before.get("hindsight")
    return kept


def _train(
    experiments: Mapping[str, Experiment],
    folder: Path,
    planned: ChoicePlan,
    engine: Engine,
    progress: bool,
) -> dict[str, Result | Failure]:
    """Train these as a sweep; how each run ended."""
    # All trials are equally long.
    rounds = next(iter(experiments.values())).rounds or 0
    if progress:
        what = "in full" if folder.name == "full" else f"{folder.name} trial"
        runs = count(len(experiments), "run")
        print(f"{what}: {runs} of {count(rounds, 'round')}", file=sys.stderr)
    run = partial(sweeps.sweep, experiments, folder, engine=engine, federations=planned.federations)
    return sweeps.watched(folder, experiments, rounds * len(experiments), run, not progress)


def _judge(
    planned: ChoicePlan,
    names: Sequence[str],
    seeds: Sequence[int],
    ends: Mapping[str, Result | Failure],
    left_out: dict[str, str],
) -> dict[str, Trial]:
    """What trials showed of each method; those that failed or take too much are left out."""
    trials = {}
    for name in names:
        runs = [ends[f"{methods.label_of(name)}-s{seed}"] for seed in seeds]
        results = [end for end in runs if isinstance(end, Result)]
        failed = [end for end in runs if isinstance(end, Failure)]
        # One failed seed is enough: a mean over fewer seeds could not be compared.
        if failed:
            left_out[name] = f"a run failed: {failed[0].why}"
            continue
        trial = make_trial(name, results, planned.trial, planned.rounds, planned.net)
        # Coded messages have no length that is known beforehand; only the trial shows it.
        if planned.budget is not None and trial.bytes_each > planned.budget:
            left_out[name] = (
                f"by its trial of {count(planned.trial, 'round')} a client would send and receive "
                f"{size(trial.bytes_each)} in {planned.rounds}; the budget is "
                f"{size(planned.budget)}."
            )
            continue
        why = _why_not_exported(results, planned)
        if why:
            left_out[name] = why
            continue
        trials[name] = trial
    return trials


def _why_not_exported(results: Sequence[Result], planned: ChoicePlan) -> str:
    """Return why the models of a method's trials cannot be files of the requested size, or ""."""
    if planned.file is None or planned.file.most_bytes is None or not planned.is_file_checked:
        return ""
    federation = planned.federations.of(planned.base)
    for result in results:
        try:
            source = opened(result.folder, federation, planned.net.module, trust=True)
            measured = measure_largest_file(source, planned.file)
        except InputError as error:
            return str(error)
        if measured.bytes > planned.file.most_bytes:
            return (
                f"by its trial, the largest exported file takes {measured}; the size is "
                f"{planned.file.size}."
            )
    return ""
