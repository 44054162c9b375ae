"""Read a user's own data: one reader for each kind of file or Python object.

Every reader returns a table (a DataFrame) or arrays; :mod:`.tables` and :mod:`.arrays` check them.
Objects of polars, datasets and flwr-datasets are recognised by what they can do: these libraries
are not imported and need not be installed.
"""

from __future__ import annotations

import csv
import hashlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import IterableDataset, TensorDataset

from ..errors import InputError
from . import arrays as array_checks
from . import tables as table_checks
from .arrays import ArrayData, OwnDataOptions
from .dataset import Array, Dataset
from .named_set import SUFFIXES, is_path, read_npz
from .tables import Findings, InputTable, describe_place

SEPARATORS = (",", ";", "\t")
KINDS = (
    "the name of a data set (fedgrove list data), a file or a folder, a DataFrame, arrays (x, y) "
    "or (x, y, client), a torch or Hugging Face Dataset, a partitioner of flwr-datasets, or a "
    "dictionary of any of these by client"
)


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


@dataclass
class _Contents:
    """What a file, a folder or an object contains: tables, or arrays with their clients."""

    tables: list[InputTable] = field(default_factory=list)
    arrays: list[tuple[str, ArrayData]] = field(default_factory=list)

    def add(self, client: str, content: InputTable | ArrayData) -> None:
        if isinstance(content, InputTable):
            self.tables.append(content)
        else:
            self.arrays.append((client, content))


def read_own_data(data: Any, options: OwnDataOptions) -> OwnData:
    """Read a file, a folder or a Python object.

    Args:
        data: A path, or any of the objects in :data:`KINDS`.
        options: Which columns are what, and how to cut windows.

    Raises:
        InputError: The data cannot be used; the error lists everything that was found.
    """
    notes: list[str] = []
    files: dict[str, str] = {}
    if is_path(data):
        path = Path(data)
        contents, notes, files = _read_path(path, options)
        # "." and ".." have no name of their own.
        name = path.stem if path.is_file() else path.resolve().name
    else:
        contents = _read_object(data, options)
        name = _name_object(data)
    if contents.tables:
        dataset = table_checks.make_dataset(contents.tables, options, notes)
    elif options.window is not None:
        dataset = table_checks.cut_recordings(contents.arrays, options, notes)
    else:
        dataset = array_checks.make_dataset(_join_arrays(contents.arrays), options)
        dataset = replace(dataset, notes=(*notes, *dataset.notes))
    return OwnData(name, dataset, files)


def _join_arrays(parts: Sequence[tuple[str, ArrayData]]) -> ArrayData:
    """Join the arrays of all clients; report all clients whose shapes differ."""
    first_client, first = parts[0]
    if not first_client:
        return first
    findings = Findings()
    for client, part in parts:
        place = describe_place(part.source, client)
        if part.x.shape[1:] != first.x.shape[1:]:
            findings.add(
                f"{place} has x of the shape {part.x.shape}, and {first.source} has "
                f"{first.x.shape}; all sizes but the first must be equal."
            )
        if len(part.x) != len(part.y):
            findings.add(f"{place} has {len(part.x)} inputs and {len(part.y)} targets.")
    findings.refuse()
    blocks = [part.block for _, part in parts]
    has_blocks = all(block is not None for block in blocks)
    return ArrayData(
        np.concatenate([part.x for _, part in parts]),
        np.concatenate([part.y for _, part in parts]),
        np.concatenate([np.full(len(part.x), client) for client, part in parts]),
        np.concatenate([np.asarray(block) for block in blocks]) if has_blocks else None,
        first.source,
    )


# ---- files and folders ---------------------------------------------------------------------------


