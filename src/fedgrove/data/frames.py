"""What a person has in Python, brought to tables or arrays: DataFrames, torch Datasets and others.

pandas, polars, datasets and flwr-datasets are told by what their objects can do: none of them is
imported, and none needs to be installed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import IterableDataset, TensorDataset

from ..errors import InputError
from .arrays import Stack
from .dataset import Array
from .reading import Read
from .tables import Findings, Table, Words

KINDS = (
    "the name of a data set (fedgrove list data), a file or a folder, a DataFrame, arrays (x, y) "
    "or (x, y, client), a torch or Hugging Face Dataset, a partitioner of flwr-datasets, or a "
    "dictionary of any of these by client"
)


def read_object(data: Any, words: Words) -> Read:
    """The tables or arrays of what was made in Python."""
    if _is_partitioner(data):
        return _clients(_partitions(data), words)
    is_arrays = isinstance(data, Mapping) and "x" in data and _label_of(words) in data
    is_dictionary = isinstance(data, Mapping)
    if is_dictionary and not is_arrays and not _is_dataset_dict(data):
        return _clients(data, words)
    content = _content(data, words, "data")
    if isinstance(content, Table):
        return Read(tables=(content,))
    return Read(stacks=(("", content),))


def name_of(data: Any) -> str:
    """What a federation of such data is called."""
    if _is_frame(data):
        return "frame"
    return "clients" if isinstance(data, Mapping) or _is_partitioner(data) else "arrays"


def _clients(data: Mapping[Any, Any], words: Words) -> Read:
    """A dictionary of clients, by name; what is wrong with any of them is said at once."""
    if not data:
        raise InputError("data is an empty dictionary; it must hold a client or more, by name.")
    findings = Findings()
    tables = []
    stacks = []
    for key, value in data.items():
        name = str(key)
        try:
            content = _content(value, words, f"client {name}")
        except InputError as error:
            findings.add(str(error))
            continue
        if isinstance(content, Table):
            whose = "" if isinstance(words.client, str) else name
            tables.append(Table("the frame" if whose else f"client {name}", content.columns, whose))
        else:
            stacks.append((name, content))
    findings.refuse()
    if tables and stacks:
        raise InputError(
            "some clients of data are tables and others arrays; give one or the other for all."
        )
    return Read(tuple(tables), tuple(stacks))


def _content(data: Any, words: Words, source: str) -> Table | Stack:
    """One table or stack."""
    if _is_dataset_dict(data):
        splits = ", ".join(str(name) for name in data)
        raise InputError(
            f"{source} is a dictionary of splits ({splits}); give one of them, as "
            f"data['{next(iter(data))}'], or join them: each client holds out a test part itself."
        )
    if _is_frame(data):
        return Table(source, {str(name): _array(data[name]) for name in data.columns})
    if _is_hugging_face(data):
        return _hugging_face(data, words, source)
    if isinstance(data, TorchDataset):
        return _torch_dataset(data, words, source)
    if isinstance(data, Mapping):
        label = _label_of(words)
        _check_has(data, ("x", label), source)
        owner = words.client if isinstance(words.client, str) else "client"
        block = data.get("block")
        return Stack(_array(data["x"]), _array(data[label]), data.get(owner), block, source)
    if isinstance(data, tuple | list) and 2 <= len(data) <= 3:
        owner = data[2] if len(data) == 3 else words.client
        client = None if owner is None else _array(owner)
        return Stack(_array(data[0]), _array(data[1]), client, None, source)
    if isinstance(data, np.ndarray | Tensor):
        if words.label is None or isinstance(words.label, str):
            raise InputError(
                f"{source} is an array of the shape {tuple(data.shape)} without targets; give "
                "data=(x, y) or data=(x, y, client)."
            )
        client = None if words.client is None else _array(words.client)
        return Stack(_array(data), _array(words.label), client, None, source)
    raise InputError(f"{source} is a {type(data).__name__}; it must be {KINDS}.")


def _label_of(words: Words) -> str:
    return words.label if isinstance(words.label, str) else "y"


def _check_has(data: Mapping[Any, Any], names: Sequence[str], source: str) -> None:
    missing = [name for name in names if name not in data]
    if missing:
        has = ", ".join(str(key) for key in list(data)[:12])
        raise InputError(f"{source} has no {' and no '.join(missing)} (it has {has}).")


def _array(values: Any) -> Array:
    """Anything that holds numbers or words, as an array; a tensor may be on a device."""
    if isinstance(values, Tensor):
        return np.asarray(values.detach().cpu())
    try:
        return np.asarray(values)
    except ValueError:
        raise InputError(
            f"a {type(values).__name__} of {len(values)} items of different lengths is no array; "
            "all examples must have the same shape."
        ) from None


# ---- what is what --------------------------------------------------------------------------------


def _is_frame(data: Any) -> bool:
    """A DataFrame of pandas, polars or alike."""
    return hasattr(data, "columns") and callable(getattr(data, "to_numpy", None))


def _is_hugging_face(data: Any) -> bool:
    return hasattr(data, "column_names") and hasattr(data, "features")


def _is_dataset_dict(data: Any) -> bool:
    """A dictionary of a Hugging Face data set's splits."""
    return isinstance(data, Mapping) and hasattr(data, "column_names")


