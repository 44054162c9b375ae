"""How the server moves its model: by the mean update of the clients, or by what an optimiser makes
of it.

Without one (``server=None`` of a method) the clients' mean is the next model. An optimiser takes
the mean update as a gradient (with the opposite sign) and remembers a few trees from round to
round, which are never sent. Running statistics are averaged and not moved: momentum could make a
variance negative.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .. import trees
from ..errors import check
from ..trees import Tree

ServerState = dict[str, Tree]
"""What a server's optimiser remembers: trees like the shared parameters, by name."""


class ServerOptimiser(Protocol):
    """A rule by which the server moves its model: a frozen dataclass, the field ``server``."""

    def begin(self, params: Mapping[str, Tensor]) -> ServerState:
        """Return what the server's optimiser remembers before the first round."""

    def move(
        self, update: Mapping[str, Tensor], state: Mapping[str, Tree]
    ) -> tuple[Tree, ServerState]:
        """Return what the server adds to its model, and what it remembers; pure.

        Args:
            update: The clients' mean model minus the server's.
            state: What the server remembers.
        """


def begin_server(server: ServerOptimiser | None, params: Mapping[str, Tensor]) -> ServerState:
    """Return what the server remembers before the first round; nothing without an optimiser."""
    return {} if server is None else server.begin(params)


def step_server(
    server: ServerOptimiser | None,
    before: Mapping[str, Tensor],
    mean: Tree,
    state: ServerState,
) -> tuple[Tree, ServerState]:
    """Return the server's next model and what it remembers.

    Args:
        server: The optimiser; None: the mean is the next model.
        before: The model that clients were sent.
        mean: The mean of the clients' models.
        state: What the server remembers.
    """
    if server is None:
        return mean, state
    # Buffers, such as running statistics, are not moved: they are not in what is remembered. An
    # optimiser that remembers nothing moves all that is not a count.
    names = next(iter(state.values()), {k: v for k, v in mean.items() if v.is_floating_point()})
    # In double precision, so that a step of 1 without momentum is the mean.
    old = trees.map(Tensor.double, trees.pick(before, names))
    update = trees.sub(trees.map(Tensor.double, trees.pick(mean, names)), old)
    remembered = {slot: trees.map(Tensor.double, tree) for slot, tree in state.items()}
    change, remembered = server.move(update, remembered)
    moved = trees.map(lambda w, d, m: (w + d).to(m.dtype), old, change, trees.pick(mean, names))
    kept = {}
    for slot, tree in remembered.items():
        kept[slot] = trees.map(lambda value, like: value.to(like.dtype), tree, moved)
    return {**mean, **moved}, kept


@dataclass(frozen=True)
class ServerSGD:
    r"""A step along the mean update, with momentum (FedAvgM, Hsu et al. 2019).

    :math:`v \leftarrow \beta v + \Delta;\; w \leftarrow w + \eta v` (:math:`\Delta` -> ``update``,
    :math:`\eta` step, :math:`\beta` momentum). With step 1 and without momentum it is FedAvg.

    >>> rule = ServerSGD(step=0.5, momentum=0.5)
    >>> state = {"velocity": {"w": torch.tensor([2.0])}}
    >>> rule.move({"w": torch.tensor([3.0])}, state)
    ({'w': tensor([2.])}, {'velocity': {'w': tensor([4.])}})
    """

    step: float = 1.0
    """The server's learning rate: the share of the mean update that is added."""
    momentum: float = 0.0

    def __post_init__(self) -> None:
        check(self.step > 0, "step", self.step, "above 0")
        check(0 <= self.momentum < 1, "momentum", self.momentum, "in [0, 1)")

    def begin(self, params: Mapping[str, Tensor]) -> ServerState:
        """Return ServerSGD's velocity of zero."""
        return {"velocity": trees.map(torch.zeros_like, params)}

    def move(
        self, update: Mapping[str, Tensor], state: Mapping[str, Tree]
    ) -> tuple[Tree, ServerState]:
        """Do one step of ServerSGD."""
        velocity = trees.map(lambda v, d: self.momentum * v + d, state["velocity"], update)
        return trees.map(lambda v: self.step * v, velocity), {"velocity": velocity}


