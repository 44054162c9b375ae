"""The data sets by name: what each is, its usual partition and training, its source."""

from __future__ import annotations

import string
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..errors import InputError
from . import har, images
from .dataset import Dataset, Pixels
from .federation import Defaults
from .files import Arrays, FileFormat, arrays
from .generated import (
    diabetes_dataset,
    digits_dataset,
    motion_dataset,
    motion_forecast_dataset,
    rooms_dataset,
    tags_dataset,
)

HAR = Defaults("har-cnn", cohort=10, rounds=50, epochs=3, batch=32, optimiser="Adam", lr=1e-3)
GREY = Defaults(
    "mnist-cnn",
    cohort=10,
    rounds=20,
    epochs=3,
    batch=32,
    optimiser="SGD",
    lr=0.01,
    momentum=0.9,
    weight_decay=5e-4,
)
FEATURES = Defaults("mlp", cohort=10, rounds=20, epochs=5, batch=16, optimiser="Adam", lr=3e-3)
COLOUR = Defaults("lenet", cohort=100, rounds=100, epochs=1, batch=64, optimiser="Adam", lr=1e-3)

FASHION_LABELS = "T-shirt trouser pullover dress coat sandal shirt sneaker bag ankle-boot"
CIFAR10_LABELS = "airplane automobile bird cat deer dog frog horse ship truck"
EMNIST_MERGED = string.digits + string.ascii_uppercase + "abdefghnqrt"
"""The classes of the splits that do not tell a small letter from its like capital."""


@dataclass(frozen=True)
class NamedSet:
    """A named set.

    about: one line that describes it.
    defaults: how it is trained unless told otherwise.
    partition, clients: how it is dealt unless told otherwise; ``clients`` None means one per user.
    forms: the files it is read from, in any of these forms; none for a generated set.
    dataset: turns the arrays read from the files into a dataset.
    source: where to get the files.
    """

    about: str
    defaults: Defaults
    partition: str
    clients: int | None = None
    forms: tuple[FileFormat, ...] = ()
    dataset: Callable[[Arrays], Dataset] | None = None
    source: str = ""


def _image_dataset(
    labels: tuple[str, ...], mean: tuple[float, ...], deviation: tuple[float, ...]
) -> Callable[[Arrays], Dataset]:
    """Images with fixed channel means and deviations, those of the official training part."""

    def dataset(d: Arrays) -> Dataset:
        pixels = Pixels(255.0, mean, deviation)
        return Dataset(d["x"], d["y"].astype("int64"), labels, pixels=pixels)

    return dataset


def _emnist(split: str, about: str, labels: str, first_label: int = 0) -> NamedSet:
    """A split of EMNIST; ``first_label`` is the files' number for the first class."""

    def dataset(d: Arrays) -> Dataset:
        # Constants as published for the whole set, taken for every split; not measured here.
        pixels = Pixels(255.0, (0.1736,), (0.3317,))
        return Dataset(d["x"], d["y"].astype("int64") - first_label, tuple(labels), pixels=pixels)

    return NamedSet(
        about=f"{about}, 1x28x28, {len(labels)} classes",
        defaults=GREY,
        partition="dirichlet:0.4",
        clients=100,
        forms=images.emnist_forms(split),
        dataset=dataset,
        source=images.EMNIST_SOURCE,
    )


def _svhn(about: str, *parts: str) -> NamedSet:
    return NamedSet(
        about=about,
        defaults=COLOUR,
        partition="dirichlet:0.4",
        clients=100,
        forms=images.svhn_forms(parts),
        dataset=_image_dataset(
            tuple(string.digits),
            mean=(0.4377, 0.4438, 0.4728),
            deviation=(0.1980, 0.2010, 0.1970),
        ),
        source=images.SVHN_SOURCE,
    )


def _cifar100_dataset(d: Arrays) -> Dataset:
    y = d["y"].astype("int64")
    notes: tuple[str, ...] = ()
    # The packed subset is read in place of the whole set where only that is available.
    if len(y) < 60000:
        notes = (f"{len(y):,} of 60,000 images, a third of the set",)
    labels = tuple(str(label) for label in range(100))
    pixels = Pixels(255.0, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))
    return Dataset(d["x"], y, labels, pixels=pixels, notes=notes)


