r"""Q-FedCG: one model; clients send the larger half of their updates, in 8 bits.

(The baseline of AdFedWCP's tables, after Xu et al., "Federated Learning With Client Selection and
Gradient Compression in Heterogeneous Edge Systems", IEEE TMC 2024; docs/papers/qfedcg.md lists
what is left out of it.)

Round :math:`t`, cohort :math:`S_t`::

    w_k  = E epochs of min CE(w; D_k) from w                           -> Train
    u_k  = the share ``share`` of w_k - w with the largest magnitudes  -> largest_of
    q_k  = u_k on a grid of 2^b - 1 levels per layer                   -> Uniform quantiser
    w    = w + sum_k n_k q_k / sum_k n_k                               -> WeightedMean

What a client leaves out counts as an update of 0 and is not sent later. With share 1 and 32 bits
this is FedAvg.

- Shared: the model; clients send the larger half of each update, in 8 bits.
- A client uses: the shared model.
- Bytes in the paper: 8 d M T · ``share`` · ``bits`` / 32.
- Secure aggregation: yes; updates are averaged. With noise or secure sums messages are no longer
  sparse or rounded: full size.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass

from .. import trees
from ..core import Carry, Client, Give, Outcome, Packet, Report, Stage, Train
from ..errors import check
from ..nets import Net
from ..parts.one_model import (
    OneModel,
    add_mean_update,
    average,
    dense_bytes,
    expected_update,
)
from ..parts.quantise import UniformQuantiser, largest
from ..trees import Tree
from ..wire.codec import Codec, Smallest
from .fedavg import FedAvg

WHOLE = 32
"""Bits of a number that is not quantised."""


@dataclass(frozen=True)
class QFedCG(FedAvg):
    """One model for all; of each update the largest values are sent, quantised."""

    share: float = 0.5
    """The share of its update's values that a client sends."""
    bits: int = 8
    """Bits per sent value; 32: not quantised."""
    _: KW_ONLY
    codec: Codec = Smallest()

    def __post_init__(self) -> None:
        check(0 < self.share <= 1, "share", self.share, "in (0, 1]")
        bits_are_valid = self.bits == WHOLE or 2 <= self.bits <= 16
        check(bits_are_valid, "bits", self.bits, "in 2..16, or 32 (no quantisation)")

    @property
    def compresses(self) -> bool:
        """QFedCG: whether anything is left out of an update, or rounded."""
        return self.share < 1 or self.bits < WHOLE

    def fold(self, state: OneModel, reports: Iterable[Report]) -> OneModel:
        """The mean of the updates, as they are sent, moves the model."""
        if not self.compresses:
            return average(state, reports, self.mean, self.server)
        return add_mean_update(state, reports, self.mean, self.server)

    def work(self, verb: str) -> tuple[Stage, ...]:
        """Train, compress, send."""
        # An update that is added again is the model but for rounding: whole, the model is sent.
        if verb == "train" and self.compresses:
            return (Train(self.objective, self.local), Give(self._send_update, expected_update))
        return super().work(verb)

    def _send_update(self, carry: Carry, client: Client) -> Outcome:
        """What of the update is large, on its grid; running statistics as they are."""
        update = trees.sub(carry["local"], carry["model"])
        params = trees.pick(update, client.layout.params)
        # Statistics are few, and a variance rounded down could fall below 0.
        return Outcome({"update": Packet({**update, **self.compressed(params)})})

    def compressed(self, update: Tree) -> Tree:
        """QFedCG: the compressed update that is sent."""
        kept = largest_of(update, self.share)
        if self.bits == WHOLE:
            return kept
        # To the nearest level: nothing is drawn.
        return UniformQuantiser(self.bits, stochastic=False)(kept)

    def paper_bytes(self, net: Net, clients: int, cohort: int, rounds: int) -> int:
        """The share of all parameters in ``bits`` bits, counted both ways as one.

        That is AdFedWCP's number: 87.5 % less than FedAvg. Which parameters they are is not
        counted; the model itself comes down whole.
        """
        part = self.share * self.bits / WHOLE
        return round(part * dense_bytes(net.layout.size, cohort, rounds))


def largest_of(update: Tree, share: float) -> Tree:
    """QFedCG: the ``share`` of an update's values with the largest magnitudes; the rest is 0.

    At least one value; of equal ones the first.

    >>> import torch
    >>> largest_of({"a": torch.tensor([3.0, -1.0]), "b": torch.tensor([-2.0, 0.5])}, 0.5)
    {'a': tensor([3., 0.]), 'b': tensor([-2.,  0.])}
    """
    count = max(1, round(share * trees.size(update)))
    kept = largest(trees.flatten(update), count)
    return trees.apply_mask(update, trees.unflatten(kept, update))
