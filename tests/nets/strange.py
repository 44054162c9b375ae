"""Small networks as people write them, none of them for fedgrove: inputs (3, 12), three classes."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

SHAPE = (3, 12)
CLASSES = 3


class Lstm(nn.Module):
    """The last step of an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 6, batch_first=True)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x.transpose(1, 2))[0][:, -1])


class Gru(nn.Module):
    """Two layers of GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(3, 6, num_layers=2, batch_first=True)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(x.transpose(1, 2))[0].mean(1))


class BiLstm(nn.Module):
    """An LSTM in both directions, behind a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, 4, 3, padding=1)
        self.lstm = nn.LSTM(4, 5, batch_first=True, bidirectional=True)
        self.head = nn.Linear(10, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        steps = torch.relu(self.conv(x)).transpose(1, 2)
        return self.head(self.lstm(steps)[0][:, -1])


class Transformer(nn.Module):
    """An encoder layer with multi-head attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 8)
        self.place = nn.Parameter(0.1 * torch.randn(12, 8))
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(x.transpose(1, 2)) + self.place).mean(1))


class Depthwise(nn.Module):
    """Depthwise-separable convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(3, 8, 1)
        self.depth = nn.Conv1d(8, 8, 3, padding=1, groups=8)
        self.point = nn.Conv1d(8, 6, 1)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.depth(torch.relu(self.first(x))))
        return self.head(torch.relu(self.point(h)).mean(2))


class Tied(nn.Module):
    """An encoder whose weight is used again, transposed, by a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(36, 8)
        self.head = nn.Linear(36, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return self.head(F.linear(torch.relu(self.encode(x)), self.encode.weight.t()) + x)


class TiedLayers(nn.Module):
    """Two layers that share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(36, 36)
        self.second = nn.Linear(36, 36)
        self.second.weight = self.first.weight
        self.head = nn.Linear(36, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.second(torch.relu(self.first(x.flatten(1))))))


class OneLinear(nn.Module):
    """Logistic regression: its only layer makes the classes."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(36, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.flatten(1))


class NormsOnly(nn.Module):
    """A norm and parameters of its own: no convolution, no linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(12)
        self.mix = nn.Parameter(torch.randn(3, 12, CLASSES) / 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bcl,clk->bk", self.norm(x), self.mix)


class Branch(nn.Module):
    """Takes one of two ways by what the data say."""

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Linear(36, 8)
        self.high = nn.Linear(36, 8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        h = self.high(x) if x.sum() > 0 else self.low(x)
        return self.head(torch.relu(h))


class InPlace(nn.Module):
    """Writes into its input."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(36, 8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x.add_(1)
        x.mul_(0.5)
        return self.head(torch.relu(self.fc(x.flatten(1))))


class BatchNormMlp(nn.Module):
    """BatchNorm1d between linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(36, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.norm(self.fc(x.flatten(1)))))


class GroupNormCnn(nn.Module):
    """GroupNorm behind a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, 8, 3, padding=1)
        self.norm = nn.GroupNorm(4, 8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.norm(self.conv(x))).mean(2))


class InstanceNormCnn(nn.Module):
    """InstanceNorm with scales and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, 8, 3, padding=1)
        self.norm = nn.InstanceNorm1d(8, affine=True, track_running_stats=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.norm(self.conv(x))).mean(2))


class LayerNormMlp(nn.Module):
    """LayerNorm between linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(36, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.norm(self.fc(x.flatten(1)))))


class Residual(nn.Module):
    """A sum of a convolution's input and output."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv1d(3, 6, 3, padding=1)
        self.one = nn.Conv1d(6, 6, 3, padding=1)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.stem(x))
        return self.head(torch.relu(h + self.norm(self.one(h))).mean(2))


