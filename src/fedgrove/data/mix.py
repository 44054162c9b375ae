"""Mix federations: clients of several data sets train one model, each on its own task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import InputError, check
from ..problems import MixedProblem, Problem, TaskProblem
from .devices import Steps
from .federation import ClientData, Examples, Federation


def mix(
    federations: Mapping[str, Federation], name: str = "mixed", outputs: str = "own"
) -> Federation:
    """One federation of several; every client belongs to the task it came with.

    Features (F,) and series (C, L) of different sizes are brought to the largest by zeros at the
    end; images are resized (bilinear) to the largest height and width, and grey ones repeated where
    others have colours. With ``outputs="own"`` data sets of the same targets and labels share the
    network's outputs, others have outputs of their own. With "shared" all begin at output 0, and
    there are as many as the widest needs: where a client's outputs lie does not tell its task.
    Either way a client sees those of its task alone. Defaults are those of the first federation.

    >>> from fedgrove import data
    >>> mixed = mix({"rooms": data.load("rooms", clients=3), "tags": data.load("tags", clients=2)})
    >>> len(mixed.clients), mixed.shape, mixed.classes, mixed.clients[4].info.task
    (5, (12,), 6, 'tags')
    """
    check(len(federations) > 1, "federations", list(federations), "two or more, by name")
    check(outputs in OUTPUTS, "outputs", outputs, " or ".join(OUTPUTS))
    for own_name, federation in federations.items():
        if federation.is_lazy:
            raise InputError(
                f"the clients of {own_name} are made when they are needed; mix federations whose "
                "clients are in memory."
            )
        if federation.later:
            raise InputError(
                f"clients of {own_name} switch; mix the federations first, then call data.switch."
            )
    shape = _common_shape(federations)
    tasks = _tasks(federations, outputs == "shared")
    # Targets of one kind stay as they are; others stand in as many columns as the widest needs.
    kinds = {_kind(federation) for federation in federations.values()}
    columns = None if len(kinds) == 1 else max(1, *(task.columns for task in tasks))

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
            notes.append(f"{task.name}: {_how_shaped(federation.shape, shape)}")
        for own_number, client in federation.clients.items():
            number = len(clients)
            # Each task has its own, common or not: here they are the clients'.
            own = replace(client, preparation=federation.preparation_of(own_number))
            clients[number] = _client(own, task.name, shape, columns)
            if own_number in federation.names:
                names[number] = federation.names[own_number]
            if federation.trace is not None and own_number in federation.trace:
                trace[number] = federation.trace[own_number]

    first = next(iter(federations.values()))
    cohort = sum(federation.defaults.cohort for federation in federations.values())
    return Federation(
        name,
        clients,
        classes=len(labels),
        labels=tuple(" | ".join(names) for _, names in sorted(labels.items())),
        shape=shape,
        defaults=replace(first.defaults, cohort=cohort),
        notes=tuple(notes),
        partition=_agreed(federations, "partition"),
        scenario=_agreed(federations, "scenario"),
        split=_agreed(federations, "split"),
        validation=first.validation,
        problem=MixedProblem(tasks),
        trace=trace or None,
        names=names if len(set(names.values())) == len(clients) else {},
    )


OUTPUTS = ("own", "shared")


def _agreed(federations: Mapping[str, Federation], word: str) -> str:
    """What all say, or one after another as ``--data a+b`` takes it."""
    found = [str(getattr(federation, word)) for federation in federations.values()]
    return found[0] if len(set(found)) == 1 else "+".join(found)


def _common_shape(federations: Mapping[str, Federation]) -> tuple[int, ...]:
    """The largest size of each dimension; channels of images must be equal, or one."""
    shapes = {name: federation.shape for name, federation in federations.items()}
    largest = tuple(max(sizes) for sizes in zip(*shapes.values(), strict=False))
    ranks = {len(shape) for shape in shapes.values()}
    is_image = ranks == {3}
    channels = {shape[0] for shape in shapes.values()} - {1}
    if len(ranks) > 1 or (is_image and len(channels) > 1):
        listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise InputError(
            f"inputs of {listed} cannot be brought to one shape: features (F,) go with features, "
            "series (C, L) with series, and images (C, H, W) with images that are grey or have as "
            "many channels."
        )
    return largest


def _how_shaped(shape: tuple[int, ...], wanted: tuple[int, ...]) -> str:
    if len(shape) < 3:
        return f"inputs {shape} filled up with zeros to {wanted}"
    how = "resized (bilinear)" if shape[1:] != wanted[1:] else "grey channel repeated"
    if shape[1:] != wanted[1:] and shape[0] != wanted[0]:
        how += " and its grey channel repeated"
    return f"images {shape} {how}, to {wanted}"


def _tasks(federations: Mapping[str, Federation], shared: bool) -> tuple[TaskProblem, ...]:
    """The tasks with their outputs."""
    tasks: list[TaskProblem] = []
    first_outputs: dict[tuple[Problem, tuple[str, ...]], int] = {}
    end = 0
    for name, federation in federations.items():
        problem = federation.problem
        if isinstance(problem, MixedProblem):
            raise InputError(
                f"{name} is a mixed federation itself; mix the federations that it is made of."
            )
        key = (problem, federation.labels)
        if key not in first_outputs:
            first_outputs[key] = 0 if shared else end
            end += federation.classes
        columns = _kind(federation)[0]
        tasks.append(TaskProblem(name, problem, first_outputs[key], federation.classes, columns))
    return tuple(tasks)


def _kind(federation: Federation) -> tuple[int, torch.dtype]:
    """How many columns the targets have, 0 for the number of a class, and their type."""
    y = next(iter(federation.clients.values())).train.y
    if y.dim() == 1:
        # One float each is one column.
        return (1 if y.is_floating_point() else 0, y.dtype)
    return (y.shape[1], y.dtype)


def _client(
    client: ClientData, task: str, shape: tuple[int, ...], columns: int | None
) -> ClientData:
    def filled(part: Examples) -> Examples:
        return Examples(shaped(part.x, shape), _in_columns(part.y, columns))

    return replace(
        client,
        train=filled(client.train),
        validation=filled(client.validation),
        test=filled(client.test),
        info=replace(client.info, task=task),
        labels=client.labels,
    )


def shaped(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Inputs of the common shape."""
    if len(shape) < 3:
        return _padded(x, shape)
    if not len(x):
        return x.new_zeros((0, *shape))
    if tuple(x.shape[2:]) != shape[1:]:
        # Pixels are already standardised, which resizing commutes with: its weights sum to 1.
        x = F.interpolate(x, shape[1:], mode="bilinear", align_corners=False)
    # A view: the channels of a grey image take no more memory than one.
    return x.reshape(len(x), -1, *shape[1:]).expand(-1, *shape)


def _padded(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Zeros at the end of every dimension that is too short."""
    pads: list[int] = []
    # F.pad counts dimensions from the last.
    for size, wanted in zip(reversed(x.shape[1:]), reversed(shape), strict=True):
        pads += [0, wanted - size]
    return F.pad(x, pads)


def _in_columns(y: Tensor, columns: int | None) -> Tensor:
    if columns is None:
        return y.unsqueeze(1) if y.dim() == 1 and y.is_floating_point() else y
    rows = y.unsqueeze(1) if y.dim() == 1 else y
    return F.pad(rows.to(torch.float32), [0, columns - rows.shape[1]])
