"""Files of one's own with absurd sizes, names and numbers: refused in a sentence, or read fast."""

from __future__ import annotations

import os
import random
import time
import zipfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fedgrove import api, data
from fedgrove.config.experiment import Experiment
from fedgrove.data.named_set import read_npz
from fedgrove.errors import InputError, InputErrors
from fedgrove.methods import FedAvg
from fedgrove.runs.files import fresh_name


def npz_with_header(path: Path, shape: str) -> Path:
    """A file of a few bytes whose array x announces a shape."""
    header = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}, }}".encode().ljust(117)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("x.npy", b"\x93NUMPY\x01\x00\x76\x00" + header + b"\n" + bytes(64))
    return path


@pytest.mark.parametrize("shape", ["(10**12, 3)", "(10**30, 3)", "(10**9, 3)", "(-5, 3)"])
def test_an_npz_file_that_announces_more_than_it_has(tmp_path: Path, shape: str) -> None:
    rows = str(eval(shape))
    with pytest.raises(InputError, match=r"cannot be read as npz \(.*\); write it with"):
        data.load(npz_with_header(tmp_path / "mine.npz", rows))


def test_a_small_npz_file_that_expands_to_much_is_refused_before_it_is_read(tmp_path: Path) -> None:
    """400 kB that would take 400 MB; a file that is as large as its arrays is read."""
    path = tmp_path / "mine.npz"
    np.savez_compressed(path, x=np.zeros((100, 500_000)), y=np.arange(100) % 2)
    assert path.stat().st_size < 1 << 19
    with pytest.raises(
        InputError, match=r"expand to 400\d{6}; so large a file must be uncompressed"
    ):
        read_npz(path)
    np.savez_compressed(path, x=np.zeros((100, 5000)), y=np.arange(100) % 2)
    assert read_npz(path)["x"].shape == (100, 5000)


def test_a_damaged_npz_file_is_refused_whatever_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "mine.npz"
    np.savez_compressed(path, x=np.arange(300.0).reshape(100, 3), y=np.arange(100) % 2)
    whole = path.read_bytes()
    chance = random.Random(0)
    refused = 0
    for _ in range(300):
        damaged = bytearray(whole)
        damaged[chance.randrange(len(whole))] = chance.randrange(256)
        path.write_bytes(damaged)
        try:
            read_npz(path)
        except InputError:
            refused += 1
    assert refused > 200


def test_numbers_that_float32_cannot_hold_are_named(tmp_path: Path) -> None:
    """1e308 and inf, as an input, a number to predict and a time."""
    rows = [f"{n},{n / 7},{n},walk" for n in range(40)]
    for place, cell in enumerate(("1e308", "inf", "-1e300")):
        cells = rows[5].split(",")
        cells[place] = cell
        lines = [*rows[:5], ",".join(cells), *rows[6:]]
        (tmp_path / f"{place}.csv").write_text("\n".join(["ax,score,t,y", *lines]))
    with pytest.raises(
        InputError,
        match=r"'1e\+308' in 1 of 40 rows, first in line 7; every cell of an input must be a number of at most 1e\+30\.$",
    ):
        data.load(tmp_path / "0.csv", label="y", channels="ax", clients=2)
    with pytest.raises(
        InputError,
        match=r"'inf' in 1 of 40 rows, first in line 7; numbers to predict must be at most 1e\+30\.$",
    ):
        data.load(tmp_path / "1.csv", label="score", channels="ax", clients=2)
    with pytest.raises(InputError, match=r"times are numbers of at most 1e\+30, or dates"):
        data.load(tmp_path / "2.csv", label="y", time="t", channels="ax", clients=2)
    (tmp_path / "3.csv").write_text("ax,y\n1e308,a\n-inf,b\n")
    with pytest.raises(
        InputError,
        match=r"contains numbers beyond 1e\+30, such as '1e\+308' in line 2; divide them",
    ):
        data.load(tmp_path / "3.csv", label="y")


