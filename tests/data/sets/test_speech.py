"""AudioMNIST from a small packed file in the published form, with values worked by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedgrove import data
from fedgrove.data.named_set import read_dataset
from fedgrove.data.sets import SETS
from fedgrove.errors import InputError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Speakers 7 and 9 say each digit five times; 8 is in the table, but says nothing."""
    speaker = np.repeat(np.array([9, 7], np.uint8), 50)
    x = np.full((100, 32, 32), 10, np.uint8)
    x[:, 0, 0] = speaker
    np.savez(
        tmp_path / "audio_mnist.npz",
        x=x,
        y=np.tile(np.repeat(np.arange(10, dtype=np.uint8), 5), 2),
        speaker=speaker,
        step_db=np.float32(0.5),
        offset_db=np.float32(-100),
        speakers=np.array([7, 8, 9], np.uint8),
        gender=np.array(["male", "male", "female"]),
        accent=np.array(["German", "German", "Tamil"]),
        room=np.array(["kino", "kino", "library"]),
    )
    return tmp_path


def test_digits_by_hand(folder: Path) -> None:
    dataset = read_dataset("audio-mnist", SETS["audio-mnist"], None, folder)
    assert dataset.x.shape == (100, 1, 32, 32)
    # 9 and 10 steps of half a decibel above -100.
    assert dataset.x[0, 0, 0, :2].tolist() == [-95.5, -95.0]
    assert dataset.names == ("7", "9")
    assert dataset.user is not None
    assert dataset.user[0] == 1
    assert dataset.kinds is not None
    # In alphabetical order: female 0, male 1.
    assert dataset.kinds[[0, 50]].tolist() == [0, 1]


def test_speakers_are_clients_and_blocks_are_refused(folder: Path) -> None:
    federation = data.load("audio-mnist", data_dir=folder)
    assert (len(federation.clients), federation.split, federation.name_of(1)) == (2, "random", "9")
    with pytest.raises(InputError, match="its recordings are of one word each"):
        data.load("audio-mnist", split="blocks", data_dir=folder)
