"""Data sets that need no files: two come with scikit-learn, the others are generated."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch

from ...core import ClientInfo
from ...errors import check
from ...seeds import derive, numpy_rng
from ..build import Choices
from ..dataset import FORECAST_SAMPLES, Array, Dataset, Pixels, cut_windows, make_forecast
from ..devices import Devices
from ..federation import ClientData, Defaults, Examples, Federation, LazyClients
from ..named_set import NamedSet

GENERATED = ("generated, not measured",)
"""The note on generated data."""

# ---- motion: windows of movements ----------------------------------------------------------------

ACTIVITIES = ("resting", "strolling", "walking", "jogging", "running")
USER_KINDS = 3
"""Kinds of users, who do the same activities at different tempos."""
MOTION_USERS = 24
RATE = 20
"""Samples per second."""
LENGTH = 64
"""Samples per window."""
STEP = 32
"""Samples between the starts of two windows."""
WINDOWS = 24
"""Windows per user and activity."""
SENSOR_NOISE = 0.9
"""The deviation of the sensor's noise; a movement swings by about 1."""
FORECAST_NOISE = 0.3
"""The deviation of the noise if samples are forecast."""


def make_motion(users: int | None = None) -> Dataset:
    """Make accelerometer-like windows (3, 64) of users of three kinds; the run's seed is not used.

    User u is of kind u mod 3. Activity a (1..4) of kind k swings at
    f = 0.8 * 1.5^(a - 1) * 1.5^(k - 1) Hz: what is walking for one kind is strolling for the next,
    so one model for all does worse than one per kind. Kinds also wear the sensor turned by 15
    degrees from each other, users by as much again at random; resting hardly moves at all.
    """
    return _motion_windows(users or MOTION_USERS, LENGTH, SENSOR_NOISE)


def make_motion_forecast(users: int | None = None) -> Dataset:
    """Make the windows of motion, with the :data:`FORECAST_SAMPLES` samples after each as targets.

    The sensor is quieter: under motion's own noise hardly anything can be predicted. With the
    remaining noise, knowing each movement would give an error of about .6 deviations, forecasting
    the mean an error of 1.
    """
    length = LENGTH + FORECAST_SAMPLES
    windows = _motion_windows(users or MOTION_USERS, length, FORECAST_NOISE)
    return make_forecast(windows, FORECAST_SAMPLES, ("x", "y", "z"))


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
    rows = Dataset(
        np.concatenate(recordings),
        np.concatenate(labels),
        ACTIVITIES,
        np.concatenate(owners),
        notes=GENERATED,
    )
    windows = cut_windows(rows, length, STEP)
    assert windows.user is not None
    return replace(windows, kinds=windows.user % USER_KINDS)


def _recording(user: int, activity: int, noise: float) -> Array:
    """Make the recording of one user doing one activity: samples (n, 3)."""
    # Seed 0 whatever the run's seed, as a measured set would be the same for every run. Both
    # generators are consumed in the order below: moving a draw changes the set.
    person = numpy_rng(0, "motion", user)
    moment = numpy_rng(0, "motion", user, activity)
    kind = user % USER_KINDS
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
    """Return a rotation about the third axis, for row vectors multiplied from the left."""
    c = np.cos(angle)
    s = np.sin(angle)
    return np.array([[c, s, 0], [-s, c, 0], [0, 0, 1]])


# ---- rooms and tags: rows of features ------------------------------------------------------------

ROW_USERS = 20
"""Users of the sets of single rows, rooms and tags."""
ROWS_PER_USER = 80
"""Rows per user of these sets."""
TAGS = ("red", "round", "soft", "sweet", "fresh")


def make_rooms(users: int | None = None) -> Dataset:
    """Make room temperatures an hour from now, in degrees; the run's seed is not used.

    User u is of kind u mod 2: light houses follow the sun and the air outside, heavy ones hardly.
    Features: indoors now, outdoors, sun, heating, wind, people, the hour as sine and cosine.
    """
    users = users or ROW_USERS
    inputs = []
    targets = []
    for user in range(users):
        rng = numpy_rng(0, "rooms", user)
        n = ROWS_PER_USER
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
        targets.append(after[:, None])
    return _join_users(inputs, targets, ("temperature",), "numbers")


