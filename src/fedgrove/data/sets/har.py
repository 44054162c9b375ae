"""Human activity recognition: UCI-HAR and WISDM, from packed npz or as published."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ...errors import InputError
from ..dataset import (
    FORECAST_SAMPLES,
    Array,
    Dataset,
    Ints,
    count_within_groups,
    cut_windows,
    make_forecast,
    number_runs,
    number_values,
)
from ..federation import Defaults
from ..named_set import Arrays, FileFormat, NamedSet, read_npz

UCI_LABELS = ("walking", "walking upstairs", "walking downstairs", "sitting", "standing", "laying")
WISDM_LABELS = ("downstairs", "jogging", "sitting", "standing", "upstairs", "walking")
WISDM51_LABELS = (
    "walking", "jogging", "stairs", "sitting", "standing", "typing", "brushing teeth",
    "eating soup", "eating chips", "eating pasta", "drinking", "eating a sandwich", "kicking",
    "catching", "dribbling", "writing", "clapping", "folding clothes",
)  # fmt: skip
SIGNALS = (
    "body_acc_x", "body_acc_y", "body_acc_z",
    "body_gyro_x", "body_gyro_y", "body_gyro_z",
    "total_acc_x", "total_acc_y", "total_acc_z",
)  # fmt: skip
"""UCI-HAR's files of signals, in the order of the channels."""
VALUE = r",(-?[\d.]+(?:[eE]-?\d+)?)"
RECORD = re.compile(r"(\d+),([A-Za-z]+),(\d+)" + 3 * VALUE)
"""One record of WISDM's raw text: user, activity, time, x, y, z."""


# ---- UCI-HAR -------------------------------------------------------------------------------------


def read_packed_uci(paths: Sequence[Path]) -> Arrays:
    """Read the packed file, channels first."""
    packed = read_npz(paths[0], ("x", "y", "subject", "chain"))
    return {
        "x": np.ascontiguousarray(np.moveaxis(packed["x"], 2, 1)),
        "y": packed["y"],
        "user": packed["subject"],
        "chain": packed["chain"],
    }


def read_text_uci(paths: Sequence[Path]) -> Arrays:
    """Read the folder "UCI HAR Dataset", or a zip of it.

    Its parts train and test have nine signals of 128 columns, labels 1..6 and subjects.
    """
    train_x, train_y, train_user = _read_uci_part(paths[0], "train")
    test_x, test_y, test_user = _read_uci_part(paths[0], "test")
    x = np.concatenate([train_x, test_x])
    y = np.concatenate([train_y, test_y])
    user = np.concatenate([train_user, test_user])
    return {"x": x, "y": y, "user": user, "chain": number_chains(x, y, user)}


def _read_uci_part(path: Path, part: str) -> tuple[Array, Array, Array]:
    """Read windows (n, 9, 128), labels 0..5 and subjects of one official part."""
    root = path if path.is_dir() else zipfile.Path(path) / "UCI HAR Dataset"
    folder = root / part
    files = [folder / "Inertial Signals" / f"{signal}_{part}.txt" for signal in SIGNALS]
    signals = list(map(_read_table, files))
    y = _read_table(folder / f"y_{part}.txt").ravel().astype(np.int64)
    user = _read_table(folder / f"subject_{part}.txt").ravel().astype(np.int64)

    signals_agree = all(signal.shape == (len(y), 128) for signal in signals)
    labels_are_known = bool(((y >= 1) & (y <= 6)).all())
    if not (signals_agree and len(user) == len(y) and labels_are_known):
        raise InputError(
            f"the {part} files under '{path}' do not agree in length or labels; unpack them again."
        )
    return np.stack(signals, axis=1).astype(np.float32), y - 1, user


def _read_table(path: Path | zipfile.Path) -> Array:
    try:
        with path.open("r") as file:
            return np.loadtxt(file, dtype=np.float64, ndmin=2)
    except (OSError, KeyError, ValueError) as error:
        raise InputError(
            f"'{path}' cannot be read ({error}); unpack the whole UCI HAR archive."
        ) from error