class Dense(nn.Module):
    """Each layer sees all before it, side by side, as in DenseNet."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv1d(3, 4, 3, padding=1)
        self.two = nn.Conv1d(7, 4, 3, padding=1)
        self.head = nn.Linear(11, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([x, torch.relu(self.one(x))], 1)
        x = torch.cat([x, torch.relu(self.two(x))], 1)
        return self.head(x.mean(2))


class Buffers(nn.Module):
    """Constants as buffers: a float filter, and integers that choose inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(12))
        self.register_buffer("order", torch.tensor([2, 0, 1]))
        self.fc = nn.Linear(36, 8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, self.order] * self.window
        return self.head(torch.relu(self.fc(x.flatten(1))))


class Dropout2d(nn.Module):
    """Drops whole channels, with probability 0 here: engines draw in orders of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3, padding=1)
        self.drop = nn.Dropout2d(0.0)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(torch.relu(self.conv(x.unsqueeze(1)))).mean((2, 3)))


class Unused(nn.Module):
    """A layer that the forward pass never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(36, 8)
        self.spare = nn.Linear(8, 8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.fc(x.flatten(1))))


class Transposed(nn.Module):
    """Down, and up again by a transposed convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv1d(3, 6, 4, stride=4)
        self.up = nn.ConvTranspose1d(6, 4, 4, stride=4)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.up(torch.relu(self.down(x)))).mean(2))


class Frozen(nn.Module):
    """Random features that are not trained, under a head that is."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Linear(36, 12).requires_grad_(False)
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.features(x.flatten(1))))


class WeightNorm(nn.Module):
    """A weight as length times direction, by torch's parametrisation."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = parametrizations.weight_norm(nn.Linear(36, 8))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.fc(x.flatten(1))))


class Fourier(nn.Module):
    """Complex weights on the spectrum of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.filters = nn.Parameter(torch.randn(3, 7, dtype=torch.complex64))
        self.head = nn.Linear(21, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x.float()) * self.filters
        return self.head(spectrum.abs().flatten(1).to(self.head.weight.dtype))


class Pair(nn.Module):
    """Returns logits and features, as many nets of papers do."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(36, 8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.relu(self.fc(x.flatten(1)))
        return self.head(h), h


class Counter(nn.Module):
    """Counts its calls in a buffer, in place, and scales by the count."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(36, 8)
        self.head = nn.Linear(8, CLASSES)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.head(torch.relu(self.fc(x.flatten(1))) / self.calls)


class Running(nn.Module):
    """Keeps a moving mean of its features as an attribute that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(36, 8)
        self.head = nn.Linear(8, CLASSES)
        self.mean: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.fc(x.flatten(1)))
        now = h.detach().mean(0)
        self.mean = now if self.mean is None else 0.9 * self.mean + 0.1 * now
        return self.head(h - self.mean)


class WithNumpy(nn.Module):
    """Computes a feature with NumPy."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(36, 8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        level = torch.from_numpy(np.median(x.detach().numpy(), axis=1, keepdims=True))
        return self.head(torch.relu(self.fc(x) + level))


NETS: dict[str, type[nn.Module]] = {
    "lstm": Lstm,
    "gru": Gru,
    "bi-lstm": BiLstm,
    "transformer": Transformer,
    "depthwise": Depthwise,
    "tied, transposed": Tied,
    "tied layers": TiedLayers,
    "one linear": OneLinear,
    "norms only": NormsOnly,
    "branch on data": Branch,
    "in-place input": InPlace,
    "batch norm": BatchNormMlp,
    "group norm": GroupNormCnn,
    "instance norm": InstanceNormCnn,
    "layer norm": LayerNormMlp,
    "residual": Residual,
    "dense concat": Dense,
    "buffers": Buffers,
    "dropout2d": Dropout2d,
    "unused layer": Unused,
    "transposed conv": Transposed,
    "frozen features": Frozen,
    "weight norm": WeightNorm,
    "counter": Counter,
    "running mean": Running,
    "numpy": WithNumpy,
    "complex": Fourier,
    "returns a pair": Pair,
}