def _read_path(path: Path, options: OwnDataOptions) -> tuple[_Contents, list[str], dict[str, str]]:
    """Read a file, or a folder in which each file or sub-folder is a client.

    Returns:
        The contents, notes on the folder, and the SHA-256 of each file.
    """
    notes = []
    if path.is_dir():
        found, ignored = _list_folder(path)
        if ignored:
            notes.append(f"files that are no data are ignored: {_list_some(ignored)}")
    else:
        _check_file(path)
        found = [("", path)]
    contents = _Contents()
    findings = Findings()
    files = {}
    for client, file in found:
        source = file.relative_to(path).as_posix() if path.is_dir() else file.name
        # A column of clients comes before the names of files.
        table_client = "" if options.client is not None else client
        try:
            contents.add(client, _read_file(file, source, table_client, options))
            files[file.as_posix()] = hashlib.sha256(file.read_bytes()).hexdigest()
        except InputError as error:
            findings.add(str(error))
        except OSError as error:
            findings.add(f"{source} cannot be read ({error.strerror or error}).")
    findings.refuse()
    if contents.tables and contents.arrays:
        raise InputError(
            f"{path.name} has tables ({contents.tables[0].source}) and arrays x and y "
            f"({contents.arrays[0][1].source}); give one or the other."
        )
    return contents, notes, files


def _check_file(path: Path) -> None:
    if not path.exists():
        raise InputError(
            f"there is no file or folder '{path}'; give a file ({', '.join(SUFFIXES)}), a folder "
            "of such files, one for each client, or the name of a data set (fedgrove list data)."
        )
    if path.suffix.lower() not in SUFFIXES:
        raise InputError(
            f"'{path}' ends in '{path.suffix}'; files that can be read end in "
            f"{', '.join(SUFFIXES)}."
        )


def _list_folder(folder: Path) -> tuple[list[tuple[str, Path]], list[str]]:
    """Return the files of a folder with their clients, and the names of files without data."""
    found: list[tuple[str, Path]] = []
    ignored: list[str] = []
    for file in sorted(folder.rglob("*")):
        inside = file.relative_to(folder)
        # macOS leaves a hidden "._NAME.csv" next to each file that it copies.
        is_hidden = any(part.startswith(".") for part in inside.parts)
        if is_hidden or not file.is_file():
            continue
        if file.suffix.lower() in SUFFIXES:
            # The client is the sub-folder, or else the file.
            client = inside.parts[0] if len(inside.parts) > 1 else file.stem
            found.append((client, file))
        else:
            ignored.append(str(inside))
    if not found:
        raise InputError(
            f"the folder '{folder}' has no file that ends in {', '.join(SUFFIXES)}; put a file "
            "for each client there, or a folder of files for each client."
        )
    return found, ignored


