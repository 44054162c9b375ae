"""How often a client has each class: what methods measure that must know it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from ..core import Batch, Carry
from ..problems import class_targets
from ..trees import Tree

if TYPE_CHECKING:
    from ..nets import Net


@dataclass(frozen=True)
class LabelCounts:
    """What Measure sums: how often each output's class occurs, ``counts`` (outputs,).

    ``is_class`` is above 0 for the outputs that are classes of the client's.
    """

    passes: ClassVar[int] = 0
    """Nothing is computed: only the number of the network's outputs is needed."""

    def __call__(self, net: Net, params: Tree, batch: Batch, carry: Carry) -> Tree:
        """The counts of one batch."""
        # One example is enough for the number of outputs.
        outputs = net(params, batch.x[:1], train=False).logits
        targets = class_targets(net.problem, outputs, batch.y, carry.get("client", {}))
        classes = torch.arange(outputs.shape[1], device=outputs.device)
        is_label = classes == targets.y.unsqueeze(1)
        # Padding has weight 0, and is not counted.
        counts = (is_label.to(batch.weight.dtype) * batch.weight.unsqueeze(1)).sum(0)
        own = targets.own.to(counts.dtype)
        return {"counts": counts * own, "is_class": own}
