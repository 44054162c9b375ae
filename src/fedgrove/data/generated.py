"""Sets that need no files: scikit-learn's digits, and motion, which is generated."""

from __future__ import annotations

import numpy as np

from ..seeds import numpy_rng
from .dataset import Array, Dataset, Pixels
from .windows import windowed

ACTIVITIES = ("resting", "strolling", "walking", "jogging", "running")
KINDS = 3
"""Kinds of users, who do the same activities at different tempos."""
USERS = 24
RATE = 20
"""Samples per second."""
LENGTH = 64
"""Samples per window."""
STEP = 32
"""Samples between the starts of two windows."""
WINDOWS = 24
"""Windows per user and activity."""


def digits_dataset() -> Dataset:
    """1,797 grey images, 8 x 8, values 0..16 (scikit-learn's copy of the UCI optical digits)."""
    # Imported here because scikit-learn takes a second to import and only this set needs it.
    from sklearn.datasets import load_digits

    digits = load_digits()
    return Dataset(
        digits.images.astype(np.float32)[:, None],
        digits.target.astype(np.int64),
        tuple("0123456789"),
        # Mean and deviation over all images after division by 16, to four digits.
        pixels=Pixels(16.0, (0.30526,), (0.37603,)),
    )


def motion_dataset(users: int = USERS) -> Dataset:
    """Accelerometer-like windows (3, 64) of users of three kinds; generated, not from the seed.

    User u is of kind u mod 3. Activity a (1..4) of kind k swings at
    f = 0.8 * 1.5^(a - 1) * 1.5^(k - 1) Hz: what is walking for one kind is strolling for the next,
    so one model for all does worse than one per kind. Kinds also wear the sensor turned by 15
    degrees from each other, users by as much again at random; resting hardly moves at all.
    """
    recordings = []
    labels = []
    owners = []
    for user in range(users):
        for activity in range(len(ACTIVITIES)):
            recording = _recording(user, activity)
            recordings.append(recording)
            labels.append(np.full(len(recording), activity))
            owners.append(np.full(len(recording), user))
    return windowed(
        np.concatenate(recordings),
        np.concatenate(labels),
        np.concatenate(owners),
        ACTIVITIES,
        LENGTH,
        STEP,
        notes=("generated, not measured",),
    )


def _recording(user: int, activity: int) -> Array:
    """One user doing one activity: samples (n, 3)."""
    # Seed 0 whatever the run's seed, as a measured set would be the same for every run. Both
    # generators are consumed in the order below: moving a draw changes the set.
    person = numpy_rng(0, "motion", user)
    moment = numpy_rng(0, "motion", user, activity)
    kind = user % KINDS
    n = LENGTH + STEP * (WINDOWS - 1)

    tempo = np.exp(person.normal(0, 0.05))
    frequency = 0.8 * 1.5 ** (activity - 1) * 1.5 ** (kind - 1) * tempo
    # A random walk divided by the square root of time: its spread stays the same all along.
    drift = np.cumsum(moment.normal(0, 0.02, n)) / np.sqrt(np.arange(1, n + 1))
    phase = moment.uniform(0, 2 * np.pi) + 2 * np.pi * np.cumsum(frequency * (1 + drift)) / RATE
    swing = np.stack([np.sin(phase), 0.5 * np.sin(2 * phase + 1), 0.4 * np.cos(phase)], axis=1)

    amplitude = 0.05 if activity == 0 else 1.0
    strength = amplitude * np.exp(person.normal(0, 0.2))
    gravity = [0.0, 0.0, 1.0]
    turn = _rotation(np.deg2rad(15 * kind + person.normal(0, 15)))
    signal = (strength * swing + gravity) @ turn + moment.normal(0, 0.9, (n, 3))
    return np.asarray(signal, dtype=np.float32)


def _rotation(angle: float) -> Array:
    """A rotation about the third axis, for row vectors multiplied from the left."""
    c = np.cos(angle)
    s = np.sin(angle)
    return np.array([[c, s, 0], [-s, c, 0], [0, 0, 1]])
