"""CSV files as they are found: compressed, with decimal commas, in Latin-1; English ones as ever."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import lzma
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from fedgrove import data
from fedgrove.data.csv_files import find_separator, read_csv
from fedgrove.errors import InputError

ENGLISH = "t,ax,label\n0.00,9.811,walk\n0.02,-0.5,walk\n0.04,1234.5,sit\n"
EUROPEAN = "t;ax;label\n0,00;9,811;walk\n0,02;-0,5;walk\n0,04;1.234,5;sit\n"


def read(folder: Path, content: str | bytes, name: str = "anna.csv") -> pd.DataFrame:
    return table(folder, content, name).frame


def table(folder: Path, content: str | bytes, name: str = "anna.csv"):  # type: ignore[no-untyped-def]
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return read_csv(path, name, "label", "user")


# ---- compressed ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ending", "compress"),
    [
        (".gz", gzip.compress),
        (".bz2", bz2.compress),
        (".xz", lzma.compress),
        (".zst", zstandard.compress),
        (".GZ", gzip.compress),
    ],
)
def test_compressed_files(tmp_path: Path, ending: str, compress) -> None:  # type: ignore[no-untyped-def]
    packed = compress(ENGLISH.encode())
    wanted = read(tmp_path, ENGLISH)
    pd.testing.assert_frame_equal(read(tmp_path, packed, f"anna.csv{ending}"), wanted)
    with pytest.raises(InputError, match="cannot be unpacked"):
        data.load(tmp_path / f"cut.csv{ending}", label=write_cut(tmp_path, packed, ending))


def write_cut(folder: Path, packed: bytes, ending: str) -> str:
    (folder / f"cut.csv{ending}").write_bytes(packed[: len(packed) // 2])
    return "label"


def test_all_frames_of_a_file_of_zstandard(tmp_path: Path) -> None:
    first, second = ENGLISH[:30].encode(), ENGLISH[30:].encode()
    packed = zstandard.compress(first) + zstandard.compress(second)
    assert len(read(tmp_path, packed, "anna.csv.zst")) == 3


# ---- decimal commas ------------------------------------------------------------------------------


@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("separator", [";", "\t"])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_decimal_commas(tmp_path: Path, mark: str, separator: str, newline: str) -> None:
    text = mark + EUROPEAN.replace(";", separator).replace("\n", newline)
    found = table(tmp_path, text)
    pd.testing.assert_frame_equal(found.frame, read(tmp_path, ENGLISH), check_dtype=False)
    assert found.found[1] == "decimal commas"


def test_the_separator_that_excel_names(tmp_path: Path) -> None:
    frame = read(tmp_path, "sep=;\r\n" + EUROPEAN.replace("\n", "\r\n"))
    assert frame["ax"].tolist() == [9.811, -0.5, 1234.5]
    # The line in the file, for messages.
    assert frame.index.tolist() == [3, 4, 5]
    with pytest.raises(InputError, match="2 cells in line 4 and 3 names"):
        read(tmp_path, "sep=;\na;b;label\n1;2;walk\n1;2\n")


def test_targets_with_a_decimal_comma_are_numbers(tmp_path: Path) -> None:
    frame = read(tmp_path, "ax;label\n0,5;1,5\n2,25;3\n")
    assert frame["label"].tolist() == ["1.5", "3"]
    # Classes stay as they are, also those that look like a number.
    frame = read(tmp_path, "ax;label\n0,5;1,5\n2,25;mode 3\n")
    assert frame["label"].tolist() == ["1,5", "mode 3"]
    assert read(tmp_path, "ax;user;label\n0,5;1,5;a\n")["user"].tolist() == ["1,5"]


@pytest.mark.parametrize(
    "text",
    [
        # A thousand and more; nothing proves that these are decimals.
        "ax;label\n1,234;walk\n12,345;sit\n",
        # Points elsewhere: the file is English, or mixed.
        "ax;ay;label\n1,5;2.5;walk\n1,5;2.5;sit\n",
        "ax;ay;label\n1,5;2.5;walk\n1,5;;sit\n",
        "ax;label\n1,5;walk\n2.5;sit\n",
        "ax;label\n1,5;walk\n1,234.5;sit\n",
        # Cells are separated by commas: quoted commas are not decimals.
        'ax,label\n"1,5",walk\n"2,5",sit\n',
    ],
)
def test_numbers_in_doubt_stay_text_and_are_refused(tmp_path: Path, text: str) -> None:
    found = table(tmp_path, text)
    assert found.found == ()
    assert "," in str(found.frame["ax"].iloc[0])
    with pytest.raises(InputError, match=r"'1,\d+'"):
        data.load(tmp_path / "anna.csv", label="label")


NUMBERS = st.floats(-1e6, 1e6, allow_nan=False).map(lambda value: round(value, 4))


@settings(max_examples=150, deadline=None)
@given(
    values=st.lists(st.tuples(NUMBERS, NUMBERS, st.integers(-9999, 9999)), min_size=1, max_size=8),
    separator=st.sampled_from([";", "\t"]),
)
def test_a_european_file_is_read_as_its_english_one_or_not_at_all(
    tmp_path_factory: pytest.TempPathFactory, values: list[tuple[float, ...]], separator: str
) -> None:
    folder = tmp_path_factory.mktemp("csv")
    frame = pd.DataFrame(values, columns=["ax", "ay", "n"]).assign(label="walk")
    frame.to_csv(folder / "en.csv", index=False)
    frame.to_csv(folder / "eu.csv", index=False, sep=separator, decimal=",")
    english = read_csv(folder / "en.csv", "en", "label").frame
    european = read_csv(folder / "eu.csv", "eu", "label")
    if european.found:
        pd.testing.assert_frame_equal(european.frame, english, check_dtype=False)
    else:
        # Nothing proves it: no number was read as another.
        for name in ("ax", "ay", "n"):
            numbers = pd.to_numeric(european.frame[name], errors="coerce")
            is_read = numbers.notna()
            assert (numbers[is_read] == english[name][is_read]).all()


ENGLISH_CELLS = st.one_of(
    NUMBERS.map(str),
    st.integers(-9999, 9999).map(str),
    st.integers(1000, 10**8).map("{:,}".format),
    st.floats(1000, 1e6).map("{:,.2f}".format),
    st.sampled_from(["", "walk", "sit, slow", "a;b", 'the "big" one', "1,5 or 2,5", "n/a", "5\t6"]),
)


@settings(max_examples=300, deadline=None)
@given(
    rows=st.lists(
        st.tuples(NUMBERS.map(str), ENGLISH_CELLS, ENGLISH_CELLS), min_size=1, max_size=8
    ),
    separator=st.sampled_from([",", ";", "\t"]),
)
def test_an_english_file_is_never_read_differently(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, ...]], separator: str
) -> None:
    path = tmp_path_factory.mktemp("csv") / "en.csv"
    file = io.StringIO()
    writer = csv.writer(file, delimiter=separator)
    writer.writerow(["ax", "note", "label"])
    writer.writerows(rows)
    path.write_text(file.getvalue(), newline="")
    found = read_csv(path, "en", "label")
    assert found.found == ()
    for column, name in enumerate(["ax", "note", "label"]):
        cells = [row[column] for row in rows]
        for given_cell, cell in zip(cells, found.frame[name].tolist(), strict=True):
            is_empty = given_cell == ""
            is_number = isinstance(cell, float | int) and not is_empty
            assert is_empty or (float(given_cell) == cell if is_number else given_cell == cell)


def test_separators_in_quoted_cells_do_not_count() -> None:
    assert find_separator('t,"x;y;z;w",label\n0,1,walk\n') == ","
    assert find_separator("time (s, local);x, in m;y;label\n0,1;9,81;0,5;walk\n") == ";"
    assert find_separator("a\n1\n") == ","


# ---- encodings -----------------------------------------------------------------------------------


def test_latin_1(tmp_path: Path) -> None:
    found = table(tmp_path, "ax;label\n0,5;Läufer – 5 €\n".encode("cp1252"))
    assert found.frame["label"].tolist() == ["Läufer – 5 €"]
    assert found.found == ("semicolons", "decimal commas", "Latin-1 letters")


@pytest.mark.parametrize(
    "content",
    [
        # UTF-8 with a damaged letter would become Latin-1 with wrong letters everywhere else.
        "ax,label\n1,Läufer\n2,".encode() + b"\xff\n",
        b"ax,label\n1,\x00\xe9\n",
        gzip.compress(ENGLISH.encode(), mtime=0),
    ],
    ids=["damaged UTF-8", "a zero byte", "gzip"],
)
def test_what_is_no_text_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(InputError, match="not text in UTF-8, nor in Latin-1"):
        read(tmp_path, content)


# ---- folders -------------------------------------------------------------------------------------


def write_users(folder: Path, names: list[str]) -> None:
    rng = np.random.default_rng(0)
    for name in names:
        rows = ["ax;label"]
        for label in ("run", "sit"):
            rows += [f"{value:.3f};{label}".replace(".", ",") for value in rng.normal(size=60)]
        content = "\n".join(rows).encode()
        (folder / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)


def test_a_folder_with_compressed_files(tmp_path: Path) -> None:
    write_users(tmp_path, ["anna.csv.gz", "ben.csv"])
    federation = data.load(tmp_path, label="label", window=8)
    assert federation.names == {0: "anna", 1: "ben"}
    assert federation.notes == (
        "read: 2 of 2 files with semicolons, decimal commas, such as anna.csv.gz",
    )
    alone = data.load(str(tmp_path / "anna.csv.gz"), label="label", window=8, clients=1)
    assert alone.name == "anna"


def test_files_that_look_like_data_and_cannot_be_read(tmp_path: Path) -> None:
    write_users(tmp_path, ["anna.csv", "ben.csv", "ben.csv.gz"])
    for name in ("carl.xlsx", "dora.zip", "eva.csv.Z", "README.md"):
        (tmp_path / name).write_bytes(b"PK")
    (tmp_path / "fred.txt").write_text("ax;label\n1;run\n")
    (tmp_path / "about.txt").write_text("Recorded in May, label by hand\n")
    with pytest.raises(InputError) as caught:
        data.load(tmp_path, label="label", window=8)
    text = str(caught.value)
    assert "carl.xlsx looks like data and cannot be read; save it as CSV" in text
    assert "dora.zip looks like data and cannot be read; unpack it" in text
    assert "fred.txt looks like data" in text
    assert "ben.csv and ben.csv.gz seem to be the same recording" in text
    assert "README.md" not in text
    assert "about.txt" not in text


def test_messages_show_the_cell_that_is_no_number(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("ax;label\n0,5;run\noops;sit\n1,5;run\n12.34,5;sit\n")
    with pytest.raises(InputError, match="contains 'oops' in 2 of 4 rows, first in line 3"):
        data.load(tmp_path / "a.csv", label="label")
