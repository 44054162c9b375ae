"""What local training minimises. Objectives add: ``ProblemLoss() + Proximal(0.1)``.

An objective is called once per step with the output of that step's one forward pass and returns
``(loss, aux)``; ``aux`` is merged into ``carry["aux"]`` and comes back in the next step. What it
contains before the first step is given by :meth:`Objective.begin`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from .. import trees
from ..core import Batch, Carry
from ..errors import InputError, check
from ..problems import CLASSES, AnyProblem
from ..renamed import find_old_names
from ..trees import Tree

if TYPE_CHECKING:
    from ..nets import Net, Output


Loss = tuple[Tensor, Tree]
"""The loss of a batch, and what the objective remembers for the next step."""
NOT_SETTABLE = {"settable": False}
"""Of a field that names a tree of the carry: which there are is a matter of the method's code."""


class Objective(ABC):
    """A term of a local loss: a pure function of tensors, with no Python branch on data.

    Where channels are pruned, parameters and features come narrow, or with zeros in some of the
    places: sum over them, since a mean would depend on which. So do the trees of the carry, but
    those that ``Train.whole`` names, for ``out.whole``, the network in full width.
    """

    is_loss: ClassVar[bool] = True
    """Whether it learns from the data's targets; False: a term that only adds to such a loss."""
    only_in: ClassVar[str] = ""
    """The one method whose clients have what it needs, by name; empty: all of them."""
    targets: ClassVar[tuple[str, ...] | None] = None
    """The kinds of targets that it can learn from (``Problem.kind``): "classes", "labels",
    "numbers" or "tasks"; empty: any. A run on data with other targets is refused. None: a loss
    learns from classes, and a term that is no loss may be added on any data."""

    @abstractmethod
    def __call__(self, out: Output, params: Tree, batch: Batch, carry: Carry) -> Loss:
        """The loss of one batch, and what to remember for the next step."""

    def begin(self, params: Tree, carry: Carry) -> Tree:
        """Return ``carry["aux"]`` of a local loss before the first step, with all its names."""
        return {}

    def more_macs(self, net: Net, forward: int) -> int:
        """Return the MACs per example that this term of the local loss adds, for the clock.

        A teacher's pass or another network's; ``forward`` are those of one pass of the network.
        """
        return 0

    def __add__(self, other: Objective) -> Objective:
        # Flat, however it is bracketed: equal sums compare equal, and so train in one stack.
        return Sum((*_terms(self), *_terms(other)))


def _terms(objective: Objective) -> tuple[Objective, ...]:
    if isinstance(objective, Sum):
        return objective.terms
    return (objective,)


@dataclass(frozen=True)
class Sum(Objective):
    """The sum of its terms."""

    terms: tuple[Objective, ...]

    def begin(self, params: Tree, carry: Carry) -> Tree:
        """Return what the terms of a local loss begin with, merged."""
        aux: Tree = {}
        for term in self.terms:
            aux |= term.begin(params, carry)
        return aux

    def more_macs(self, net: Net, forward: int) -> int:
        """Return the additional MACs of all terms of a local loss."""
        return sum(term.more_macs(net, forward) for term in self.terms)

    def __call__(self, out: Output, params: Tree, batch: Batch, carry: Carry) -> Loss:
        """The terms' losses, added; what they remember, merged."""
        results = [term(out, params, batch, carry) for term in self.terms]
        loss, aux = results[0]
        for term_loss, term_aux in results[1:]:
            loss = loss + term_loss
            aux = aux | term_aux
        return loss, aux


@dataclass(frozen=True)
class ProblemLoss(Objective):
    r"""The loss of what the data set is about: :math:`\sum_i v_i \ell(x_i, y_i) / \sum_i v_i`.

    :math:`\ell` -> ``Problem.loss``: for classes cross-entropy, for numbers the squared error.
    :math:`v` -> ``batch.weight``, which is 0 for padding.
    """

    targets: ClassVar[tuple[str, ...] | None] = ()

    def __call__(self, out: Output, params: Tree, batch: Batch, carry: Carry) -> Loss:
        """The mean over the examples that are not padding."""
        own = carry.get("client", {})
        per_example = out.net.problem.losses(out.logits, batch.y, own)
        return (per_example * batch.weight).sum() / batch.weight.sum(), {}


