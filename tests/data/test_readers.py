"""Data of one's own: files, folders, frames, arrays, Datasets; what is wrong is said at once."""

from __future__ import annotations

import csv
import pickle
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import fedgrove as fg
from fedgrove import data
from fedgrove.data import tables
from fedgrove.data.arrays import OwnDataOptions, choose_defaults
from fedgrove.data.build import Choices, build
from fedgrove.data.columns import InputTable
from fedgrove.errors import InputError, InputErrors, Refusals

USERS = ("watch-01", "watch-07", "watch-12")
ACTIVITIES = ("run", "sit", "walk")
CHANNELS = ("ax", "ay", "az")


def recording(seed: int, rows: int = 120) -> tuple[np.ndarray, list[str]]:
    """A person who runs, sits and walks, ``rows`` samples each."""
    rng = np.random.default_rng(seed)
    signal = []
    labels = []
    for activity, tempo in zip(ACTIVITIES, (0.9, 0.0, 0.4), strict=True):
        phase = tempo * np.arange(rows)[:, None] + np.arange(3)
        signal.append(9 + 3 * (tempo > 0) * np.sin(phase) + rng.normal(0, 0.2, (rows, 3)))
        labels += [activity] * rows
    return np.concatenate(signal).round(4), labels


def write(path: Path, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)


