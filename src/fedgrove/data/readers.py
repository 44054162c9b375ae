"""Read a user's own data: one reader for each kind of file or Python object.

Every reader returns a table (a DataFrame) or arrays; :mod:`.tables` and :mod:`.arrays` check them.
Objects of polars, datasets and flwr-datasets are recognised by what they can do: these libraries
are not imported and need not be installed.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import IterableDataset, TensorDataset, default_collate

from ..errors import InputError, Refusals, check, list_some
from . import arrays as array_checks
from . import tables as table_checks
from .arrays import ArrayData, OwnDataOptions
from .columns import InputTable, describe_place
from .csv_files import check_names, read_csv, shorten_error
from .dataset import Array, Dataset
from .named_set import COMPRESSIONS, SUFFIXES, data_ending, is_path, read_npz
from .tables import Recordings

DATA_KINDS = (
    "the name of a data set (fedgrove list data), a file or a folder, a DataFrame, arrays (x, y) "
    "or (x, y, client), a torch or Hugging Face Dataset, a partitioner of flwr-datasets, or a "
    "dictionary of any of these by client"
)

ARCHIVES = (".zip", ".tar", ".tgz", ".7z", ".rar")
OTHER_TABLES = (
    *(".xlsx", ".xls", ".xlsm", ".ods", ".feather", ".arrow", ".orc", ".jsonl", ".ndjson"),
    *(".h5", ".hdf5", ".mat", ".npy", ".arff", ".sav", ".dta"),
)
FIRST_LINE = 1 << 14
"""Bytes at the beginning of a file in which its first line is looked for."""

Content = InputTable | ArrayData
Contents = list[tuple[str, Content]]
"""Tables or arrays, each with the name of its client; empty if it has none."""


@dataclass(frozen=True)
class OwnData:
    """A user's own data.

    Args:
        name: The name of the federation.
        dataset: The examples.
        files: The SHA-256 of each file, by its path as it was given.
    """

    name: str
    dataset: Dataset
    files: Mapping[str, str]


def read_own_data(data: Any, options: OwnDataOptions) -> OwnData:
    """Read a file, a folder or a Python object.

    Args:
        data: A path, or any of the objects in :data:`DATA_KINDS`.
        options: Which columns are what, and how to cut windows.

    Raises:
        InputError: The data cannot be used; the error lists everything that was found.
    """
    notes: list[str] = []
    files: dict[str, str] = {}
    if is_path(data):
        path = Path(data)
        found, notes = _find_files(path, options)
        contents = _read_all(
            (client, partial(_read_file, file, path, client, options)) for client, file in found
        )
        for _, file in found:
            files[file.as_posix()] = hashlib.sha256(file.read_bytes()).hexdigest()
        # "." and ".." have no name of their own.
        name = _file_stem(path) if path.is_file() else path.resolve().name
    else:
        name, contents = _read_object(data, options)
    tables = [content for _, content in contents if isinstance(content, InputTable)]
    arrays = [(client, each) for client, each in contents if isinstance(each, ArrayData)]
    if tables and arrays:
        raise InputError(
            f"data has tables ({tables[0].source}) and arrays ({arrays[0][1].source}); give one or "
            "the other for all."
        )
    if tables:
        notes += _note_found(tables)
        return OwnData(name, table_checks.make_dataset(tables, options, notes), files)
    if options.window is not None:
        return OwnData(name, array_checks.cut_recordings(arrays, options, notes), files)
    dataset = array_checks.make_dataset(_join_arrays(arrays), options)
    return OwnData(name, replace(dataset, notes=(*notes, *dataset.notes)), files)


def read_recording(path: Path, options: OwnDataOptions) -> tuple[InputTable, Recordings]:
    """Read a user's recording without targets; a column of clients may be missing.

    Args:
        path: A file with a table.
        options: As the table of a run was read.
    """
    if not path.is_file():
        raise InputError(f"there is no file '{path}'; give a file with a recording (.csv).")
    _find_files(path, options)
    content = _read_file(path, path, "", options)
    if not isinstance(content, InputTable):
        raise InputError(f"{path.name} has arrays; give a file with a table (.csv, .parquet).")
    if options.client not in content.frame:
        options = replace(options, client=None)
    return content, table_checks.read_recordings(content, options)


def _read_all(readers: Iterable[tuple[str, Callable[[], Content]]]) -> Contents:
    """Read the parts of all clients; report everything that is wrong with any of them."""
    refusals = Refusals()
    contents = []
    for client, read in readers:
        with refusals.collected():
            contents.append((client, read()))
    refusals.check()
    return contents


def _join_arrays(parts: Sequence[tuple[str, ArrayData]]) -> ArrayData:
    """Join the arrays of all clients; report all clients whose shapes differ."""
    first_client, first = parts[0]
    if not first_client:
        return first
    refusals = Refusals()
    clients = []
    for client, part in parts:
        place = describe_place(part.source, client)
        if part.x.shape[1:] != first.x.shape[1:]:
            refusals.add(
                f"{place} has x of the shape {part.x.shape}, and {first.source} has "
                f"{first.x.shape}; all sizes but the first must be equal."
            )
        if len(part.x) != len(part.y):
            refusals.add(f"{place} has {len(part.x)} inputs and {len(part.y)} targets.")
        clients.append(np.full(len(part.x), client))
    refusals.check()
    block = None
    if all(part.block is not None for _, part in parts):
        block = np.concatenate([np.asarray(part.block) for _, part in parts])
    x = np.concatenate([part.x for _, part in parts])
    y = np.concatenate([part.y for _, part in parts])
    return ArrayData(x, y, np.concatenate(clients), block, first.source)


# ---- files and folders ---------------------------------------------------------------------------


def _find_files(path: Path, options: OwnDataOptions) -> tuple[list[tuple[str, Path]], list[str]]:
    """Return the files of a path with their clients, and notes; in a folder each file is a client.

    A file in a sub-folder belongs to the client with the name of the sub-folder.
    """
    endings = ", ".join(SUFFIXES)
    compressed = f"{endings}, or .csv and .tsv with one of {', '.join(COMPRESSIONS)}"
    if not path.exists():
        raise InputError(
            f"there is no file or folder '{path}'; give a file ({endings}), a folder of such "
            "files, one for each client, or the name of a data set (fedgrove list data)."
        )
    if path.is_file():
        is_known = data_ending(path.name) != ""
        check(is_known, f"the ending of {path}", path.suffix, f"one of {compressed}")
        return [("", path)], []
    found: list[tuple[str, Path]] = []
    ignored: list[str] = []
    refusals = Refusals()
    for file in _list_files(path):
        inside = file.relative_to(path)
        # macOS leaves a hidden "._NAME.csv" next to each file that it copies.
        is_hidden = any(part.startswith(".") for part in inside.parts)
        if is_hidden or not file.is_file():
            continue
        advice = _how_to_read(file, options)
        if data_ending(file.name):
            client = inside.parts[0] if len(inside.parts) > 1 else _file_stem(file)
            found.append((client, file))
        elif advice:
            refusals.add(
                f"{inside} looks like data and cannot be read; {advice}, or move it out of the "
                "folder.",
                advice,
                str(inside),
            )
        else:
            ignored.append(str(inside))
    _find_copies([file for _, file in found], path, refusals)
    refusals.check()
    if not found:
        raise InputError(
            f"the folder '{path}' has no file that ends in {compressed}; put a file for each "
            "client there, or a folder of files for each client."
        )
    if ignored:
        return found, [f"files that are not data are ignored: {list_some(ignored)}"]
    return found, []


def _file_stem(path: Path) -> str:
    """Return the name of a user's file without its ending; anna.csv.gz is anna."""
    return path.name[: len(path.name) - len(data_ending(path.name))]