@dataclass(frozen=True)
class CrossEntropy(Objective):
    r"""Mean cross-entropy: :math:`-\sum_i v_i \log p(y_i \mid x_i) / \sum_i v_i`.

    :math:`v` -> ``batch.weight``, which is 0 for padding. The same as :class:`ProblemLoss` where
    targets are classes; elsewhere it is refused, since torch would take them for shares.
    """

    targets: ClassVar[tuple[str, ...] | None] = ("classes",)

    def __call__(self, out: Output, params: Tree, batch: Batch, carry: Carry) -> Loss:
        """The mean over the examples that are not padding."""
        # A run looks before it starts, but cannot see every stage.
        check_fits(self, out.net.problem)
        per_example = CLASSES.losses(out.logits, batch.y, carry.get("client", {}))
        return (per_example * batch.weight).sum() / batch.weight.sum(), {}


def check_fits(objective: Objective, problem: AnyProblem) -> None:
    """Refuse a loss on data whose targets it cannot learn from."""
    advice = "use ProblemLoss, which is the loss of the data's own problem."
    for term in _terms(objective):
        name = type(term).__name__
        # Torch takes numbers for shares of classes, and would train something else without a word.
        is_undeclared_loss = term.targets is None and term.is_loss
        if is_undeclared_loss and problem.kind != CLASSES.kind:
            raise InputError(
                f"the objective has {name}, a loss that names no targets and so is for classes, "
                f"and the targets of the data are {problem.name}; if it can learn from these, "
                f'write targets = ("{problem.kind}",) in the class (is_loss = False if it only '
                f"adds to a loss), or {advice}"
            )
        if term.targets and problem.kind not in term.targets:
            raise InputError(
                f"the objective has {name}, which is for {' or '.join(term.targets)}, and the "
                f"targets of the data are {problem.name}; {advice}"
            )


def check_whole(objective: Objective) -> None:
    """Refuse to train by terms alone, or by what the clients of one method only can compute."""
    terms = _terms(objective)
    for term in terms:
        if term.only_in:
            raise InputError(
                f"the objective has {type(term).__name__}, which belongs to {term.only_in}: "
                f"clients of other methods do not have what it needs. {_advise_loss()}"
            )
    if not any(term.is_loss for term in terms):
        names = " + ".join(f"{type(term).__name__}()" for term in terms)
        raise InputError(
            f"the objective is {names}, which does not use the targets: it can only be added to a "
            f"loss, in Python, as ProblemLoss() + {names}. {_advise_loss()}"
        )


def _advise_loss() -> str:
    """What to take: the losses of this file, which the clients of every method can compute."""
    names = []
    for cls in Objective.__subclasses__():
        # Sum is made with +, not by its name.
        if cls.__module__ == __name__ and cls.is_loss and cls is not Sum:
            names.append(cls.__name__)
    return f"With --set, objective must be one of {', '.join(names)}."


@dataclass(frozen=True)
class Proximal(Objective):
    r"""Pull to a reference: :math:`\frac{\mu}{2} \lVert w - w_{ref} \rVert_2^2`.

    (FedProx, Li et al. 2020, Eq. 2.) :math:`w` -> ``params`` (without buffers),
    :math:`w_{ref}` -> ``carry[to]``.
    """

    is_loss: ClassVar[bool] = False
    mu: float = 0.01
    to: str = field(default="model", metadata=NOT_SETTABLE)

    def __post_init__(self) -> None:
        check(self.mu >= 0, "mu", self.mu, "0 or more")

    def __call__(self, out: Output, params: Tree, batch: Batch, carry: Carry) -> Loss:
        """Half mu times the squared distance."""
        # The carry's tree holds buffers as well; running statistics are not pulled.
        reference = trees.pick(carry[self.to], params)
        return 0.5 * self.mu * trees.sq_norm(trees.sub(params, reference)), {}


@dataclass(frozen=True)
class Linear(Objective):
    r"""A direction that is added to the gradient of every step: :math:`\langle w, c \rangle`.

    (SCAFFOLD, Karimireddy et al. 2020, Eq. 3; also in FedDyn and FedDC.) :math:`w` -> ``params``,
    :math:`c` -> ``carry[along]``, which is the gradient of this term.
    """

    is_loss: ClassVar[bool] = False
    along: str = field(default="correction", metadata=NOT_SETTABLE)

    def __call__(self, out: Output, params: Tree, batch: Batch, carry: Carry) -> Loss:
        """The inner product of parameters and direction."""
        direction = carry[self.along]
        products = [(w * direction[name]).sum() for name, w in params.items()]
        return torch.stack(products).sum(), {}


__getattr__ = find_old_names(__name__)
