"""HeteroFL's static BatchNorm: statistics of the shared model, collected when it is finished.

In training BatchNorm normalises by its batch, and keeps nothing: running statistics of networks of
different widths, on different data, describe no network. When the model of a round is there,
clients run it once over their training data, and the server averages the statistics of its layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from ... import trees
from ...core import Batch, Carry, Client, ExpectedPacket, ExpectedReport, Outcome, Packet, Task
from ...trees import Tree

if TYPE_CHECKING:
    from ...nets import Net

STATISTICS = "statistics"
"""The name of the packet with collected statistics, and of the exchange in which they are sent."""


def statistics_names(net: Net) -> tuple[str, ...]:
    """HeteroFL: the running statistics of the BatchNorms of a network that are in its tree."""
    names = []
    for name, part in net.module.named_modules():
        if not isinstance(part, _BatchNorm):
            continue
        for key in ("running_mean", "running_var"):
            full_name = f"{name}.{key}" if name else key
            if full_name in net.layout.buffers:
                names.append(full_name)
    return tuple(names)


@dataclass(frozen=True)
class BatchStatistics:
    r"""What Measure sums: mean and variance of a batch in front of every BatchNorm.

    .. math:: \mu = \frac{1}{n} \sum_i x_i, \quad \frac{1}{n - 1} \sum_i (x_i - \mu)^2

    over the examples of a batch and the positions of an image, by channel; every layer normalises
    by its batch. ``batches`` counts the batches.
    """

    def __call__(self, net: Net, params: Tree, batch: Batch, carry: Carry) -> Tree:
        """The statistics of one batch."""
        names = {}
        for name in statistics_names(net):
            names[id(params[name])] = name
        # Not in train mode: dropout is off, as in use, and no running statistics are written.
        with _Collecting(names, batch.weight) as mode:
            net(params, batch.x, train=False)
        return {**mode.found, "batches": torch.ones_like(batch.weight[0])}


class _Collecting(TorchFunctionMode):
    """Normalises by the batch, without padding, and keeps the statistics of each layer."""

    def __init__(self, names: Mapping[int, str], weight: Tensor) -> None:
        super().__init__()
        self.names = names
        self.weight = weight
        self.found: Tree = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # torch turns the mode off while this runs, so replacements can call torch's functions.
        if func is F.batch_norm:
            return self._batch_norm(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _batch_norm(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        if id(running_mean) not in self.names:
            # A frozen layer: its statistics are constants.
            return F.batch_norm(
                input, running_mean, running_var, weight, bias, training, momentum, eps
            )
        mean, variance, count = batch_moments(input, self.weight)
        self.found[self.names[id(running_mean)]] = mean
        self.found[self.names[id(running_var)]] = variance * count / (count - 1)
        return F.batch_norm(input, mean, variance, weight, bias, False, momentum, eps)


def batch_moments(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """HeteroFL: mean and variance of each channel (dimension 1), and of how many numbers.

    Args:
        x: The inputs of a layer, (batch, channels, ...).
        weight: 0 for examples that are padding, else 1.

    >>> x = torch.tensor([[1.0], [3.0], [99.0]])
    >>> batch_moments(x, torch.tensor([1.0, 1.0, 0.0]))
    (tensor([2.]), tensor([1.]), tensor(2.))
    """
    others = [dim for dim in range(x.dim()) if dim != 1]
    w = weight.to(x.dtype).view(-1, *[1] * (x.dim() - 1))
    positions = x[0, 0].numel()
    count = weight.sum().to(x.dtype) * positions
    mean = (x * w).sum(others) / count
    centred = x - mean.view(1, -1, *[1] * (x.dim() - 2))
    variance = (centred * centred * w).sum(others) / count
    return mean, variance, count


def send_statistics(carry: Carry, client: Client) -> Outcome:
    """HeteroFL: a client sends the mean of its batches' statistics; what it got, if it has none."""
    names = statistics_names(client.net)
    sums = carry[STATISTICS]
    if not sums:
        return Outcome({STATISTICS: Packet(trees.pick(carry["model"], names))})
    means = {}
    for name in names:
        means[name] = (sums[name] / sums["batches"]).to(carry["model"][name].dtype)
    return Outcome({STATISTICS: Packet(means)})


def expected_statistics(task: Task, net: Net) -> ExpectedReport:
    """HeteroFL: running statistics of every BatchNorm, of the form that they were sent in."""
    sent = trees.pick(task.send["model"].values, statistics_names(net))
    return ExpectedReport({STATISTICS: ExpectedPacket.of(sent)})