@dataclass(frozen=True)
class _Adaptive:
    r"""What the three adaptive rules of Reddi et al. 2021 (Alg. 2) have in common.

    :math:`m \leftarrow \beta_1 m + (1-\beta_1)\Delta;\; w \leftarrow w + \eta\, m \big/ (\sqrt{v} +
    \tau)`, where :math:`v` is at first :math:`\tau^2`. There is no correction for the zeros that
    :math:`m` begins with.
    """

    step: float = 0.01
    """The server's learning rate: about how far a parameter moves in a round."""
    beta1: float = 0.9
    tau: float = 1e-3
    """Updates much smaller than this are scaled up less: the degree of adaptivity."""

    def __post_init__(self) -> None:
        check(self.step > 0, "step", self.step, "above 0")
        check(0 <= self.beta1 < 1, "beta1", self.beta1, "in [0, 1)")
        check(self.tau > 0, "tau", self.tau, "above 0")

    def begin(self, params: Mapping[str, Tensor]) -> ServerState:
        """Return the moments of an adaptive server before the first round: 0 and tau squared."""
        return {
            "m": trees.map(torch.zeros_like, params),
            "v": trees.map(lambda w: torch.full_like(w, self.tau**2), params),
        }

    def move(
        self, update: Mapping[str, Tensor], state: Mapping[str, Tree]
    ) -> tuple[Tree, ServerState]:
        """Do one step of an adaptive server."""
        m = trees.map(lambda m, d: self.beta1 * m + (1 - self.beta1) * d, state["m"], update)
        v = trees.map(self.second_moment, state["v"], update)
        change = trees.map(lambda m, v: self.step * m / (v.sqrt() + self.tau), m, v)
        return change, {"m": m, "v": v}

    def second_moment(self, v: Tensor, update: Tensor) -> Tensor:
        """Return the next second moment of an adaptive server."""
        raise NotImplementedError


@dataclass(frozen=True)
class ServerAdam(_Adaptive):
    r"""Adam on the server: :math:`v \leftarrow \beta_2 v + (1-\beta_2)\Delta^2`.

    (FedAdam, Reddi et al. 2021, Alg. 2.) The step is :math:`\eta m / (\sqrt v + \tau)`, with
    :math:`m` the moving mean of the updates :math:`\Delta`.

    >>> rule = ServerAdam(step=1.0, beta1=0.5, beta2=0.5, tau=1.0)
    >>> rule.second_moment(torch.tensor([2.0]), torch.tensor([4.0]))
    tensor([9.])
    """

    beta2: float = 0.99

    def __post_init__(self) -> None:
        super().__post_init__()
        check(0 <= self.beta2 < 1, "beta2", self.beta2, "in [0, 1)")

    def second_moment(self, v: Tensor, update: Tensor) -> Tensor:
        """Return ServerAdam's moving mean of squares."""
        return self.beta2 * v + (1 - self.beta2) * update * update


@dataclass(frozen=True)
class ServerYogi(_Adaptive):
    r"""Yogi on the server: :math:`v \leftarrow v - (1-\beta_2)\Delta^2\,\mathrm{sign}(v-\Delta^2)`.

    (FedYogi, Reddi et al. 2021, Alg. 2.) As :class:`ServerAdam`, but v falls slowly after a large
    update.

    >>> rule = ServerYogi(beta2=0.5)
    >>> rule.second_moment(torch.tensor([2.0, 20.0]), torch.tensor([4.0, 4.0]))
    tensor([10., 12.])
    """

    beta2: float = 0.99

    def __post_init__(self) -> None:
        super().__post_init__()
        check(0 <= self.beta2 < 1, "beta2", self.beta2, "in [0, 1)")

    def second_moment(self, v: Tensor, update: Tensor) -> Tensor:
        """Return ServerYogi's second moment, moved towards the square."""
        square = update * update
        return v - (1 - self.beta2) * square * torch.sign(v - square)


@dataclass(frozen=True)
class ServerAdagrad(_Adaptive):
    r"""Adagrad on the server: :math:`v \leftarrow v + \Delta^2`.

    (FedAdagrad, Reddi et al. 2021, Alg. 2.) Steps become shorter from round to round.

    >>> ServerAdagrad().second_moment(torch.tensor([2.0]), torch.tensor([4.0]))
    tensor([18.])
    """

    step: float = 0.1
    beta1: float = 0.0

    def second_moment(self, v: Tensor, update: Tensor) -> Tensor:
        """Return ServerAdagrad's sum of squares."""
        return v + update * update
