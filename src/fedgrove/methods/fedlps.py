r"""FedLPS: predictors pruned for each device, after an encoder that tasks may share (Jia, Zhang,
Beheshti & Dou, "FedLPS: Heterogeneous Federated Learning for Multiple Tasks with Local Parameter
Sharing", AAAI 2024).

Client k has a share :math:`s_k` of the channels; e is the first layers with their initial weights,
p the other layers, the predictor. Round :math:`t`, cohort :math:`S_t`::

    p_k  = E epochs of min CE((e, p); D_k) over p alone, from p M_k      -> Train(frozen="fixed")
    M_k  = of p_k when first trained, the s_k C channels of largest L1   -> ChoosePart
    p    = sum_k n_k (p_k + (1 - M_k) p) / sum_k n_k                     -> fill_missing_channels

M_k thus depends on the client's data and device, and does not change afterwards. The encoder comes
from the seed on both sides (or from given weights) and is never sent. A client uses (e, p M_k). The
paper has one predictor for each task, and the tasks are known: run it with ``per_task``. The
paper's encoder is pretrained; a random one is useless, so by default there is none. With a share of
1 for all this is then FedAvg.

- Shared: a predictor, after a frozen encoder if there is one; each client keeps the channels that
  matter to it, limited to what fits on its device.
- A client uses: its part of the shared model.
- Bytes in the paper: 8 d_p M T, the mean over the widths.
- Secure aggregation: no; clients choose their channels, and the server stores each client's choice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from .. import trees
from ..channels.find_groups import find_groups
from ..channels.groups import ChannelGroup, Channels, expand_channels, is_whole
from ..channels.selection import Even, FilterL1, select_first
from ..channels.submodel import (
    extract_submodel,
    fill_missing_channels,
    get_shapes,
    groups_from_plain,
    groups_to_plain,
    read_packet_channels,
)
from ..core import (
    Carry,
    Client,
    Edit,
    Give,
    Packet,
    Report,
    Setup,
    Stage,
    Task,
    Train,
)
from ..errors import UnfitError, check, spell_option
from ..nets import Net
from ..nets.freeze import split_layers
from ..nets.layout import Layout
from ..parts.common import CommonParts
from ..parts.device_widths import WideModel, check_shares, client_shares
from ..parts.one_model import sent_with_own_mask
from ..parts.personal import complete_from_start, send_received


@dataclass(frozen=True)
class State(WideModel):
    """The predictor in full width, each client's share of its channels, and which they are."""

    shares: dict[int, float]
    channels: dict[int, dict[str, Tensor]]
    """Of the clients that have pruned."""


