"""Data of a person's own, in whatever form they come, as one data set with the clients' names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError
from . import arrays, frames, reading, tables
from .arrays import Stack
from .dataset import Array, Dataset
from .reading import Read
from .tables import Findings, Table, Words


@dataclass(frozen=True)
class Own:
    """Examples, what they are called together, and the SHA-256 of the files they were in."""

    name: str
    dataset: Dataset
    files: Mapping[str, str]


def read(data: Any, words: Words) -> Own:
    """What is in a file, a folder, or something made in Python."""
    if reading.is_path(data):
        path = Path(data)
        found = reading.read(path, words)
        # "." and ".." have no name of their own.
        name = path.stem if path.is_file() else path.resolve().name
    else:
        found = frames.read_object(data, words)
        name = frames.name_of(data)
    return Own(name, _dataset(found, words), found.files)


def dataset_of_arrays(stack: Stack, words: Words) -> Dataset:
    """The examples of arrays; rows of a recording are cut into windows."""
    if words.window is None:
        return arrays.dataset_of(stack, words.channels)
    if stack.x.ndim != 2:
        raise InputError(
            f"window is {words.window}, and x has the shape {stack.x.shape}, which is windows "
            "already; leave window out, or give the recording (n, channels)."
        )
    return tables.dataset_of([_recording(stack, words)], _table_words(stack, words))


def _dataset(read: Read, words: Words) -> Dataset:
    if read.tables:
        return tables.dataset_of(read.tables, words, read.notes)
    clients = [client for client, _ in read.stacks]
    if clients == [""]:
        return dataset_of_arrays(read.stacks[0][1], words)
    if words.window is not None:
        recordings = []
        for client, stack in read.stacks:
            own = _recording(stack, words)
            recordings.append(Table(own.source, own.columns, client))
        whose = replace(_table_words(read.stacks[0][1], words), client=None)
        return tables.dataset_of(recordings, whose, read.notes)
    merged = _merged([stack for _, stack in read.stacks], clients)
    found = arrays.dataset_of(merged, words.channels)
    return replace(found, notes=(*read.notes, *found.notes))


def _merged(stacks: Sequence[Stack], clients: Sequence[str]) -> Stack:
    """The arrays of all clients, one after another; where shapes differ, all of these are named."""
    findings = Findings()
    first = stacks[0].x.shape[1:]
    for client, stack in zip(clients, stacks, strict=True):
        place = f"{stack.source} (client {client})" if client not in stack.source else stack.source
        if stack.x.shape[1:] != first:
            findings.add(
                f"{place} has x of the shape {stack.x.shape}, and {stacks[0].source} has "
                f"{stacks[0].x.shape}; all but the first size must be equal."
            )
        if len(stack.x) != len(stack.y):
            findings.add(f"{place} has {len(stack.x)} inputs and {len(stack.y)} targets.")
    findings.refuse()
    owners = [np.full(len(each.x), client) for client, each in zip(clients, stacks, strict=True)]
    blocks = [each.block for each in stacks]
    block = None
    if all(each is not None for each in blocks):
        block = np.concatenate([np.asarray(each) for each in blocks])
    return Stack(
        np.concatenate([each.x for each in stacks]),
        np.concatenate([each.y for each in stacks]),
        np.concatenate(owners),
        block,
        stacks[0].source,
    )


def _recording(stack: Stack, words: Words) -> Table:
    """A recording (n, channels) as a table."""
    columns: dict[str, Array] = {}
    for name, values in zip(_channel_names(stack, words), stack.x.T, strict=True):
        columns[name] = values
    columns["y"] = stack.y
    if stack.client is not None:
        columns["client"] = np.asarray(stack.client)
    sizes = {name: len(values) for name, values in columns.items()}
    if len(set(sizes.values())) > 1:
        raise InputError(
            f"{stack.source} has {len(stack.x)} inputs and {len(stack.y)} targets; there must be "
            "as many."
        )
    return Table(stack.source, columns)


def _channel_names(stack: Stack, words: Words) -> tuple[str, ...]:
    count = stack.x.shape[1]
    if isinstance(words.channels, tuple):
        if len(words.channels) != count:
            raise InputError(
                f"channels has {len(words.channels)} names, and x of the shape {stack.x.shape} "
                f"has {count} columns; name each of them."
            )
        return words.channels
    return tuple(f"x{place}" for place in range(count))


def _table_words(stack: Stack, words: Words) -> Words:
    """The words for the table that :func:`_recording` makes."""
    client = None if stack.client is None else "client"
    return replace(
        words, label="y", client=client, channels=_channel_names(stack, words), time=None
    )
