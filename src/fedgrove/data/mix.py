"""Mix data sets: clients of several data sets train one model, each on its own task.

In Python :func:`mix` takes federations; ``--data a+b`` names the data sets.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import InputError, check
from ..problems import MixedProblem, Problem, TaskProblem
from ..renamed import find_old_names
from . import scenario as scenarios
from .devices import Devices, Steps
from .federation import ClientData, Examples, Federation
from .named_set import is_path

OUTPUTS = ("own", "shared")
SEPARATOR = "+"


def mix(
    federations: Mapping[str, Federation], name: str = "mixed", outputs: str = "own"
) -> Federation:
    """Make one federation of several; every client keeps the task it came with.

    Features (F,) and series (C, L) of different sizes are padded with zeros to the largest. Images
    are resized (bilinear) to the largest height and width, and grey images are repeated if others
    have colours. A client sees only the outputs of its task. Defaults are those of the first
    federation.

    Args:
        federations: The federations by the names of their tasks.
        name: The name of the mixed federation.
        outputs: "own": data sets with the same targets and labels share outputs of the network,
            others have their own. "shared": all tasks begin at output 0, and there are as many
            outputs as the widest task needs; the position of a client's outputs does not reveal
            its task.

    Raises:
        InputError: The federations cannot be mixed.

    >>> from fedgrove import data
    >>> mixed = mix({"rooms": data.load("rooms", clients=3), "tags": data.load("tags", clients=2)})
    >>> len(mixed.clients), mixed.shape, mixed.classes, mixed.clients[4].info.task
    (5, (12,), 6, 'tags')
    """
    check(len(federations) > 1, "federations", list(federations), "two or more, by name")
    check(outputs in OUTPUTS, "outputs", outputs, " or ".join(OUTPUTS))
    for task_name, federation in federations.items():
        _check_can_mix(task_name, federation)
    shape = _find_common_shape(federations)
    tasks = _number_outputs(federations, outputs == "shared")
    columns = _find_common_columns(federations)

    clients: dict[int, ClientData] = {}
    labels: dict[int, list[str]] = {}
    trace: dict[int, Steps] = {}
    names: dict[int, str] = {}
    notes: list[str] = []
    for task, federation in zip(tasks, federations.values(), strict=True):
        for offset, label in enumerate(federation.labels):
            labels.setdefault(task.first + offset, []).append(f"{task.name}: {label}")
        for note in federation.notes:
            notes.append(f"{task.name}: {note}")
        if federation.shape != shape:
            notes.append(f"{task.name}: {_describe_resize(federation.shape, shape)}")
        for old_number, client in federation.clients.items():
            number = len(clients)
            # Tasks differ in their preparation, so here every client has its own.
            client = replace(client, preparation=federation.preparation_of(old_number))
            clients[number] = _mix_client(client, task.name, shape, columns)
            if old_number in federation.names:
                names[number] = federation.names[old_number]
            if federation.trace is not None and old_number in federation.trace:
                trace[number] = federation.trace[old_number]

    first = next(iter(federations.values()))
    cohort = sum(federation.defaults.cohort for federation in federations.values())
    names_are_unique = len(set(names.values())) == len(clients)
    return Federation(
        name,
        clients,
        classes=len(labels),
        labels=tuple(" | ".join(shared) for _, shared in sorted(labels.items())),
        shape=shape,
        defaults=replace(first.defaults, cohort=cohort),
        notes=tuple(notes),
        partition=_join_options(federations, "partition"),
        scenario=_join_options(federations, "scenario"),
        split=_join_options(federations, "split"),
        validation=first.validation,
        train_examples=first.train_examples,
        problem=MixedProblem(tasks),
        trace=trace or None,
        names=names if names_are_unique else {},
    )


def _check_can_mix(name: str, federation: Federation) -> None:
    if federation.is_lazy:
        raise InputError(
            f"the clients of {name} are created when needed; mix federations whose clients are in "
            "memory."
        )
    if federation.later:
        raise InputError(
            f"clients of {name} switch; mix the federations first, then call data.switch."
        )
    if isinstance(federation.problem, MixedProblem):
        raise InputError(f"{name} is a mixed federation; mix the federations that it consists of.")


def _join_options(federations: Mapping[str, Federation], option: str) -> str:
    """Return an option that all federations share, or one for each, as ``--data a+b`` takes it."""
    values = [str(getattr(federation, option)) for federation in federations.values()]
    return values[0] if len(set(values)) == 1 else SEPARATOR.join(values)


# ---- outputs and targets -------------------------------------------------------------------------


def _number_outputs(
    federations: Mapping[str, Federation], are_shared: bool
) -> tuple[TaskProblem, ...]:
    """Give each task its outputs of the network."""
    tasks: list[TaskProblem] = []
    first_outputs: dict[tuple[Problem, tuple[str, ...]], int] = {}
    end = 0
    for name, federation in federations.items():
        assert isinstance(federation.problem, Problem)
        key = (federation.problem, federation.labels)
        if key not in first_outputs:
            first_outputs[key] = 0 if are_shared else end
            end += federation.classes
        tasks.append(
            TaskProblem(
                name,
                federation.problem,
                first=first_outputs[key],
                outputs=federation.classes,
                columns=_count_columns(federation),
            )
        )
    return tuple(tasks)


def _first_targets(federation: Federation) -> Tensor:
    return next(iter(federation.clients.values())).train.y


def _count_columns(federation: Federation) -> int:
    """Return the number of columns of the targets, 0 for the number of a class."""
    y = _first_targets(federation)
    if y.dim() > 1:
        return y.shape[1]
    # One float per example is one column.
    return int(y.is_floating_point())


def _find_common_columns(federations: Mapping[str, Federation]) -> int | None:
    """Return the number of columns that targets of all tasks get; None if they stay as they are."""
    columns = set(map(_count_columns, federations.values()))
    types = {_first_targets(federation).dtype for federation in federations.values()}
    if len(columns) == 1 and len(types) == 1:
        return None
    # A class needs one column too.
    return max(1, *columns)


# ---- inputs --------------------------------------------------------------------------------------


def _find_common_shape(federations: Mapping[str, Federation]) -> tuple[int, ...]:
    """Return the largest size of each dimension; channels of images must be equal, or one."""
    shapes = [federation.shape for federation in federations.values()]
    ranks = {len(shape) for shape in shapes}
    colours = {shape[0] for shape in shapes} - {1}
    are_images = ranks == {3}
    if len(ranks) > 1 or (are_images and len(colours) > 1):
        listed = ", ".join(f"{name} {each.shape}" for name, each in federations.items())
        raise InputError(
            f"inputs of {listed} cannot be brought to one shape: features (F,) go with features, "
            "series (C, L) with series, and images (C, H, W) with images that are grey or have the "
            "same number of channels."
        )
    return tuple(map(max, zip(*shapes, strict=True)))


def _describe_resize(shape: tuple[int, ...], wanted: tuple[int, ...]) -> str:
    if len(shape) < 3:
        return f"inputs {shape} padded with zeros to {wanted}"
    changes = []
    if shape[1:] != wanted[1:]:
        changes.append("resized (bilinear)")
    if shape[0] != wanted[0]:
        changes.append("grey channel repeated")
    return f"images {shape} to {wanted}: {', '.join(changes)}"


def _mix_client(
    client: ClientData, task: str, shape: tuple[int, ...], columns: int | None
) -> ClientData:
    def resize(part: Examples) -> Examples:
        return Examples(resize_inputs(part.x, shape), _widen_targets(part.y, columns))

    # The task first: checks of labels do not apply to the widened targets of a task.
    return replace(client, info=replace(client.info, task=task)).map_parts(resize)


def resize_inputs(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Bring the inputs of mixed data sets to one shape: pad features and series, resize images."""
    if len(shape) < 3:
        return _pad(x, shape)
    if not len(x):
        return x.new_zeros((0, *shape))
    if tuple(x.shape[2:]) != shape[1:]:
        # Pixels are already standardised, which resizing commutes with: its weights sum to 1.
        x = F.interpolate(x, shape[1:], mode="bilinear", align_corners=False)
    # A view: the channels of a grey image take no more memory than one.
    return x.reshape(len(x), -1, *shape[1:]).expand(-1, *shape)