@dataclass(frozen=True)
class FedLPS(CommonParts):
    """A predictor on a frozen encoder; each client prunes it once, to the share it can hold."""

    encoder: float = 0.0
    """The share of the layers, counted from the first as ``freeze`` counts them, that is not
    trained; for runs that start from trained weights."""
    widths: tuple[float, ...] = ()
    """Shares of channels, assigned to the clients in turn; empty: what fits on each device."""

    starts_trained = True
    sends_later = "choose the mask of 'model' from their data"

    def __post_init__(self) -> None:
        check(0 <= self.encoder < 1, "encoder", self.encoder, "in [0, 1)")
        check_shares(self.widths)

    # ---- the server ------------------------------------------------------------------------------

    def init(self, setup: Setup) -> State:
        """The predictor as it starts, and every client's share of its channels."""
        shares = client_shares(setup, self.widths, self.local)
        frozen = encoder_names(setup.layout, self.encoder)
        groups = predictor_groups(setup.net, frozen)
        if not groups and min(shares.values()) < 1:
            raise UnfitError(
                "after the encoder it has no channels that can be removed. Use a shorter encoder "
                f"({spell_option('set', 'encoder=0')}), or a different net."
            )
        predictor = {name: v for name, v in setup.params.items() if name not in frozen}
        return State(0, predictor, groups_to_plain(groups), shares, {})

    def deliver(self, state: State, client: int) -> Mapping[str, Packet]:
        """The client's own part of the predictor; all of it before it has pruned."""
        groups = groups_from_plain(state.structure)
        return {"model": extract_submodel(state.model, groups, state.channels.get(client))}

    def plan(self, state: State, cohort: Sequence[int]) -> list[Task]:
        """The cohort trains; who does so for the first time prunes after it."""
        tasks = []
        for k in cohort:
            share = state.shares[k]
            verb = "train" if share == 1 or k in state.channels else "train:prune"
            tasks.append(Task(k, self.deliver(state, k), {"share": share}, verb))
        return tasks

    def fold(self, state: State, reports: Iterable[Report]) -> State:
        """The mean of the recovered predictors; and what clients have pruned is known."""
        groups = groups_from_plain(state.structure)
        mean = self.mean.start(state.model)
        channels = dict(state.channels)
        for report in reports:
            packet = report.give["model"]
            chosen = read_packet_channels(packet, groups)
            if any(not bool(kept.any()) for kept in chosen.values()):
                # A layer without channels is no model. Its client prunes again when it is drawn.
                continue
            mean.add(fill_missing_channels(packet, state.model, groups), report.examples)
            if not is_whole(chosen):
                channels[report.of] = chosen
        return replace(
            state,
            round=state.round + 1,
            model=mean.value(),
            channels=dict(sorted(channels.items())),
        )

    # ---- a client --------------------------------------------------------------------------------

    def work(self, verb: str) -> tuple[Stage, ...]:
        """Train the predictor and send it, pruned; to use the model, put the encoder before it."""
        whole = Edit(complete_from_start)
        train = Train(self.objective, self.local, frozen="fixed")
        return {
            "train": (whole, train, Give(send_received)),
            "train:prune": (
                whole,
                train,
                Edit(ChoosePart()),
                Give(send_received, sent_with_own_mask),
            ),
            "use": (whole,),
        }[verb]

    def paper_bytes(self, net: Net, clients: int, cohort: int, rounds: int) -> int:
        """The predictor down and up, at the mean width; the first round as the others."""
        sizes = [predictor_size(net, self.encoder, share) for share in self.widths or (1.0,)]
        return round(2 * 4 * cohort * rounds * sum(sizes) / len(sizes))


@dataclass(frozen=True)
class ChoosePart:
    """Of what the client trained it keeps its share of the channels, those of largest L1.

    ``carry["local"]`` is what is left, ``carry["model.mask"]`` the mask.
    """

    def __call__(self, carry: Carry, client: Client) -> Carry:
        """The same share of every layer after the encoder."""
        groups = predictor_groups(client.net, carry["fixed"])
        scores = FilterL1()(carry["local"], groups)
        channels: Channels = Even()(scores, float(carry["settings"]["share"]))
        if is_whole(channels):
            return carry
        mask = expand_channels(groups, get_shapes(carry["received"]), channels)
        return {**carry, "local": trees.apply_mask(carry["local"], mask), "model.mask": mask}


def encoder_names(layout: Layout, share: float) -> tuple[str, ...]:
    """FedLPS: parameters and buffers of the first layers, of which no later layer has a part."""
    first, rest = split_layers(layout, share, "encoder")
    trained: set[str] = set()
    for layer in rest:
        trained.update(layer.names)
    names: list[str] = []
    for layer in first:
        names += [name for name in layer.names if name not in trained]
    # Each name once, in order: layers may share a tensor.
    return tuple(dict.fromkeys(names))


def predictor_groups(net: Net, frozen: Iterable[str]) -> tuple[ChannelGroup, ...]:
    """FedLPS: the channels of the predictor; a frozen encoder loses none."""
    fixed = set(frozen)
    found = []
    for group in find_groups(net):
        makers = group.places_with("filter", "bias", "scale", "shift")
        if not any(place.tensor in fixed for place in makers):
            found.append(group)
    return tuple(found)


def predictor_size(net: Net, encoder: float, share: float) -> int:
    """FedLPS: parameters of the predictor with this share of every layer's channels."""
    frozen = encoder_names(net.layout, encoder)
    groups = predictor_groups(net, frozen)
    # How many channels stay decides the size, not which: the first are as good as any.
    mask = expand_channels(groups, net.layout.shapes, select_first(groups, share))
    size = 0
    for name in net.layout.params:
        if name in frozen:
            continue
        size += net.layout.count([name])
        if name in mask:
            size -= int((~mask[name]).sum())
    return size