def test_cells_that_are_lists(tmp_path: Path) -> None:
    """As a file of parquet or a frame may have them."""
    frame = pd.DataFrame({"ax": np.arange(4.0), "y": ["a", "b"] * 2, "who": [1, 1, 2, 2]})
    lists = pd.Series([np.array([1.0, float(n)]) for n in range(4)])
    with pytest.raises(
        InputError,
        match=r"column 'ax' contains lists, such as '\[1\. 0\.\]' in row 0; write each number into a column of its own",
    ):
        data.load(frame.assign(ax=lists), label="y", client="who")
    for name in ("y", "who"):
        with pytest.raises(
            InputError,
            match=rf"column '{name}' contains the list '\[1\. 0\.\]' in 4 of 4 rows, first in row 0; every cell must be one text or number\.$",
        ):
            data.load(frame.assign(**{name: lists}), label="y", client="who")


def test_channels_that_are_named_twice(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"^channels is \['f1', 'f2', 'f1'\]; it must be without repeated f1\.$"
    ):
        data.load(tmp_path, label="y", channels="f1,f2,f1")


def test_ten_thousand_wrong_columns_are_refused_in_seconds(tmp_path: Path) -> None:
    """Each was described and then only counted, which took a minute."""
    names = ",".join(f"c{n}" for n in range(10_000))
    row = ",".join(["abc"] * 10_000)
    (tmp_path / "wide.csv").write_text(f"{names},y\n{row},a\n{row},b\n")
    began = time.monotonic()
    with pytest.raises(InputErrors, match=r"^21 things are wrong:") as caught:
        data.load(tmp_path / "wide.csv", label="y")
    assert time.monotonic() - began < 10
    assert caught.value.more == 1
    (tmp_path / "few.csv").write_text(f"c0,c1,y\n{'abc,' * 2}a\n{'abc,' * 2}b\n")
    with pytest.raises(InputErrors, match=r"^2 things are wrong:"):
        data.load(tmp_path / "few.csv", label="y")


def test_names_of_three_hundred_letters(tmp_path: Path) -> None:
    """Of a file, whose name the run folder has, of a client, a column and a class."""
    long = "n" * 250
    rows = [f"{n % 7},{n % 5},{long}{long[:50]}{n % 3},{'l' * 300}{n % 2}" for n in range(60)]
    path = tmp_path / f"{long}.csv"
    path.write_text("\n".join([f"{'c' * 300},b,who,y", *rows]))
    federation = data.load(path, label="y", client="who")
    assert federation.names[0] == f"{long}{long[:50]}0"
    place = fresh_name(tmp_path, f"fedavg-{federation.name}-s0")
    place.mkdir()
    second = fresh_name(tmp_path, f"fedavg-{federation.name}-s0")
    assert second.name == f"{place.name}-2"
    second.mkdir()


def rows_of(cells: str) -> str:
    """80 rows with cells for a client and a label; {0} is one of four, {1} one of two."""
    rows = []
    for n in range(80):
        rows.append(f"{n * 7 % 11},{n * 5 % 13}," + cells.format(n % 4, n // 4 % 2))
    return "\n".join(["a,b,who,label", *rows])


@pytest.mark.parametrize("name", [b"anna\xff.csv", b"anna\x1b[2J.csv", b"anna\r.csv"])
def test_names_of_files_that_cannot_be_printed(tmp_path: Path, name: bytes) -> None:
    for file in (name, b"bob.csv"):
        (tmp_path / os.fsdecode(file)).write_text(rows_of("w{},l{}"))
    words = {"label": "label", "channels": ["a", "b"]}
    with pytest.raises(InputError, match="the name of a client is 'anna") as caught:
        data.load(f"{tmp_path}/", **words)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("kind", "cells"), [("client", "\x1b[31mw{}\x07,l{}"), ("label", "w{},\x9b2J{}")]
)
def test_cells_that_cannot_be_printed(tmp_path: Path, kind: str, cells: str) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(rows_of(cells))
    with pytest.raises(InputError, match=f"the name of a {kind} is ") as caught:
        data.load(str(path), label="label", client="who")
    assert str(caught.value).isprintable()


def test_a_path_that_cannot_be_stored(tmp_path: Path) -> None:
    """Bytes of a name that are no UTF-8 are lone surrogates in Python, which no file can have."""
    folder = tmp_path / os.fsdecode(b"of anna\xff") / "data"
    folder.mkdir(parents=True)
    (folder / "all.csv").write_text(rows_of("w{},l{}"))
    wanted = Experiment(FedAvg(), f"{folder}/", rounds=1, label="label", client="who")
    with pytest.raises(InputError, match="characters that cannot be stored; rename the file"):
        api.train(wanted, tmp_path / "run", engine="serial")
    assert not (tmp_path / "run").exists()