def _list_some(names: Sequence[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


def _read_file(
    path: Path, source: str, client: str, options: OwnDataOptions
) -> InputTable | ArrayData:
    suffix = path.suffix.lower()
    if suffix == ".npz":
        return _read_npz_file(path, source, client, options)
    if suffix == ".parquet":
        return InputTable(source, _read_parquet(path, source), client)
    # As texts: the names of clients stay as they are written, and large labels exact.
    texts = [name for name in (options.label, options.client) if isinstance(name, str)]
    return InputTable(source, read_csv(path, source, texts), client, first_line=2)


def _read_parquet(path: Path, source: str) -> pd.DataFrame:
    try:
        frame = pd.read_parquet(path, engine="pyarrow")
    except ImportError:
        raise InputError(
            f"{source} needs pyarrow to be read: pip install pyarrow, or save it as CSV."
        ) from None
    except Exception as error:
        # pyarrow has its own errors for each thing that may be wrong with a file.
        reason = str(error).splitlines()[0][:160]
        raise InputError(f"{source} cannot be read as parquet ({reason}).") from None
    return _clean_names(frame, source)


def _read_npz_file(
    path: Path, source: str, client: str, options: OwnDataOptions
) -> InputTable | ArrayData:
    """Read arrays x and y, or a table of columns of equal length."""
    label = _label_name(options)
    client_column = options.client if isinstance(options.client, str) else "client"
    contents = read_npz(path)
    lengths = {values.shape for values in contents.values()}
    is_table = len(lengths) == 1 and all(values.ndim == 1 for values in contents.values())
    if "x" not in contents and is_table and label in contents:
        return InputTable(source, pd.DataFrame(contents), client)
    needed = ["x", label]
    if isinstance(options.client, str):
        needed.append(client_column)
    contents = read_npz(path, needed, source)
    return ArrayData(
        contents["x"], contents[label], contents.get(client_column), contents.get("block"), source
    )


def _label_name(options: OwnDataOptions) -> str:
    return options.label if isinstance(options.label, str) else "y"


# ---- CSV -----------------------------------------------------------------------------------------


def read_csv(
    path: Path, source: str, text_columns: Sequence[str] = (), all_text: bool = False
) -> pd.DataFrame:
    """Read a CSV file with the names of the columns in its first line.

    Args:
        path: The file.
        source: How messages call it.
        text_columns: Columns that stay text; pandas finds the type of the others.
        all_text: All columns stay text, without blanks around cells. Blank lines are left out, and
            the index has the line of each row.

    Raises:
        InputError: It is not a CSV file, or its first line does not name the columns.
    """
    separator = SEPARATORS[0]
    names: list[str] = []
    frame = pd.DataFrame()
    try:
        # A file of Excel begins with a mark of its encoding, which utf-8-sig leaves out.
        with path.open(encoding="utf-8-sig", newline="") as file:
            # pandas guesses the separator only with its slow parser.
            separator = max(SEPARATORS, key=file.readline().count)
            file.seek(0)
            # Not by pandas, which would rename columns that are there twice.
            header = next(csv.reader(file, delimiter=separator, skipinitialspace=True), [])
        names = [name.strip() for name in header]
        if not all_text:
            _check_header(names, source)
        if not names:
            return frame
        options = {
            "sep": separator,
            "encoding": "utf-8-sig",
            # Blanks after a separator would make quotes part of the cell.
            "skipinitialspace": True,
            # Rows keep their numbers for messages, and texts such as NA stay to be shown.
            "skip_blank_lines": False,
            "keep_default_na": False,
            "na_values": [""],
            **_exact_floats(),
        }
        types: Any = str
        if not all_text:
            types = {i: str for i, name in enumerate(names) if name in text_columns}
        with warnings.catch_warnings():
            # The warning means that a row has more cells than there are names.
            warnings.simplefilter("error", pd.errors.ParserWarning)
            frame = pd.read_csv(
                path,
                header=0,
                names=list(range(len(names))),
                index_col=False,
                dtype=types,
                # The type of a column depends on all of its cells.
                low_memory=False,
                **options,
            )
    except UnicodeDecodeError:
        raise InputError(f"{source} is not text in UTF-8; save it as CSV in UTF-8.") from None
    except (csv.Error, pd.errors.ParserError, pd.errors.ParserWarning) as error:
        _check_cell_counts(path, source, separator, len(names), all_text)
        reason = str(error).strip().splitlines()[-1]
        raise InputError(f"{source} is not CSV ({reason}); save it as CSV in UTF-8.") from None
    return _clean_rows(frame, names, path, source, separator, all_text)


def _exact_floats() -> dict[str, str]:
    """Return the option that makes pandas read floats exactly, which 3.1 and later always do."""
    major, minor = pd.__version__.split(".")[:2]
    if (int(major), int(minor)) >= (3, 1):
        return {}
    return {"float_precision": "round_trip"}


def _check_header(names: Sequence[str], source: str) -> None:
    # Spreadsheets leave columns without a name after the last column.
    given = pd.Series([name for name in names if name], dtype=str)
    if given.empty:
        raise InputError(f"{source} is empty; its first line must have the names of the columns.")
    repeated = given[given.duplicated()].unique()
    if len(repeated):
        listed = ", ".join(f"'{name}'" for name in sorted(repeated))
        raise InputError(
            f"{source} has more than one column {listed}; every name may be there once."
        )
    if pd.to_numeric(given, errors="coerce").notna().all():
        raise InputError(
            f"{source} begins with numbers ({', '.join(given[:4])}, ...); its first line must have "
            "the names of the columns."
        )


def _clean_rows(
    frame: pd.DataFrame,
    names: Sequence[str],
    path: Path,
    source: str,
    separator: str,
    all_text: bool,
) -> pd.DataFrame:
    """Leave out blank lines and columns without a name, and name the columns."""
    last = frame.iloc[:, -1]
    if last.isna().any():
        # Either some rows are too short, or blank, or the cells are there and empty.
        is_blank = frame.isna().all(axis=1)
        if all_text:
            frame = frame[~is_blank]
        else:
            # Blank lines at the end are not rows.
            frame = frame.iloc[: len(frame) - is_blank[::-1].cumprod().sum()]
        if frame.iloc[:, -1].isna().any():
            _check_cell_counts(path, source, separator, len(names), all_text)
    if all_text:
        frame = frame.fillna("").apply(lambda column: column.str.strip())
        frame.index += 2
    kept = []
    for position, name in enumerate(names):
        if name:
            kept.append(position)
        elif not frame[position].isna().all():
            raise InputError(
                f"{source} has no name for column {position + 1}, which begins with "
                f"'{frame[position].iloc[0]}'; name it in the first line or leave it out (pandas: "
                "to_csv(..., index=False))."
            )
    if len(kept) < len(names):
        frame = frame[kept]
    return frame.set_axis([names[position] for position in kept], axis=1)


def _check_cell_counts(
    path: Path, source: str, separator: str, count: int, allow_blank: bool
) -> None:
    """Refuse the first line with more or fewer cells than there are names."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = list(csv.reader(file, delimiter=separator, skipinitialspace=True))
    while rows and not any(rows[-1]):
        rows.pop()
    for number, row in enumerate(rows, start=1):
        if len(row) != count and (row or not allow_blank):
            raise InputError(
                f"{source} has {len(row)} cells in line {number} and {count} names of columns in "
                "the first; every line must have the same number."
            )


# ---- objects in Python ---------------------------------------------------------------------------


def _read_object(data: Any, options: OwnDataOptions) -> _Contents:
    """Read a Python object, or a dictionary of them by client."""
    if _is_partitioner(data):
        data = _read_partitions(data)
    is_arrays = isinstance(data, Mapping) and "x" in data and _label_name(options) in data
    if not isinstance(data, Mapping) or is_arrays or _is_dataset_dict(data):
        contents = _Contents()
        contents.add("", _read_one(data, options, "data"))
        return contents
    if not data:
        raise InputError("data is an empty dictionary; it must have one client or more, by name.")
    contents = _Contents()
    findings = Findings()
    for key, value in data.items():
        client = str(key)
        try:
            content = _read_one(value, options, f"client {client}")
        except InputError as error:
            findings.add(str(error))
            continue
        if isinstance(content, InputTable) and not isinstance(options.client, str):
            content = replace(content, client=client)
        contents.add(client, content)
    findings.refuse()
    if contents.tables and contents.arrays:
        raise InputError(
            "some clients of data are tables and others arrays; give one or the other for all."
        )
    return contents


def _name_object(data: Any) -> str:
    """Return the name of a federation of such data."""
    if _is_frame(data):
        return "frame"
    if isinstance(data, Mapping) or _is_partitioner(data):
        return "clients"
    return "arrays"


def _is_frame(data: Any) -> bool:
    """Whether data is a DataFrame of pandas, polars or a similar library."""
    return hasattr(data, "columns") and callable(getattr(data, "to_numpy", None))


def _is_hugging_face(data: Any) -> bool:
    return hasattr(data, "column_names") and hasattr(data, "features")


def _is_dataset_dict(data: Any) -> bool:
    """Whether data is a dictionary of the splits of a Hugging Face data set."""
    return isinstance(data, Mapping) and hasattr(data, "column_names")


def _is_partitioner(data: Any) -> bool:
    return callable(getattr(data, "load_partition", None)) and hasattr(data, "num_partitions")


def _read_one(data: Any, options: OwnDataOptions, source: str) -> InputTable | ArrayData:
    """Read one object as a table or arrays."""
    if _is_dataset_dict(data):
        splits = ", ".join(str(name) for name in data)
        raise InputError(
            f"{source} is a dictionary of splits ({splits}); give one of them, such as "
            f"data['{next(iter(data))}'], or join them: each client holds out a test part itself."
        )
    if _is_frame(data):
        return InputTable(source, _read_frame(data, source))
    if _is_hugging_face(data):
        return _read_hugging_face(data, options, source)
    if isinstance(data, TorchDataset):
        return _read_torch_dataset(data, options, source)
    if isinstance(data, Mapping):
        label = _label_name(options)
        _check_keys(data, ("x", label), source)
        owner = options.client if isinstance(options.client, str) else "client"
        return ArrayData(
            _as_array(data["x"]),
            _as_array(data[label]),
            data.get(owner),
            data.get("block"),
            source,
        )
    if isinstance(data, tuple | list) and 2 <= len(data) <= 3:
        return _read_parts(data, options.client, source)
    if isinstance(data, np.ndarray | Tensor):
        if options.label is None or isinstance(options.label, str):
            raise InputError(
                f"{source} is an array of the shape {tuple(data.shape)} without targets; give "
                "data=(x, y) or data=(x, y, client)."
            )
        return _read_parts((data, options.label), options.client, source)
    raise InputError(f"{source} is a {type(data).__name__}; it must be {KINDS}.")


def _read_parts(parts: Sequence[Any], owner: Any, source: str) -> ArrayData:
    """Read (x, y) or (x, y, client); ``owner`` is the client of each row if there is no third."""
    if len(parts) == 3:
        owner = parts[2]
    client = None if owner is None else _as_array(owner)
    return ArrayData(_as_array(parts[0]), _as_array(parts[1]), client, None, source)


def _read_frame(data: Any, source: str) -> pd.DataFrame:
    if not isinstance(data, pd.DataFrame):
        # Column by column, which needs no pyarrow.
        data = pd.DataFrame({str(name): _as_array(data[name]) for name in data.columns})
    return _clean_names(data, source)


def _clean_names(frame: pd.DataFrame, source: str) -> pd.DataFrame:
    """Return the frame with texts as names of columns, each there once, and rows from 0."""
    names = pd.Index([str(name) for name in frame.columns])
    repeated = names[names.duplicated()].unique()
    if len(repeated):
        listed = ", ".join(f"'{name}'" for name in repeated)
        raise InputError(
            f"{source} has more than one column {listed}; every name may be there once."
        )
    return frame.set_axis(names, axis=1).reset_index(drop=True)


def _check_keys(data: Mapping[Any, Any], names: Sequence[str], source: str) -> None:
    missing = [name for name in names if name not in data]
    if missing:
        present = ", ".join(str(key) for key in list(data)[:12])
        raise InputError(f"{source} has no {' and no '.join(missing)} (it has {present}).")


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


# ---- torch Datasets ------------------------------------------------------------------------------


def _read_torch_dataset(data: TorchDataset[Any], options: OwnDataOptions, source: str) -> ArrayData:
    """Read the examples of a torch Dataset: (x, y), (x, y, client) or dictionaries."""
    if isinstance(data, IterableDataset) or not hasattr(data, "__len__"):
        raise InputError(
            f"{source} is a {type(data).__name__} without a length; give a data set with __len__ "
            "and __getitem__."
        )
    count = len(data)
    if count == 0:
        raise InputError(f"{source} is a {type(data).__name__} without examples.")
    if isinstance(data, TensorDataset):
        columns: list[Any] = list(data.tensors)
    else:
        items = [_read_item(data[i], options, source) for i in range(count)]
        columns = [_stack(column, source) for column in zip(*items, strict=True)]
    if not 2 <= len(columns) <= 3:
        raise InputError(
            f"an example of {source} has {len(columns)} parts; it must have two, (x, y), or three, "
            "(x, y, client)."
        )
    owner = options.client
    if isinstance(owner, str) and len(columns) < 3:
        owner = _read_owner(data, owner, source, count)
    return _read_parts(columns, owner, source)


def _read_owner(data: Any, name: str, source: str, count: int) -> Any:
    """Return the attribute of a data set with the client of each example."""
    owner = getattr(data, name, None)
    if owner is None or not hasattr(owner, "__len__") or len(owner) != count:
        raise InputError(
            f"client is '{name}', and {source} has no attribute of that name with {count} entries; "
            f"give client= an array of {count}, one for each example."
        )
    return owner


def _read_item(item: Any, options: OwnDataOptions, source: str) -> tuple[Any, ...]:
    """Return the parts of one example."""
    if isinstance(item, Mapping):
        names = ["x", _label_name(options)]
        if isinstance(options.channels, tuple) and len(options.channels) == 1:
            names[0] = options.channels[0]
        if isinstance(options.client, str) and options.client in item:
            names.append(options.client)
        _check_keys(item, names, f"an example of {source}")
        return tuple(item[name] for name in names)
    if isinstance(item, tuple | list):
        return tuple(item)
    raise InputError(
        f"an example of {source} is a {type(item).__name__}; it must be (x, y), (x, y, client), or "
        "a dictionary with x and the label."
    )


def _stack(column: Sequence[Any], source: str) -> Array:
    """Stack one part of all examples; they must have the same shape."""
    arrays = [_as_array(value) for value in column]
    if any(array.dtype.kind == "O" for array in arrays):
        raise InputError(
            f"an example of {source} contains a {type(column[0]).__name__}; examples must be "
            "tensors, arrays or numbers: add a transform that makes them so."
        )
    shapes = {array.shape for array in arrays}
    if len(shapes) > 1:
        some = ", ".join(str(shape) for shape in sorted(shapes)[:3])
        raise InputError(
            f"the examples of {source} have different shapes ({some}); all must have the same."
        )
    return np.stack(arrays)


# ---- Hugging Face, flwr-datasets -----------------------------------------------------------------


def _read_hugging_face(data: Any, options: OwnDataOptions, source: str) -> InputTable | ArrayData:
    """Read a table if all columns have one value per row; else x is a column of arrays."""
    if isinstance(data.column_names, Mapping) or not hasattr(data, "__len__"):
        raise InputError(
            f"{source} is a {type(data).__name__}, which is read piece by piece; load it whole, "
            "without streaming."
        )
    names = [str(name) for name in data.column_names]
    label = options.label
    if not isinstance(label, str) or label not in names:
        given = "not given" if label is None else f"'{label}'"
        raise InputError(
            f"label is {given}, and {source} has the columns {', '.join(names)}; say which one is "
            "to be predicted."
        )
    special = {label, options.client, options.time}
    inputs = [name for name in names if name not in special]
    if isinstance(options.channels, tuple):
        missing = [name for name in options.channels if name not in names]
        if missing:
            raise InputError(
                f"channels names {', '.join(missing)}, and {source} has {', '.join(names)}."
            )
        inputs = list(options.channels)
    rows = data.with_format("numpy")
    columns: dict[str, Array] = {}
    for name in names:
        if name in inputs or name in special:
            columns[name] = np.asarray(rows[name][:])
    columns[label] = _name_classes(data.features[label], columns[label])
    ragged = [name for name in inputs if _is_ragged(columns[name])]
    if ragged:
        raise InputError(
            f"column '{ragged[0]}' of {source} has arrays of different shapes; all must have the "
            "same shape."
        )
    if all(columns[name].ndim == 1 for name in inputs):
        return InputTable(source, pd.DataFrame(columns))
    owner = columns.get(options.client) if isinstance(options.client, str) else options.client
    x = _read_array_columns(data, {name: columns[name] for name in inputs}, source)
    return ArrayData(x, columns[label], owner, None, source)


def _is_ragged(column: Array) -> bool:
    """Whether a column has arrays of different shapes in its cells."""
    is_objects = column.ndim == 1 and column.dtype.kind == "O" and len(column) > 0
    return is_objects and isinstance(column[0], np.ndarray | list)


def _name_classes(feature: Any, column: Array) -> Array:
    """Return classes by the names that the data set has for them."""
    names = getattr(feature, "names", None)
    if names is None or column.dtype.kind not in "iu" or (column < 0).any():
        return column
    return np.asarray(names)[column]


def _read_array_columns(data: Any, columns: Mapping[str, Array], source: str) -> Array:
    """Return one column of arrays, or several series of one length as channels."""
    name, first = next(iter(columns.items()))
    if len(columns) == 1:
        is_image = type(data.features[name]).__name__ == "Image"
        if is_image and first.ndim == 3:
            return first[:, None]
        if is_image and first.ndim == 4:
            return np.moveaxis(first, -1, 1)
        return first
    shapes = {column.shape for column in columns.values()}
    if len(shapes) > 1 or first.ndim != 2:
        listed = [f"{name} {column.shape}" for name, column in columns.items()]
        raise InputError(
            f"the inputs of {source} are columns of different shapes ({', '.join(listed[:6])}); "
            "name the one, or the series of one length, that are inputs (channels)."
        )
    return np.stack(list(columns.values()), axis=1)


def _read_partitions(data: Any) -> dict[str, Any]:
    """Return the partitions of a partitioner, by their natural names if it has such."""
    try:
        parts = [data.load_partition(number) for number in range(data.num_partitions)]
    except (AttributeError, ValueError) as error:
        reason = str(error).splitlines()[0][:160] if str(error) else type(error).__name__
        raise InputError(
            f"the partitioner cannot load its partitions ({reason}); assign its dataset first: "
            "partitioner.dataset = ..."
        ) from None
    natural = getattr(data, "partition_id_to_natural_id", {})
    return {str(natural.get(number, number)): part for number, part in enumerate(parts)}