def number_chains(x: Array, y: Array, user: Array) -> Ints:
    """Number the chains: consecutive windows, each starting with the second half of the last."""
    half = x.shape[2] // 2
    broken = np.zeros(len(x), dtype=np.int64)
    # The two printed copies of a sample are compared with a tolerance, for rounding.
    broken[1:] = (np.abs(x[1:, :, :half] - x[:-1, :, half:]) > 1e-5).any(axis=(1, 2))
    return number_runs(y, user, np.cumsum(broken))


def make_uci_har(arrays: Arrays) -> Dataset:
    """Make the data set of windows of 128 steps, half overlapping; a block is a whole chain."""
    y = arrays["y"].astype(np.int64)
    chain = number_values(arrays["chain"])
    # Times are made up: 64 steps from one window of a chain to the next, and chains so far apart
    # that windows of different chains never overlap.
    start = chain * (128 * (len(y) + 1)) + count_within_groups(chain) * 64
    return Dataset(
        arrays["x"], y, UCI_LABELS, number_values(arrays["user"]), chain, start, reach=128
    )


def make_uci_har_forecast(arrays: Arrays) -> Dataset:
    """Make the windows of uci-har with the samples that follow, from the next window of the chain.

    The last window of a chain has no next one and is left out.
    """
    windows = make_uci_har(arrays)
    assert windows.block is not None
    assert windows.start is not None
    assert windows.user is not None
    # The rows of a chain are in order of time, but not next to each other.
    order = np.argsort(windows.block, kind="stable")
    has_next = windows.block[order][:-1] == windows.block[order][1:]
    now = order[:-1][has_next]
    after = order[1:][has_next]
    half = windows.x.shape[2] // 2
    following = windows.x[after][:, :, half : half + FORECAST_SAMPLES]
    longer = replace(
        windows,
        x=np.concatenate([windows.x[now], following], axis=2),
        y=windows.y[now],
        user=number_values(windows.user[now]),
        block=number_values(windows.block[now]),
        start=windows.start[now],
        reach=windows.reach + FORECAST_SAMPLES,
    )
    return make_forecast(longer, FORECAST_SAMPLES, SIGNALS)


# ---- WISDM ---------------------------------------------------------------------------------------


def read_packed_wisdm(paths: Sequence[Path]) -> Arrays:
    """Read the packed windows, channels first."""
    packed = read_npz(paths[0], ("x", "y", "user"))
    x = np.ascontiguousarray(np.moveaxis(packed["x"], 2, 1))
    return {"x": x, "y": packed["y"], "user": packed["user"]}


def read_text_wisdm(paths: Sequence[Path]) -> Arrays:
    """Read the raw text ``user,activity,time,x,y,z;``, with records anywhere in a line.

    The published file has lines with two records, lines without a semicolon, empty lines and
    records that lack a value; incomplete records are skipped.
    """
    users: list[int] = []
    labels: list[int] = []
    samples: list[tuple[float, float, float]] = []
    label_of = {name: label for label, name in enumerate(WISDM_LABELS)}
    with paths[0].open(encoding="ascii", errors="replace") as file:
        for line in file:
            for user, activity, _, *values in RECORD.findall(line):
                # The pattern also matches 1.2.3, which is not a number, and unknown activities.
                try:
                    x, y, z = map(float, values)
                    label = label_of[activity.lower()]
                except (ValueError, KeyError):
                    continue
                users.append(int(user))
                labels.append(label)
                samples.append((x, y, z))
    if not labels:
        raise InputError(
            f"'{paths[0]}' contains no record like 33,Jogging,49105962326000,-0.69,12.68,0.50; "
            f"download it again."
        )
    return {
        "xyz": np.array(samples, np.float32),
        "y": np.array(labels, np.uint8),
        "user": np.array(users, np.int64),
    }


