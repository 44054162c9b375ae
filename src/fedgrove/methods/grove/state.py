"""What Grove's server remembers between rounds, and what it collects within one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...channels.groups import expand_channels
from ...channels.selection import select_best_in_steps
from ...channels.submodel import PlainGroups, get_shapes, groups_from_plain
from ...parts.aggregate import Average
from ...trees import Mask, Tree
from .client_views import ClientViews
from .head_evidence import Evidence

FADES = 0.9
"""What clients reported of models in earlier rounds counts this share less with each round."""


@dataclass(frozen=True)
class State:
    """The groups' models, the clients' views of them, and the evidence for groups."""

    round: int
    rounds: int
    up: float
    """The shares that are sent; given, or chosen to meet a budget."""
    down: float
    models: dict[int, Tree]
    """By group, without what stays with clients."""
    statistics: dict[int, Tree]
    """By group: running statistics, which are sent in full."""
    client_views: ClientViews
    """What each client knows of its group's model."""
    groups: dict[int, int]
    evidence: Evidence
    merits: dict[int, tuple[float, float]]
    """By group: by how much clients do better with an offset than with personal models, summed over
    examples of the rounds' folds, and how many those were. Older rounds count less."""
    structure: PlainGroups
    """Which channels are removed together, where any may go."""
    scores: dict[int, Tree]
    """By group: how good each channel is, where any may go."""
    narrow: dict[int, float]
    """The share of channels of each client whose device cannot hold all."""
    is_thin: bool = False
    """Whether groups have lost channels."""
    shared: float = 0.0
    """How much of what is lasting in a client's updates its group has too."""
    divided: int = -1
    """The round in which groups were found."""


@dataclass(frozen=True)
class ChannelMasks:
    """The masks of one state's groups, by share of channels; each is made once."""

    structure: PlainGroups
    scores: Mapping[int, Tree]
    """By group: how good each channel is."""
    models: Mapping[int, Tree]
    """By group, for their shapes, as are the statistics."""
    statistics: Mapping[int, Tree]
    most: float
    """The largest share of channels that any client has."""
    multiple: int
    known: dict[tuple[int, float], Mask] = field(default_factory=dict)

    def of(self, group: int, share: float = 1.0) -> Mask | None:
        """Grove: the mask of a group's model at a share of its channels; None for all."""
        share = min(share, self.most)
        if share == 1:
            return None
        if (group, share) not in self.known:
            channels = select_best_in_steps(self.scores[group], share, self.multiple)
            shapes = get_shapes({**self.models[group], **self.statistics[group]})
            structure = groups_from_plain(self.structure)
            self.known[group, share] = expand_channels(structure, shapes, channels, buffers=True)
        return self.known[group, share]


@dataclass
class GroupRound:
    """What the clients of one group report in a round."""

    mean: Average
    clients: list[int] = field(default_factory=list)
    merits: list[tuple[float, float]] = field(default_factory=list)
    """By how much the offset was better, and on how many examples, of each client that reports
    them."""


def add_merits(
    before: tuple[float, float], reported: Sequence[tuple[float, float]]
) -> tuple[float, float]:
    """Grove: add the merits that clients reported of either kind of model.

    Earlier reports count less.
    """
    better, tried = before
    for one, count in reported:
        better += one * count
        tried += count
    return FADES * better, FADES * tried
