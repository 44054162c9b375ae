"""The optimiser's step of many clients in one kernel per tensor, in place: written in Triton.

In single operations a step of Adam reads and writes the parameters a dozen times, and takes as long
as the gradients of a small network. Here every number is read once and written once. Learning rates
and the like may differ from client to client; a client that has done its steps is left as it is.

The equations are those of :mod:`fedgrove.parts.local`, with which tests compare them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core import Carry
from ...parts import local
from ...parts.local import SGD, Adam
from ...trees import Tree

BLOCK = 1024


@triton.jit
def _step(
    w,
    g,
    first,
    second,
    mask,
    active,
    scale,
    weight_decay,
    lr,
    beta1,
    beta2,
    eps,
    correction1,
    correction2,
    numbers,
    mask_row,
    number_stride,
    IS_ADAM: tl.constexpr,
    HAS_MOMENTUM: tl.constexpr,
    HAS_DECAY: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_ACTIVE: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A block of one client's numbers: w moves, and so does what the optimiser remembers.

    Adam remembers both moments, SGD its velocity as the first one; ``beta1`` is then its momentum.
    """
    client = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = place < numbers
    if HAS_ACTIVE:
        here = here & tl.load(active + client)
    at = client * numbers + place
    weight = tl.load(w + at, mask=here)
    gradient = tl.load(g + at, mask=here)
    if HAS_MASK:
        kept = tl.load(mask + client * mask_row + place, mask=here)
        gradient = gradient * kept.to(gradient.dtype)
    if HAS_SCALE:
        gradient = gradient * tl.load(scale + client)
    if HAS_DECAY:
        gradient = gradient + tl.load(weight_decay + client * number_stride) * weight
    if IS_ADAM:
        b1 = tl.load(beta1 + client * number_stride)
        b2 = tl.load(beta2 + client * number_stride)
        m = b1 * tl.load(first + at, mask=here) + (1 - b1) * gradient
        v = b2 * tl.load(second + at, mask=here) + (1 - b2) * gradient * gradient
        root = tl.sqrt(v / tl.load(correction2 + client)) + tl.load(eps + client * number_stride)
        step = tl.load(lr + client) * (m / tl.load(correction1 + client)) / root
        tl.store(first + at, m, mask=here)
        tl.store(second + at, v, mask=here)
    else:
        if HAS_MOMENTUM:
            velocity = tl.load(first + at, mask=here)
            gradient = tl.load(beta1 + client * number_stride) * velocity + gradient
            tl.store(first + at, gradient, mask=here)
        step = tl.load(lr + client) * gradient
    tl.store(w + at, weight - step, mask=here)


def can_update(stage: Any) -> bool:
    """Return whether a fused GPU kernel knows the optimiser of a stage.

    Its numbers are tensors, with one value per client.

    A number that is 0 stays a plain one; of Adam's, only the weight decay may be.
    """
    optimiser = local.recipe(stage).optimiser
    if type(optimiser) is SGD:
        return isinstance(optimiser.lr, Tensor)
    if type(optimiser) is not Adam:
        return False
    numbers = (optimiser.lr, optimiser.beta1, optimiser.beta2, optimiser.eps)
    return all(isinstance(number, Tensor) for number in numbers)


def update(
    stage: Any, carry: Carry, grads: Tree, state: Tree, clients: int, active: Tensor | None
) -> None:
    """Do one optimiser step of stacked clients in a fused kernel, in place.

    It changes ``carry[stage.end]`` and ``state`` of the first clients.

    ``stage`` holds a number per client in place of each float; ``carry`` and ``grads`` hold the
    first ``clients``, ``state`` all. ``active``: which clients move; None: all.
    """
    recipe = local.recipe(stage)
    optimiser: Any = recipe.optimiser
    tree = carry[stage.end]
    mask = carry.get(stage.mask_name, {})
    lr = local.learning_rate(recipe, carry).contiguous()
    grads = {name: grad.contiguous() for name, grad in grads.items()}
    scale = None
    if recipe.clip is not None:
        grads = {k: g * mask[k] if k in mask else g for k, g in grads.items()}
        scale = _clip_scales(grads, recipe.clip)
    is_adam = isinstance(optimiser, Adam)
    has_momentum = not is_adam and isinstance(optimiser.momentum, Tensor)
    has_decay = isinstance(optimiser.weight_decay, Tensor)
    # What a kernel does not read still needs an address.
    per_client = dict.fromkeys(("beta1", "beta2", "eps", "correction1", "correction2"), lr)
    remembered: list[Tensor] = []
    if is_adam:
        t = state["t"][:clients]
        # A client that is done stays at its number of steps.
        t += 1 if active is None else active
        per_client["beta1"] = optimiser.beta1
        per_client["beta2"] = optimiser.beta2
        per_client["eps"] = optimiser.eps
        per_client["correction1"] = (1 - optimiser.beta1**t).contiguous()
        per_client["correction2"] = (1 - optimiser.beta2**t).contiguous()
        remembered = [state["m"], state["v"]]
    elif has_momentum:
        per_client["beta1"] = optimiser.momentum
        remembered = [state["v"]]
    begin = 0
    for name, grad in grads.items():
        w = tree[name]
        numbers = grad[0].numel()
        kept = mask.get(name)
        blocks = [_block(vectors, begin, numbers) for vectors in remembered]
        first, second, *_ = (*blocks, w, w)
        _step[triton.cdiv(numbers, BLOCK), clients](
            w,
            grad,
            first,
            second,
            w if kept is None else kept,
            w if active is None else active,
            w if scale is None else scale,
            optimiser.weight_decay if has_decay else w,
            lr,
            numbers=numbers,
            mask_row=0 if kept is None else kept.stride(0),
            number_stride=optimiser.lr.stride(0),
            IS_ADAM=is_adam,
            HAS_MOMENTUM=has_momentum,
            HAS_DECAY=has_decay,
            HAS_MASK=kept is not None,
            HAS_ACTIVE=active is not None,
            HAS_SCALE=scale is not None,
            BLOCK=BLOCK,
            **per_client,
        )
        begin += numbers


def _block(vectors: Tensor, begin: int, numbers: int) -> Tensor:
    """The room for one tensor of all clients in what the optimiser remembers, (K, P).

    Tensor after tensor, and not client after client: each is then in one piece. A state that is
    kept from round to round comes in rows, one per client (:func:`.steps.to_blocks`).
    """
    clients = len(vectors)
    return vectors.view(-1)[begin * clients : (begin + numbers) * clients]


def _clip_scales(grads: Tree, clip: Any) -> Tensor:
    """For each client the factor that shortens its gradient, as :func:`local.clip_scale`."""
    squares = []
    for grad in grads.values():
        squares.append(torch.linalg.vector_norm(grad.reshape(len(grad), -1), dim=1).square())
    norm = torch.stack(squares).sum(0).sqrt()
    return torch.clamp_max(clip / norm.clamp_min(1e-12), 1.0).contiguous()
