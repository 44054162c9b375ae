"""What SAFL and Hermes share: two stages, slimmed sub-models that each client keeps for itself.

Stage 1 prunes round by round to the densities of a schedule; stage 2 trains what is left. Between
rounds a client keeps its model in full width, so that a pruned channel can come back; or, without
recovery, only what is left of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from ...channels.find_groups import require_groups
from ...channels.groups import Channels
from ...channels.selection import FilterL1, FilterL2, Gamma
from ...channels.submodel import (
    expected_submodel,
    extract_submodel,
    groups_from_plain,
    make_client_mask,
    restore_full_width,
    share_submodel,
    slim_submodel,
)
from ...core import (
    Batch,
    Carry,
    Client,
    ExpectedReport,
    Outcome,
    Packet,
    Setup,
    Task,
    Train,
)
from ...errors import check
from ...nets import Net
from ...parts.common import CommonParts
from ...parts.device_widths import WideModel, client_shares
from ...parts.local import LocalTraining, for_epochs
from ...parts.objective import NOT_SETTABLE, Loss, Objective
from ...parts.personal import start_personal
from ...trees import Tree

if TYPE_CHECKING:
    from ...nets import Output


# ---- terms of a local loss on the scales of norm layers ------------------------------------------


@dataclass(frozen=True)
class GammaL1(Objective):
    r"""Sparse scales: :math:`\lambda \sum_b \lVert \gamma_b \rVert_1` over norm layers.

    (Network slimming; SAFL's guided update.) :math:`\gamma_b` -> ``params``, the weight of norm
    layer b, :math:`\lambda` -> ``weight``. The slope at 0 is 0: a restored channel, whose scale is
    0, can leave it.
    """

    is_loss: ClassVar[bool] = False
    weight: float = 1e-4

    def __post_init__(self) -> None:
        check(self.weight >= 0, "weight", self.weight, "0 or more")

    def __call__(self, out: Output, params: Tree, batch: Batch, carry: Carry) -> Loss:
        """Lambda times the sum of all scales' magnitudes."""
        magnitudes = [params[k].abs() for k in out.net.layout.scales]
        return self.weight * _total(magnitudes, out.logits), {}


@dataclass(frozen=True)
class GammaDistance(Objective):
    r"""Pull to the scales of the group.

    :math:`\mu \sum_b \lVert \gamma_b - \gamma_b^{cluster} \rVert_1` (SAFL's guided update).
    :math:`\gamma_b` -> ``params``, :math:`\gamma_b^{cluster}` -> ``carry[to]``, :math:`\mu` ->
    ``weight``.
    """

    is_loss: ClassVar[bool] = False
    weight: float = 0.004
    to: str = field(default="cluster", metadata=NOT_SETTABLE)

    def __post_init__(self) -> None:
        check(self.weight >= 0, "weight", self.weight, "0 or more")

    def __call__(self, out: Output, params: Tree, batch: Batch, carry: Carry) -> Loss:
        """Mu times the sum of all scales' distances."""
        cluster = carry[self.to]
        distances = [(params[k] - cluster[k]).abs() for k in out.net.layout.scales]
        return self.weight * _total(distances, out.logits), {}


def _total(vectors: list[Tensor], like: Tensor) -> Tensor:
    """The sum of all entries."""
    # A net without norm layers has no scales, and cat() of nothing raises.
    if not vectors:
        return like.new_zeros(())
    return torch.cat(vectors).sum()


# ---- the two stages ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Submodels(WideModel):
    """State: the shared part of the model in full width, and the channels of every client."""

    clients: tuple[int, ...]
    kept: dict[int, Channels]
    """The channels of every client that has pruned."""


@dataclass(frozen=True)
class TwoStages(CommonParts):
    """The settings that SAFL and Hermes have in common, and how both serve their clients."""

    density: float = 0.7
    """The share of channels that a client keeps."""
    densities: tuple[float, ...] | None = None
    """The density after each round of stage 1; None: 1, 0.9, ... to ``density``; (): no stage 1."""
    guided: int = 50
    """Epochs before a pruning step."""
    tune: int = 20
    """Epochs after a pruning step."""
    devices: bool = False
    """Whether a client only keeps as many channels as its device can train (``--profile``): its
    density is lowered until the net fits memory and speed. Stage 1 still trains at full width."""
    share_head: bool = True
    """Whether the last linear layer is shared in stage 2; False keeps it on the client."""
    score: Gamma | FilterL1 | FilterL2 = Gamma()
    """How channels are scored: by the scale of the norm layer, or by the filters."""
    sparse: GammaL1 = GammaL1(1e-4)
    """The term that makes scales sparse; ``weight`` is lambda."""

    sends_later = "choose the mask of 'model' from their data"

    def __post_init__(self) -> None:
        epochs = (self.guided, self.tune)
        check(min(epochs) >= 1, "guided, tune", epochs, "1 or more epochs each")
        in_range = all(0 < density <= 1 for density in self.schedule)
        check(in_range, "densities", self.schedule, "in (0, 1] each")

    @property
    def schedule(self) -> tuple[float, ...]:
        """SAFL and Hermes: the densities of stage 1, round by round."""
        return stepwise(self.density) if self.densities is None else self.densities

    def check_setup(self, setup: Setup) -> None:
        """SAFL and Hermes: refuse a run without a stage 2, and a net without scores of channels.

        (A net without norms has no scales.) If devices decide, there must be a stage 1, and the
        narrowest net must fit them all.
        """
        pruning_rounds = len(self.schedule)
        check(
            setup.rounds > pruning_rounds,
            "rounds",
            setup.rounds,
            f"more than {pruning_rounds}, which the pruning of stage 1 takes",
        )
        if pruning_rounds:
            # Raises where there is nothing to score.
            self.score(setup.params, require_groups(setup.net))
        if self.devices:
            check(
                pruning_rounds > 0,
                "densities",
                (),
                "one or more where devices decide, since pruning is what fits a model to one",
            )
            # Raises where a device cannot hold the narrowest net.
            client_shares(setup, (), self.local)

    def deliver(self, state: Submodels, client: int) -> Mapping[str, Packet]:
        """The client's part of the shared model, once stage 2 has made one."""
        # After the last round of stage 1 a client still starts from its own model (SAFL, Alg. 2,
        # line 1); without a stage 1 there is no such model.
        if self.schedule and state.round <= len(self.schedule):
            return {}
        groups = groups_from_plain(state.structure)
        return {"model": extract_submodel(state.model, groups, state.kept.get(client))}

    def slim(self, carry: Carry, client: Client, recover: bool = True) -> Carry:
        """SAFL and Hermes: keep the channels of best score; their share is the task's density.

        If ``devices`` decide, no more than the client's device can hold. Without ``recover``, only
        channels that are still there.
        """
        # As it was written in the task: single precision would round it off.
        density = round(float(carry["settings"]["density"]), 6)
        recipe = (self.local or LocalTraining()) if self.devices else None
        left = None if recover else carry.get("channels")
        return slim_submodel(carry, client, self.score, density, recipe, left)

    def share(self, carry: Carry, client: Client) -> Outcome:
        """SAFL and Hermes: send what is shared of the trained sub-model, keep all of it."""
        return share_submodel(carry, client, self.share_head)

    def expected_share(self, task: Task, net: Net) -> ExpectedReport:
        """SAFL and Hermes: the form of what a client shares of its sub-model."""
        return expected_submodel(net, self.share_head)


# ---- a client ------------------------------------------------------------------------------------


def start_with_what_is_left(carry: Carry, client: Client) -> Carry:
    """SAFL and Hermes: start from the personal model and the mask of its unpruned channels."""
    left = make_client_mask(client, carry.get("channels"))
    return {**start_personal(carry, client), "left.mask": left or {}}


def guided_training(
    objective: Objective, local: LocalTraining | None, epochs: int, mask: str = ""
) -> Train:
    """SAFL and Hermes: the training before a pruning step, in full width or masked.

    The mask, if any, is in the carry.
    """
    return Train(objective, for_epochs(local, epochs), "personal", "guided", mask=mask)


def tuning(objective: Objective, local: LocalTraining | None, epochs: int) -> Train:
    """SAFL and Hermes: training of what is left, after a pruning step."""
    return Train(objective, for_epochs(local, epochs), "guided", "tuned", mask="slim.mask")


def keep_recovered(carry: Carry, client: Client) -> Outcome:
    """SAFL and Hermes: the client keeps its model in full width, and its channels."""
    return Outcome(
        memory={"personal": restore_full_width(carry, client), "channels": carry["channels"]}
    )


def keep_what_is_left(carry: Carry, client: Client) -> Outcome:
    """SAFL and Hermes: the client keeps its pruned model, in full width with zeros."""
    return Outcome(memory={"personal": carry["tuned"], "channels": carry["channels"]})


def stepwise(density: float, step: float = 0.1) -> tuple[float, ...]:
    r"""SAFL's schedule: densities :math:`1, 1 - s, 1 - 2s, \dots`, the target the last of them.

    (Its pruning rates, 0, .1, .2, ... up to the target, section IV.C.) :math:`s` -> ``step``.

    >>> stepwise(0.7), stepwise(0.35)[-2:]
    ((1.0, 0.9, 0.8, 0.7), (0.4, 0.35))
    """
    check(0 < density <= 1, "density", density, "in (0, 1]")
    check(0 < step <= 1, "step", step, "in (0, 1]")
    # (1 - 0.9) / 0.1 is a little less than 1 in floating point: the target then follows below.
    whole_steps = int((1 - density) / step)
    densities = [round(1 - i * step, 6) for i in range(whole_steps + 1)]
    if densities[-1] > density + 1e-6:
        densities.append(density)
    return tuple(densities)
