"""Read a user's own data: one reader for each kind of file or Python object.

Every reader returns a table (a DataFrame) or arrays; :mod:`.tables` and :mod:`.arrays` check them.
Objects of polars, datasets and flwr-datasets are recognised by what they can do: these libraries
are not imported and need not be installed.
"""

from __future__ import annotations

import csv
import hashlib
import warnings
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
from .dataset import Array, Dataset
from .named_set import SUFFIXES, is_path, read_npz
from .tables import InputTable, describe_place

SEPARATORS = (",", ";", "\t")
DATA_KINDS = (
    "the name of a data set (fedgrove list data), a file or a folder, a DataFrame, arrays (x, y) "
    "or (x, y, client), a torch or Hugging Face Dataset, a partitioner of flwr-datasets, or a "
    "dictionary of any of these by client"
)

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
        found, notes = _find_files(path)
        contents = _read_all(
            (client, partial(_read_file, file, path, client, options)) for client, file in found
        )
        for _, file in found:
            files[file.as_posix()] = hashlib.sha256(file.read_bytes()).hexdigest()
        # "." and ".." have no name of their own.
        name = path.stem if path.is_file() else path.resolve().name
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
        return OwnData(name, table_checks.make_dataset(tables, options, notes), files)
    if options.window is not None:
        return OwnData(name, array_checks.cut_recordings(arrays, options, notes), files)
    dataset = array_checks.make_dataset(_join_arrays(arrays), options)
    return OwnData(name, replace(dataset, notes=(*notes, *dataset.notes)), files)


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


def _find_files(path: Path) -> tuple[list[tuple[str, Path]], list[str]]:
    """Return the files of a path with their clients, and notes; in a folder each file is a client.

    A file in a sub-folder belongs to the client with the name of the sub-folder.
    """
    endings = ", ".join(SUFFIXES)
    if not path.exists():
        raise InputError(
            f"there is no file or folder '{path}'; give a file ({endings}), a folder of such "
            "files, one for each client, or the name of a data set (fedgrove list data)."
        )
    if path.is_file():
        is_known = path.suffix.lower() in SUFFIXES
        check(is_known, f"the ending of {path}", path.suffix, f"one of {endings}")
        return [("", path)], []
    found: list[tuple[str, Path]] = []
    ignored: list[str] = []
    for file in _list_files(path):
        inside = file.relative_to(path)
        # macOS leaves a hidden "._NAME.csv" next to each file that it copies.
        is_hidden = any(part.startswith(".") for part in inside.parts)
        if is_hidden or not file.is_file():
            continue
        if file.suffix.lower() in SUFFIXES:
            client = inside.parts[0] if len(inside.parts) > 1 else file.stem
            found.append((client, file))
        else:
            ignored.append(str(inside))
    if not found:
        raise InputError(
            f"the folder '{path}' has no file that ends in {endings}; put a file for each client "
            "there, or a folder of files for each client."
        )
    if ignored:
        return found, [f"files that are not data are ignored: {list_some(ignored)}"]
    return found, []


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
    suffix = path.suffix.lower()
    try:
        if suffix == ".npz":
            return _read_npz_file(path, source, client, options)
        if suffix == ".parquet":
            return InputTable(source, _read_parquet(path, source), client)
        # As texts: the names of clients stay as they are written, and large labels exact.
        texts = [name for name in (options.label, options.client) if isinstance(name, str)]
        return InputTable(source, read_csv(path, source, texts), client)
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
        raise InputError(f"{source} cannot be read as parquet ({_reason(error)}).") from None