def make_tags(users: int | None = None) -> Dataset:
    """Make items of 12 features with any of 5 tags; the run's seed is not used.

    An item has a tag if its features lie on one side of a plane, with some noise. User u is of kind
    u mod 2; for one kind the planes of the last two tags are the other way round.
    """
    users = users or ROW_USERS
    planes = numpy_rng(0, "tags").normal(size=(12, len(TAGS)))
    inputs = []
    targets = []
    for user in range(users):
        rng = numpy_rng(0, "tags", user)
        x = rng.normal(size=(ROWS_PER_USER, 12))
        turned = planes.copy()
        if user % 2 == 1:
            turned[:, 3:] *= -1
        # A shift to the left: a tag is the exception, not the rule.
        height = x @ turned - 2.0 + rng.normal(0, 0.5, (ROWS_PER_USER, len(TAGS)))
        inputs.append(x)
        targets.append(height > 0)
    return _join_users(inputs, targets, TAGS, "labels")


def _join_users(
    inputs: list[Array], targets: list[Array], labels: tuple[str, ...], kind: str
) -> Dataset:
    """Make a data set of users of two kinds, from the rows of each user."""
    users = np.repeat(np.arange(len(inputs)), ROWS_PER_USER)
    return Dataset(
        np.concatenate(inputs).astype(np.float32),
        np.zeros(len(users), dtype=np.int64),
        labels,
        users,
        notes=GENERATED,
        kind=kind,
        targets=np.concatenate(targets).astype(np.float32),
        kinds=users % 2,
    )


# ---- digits and diabetes: with scikit-learn ------------------------------------------------------


def make_digits(users: int | None = None) -> Dataset:
    """Load 1,797 grey images, 8 x 8, values 0..16 (scikit-learn's copy of the UCI optical digits).

    It has no users, so ``users`` is ignored.
    """
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


def make_diabetes(users: int | None = None) -> Dataset:
    """Load 442 patients with 10 features; the target is the disease's progression in a year.

    (scikit-learn; Efron et al., "Least angle regression", 2004.) It has no users, so ``users`` is
    ignored.
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


# ---- crowd: any number of clients, each created when needed --------------------------------------

CROWD_CLASSES = 10
CROWD_SHAPE = (1, 8, 8)
CROWD_KINDS = 3
"""Kinds of clients, who give the same patterns different labels."""
CROWD_FEWEST = 30
CROWD_MOST = 70
"""The number of examples of a client, in all three parts."""
CROWD_NOISE = 2.0
"""The deviation of an example from its pattern, whose own values have deviation 1."""
CROWD_TEST = 0.2


def crowd_federation(choices: Choices, defaults: Defaults) -> Federation:
    """Make the federation crowd; a client is created when it is needed."""
    check(choices.partition in (None, "natural"), "partition", choices.partition, "natural")
    check(choices.scenario in (None, "none"), "scenario", choices.scenario, "none")
    check(choices.split in (None, "random"), "split", choices.split, "random")
    assert choices.clients is not None
    devices = choices.devices.number_clients({})
    devices.check_clients(choices.clients)
    make = CrowdClient(choices.seed, choices.validation, devices, choices.train_examples)
    return Federation(
        "crowd",
        LazyClients(make, choices.clients, make.info),
        classes=CROWD_CLASSES,
        labels=tuple(map(str, range(CROWD_CLASSES))),
        shape=CROWD_SHAPE,
        defaults=defaults,
        notes=GENERATED,
        validation=choices.validation,
        train_examples=choices.train_examples,
        trace=devices.numbered_trace,
        files=devices.files,
    )


@dataclass(frozen=True)
class CrowdClient:
    """Creates client k from the seed and k alone.

    There are ten patterns of 8 x 8. Client k is of kind k mod 3: what is class c for kind 0 is
    class c + 1 for kind 1, so one model for all does worse than one per kind. Classes are not
    equally frequent: each client draws their shares.
    """

    seed: int
    validation: float
    devices: Devices
    train_examples: int | None = None

    def __call__(self, k: int) -> ClientData:
        """Return the client's examples."""
        rng = numpy_rng(self.seed, "crowd", k)
        examples, test, validation = self._sizes(k)
        shares = rng.dirichlet(np.ones(CROWD_CLASSES))
        pattern = rng.choice(CROWD_CLASSES, examples, p=shares)
        noise = CROWD_NOISE * rng.standard_normal((examples, *CROWD_SHAPE), dtype=np.float32)
        x = torch.from_numpy(_crowd_patterns()[pattern] + noise)
        y = torch.from_numpy((pattern + k % CROWD_KINDS) % CROWD_CLASSES)
        # The examples are in random order, so that the first rows are as good a test part as any.
        held_out = test + validation
        end = held_out + self.info(k).examples
        return ClientData(
            train=Examples(x[held_out:end], y[held_out:end]),
            validation=Examples(x[test:held_out], y[test:held_out]),
            test=Examples(x[:test], y[:test]),
            info=self.info(k),
        )

    def info(self, k: int) -> ClientInfo:
        """Return what the server knows about a client of the set crowd, without its examples."""
        examples, test, validation = self._sizes(k)
        train = examples - test - validation
        if self.train_examples is not None:
            train = min(train, self.train_examples)
        return self.devices.info(train, k, self.seed)

    def _sizes(self, k: int) -> tuple[int, int, int]:
        """Return the number of examples in all, in the test part and in the validation part."""
        sizes = CROWD_MOST - CROWD_FEWEST + 1
        examples = CROWD_FEWEST + derive(self.seed, "crowd", "size", k) % sizes
        test = round(CROWD_TEST * examples)
        validation = round(self.validation * (examples - test))
        return examples, test, validation


