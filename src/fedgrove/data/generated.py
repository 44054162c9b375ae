"""Sets that need no files: scikit-learn's digits, and motion, which is generated."""

from __future__ import annotations

import numpy as np

from ..seeds import numpy_rng
from .dataset import Array, Dataset, Pixels
from .windows import windowed

ACTIVITIES = ("resting", "strolling", "walking", "jogging", "running")
KINDS = 3
USERS = 24
RATE, LENGTH, STEP, WINDOWS = 20, 64, 32, 24
"""Samples per second, per window and between windows; windows per user and activity."""


def digits_dataset() -> Dataset:
    """1,797 grey images of 8 x 8 with values 0..16 (scikit-learn's copy of the UCI optical digits)."""
    from sklearn.datasets import load_digits  # takes a second to import, and only this set needs it

    d = load_digits()
    x = d.images.astype(np.float32)[:, None]
    return Dataset(
        x,
        d.target.astype(np.int64),
        tuple("0123456789"),
        pixels=Pixels(16.0, (0.30526,), (0.37603,)),
    )


def motion_dataset(users: int = USERS) -> Dataset:
    """Accelerometer-like windows (3, 64) of users of three kinds; generated, and the same for every seed.

    User u is of kind u mod 3. Activity a (1..4) of kind k swings at f = 0.8 * 1.5^(a - 1) * 1.5^(k - 1) Hz: what is
    walking for one kind is strolling for the next, so one model for all does worse than one per kind. Kinds also wear
    the sensor turned by 15 degrees from each other, users by as much again at random; resting hardly moves at all.
    """
    parts = [
        _recording(user, activity) for user in range(users) for activity in range(len(ACTIVITIES))
    ]
    n = len(parts[0])
    y = np.tile(np.repeat(np.arange(len(ACTIVITIES)), n), users)
    return windowed(
        np.concatenate(parts),
        y,
        np.repeat(np.arange(users), n * len(ACTIVITIES)),
        ACTIVITIES,
        LENGTH,
        STEP,
        notes=("generated, not measured",),
    )


def _recording(user: int, activity: int) -> Array:
    """One user doing one thing: samples (n, 3)."""
    person, moment = numpy_rng(0, "motion", user), numpy_rng(0, "motion", user, activity)
    n, kind = LENGTH + STEP * (WINDOWS - 1), user % KINDS
    frequency = 0.8 * 1.5 ** (activity - 1) * 1.5 ** (kind - 1) * np.exp(person.normal(0, 0.05))
    drift = np.cumsum(moment.normal(0, 0.02, n)) / np.sqrt(np.arange(1, n + 1))
    phase = moment.uniform(0, 2 * np.pi) + 2 * np.pi * np.cumsum(frequency * (1 + drift)) / RATE
    swing = np.stack([np.sin(phase), 0.5 * np.sin(2 * phase + 1), 0.4 * np.cos(phase)], axis=1)
    strength = (0.05 if activity == 0 else 1.0) * np.exp(person.normal(0, 0.2))
    turn = _turn(np.deg2rad(15 * kind + person.normal(0, 15)))
    signal = (strength * swing + [0.0, 0.0, 1.0]) @ turn + moment.normal(0, 0.9, (n, 3))
    return np.asarray(signal, dtype=np.float32)


def _turn(angle: float) -> Array:
    c, s = np.cos(angle), np.sin(angle)
    return np.array([[c, s, 0], [-s, c, 0], [0, 0, 1]])
