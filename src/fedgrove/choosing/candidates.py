"""The methods to try: a short list, without those that the data, budget or devices rule out.

Each method is planned on the data, and its own refusal is the reason to leave it out. This module
checks only the bytes and the memory, and which methods would show nothing new.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from .. import methods
from ..config.experiment import Experiment, Federations, with_settings
from ..config.grid import has_setting
from ..config.plan import Plan, plan
from ..core import AnyMethod, count_paper_bytes
from ..errors import BudgetError, InputError
from ..methods.grove.byte_budget import parse_size
from ..parts.local import LocalTraining
from ..problems import MixedProblem
from ..report.tables import format_bytes
from ..wire.codec import Dense

NORMS = "norm layers"
SMALL_DEVICES = "small devices"
TASKS = "several tasks"
MADE_FOR = {
    NORMS: "nets with norm layers",
    SMALL_DEVICES: "devices too small or slow for the whole net",
    TASKS: "several tasks",
}
"""What a method is made for, in the sentence that says why it is left out."""
RESERVE = 0.9
"""The part of a budget that is given to a method that spends one: runs land within a tenth."""
SHORTEST_CODE = 0.5
"""No lossless code takes less than this part of what a paper counts for numbers as they are."""


@dataclass(frozen=True)
class Candidate:
    """A method that may be tried."""

    method: str
    about: str
    made_for: tuple[str, ...] = ()
    """It is tried only where one of these is there; empty: always."""
    fitting: str | None = None
    """The setting with which small devices train smaller models, "" if they do anyway; None: all
    train the whole net."""
    keeps_width: bool = False
    """Whether its models never lose a channel, so that their files are of one size."""


CANDIDATES = (
    Candidate("local", "every client alone: the baseline to beat", keeps_width=True),
    Candidate("fedavg", "one model for all", keeps_width=True),
    Candidate("ditto", "a personal model in addition to one for all", keeps_width=True),
    Candidate("fedchar", "a personal model in addition to its group's", keeps_width=True),
    Candidate("fedbn", "one model, norm layers kept on the client", (NORMS,), keeps_width=True),
    Candidate("stc", "one model, sparse messages in both directions", keeps_width=True),
    Candidate("ca-afp", "a sparse model for each group", keeps_width=True),
    Candidate("adfedwcp", "personal models, sent as few values per layer", keeps_width=True),
    Candidate("fedlayerprune", "one sparse model for all"),
    Candidate("heterofl", "narrower models for smaller devices", (SMALL_DEVICES,), ""),
    Candidate("fedapta", "tasks are found, narrower models", (SMALL_DEVICES, TASKS), ""),
    Candidate("grove", "personal models, coded messages, groups if there are any", (), ""),
)
"""One or two for each situation of docs/choosing.md; ``--methods`` names others."""


@dataclass(frozen=True)
class Chosen:
    """A method that is tried, with the settings it has in the full run."""

    method: str
    settings: tuple[str, ...] = ()
    spends_budget: bool = False

    def made(
        self, common: Sequence[str], recipe: LocalTraining, budget: float | None, share: float = 1
    ) -> AnyMethod:
        """Return a candidate method for ``share`` of the full run's rounds, within the budget."""
        texts = [*common, *self.settings]
        if self.spends_budget:
            assert budget is not None
            # In whole bytes, without an exponent, as sizes are parsed.
            texts.append(f"budget={RESERVE * budget * share:.0f}B")
        return with_settings(methods.make(self.method), texts, recipe)


@dataclass(frozen=True)
class Situation:
    """What is known before anything is trained."""

    clients: int
    small: int
    """Devices with less memory than a training step of the whole net takes."""
    memory: int
    """What it takes."""
    there: frozenset[str] = field(default_factory=frozenset)

    @classmethod
    def of(cls, planned: Plan, recipe: LocalTraining) -> Situation:
        """Return what ``fedgrove choose`` knows before it tries methods, of a planned run."""
        run = planned.run
        layout = run.net.layout
        # Of a plain training step; what a method keeps besides is not counted.
        memory = layout.memory(recipe.batch, recipe.optimiser.slots)
        # Of very many clients those that are scored are looked at.
        devices = [run.federation.info(client) for client in run.scored]
        small = sum(device.memory < memory for device in devices)
        there = set()
        if layout.norms:
            there.add(NORMS)
        # A slow device has a smaller model too, where a method fits models to devices.
        if small or any(device.speed < 1 for device in devices):
            there.add(SMALL_DEVICES)
        if isinstance(run.federation.problem, MixedProblem):
            there.add(TASKS)
        return cls(len(devices), small, memory, frozenset(there))