@cache
def _crowd_patterns() -> Array:
    """Return the patterns; they do not depend on the run's seed, as measured data would not."""
    rng = numpy_rng(0, "crowd", "patterns")
    return rng.standard_normal((CROWD_CLASSES, *CROWD_SHAPE), dtype=np.float32)


# ---- the sets ------------------------------------------------------------------------------------

FEATURES = Defaults("mlp", cohort=10, rounds=20, epochs=5, batch=16, optimiser="Adam", lr=3e-3)
MOTION = Defaults("har-cnn", cohort=10, rounds=20, epochs=3, batch=16, optimiser="Adam", lr=1e-3)

SETS = {
    "digits": NamedSet(
        about="1,797 handwritten digits, 1x8x8, built in",
        defaults=Defaults(
            "mlp", cohort=10, rounds=20, epochs=5, batch=16, optimiser="Adam", lr=1e-3
        ),
        partition="dirichlet:0.5",
        clients=20,
        make=make_digits,
    ),
    "motion": NamedSet(
        about=(
            "generated motion windows, 3x64, 5 activities, 24 users of three kinds "
            "(or any number), built in"
        ),
        defaults=MOTION,
        partition="natural",
        make=make_motion,
    ),
    "motion-forecast": NamedSet(
        about=(
            "the movements of motion, 3x64; targets are the next 8 samples (numbers), 24 users of "
            "three kinds (or any number), built in"
        ),
        defaults=MOTION,
        partition="natural",
        make=make_motion_forecast,
    ),
    "rooms": NamedSet(
        about=(
            "generated room temperatures to forecast (numbers), 8 features, 20 users of two kinds "
            "(or any number), built in"
        ),
        defaults=FEATURES,
        partition="natural",
        make=make_rooms,
    ),
    "tags": NamedSet(
        about=(
            "generated items with any of 5 tags (several labels), 12 features, 20 users of two "
            "kinds (or any number), built in"
        ),
        defaults=FEATURES,
        partition="natural",
        make=make_tags,
    ),
    "diabetes": NamedSet(
        about="442 patients, 10 features, disease progression after a year (numbers), built in",
        defaults=FEATURES,
        partition="iid",
        clients=8,
        make=make_diabetes,
    ),
    "crowd": NamedSet(
        about=(
            "generated images, 1x8x8, 10 classes, clients of three kinds, created when needed: "
            "1,000 or any number up to millions, built in"
        ),
        defaults=Defaults(
            "mlp", cohort=100, rounds=20, epochs=2, batch=16, optimiser="Adam", lr=1e-2
        ),
        partition="natural",
        clients=1000,
        federation=crowd_federation,
    ),
}