def _pad(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Add zeros at the end of every dimension that is too short."""
    pads: list[int] = []
    # F.pad counts dimensions from the last.
    for size, wanted in zip(reversed(x.shape[1:]), reversed(shape), strict=True):
        pads += [0, wanted - size]
    return F.pad(x, pads)


def _widen_targets(y: Tensor, columns: int | None) -> Tensor:
    if columns is None:
        is_flat_number = y.dim() == 1 and y.is_floating_point()
        return y.unsqueeze(1) if is_flat_number else y
    if y.dim() == 1:
        y = y.unsqueeze(1)
    return F.pad(y.to(torch.float32), [0, columns - y.shape[1]])


# ---- data sets by name: a+b ----------------------------------------------------------------------


def names_several(data: str) -> bool:
    """Whether a text names several data sets; a file with a + in its name is one data set.

    >>> names_several("mnist+digits"), names_several("digits")
    (True, False)
    """
    # Not Path.exists(), which fails for names that are too long.
    return SEPARATOR in data and not os.path.exists(data)


def split_names(data: str) -> dict[str, str]:
    """Return the data sets of ``a+b`` by the names of their tasks: a file's task has its stem.

    >>> split_names("digits+my/own.npz")
    {'digits': 'digits', 'own': 'my/own.npz'}
    """
    tasks: dict[str, str] = {}
    for each in data.split(SEPARATOR):
        check(bool(each), "data", data, "names with a + between them, such as mnist+digits")
        name = Path(each).stem if is_path(each) else each
        if name in tasks:
            raise InputError(f"data is {data!r}, which names a set twice; name each once.")
        tasks[name] = each
    return tasks


def split_option(option: str, text: str | None, tasks: Sequence[str]) -> list[str | None]:
    """Return the value of an option for each of several data sets: one for all, or one each.

    >>> split_option("partition", "iid+natural", ["digits", "motion"])
    ['iid', 'natural']
    """
    if text is None or SEPARATOR not in text:
        return [text] * len(tasks)
    values = text.split(SEPARATOR)
    allowed = f"one for all {len(tasks)} data sets, or one for each with + between them"
    check(len(values) == len(tasks), option, text, allowed)
    return [*values]


def divide_clients(clients: int | None, tasks: Sequence[str]) -> list[int | None]:
    """Divide the clients among the data sets as equally as possible; the first get one more.

    >>> divide_clients(8, ["a", "b", "c"])
    [3, 3, 2]
    """
    if clients is None:
        return [None] * len(tasks)
    count = len(tasks)
    check(clients >= count, "clients", clients, f"at least {count}, one for each data set")
    return [clients // count + (position < clients % count) for position in range(count)]


def mix_by_name(
    data: str,
    parts: Mapping[str, Federation],
    devices: Devices,
    switch: str | None,
    seed: int,
) -> Federation:
    """Mix the federations of ``a+b`` with shared outputs, then give their clients devices.

    Args:
        data: The name of the mixed federation.
        parts: The federations by the names of their tasks.
        devices: The devices, by the numbers that clients have in the mixed federation.
        switch: A scenario `switch` between clients of different tasks, or None.
        seed: The seed of the devices and of the switch.
    """
    mixed = mix(parts, data, outputs="shared")
    devices = devices.number_clients(mixed.names)
    devices.check_clients(len(mixed.clients))
    clients = {}
    for k, client in mixed.clients.items():
        device = devices.info(client.info.examples, k, seed)
        clients[k] = replace(client, info=replace(device, task=client.info.task))
    files = dict(devices.files)
    for part in parts.values():
        files.update(part.files)
    mixed = replace(mixed, clients=clients, trace=devices.numbered_trace, files=files)
    if switch is None:
        return mixed
    return scenarios.apply_switch(mixed, scenarios.parse(switch), switch, seed)


__getattr__ = find_old_names(__name__)
