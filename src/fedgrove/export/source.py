"""A finished run, opened for export: each client's model, data and standardisation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import nets
from ..channels.shrink import cut_channels, find_small_net
from ..config.experiment import Experiment
from ..config.toml import check_trust, from_toml, how_to_resume, read_run_table
from ..data import ClientData, Federation
from ..data.preparation import Preparation
from ..errors import InputError, check
from ..methods import FedAvg
from ..nets import Net
from ..problems import CLASSES, MixedProblem
from ..runs.folder import RunFolder
from ..runs.model import check_weights, client_number
from ..runs.result import Result
from ..trees import Tree


@dataclass(frozen=True, eq=False)
class Source:
    """A finished run, opened: its figures, its network and its data."""

    folder: RunFolder
    summary: Mapping[str, Any]
    experiment: Experiment
    net: Net
    federation: Federation
    """The data as the run saw them."""
    files: Mapping[int, str]
    """The file name of each client's model."""

    def data(self, client: int) -> ClientData:
        """Return a client's data, as its exported model saw them."""
        return self.federation.client(client, self.rounds)

    @property
    def rounds(self) -> int:
        """After how many rounds the exported models were kept.

        A client may have had other data before.
        """
        return int(self.summary["rounds"])

    def number(self, client: int | str) -> int:
        """Return the number of the client to export, from its name or its number."""
        names = {k: self.federation.name_of(k) for k in sorted(self.files)}
        return client_number(client, names, str(self.folder.path))

    def name(self, client: int) -> str:
        """Return the name of the client to export; its number if it has no name."""
        return self.federation.name_of(client)

    def tree(self, client: int) -> Tree:
        """Return a client's model to export, in full width."""
        if self.data(client).labels is not None:
            raise InputError(
                f"client {client} has personal labels, which a file cannot leave out; "
                "export a client that knows all classes."
            )
        path = self.folder.path / "models" / self.files[client]
        tree = self.folder.tree(self.files[client])
        for name, shape in self.net.layout.shapes.items():
            given = tuple(tree[name].shape) if name in tree else "missing"
            allowed = f"{shape}, as in the net that config.toml names"
            check(given == shape, f"'{name}' of {path}", given, allowed)
        check_weights(tree, f"the model of client {self.name(client)}")
        return tree

    def preparation(self, client: int) -> Preparation:
        """Return how the exported client's raw inputs became what its model saw."""
        return self.federation.preparation_of(client, self.rounds)

    def takes_raw(self, client: int) -> bool:
        """Whether an exported file can standardise raw inputs itself.

        It can if there is only one mean and one deviation.

        Inputs of sets that were mixed may have been resized or padded as well.
        """
        shape = self.preparation(client).shape
        return shape is None or shape == self.federation.shape


def opened(
    run: str | Path | Result | RunFolder,
    data: Federation | None = None,
    net: nn.Module | None = None,
    data_dir: str | Path | None = None,
    trust: bool = False,
) -> Source:
    """Open a finished run to export its models, with its data rebuilt from config.toml.

    Args:
        run: The run: its folder or its result.
        data: The federation again, if it was made in Python.
        net: The network again, if it was made in Python.
        data_dir: The folder with the data sets' files.
        trust: Whether a network in a file of code may be run. A result of this process needs none.

    Raises:
        InputError: The run is not finished, or its data or network cannot be rebuilt.
    """
    is_trusted = trust
    if isinstance(run, Result):
        folder = run.folder
        # One that was loaded knows a net only if that was given again, or is trusted.
        is_trusted = trust or run.net is not None
        if net is None and isinstance(run.net, nn.Module):
            net = run.net
        data = data or run.data
    elif isinstance(run, RunFolder):
        folder = run
    else:
        folder = RunFolder.open(Path(str(run)))
    summary = folder.summary
    if summary is None:
        raise InputError(
            f"the run in {folder.path} is not finished, so its clients have no models yet; "
            f"{how_to_resume(folder.config, folder.path)}"
        )
    if summary.get("prediction") == "own":
        raise InputError(
            f"the clients of {folder.path} predict in their method's own way, of which models/ "
            "contains only a part: it cannot be exported; load the weights in Python instead."
        )
    for key, given in (("data", data), ("net", net)):
        recorded = str(read_run_table(folder.config).get(key, ""))
        # config.toml holds a placeholder in angle brackets for what has no name.
        if given is None and recorded.startswith("<"):
            raise InputError(
                f"the run's {key} was made in Python ({recorded}); export it from there: "
                f"fedgrove.export_model(run, {key}=...)."
            )

    # The method is not made again here, so that its code is not run.
    not_run = ["method"] if net is None else ["method", "net"]
    check_trust(folder.config, folder.path, is_trusted, not_run)
    # A finished model can be exported whatever trained it, so any method will do; the run's own may
    # be a class that this process does not know.
    experiment = from_toml(folder.config, data=data, net=net, method=FedAvg())
    # Nor are the devices that it was trained on needed, whose files may be gone, nor what it was
    # scored by: an exported model is measured by its accuracy.
    experiment = replace(experiment, profile=None, trace=None, metric=None)
    federation = experiment.federation(data_dir)
    if not _names_classes(federation):
        raise InputError(
            f"the targets of {federation.name} are {federation.problem.name}, and only models that "
            "predict classes and are measured by accuracy, with all their outputs, can be "
            "exported; save the weights of models/ instead."
        )
    spec = federation.defaults.net if experiment.net is None else experiment.net
    module = nets.build(spec, federation.shape, federation.classes, experiment.seed)
    full_net = Net(module, federation.shape)
    return Source(folder, summary, experiment, full_net, federation, folder.models())