def fitting(
    base: Experiment,
    names: Sequence[str] | None,
    common: Sequence[str],
    budget: float | None,
    federations: Federations,
    too_large: str = "",
) -> tuple[list[Chosen], dict[str, str]]:
    """Return the candidate methods to try, and why each other one is left out.

    ``names`` replace the list in this module; ``common`` are settings of all methods;
    ``too_large`` says that the file of the whole net is larger than it may be. An error that every
    method would have is raised.
    """
    recipe = federations.recipe(base)
    known = {candidate.method: candidate for candidate in CANDIDATES}
    asked = [known.get(name, Candidate(name, "")) for name in names or known]
    for candidate in asked:
        # An unknown name is a mistake, and not a method that does not fit.
        methods.make(candidate.method)
    # Local training fits all data: an error here is one that every method would have.
    alone = with_settings(methods.make("local"), common, recipe)
    planned = plan(replace(base, method=alone), Path(), federations)
    situation = Situation.of(planned, alone.local or recipe)
    chosen = []
    left_out = {}
    for candidate in asked:
        # A method that was named is tried even if it is made for something else.
        why = _why_useless(candidate, situation) if names is None else ""
        why = why or _why_too_large(candidate, situation)
        if candidate.keeps_width:
            why = why or too_large
        if not why:
            fit = Chosen(candidate.method)
            if candidate.fitting and situation.small:
                fit = Chosen(candidate.method, (candidate.fitting,))
            try:
                # A refusal of one method is its reason to be left out; the others
                # are still tried.
                fit, why = _fit_budget(fit, base, common, recipe, budget, federations)
            except InputError as error:
                why = _add_where_settings_go(str(error), candidate.method)
        if why:
            left_out[candidate.method] = why
        else:
            chosen.append(fit)
    return chosen, left_out


def _add_where_settings_go(why: str, method: str) -> str:
    """A refusal may advise a setting of the method, and a choice takes none."""
    if "--set" not in why:
        return why
    return f"{why} A choice takes no settings: use that one in a run of {method} by itself."


def _why_useless(candidate: Candidate, situation: Situation) -> str:
    """Return why a trial of the method would show nothing new; "" if it would."""
    if not candidate.made_for or situation.there.intersection(candidate.made_for):
        return ""
    purposes = [MADE_FOR[each] for each in candidate.made_for]
    return f"it is made for {' or '.join(purposes)}, and there are none here."


def _why_too_large(candidate: Candidate, situation: Situation) -> str:
    if candidate.fitting is not None or not situation.small:
        return ""
    return (
        f"{situation.small} of {situation.clients} devices have less memory than the "
        f"{format_bytes(situation.memory)} that a training step of the whole net takes, and it "
        "gives every device the whole net."
    )


def _fit_budget(
    fit: Chosen,
    base: Experiment,
    common: Sequence[str],
    recipe: LocalTraining,
    budget: float | None,
    federations: Federations,
) -> tuple[Chosen, str]:
    """The method as it would be run, and why it cannot be within the budget; else "".

    A method that spends a budget is given it where its own defaults would take more. Of others
    whose messages are coded, a trial measures what they take, unless that is hopeless.
    """
    method = fit.made(common, recipe, budget)
    planned = plan(replace(base, method=method), Path(), federations)
    if budget is None:
        return fit, ""
    run = planned.run
    counted = count_paper_bytes(run.method, run.net, len(run.infos), run.cohort, run.rounds)
    # Without a count beforehand only a trial can show the bytes.
    if counted is None:
        return fit, ""
    each = counted / len(run.infos)
    if has_setting(method, "budget=1B", recipe) and each > RESERVE * budget:
        fit = replace(fit, spends_budget=True)
        # Refuses what is below its cheapest message.
        try:
            plan(replace(base, method=fit.made(common, recipe, budget)), Path(), federations)
        except BudgetError as error:
            return fit, _explain_budget(error.needed, budget, run.rounds)
        return fit, ""
    # Numbers that are sent as they are take exactly what was counted.
    least = each if isinstance(method.codec, Dense) else SHORTEST_CODE * each
    if least > budget:
        return fit, (
            f"a client would send and receive at least {size(least)} in "
            f"{count(run.rounds, 'round')}; the budget is {size(budget)}."
        )
    return fit, ""


def _explain_budget(needed: float, budget: float, rounds: int) -> str:
    """Say that the budget is too small for a method that spends it, and which budget suffices."""
    # Two steps up: a trial's share of it is rounded to bytes too.
    enough = 10 * (math.floor(needed / RESERVE / 10) + 2)
    return (
        f"it is given nine tenths of the budget of {size(budget)}, since runs land within a tenth "
        f"of it: {size(RESERVE * budget)}; its cheapest messages take {size(needed)} for each "
        f"client in {count(rounds, 'round')}. A budget of {enough / 1000:.2f}kB would be enough, "
        "or fewer rounds or a smaller cohort."
    )


def parse_budget(text: str | None) -> float | None:
    """Parse the budget of a choice: bytes for one client and the whole run, both ways."""
    return None if text is None else parse_size(text)


def size(n: float) -> str:
    """Format the bytes of a choice's budget; 1 MB is 1000 kB.

    >>> size(8e6), size(160_400), size(96)
    ('8 MB', '160 kB', '96 B')
    >>> size(999_900), size(12_345e9)
    ('999.9 kB', '12345 GB')
    """
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if n < unit:
            continue
        in_units = n / unit
        if in_units < 999.5:
            return f"{in_units:.3g} {name}"
        # Three digits would be 1e+03.
        return f"{in_units:.1f}".removesuffix(".0") + f" {name}"
    return f"{n:.0f} B"


def count(n: int, noun: str) -> str:
    """Format a number of candidates.

    >>> count(1, "seed"), count(1200, "round")
    ('1 seed', '1,200 rounds')
    """
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"
