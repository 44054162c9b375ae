"""Sets that need no files: scikit-learn's digits and diabetes; the others are made."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..seeds import numpy_rng
from .dataset import Array, Dataset, Pixels
from .forecast import AHEAD, forecast
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
NOISE = 0.9
"""The deviation of the sensor's noise; a movement swings by about 1."""
QUIET = 0.3
"""The same where samples are forecast."""


ROOM_USERS = 20
"""Users of the sets of single rows, rooms and tags."""
ROWS = 80
"""Rows per user of these."""
TAGS = ("red", "round", "soft", "sweet", "fresh")


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


def diabetes_dataset() -> Dataset:
    """442 patients, 10 features, and how far the disease went in a year, 25 to 346 (scikit-learn).

    (Efron et al., "Least angle regression", 2004.)
    """
    from sklearn.datasets import load_diabetes

    diabetes = load_diabetes()
    return Dataset(
        diabetes.data.astype(np.float32),
        np.zeros(len(diabetes.target), dtype=np.int64),
        ("progression",),
        kind="numbers",
        targets=diabetes.target.astype(np.float32)[:, None],
    )


def rooms_dataset(users: int = ROOM_USERS) -> Dataset:
    """Room temperatures an hour from now, in degrees; generated, not from the seed.

    User u is of kind u mod 2: light houses follow the sun and the air outside, heavy ones hardly.
    Features: indoors now, outdoors, sun, heating, wind, people, the hour as sine and cosine.
    """
    inputs = []
    targets = []
    for user in range(users):
        rng = numpy_rng(0, "rooms", user)
        n = ROWS
        hour = rng.uniform(0, 2 * np.pi, n)
        inside = rng.normal(20, 2, n)
        outside = rng.normal(8, 6, n) + 4 * np.cos(hour)
        sun = np.maximum(0, np.cos(hour) + rng.normal(0, 0.3, n))
        heating = rng.uniform(0, 1, n)
        wind = rng.exponential(1.0, n)
        people = rng.poisson(1.5, n)
        is_heavy = user % 2 == 1
        leak = (0.03 if is_heavy else 0.15) * np.exp(rng.normal(0, 0.1))
        warms = (0.5 if is_heavy else 3.0) * sun
        after = inside + leak * (1 + 0.3 * wind) * (outside - inside) + warms
        after += 1.5 * heating + 0.2 * people + rng.normal(0, 0.4, n)
        columns = (inside, outside, sun, heating, wind, people, np.sin(hour), np.cos(hour))
        inputs.append(np.stack(columns, axis=1))
        targets.append(after)
    owners = np.repeat(np.arange(users), ROWS)
    return Dataset(
        np.concatenate(inputs).astype(np.float32),
        np.zeros(len(owners), dtype=np.int64),
        ("temperature",),
        owners,
        notes=("generated, not measured",),
        kind="numbers",
        targets=np.concatenate(targets).astype(np.float32)[:, None],
        kinds=owners % 2,
    )


def tags_dataset(users: int = ROOM_USERS) -> Dataset:
    """Items of 12 features that have any of 5 tags; generated, not from the seed.

    A tag is there where the item's features lie on one side of a plane, with some noise. User u is
    of kind u mod 2; kinds draw the planes of the last two tags the other way round.
    """
    planes = numpy_rng(0, "tags").normal(size=(12, len(TAGS)))
    inputs = []
    targets = []
    for user in range(users):
        rng = numpy_rng(0, "tags", user)
        x = rng.normal(size=(ROWS, 12))
        turned = planes.copy()
        if user % 2 == 1:
            turned[:, 3:] *= -1
        # A shift to the left: a tag is the exception, not the rule.
        height = x @ turned - 2.0 + rng.normal(0, 0.5, (ROWS, len(TAGS)))
        inputs.append(x)
        targets.append(height > 0)
    owners = np.repeat(np.arange(users), ROWS)
    return Dataset(
        np.concatenate(inputs).astype(np.float32),
        np.zeros(len(owners), dtype=np.int64),
        TAGS,
        owners,
        notes=("generated, not measured",),
        kind="labels",
        targets=np.concatenate(targets).astype(np.float32),
        kinds=owners % 2,
    )


def motion_dataset(users: int = USERS) -> Dataset:
    """Accelerometer-like windows (3, 64) of users of three kinds; generated, not from the seed.

    User u is of kind u mod 3. Activity a (1..4) of kind k swings at
    f = 0.8 * 1.5^(a - 1) * 1.5^(k - 1) Hz: what is walking for one kind is strolling for the next,
    so one model for all does worse than one per kind. Kinds also wear the sensor turned by 15
    degrees from each other, users by as much again at random; resting hardly moves at all.
    """
    return _motion_windows(users, LENGTH, NOISE)


def motion_forecast_dataset(users: int = USERS) -> Dataset:
    """The same movements, of which the next :data:`AHEAD` samples after a window are forecast.

    The sensor is quieter: under motion's own noise hardly anything can be foreseen. With what is
    left of it, one who knew each movement would have an error of about .6 deviations, one who
    forecasts the mean an error of 1.
    """
    windows = _motion_windows(users, LENGTH + AHEAD, QUIET)
    return forecast(windows, AHEAD, ("x", "y", "z"))


def _motion_windows(users: int, length: int, noise: float) -> Dataset:
    recordings = []
    labels = []
    owners = []
    for user in range(users):
        for activity in range(len(ACTIVITIES)):
            recording = _recording(user, activity, noise)
            recordings.append(recording)
            labels.append(np.full(len(recording), activity))
            owners.append(np.full(len(recording), user))
    windows = windowed(
        np.concatenate(recordings),
        np.concatenate(labels),
        np.concatenate(owners),
        ACTIVITIES,
        length,
        STEP,
        notes=("generated, not measured",),
    )
    assert windows.user is not None
    return replace(windows, kinds=windows.user % KINDS)


def _recording(user: int, activity: int, noise: float) -> Array:
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
    signal = (strength * swing + gravity) @ turn + moment.normal(0, noise, (n, 3))
    return np.asarray(signal, dtype=np.float32)


def _rotation(angle: float) -> Array:
    """A rotation about the third axis, for row vectors multiplied from the left."""
    c = np.cos(angle)
    s = np.sin(angle)
    return np.array([[c, s, 0], [-s, c, 0], [0, 0, 1]])
