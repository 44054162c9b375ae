"""Which channels Grove removes: of a group's model, and of clients with small devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...channels.groups import expand_channels
from ...channels.selection import select_best_in_steps
from ...channels.submodel import PlainGroups, get_shapes, groups_from_plain
from ...channels.widths import choose_width, measure_widths
from ...core import MOST_AT_ONCE, Setup
from ...parts.device_widths import batch_and_slots
from ...parts.local import LocalTraining
from ...trees import Mask, Tree

SAMPLE = 100
"""How many devices are looked at where there are too many to look at all."""
WHY_ALL = "fits models to devices (--set fit=false: all get the same)"


def narrow_clients(setup: Setup, local: LocalTraining | None) -> dict[int, float]:
    """The clients whose devices are too small or too slow for the whole net, with their shares.

    Of very many clients a sample is looked at. If one of those is narrow, every client would need
    an entry in the state, and that is refused.
    """
    batch, slots = batch_and_slots(local)
    needed = setup.layout.memory(batch, slots)

    def is_narrow(client: int) -> bool:
        device = setup.clients[client]
        return device.memory < needed or device.speed < 1

    if len(setup.clients) > MOST_AT_ONCE:
        sample = setup.some_clients(SAMPLE)
        if not any(is_narrow(client) for client in sample):
            return {}
    narrow = [client for client in setup.all_clients(WHY_ALL) if is_narrow(client)]
    if not narrow:
        # Nothing has to be cut, nor need it be possible.
        return {}
    options = measure_widths(setup.net, batch, slots)
    return {client: choose_width(setup.clients[client], options) for client in narrow}


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
        """What is left of a group's model and statistics at a share of the channels; None: all."""
        share = min(share, self.most)
        if share == 1:
            return None
        if (group, share) not in self.known:
            channels = select_best_in_steps(self.scores[group], share, self.multiple)
            shapes = get_shapes({**self.models[group], **self.statistics[group]})
            structure = groups_from_plain(self.structure)
            self.known[group, share] = expand_channels(structure, shapes, channels, buffers=True)
        return self.known[group, share]