def _how_to_read(file: Path, options: OwnDataOptions) -> str:
    """Return what to do with a file that looks like data but is not read; empty for others."""
    name = file.name.lower()
    if data_ending(name):
        return ""
    if name.endswith((*COMPRESSIONS, *ARCHIVES)):
        return "unpack it"
    if name.endswith(OTHER_TABLES):
        return "save it as CSV"
    try:
        with file.open("rb") as content:
            beginning = content.read(FIRST_LINE)
    except OSError:
        return ""
    header = (beginning.decode("utf-8-sig", "replace").splitlines() or [""])[0]
    cells = [cell.strip(' "') for cell in re.split(r"[,;\t|]", header)]
    # A text whose first line has the name of the column to predict.
    is_table = len(cells) > 1 and options.label in cells
    return "save it as CSV, with a name that ends in .csv" if is_table else ""


def _find_copies(files: Sequence[Path], folder: Path, refusals: Refusals) -> None:
    """Report a file that is there compressed too: a copy could be in training and test parts."""
    names: dict[Path, Path] = {}
    for file in files:
        plain = file.with_name(_file_stem(file))
        other = names.setdefault(plain, file)
        if other is not file and data_ending(file.name).endswith(COMPRESSIONS):
            refusals.add(
                f"{other.relative_to(folder)} and {file.relative_to(folder)} seem to be the same "
                "recording; leave one of them in the folder."
            )


