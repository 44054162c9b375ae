"""A finished run, opened for export: each client's model, data and standardisation."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
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
from ..options.definition import names_of
from ..options.groups import DataOptions
from ..problems import MixedProblem, Problem, SquaredError, TaskProblem
from ..runs.folder import RunFolder
from ..runs.model import check_weights, client_number
from ..runs.result import Result
from ..trees import Tree

TOLERANCE = 1e-5
"""The largest allowed difference between a file's outputs and torch's."""
OUTPUT_NAMES = {"classes": "logits", "labels": "logits", "numbers": "values"}
"""What the output of a file is called, by the kind of targets."""
LONGEST_STEM = 50
"""Letters of a client's name in the name of its files."""


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

    def outputs(self, client: int, standardised: bool = False) -> Outputs:
        """Return what the outputs of a client's file mean; ``standardised`` as its inputs are."""
        federation = self.federation
        problem = federation.problem
        preparation = self.preparation(client)
        task = None
        first = 0
        count = federation.classes
        if isinstance(problem, MixedProblem):
            task = problem.tasks[problem.number(self.data(client).info.task)]
            first = task.first
            count = task.outputs
            problem = task.problem
        labels = preparation.labels
        if labels is None or len(labels) != count:
            labels = tuple(federation.labels)[first : first + count]
        scale = torch.ones(count, dtype=torch.float64)
        shift = torch.zeros(count, dtype=torch.float64)
        if isinstance(problem.loss, SquaredError):
            scale = torch.tensor(problem.loss.unit.scale, dtype=torch.float64)
            shift = torch.tensor(problem.loss.unit.mean, dtype=torch.float64)
        mean = preparation.mean
        deviation = preparation.std
        is_scaled = mean is not None and deviation is not None and not standardised
        if preparation.ahead is not None and is_scaled:
            # Samples that follow the input were standardised as it was, channel by channel.
            means = torch.tensor(mean, dtype=torch.float64)
            deviations = torch.tensor(deviation, dtype=torch.float64)
            scale = scale * deviations.repeat_interleave(preparation.ahead)
            shift = shift * deviations.repeat_interleave(preparation.ahead)
            shift = shift + means.repeat_interleave(preparation.ahead)
        return Outputs(problem, labels, first, scale, shift, task)

    def file_stem(self, client: int) -> str:
        """Return the name of a client's exported files, without their endings."""
        return self._file_stems[client]

    @cached_property
    def _file_stems(self) -> dict[int, str]:
        """The client's name where it can be the name of a file that no other client has."""
        stems = {}
        for client in self.files:
            # A dot would make the file of a client called "a.int8" the int8 file of "a".
            stem = re.sub(r"[^\w-]+", "-", self.name(client)).strip("-")
            # Clients without a name have a number for one.
            is_number = stem == "" or stem.isdecimal() or stem.startswith("client-")
            stems[client] = f"client-{client:05d}" if is_number else stem[:LONGEST_STEM]
        # Some file systems do not tell capital letters from small ones.
        counts = Counter(stem.casefold() for stem in stems.values())
        for client, stem in stems.items():
            if counts[stem.casefold()] > 1:
                stems[client] = f"client-{client:05d}"
        return stems

    def takes_raw(self, client: int) -> bool:
        """Whether an exported file can standardise raw inputs itself.

        It can if there is only one mean and one deviation.

        Inputs of sets that were mixed may have been resized or padded as well.
        """
        shape = self.preparation(client).shape
        return shape is None or shape == self.federation.shape