def _is_partitioner(data: Any) -> bool:
    return callable(getattr(data, "load_partition", None)) and hasattr(data, "num_partitions")


# ---- torch ---------------------------------------------------------------------------------------


def _torch_dataset(data: TorchDataset[Any], words: Words, source: str) -> Stack:
    """The examples of a data set, one after another: (x, y), (x, y, client) or a dictionary."""
    if isinstance(data, IterableDataset) or not hasattr(data, "__len__"):
        raise InputError(
            f"{source} is a {type(data).__name__} without a length; give a data set whose examples "
            "have numbers, with __len__ and __getitem__."
        )
    count = len(data)
    if count == 0:
        raise InputError(f"{source} is a {type(data).__name__} without examples.")
    if isinstance(data, TensorDataset):
        columns: list[Any] = list(data.tensors)
    else:
        items = [_item(data[place], words, source) for place in range(count)]
        columns = [_stacked(column, source) for column in zip(*items, strict=True)]
    if not 2 <= len(columns) <= 3:
        raise InputError(
            f"an example of {source} has {len(columns)} parts; it must have two, (x, y), or three, "
            "(x, y, client)."
        )
    owner = columns[2] if len(columns) == 3 else _owner_beside(data, words, source, count)
    client = None if owner is None else _array(owner)
    return Stack(_array(columns[0]), _array(columns[1]), client, None, source)


def _owner_beside(data: Any, words: Words, source: str, count: int) -> Any:
    """Whose the examples are, where they do not say so themselves: an array, or an attribute."""
    if words.client is None or not isinstance(words.client, str):
        return words.client
    owner = getattr(data, words.client, None)
    if owner is None or not hasattr(owner, "__len__") or len(owner) != count:
        raise InputError(
            f"client is '{words.client}', and {source} has no attribute of that name with "
            f"{count} entries; give client= an array of {count}, one for each example."
        )
    return owner


def _item(item: Any, words: Words, source: str) -> tuple[Any, ...]:
    """The parts of one example."""
    if isinstance(item, Mapping):
        label = _label_of(words)
        inputs = "x"
        if isinstance(words.channels, tuple) and len(words.channels) == 1:
            inputs = words.channels[0]
        names = [inputs, label]
        if isinstance(words.client, str) and words.client in item:
            names.append(words.client)
        _check_has(item, names, f"an example of {source}")
        return tuple(item[name] for name in names)
    if isinstance(item, tuple | list):
        return tuple(item)
    raise InputError(
        f"an example of {source} is a {type(item).__name__}; it must be (x, y), (x, y, client), or "
        "a dictionary with x and the label."
    )


def _stacked(column: Sequence[Any], source: str) -> Array:
    """One part of all examples; they must have the same shape."""
    arrays = [_array(value) for value in column]
    shapes = {array.shape for array in arrays}
    if any(array.dtype.kind == "O" for array in arrays):
        raise InputError(
            f"an example of {source} holds a {type(column[0]).__name__}; examples must be tensors, "
            "arrays or numbers: add a transform that makes them so."
        )
    if len(shapes) > 1:
        some = ", ".join(str(shape) for shape in sorted(shapes)[:3])
        raise InputError(
            f"the examples of {source} have different shapes ({some}); all must have the same."
        )
    return np.stack(arrays)


