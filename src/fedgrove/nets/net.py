"""A module as a pure function of its tree."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from .. import gpu_copies
from ..errors import InputError
from ..problems import CLASSES, AnyProblem
from ..trees import Tree
from . import norms
from .layout import Layout, tensors_of
from .state import place_of, put_back


@dataclass(frozen=True, eq=False)
class Output:
    """Logits, and the input of the last linear layer as ``(batch, numbers)``."""

    logits: Tensor
    features: Tensor | None
    net: Net
    train: bool

    @property
    def nets(self) -> Mapping[str, Net]:
        """All networks of the method by name: a teacher's is ``out.nets["teacher"]``."""
        return self.net.nets

    @property
    def whole(self) -> Net:
        """The network in full width, where it is trained without some of its channels."""
        return self.net.whole


class Net:
    """A module as a pure function of its tree: ``net(tree, x, train)``.

    The module contributes its structure and is given the tree's tensors for the duration of the
    call. That costs a few microseconds where ``torch.func.functional_call`` takes some fifty; both
    mean the same, under ``vmap`` and ``grad`` too. One net must not be called by two threads at
    once. A module with ``channels_last = True`` runs with channels last in memory on a CPU; it
    must not ``view`` the output of a convolution.

    >>> net = Net(nn.Linear(2, 1), (2,))
    >>> tree = {"weight": torch.ones(1, 2), "bias": torch.zeros(1)}
    >>> net(tree, torch.tensor([[3.0, 4.0]]), train=False).logits
    tensor([[7.]])
    """

    def __init__(
        self,
        module: nn.Module,
        shape: tuple[int, ...],
        problem: AnyProblem = CLASSES,
        whole: ref[Net] | None = None,
    ) -> None:
        self.module = module
        self._fixed_norms = norms.fixed(module)
        # A module that overrides train() gets to run it before the first step.
        self._set_mode(module.training)
        self.shape = tuple(shape)
        """The shape of one input, without the batch dimension."""
        self.problem = problem
        """What its outputs are for: where objectives find the loss."""
        self.layout = Layout.of(module, shape)
        self._slots, self._constants = _slots(module)
        self._elsewhere: dict[tuple[torch.device, torch.dtype], list[Any]] = {}
        self._state = [place_of(module, name) for name in self.layout.state]
        self._channels_last = bool(getattr(module, "channels_last", False))
        head = self.layout.head_layer
        self._head = None if head is None else module.get_submodule(head.name)
        self._nets: Mapping[str, Net] | None = None
        self._whole = whole
        self._blank: Tree = {}

    @property
    def whole(self) -> Net:
        """The network in full width: itself, unless it lacks channels of another one."""
        if self._whole is None:
            return self
        # Without its owner a smaller network is one like any other.
        return self._whole() or self

    @property
    def nets(self) -> Mapping[str, Net]:
        """All networks of a method by name; ``model`` is the run's own. A run fills them in."""
        if self.whole is not self:
            return self.whole.nets
        # Not stored: a network that holds itself is not freed at once.
        return self._nets or {"model": self}

    @nets.setter
    def nets(self, nets: Mapping[str, Net]) -> None:
        self._nets = nets

    def params(self) -> Tree:
        """The module's own parameters, then its float buffers: detached copies."""
        return {name: t.detach().clone() for name, t in tensors_of(self.module).items()}

    def blank(self) -> Tree:
        """The names, types and shapes of :meth:`params` without any numbers.

        For whoever only wants to know what a tree looks like, as for each report: nothing is
        copied. (The tensors are on torch's device "meta".)
        """
        like = {name: owner[key] for name, owner, key in self._slots}
        # A module may have been moved to another type.
        is_known = bool(self._blank) and all(
            self._blank[name].dtype == t.dtype for name, t in like.items()
        )
        if not is_known:
            names = tensors_of(self.module)
            self._blank = {name: torch.empty_like(names[name], device="meta") for name in names}
        return dict(self._blank)

    def constants(self) -> Tree:
        """What stays in the module because it is frozen: detached copies.

        Parameters without a gradient, and the running statistics of norm layers that have none.
        With them a tree is the whole model.
        """
        frozen = set(self.layout.frozen)
        fixed = {id(buffer) for part in self._fixed_norms for buffer in part.buffers()}
        constants = {}
        for name, parameter in self.module.named_parameters():
            if name in frozen:
                constants[name] = parameter.detach().clone()
        for name, buffer in self.module.named_buffers():
            if id(buffer) in fixed:
                constants[name] = buffer.detach().clone()
        return constants

    def __call__(self, tree: Mapping[str, Tensor], x: Tensor, train: bool) -> Output:
        """Run on ``x`` with the tensors of ``tree``, which may hold other names too.

        In train mode the running statistics of BatchNorm *in* ``tree`` *are updated in place*:
        pass your own copies.
        """
        head_inputs: list[Tensor] = []
        hook = None
        if self._head is not None:
            # Registered for this call only, so that the module stays picklable and keeps no
            # activations alive.
            hook = self._head.register_forward_pre_hook(lambda _, args: head_inputs.append(args[0]))
        try:
            logits = self.run(tree, x, train)
        finally:
            if hook is not None:
                hook.remove()
        features = None
        if head_inputs:
            features = head_inputs[-1].flatten(1)
        return Output(logits, features, self, train)

    def run(self, tree: Mapping[str, Tensor], x: Tensor, train: bool) -> Tensor:
        """The module's own output, while it holds the tensors of ``tree``."""
        if self.module.training != train:
            self._set_mode(train)
        new = self._values(tree)
        if self.layout.writes_input:
            # Its caller may need the input again, and under grad or vmap must not see it change.
            x = x.clone()
        if self._channels_last and x.device.type == "cpu":
            x = channels_last(x)
            new = [channels_last(value) for value in new]
        old = [owner[key] for _, owner, key in self._slots]
        old_constants: list[Any] = []
        if self._constants and not _are_alike(new[0], old[0]):
            old_constants = [owner[key] for owner, key in self._constants]
        try:
            self._put(new)
            if old_constants:
                self._put_constants(self._constants_like(new[0], old[0].dtype))
            if self._state:
                with put_back(self._state):
                    output: Tensor = self.module(x)
            else:
                output = self.module(x)
        finally:
            self._put(old)
            if old_constants:
                self._put_constants(old_constants)
        if train and self.layout.buffers:
            # BatchNorm moves its statistics, and torch does not count that as a write.
            gpu_copies.drop_copies(tree[name] for name in self.layout.buffers)
        return output

    def filled(self, tree: Mapping[str, Tensor]) -> nn.Module:
        """A copy of the module that holds the tree's values, to be exported or run on its own.

        (``load_state_dict`` of a plain dict asks for the batch counters that our BatchNorms do
        without.)
        """
        module = copy.deepcopy(self.module)
        with torch.no_grad():
            for name, tensor in tensors_of(module).items():
                tensor.copy_(tree[name])
        return module

    def redraw(self, seed: int) -> Tree:
        """Other initial parameters: each layer that can reset itself does so, from ``seed``."""
        module = copy.deepcopy(self.module)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            for part in module.modules():
                reset: Any = getattr(part, "reset_parameters", None)
                # Norm layers start at the same values every time.
                if reset is not None and not isinstance(part, _NormBase):
                    reset()
        return {name: t.detach() for name, t in tensors_of(module).items()}

    def _values(self, tree: Mapping[str, Tensor]) -> list[Any]:
        try:
            return [tree[name] for name, _, _ in self._slots]
        except KeyError as error:
            raise InputError(
                f"the tree has no '{error.args[0]}'; it must hold every parameter and buffer of "
                f"the net: {', '.join(self.layout.shapes)}."
            ) from None

    def _set_mode(self, train: bool) -> None:
        self.module.train(train)
        for part in self._fixed_norms:
            part.eval()

    def _constants_like(self, new: Tensor, own_dtype: torch.dtype) -> list[Any]:
        """What is not in the tree, on the device of ``new`` and, if it has the net's own type, in
        that of ``new``.

        Copied once for each device and type: a CUDA graph reads them where they are.
        """
        where = (new.device, new.dtype)
        if where not in self._elsewhere:
            copies = []
            for owner, key in self._constants:
                value = owner[key].detach()
                dtype = new.dtype if value.dtype == own_dtype else value.dtype
                copies.append(value.to(new.device, dtype))
            self._elsewhere[where] = copies
        return self._elsewhere[where]

    def _put_constants(self, values: Sequence[Any]) -> None:
        for (owner, key), value in zip(self._constants, values, strict=True):
            owner[key] = value

    def _put(self, values: Sequence[Any]) -> None:
        for (_, owner, key), value in zip(self._slots, values, strict=True):
            owner[key] = value


