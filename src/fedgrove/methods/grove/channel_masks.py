"""Which channels of a group's model Grove keeps, for all clients and for those that have fewer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...channels.groups import expand_channels
from ...channels.selection import select_best_in_steps
from ...channels.submodel import PlainGroups, get_shapes, groups_from_plain
from ...trees import Mask, Tree


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