def _note_found(tables: Sequence[InputTable]) -> list[str]:
    """Note in one line which files are not written as English files are, and how."""
    sources: dict[tuple[str, ...], list[str]] = {}
    for table in tables:
        if table.found:
            sources.setdefault(table.found, []).append(table.source)
    parts = []
    for found, names in sources.items():
        parts.append(
            f"{len(names)} of {len(tables)} files with {', '.join(found)}, such as {names[0]}"
        )
    return [f"read: {'; '.join(parts)}"] if parts else []


def _list_files(path: Path) -> list[Path]:
    try:
        return sorted(path.rglob("*"))
    except OSError as error:
        raise InputError(
            f"the folder '{path}' cannot be read: {error.filename}: {error.strerror or error}; "
            "give a folder with your data alone."
        ) from None


def _read_file(path: Path, folder: Path, client: str, options: OwnDataOptions) -> Content:
    source = path.name if path == folder else path.relative_to(folder).as_posix()
    if options.client is not None:
        # A column of clients comes before the names of files.
        client = ""
    ending = data_ending(path.name)
    try:
        if ending == ".npz":
            return _read_npz_file(path, source, client, options)
        if ending == ".parquet":
            return InputTable(source, _read_parquet(path, source), client)
        # As texts: the names of clients stay as they are written, and large labels exact.
        label = options.label if isinstance(options.label, str) else None
        owner = options.client if isinstance(options.client, str) else None
        table = read_csv(path, source, label, owner)
        return InputTable(source, table.frame, client, table.found)
    except OSError as error:
        raise InputError(f"{source} cannot be read ({error.strerror or error}).") from None


def _read_parquet(path: Path, source: str) -> pd.DataFrame:
    try:
        return _clean_names(pd.read_parquet(path, engine="pyarrow"), source)
    except ImportError:
        raise InputError(
            f"{source} needs pyarrow to be read: pip install pyarrow, or save it as CSV."
        ) from None
    except InputError:
        raise
    except Exception as error:
        # pyarrow has its own errors for each thing that may be wrong with a file.
        raise InputError(f"{source} cannot be read as parquet ({shorten_error(error)}).") from None


def _read_npz_file(path: Path, source: str, client: str, options: OwnDataOptions) -> Content:
    """Read arrays x and y, or a table of columns of equal length."""
    contents = read_npz(path)
    shapes = {values.shape for values in contents.values()}
    is_table = len(shapes) == 1 and len(next(iter(shapes))) == 1
    if is_table and "x" not in contents and _label_name(options) in contents:
        return InputTable(source, pd.DataFrame(contents), client)
    return _read_mapping(contents, options, source)


# ---- objects in Python ---------------------------------------------------------------------------


def _read_object(data: Any, options: OwnDataOptions) -> tuple[str, Contents]:
    """Read a Python object, or a dictionary of them by client; return its name too."""
    if callable(getattr(data, "load_partition", None)) and hasattr(data, "num_partitions"):
        data = _read_partitions(data)
    # A dictionary of x and y is the data of one source, not of clients called x and y.
    is_arrays = isinstance(data, Mapping) and "x" in data and _label_name(options) in data
    is_splits = isinstance(data, Mapping) and hasattr(data, "column_names")
    if not isinstance(data, Mapping) or is_arrays or is_splits:
        name = "arrays"
        if _is_frame(data):
            name = "frame"
        elif is_arrays:
            name = "clients"
        return name, [("", _read_one(data, options, "data"))]
    check(len(data) > 0, "data", data, "a dictionary with one client or more, by name")
    return "clients", _read_all(
        (str(client), partial(_read_client, str(client), value, options))
        for client, value in data.items()
    )


def _read_client(client: str, value: Any, options: OwnDataOptions) -> Content:
    content = _read_one(value, options, f"client {client}")
    if isinstance(content, InputTable) and not isinstance(options.client, str):
        return replace(content, client=client)
    return content


