"""Spoken digits: AudioMNIST, as log-mel images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..dataset import Dataset, number_values
from ..federation import Defaults
from ..named_set import Arrays, FileFormat, NamedSet, read_npz

LABELS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def read_packed_digits(paths: Sequence[Path]) -> Arrays:
    """Read the packed images; their decibels are ``x * step_db + offset_db``."""
    names = ("x", "y", "speaker", "step_db", "offset_db", "speakers", "gender", "accent", "room")
    packed = read_npz(paths[0], names)
    return {name: packed[name] for name in names}


def make_audio_mnist(arrays: Arrays) -> Dataset:
    """Make the data set of log-mel images in decibels, one channel of 32 bands and 32 frames.

    A client standardises its images: how loud a speaker is, and the room, differ between clients.
    """
    x = arrays["x"].astype(np.float32) * float(arrays["step_db"]) + float(arrays["offset_db"])
    speaker = arrays["speaker"].astype(np.int64)
    row_of = {int(number): row for row, number in enumerate(arrays["speakers"])}
    rows = np.array([row_of[number] for number in np.unique(speaker).tolist()])
    own = number_values(speaker)
    gender = number_values(arrays["gender"][rows])
    names = tuple(str(number) for number in arrays["speakers"][rows])
    return Dataset(
        x[:, None],
        arrays["y"].astype(np.int64),
        LABELS,
        own,
        kinds=gender[own],
        names=names,
        notes=("audio-mnist: kinds are the gender of the speakers",),
        refusal="its recordings are of one word each, so there is nothing to keep together",
    )


SETS = {
    "audio-mnist": NamedSet(
        about="spoken digits, log-mel images, 1x32x32, 10 classes, 60 speakers, 30,000 recordings",
        defaults=Defaults(
            "mnist-cnn", cohort=10, rounds=30, epochs=1, batch=32, optimiser="Adam", lr=1e-3
        ),
        partition="natural",
        formats=(FileFormat(("audio_mnist.npz",), read_packed_digits),),
        dataset=make_audio_mnist,
        source="https://github.com/soerenab/AudioMNIST",
    ),
}
