"""A generator of features for each class: FedGen's stand-in for the data that nobody may see."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ... import trees
from ...core import Batch, Carry
from ...errors import UnfitError, check
from ...nets import Net
from ...nets.layout import Layout
from ...parts.local import Adam
from ...parts.objective import NOT_SETTABLE, Objective
from ...problems import restrict_outputs
from ...seeds import torch_rng
from ...trees import Tree

if TYPE_CHECKING:
    from ...nets import Output


class FeatureGenerator(nn.Module):
    """A class and noise in, features out: two linear layers with a ReLU behind each.

    The second ReLU is there because the features that a network gives its last layer have mostly
    passed one themselves.
    """

    def __init__(self, classes: int, noise: int, hidden: int, features: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(classes + noise, hidden)
        self.features = nn.Linear(hidden, features)

    def forward(self, x: Tensor) -> Tensor:
        """Features (n, features) of inputs (n, classes + noise)."""
        features: Tensor = F.relu(self.features(F.relu(self.hidden(x))))
        return features


def generator_inputs(y: Tensor, noise: Tensor, classes: int) -> Tensor:
    """What a generator is given: the class as one of ``classes`` columns, then the noise."""
    is_class = torch.arange(classes, device=y.device) == y.unsqueeze(1)
    return torch.cat([is_class.to(noise.dtype), noise], 1)


# ---- the last layer on its own -------------------------------------------------------------------


def head_weights(layout: Layout) -> tuple[str, str | None]:
    """The names of weight and bias of the last linear layer; refused where there is none."""
    head = layout.head_layer
    if head is None or not head.weights:
        raise UnfitError(
            "features are generated for its last linear layer, and it has none that is trained. "
            "Take a net that ends in a linear layer."
        )
    return head.weights[0], head.bias


def head_logits(layout: Layout, params: Mapping[str, Tensor], features: Tensor) -> Tensor:
    """What the last linear layer makes of features."""
    weight, bias = head_weights(layout)
    return F.linear(features, params[weight], None if bias is None else params[bias])


def check_ends_in_head(net: Net, params: Tree) -> None:
    """Refuse a network that does something more behind its last linear layer."""
    like = next(iter(params.values()))
    with torch.no_grad():
        out = net(params, torch.zeros((1, *net.shape), dtype=like.dtype), train=False)
        head_weights(net.layout)
        assert out.features is not None
        logits = head_logits(net.layout, params, out.features)
    if logits.shape != out.logits.shape or not torch.allclose(logits, out.logits, atol=1e-5):
        raise UnfitError(
            "its outputs are not those of its last linear layer, for which features are "
            "generated. Take a net that ends in a linear layer."
        )


# ---- on a client ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class GeneratedFeatures(Objective):
    r"""FedGen's term: the client's last layer must know generated features for what they are.

    :math:`\alpha\, \mathbb{E}_{y \sim \hat p(y),\, z \sim G(z | y)}\, \ell(h(z), y)` (Zhu, Hong &
    Zhou 2021, Eq. 5.) :math:`h` -> the last linear layer of ``params``; :math:`z`, :math:`y` ->
    ``carry[of]``, drawn once a round, with ``own``, the classes that count, and ``weight``, 0 where
    the generator is not trained yet.
    """

    is_loss: ClassVar[bool] = False
    alpha: float = 1.0
    of: str = field(default="generated", metadata=NOT_SETTABLE)

    def __post_init__(self) -> None:
        check(self.alpha >= 0, "alpha", self.alpha, "0 or more")

    def __call__(
        self, out: Output, params: Tree, batch: Batch, carry: Carry
    ) -> tuple[Tensor, Tree]:
        """The mean over what was generated."""
        generated = carry[self.of]
        logits = head_logits(out.net.layout, params, generated["z"])
        logits = restrict_outputs(logits, {"allowed": generated["own"]})
        losses = F.cross_entropy(logits, generated["y"], reduction="none")
        return self.alpha * generated["weight"] * losses.mean(), {}


# ---- on the server -------------------------------------------------------------------------------


@dataclass(frozen=True)
class GeneratorTraining:
    r"""How the server trains a generator against the shared last layer.

    .. math:: \min_G\; \mathbb{E}_{y \sim \hat p(y),\, \epsilon}\, \ell(h(G(y, \epsilon)), y)
        + \lambda \exp(-\mathrm{mean}_{ij}\, |z_i - z_j|\, |\epsilon_i - \epsilon_j|)

    (Zhu et al. 2021, Eq. 4; the second term, which keeps G from overlooking its noise, is of the
    authors' code, distances being means over coordinates.) The paper's :math:`h` is the mean of
    the clients' logits; their last layers are linear, so that this is the logit of the mean layer.
    """

    steps: int = 50
    batch: int = 64
    diversity: float = 1.0
    optimiser: Adam = Adam(1e-3)

    def __post_init__(self) -> None:
        check(self.steps >= 0, "steps", self.steps, "0 or more")
        check(self.batch >= 2, "batch", self.batch, "2 or more")
        check(self.diversity >= 0, "diversity", self.diversity, "0 or more")

    def __call__(
        self, net: Net, weights: Tree, layout: Layout, model: Tree, shares: Tensor, seed: int
    ) -> Tree:
        """The generator after its steps; ``net`` runs it, ``layout`` and ``model`` are the head's.

        ``shares`` (outputs,) say how often each class is asked for.
        """
        random = torch_rng(seed, "generator")
        classes = len(shares)
        params = trees.pick(weights, net.layout.params)
        w = trees.flatten(params)
        noise_size = net.shape[0] - classes
        state = self.optimiser.init(w)
        for _ in range(self.steps):
            y = torch.multinomial(shares, self.batch, replacement=True, generator=random)
            noise = torch.randn(self.batch, noise_size, generator=random).to(w.dtype)
            leaf = w.detach().requires_grad_()
            z = net(trees.unflatten(leaf, params), generator_inputs(y, noise, classes), True).logits
            loss = F.cross_entropy(head_logits(layout, model, z), y)
            loss = loss + self.diversity * sameness(z, noise)
            (g,) = torch.autograd.grad(loss, leaf)
            w, state = self.optimiser.step(w, g, state, self.optimiser.lr)
        return {name: value.clone() for name, value in trees.unflatten(w, params).items()}


def sameness(z: Tensor, noise: Tensor) -> Tensor:
    """Near 1 where features are alike though their noise is not; towards 0 as they differ.

    >>> sameness(torch.tensor([[0.0], [2.0]]), torch.tensor([[0.0], [1.0]]))  # exp(-(2 + 2) / 4)
    tensor(0.3679)
    """
    apart = (z.unsqueeze(0) - z.unsqueeze(1)).abs().mean(2)
    noise_apart = ((noise.unsqueeze(0) - noise.unsqueeze(1)) ** 2).mean(2).sqrt()
    return torch.exp(-(apart * noise_apart).mean())