@dataclass(frozen=True, eq=False)
class Outputs:
    """What the outputs of a client's exported file mean.

    They are the network's outputs of the client's task. Numbers are in the units of the targets, as
    they were recorded: ``value = output * scale + shift``, for each output.
    """

    problem: Problem
    labels: tuple[str, ...]
    first: int
    """The first of the network's outputs that are the client's."""
    scale: Tensor
    shift: Tensor
    task: TaskProblem | None = None
    """The client's task in a mixed federation."""

    @property
    def tensor(self) -> str:
        """The name of the file's output."""
        return OUTPUT_NAMES.get(self.problem.kind, "outputs")

    @property
    def are_scaled(self) -> bool:
        """Whether the file's outputs differ from the network's by a scale or a shift."""
        return bool((self.scale != 1).any() or (self.shift != 0).any())

    def select(self, outputs: Tensor) -> Tensor:
        """Return the client's outputs among those of the network."""
        return outputs[:, self.first : self.first + len(self.labels)]

    def difference(self, given: Tensor, outputs: Tensor) -> tuple[float, float]:
        """Return how far a file's outputs are from what the network's ``outputs`` mean.

        Both numbers are in the network's units, relative to its largest output where that is above
        1: the difference, and the largest one that is allowed.
        """
        selected = self.select(outputs).double()
        wanted = selected * self.scale + self.shift
        largest = selected.abs().max().clamp_min(1.0)
        gaps = (given.double() - wanted).abs() / self.scale
        # Targets such as 2024.5 have fewer digits behind the point than outputs near 0.
        rounding = torch.finfo(torch.float32).eps * wanted.abs() / self.scale
        allowed = TOLERANCE
        if self.are_scaled:
            allowed += float(2 * rounding.max() / largest)
        return float(gaps.max() / largest), allowed

    def to_network(self, given: Tensor) -> Tensor:
        """Return a file's outputs in the network's units, in which the run scores them."""
        if not self.are_scaled:
            return given
        return ((given.double() - self.shift) / self.scale).float()

    def score(self, outputs: Tensor, y: Tensor) -> float:
        """Score outputs in the network's units by the metric of the run, as the run did."""
        if self.task is not None:
            # The targets of other tasks are in further columns.
            task = replace(self.task, first=0)
            outputs, y = task.select(outputs, y, torch.tensor(True))
        weight = torch.ones(len(y), dtype=torch.float64)
        sums = self.problem.sums(outputs, y, weight, {})
        return float(self.problem.metric.value(self.problem.select_sums(sums, "")))

    def same(self, one: Tensor, other: Tensor) -> float | None:
        """Return the share of equal predictions in two outputs; None for numbers.

        Of several labels, each is a prediction.
        """
        if self.problem.kind == "classes":
            return float((one.argmax(1) == other.argmax(1)).double().mean())
        if self.problem.kind == "labels":
            return float(((one > 0) == (other > 0)).double().mean())
        return None


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
    # Nor are the devices that it was trained on needed, whose files may be gone.
    experiment = replace(experiment, profile=None, trace=None)
    if data is not None:
        # The data are divided already, by options that config.toml repeats.
        unset: dict[str, Any] = dict.fromkeys(names_of(DataOptions))
        experiment = replace(experiment, **{**unset, "data": data})
    federation = experiment.federation(data_dir)
    spec = federation.defaults.net if experiment.net is None else experiment.net
    module = nets.build(spec, federation.shape, federation.classes, experiment.seed)
    full_net = Net(module, federation.shape)
    return Source(folder, summary, experiment, full_net, federation, folder.models())


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


class Answers(nn.Module):
    """A network whose outputs are those of a client's task, in the units of its targets."""

    def __init__(self, net: nn.Module, outputs: Outputs) -> None:
        super().__init__()
        self.net = net
        self.first = outputs.first
        self.end = outputs.first + len(outputs.labels)
        self.to_units = ToUnits(outputs) if outputs.are_scaled else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Return the values that the exported file gives."""
        values: Tensor = self.to_units(self.net(x)[:, self.first : self.end])
        return values


class ToUnits(nn.Module):
    """Turns outputs near 0 into the numbers that were recorded; it stays in float in int8 files."""

    scale: Tensor
    shift: Tensor

    def __init__(self, outputs: Outputs) -> None:
        super().__init__()
        self.register_buffer("scale", outputs.scale.float())
        # Subtracted, as onnxruntime's quantiser takes sums for a part of the network.
        self.register_buffer("shift", -outputs.shift.float())

    def forward(self, outputs: Tensor) -> Tensor:
        """Return exported outputs in the units of the targets."""
        return outputs * self.scale - self.shift


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
