"""Activity sets: UCI-HAR and WISDM, from packed npz or in the form their authors publish."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ..errors import InputError
from .dataset import Array, Dataset, Ints, ids, positions, runs
from .files import Arrays, FileFormat, need, npz
from .forecast import AHEAD, forecast
from .windows import windowed

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


def packed_uci(paths: Sequence[Path]) -> Arrays:
    """The packed file, channels first."""
    packed = npz(paths[0])
    need(packed, ("x", "y", "subject", "chain"), str(paths[0]))
    return {
        "x": np.ascontiguousarray(np.moveaxis(packed["x"], 2, 1)),
        "y": packed["y"],
        "user": packed["subject"],
        "chain": packed["chain"],
    }


def text_uci(paths: Sequence[Path]) -> Arrays:
    """The folder "UCI HAR Dataset" (or a zip that holds it).

    It holds nine signals of 128 columns, labels 1..6 and subjects, for train and test apart.
    """
    train_x, train_y, train_user = _uci_part(paths[0], "train")
    test_x, test_y, test_user = _uci_part(paths[0], "test")
    x = np.concatenate([train_x, test_x])
    y = np.concatenate([train_y, test_y])
    user = np.concatenate([train_user, test_user])
    return {"x": x, "y": y, "user": user, "chain": chains(x, y, user)}


def _uci_part(path: Path, part: str) -> tuple[Array, Array, Array]:
    """Windows (n, 9, 128), labels 0..5 and subjects of the official part ``part``."""
    root: Path | zipfile.Path = path
    if not path.is_dir():
        root = zipfile.Path(path) / "UCI HAR Dataset"
    folder = root / part
    signals = [_table(folder / "Inertial Signals" / f"{signal}_{part}.txt") for signal in SIGNALS]
    y = _table(folder / f"y_{part}.txt").ravel().astype(np.int64)
    user = _table(folder / f"subject_{part}.txt").ravel().astype(np.int64)

    signals_agree = all(signal.shape == (len(y), 128) for signal in signals)
    labels_are_known = bool(((y >= 1) & (y <= 6)).all())
    if not (signals_agree and len(user) == len(y) and labels_are_known):
        raise InputError(
            f"the {part} files under '{path}' do not agree in length or labels; unpack them again."
        )
    return np.stack(signals, axis=1).astype(np.float32), y - 1, user


def _table(path: Path | zipfile.Path) -> Array:
    try:
        with path.open("r") as file:
            return np.loadtxt(file, dtype=np.float64, ndmin=2)
    except (OSError, KeyError, ValueError) as error:
        raise InputError(
            f"'{path}' cannot be read ({error}); unpack the whole UCI HAR archive."
        ) from error


def chains(x: Array, y: Array, user: Array) -> Ints:
    """Number the chains: consecutive windows, each starting with the second half of the last."""
    half = x.shape[2] // 2
    broken = np.zeros(len(x), dtype=np.int64)
    # The two printed copies of a sample are compared with a tolerance, for rounding.
    broken[1:] = (np.abs(x[1:, :, :half] - x[:-1, :, half:]) > 1e-5).any(axis=(1, 2))
    return runs(y, user, np.cumsum(broken))


def uci_dataset(d: Arrays) -> Dataset:
    """Windows of 128 steps, half overlapping; a block is a whole chain."""
    y = d["y"].astype(np.int64)
    chain = ids(d["chain"])
    # Times are made up: 64 steps from one window of a chain to the next, and chains so far apart
    # that windows of different chains never overlap.
    start = chain * (128 * (len(y) + 1)) + positions(chain) * 64
    return Dataset(d["x"], y, UCI_LABELS, ids(d["user"]), chain, start, reach=128)


def uci_forecast_dataset(d: Arrays) -> Dataset:
    """The same windows with the samples that follow, which are in the next window of the chain.

    The last window of a chain has none, and is left out.
    """
    windows = uci_dataset(d)
    assert windows.block is not None
    assert windows.start is not None
    assert windows.user is not None
    # Within a chain rows are in order of time, wherever they stand.
    order = np.argsort(windows.block, kind="stable")
    has_next = windows.block[order][:-1] == windows.block[order][1:]
    now = order[:-1][has_next]
    after = order[1:][has_next]
    half = windows.x.shape[2] // 2
    longer = np.concatenate([windows.x[now], windows.x[after][:, :, half : half + AHEAD]], axis=2)
    cut = replace(
        windows,
        x=longer,
        y=windows.y[now],
        user=ids(windows.user[now]),
        block=ids(windows.block[now]),
        start=windows.start[now],
        reach=windows.reach + AHEAD,
    )
    return forecast(cut, AHEAD, SIGNALS)


# ---- WISDM ---------------------------------------------------------------------------------------


def packed_wisdm(paths: Sequence[Path]) -> Arrays:
    """The packed windows, channels first."""
    packed = npz(paths[0])
    need(packed, ("x", "y", "user"), str(paths[0]))
    x = np.ascontiguousarray(np.moveaxis(packed["x"], 2, 1))
    return {"x": x, "y": packed["y"], "user": packed["user"]}


def text_wisdm(paths: Sequence[Path]) -> Arrays:
    """The raw text ``user,activity,time,x,y,z;``, its records wherever they stand in a line.

    The published file has lines with two records, lines without a semicolon, empty lines and
    records that lack a value; whatever is not a whole record is skipped.
    """
    users: list[int] = []
    labels: list[int] = []
    samples: list[tuple[float, float, float]] = []
    label_of = {name: label for label, name in enumerate(WISDM_LABELS)}
    with paths[0].open(encoding="ascii", errors="replace") as file:
        for line in file:
            for user, activity, _, *values in RECORD.findall(line):
                # The pattern admits what is not a number (1.2.3) and unknown activities.
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
            f"'{paths[0]}' holds no record like 33,Jogging,49105962326000,-0.69,12.68,0.50; "
            f"download it again."
        )
    return {
        "xyz": np.array(samples, np.float32),
        "y": np.array(labels, np.uint8),
        "user": np.array(users, np.int64),
    }


def wisdm_dataset(d: Arrays) -> Dataset:
    """Raw text: 200 steps, 50 % overlap. Packed windows: 128 steps, whose order in time is lost."""
    if "xyz" in d:
        return windowed(d["xyz"], d["y"], d["user"], WISDM_LABELS, 200, 100)
    return Dataset(
        d["x"],
        d["y"].astype(np.int64),
        WISDM_LABELS,
        ids(d["user"]),
        notes=("windows are 128 steps, not the raw file",),
        refusal=(
            "the order of its packed windows in time is lost; "
            "with the raw text WISDM_ar_v1.1_raw.txt blocks work"
        ),
    )


def packed_wisdm51(paths: Sequence[Path]) -> Arrays:
    """The packed raw rows."""
    packed = npz(paths[0])
    need(packed, ("xyz_q", "activity", "user"), str(paths[0]))
    return {"xyz": packed["xyz_q"], "y": packed["activity"], "user": packed["user"]}


def wisdm51_dataset(d: Arrays) -> Dataset:
    """Watch accelerometer in m/s²: 200 steps, 50 % overlap."""
    # The packed file holds whole numbers of 1/512 m/s².
    signal = d["xyz"].astype(np.float32) / 512
    notes = (f"{len(np.unique(d['user']))} of 51 subjects, watch accelerometer",)
    return windowed(signal, d["y"], d["user"], WISDM51_LABELS, 200, 100, notes)


# ---- the forms each set is published in, the preferred one first ---------------------------------

UCI = (
    FileFormat(("uci_har.npz",), packed_uci),
    FileFormat(("UCI HAR Dataset",), text_uci),
    FileFormat(("UCI HAR Dataset.zip",), text_uci),
)
# The raw text comes before the packed windows: only it can be split by blocks.
WISDM = (
    FileFormat(("WISDM_ar_v1.1_raw.txt",), text_wisdm),
    FileFormat(("WISDM_ar_v1.1/WISDM_ar_v1.1_raw.txt",), text_wisdm),
    FileFormat(("wisdm_windows128.npz",), packed_wisdm),
)
WISDM51 = (FileFormat(("wisdm51_watch_acc_raw.npz",), packed_wisdm51),)
