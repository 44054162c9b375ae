"""Activity sets: UCI-HAR and WISDM, from packed npz or in the form their authors publish."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..errors import InputError
from .dataset import Array, Dataset, Ints, ids, positions, runs
from .files import Arrays, Form, need, npz
from .windows import windowed

UCI_LABELS = ("walking", "walking upstairs", "walking downstairs", "sitting", "standing", "laying")
WISDM_LABELS = ("downstairs", "jogging", "sitting", "standing", "upstairs", "walking")
WISDM51_LABELS = (
    "walking", "jogging", "stairs", "sitting", "standing", "typing", "brushing teeth", "eating soup", "eating chips",
    "eating pasta", "drinking", "eating a sandwich", "kicking", "catching", "dribbling", "writing", "clapping",
    "folding clothes",
)  # fmt: skip
SIGNALS = tuple(
    f"{sensor}_{axis}" for sensor in ("body_acc", "body_gyro", "total_acc") for axis in "xyz"
)
VALUE = r",(-?[\d.]+(?:[eE]-?\d+)?)"
RECORD = re.compile(r"(\d+),([A-Za-z]+),(\d+)" + 3 * VALUE)


def packed_uci(paths: Sequence[Path]) -> Arrays:
    """The packed file, channels first."""
    d = npz(paths[0])
    need(d, ("x", "y", "subject", "chain"), str(paths[0]))
    x = np.ascontiguousarray(np.moveaxis(d["x"], 2, 1))
    return {"x": x, "y": d["y"], "user": d["subject"], "chain": d["chain"]}


def text_uci(paths: Sequence[Path]) -> Arrays:
    """The folder "UCI HAR Dataset" (or a zip that holds it): nine signals of 128 columns, labels 1..6, subjects."""
    parts = [_uci_part(paths[0], part) for part in ("train", "test")]
    x, y, user = (np.concatenate(column) for column in zip(*parts, strict=True))
    return {"x": x, "y": y, "user": user, "chain": chains(x, y, user)}


def _uci_part(path: Path, part: str) -> tuple[Array, Array, Array]:
    root: Path | zipfile.Path = path if path.is_dir() else zipfile.Path(path) / "UCI HAR Dataset"
    folder = root / part
    signals = [_table(folder / "Inertial Signals" / f"{signal}_{part}.txt") for signal in SIGNALS]
    y, user = (
        _table(folder / f"{column}_{part}.txt").ravel().astype(np.int64)
        for column in ("y", "subject")
    )
    shapes = {s.shape for s in signals}
    if shapes != {(len(y), 128)} or len(user) != len(y) or not ((y >= 1) & (y <= 6)).all():
        raise InputError(
            f"the {part} files under '{path}' do not agree in length or labels; unpack them anew."
        )
    return np.stack(signals, axis=1).astype(np.float32), y - 1, user


def _table(path: Path | zipfile.Path) -> Array:
    try:
        with path.open("r") as file:
            return np.loadtxt(file, dtype=np.float64, ndmin=2)
    except (OSError, KeyError, ValueError) as error:
        raise InputError(
            f"'{path}' cannot be read ({error}); unpack the UCI HAR archive whole."
        ) from error


def chains(x: Array, y: Array, user: Array) -> Ints:
    """Number the runs of consecutive windows in which each begins with the second half of the one before."""
    half = x.shape[2] // 2
    broken = np.zeros(len(x), dtype=np.int64)
    broken[1:] = (np.abs(x[1:, :, :half] - x[:-1, :, half:]) > 1e-5).any(axis=(1, 2))
    return runs(y, user, np.cumsum(broken))


def uci_dataset(d: Arrays) -> Dataset:
    """Windows of 128 steps, half overlapping; a block is a whole chain."""
    y, chain = d["y"].astype(np.int64), ids(d["chain"])
    start = (
        chain * (128 * (len(y) + 1)) + positions(chain) * 64
    )  # chains far apart: only neighbours in one overlap
    return Dataset(d["x"], y, UCI_LABELS, ids(d["user"]), chain, start, reach=128)


def packed_wisdm(paths: Sequence[Path]) -> Arrays:
    """The packed windows, channels first."""
    d = npz(paths[0])
    need(d, ("x", "y", "user"), str(paths[0]))
    return {"x": np.ascontiguousarray(np.moveaxis(d["x"], 2, 1)), "y": d["y"], "user": d["user"]}


def text_wisdm(paths: Sequence[Path]) -> Arrays:
    """The raw text: ``user,activity,time,x,y,z;``; records are found wherever they stand in a line.

    The published file has lines with two records, lines without a semicolon, empty lines and records that lack a
    value; whatever is no whole record is passed over.
    """
    user: list[int] = []
    y: list[int] = []
    xyz: list[tuple[float, float, float]] = []
    number = {label: i for i, label in enumerate(WISDM_LABELS)}
    with paths[0].open(encoding="ascii", errors="replace") as file:
        for line in file:
            for u, label, _, *values in RECORD.findall(line):
                try:
                    a, b, c = map(float, values)
                    y.append(number[label.lower()])
                except (ValueError, KeyError):
                    continue
                user.append(int(u))
                xyz.append((a, b, c))
    if not y:
        raise InputError(
            f"'{paths[0]}' holds no record like 33,Jogging,49105962326000,-0.69,12.68,0.50; get it anew."
        )
    return {
        "xyz": np.array(xyz, np.float32),
        "y": np.array(y, np.uint8),
        "user": np.array(user, np.int64),
    }


def wisdm_dataset(d: Arrays) -> Dataset:
    """Raw text: 200 steps, 50 % overlap. Packed windows: 128 steps as they are, whose order in time is lost."""
    if "xyz" in d:
        return windowed(d["xyz"], d["y"], d["user"], WISDM_LABELS, 200, 100)
    return Dataset(
        d["x"],
        d["y"].astype(np.int64),
        WISDM_LABELS,
        ids(d["user"]),
        notes=("windows are 128 steps, not the raw file",),
        refusal="the order of its packed windows in time is lost; with the raw text WISDM_ar_v1.1_raw.txt blocks work",
    )


def packed_wisdm51(paths: Sequence[Path]) -> Arrays:
    """The packed raw rows."""
    d = npz(paths[0])
    need(d, ("xyz_q", "activity", "user"), str(paths[0]))
    return {"xyz": d["xyz_q"], "y": d["activity"], "user": d["user"]}


def wisdm51_dataset(d: Arrays) -> Dataset:
    """Watch accelerometer in m/s²: 200 steps, 50 % overlap."""
    signal = d["xyz"].astype(np.float32) / 512
    notes = (f"{len(np.unique(d['user']))} of 51 subjects, watch accelerometer",)
    return windowed(signal, d["y"], d["user"], WISDM51_LABELS, 200, 100, notes)


UCI = (
    Form(("uci_har.npz",), packed_uci),
    Form(("UCI HAR Dataset",), text_uci),
    Form(("UCI HAR Dataset.zip",), text_uci),
)
WISDM = (
    Form(("WISDM_ar_v1.1_raw.txt",), text_wisdm),
    Form(("WISDM_ar_v1.1/WISDM_ar_v1.1_raw.txt",), text_wisdm),
    Form(("wisdm_windows128.npz",), packed_wisdm),
)
WISDM51 = (Form(("wisdm51_watch_acc_raw.npz",), packed_wisdm51),)