def _read_one(data: Any, options: OwnDataOptions, source: str) -> Content:
    """Read one object as a table or arrays."""
    if _is_frame(data):
        return InputTable(source, _read_frame(data, source))
    if hasattr(data, "column_names"):
        return _read_hugging_face(data, options, source)
    if isinstance(data, TorchDataset):
        return _read_torch_dataset(data, options, source)
    if isinstance(data, Mapping):
        return _read_mapping(data, options, source)
    if isinstance(data, tuple | list) and 2 <= len(data) <= 3:
        return _read_parts(data, options.client, source)
    if isinstance(data, np.ndarray | Tensor):
        if options.label is None or isinstance(options.label, str):
            raise InputError(
                f"{source} is an array of the shape {tuple(data.shape)} without targets; give "
                "data=(x, y) or data=(x, y, client)."
            )
        return _read_parts((data, options.label), options.client, source)
    raise InputError(f"{source} is a {type(data).__name__}; it must be {DATA_KINDS}.")


def _label_name(options: OwnDataOptions) -> str:
    return options.label if isinstance(options.label, str) else "y"


def _read_mapping(data: Mapping[str, Any], options: OwnDataOptions, source: str) -> ArrayData:
    """Read a dictionary with x, the label, and perhaps client and block."""
    names = ["x", _label_name(options)]
    client = "client"
    if isinstance(options.client, str):
        client = options.client
        names.append(client)
    x, y, *_ = _select(data, names, source)
    return ArrayData(_as_array(x), _as_array(y), data.get(client), data.get("block"), source)


def _select(data: Mapping[str, Any], names: Sequence[str], source: str) -> list[Any]:
    """Return the arrays of these names from a user's data; refuse data that lack one."""
    missing = [name for name in names if name not in data]
    if missing:
        present = ", ".join(sorted(map(str, data))) or "none"
        what = "it" if len(missing) == 1 else "them"
        raise InputError(
            f"{source} has no {' and no '.join(missing)} (it has {present}); add {what}."
        )
    return [data[name] for name in names]


def _read_parts(parts: Sequence[Any], owner: Any, source: str) -> ArrayData:
    """Read (x, y) or (x, y, client); ``owner`` is the client of each row if there is no third."""
    if len(parts) == 3:
        owner = parts[2]
    if owner is not None:
        owner = _as_array(owner)
    return ArrayData(_as_array(parts[0]), _as_array(parts[1]), owner, None, source)


def _as_array(values: Any) -> Array:
    """Return numbers or texts as an array; a tensor may be on a GPU."""
    if isinstance(values, Tensor):
        return np.asarray(values.detach().cpu())
    try:
        return np.asarray(values)
    except ValueError:
        raise InputError(
            f"a {type(values).__name__} of {len(values)} items of different lengths is not an "
            "array; all examples must have the same shape."
        ) from None


def _is_frame(data: Any) -> bool:
    """Whether data is a DataFrame of pandas, polars or a similar library."""
    return hasattr(data, "columns") and callable(getattr(data, "to_numpy", None))


def _read_frame(data: Any, source: str) -> pd.DataFrame:
    if not isinstance(data, pd.DataFrame):
        # Column by column, which needs no pyarrow.
        data = pd.DataFrame({str(name): _as_array(data[name]) for name in data.columns})
    return _clean_names(data, source)


def _clean_names(frame: pd.DataFrame, source: str) -> pd.DataFrame:
    """Return the frame with texts as names of columns, each there once, and rows from 0."""
    names = frame.columns.map(str)
    check_names(names, source)
    return frame.set_axis(names, axis=1).reset_index(drop=True)


