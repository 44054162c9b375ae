"""What a finished run holds of one client: its model, its data, and how its inputs were standardised."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import nets
from ..channels.shrink import cut, structured
from ..config.experiment import Experiment
from ..config.toml import from_toml, read_words
from ..data import ClientData, Federation
from ..errors import InputError, check
from ..methods import FedAvg
from ..nets import Net
from ..runs.folder import RunFolder
from ..runs.result import Result
from ..runs.store import read_tree
from ..trees import Tree


@dataclass(frozen=True)
class Scale:
    """How a client's inputs were standardised, channel by channel: (x - mean) / deviation."""

    mean: tuple[float, ...]
    deviation: tuple[float, ...]


@dataclass(frozen=True, eq=False)
class Source:
    """A finished run, opened: its figures, its network, its data as it saw them and as they were before."""

    folder: RunFolder
    summary: Mapping[str, Any]
    experiment: Experiment
    net: Net
    federation: Federation
    raw: Federation | None
    """The same without standardisation; None where it is the same, or not known."""
    files: Mapping[int, str]

    def data(self, client: int) -> ClientData:
        """What a client holds, as its model saw it."""
        return self.federation.clients[client]

    def tree(self, client: int) -> Tree:
        """A client's own model, in full width."""
        if client not in self.files:
            raise InputError(
                f"there is no client {client} in {self.folder.path}; its {len(self.files)} clients are "
                f"{min(self.files)} to {max(self.files)}."
            )
        path = self.folder.path / "models" / self.files[client]
        try:
            tree = {k: v.float() for k, v in read_tree(path).items()}
        except Exception as error:  # whatever safetensors says of a file that is not one
            raise InputError(
                f"{path} cannot be read ({str(error).splitlines()[0]}); run it again."
            ) from None
        for name, shape in self.net.layout.shapes.items():
            given = tuple(tree[name].shape) if name in tree else "missing"
            check(
                given == shape,
                f"'{name}' of {path}",
                given,
                f"{shape}, as in the net that config.toml names",
            )
        return tree

    def scale(self, client: int) -> Scale | None:
        """How the client's inputs were standardised; None if they were not, or nobody can tell."""
        return (
            scale_between(self.raw.clients[client].train.x, self.data(client).train.x)
            if self.raw
            else None
        )


def opened(
    run: str | Path | Result | RunFolder,
    data: Federation | None = None,
    net: nn.Module | None = None,
    data_dir: str | Path | None = None,
) -> Source:
    """A finished run with its data rebuilt from config.toml; what was made in Python is handed over again."""
    folder = run.folder if isinstance(run, Result) else run if isinstance(run, RunFolder) else None
    folder = folder or RunFolder.open(Path(str(run)))
    summary = folder.summary
    if summary is None:
        raise InputError(
            f"the run in {folder.path} is not finished, so its clients have no models yet; "
            f"go on with: fedgrove resume {folder.path}"
        )
    for word, given in (("data", data), ("net", net)):
        said = str(read_words(folder.config).get(word, ""))
        if given is None and said.startswith("<"):
            raise InputError(
                f"the run's {word} was made in Python ({said}); export it from there: fedgrove.export_model(run, {word}=...)"
            )
    # Any method will do: a model that is finished does not ask how it was trained.
    experiment = from_toml(folder.config, data=data, net=net, method=FedAvg())
    federation = experiment.federation(data_dir)
    named = experiment.standardise and not isinstance(experiment.data, Federation)
    raw = replace(experiment, standardise=False).federation(data_dir) if named else None
    spec = experiment.net if experiment.net is not None else federation.defaults.net
    module = nets.build(spec, federation.shape, federation.classes, experiment.seed)
    return Source(
        folder, summary, experiment, Net(module, federation.shape), federation, raw, _index(folder)
    )


def _index(folder: RunFolder) -> dict[int, str]:
    path = folder.path / "models" / "index.json"
    if not path.is_file():
        raise InputError(
            f"{folder.path} has no models/index.json, so nobody knows whose model is whose; run it again."
        )
    return {int(k): str(name) for k, name in json.loads(path.read_text()).items()}


def shrunk(net: Net, tree: Mapping[str, Tensor], align: int = 1) -> tuple[Net, Tree]:
    """The net and the tree without the channels of which every parameter is exactly 0; zeros elsewhere stay zeros.

    Such a channel makes nothing and nothing reads it, so no mask need be kept: the outputs are the same. With ``align``
    some of them stay, as many as make a layer's channels a multiple of it: kernels often run faster on such widths.

    >>> net = Net(nn.Sequential(nn.Linear(1, 3), nn.ReLU(), nn.Linear(3, 1)), (1,))
    >>> mask = net.layout.expand({"0": torch.tensor([True, False, True])})
    >>> small, tree = shrunk(net, {k: v * mask.get(k, 1) for k, v in net.params().items()})
    >>> small.layout.size, net.layout.size
    (7, 10)
    """
    thin = structured(net, {name: tree[name] != 0 for name in net.layout.params})
    if thin is not None and align > 1:
        kept = {name: aligned(flags, align) for name, flags in thin.channels.items()}
        thin = cut(net, kept) if not all(bool(flags.all()) for flags in kept.values()) else None
    return (net, dict(tree)) if thin is None else (thin.net, thin.narrow(tree))


def aligned(kept: Tensor, to: int) -> Tensor:
    """The channels that are kept, and the first of the others up to a multiple of ``to``, or all.

    >>> aligned(torch.tensor([True, False, False, True, True]), 4).int().tolist()
    [1, 1, 0, 1, 1]
    """
    missing = -int(kept.sum()) % to
    back = (~kept).nonzero().flatten()[:missing]
    return kept.index_fill(0, back, True)


def scale_between(raw: Tensor, seen: Tensor) -> Scale:
    """The mean and deviation per channel that make ``seen`` of ``raw``, by least squares in double precision.

    >>> scale_between(torch.tensor([[1.0], [5.0]]), torch.tensor([[-1.0], [1.0]]))
    Scale(mean=(3.0,), deviation=(2.0,))
    """
    x, z = (t.double().transpose(0, 1).flatten(1) for t in (raw, seen))
    apart, up = x - x.mean(1, keepdim=True), z - z.mean(1, keepdim=True)
    slope = (apart * up).sum(1) / (apart * apart).sum(1)
    slope = torch.where(
        slope.isfinite() & (slope > 0), slope, 1.0
    )  # a channel that does not move is only centred
    mean = x.mean(1) - z.mean(1) / slope
    return Scale(tuple(mean.tolist()), tuple((1 / slope).tolist()))


class Raw(nn.Module):
    """A network behind a client's own standardisation: takes inputs as they come from the sensor or the file."""

    shift: Tensor
    factor: Tensor

    def __init__(self, net: nn.Module, scale: Scale, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.net = net
        wide = (1, -1, *(1,) * (len(shape) - 1))
        self.register_buffer("shift", torch.tensor(scale.mean, dtype=torch.float32).reshape(wide))
        self.register_buffer(
            "factor", (1 / torch.tensor(scale.deviation).double()).float().reshape(wide)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Logits of raw inputs."""
        logits: Tensor = self.net((x - self.shift) * self.factor)
        return logits
