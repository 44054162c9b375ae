"""Which channels a device trains at its pruning ratio: FedAPTA's rule, and those of others.

A rule is called with a model, the layers that may lose channels, a ratio, the round and the client.
The ratio is the share of those layers' weights that go, each counted with the channel that it makes
(FedAPTA's Table 5 counts so; what later layers read of a removed channel is removed as well).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ...channels.find_groups import require_groups
from ...channels.groups import ChannelGroup, Channels
from ...channels.selection import Even, FilterL1, select_random, select_window
from ...channels.shrink import cut_channels
from ...channels.submodel import get_shapes
from ...channels.widths import Width, choose_width
from ...core import ClientInfo, Setup
from ...errors import InputError, check, spell_option, unknown
from ...parts.device_widths import batch_and_slots
from ...parts.local import LocalTraining
from ...seeds import torch_rng
from .layer_ratios import (
    IMPORTANCES,
    candidates,
    layer_importance,
    monotone_ratios,
    weight_counts,
    whole_channels,
)

RATIO_STEP = 0.05
"""Pruning ratios that follow from devices are multiples of it."""


class ChannelRule(Protocol):
    """A rule that chooses which channels a device keeps."""

    @property
    def varies(self) -> bool:
        """FedAPTA: whether two devices of one ratio may keep different channels of one model."""

    @property
    def most(self) -> float:
        """FedAPTA: the largest share of its channels that a layer may lose.

        With 1 all channels but one may go, by rounding.
        """

    def __call__(
        self,
        model: Mapping[str, Tensor],
        groups: Sequence[ChannelGroup],
        ratio: float,
        round: int,
        client: int,
    ) -> Channels:
        """The channels kept, per layer."""


@dataclass(frozen=True)
class LayerwiseL1:
    """FedAPTA's: important layers lose less (Alg. 2), and in each layer the smallest filters go."""

    importance: str = "mean"
    """Of a layer: the mean of \\|w\\| over its weights, or the literal L1 norm, "sum"."""
    most: float = 0.95
    """No layer loses a larger share of its channels."""
    least: float = 0.8
    """Every layer loses at least this share of the device's ratio, to within a channel. 0: the
    paper's rule, by which first layers stay almost whole; 1: all layers alike."""

    varies = False

    def __post_init__(self) -> None:
        if self.importance not in IMPORTANCES:
            raise unknown("importance", self.importance, IMPORTANCES)
        check(0 < self.most < 1, "most", self.most, "in (0, 1)")
        check(0 <= self.least <= 1, "least", self.least, "in [0, 1]")

    def __call__(
        self,
        model: Mapping[str, Tensor],
        groups: Sequence[ChannelGroup],
        ratio: float,
        round: int,
        client: int,
    ) -> Channels:
        """The channels of largest L1 norm; each layer loses what its own ratio takes."""
        importances = layer_importance(model, groups, self.importance)
        counts = weight_counts(groups, get_shapes(model))
        channels = []
        sizes = []
        caps = []
        by_layer = []
        for group in groups:
            channels.append(group.size)
            sizes.append(counts[group.name])
            caps.append(cap(self, group))
            by_layer.append(importances[group.name])
        ratios = monotone_ratios(by_layer, sizes, caps, ratio, self.least)
        fallen = whole_channels(ratios, channels, sizes)
        scores = FilterL1()(model, groups)
        kept: Channels = {}
        for group, number in zip(groups, fallen, strict=True):
            # Stable, and on the CPU: of equal filters the first stay, on every machine.
            best = torch.argsort(scores[group.name].cpu(), descending=True, stable=True)
            kept[group.name] = torch.zeros(group.size, dtype=torch.bool)
            kept[group.name][best[: group.size - number]] = True
        return kept


@dataclass(frozen=True)
class UniformL1:
    """FedLPS': the same ratio in every layer, and in each the filters of smallest L1 norm go."""

    varies = False
    most = 1.0

    def __call__(
        self,
        model: Mapping[str, Tensor],
        groups: Sequence[ChannelGroup],
        ratio: float,
        round: int,
        client: int,
    ) -> Channels:
        """The best of every layer."""
        return Even()(FilterL1()(model, groups), 1 - ratio)


@dataclass(frozen=True)
class RollingWindow:
    """FedRolex': a window of every layer that rolls on by one channel a round."""

    varies = False
    most = 1.0

    def __call__(
        self,
        model: Mapping[str, Tensor],
        groups: Sequence[ChannelGroup],
        ratio: float,
        round: int,
        client: int,
    ) -> Channels:
        """This round's window."""
        return select_window(groups, 1 - ratio, round)