def _names_classes(federation: Federation) -> bool:
    """Whether every output of every client's model is a class of its data, scored by accuracy."""
    problem = federation.problem
    if not isinstance(problem, MixedProblem):
        return problem == CLASSES
    # A task with fewer outputs than the network would need the others cut off.
    widths = {(task.first, task.outputs) for task in problem.tasks}
    are_whole = widths == {(0, federation.classes)}
    return are_whole and all(task.problem == CLASSES for task in problem.tasks)


def shrunk(net: Net, tree: Mapping[str, Tensor], align: int = 1) -> tuple[Net, Tree]:
    """Shrink a model for export: remove the channels of which every parameter is exactly 0.

    Such a channel computes nothing and nothing reads it, so no mask is needed: the outputs are the
    same. Zeros elsewhere stay zeros. With ``align``, each layer keeps as many of these channels as
    make its width a multiple of ``align``: kernels often run faster on such widths.

    >>> from fedgrove.channels.find_groups import make_channel_mask
    >>> net = Net(nn.Sequential(nn.Linear(1, 3), nn.ReLU(), nn.Linear(3, 1)), (1,))
    >>> mask = make_channel_mask(net, {"0": torch.tensor([True, False, True])})
    >>> small, tree = shrunk(net, {k: v * mask.get(k, 1) for k, v in net.params().items()})
    >>> small.layout.size, net.layout.size
    (7, 10)
    """
    thin = find_small_net(net, {name: tree[name] != 0 for name in net.layout.params})
    if thin is None:
        return net, dict(tree)
    if align > 1:
        kept = {name: aligned(flags, align) for name, flags in thin.channels.items()}
        # Filled up to the full width everywhere: nothing is left to remove.
        if all(bool(flags.all()) for flags in kept.values()):
            return net, dict(tree)
        thin = cut_channels(net, kept)
    return thin.net, thin.narrow(tree)


def aligned(kept: Tensor, to: int) -> Tensor:
    """Return the channels to export: those kept, filled up to a multiple of ``to``, or all.

    >>> aligned(torch.tensor([True, False, False, True, True]), 4).int().tolist()
    [1, 1, 0, 1, 1]
    """
    missing = -int(kept.sum()) % to
    # The slice is shorter than ``missing`` where the full width is not a multiple.
    refilled = (~kept).nonzero().flatten()[:missing]
    return kept.index_fill(0, refilled, True)


class Raw(nn.Module):
    """A network behind a client's own standardisation, for inputs as they were recorded."""

    shift: Tensor
    factor: Tensor

    def __init__(self, net: nn.Module, own: Preparation, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.net = net
        shift, factor = own.shift_and_factor(len(shape) + 1)
        self.register_buffer("shift", torch.from_numpy(shift))
        self.register_buffer("factor", torch.from_numpy(factor))

    def forward(self, x: Tensor) -> Tensor:
        """Return the exported network's logits of raw inputs."""
        logits: Tensor = self.net((x - self.shift) * self.factor)
        return logits


def unprepared(own: Preparation, x: Tensor) -> Tensor:
    """Return raw inputs from those that a model saw, to test the export; float32.

    >>> unprepared(Preparation(mean=(3.0,), std=(2.0,)), torch.tensor([[-1.0], [1.0]])).tolist()
    [[1.0], [5.0]]
    """
    if own.mean is None or own.std is None:
        return x.float()
    per_channel = (1, -1, *(1,) * (x.dim() - 2))
    mean = torch.tensor(own.mean, dtype=torch.float64).reshape(per_channel)
    deviation = torch.tensor(own.std, dtype=torch.float64).reshape(per_channel)
    return (x.double() * deviation + mean).float()