def _reason(error: Exception) -> str:
    """Return the first line of an error, cut if it is long."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:160]


def _read_npz_file(path: Path, source: str, client: str, options: OwnDataOptions) -> Content:
    """Read arrays x and y, or a table of columns of equal length."""
    contents = read_npz(path)
    shapes = {values.shape for values in contents.values()}
    is_table = len(shapes) == 1 and len(next(iter(shapes))) == 1
    if is_table and "x" not in contents and _label_name(options) in contents:
        return InputTable(source, pd.DataFrame(contents), client)
    return _read_mapping(contents, options, source)


# ---- CSV -----------------------------------------------------------------------------------------


def read_csv(path: Path, source: str, text_columns: Sequence[str] | None = None) -> pd.DataFrame:
    """Read a CSV file with the names of the columns in its first line.

    Args:
        path: The file.
        source: How messages call it.
        text_columns: Columns that stay text; pandas finds the type of the others. None: all columns
            stay text, and blank lines are left out.

    Returns:
        The table; its index, called "line", has the line of each row.

    Raises:
        InputError: It is not a CSV file, or its first line does not name the columns.
    """
    try:
        # A file of Excel begins with a mark of its encoding, which utf-8-sig leaves out.
        with path.open(encoding="utf-8-sig", newline="") as file:
            # pandas guesses the separator only with its slow parser.
            separator = max(SEPARATORS, key=file.readline().count)
            file.seek(0)
            # Not by pandas, which would rename columns that are there twice.
            header = next(csv.reader(file, delimiter=separator, skipinitialspace=True), [])
        names = [name.strip() for name in header]
        _check_header(names, source)
        types: Any = str
        if text_columns is not None:
            types = {i: str for i, name in enumerate(names) if name in text_columns}
        try:
            frame = _parse_csv(path, separator, len(names), types)
        except (pd.errors.ParserError, pd.errors.ParserWarning):
            _check_cell_counts(path, source, separator, len(names))
            raise
    except UnicodeDecodeError:
        raise InputError(f"{source} is not text in UTF-8; save it as CSV in UTF-8.") from None
    except (csv.Error, pd.errors.ParserError, pd.errors.ParserWarning) as error:
        raise InputError(f"{source} is not CSV ({_reason(error)}); save it as CSV.") from None
    frame.index = pd.RangeIndex(2, len(frame) + 2, name="line")
    if frame.iloc[:, -1].isna().any():
        # Some rows are blank or too short, or have an empty last cell.
        is_blank = frame.isna().all(axis=1)
        if text_columns is None:
            frame = frame[~is_blank]
        else:
            # Blank lines at the end are not rows.
            frame = frame.iloc[: len(frame) - is_blank[::-1].cumprod().sum()]
        if frame.iloc[:, -1].isna().any():
            _check_cell_counts(path, source, separator, len(names))
    return _name_columns(frame, names, source)


def _parse_csv(path: Path, separator: str, columns: int, types: Any) -> pd.DataFrame:
    options: dict[str, Any] = {}
    version = tuple(map(int, pd.__version__.split(".")[:2]))
    if version < (3, 1):
        # Later versions always read floats exactly.
        options["float_precision"] = "round_trip"
    with warnings.catch_warnings():
        # The warning means that a row has more cells than there are names.
        warnings.simplefilter("error", pd.errors.ParserWarning)
        return pd.read_csv(
            path,
            sep=separator,
            encoding="utf-8-sig",
            header=0,
            names=list(range(columns)),
            index_col=False,
            dtype=types,
            # The type of a column depends on all of its cells.
            low_memory=False,
            # Blanks after a separator would make quotes part of the cell.
            skipinitialspace=True,
            # Rows keep their numbers for messages, and texts such as NA stay to be shown.
            skip_blank_lines=False,
            keep_default_na=False,
            na_values=[""],
            **options,
        )


def _check_header(names: Sequence[str], source: str) -> None:
    # Spreadsheets leave columns without a name after the last column.
    given = pd.Index([name for name in names if name])
    if not len(given):
        raise InputError(f"{source} is empty; its first line must have the names of the columns.")
    _check_names(given, source)
    if pd.to_numeric(given, errors="coerce").notna().all():
        raise InputError(
            f"{source} begins with numbers ({', '.join(given[:4])}, ...); its first line must have "
            "the names of the columns."
        )


def _check_names(names: pd.Index, source: str) -> None:
    repeated = sorted({f"'{name}'" for name in names[names.duplicated()]})
    if repeated:
        raise InputError(
            f"{source} has more than one column {', '.join(repeated)}; each name must occur only "
            "once."
        )


def _check_cell_counts(path: Path, source: str, separator: str, count: int) -> None:
    """Refuse the first line with more or fewer cells than there are names."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.reader(file, delimiter=separator, skipinitialspace=True)
        for number, row in enumerate(rows, start=1):
            if row and len(row) != count:
                raise InputError(
                    f"{source} has {len(row)} cells in line {number} and {count} names of columns "
                    "in the first; every line must have the same number."
                )


def _name_columns(frame: pd.DataFrame, names: Sequence[str], source: str) -> pd.DataFrame:
    """Name the columns; columns without a name must be empty, and are left out."""
    for position, name in enumerate(names):
        if not name and not frame[position].isna().all():
            raise InputError(
                f"{source} has no name for column {position + 1}, which begins with "
                f"'{frame[position].iloc[0]}'; name it in the first line or leave it out (pandas: "
                "to_csv(..., index=False))."
            )
    frame = frame.set_axis(names, axis=1)
    return frame.drop(columns="") if "" in names else frame


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
    _check_names(names, source)
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
                f"the examples of {source} cannot be stacked ({_reason(error)}); all must be "
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
    special = [name for name in (label, options.client, options.time) if name in names]
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
            f"the partitioner cannot load its partitions ({_reason(error)}); assign its dataset "
            "first: partitioner.dataset = ..."
        ) from None
    natural = getattr(data, "partition_id_to_natural_id", {})
    return {str(natural.get(number, number)): part for number, part in enumerate(parts)}