@dataclass(frozen=True)
class RandomChannels:
    """FedDrop's, of both papers called so: channels drawn again for every round and client.

    With one ratio for all devices this is federated dropout of Caldas et al. (2018), as in Figure 2
    of FedAPTA; with a ratio for each device that of Wen et al. (2022).
    """

    draw: int = 0
    """Seed of the draws, next to round and client; the run's own seed does not enter."""

    varies = True
    most = 1.0

    def __call__(
        self,
        model: Mapping[str, Tensor],
        groups: Sequence[ChannelGroup],
        ratio: float,
        round: int,
        client: int,
    ) -> Channels:
        """This round's draw."""
        generator = torch_rng(self.draw, round, client, "channels")
        return select_random(groups, 1 - ratio, generator)


def cap(rule: ChannelRule, group: ChannelGroup) -> float:
    """FedAPTA: the largest share of a layer's channels that can be pruned: one channel stays."""
    if rule.most == 1:
        # Such a rule rounds in every layer by itself, and there is no budget that it must meet.
        return 1.0
    return min(rule.most, (group.size - 1) / group.size)


def largest_ratio(rule: ChannelRule, groups: Sequence[ChannelGroup]) -> float:
    """FedAPTA: the largest pruning ratio that every layer can meet: the smallest cap.

    Up to there equal ratios are one allocation. 1 stands for all below it.
    """
    return min(cap(rule, group) for group in groups)


def check_ratio(rule: ChannelRule, groups: Sequence[ChannelGroup], ratio: float) -> None:
    """FedAPTA: refuse a pruning ratio above the smallest cap of the layers.

    Some order of importance could not meet it.
    """
    narrowest = min(groups, key=lambda group: cap(rule, group))
    largest = largest_ratio(rule, groups)
    if ratio > largest:
        raise InputError(
            f"a device's pruning ratio is {ratio:g}, and layer '{narrowest.name}', of "
            f"{narrowest.size} channels, can lose at most {largest:g} of them (prune.most is "
            f"{rule.most:g}, and one channel is kept); give ratios up to that, or a wider net."
        )


def kept_weights(groups: Sequence[ChannelGroup], counts: Mapping[str, int], kept: Channels) -> int:
    """FedAPTA: how many weights of these layers a device keeps.

    Each weight is counted with the channel that it makes.

    This is how the paper's Table 5 counts parameters. A really smaller net has fewer: it loses what
    its layers read of lost channels too.

    >>> conv = ChannelGroup("conv", 4, ())
    >>> kept_weights([conv], {"conv": 72}, {"conv": torch.tensor([True, False, False, True])})
    36
    """
    total = 0
    for group in groups:
        per_channel = counts[group.name] // group.size
        total += per_channel * int(kept[group.name].sum())
    return total


def client_ratios(setup: Setup, rule: ChannelRule, local: LocalTraining | None) -> dict[int, float]:
    """FedAPTA: every client's pruning ratio: the smallest at which a training step fits.

    A step fits as in :func:`fedgrove.channels.widths.choose_width`, in the net that ``rule`` really
    cuts, from the initial weights: what a ratio saves depends on the rule and on the layers it
    cuts. Ratios are multiples of :data:`RATIO_STEP`. A device whose memory is too small at the
    largest is refused.
    """
    clients = setup.all_clients("keeps a pruning ratio for every client")
    batch, slots = batch_and_slots(local)
    layout = setup.layout
    whole = Width(1.0, layout.memory(batch, slots), layout.macs)
    devices = {k: setup.clients[k] for k in clients}

    def fits_whole(device: ClientInfo) -> bool:
        return device.memory >= whole.memory and device.speed >= 1

    if all(map(fits_whole, devices.values())):
        # Before channels are looked for: a net whose channels cannot be removed is fine here.
        return dict.fromkeys(clients, 0.0)
    groups = candidates(require_groups(setup.net), layout.shapes)
    ratio_of = {1.0: 0.0}
    options = [whole]
    for i in range(1, round(1 / RATIO_STEP)):
        # Not 0.15000000000000002.
        ratio = round(i * RATIO_STEP, 6)
        if ratio > largest_ratio(rule, groups):
            break
        # Any round and client will do: a rule that varies chooses other channels, not more of them.
        kept = rule(setup.params, groups, ratio, 0, clients[0])
        small = cut_channels(setup.net, kept).net.layout
        options.append(Width(1 - ratio, small.memory(batch, slots), small.macs))
        ratio_of[1 - ratio] = ratio
    least = min(option.memory for option in options)
    for k, device in devices.items():
        if device.memory < least:
            raise InputError(
                f"client {k}'s device has {device.memory} bytes of memory, and at a pruning ratio "
                f"of {max(ratio_of.values()):g}, the largest, a training step of this net needs "
                f"{least}; use a smaller net or batch, or a rule that cuts all layers equally "
                f"({spell_option('set', 'prune=UniformL1')}), or give the ratios "
                f"({spell_option('set', 'ratios=0,0.5')})."
            )
    return {k: ratio_of[choose_width(device, options)] for k, device in devices.items()}