# ---- Hugging Face, flwr-datasets -----------------------------------------------------------------


def _hugging_face(data: Any, words: Words, source: str) -> Table | Stack:
    """A table where all columns hold one value in a row; else x is a column of arrays."""
    if isinstance(data.column_names, Mapping) or not hasattr(data, "__len__"):
        raise InputError(
            f"{source} is a {type(data).__name__}, read piece by piece; load it whole, without "
            "streaming."
        )
    names = [str(name) for name in data.column_names]
    label = words.label
    if not isinstance(label, str) or label not in names:
        given = "not given" if label is None else f"'{label}'"
        raise InputError(
            f"label is {given}, and {source} has the columns {', '.join(names)}; say which one is "
            "to be predicted."
        )
    special = {label, words.client, words.time}
    inputs = [name for name in names if name not in special]
    if isinstance(words.channels, tuple):
        missing = [name for name in words.channels if name not in names]
        if missing:
            raise InputError(
                f"channels names {', '.join(missing)}, and {source} has {', '.join(names)}."
            )
        inputs = list(words.channels)
    rows = data.with_format("numpy")
    columns = {name: np.asarray(rows[name][:]) for name in names if name in {*inputs, *special}}
    columns[label] = _class_names(data.features[label], columns[label])
    if all(columns[name].ndim == 1 and columns[name].dtype.kind != "O" for name in inputs):
        return Table(source, columns)
    if all(columns[name].dtype.kind in "USO" and columns[name].ndim == 1 for name in inputs):
        # Text, which the table refuses by its column; or pieces of different lengths.
        ragged = [name for name in inputs if _is_ragged(columns[name])]
        if not ragged:
            return Table(source, columns)
        raise InputError(
            f"column '{ragged[0]}' of {source} holds arrays of different shapes; all must have "
            "the same."
        )
    owner = columns.get(words.client) if isinstance(words.client, str) else words.client
    return Stack(_inputs(data, inputs, columns, source), columns[label], owner, None, source)


def _is_ragged(column: Array) -> bool:
    return len(column) > 0 and isinstance(column[0], np.ndarray | list)


def _class_names(feature: Any, column: Array) -> Array:
    """Classes by the names that the data set has for them."""
    names = getattr(feature, "names", None)
    if names is None or column.dtype.kind not in "iu" or (column < 0).any():
        return column
    return np.asarray(names)[column]


def _inputs(data: Any, inputs: Sequence[str], columns: Mapping[str, Array], source: str) -> Array:
    """One column of arrays, or several series of one length as channels."""
    first = columns[inputs[0]]
    if len(inputs) == 1:
        is_image = type(data.features[inputs[0]]).__name__ == "Image"
        if is_image and first.ndim == 3:
            return first[:, None]
        return np.moveaxis(first, -1, 1) if is_image and first.ndim == 4 else first
    shapes = {columns[name].shape for name in inputs}
    if len(shapes) > 1 or first.ndim != 2:
        listed = ", ".join(f"{name} {columns[name].shape}" for name in inputs[:6])
        raise InputError(
            f"the inputs of {source} are columns of different shapes ({listed}); name the one, or "
            "the series of one length, that are inputs (channels)."
        )
    return np.stack([columns[name] for name in inputs], axis=1)


def _partitions(data: Any) -> dict[str, Any]:
    """The parts of a partitioner, by their natural names where it has such."""
    try:
        parts = [data.load_partition(number) for number in range(data.num_partitions)]
    except (AttributeError, ValueError) as error:
        reason = str(error).splitlines()[0][:160] if str(error) else type(error).__name__
        raise InputError(
            f"the partitioner cannot give its parts ({reason}); assign its dataset first: "
            "partitioner.dataset = ..."
        ) from None
    natural = getattr(data, "partition_id_to_natural_id", {})
    return {str(natural.get(number, number)): part for number, part in enumerate(parts)}