SETS = {
    "digits": NamedSet(
        about="1,797 handwritten digits, 1x8x8, built in",
        defaults=Defaults(
            "mlp", cohort=10, rounds=20, epochs=5, batch=16, optimiser="Adam", lr=1e-3
        ),
        partition="dirichlet:0.5",
        clients=20,
    ),
    "motion": NamedSet(
        about=(
            "generated motion windows, 3x64, 5 activities, 24 users of three kinds "
            "(or as many as asked), built in"
        ),
        defaults=Defaults(
            "har-cnn", cohort=10, rounds=20, epochs=3, batch=16, optimiser="Adam", lr=1e-3
        ),
        partition="natural",
    ),
    "motion-forecast": NamedSet(
        about=(
            "the same movements, 3x64, of which the next 8 samples are forecast (numbers), "
            "24 users of three kinds (or as many as asked), built in"
        ),
        defaults=Defaults(
            "har-cnn", cohort=10, rounds=20, epochs=3, batch=16, optimiser="Adam", lr=1e-3
        ),
        partition="natural",
    ),
    "rooms": NamedSet(
        about=(
            "generated room temperatures to forecast (numbers), 8 features, 20 users of two kinds "
            "(or as many as asked), built in"
        ),
        defaults=FEATURES,
        partition="natural",
    ),
    "tags": NamedSet(
        about=(
            "generated items with any of 5 tags (several labels), 12 features, 20 users of two "
            "kinds (or as many as asked), built in"
        ),
        defaults=FEATURES,
        partition="natural",
    ),
    "diabetes": NamedSet(
        about="442 patients, 10 features, disease progression after a year (numbers), built in",
        defaults=FEATURES,
        partition="iid",
        clients=8,
    ),
    "crowd": NamedSet(
        about=(
            "generated images, 1x8x8, 10 classes, clients of three kinds, each made when needed: "
            "1,000 or as many as asked, a million too, built in"
        ),
        defaults=Defaults(
            "mlp", cohort=100, rounds=20, epochs=2, batch=16, optimiser="Adam", lr=1e-2
        ),
        partition="natural",
        clients=1000,
    ),
    "uci-har": NamedSet(
        about="smartphone activity, 9x128, 6 activities, 30 users, 10,299 windows",
        defaults=HAR,
        partition="natural",
        forms=har.UCI,
        dataset=har.uci_dataset,
        source="https://archive.ics.uci.edu/dataset/240/human+activity+recognition+using+smartphones",
    ),
    "uci-har-forecast": NamedSet(
        about=(
            "the windows of uci-har, 9x128, of which the next 8 samples are forecast (numbers), "
            "30 users"
        ),
        defaults=HAR,
        partition="natural",
        forms=har.UCI,
        dataset=har.uci_forecast_dataset,
        source="https://archive.ics.uci.edu/dataset/240/human+activity+recognition+using+smartphones",
    ),
    "wisdm": NamedSet(
        about=(
            "phone accelerometer, 3x200 (raw text) or 3x128 (packed windows), 6 activities, "
            "36 users"
        ),
        defaults=HAR,
        partition="natural",
        forms=har.WISDM,
        dataset=har.wisdm_dataset,
        source="https://www.cis.fordham.edu/wisdm/dataset.php",
    ),
    "wisdm51": NamedSet(
        about="watch accelerometer, 3x200, 18 activities, 46 users, 29,349 windows",
        defaults=HAR,
        partition="natural",
        forms=har.WISDM51,
        dataset=har.wisdm51_dataset,
        source=(
            "https://archive.ics.uci.edu/dataset/507/"
            "wisdm+smartphone+and+smartwatch+activity+and+biometrics+dataset"
        ),
    ),
    "mnist": NamedSet(
        about="70,000 handwritten digits, 1x28x28",
        defaults=GREY,
        partition="dirichlet:0.5",
        clients=10,
        forms=images.MNIST,
        dataset=_image_dataset(tuple("0123456789"), mean=(0.1307,), deviation=(0.3081,)),
        source=(
            "https://ossci-datasets.s3.amazonaws.com/mnist/ (four idx files, in a folder mnist)"
        ),
    ),
    "fashion-mnist": NamedSet(
        about="70,000 pictures of clothes, 1x28x28, 10 classes",
        defaults=GREY,
        partition="dirichlet:0.5",
        clients=10,
        forms=images.FASHION,
        dataset=_image_dataset(tuple(FASHION_LABELS.split()), mean=(0.2860,), deviation=(0.3530,)),
        source=(
            "https://github.com/zalandoresearch/fashion-mnist "
            "(four idx files, in a folder fashion-mnist)"
        ),
    ),
    # A word behind a colon is the set's part, as with a method's preset.
    "emnist": _emnist("balanced", "131,600 handwritten characters (split balanced)", EMNIST_MERGED),
    "emnist:byclass": _emnist(
        "byclass",
        "814,255 handwritten characters",
        string.digits + string.ascii_uppercase + string.ascii_lowercase,
    ),
    "emnist:bymerge": _emnist("bymerge", "814,255 handwritten characters", EMNIST_MERGED),
    "emnist:letters": _emnist(
        "letters", "145,600 handwritten letters", string.ascii_uppercase, first_label=1
    ),
    "emnist:digits": _emnist("digits", "280,000 handwritten digits", string.digits),
    "emnist:mnist": _emnist("mnist", "70,000 handwritten digits, made like MNIST", string.digits),
    "svhn": _svhn("99,289 house numbers' digits, 3x32x32", "train", "test"),
    "svhn:extra": _svhn(
        "630,420 house numbers' digits, 3x32x32, the easier extra ones too",
        "train",
        "test",
        "extra",
    ),
    "cifar10": NamedSet(
        about="60,000 photographs, 3x32x32, 10 classes",
        defaults=COLOUR,
        partition="dirichlet:0.4",
        clients=100,
        forms=images.CIFAR10,
        dataset=_image_dataset(
            tuple(CIFAR10_LABELS.split()),
            mean=(0.4914, 0.4822, 0.4465),
            deviation=(0.2470, 0.2435, 0.2616),
        ),
        source="https://www.cs.toronto.edu/~kriz/cifar.html (the binary version)",
    ),
    "cifar100": NamedSet(
        about=(
            "photographs, 3x32x32, 100 classes; 60,000, "
            "or a third of them where only the packed subset is at hand"
        ),
        defaults=COLOUR,
        partition="dirichlet:0.4",
        clients=50,
        forms=images.CIFAR100,
        dataset=_cifar100_dataset,
        source="https://www.cs.toronto.edu/~kriz/cifar.html (the binary version)",
    ),
}


