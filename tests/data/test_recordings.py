"""Empty cells, rates and times of recordings, and when rows look like a recording."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fedgrove import data
from fedgrove.data.arrays import OwnDataOptions
from fedgrove.data.columns import InputTable
from fedgrove.data.recordings import fill_empty, resample
from fedgrove.data.tables import make_dataset, read_recordings
from fedgrove.errors import InputError

NAN = np.nan


def wave(
    rate: float, seconds: float = 12.0, start: float = 0.0, scale: float = 1.0
) -> pd.DataFrame:
    """A slow wave with two labels, recorded at a rate."""
    t = np.arange(int(seconds * rate)) / rate
    label = np.where(t < seconds / 2, "run", "sit")
    return pd.DataFrame({"t": start + t * scale, "x": np.sin(2 * np.pi * t), "label": label})


def cut(**options: object) -> OwnDataOptions:
    return OwnDataOptions(**{"label": "label", "time": "t", "window": 10, **options})  # type: ignore[arg-type]


# ---- rates ---------------------------------------------------------------------------------------


def test_labels_are_those_of_the_nearest_row() -> None:
    """Rows at 0, 1 and 2 s; at 4 Hz the times between are 0, .25, .5 (a tie), .75, 1, ..."""
    signal = np.array([[0.0], [4.0], [0.0]])
    made = resample(signal, np.arange(3.0), np.zeros(3, int), np.ones(3), 4.0)
    assert made.signal[:, 0].tolist() == [0, 1, 2, 3, 4, 3, 2, 1, 0]
    assert made.nearest.tolist() == [0, 0, 0, 1, 1, 1, 1, 2, 2]


def test_nothing_is_interpolated_across_a_gap() -> None:
    clock = np.array([0.0, 1.0, 90.0, 91.0])
    made = resample(np.arange(4.0)[:, None], clock, np.array([0, 0, 1, 1]), np.ones(4), 2.0)
    assert made.clock.tolist() == [0, 0.5, 1, 90, 90.5, 91]
    assert made.signal[:, 0].tolist() == [0, 0.5, 1, 2, 2.5, 3]
    assert made.nearest.tolist() == [0, 0, 1, 2, 2, 3]


def test_a_lower_rate_does_not_fold_high_frequencies_down() -> None:
    """20 Hz at a rate of 25 would look like 5 Hz; 2 Hz stays as it is."""
    clock = np.arange(0, 10, 0.01)
    signal = np.stack([np.sin(2 * np.pi * 20 * clock), np.sin(2 * np.pi * 2 * clock)], axis=1)
    rows = len(clock)
    made = resample(signal, clock, np.zeros(rows, int), np.full(rows, 100.0), 25.0)
    inside = slice(25, -25)
    assert np.abs(made.signal[inside, 0]).max() < 0.01
    wanted = np.sin(2 * np.pi * 2 * made.clock)
    assert np.abs(made.signal[:, 1] - wanted)[inside].max() < 0.02


def test_recordings_of_one_rate_stay_as_they_are() -> None:
    frame = wave(50)
    plain = make_dataset([InputTable("a", frame)], cut())
    resampled = make_dataset([InputTable("a", frame)], cut(rate=50.0))
    assert np.allclose(plain.x, resampled.x, atol=1e-6)
    assert (plain.y == resampled.y).all()
    assert (plain.rate, resampled.rate) == (None, 50.0)


def test_different_rates_are_noted_and_resampled(tmp_path: Path) -> None:
    for name, rate in (("anna", 50), ("ben", 25), ("carl", 51)):
        wave(rate).to_csv(tmp_path / f"{name}.csv", index=False)
    options = {"label": "label", "time": "t", "window": 10}
    noted = data.load(tmp_path, **options)
    assert (
        "recordings have different rates, if times are in seconds: 51 Hz (carl.csv, anna.csv), "
        "25 Hz (ben.csv); a window of 10 rows lasts 0.196 to 0.4 s"
    ) in noted.notes[0]
    resampled = data.load(tmp_path, **options, rate=25)
    assert resampled.notes[0].startswith("recordings are resampled to 25 Hz, from 51 Hz (carl")
    assert resampled.preparation_of(0).rate == 25
    # 6 s of a label at 25 Hz have about 150 rows in all recordings.
    counts = [client.info.examples for client in resampled.clients.values()]
    assert max(counts) - min(counts) <= 2
    (tmp_path / "ben.csv").unlink()
    assert "rates" not in "".join(data.load(tmp_path, **options).notes)


@pytest.mark.parametrize(
    ("start", "scale", "time"),
    [(0.0, 1000.0, "t:ms"), (1.7e12, 1000.0, "t"), (1.7e15, 1e6, "t"), (0.0, 1e9, "t:ns")],
)
def test_units_of_times(start: float, scale: float, time: str) -> None:
    table = InputTable("a", wave(50, start=start, scale=scale))
    made = make_dataset([table], cut(time=time, rate=25.0))
    wanted = make_dataset([InputTable("a", wave(50))], cut(rate=25.0))
    assert made.x.shape == wanted.x.shape
    assert np.allclose(made.x, wanted.x, atol=1e-2)


def test_times_in_another_unit_are_refused() -> None:
    table = InputTable("a.csv", wave(50, scale=1000.0))
    with pytest.raises(InputError, match=r"a.csv has 0.05 rows per second if 't' is in s; .*t:ms"):
        make_dataset([table], cut(rate=50.0))
    with pytest.raises(InputError, match=r"5e\+04 rows per second if 't' is in ms"):
        make_dataset([InputTable("a.csv", wave(50))], cut(rate=50.0, time="t:ms"))
    with pytest.raises(InputError, match="given together with time=COLUMN"):
        OwnDataOptions(rate=50.0)


def test_a_column_may_itself_end_like_a_unit() -> None:
    frame = wave(50, scale=1000.0).rename(columns={"t": "time:ms"})
    made = make_dataset([InputTable("a", frame)], cut(time="time:ms", rate=50.0))
    assert made.channels == ("x",)


def test_dates_with_the_day_first() -> None:
    frame = wave(50)
    dates = pd.Timestamp("2024-05-17 10:00") + pd.to_timedelta(frame["t"], unit="s")
    frame["t"] = dates.dt.strftime("%d.%m.%Y %H:%M:%S,%f").str[:-3]
    made = make_dataset([InputTable("a", frame)], cut(rate=25.0))
    wanted = make_dataset([InputTable("a", wave(50))], cut(rate=25.0))
    assert np.allclose(made.x, wanted.x, atol=1e-3)
    # 2 May comes before 1 June.
    rows = read_recordings(
        InputTable("a", pd.DataFrame({"t": ["01.06.2024", "02.05.2024"], "x": [1, 2]})),
        OwnDataOptions(time="t"),
    )
    assert rows.signal[:, 0].tolist() == [2, 1]


# ---- empty cells ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fill", "wanted"),
    [("zero", [0, 1, 0, 3, 0, 8]), ("mean", [2, 1, 2, 3, 8, 8]), ("previous", [1, 1, 1, 3, 8, 8])],
)
def test_empty_cells_are_filled_within_a_recording(fill: str, wanted: list[float]) -> None:
    """Recording 0 is -, 1, -, 3 of mean 2; recording 1 is -, 8."""
    signal = np.array([NAN, 1, NAN, 3, NAN, 8])[:, None]
    assert fill_empty(signal, np.array([0, 0, 0, 0, 1, 1]), fill)[:, 0].tolist() == wanted


def with_empty_cells() -> pd.DataFrame:
    frame = wave(50).drop(columns="t")
    frame.loc[[5, 6, 100], "x"] = NAN
    return frame


def test_no_window_crosses_rows_that_are_left_out() -> None:
    frame = with_empty_cells()
    frame["x"] = np.where(frame["x"].isna(), NAN, np.arange(len(frame)))
    frame.loc[200, "label"] = ""
    options = cut(time=None, fill="drop", channels=("x",))
    made = make_dataset([InputTable("a.csv", frame)], options)
    assert (np.diff(made.x[:, 0], axis=1) == 1).all()
    assert "4 of 600 rows have empty cells and are left out: a.csv 4" in made.notes


def test_filled_cells_are_counted_and_others_refused() -> None:
    table = InputTable("a.csv", with_empty_cells())
    with pytest.raises(InputError, match=r"fill these cells \(fill='mean', zero or previous\)"):
        make_dataset([table], cut(time=None))
    made = make_dataset([table], cut(time=None, fill="mean"))
    assert np.isfinite(made.x).all()
    assert made.notes[0].startswith("3 of 600 rows have empty cells and have the mean")
    frame = with_empty_cells().assign(y=NAN)
    with pytest.raises(InputError, match="column 'y' is empty in all 600 rows"):
        make_dataset([InputTable("a.csv", frame)], cut(time=None, fill="mean"))
    frame = with_empty_cells().assign(user=["a"] * 300 + ["b"] * 300)
    frame.loc[frame["user"] == "a", "x"] = NAN
    with pytest.raises(InputError, match=r"client a.* has no number in column 'x'"):
        make_dataset([InputTable("all.csv", frame)], cut(time=None, fill="mean", client="user"))
    frame = with_empty_cells()
    frame.loc[3, "label"] = ""
    with pytest.raises(InputError, match=r"no label in 1 of 600 rows.*fill='drop'"):
        make_dataset([InputTable("a.csv", frame)], cut(time=None, fill="zero"))


# ---- rows that look like a recording -------------------------------------------------------------


def notes_of(label: np.ndarray, **columns: object) -> str:
    frame = pd.DataFrame({"x": np.random.default_rng(1).normal(size=len(label)), "label": label})
    table = InputTable("a", frame.assign(**columns))
    options = OwnDataOptions("label", "user" if columns else None)
    return "\n".join(make_dataset([table], options).notes)


def test_only_rows_in_the_order_of_a_recording_are_noted() -> None:
    rng = np.random.default_rng(0)
    recorded = np.repeat(["run", "sit", "walk"], 120)
    assert "come 120 in a row, as in a recording" in notes_of(recorded)
    # A rare class among shuffled rows leaves long runs of the other.
    rare = np.where(rng.random(2000) < 0.03, "rare", "usual")
    assert "in a row" not in notes_of(rare)
    # Clients of one class each.
    users = np.repeat(["a", "b"], 200)
    assert "in a row" not in notes_of(np.repeat(["run", "sit"], 200), user=users)
    # Numbers to predict, also if they change rarely.
    assert "in a row" not in notes_of(np.repeat(rng.normal(size=10), 40))
