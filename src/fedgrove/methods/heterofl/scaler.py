"""HeteroFL's scaler: a narrow network trains with outputs as large as the whole one would have.

The sum that a layer computes over s of its inputs is about s of the whole sum. In training the
outputs of each layer that lost channels are therefore divided by s; what is used is not scaled, so
that narrow and wide clients have weights of one size.
"""

from __future__ import annotations

from ...channels.find_groups import find_groups
from ...core import Carry, Client
from ...trees import Tree


def find_scales(carry: Carry, client: Client) -> Carry:
    """HeteroFL: add ``carry["scales"]``: by tensor, the factor 1 / s of what makes channels.

    s is the client's share of channels, ``carry["settings"]["share"]``. A layer whose outputs
    cannot be removed, as behind a shuffle, is as wide as before and not scaled.
    """
    scales: Tree = {}
    scale = 1 / carry["settings"]["share"]
    for group in find_groups(client.net):
        for place in group.places_with("filter", "bias"):
            scales[place.tensor] = scale
    return {**carry, "scales": scales}


def scaled_weights(params: Tree, carry: Carry) -> Tree:
    r"""HeteroFL: the weights of the forward pass: filters and biases times :math:`1/s`.

    A layer is linear in both: its outputs are divided by s, which is the paper's scaler.

    >>> import torch
    >>> w, b = torch.tensor([[3.0]]), torch.tensor([1.0])
    >>> scaled_weights({"w": w, "b": b, "norm": b}, {"scales": {"w": 2 * b[0], "b": 2 * b[0]}})
    {'w': tensor([[6.]]), 'b': tensor([2.]), 'norm': tensor([1.])}
    """
    scales = carry["scales"]
    scaled: Tree = {}
    for name, leaf in params.items():
        scaled[name] = leaf * scales[name] if name in scales else leaf
    return scaled