GIVEN: dict[str, Callable[[], Dataset]] = {"digits": digits_dataset, "diabetes": diabetes_dataset}
"""Sets that come with scikit-learn."""
MADE: dict[str, Callable[..., Dataset]] = {
    "motion": motion_dataset,
    "motion-forecast": motion_forecast_dataset,
    "rooms": rooms_dataset,
    "tags": tags_dataset,
}
"""Sets that are generated, for as many users as asked."""


def dataset_of(name: str, clients: int | None, data_dir: str | Path | None) -> Dataset:
    """Read or generate the set called ``name``; ``clients`` is how many users a made one has."""
    if name in GIVEN:
        return GIVEN[name]()
    if name in MADE:
        return MADE[name]() if clients is None else MADE[name](clients)
    known = SETS[name]
    assert known.dataset is not None
    # The activity sets have no checksum to check a download against, so no download.
    downloads = images.DOWNLOADS.get(name, ())
    dataset = known.dataset(arrays(name, known.forms, downloads, known.source, data_dir))

    examples = len(dataset.x)
    labels = len(dataset.y)
    # ``initial`` because an empty array has neither a minimum nor a maximum.
    lowest = dataset.y.min(initial=0)
    highest = dataset.y.max(initial=0)
    labels_are_known = lowest >= 0 and highest < len(dataset.labels)
    if examples != labels or not labels_are_known:
        raise InputError(
            f"the files of {name} do not agree: {examples} examples, {labels} labels up to "
            f"{highest}; download them again."
        )
    return dataset
