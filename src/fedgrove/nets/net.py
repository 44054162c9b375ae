"""A module as a pure function of its tree (its parameters and float buffers)."""

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
from .forward_state import locate, restore_state
from .layout import Layout, frozen_parameters, named_tensors


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
    call. That takes a few microseconds where ``torch.func.functional_call`` takes about fifty; the
    results are equal, under ``vmap`` and ``grad`` too. One net must not be called by two threads at
    once.

    Args:
        module: The network. One with ``channels_last = True`` runs with channels last in memory on
            a CPU; it must not ``view`` the output of a convolution.
        shape: The shape of one input, without the batch dimension.
        problem: What the outputs are for: where objectives find the loss.
        whole: The network in full width, if this one lacks some of its channels.

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
        self._fixed_norms = norms.find_fixed_norms(module)
        # A module that overrides train() gets to run it before the first step.
        self._set_mode(module.training)
        self.shape = tuple(shape)
        self.problem = problem
        self.layout = Layout.of(module, shape)
        self._names, self._slots, self._constants = _find_slots(module)
        # Copies of the constants for trees on another device or of another type.
        self._elsewhere: dict[tuple[torch.device, torch.dtype], list[Any]] = {}
        self._state = [locate(module, name) for name in self.layout.state]
        self._channels_last = bool(getattr(module, "channels_last", False))
        head = self.layout.head_layer
        self._head = None if head is None else module.get_submodule(head.name)
        self._nets: Mapping[str, Net] | None = None
        # A weak reference: the full net caches its small nets, and neither may keep the other.
        self._whole = whole
        self._blank: Tree = {}
        self._blank_dtypes: list[torch.dtype] | None = None

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
        # Not stored: a network that refers to itself is not freed at once.
        return self._nets or {"model": self}

    @nets.setter
    def nets(self, nets: Mapping[str, Net]) -> None:
        self._nets = nets

    def params(self) -> Tree:
        """Return copies of the module's own parameters, then of its float buffers."""
        copies = {}
        for name, t in named_tensors(self.module).items():
            copies[name] = t.detach().clone()
        return copies

    def blank(self) -> Tree:
        """Return the names, types and shapes of :meth:`params` without any numbers.

        Nothing is copied: the tensors are on torch's device "meta". This describes what a report
        must look like.
        """
        # A module may have been moved to another type.
        dtypes = []
        for owner, key in self._slots:
            dtypes.append(owner[key].dtype)
        if dtypes != self._blank_dtypes:
            self._blank_dtypes = dtypes
            self._blank = {}
            for name, tensor in named_tensors(self.module).items():
                self._blank[name] = torch.empty_like(tensor, device="meta")
        return dict(self._blank)

    def constants(self) -> Tree:
        """Return copies of what is frozen, and so is not in a tree.

        Parameters without a gradient, and the running statistics of norm layers that have none.
        A tree and these are the whole model.
        """
        fixed = {id(buffer) for part in self._fixed_norms for buffer in part.buffers()}
        constants = {}
        for name, parameter in frozen_parameters(self.module).items():
            constants[name] = parameter.detach().clone()
        for name, buffer in self.module.named_buffers():
            if id(buffer) in fixed:
                constants[name] = buffer.detach().clone()
        return constants

    def __call__(self, tree: Mapping[str, Tensor], x: Tensor, train: bool) -> Output:
        """Run on a batch with the tensors of a tree.

        Args:
            tree: Every parameter and buffer of the net; other names are ignored. In train mode the
                running statistics of BatchNorm *in the tree* are updated in place: pass copies.
            x: Inputs, (batch, *shape).
            train: Whether to run in train mode.
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
        """Return the module's own output, while it has the tensors of ``tree``."""
        if self.module.training != train:
            self._set_mode(train)
        new = self._values(tree)
        if self.layout.writes_input:
            # The caller may need the input again, and under grad or vmap must not see it change.
            x = x.clone()
        if self._channels_last and x.device.type == "cpu":
            x = channels_last(x)
            new = [channels_last(value) for value in new]
        old = [owner[key] for owner, key in self._slots]
        old_constants: list[Any] = []
        if self._constants and not _are_alike(new[0], old[0]):
            old_constants = [owner[key] for owner, key in self._constants]
        try:
            _put(self._slots, new)
            if old_constants:
                _put(self._constants, self._constants_like(new[0], old[0].dtype))
            if self._state:
                with restore_state(self._state):
                    output: Tensor = self.module(x)
            else:
                output = self.module(x)
        finally:
            _put(self._slots, old)
            if old_constants:
                _put(self._constants, old_constants)
        if train and self.layout.buffers:
            # BatchNorm updates its statistics, and torch does not count that as a write.
            gpu_copies.drop_copies(tree[name] for name in self.layout.buffers)
        return output

    def filled(self, tree: Mapping[str, Tensor]) -> nn.Module:
        """Return a copy of the module with the tree's values, to be exported or run by itself.

        (``load_state_dict`` of a plain dict requires the batch counters that our BatchNorms do
        without.)
        """
        module = copy.deepcopy(self.module)
        with torch.no_grad():
            for name, tensor in named_tensors(module).items():
                tensor.copy_(tree[name])
        return module

    def redraw(self, seed: int) -> Tree:
        """Draw other initial parameters from ``seed``, in each layer that can reset itself."""
        module = copy.deepcopy(self.module)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            for part in module.modules():
                reset: Any = getattr(part, "reset_parameters", None)
                # Norm layers start at the same values every time.
                if reset is not None and not isinstance(part, _NormBase):
                    reset()
        return {name: t.detach() for name, t in named_tensors(module).items()}

    def _values(self, tree: Mapping[str, Tensor]) -> list[Any]:
        try:
            return [tree[name] for name in self._names]
        except KeyError as error:
            raise InputError(
                f"the tree has no '{error.args[0]}'; it must contain every parameter and buffer of "
                f"the net: {', '.join(self.layout.shapes)}."
            ) from None

    def _set_mode(self, train: bool) -> None:
        self.module.train(train)
        for part in self._fixed_norms:
            part.eval()

    def _constants_like(self, new: Tensor, own_dtype: torch.dtype) -> list[Any]:
        """Return what is not in the tree, on the device of ``new``; floats in its type.

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


def channels_last(v: Tensor) -> Tensor:
    """Lay images or filters out with channels last in memory, where CPU kernels are faster.

    Tensors that do not have four dimensions are returned unchanged.
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


Slot = tuple[dict[str, Any], str]
"""Where a module stores a tensor: a dictionary of the module, and the key there."""


def _put(slots: Sequence[Slot], values: Sequence[Any]) -> None:
    """Put tensors into the places of a module's parameters and buffers."""
    for (owner, key), value in zip(slots, values, strict=True):
        owner[key] = value


def _find_slots(module: nn.Module) -> tuple[list[str], list[Slot], list[Slot]]:
    """Find where the tensors of a module are stored.

    Returns:
        The names of the tree's tensors and their slots, where a tensor that several layers share is
        there several times; and the slots of what is not in the tree: frozen parameters, and
        buffers that are not floats or not in the ``state_dict``.
    """
    name_by_id = {id(t): name for name, t in named_tensors(module).items()}
    names: list[str] = []
    slots: list[Slot] = []
    constants: list[Slot] = []
    for part in module.modules():
        owners: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
        for owner in owners:
            for key, tensor in owner.items():
                if id(tensor) in name_by_id:
                    names.append(name_by_id[id(tensor)])
                    slots.append((owner, key))
                elif tensor is not None:
                    constants.append((owner, key))
    return names, slots, constants
