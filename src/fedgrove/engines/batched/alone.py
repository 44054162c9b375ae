"""Networks that cannot be run for many clients at once: found by trying, trained one by one."""

from __future__ import annotations

import copy
import warnings

import torch
from torch import Tensor
from torch.func import grad, vmap

from ... import nets
from ...core import Measure, Train
from ...nets import Net
from ...seeds import single_thread
from ...trees import Tree
from ..work import CLIENT_FAILURES, crashed, examples_seen, worked
from .stacking import Job


def can_stack(net: Net, device: torch.device) -> bool:
    """Whether a network gives under ``vmap`` what it gives alone, and padding does no harm.

    The built-in ones do. A forward pass that branches on data, or calls what ``vmap`` has no rule
    for, does not; nor one that mixes the examples of a batch by itself: short batches are padded.
    """
    if nets.is_built_in(net.module):
        return True
    generator = torch.Generator().manual_seed(0)
    # A copy: what a failed trial leaves in a module would be there in training.
    net = copy.deepcopy(net)
    start = net.params()
    like = next(iter(start.values()))
    x = torch.randn((2, 3, *net.shape), generator=generator).to(like.dtype).to(device)
    # Two clients with unlike weights: a client that reads the other's must show.
    tree = {k: torch.stack([v, v + 0.1]).to(device) for k, v in start.items()}
    try:
        with torch.autocast(device.type, enabled=False), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # Twice: what the first call leaves behind may be what the second cannot take.
            _try_gradient(net, tree, x)
            _try_gradient(net, tree, x)
            return _agrees(net, tree, x) and not _mixes_examples(net, tree, x)
    except torch.OutOfMemoryError:
        # A RuntimeError too, but it says nothing about the network.
        raise
    except Exception:  # of whatever kind, in code that is not ours
        return False


def _try_gradient(net: Net, tree: Tree, x: Tensor) -> None:
    """Raises where a training step would."""

    def loss(params: Tree, buffers: Tree, x: Tensor) -> Tensor:
        copies = {k: v.clone() for k, v in buffers.items()}
        return net.run(params | copies, x, True).sum()

    params = {k: tree[k] for k in net.layout.params}
    buffers = {k: tree[k] for k in net.layout.buffers}
    vmap(grad(loss), randomness="different")(params, buffers, x)


def _agrees(net: Net, tree: Tree, x: Tensor) -> bool:
    """Whether two clients at once get the logits of each alone, in eval mode."""

    def forward(tree: Tree, x: Tensor) -> Tensor:
        return net.run(tree, x, False)

    with torch.no_grad():
        together = vmap(forward, randomness="different")(tree, x)
        alone = torch.stack([forward({k: v[i] for k, v in tree.items()}, x[i]) for i in range(2)])
    return _close(together, alone)


def _mixes_examples(net: Net, tree: Tree, x: Tensor) -> bool:
    """Whether an example's logits depend on the others of its batch, but for BatchNorm."""
    modes = (False,) if net.layout.batch_norm else (False, True)
    for train in modes:

        def logits(x: Tensor, train: bool = train) -> Tensor:
            own = {k: v[0].clone() for k, v in tree.items()}
            with torch.no_grad():
                return net.run(own, x, train)

        whole = logits(x[0])
        # With dropout no two runs agree; eval mode has been compared already.
        is_random = train and not torch.equal(whole, logits(x[0]))
        if not is_random and not _close(whole[:2], logits(x[0, :2])):
            return True
    return False


def _close(one: Tensor, other: Tensor) -> bool:
    rounding = torch.finfo(one.dtype).eps ** 0.5
    return torch.allclose(one, other, rtol=rounding, atol=rounding)


def run_alone(job: Job, number: int) -> int:
    """A Train or Measure stage of one client, as the serial engine does it: to the bit.

    What it computed, in multiply-accumulates, is for the caller to count.
    """
    place, stage = job.work.stages[number]
    assert isinstance(stage, Train | Measure)
    try:
        with single_thread():
            job.carry, per_example = worked(job.run, stage, job.carry, job.client, place)
    except CLIENT_FAILURES as error:
        job.lost = crashed(job.task, error)
        return 0
    return per_example * examples_seen(job.run, stage, job.client)