def channels_last(v: Tensor) -> Tensor:
    """Images or filters with channels last in memory, where torch's CPU kernels are faster.

    Tensors that do not have four dimensions are returned as they are.
    """
    if v.dim() != 4:
        return v
    # `contiguous(memory_format=...)` does the same, but not under vmap.
    if v.shape[1] == 1:
        # A single channel is both first and last. Kernels choose by the strides, so these must
        # be those of channels last: no copy, only another view.
        last = v.squeeze(1).unsqueeze(3)
    else:
        last = v.permute(0, 2, 3, 1).contiguous()
    return last.permute(0, 3, 1, 2)


def _are_alike(one: Tensor, other: Tensor) -> bool:
    return one.device == other.device and one.dtype == other.dtype


def _slots(
    module: nn.Module,
) -> tuple[list[tuple[str, dict[str, Any], str]], list[tuple[dict[str, Any], str]]]:
    """Where each tensor is stored: (name in the tree, the dict that holds it, its key there).

    A tensor that several layers share has one name and several places. Then where those are that
    are not in the tree: frozen parameters, and buffers that are no floats or that no file holds.
    """
    name_by_id = {id(t): name for name, t in tensors_of(module).items()}
    slots: list[tuple[str, dict[str, Any], str]] = []
    constants: list[tuple[dict[str, Any], str]] = []
    for part in module.modules():
        owners: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
        for owner in owners:
            for key, tensor in owner.items():
                if id(tensor) in name_by_id:
                    slots.append((name_by_id[id(tensor)], owner, key))
                elif tensor is not None:
                    constants.append((owner, key))
    return slots, constants
