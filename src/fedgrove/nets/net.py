"""A module as a pure function of its tree."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from ..errors import InputError
from ..trees import Tree
from .layout import Layout, tensors_of


@dataclass(frozen=True, eq=False)
class Output:
    """What a forward pass gives: logits, and the input of the last linear layer as ``(batch, numbers)``."""

    logits: Tensor
    features: Tensor | None
    net: Net
    train: bool


class Net:
    """A module as a pure function of its tree: ``net(tree, x, train)``.

    The module lends its structure and is given the tree's tensors for the time of the call, which costs a few
    microseconds where ``torch.func.functional_call`` takes some fifty; both mean the same, under ``vmap`` and ``grad``
    too. One net must not be called by two threads at once. A module that says ``channels_last = True`` is run with
    channels last in memory on a CPU; it must not ``view`` what a convolution gives.

    >>> net = Net(nn.Linear(2, 1), (2,))
    >>> net({"weight": torch.ones(1, 2), "bias": torch.zeros(1)}, torch.tensor([[3.0, 4.0]]), train=False).logits
    tensor([[7.]])
    """

    def __init__(self, module: nn.Module, shape: tuple[int, ...]) -> None:
        self.module = module.train(
            module.training
        )  # so that a train() of its own is called before the first step
        self.layout = Layout.of(module, shape)
        self._slots = _slots(module)
        self._last = bool(getattr(module, "channels_last", False))
        head = self.layout.head_layer
        self._head = module.get_submodule(head.name) if head else None

    def params(self) -> Tree:
        """The module's own parameters, then its float buffers: detached copies."""
        return {name: t.detach().clone() for name, t in tensors_of(self.module).items()}

    def __call__(self, tree: Mapping[str, Tensor], x: Tensor, train: bool) -> Output:
        """Run on ``x`` with the tensors of ``tree``, which may hold other names too.

        In train mode the running statistics of BatchNorm *in* ``tree`` *are updated in place*: pass your own copies.
        """
        seen: list[Tensor] = []
        # Registered for the call alone, so that the module stays picklable and holds on to no activations.
        hook = (
            self._head.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
            if self._head
            else None
        )
        try:
            logits = self.run(tree, x, train)
        finally:
            if hook:
                hook.remove()
        return Output(logits, seen[-1].flatten(1) if seen else None, self, train)

    def run(self, tree: Mapping[str, Tensor], x: Tensor, train: bool) -> Tensor:
        """The module's own output, while it holds the tensors of ``tree``."""
        if self.module.training != train:
            self.module.train(train)
        new = self._values(tree)
        if self._last and x.device.type == "cpu":
            x, new = channels_last(x), [channels_last(v) for v in new]
        old = [owner[key] for _, owner, key in self._slots]
        try:
            self._put(new)
            out: Tensor = self.module(x)
        finally:
            self._put(old)
        return out

    def filled(self, tree: Mapping[str, Tensor]) -> nn.Module:
        """A copy of the module that holds the tree's values, to be exported or run on its own.

        (``load_state_dict`` of a plain dict asks for the batch counters that our BatchNorms do without.)
        """
        module = copy.deepcopy(self.module)
        with torch.no_grad():
            for name, tensor in tensors_of(module).items():
                tensor.copy_(tree[name])
        return module

    def redraw(self, seed: int) -> Tree:
        """Other initial parameters: every layer that can draw its own does so anew, from ``seed`` alone."""
        module = copy.deepcopy(self.module)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            for part in module.modules():
                # Norm layers start at the same values every time.
                draw: Any = getattr(part, "reset_parameters", None)
                if draw and not isinstance(part, _NormBase):
                    draw()
        return {name: t.detach() for name, t in tensors_of(module).items()}

    def _values(self, tree: Mapping[str, Tensor]) -> list[Any]:
        try:
            return [tree[name] for name, _, _ in self._slots]
        except KeyError as error:
            raise InputError(
                f"the tree has no '{error.args[0]}'; it must hold every parameter and buffer of the net: "
                f"{', '.join(self.layout.shapes)}."
            ) from None

    def _put(self, values: Sequence[Any]) -> None:
        for (_, owner, key), value in zip(self._slots, values, strict=True):
            owner[key] = value


def channels_last(v: Tensor) -> Tensor:
    """Images or filters with their channels last in memory, in which torch's CPU kernels are faster; all else as it is.

    (``contiguous(memory_format=...)`` does it too, but not under vmap. One channel is last and first: there the strides
    must say so, since kernels go by them.)
    """
    if v.dim() != 4:
        return v
    last = v.squeeze(1).unsqueeze(3) if v.shape[1] == 1 else v.permute(0, 2, 3, 1).contiguous()
    return last.permute(0, 3, 1, 2)


def _slots(module: nn.Module) -> list[tuple[str, dict[str, Any], str]]:
    """Where each tensor lives: (name in the tree, the dict that holds it, its key there).

    A tensor that several layers share has one name and several places.
    """
    label = {id(t): name for name, t in tensors_of(module).items()}
    owners = [d for m in module.modules() for d in (m._parameters, m._buffers)]
    return [
        (label[id(t)], owner, key) for owner in owners for key, t in owner.items() if id(t) in label
    ]
