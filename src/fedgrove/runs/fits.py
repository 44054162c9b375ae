"""Whether a network fits a method: refusals that name both, and notes where they fit in part."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import methods
from ..channels.submodel import groups_from_plain
from ..core import WithNotes
from ..errors import FedgroveError, InputError, UnfitError
from ..nets import Net
from ..nets.custom import file_of

if TYPE_CHECKING:
    from .run import Run

PARTLY = 0.5
"""Below this share of parameters that channels reach, a note says what stays whole."""


def check_fit(run: Run) -> None:
    """Let the method make its first state; what it refuses is refused with both names."""
    method = methods.name_of(run.method)
    try:
        _ = run.initial_state
    except UnfitError as error:
        raise InputError(f"{method} cannot be used with net {name_of(run.net)}: {error}") from None
    except FedgroveError:
        raise
    except Exception as error:
        # A bug of ours shows its traceback; one in a user's file is the user's to find.
        file = file_of(type(run.method))
        if file is None:
            raise
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(frame.filename).name}, line {frame.lineno}"
        raise InputError(
            f"{method} could not make its first state, {type(error).__name__}: {error} (at "
            f"{place}); see init in {file.path}."
        ) from error


def name_of(net: Net) -> str:
    """What a person calls a network: its class."""
    return type(net.module).__name__


def notes(run: Run, state: Any, density: float | None) -> list[str]:
    """What a summary says of the fit; nothing for most. Without scores ``density`` is None."""
    layout = run.net.layout
    name = name_of(run.net)
    said = []
    if layout.frozen:
        said.append(
            f"{_listed(layout.frozen)} of {name} are frozen (requires_grad=False): they stay as "
            "they are and are not sent"
        )
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
        said.extend(run.method.notes(run.net))
    return said


def _partly_removable(run: Run, state: Any) -> list[str]:
    """A note where a method removes channels and most of the network has none to remove."""
    structure = getattr(state, "structure", None)
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
