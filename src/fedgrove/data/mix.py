"""Mix federations: clients of several data sets train one model, each on its own task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import InputError, check
from ..problems import Problem, Task, Tasks
from .devices import Steps
from .federation import ClientData, Examples, Federation


def mix(federations: Mapping[str, Federation], name: str = "mixed") -> Federation:
    """One federation of several; every client belongs to the task it came with.

    Features (F,) and series (C, L) of different sizes are brought to the largest by zeros at the
    end; images must agree in shape. Data sets of the same targets and labels share the network's
    outputs, others have outputs of their own. Defaults are those of the first federation.

    >>> from fedgrove import data
    >>> mixed = mix({"rooms": data.load("rooms", clients=3), "tags": data.load("tags", clients=2)})
    >>> len(mixed.clients), mixed.shape, mixed.classes, mixed.clients[4].info.task
    (5, (12,), 6, 'tags')
    """
    check(len(federations) > 1, "federations", list(federations), "two or more, by name")
    for own_name, federation in federations.items():
        if federation.is_lazy:
            raise InputError(
                f"the clients of {own_name} are made when they are needed; mix federations whose "
                "clients are in memory."
            )
    shape = _common_shape(federations)
    tasks = _tasks(federations)
    # Targets of one kind stay as they are; others stand in as many columns as the widest needs.
    kinds = {_kind(federation) for federation in federations.values()}
    columns = None if len(kinds) == 1 else max(1, *(task.columns for task in tasks))

    clients: dict[int, ClientData] = {}
    labels: dict[int, str] = {}
    trace: dict[int, Steps] = {}
    notes: list[str] = []
    for task, federation in zip(tasks, federations.values(), strict=True):
        for offset, label in enumerate(federation.labels):
            labels.setdefault(task.first + offset, f"{task.name}: {label}")
        for note in federation.notes:
            notes.append(f"{task.name}: {note}")
        if federation.shape != shape:
            notes.append(f"{task.name}: inputs {federation.shape} filled up with zeros to {shape}")
        for own_number, client in federation.clients.items():
            number = len(clients)
            clients[number] = _client(client, task.name, shape, columns)
            if federation.trace is not None and own_number in federation.trace:
                trace[number] = federation.trace[own_number]

    first = next(iter(federations.values()))
    cohort = sum(federation.defaults.cohort for federation in federations.values())
    return Federation(
        name,
        clients,
        classes=len(labels),
        labels=tuple(labels[output] for output in sorted(labels)),
        shape=shape,
        defaults=replace(first.defaults, cohort=cohort),
        notes=tuple(notes),
        partition=_agreed(federations, "partition"),
        scenario=_agreed(federations, "scenario"),
        split=_agreed(federations, "split"),
        validation=first.validation,
        problem=Tasks(tasks),
        trace=trace or None,
    )


def _agreed(federations: Mapping[str, Federation], word: str) -> str:
    found = {getattr(federation, word) for federation in federations.values()}
    return str(found.pop()) if len(found) == 1 else "mixed"


def _common_shape(federations: Mapping[str, Federation]) -> tuple[int, ...]:
    """The largest size of each dimension; images are not filled up."""
    shapes = {name: federation.shape for name, federation in federations.items()}
    first, *others = shapes.values()
    if all(shape == first for shape in others):
        return first
    listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
    ranks = {len(shape) for shape in shapes.values()}
    if ranks not in ({1}, {2}):
        raise InputError(
            f"inputs of {listed} cannot be brought to one shape: only features (F,) and series "
            "(C, L) are filled up; give images of one size and number of channels."
        )
    return tuple(max(sizes) for sizes in zip(*shapes.values(), strict=True))


def _tasks(federations: Mapping[str, Federation]) -> tuple[Task, ...]:
    """The tasks with their outputs."""
    tasks: list[Task] = []
    first_outputs: dict[tuple[Problem, tuple[str, ...]], int] = {}
    end = 0
    for name, federation in federations.items():
        problem = federation.problem
        if isinstance(problem, Tasks):
            raise InputError(
                f"{name} is a mixed federation itself; mix the federations that it is made of."
            )
        key = (problem, federation.labels)
        if key not in first_outputs:
            first_outputs[key] = end
            end += federation.classes
        columns = _kind(federation)[0]
        tasks.append(Task(name, problem, first_outputs[key], federation.classes, columns))
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
        return Examples(_padded(part.x, shape), _in_columns(part.y, columns))

    return replace(
        client,
        train=filled(client.train),
        validation=filled(client.validation),
        test=filled(client.test),
        info=replace(client.info, task=task),
        labels=client.labels,
    )


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