def table_rows(seed: int) -> list[list[Any]]:
    signal, labels = recording(seed)
    return [[*sample, label] for sample, label in zip(signal, labels, strict=True)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three users' files."""
    users = tmp_path / "users"
    users.mkdir()
    for seed, user in enumerate(USERS):
        write(users / f"{user}.csv", [*CHANNELS, "activity"], table_rows(seed))
    return users


def columns() -> dict[str, np.ndarray]:
    """The same in one table."""
    signals = []
    labels: list[str] = []
    owners: list[str] = []
    for seed, user in enumerate(USERS):
        signal, own = recording(seed)
        signals.append(signal)
        labels += own
        owners += [user] * len(own)
    joined = np.concatenate(signals)
    found = {name: joined[:, place] for place, name in enumerate(CHANNELS)}
    return {**found, "activity": np.array(labels), "user": np.array(owners)}


CUT = {"label": "activity", "window": 16, "stride": 8}


def same(one: data.Federation, other: data.Federation) -> bool:
    """Whether two federations hold the same examples of the same clients."""
    if one.names != other.names or one.labels != other.labels:
        return False
    for k in one.ids:
        for part in ("train", "validation", "test"):
            mine, theirs = getattr(one.client(k), part), getattr(other.client(k), part)
            if not (torch.equal(mine.x, theirs.x) and torch.equal(mine.y, theirs.y)):
                return False
    return True


# ---- files ---------------------------------------------------------------------------------------


def test_a_folder_of_csv_files(folder: Path) -> None:
    federation = data.load(folder, **CUT)
    assert federation.names == dict(enumerate(USERS))
    assert federation.labels == ACTIVITIES
    assert federation.shape == (3, 16)
    assert federation.name == "users"
    assert federation.split == "blocks"
    own = federation.preparation_of(1)
    assert own.channels == CHANNELS
    assert own.window == 16
    # 120 rows of a label give (120 - 16) / 8 + 1 = 14 windows, in 14 // 3 = 4 pieces of which one is
    # test and one validation; the windows that touch those two go.
    client = federation.client(USERS.index("watch-07"))
    assert sum(len(part) for part in (client.train, client.validation, client.test)) < 3 * 14
    assert sorted(set(client.test.y.tolist())) == [0, 1, 2]


def test_windows_are_the_recording_itself(folder: Path) -> None:
    """A raw window of the file, prepared, is one that the client holds."""
    federation = data.load(folder, **CUT)
    signal, _ = recording(1)
    own = federation.preparation_of(1)
    client = federation.client(1)
    held = torch.cat([client.train.x, client.validation.x, client.test.x])
    for start in (0, 8, 240):
        window = torch.from_numpy(own.apply(signal[None, start : start + 16].swapaxes(1, 2)))
        distances = (held - window).abs().amax((1, 2))
        was_dropped = float(distances.min()) > 1e-6
        # Only windows that overlap a held-out one are dropped: these three are not all of them.
        assert not was_dropped or start != 0 or len(held) < 3 * 14


@settings(max_examples=40, deadline=None)
@given(
    window=st.integers(2, 24),
    stride=st.integers(1, 30),
    seed=st.integers(0, 5),
    rows=st.integers(60, 120),
)
def test_no_raw_sample_is_on_both_sides(window: int, stride: int, seed: int, rows: int) -> None:
    """Each sample is its own number, so that a window says which ones it holds."""
    count = 3 * rows
    # Both ways up, so that neither column is taken for a clock.
    clock = np.arange(count, dtype=float)
    frame = {
        "a": clock.copy(),
        "b": clock[::-1].copy(),
        "y": np.repeat([0, 1, 2], rows),
    }
    table = InputTable("mine", pd.DataFrame(frame), "anna")
    options = OwnDataOptions(label="y", window=window, stride=stride, channels=("a", "b"))
    dataset = tables.make_dataset([table], options)
    choices = Choices(seed=seed, standardise=False, partition="natural")
    assert dataset.block is not None
    if len(np.unique(dataset.block)) == len(np.unique(dataset.y)):
        # One piece of each label: nothing can be held out.
        with pytest.raises(InputError, match="five windows long"):
            build("mine", dataset, choices, choose_defaults((2, window)))
        return
    federation = build("mine", dataset, choices, choose_defaults((2, window)))
    client = federation.client(0)
    parts = [
        set(part.x[:, 0].flatten().tolist())
        for part in (client.train, client.validation, client.test)
    ]
    assert not parts[0] & parts[2]
    assert not parts[0] & parts[1]
    assert not parts[1] & parts[2]
    # A window has one label: rows 0.., rows.., 2 rows..
    labels = (client.train.x[:, 0] // rows).long()
    assert bool((labels == client.train.y[:, None]).all())


def test_one_file_with_a_column_of_clients(folder: Path, tmp_path: Path) -> None:
    found = columns()
    rows = list(zip(*found.values(), strict=True))
    write(tmp_path / "all.csv", list(found), rows)
    together = data.load(str(tmp_path / "all.csv"), **CUT, client="user")
    assert same(together, data.load(folder, **CUT))


def test_without_a_column_of_clients_they_are_made_up_and_that_is_said(tmp_path: Path) -> None:
    found = columns()
    write(tmp_path / "all.csv", list(found), list(zip(*found.values(), strict=True)))
    federation = data.load(tmp_path / "all.csv", label="activity", channels=CHANNELS, clients=4)
    assert len(federation.clients) == 4
    assert federation.names == {}
    assert federation.notes[0] == tables.NO_CLIENT_COLUMN


def test_rows_of_several_people_may_be_interleaved(folder: Path, tmp_path: Path) -> None:
    found = columns()
    rows = list(zip(*found.values(), strict=True))
    each = len(rows) // 3
    mixed = [rows[person * each + moment] for moment in range(each) for person in range(3)]
    write(tmp_path / "all.csv", list(found), mixed)
    assert same(data.load(tmp_path / "all.csv", **CUT, client="user"), data.load(folder, **CUT))


def test_a_folder_for_each_client(folder: Path, tmp_path: Path) -> None:
    """Each of several recordings of one person; windows do not cross from one to the next."""
    for user in USERS:
        (tmp_path / "more" / user).mkdir(parents=True)
        lines = (folder / f"{user}.csv").read_text().splitlines()
        (tmp_path / "more" / user / "one.csv").write_text("\n".join(lines[:121]))
        (tmp_path / "more" / user / "two.csv").write_text("\n".join([lines[0], *lines[121:]]))
    (tmp_path / "more" / "README.md").write_text("hello")
    federation = data.load(tmp_path / "more", **CUT)
    assert federation.names == dict(enumerate(USERS))
    assert federation.notes == ("files that are not data are ignored: README.md",)


def test_semicolons_a_mark_of_encoding_and_empty_lines(folder: Path) -> None:
    wanted = data.load(folder, **CUT)
    for path in folder.glob("*.csv"):
        text = path.read_text().replace(",", ";")
        path.write_text("\ufeff" + text + "\n\n", encoding="utf-8")
    assert same(data.load(folder, **CUT), wanted)


def test_all_arrays_that_are_missing_are_named(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", inputs=np.zeros((4, 2)))
    with pytest.raises(InputError, match=r"no x and no y \(it has inputs\); add them\."):
        data.load(tmp_path / "a.npz")
    np.savez(tmp_path / "a.npz", x=np.zeros((4, 2)))
    with pytest.raises(InputError, match=r"no y \(it has x\); add it\."):
        data.load(tmp_path / "a.npz")


def test_npz_files_of_clients(folder: Path, tmp_path: Path) -> None:
    """Recordings (n, C) with a window, and windows (n, C, L) without."""
    (tmp_path / "npz").mkdir()
    for seed, user in enumerate(USERS):
        signal, labels = recording(seed)
        np.savez(tmp_path / "npz" / f"{user}.npz", x=signal, y=np.array(labels))
    cut = data.load(tmp_path / "npz", window=16, stride=8)
    assert same(cut, data.load(folder, **CUT))
    for seed, user in enumerate(USERS):
        windows = np.random.default_rng(seed).normal(size=(20, 3, 16))
        np.savez(tmp_path / "npz" / f"{user}.npz", x=windows, y=np.arange(20) % 2)
    federation = data.load(tmp_path / "npz")
    assert federation.names == dict(enumerate(USERS))
    assert federation.shape == (3, 16)


def test_parquet(folder: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    pyarrow = pytest.importorskip("pyarrow")
    (tmp_path / "parquet").mkdir()
    for seed, user in enumerate(USERS):
        signal, labels = recording(seed)
        found = {name: signal[:, place] for place, name in enumerate(CHANNELS)}
        table = pyarrow.table({**found, "activity": labels})
        parquet.write_table(table, tmp_path / "parquet" / f"{user}.parquet")
    assert same(data.load(tmp_path / "parquet", **CUT), data.load(folder, **CUT))


def test_sorted_by_time_and_cut_at_gaps(tmp_path: Path) -> None:
    clock = np.r_[np.arange(60), 500 + np.arange(60)].astype(float)
    signal = np.sin(clock)
    order = np.random.default_rng(0).permutation(120)
    rows = [[clock[row], signal[row], "ab"[row // 60]] for row in order]
    for name in ("anna", "bert"):
        write(tmp_path / f"{name}.csv", ["t", "ax", "y"], rows)
    with pytest.raises(InputError, match="shorter window"):
        data.load(tmp_path, label="y", window=61, time="t")
    federation = data.load(tmp_path, label="y", window=6, stride=3, time="t", standardise=False)
    window = federation.client(0).train.x[0, 0].numpy()
    # Neighbours in time are one radian apart, whatever their order in the file.
    start = np.arcsin(window[0])
    ways = [np.sin(start + np.arange(6)), np.sin(np.pi - start + np.arange(6))]
    assert min(np.abs(window - way).max() for way in ways) < 1e-4
    assert federation.preparation_of(0).channels == ("ax",)


def test_numbers_to_predict(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name in ("anna", "bert"):
        signal = rng.normal(size=200)
        rows = [[value, 0.5 * value + 0.01] for value in signal]
        write(tmp_path / f"{name}.csv", ["ax", "load"], rows)
    federation = data.load(tmp_path, label="load", window=10, standardise=False)
    client = federation.client(0)
    assert federation.problem.kind == "numbers"
    # The target of a window is that of its last row.
    assert torch.allclose(client.train.y[:, 0], 0.5 * client.train.x[:, 0, -1] + 0.01, atol=1e-6)
    rows_only = data.load(tmp_path, label="load")
    assert rows_only.shape == (1,)


def test_rows_without_a_window_are_examples_and_a_note_says_if_they_look_recorded(
    folder: Path,
) -> None:
    federation = data.load(folder, label="activity")
    assert federation.shape == (3,)
    assert "come 120 in a row, as in a recording" in federation.notes[0]


# ---- what is wrong -------------------------------------------------------------------------------


def test_everything_that_is_wrong_is_said_at_once(folder: Path) -> None:
    one, two, three = (folder / f"{user}.csv" for user in USERS)
    lines = one.read_text().splitlines()
    lines[11] = "1,oops,3,run"
    lines[12] = "1,2,3,"
    lines[13] = "1,,3,run"
    one.write_text("\n".join(lines))
    two.write_text(two.read_text().replace("az", "gz", 1))
    three.write_text("\n".join(three.read_text().splitlines()[:11]))
    with pytest.raises(InputError) as caught:
        data.load(folder, **CUT)
    text = str(caught.value)
    wanted = [
        "watch-01.csv (client watch-01), column 'ay' contains 'oops' in 1 of 360 rows, first in "
        "line 12",
        "watch-01.csv (client watch-01), column 'ay' is empty in 1 of 360 rows, first in line 14",
        "watch-01.csv (client watch-01), column 'activity' has no label in 1 of 360 rows, first "
        "in line 13",
        "watch-07.csv (client watch-07) has no column 'az', and has 'gz' instead",
        "watch-12.csv (client watch-12) has no 16 rows of one label in a row",
    ]
    for sentence in wanted:
        assert sentence in text
    assert text.count("\n- ") == len(wanted)
    assert "its longest stretch has 10 rows" in text


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        ("", "is empty"),
        ("ax,y\n", "no rows"),
        ("1.5,2.5\n3,4\n", "begins with numbers"),
        ("ax,ax,y\n1,2,3\n", "more than one column 'ax'"),
        ("ax,y\n1,2,3\n", "3 cells in line 2 and 2 names"),
        ("y\nwalk\nsit\n", "there must be at least one"),
        ("ax,y\n1,walk\n2,walk\n", r"only one class \(walk\); there must be at least two"),
        ("ax,device,y\n1,phone,walk\n2,phone,sit\n", "leave it out by naming"),
        ("ax,y\n1e300,walk\n2,sit\n", r"contains '1e\+300'"),
        ("ax;y\n1,500;walk\n2,500;sit\n", "numbers with a comma, such as '1,500' in line 2"),
        ('ax,y\n"1,5",walk\n"2,5",sit\n', "numbers with a comma, such as '1,5' in line 2"),
        (",ax,y\n0,1,walk\n1,2,sit\n", r"no name for column 1, .*index=False"),
        ("ax,y\n1,walk\n2,null\n", "'null' counts as an empty cell; rename it"),
    ],
)
def test_bad_files(tmp_path: Path, content: str, wanted: str) -> None:
    (tmp_path / "mine.csv").write_text(content)
    with pytest.raises(InputError, match=wanted) as caught:
        data.load(tmp_path / "mine.csv", label="y")
    assert str(caught.value).rstrip().endswith(".")


def test_files_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_bytes(b"\xff\xfe\x00ax,y\n")
    with pytest.raises(InputError, match="UTF-8"):
        data.load(tmp_path / "mine.csv", label="y")
    (tmp_path / "none").mkdir()
    with pytest.raises(InputError, match="has no file that ends in"):
        data.load(tmp_path / "none", label="y")
    with pytest.raises(InputError, match="there is no file or folder"):
        data.load(tmp_path / "nowhere", label="y")
    (tmp_path / "mine.xlsx").write_text("")
    with pytest.raises(InputError, match=r"'\.xlsx'"):
        data.load(tmp_path / "mine.xlsx", label="y")


def test_a_clock_is_no_input(folder: Path) -> None:
    for path in folder.glob("*.csv"):
        header, *lines = path.read_text().splitlines()
        numbered = [f"{place},{line}" for place, line in enumerate(lines)]
        path.write_text("\n".join([f"t,{header}", *numbered]))
    with pytest.raises(InputError, match=r"column 't' grows with every row .*--time t"):
        data.load(folder, **CUT)
    assert data.load(folder, **CUT, time="t").shape == (3, 16)
    assert data.load(folder, **CUT, channels="ax,ay,az").shape == (3, 16)
    # Whoever names it means it.
    assert data.load(folder, **CUT, channels=["t", "ax"]).shape == (2, 16)


def test_the_label_must_be_named(folder: Path) -> None:
    with pytest.raises(InputError, match=r"has the columns ax, ay, az, activity; give the one"):
        data.load(folder, window=16)
    with pytest.raises(InputError, match=r"^label is 'activty', .* did you mean 'activity'\?"):
        data.load(folder, label="activty", channels="ax,ay", window=16)


def test_the_same_in_many_files_is_said_once(folder: Path) -> None:
    """As a column of dates is, which most recordings have."""
    for path in folder.glob("*.csv"):
        header, *lines = path.read_text().splitlines()
        dated = [f"2026-03-01T10:{n // 60:02}:{n % 60:02}Z,{line}" for n, line in enumerate(lines)]
        path.write_text("\n".join([f"when it was,{header}", *dated]))
    with pytest.raises(InputError) as caught:
        data.load(folder, **CUT)
    assert str(caught.value) == (
        "watch-01.csv (client watch-01), column 'when it was' contains dates, such as "
        "'2026-03-01T10:00:00Z' in line 2; if they give the order of rows, use them for it (--time "
        "'when it was'), or leave it out by naming the columns that are inputs (--channels). The "
        "same in watch-07.csv, watch-12.csv."
    )
    # NumPy warns of time zones; warnings are errors here.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert data.load(folder, **CUT, time="when it was").shape == (3, 16)


def test_what_is_too_much_to_be_listed_is_counted(tmp_path: Path) -> None:
    for number in range(30):
        (tmp_path / f"{number}.csv").write_text("ax,y\n1,walk\n?,sit\n3,sit\n")
    with pytest.raises(InputErrors, match=r"^30 things are wrong:") as caught:
        data.load(tmp_path, label="y")
    assert str(caught.value).endswith("\n- and 10 more.")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    refusals = Refusals(["rounds is 0."])
    refusals.add(caught.value)
    with pytest.raises(InputErrors, match=r"^31 things are wrong:"):
        refusals.check()


@pytest.mark.parametrize("first", [2**53, 10**18, 10**30])
def test_large_whole_numbers_are_classes_of_their_own(tmp_path: Path, first: int) -> None:
    """As floats 2**53 and 2**53 + 1 are the same number."""
    lines = [f"{n},{first + n % 2}" for n in (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8) * 5]
    (tmp_path / "mine.csv").write_text("\n".join(["ax,y", *lines]))
    federation = data.load(tmp_path / "mine.csv", label="y", clients=2)
    assert federation.labels == (str(first), str(first + 1))


def test_spreadsheets_and_macs_leave_things_behind(folder: Path, tmp_path: Path) -> None:
    wanted = data.load(folder, **CUT)
    for user in USERS:
        (tmp_path / "more" / user).mkdir(parents=True)
        header, *lines = (folder / f"{user}.csv").read_text().splitlines()
        quoted = ", ".join(f'"{name}"' for name in header.split(","))
        text = "\n".join(f"{line},," for line in [quoted, *lines])
        (tmp_path / "more" / user / "one.csv").write_text(text)
        (tmp_path / "more" / user / "._one.csv").write_bytes(b"\x00\x05\x16\x07")
    assert same(data.load(tmp_path / "more", **CUT), wanted)


def test_notes_on_classes_and_clients(folder: Path) -> None:
    (folder / "watch-01.csv").unlink()
    path = folder / "watch-07.csv"
    path.write_text(path.read_text().replace("walk", "Walk"))
    federation = data.load(folder, **CUT)
    note = "classes that differ only in case or spaces are different classes: 'Walk' and 'walk'"
    assert federation.notes == (note,)
    path.unlink()
    assert "there is one client only, watch-12" in data.load(folder, **CUT).notes[0]


def test_a_typo_in_the_name_of_a_folder() -> None:
    with pytest.raises(InputError, match=r"no data set 'usrs'\. There are: .*FOLDER/"):
        data.load("usrs", label="activity", window=16)


def test_words_of_ones_own_data_with_a_data_set_that_knows_them() -> None:
    with pytest.raises(InputError, match="label, window are given, and digits is a data set"):
        data.load("digits", label="y", window=3)


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ({"window": 1}, "window is 1"),
        ({"stride": 4}, "together with window"),
        ({"window": 8, "stride": 0}, "stride is 0"),
    ],
)
def test_bad_windows(words: dict[str, int], wanted: str) -> None:
    with pytest.raises(InputError, match=wanted):
        OwnDataOptions(**words)


def test_a_client_with_one_class_is_noted(folder: Path) -> None:
    path = folder / "watch-07.csv"
    lines = [line for line in path.read_text().splitlines() if not line.endswith(("sit", "walk"))]
    path.write_text("\n".join(lines))
    federation = data.load(folder, **CUT)
    assert "1 of 3 clients have one class only: watch-07 (run)" in federation.notes


def test_more_clients_than_users_are_refused_with_a_way_out(folder: Path) -> None:
    with pytest.raises(InputError, match=r"at most 3, the users of users; .* partition iid"):
        data.load(folder, **CUT, clients=50)
    dealt = data.load(folder, **CUT, clients=5, partition="iid")
    assert dealt.names == {}


# ---- in Python -----------------------------------------------------------------------------------


class Frame:
    """What is used of a DataFrame of another library than pandas."""

    def __init__(self, found: dict[str, np.ndarray]) -> None:
        self.found = found
        self.columns = list(found)

    def __getitem__(self, name: str) -> np.ndarray:
        return self.found[name]

    def to_numpy(self) -> np.ndarray:
        raise AssertionError("columns are asked for one by one")


def test_a_frame(folder: Path) -> None:
    wanted = data.load(folder, **CUT)
    found = columns()
    assert same(data.load(Frame(found), **CUT, client="user"), wanted)
    by_client = {}
    for user in USERS:
        own = found["user"] == user
        by_client[user] = Frame(
            {name: values[own] for name, values in found.items() if name != "user"}
        )
    assert same(data.load(by_client, **CUT), wanted)


def test_a_frame_of_pandas(folder: Path) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(columns())
    wanted = data.load(folder, **CUT)
    assert same(data.load(frame, **CUT, client="user"), wanted)
    frame["activity"] = frame["activity"].astype("category")
    assert same(data.load(frame, **CUT, client="user"), wanted)
    frame.loc[3, "ax"] = None
    with pytest.raises(InputError, match="column 'ax' is empty in 1 of 1080 rows, first in row 3"):
        data.load(frame, **CUT, client="user")


def test_arrays_in_every_form(folder: Path) -> None:
    wanted = data.load(folder, **CUT)
    found = columns()
    x = np.stack([found[name] for name in CHANNELS], axis=1)
    words = {"window": 16, "stride": 8}
    y, who = found["activity"], found["user"]
    for made in (
        data.load((x, y, who), **words),
        data.load((torch.from_numpy(x), y), client=who, **words),
        data.load(x, label=y, client=who, **words),
        data.load({"x": x, "y": y, "client": who}, **words),
        data.load({user: (x[who == user], y[who == user]) for user in USERS}, **words),
        data.from_arrays(x, y, who, **words),
    ):
        assert same(made, wanted)


class Windows(Dataset[Any]):
    """A person's own."""

    def __init__(self, as_dictionary: bool = False) -> None:
        self.x = torch.randn(60, 3, 16, generator=torch.Generator().manual_seed(0))
        self.y = torch.arange(60) % 4
        self.user = [USERS[place % 3] for place in range(60)]
        self.as_dictionary = as_dictionary

    def __len__(self) -> int:
        return 60

    def __getitem__(self, place: int) -> Any:
        if self.as_dictionary:
            return {"x": self.x[place], "activity": self.y[place], "who": self.user[place]}
        return self.x[place], self.y[place]


def test_a_torch_dataset() -> None:
    plain = Windows()
    wanted = data.load((plain.x, plain.y, np.array(plain.user)))
    assert wanted.names == dict(enumerate(USERS))
    assert same(data.load(plain, client="user"), wanted)
    assert same(data.load(plain, client=np.array(plain.user)), wanted)
    assert same(data.load(Windows(True), label="activity", client="who"), wanted)
    numbered = torch.arange(60) % 3
    assert data.load(TensorDataset(plain.x, plain.y, numbered)).names == {}
    assert len(data.load(plain).clients) == 10, "dealt out where nobody says whose they are"
    parts = {user: torch.utils.data.Subset(plain, range(k, 60, 3)) for k, user in enumerate(USERS)}
    assert data.load(parts).names == wanted.names


def test_bad_torch_datasets() -> None:
    class Endless(IterableDataset[Any]):
        def __iter__(self) -> Any:
            raise AssertionError("never asked")

    class Odd(Windows):
        def __getitem__(self, place: int) -> Any:
            return torch.zeros(3, 16 + place), 0

    class Alone(Windows):
        def __getitem__(self, place: int) -> Any:
            return torch.zeros(3, 16)

    for made, wanted in (
        (Endless(), "without a length"),
        (Odd(), "cannot be stacked .* of the same shape"),
        (Alone(), "must be \\(x, y\\)"),
    ):
        with pytest.raises(InputError, match=wanted):
            data.load(made)
    with pytest.raises(InputError, match="no attribute of that name with 60 entries"):
        data.load(Windows(), client="nobody")
    with pytest.raises(InputError, match="has no label"):
        data.load(Windows(True), label="label")


# The libraries below are no part of the development tools: datasets alone brings 30 others.


def hugging_face(datasets: Any) -> Any:
    found = columns()
    names = datasets.ClassLabel(names=list(ACTIVITIES))
    features = {name: datasets.Value("float64") for name in CHANNELS}
    features |= {"activity": names, "user": datasets.Value("string")}
    numbered = [ACTIVITIES.index(label) for label in found["activity"]]
    content = {**found, "activity": numbered}
    return datasets.Dataset.from_dict(content, features=datasets.Features(features))


def test_a_hugging_face_dataset(folder: Path) -> None:
    datasets = pytest.importorskip("datasets")
    wanted = data.load(folder, **CUT)
    made = hugging_face(datasets)
    assert same(data.load(made, **CUT, client="user"), wanted)
    with pytest.raises(InputError, match="dictionary of splits"):
        data.load(datasets.DatasetDict({"train": made}), **CUT)
    with pytest.raises(InputError, match="has the columns ax, ay, az, activity, user"):
        data.load(made, window=16)


def test_a_hugging_face_dataset_of_arrays() -> None:
    datasets = pytest.importorskip("datasets")
    plain = Windows()
    wanted = data.load((plain.x, plain.y, np.array(plain.user)))
    content = {"signal": plain.x.numpy(), "activity": plain.y.numpy(), "who": plain.user}
    made = datasets.Dataset.from_dict(content)
    assert same(data.load(made, label="activity", client="who"), wanted)
    series = {f"a{k}": plain.x[:, k].numpy() for k in range(3)}
    apart = datasets.Dataset.from_dict(
        {**series, "activity": content["activity"], "who": plain.user}
    )
    assert same(data.load(apart, label="activity", client="who"), wanted)
    image = datasets.Image()
    pixels = [np.full((8, 8, 3), k, dtype=np.uint8) for k in range(20)]
    features = datasets.Features({"image": image, "y": datasets.Value("int64")})
    encoded = {"image": [image.encode_example(each) for each in pixels], "y": [0, 1] * 10}
    pictures = datasets.Dataset.from_dict(encoded, features=features)
    assert data.load(pictures, label="y", clients=2).shape == (3, 8, 8)


def test_a_partitioner_of_flwr_datasets(folder: Path) -> None:
    datasets = pytest.importorskip("datasets")
    partitioner = pytest.importorskip("flwr_datasets.partitioner")
    natural = partitioner.NaturalIdPartitioner(partition_by="user")
    natural.dataset = hugging_face(datasets)
    wanted = data.load(folder, **CUT)
    assert same(data.load(natural, **CUT, channels=CHANNELS), wanted)
    even = partitioner.IidPartitioner(num_partitions=4)
    even.dataset = hugging_face(datasets)
    assert len(data.load(even, label="activity", channels=CHANNELS).clients) == 4
    with pytest.raises(InputError, match="assign its dataset first"):
        data.load(partitioner.IidPartitioner(num_partitions=4), label="activity")


def test_what_is_none_of_these() -> None:
    with pytest.raises(InputError, match="data is a int; it must be the name of a data set"):
        data.load(7)
    with pytest.raises(InputError, match="without targets"):
        data.load(np.zeros((5, 3)))
    with pytest.raises(
        InputError, match=r"data is {}; it must be a dictionary with one client or more"
    ):
        data.load({})


def test_an_array_is_never_printed_whole() -> None:
    for wrong in (
        lambda: fg.run("fedavg", data=np.zeros((50, 3))),
        lambda: fg.run("fedavg", clients=np.arange(1000), data="digits"),
    ):
        with pytest.raises(InputError) as caught:
            wrong()
        assert len(str(caught.value)) < 500


# ---- the order of the axes -----------------------------------------------------------------------


def test_channels_last_is_refused_or_said() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 128, 6)), np.arange(40) % 2
    with pytest.raises(InputError, match=r"128 channels of 6 samples.*channels=6.*\(0, 2, 1\)"):
        data.from_arrays(x, y)
    turned = data.from_arrays(x, y, channels=6)
    assert turned.shape == (6, 128)
    assert "moved to the front" in turned.notes[0]
    named = data.from_arrays(x, y, channels=["a", "b", "c", "d", "e", "f"])
    assert named.preparation.channels == ("a", "b", "c", "d", "e", "f")
    assert torch.equal(
        turned.client(0).train.x, data.from_arrays(x.transpose(0, 2, 1), y).client(0).train.x
    )
    # Whoever says so means it.
    assert data.from_arrays(x, y, channels=128).shape == (128, 6)
    with pytest.raises(InputError, match="number of channels is 7"):
        data.from_arrays(x, y, channels=7)
    images = rng.normal(size=(40, 28, 28, 1))
    with pytest.raises(InputError, match=r"channels=1.*\(0, 3, 1, 2\)"):
        data.from_arrays(images, y)
    assert data.from_arrays(images, y, channels=1).shape == (1, 28, 28)


def test_windows_are_not_cut_again() -> None:
    with pytest.raises(InputError, match="already consists of windows"):
        data.from_arrays(np.zeros((40, 3, 16)), np.arange(40) % 2, window=8)


# ---- runs ----------------------------------------------------------------------------------------


def test_run_and_resume_take_the_same_words(folder: Path, tmp_path: Path) -> None:
    words = {**CUT, "rounds": 1, "epochs": 1, "engine": "serial", "progress": False}
    result = fg.run("fedavg", data=folder, channels=["ax", "az"], out=tmp_path / "run", **words)
    assert result.summary["clients"] == 3
    config = (tmp_path / "run" / "config.toml").read_text()
    for line in ('label = "activity"', "window = 16", "stride = 8", 'channels = "ax,az"'):
        assert line in config
    again = fg.run("fedavg", data=Frame(columns()), client="user", channels="ax,az", **words)
    assert again.summary["accuracy_clients"] == result.summary["accuracy_clients"]
    with pytest.raises(InputError, match="window is 16, and data is a federation"):
        fg.run("fedavg", data=data.load("digits", clients=3), window=16)


def test_a_run_is_not_resumed_on_changed_files(folder: Path, tmp_path: Path) -> None:
    words = {**CUT, "rounds": 2, "epochs": 1, "engine": "serial", "progress": False}

    def stop(line: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fg.run("fedavg", data=folder, out=tmp_path / "run", watch=stop, **words)
    path = folder / "watch-07.csv"
    before = path.read_bytes()
    path.write_bytes(before.replace(b"9", b"8", 1))
    with pytest.raises(InputError, match=r"watch-07\.csv has changed since the run was started"):
        fg.resume(tmp_path / "run", engine="serial", progress=False)
    path.write_bytes(before)
    resumed = fg.resume(tmp_path / "run", engine="serial", progress=False)
    assert [row["name"] for row in resumed.clients()] == list(USERS)
    path.unlink()
    with pytest.raises(InputError, match="is on the data in"):
        fg.rerun(tmp_path / "run", engine="serial", progress=False)


def test_devices_by_name(folder: Path, tmp_path: Path) -> None:
    lines = [[user, 5 + k, 40, 2.5, 1 << 30] for k, user in reversed(list(enumerate(USERS)))]
    write(tmp_path / "devices.csv", ["client", "up", "down", "speed", "memory"], lines)
    federation = data.load(folder, **CUT, profile=str(tmp_path / "devices.csv"))
    assert [federation.infos[k].up for k in federation.ids] == [5, 6, 7]
    steps = [[user, 0, 1 + k, 1] for k, user in enumerate(USERS)]
    write(tmp_path / "trace.csv", ["client", "second", "up", "down"], steps)
    traced = data.load(folder, **CUT, trace=str(tmp_path / "trace.csv"))
    assert traced.trace is not None
    assert traced.trace[1].up == (2.0,)
    with pytest.raises(
        InputError, match="line for client 'watch-12', and the clients are numbered"
    ):
        data.load("digits", clients=3, profile=str(tmp_path / "devices.csv"))


def test_a_smoke_run(folder: Path) -> None:
    result = fg.run("fedavg", data=folder, **CUT, smoke=True, engine="serial", progress=False)
    assert [row["name"] for row in result.clients()] == list(USERS)