def make_wisdm(arrays: Arrays) -> Dataset:
    """Make windows of 200 steps, 50 % overlap, from raw text; packed windows have 128 steps."""
    if "xyz" in arrays:
        rows = Dataset(arrays["xyz"], arrays["y"], WISDM_LABELS, arrays["user"])
        return cut_windows(rows, length=200, step=100)
    return Dataset(
        arrays["x"],
        arrays["y"].astype(np.int64),
        WISDM_LABELS,
        number_values(arrays["user"]),
        notes=("windows are 128 steps, not the raw file",),
        refusal=(
            "the order of its packed windows in time is lost; "
            "with the raw text WISDM_ar_v1.1_raw.txt blocks work"
        ),
    )


def read_packed_wisdm51(paths: Sequence[Path]) -> Arrays:
    """Read the packed raw rows."""
    packed = read_npz(paths[0], ("xyz_q", "activity", "user"))
    return {"xyz": packed["xyz_q"], "y": packed["activity"], "user": packed["user"]}


def make_wisdm51(arrays: Arrays) -> Dataset:
    """Make windows of the watch accelerometer in m/s²: 200 steps, 50 % overlap."""
    # The packed file holds whole numbers of 1/512 m/s².
    signal = arrays["xyz"].astype(np.float32) / 512
    notes = (f"{len(np.unique(arrays['user']))} of 51 subjects, watch accelerometer",)
    rows = Dataset(signal, arrays["y"], WISDM51_LABELS, arrays["user"], notes=notes)
    return cut_windows(rows, length=200, step=100)


# ---- the sets, each with its forms, the preferred one first --------------------------------------

UCI_FORMATS = (
    FileFormat(("uci_har.npz",), read_packed_uci),
    FileFormat(("UCI HAR Dataset",), read_text_uci),
    FileFormat(("UCI HAR Dataset.zip",), read_text_uci),
)
UCI_SOURCE = "https://archive.ics.uci.edu/dataset/240/human+activity+recognition+using+smartphones"
DEFAULTS = Defaults("har-cnn", cohort=10, rounds=50, epochs=3, batch=32, optimiser="Adam", lr=1e-3)

# No checksums are published for these files, so they are not downloaded.
SETS = {
    "uci-har": NamedSet(
        about="smartphone activity, 9x128, 6 activities, 30 users, 10,299 windows",
        defaults=DEFAULTS,
        partition="natural",
        formats=UCI_FORMATS,
        dataset=make_uci_har,
        source=UCI_SOURCE,
    ),
    "uci-har-forecast": NamedSet(
        about=("the windows of uci-har, 9x128; targets are the next 8 samples (numbers), 30 users"),
        defaults=DEFAULTS,
        partition="natural",
        formats=UCI_FORMATS,
        dataset=make_uci_har_forecast,
        source=UCI_SOURCE,
    ),
    "wisdm": NamedSet(
        about=(
            "phone accelerometer, 3x200 (raw text) or 3x128 (packed windows), 6 activities, "
            "36 users"
        ),
        defaults=DEFAULTS,
        partition="natural",
        formats=(
            # The raw text comes first: only it can be split by blocks.
            FileFormat(("WISDM_ar_v1.1_raw.txt",), read_text_wisdm),
            FileFormat(("WISDM_ar_v1.1/WISDM_ar_v1.1_raw.txt",), read_text_wisdm),
            FileFormat(("wisdm_windows128.npz",), read_packed_wisdm),
        ),
        dataset=make_wisdm,
        source="https://www.cis.fordham.edu/wisdm/dataset.php",
    ),
    "wisdm51": NamedSet(
        about="watch accelerometer, 3x200, 18 activities, 46 users, 29,349 windows",
        defaults=DEFAULTS,
        partition="natural",
        formats=(FileFormat(("wisdm51_watch_acc_raw.npz",), read_packed_wisdm51),),
        dataset=make_wisdm51,
        source=(
            "https://archive.ics.uci.edu/dataset/507/"
            "wisdm+smartphone+and+smartwatch+activity+and+biometrics+dataset"
        ),
    ),
}