def _read_torch_dataset(data: TorchDataset[Any], options: OwnDataOptions, source: str) -> ArrayData:
    """Read the examples of a torch Dataset: (x, y), (x, y, client) or dictionaries."""
    if isinstance(data, IterableDataset) or not hasattr(data, "__len__") or len(data) == 0:
        raise InputError(
            f"{source} is a {type(data).__name__} without a length or without examples; give a "
            "data set with __len__ and __getitem__."
        )
    if isinstance(data, TensorDataset):
        parts: Any = data.tensors
    else:
        items = [_read_item(data[i], options, source) for i in range(len(data))]
        try:
            parts = default_collate(items)
        except (RuntimeError, TypeError) as error:
            raise InputError(
                f"the examples of {source} cannot be stacked ({shorten_error(error)}); all must be "
                "tensors, arrays or numbers of the same shape."
            ) from None
    if not isinstance(parts, tuple | list) or not 2 <= len(parts) <= 3:
        raise InputError(
            f"an example of {source} must be (x, y), (x, y, client), or a dictionary with x and "
            "the label."
        )
    owner = options.client
    if isinstance(owner, str) and len(parts) == 2:
        owner = getattr(data, owner, None)
        if owner is None or not hasattr(owner, "__len__") or len(owner) != len(data):
            raise InputError(
                f"client is '{options.client}', and {source} has no attribute of that name with "
                f"{len(data)} entries; give client= an array with one entry for each example."
            )
    return _read_parts(parts, owner, source)


def _read_item(item: Any, options: OwnDataOptions, source: str) -> Any:
    """Return the parts of one example; a dictionary has x, or the one channel, and the label."""
    if not isinstance(item, Mapping):
        return item
    names = ["x", _label_name(options)]
    if isinstance(options.channels, tuple) and len(options.channels) == 1:
        names[0] = options.channels[0]
    if isinstance(options.client, str) and options.client in item:
        names.append(options.client)
    return _select(item, names, f"an example of {source}")


# ---- Hugging Face, flwr-datasets -----------------------------------------------------------------


def _read_hugging_face(data: Any, options: OwnDataOptions, source: str) -> Content:
    """Read a table if all columns have one value per row; else x is a column of arrays."""
    if isinstance(data, Mapping):
        raise InputError(
            f"{source} is a dictionary of splits ({', '.join(data)}); give one of them, such as "
            f"data['{next(iter(data))}'], or join them: each client holds out a test part itself."
        )
    if not hasattr(data, "__len__"):
        raise InputError(f"{source} is a streaming data set; load it without streaming.")
    names = list(data.column_names)
    label = options.label
    if label not in names:
        given = "not given" if label is None else f"'{label}'"
        raise InputError(
            f"label is {given}, and {source} has the columns {', '.join(names)}; give the one to "
            "predict."
        )
    special = [name for name in (label, options.client, options.clock) if name in names]
    inputs = [name for name in names if name not in special]
    if isinstance(options.channels, tuple):
        inputs = list(options.channels)
        missing = [name for name in inputs if name not in names]
        if missing:
            raise InputError(
                f"channels names {', '.join(missing)}, and {source} has {', '.join(names)}."
            )
    rows = data.with_format("numpy")
    columns = {name: np.asarray(rows[name][:]) for name in (*inputs, *special)}
    classes = getattr(data.features[label], "names", None)
    if classes is not None and bool((columns[label] >= 0).all()):
        columns[label] = np.asarray(classes)[columns[label]]
    if all(columns[name].ndim == 1 for name in inputs):
        return InputTable(source, pd.DataFrame(columns))
    arrays = [columns[name] for name in inputs]
    shapes = {array.shape for array in arrays}
    if len(arrays) > 1 and (len(shapes) > 1 or arrays[0].ndim != 2):
        listed = [f"{name} {columns[name].shape}" for name in inputs]
        raise InputError(
            f"the inputs of {source} are columns of different shapes ({list_some(listed)}); name "
            "the one, or the series of one length, that are inputs (channels)."
        )
    # Each of several series is a channel.
    x = np.stack(arrays, axis=1) if len(arrays) > 1 else arrays[0]
    if type(data.features[inputs[0]]).__name__ == "Image":
        # Grey images have no axis of channels, others have it last.
        x = x[:, None] if x.ndim == 3 else np.moveaxis(x, -1, 1)
    owner = columns.get(options.client) if isinstance(options.client, str) else options.client
    return _read_parts((x, columns[label]), owner, source)


def _read_partitions(data: Any) -> dict[str, Any]:
    """Return the partitions of a partitioner, by their natural names if it has such."""
    try:
        parts = [data.load_partition(number) for number in range(data.num_partitions)]
    except (AttributeError, ValueError) as error:
        raise InputError(
            f"the partitioner cannot load its partitions ({shorten_error(error)}); assign its "
            "dataset first: partitioner.dataset = ..."
        ) from None
    natural = getattr(data, "partition_id_to_natural_id", {})
    return {str(natural.get(number, number)): part for number, part in enumerate(parts)}
