"""Whether a network fits a method: refusals that name both, and notes where they fit in part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .. import methods
from ..channels.submodel import groups_from_plain
from ..core import Train, WithNotes, WithPrediction, WithTrainedStart, WithTuning
from ..errors import InputError, UnfitError
from ..nets import Net
from ..parts.objective import Objective, check_fits, check_whole
from .guard import calling
from .per_task import states_of

if TYPE_CHECKING:
    from .run import Run

PARTLY = 0.5
"""Below this share of parameters that channels reach, a note says what stays whole."""


def check_fit(run: Run) -> None:
    """Let the method make its first state; what it refuses is refused with both names."""
    try:
        with calling(run.method, "nets"):
            _ = run.nets
        _check_training(run)
        _check_finetune(run)
        with calling(run.method, "init"):
            _ = run.initial_state
    except UnfitError as error:
        method = methods.name_of(run.method)
        raise InputError(f"{method} cannot be used with net {name_of(run.net)}: {error}") from None


def _check_training(run: Run) -> None:
    """Refuse a loss of classes where there are none, and nets that are not there."""
    own = getattr(run.method, "objective", None)
    # What a method is made with by default is what it needs, as LogitCalibration is of FedLC.
    is_replaced = type(own) is not type(getattr(type(run.method), "objective", None))
    if isinstance(own, Objective) and is_replaced:
        check_whole(own)
    objectives = [own]
    try:
        stages = run.work("train")
    except Exception:
        # It has no such verb, or is at fault, which shows when a client is asked to train.
        stages = ()
    for stage in stages:
        if isinstance(stage, Train):
            run.net_named(stage.net)
            objectives.append(stage.objective)
    for objective in objectives:
        if isinstance(objective, Objective):
            check_fits(objective, run.net.problem)


def _check_finetune(run: Run) -> None:
    """Refuse to fine-tune a model that may have no part in what a client predicts."""
    says_what = isinstance(run.method, WithTuning)
    if isinstance(run.method, WithPrediction) and not says_what and max(run.finetune) > 0:
        raise InputError(
            f"finetune is {','.join(map(str, run.finetune))}; {methods.name_of(run.method)} "
            "predicts in its own way, and does not say what to fine-tune for that. Give 0, or the "
            'method the name of a tree of its carry: tuned = "model".'
        )


def name_of(net: Net) -> str:
    """What a person calls a network: its class."""
    return type(net.module).__name__


def notes(run: Run, state: Any, density: float | None) -> list[str]:
    """What a summary says of the fit; nothing for most. Without scores ``density`` is None."""
    layout = run.net.layout
    name = name_of(run.net)
    said = []
    if run.origin is not None:
        head = ", its head from scratch" if run.origin.body else ""
        said.append(
            f"{name} started from the weights in {run.origin.path}{head}; every device has them, "
            "and what it took to bring them there is not counted"
        )
    starts_trained = isinstance(run.method, WithTrainedStart) and run.method.starts_trained
    if run.origin is None and starts_trained:
        said.append(
            f"{methods.name_of(run.method)} started from scratch, its paper from trained weights: "
            "no init= was given"
        )
    if layout.frozen:
        why = f"freeze={run.frozen:g}" if run.frozen else "requires_grad=False"
        said.append(
            f"{_listed(layout.frozen)} of {name} are frozen ({why}): they stay as they are and are "
            "not sent"
        )
    if run.frozen and run.origin is None:
        said.append(f"the frozen layers of {name} are random: no init= was given")
    if layout.state:
        said.append(
            f"{_listed(layout.state)} of {name} change in its forward pass: every call begins with "
            "the values from before training, since one module serves all clients"
        )
    is_pruned = density is not None and density < 1
    if is_pruned and layout.never_pruned:
        said.append(
            f"{_listed(layout.never_pruned)} of {name} belong to no layer whose weights are "
            "pruned: they stay dense, and density does not count them"
        )
    said.extend(_partly_removable(run, state))
    if isinstance(run.method, WithNotes):
        with calling(run.method, "notes"):
            said.extend(run.method.notes(run.net))
    return said


def _partly_removable(run: Run, state: Any) -> list[str]:
    """A note where a method removes channels and most of the network has none to remove."""
    # The network is the same for all tasks, where they are kept apart.
    first = next(iter(states_of(state).values()))
    structure = getattr(first, "structure", None)
    if not structure:
        return []
    reached: set[str] = set()
    groups = groups_from_plain(structure)
    for group in groups:
        reached.update(place.tensor for place in group.places)
    layout = run.net.layout
    share = layout.count(reached & set(layout.params)) / layout.size
    if share >= PARTLY:
        return []
    makers = _listed(tuple(group.name for group in groups))
    return [
        f"channels can be removed from {makers} only: {1 - share:.0%} of the parameters of "
        f"{name_of(run.net)} are in no channel, and stay in every model"
    ]


def _listed(names: tuple[str, ...]) -> str:
    shown = ", ".join(names[:4])
    return f"{shown} and {len(names) - 4} more" if len(names) > 4 else shown
