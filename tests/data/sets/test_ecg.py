"""MIT-BIH from a small packed file in the published form, with values worked by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedgrove import data
from fedgrove.data.named_set import read_dataset
from fedgrove.data.sets import SETS

RECORDS = np.array([100, 114, 201, 202], np.uint8)
LEADS = np.array([["MLII", "V5"], ["V5", "MLII"], ["MLII", "V1"], ["MLII", "V1"]])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Ten beats of each record, one a second; 201 and 202 are one patient."""
    beats = 10
    record = np.repeat(RECORDS, beats)
    place = np.tile(np.arange(beats), len(RECORDS))
    x = np.zeros((len(record), 128, 2), np.int16)
    x[:, :, 0] = 200
    x[:, :, 1] = -100
    rr = np.full((len(record), 2), 360, np.uint16)
    rr[place == 0, 0] = 0
    rr[place == beats - 1, 1] = 0
    np.savez(
        tmp_path / "mit_bih.npz",
        x=x,
        y=(place % 2 * 2).astype(np.uint8),
        record=record,
        patient=np.repeat(np.array([0, 1, 2, 2], np.uint8), beats),
        time=(place * 360 + 200).astype(np.uint32),
        # Five minutes of two beats each.
        block=(np.repeat(np.arange(4), beats) * 30 + place // 2).astype(np.uint16),
        rr=rr,
        records=RECORDS,
        leads=LEADS,
    )
    return tmp_path


def test_beats_by_hand(folder: Path) -> None:
    dataset = read_dataset("mit-bih", SETS["mit-bih"], None, folder)
    assert dataset.x.shape == (40, 4, 128)
    # 200 units are a millivolt. MLII is the second lead of record 114, and comes first.
    assert dataset.x[0, :2, 5].tolist() == [1.0, -0.5]
    assert dataset.x[10, :2, 5].tolist() == [-0.5, 1.0]
    # A beat a second; the missing interval before the first beat is the median.
    assert (dataset.x[:, 2:] == 1.0).all()
    assert dataset.names == ("100", "114", "201+202")
    assert dataset.user is not None
    assert np.bincount(dataset.user).tolist() == [10, 10, 20]
    assert dataset.start is not None
    assert dataset.start[1] - dataset.start[0] == 360
    assert dataset.start[10] - dataset.start[9] > dataset.reach


def test_patients_are_split_by_the_minute(folder: Path) -> None:
    federation = data.load("mit-bih", data_dir=folder)
    assert federation.split == "blocks"
    assert federation.name_of(2) == "201+202"
    first = federation.client(0)
    # A fifth of the minutes, whole, is held out.
    assert (len(first.train), len(first.test)) == (8, 2)
    assert federation.labels[2] == "ventricular"
