"""The data sets by name: what each is, how it is dealt and trained unless told otherwise, where it comes from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..errors import InputError
from . import har, images
from .dataset import Dataset, Pixels
from .federation import Defaults
from .files import Arrays, Form, arrays
from .generated import digits_dataset, motion_dataset

HAR = Defaults("har-cnn", cohort=10, rounds=50, epochs=3, batch=32, optimiser="Adam", lr=1e-3)
GREY = Defaults("mnist-cnn", 10, 20, 3, 32, "SGD", 0.01, momentum=0.9, weight_decay=5e-4)
COLOUR = Defaults("lenet", cohort=100, rounds=100, epochs=1, batch=64, optimiser="Adam", lr=1e-3)


@dataclass(frozen=True)
class NamedSet:
    """A named set; ``clients`` None means as many as there are users, ``dataset`` turns the arrays read into a dataset."""

    about: str
    defaults: Defaults
    partition: str
    clients: int | None = None
    forms: tuple[Form, ...] = ()
    dataset: Callable[[Arrays], Dataset] | None = None
    source: str = ""


FASHION_LABELS = "T-shirt trouser pullover dress coat sandal shirt sneaker bag ankle-boot"
CIFAR10_LABELS = "airplane automobile bird cat deer dog frog horse ship truck"


def _image_dataset(
    labels: tuple[str, ...], *constants: tuple[float, ...]
) -> Callable[[Arrays], Dataset]:
    """Images with fixed channel means and deviations, which are those of the official training part."""
    mean, deviation = constants
    return lambda d: Dataset(
        d["x"], d["y"].astype("int64"), labels, pixels=Pixels(255.0, mean, deviation)
    )


def _cifar100_dataset(d: Arrays) -> Dataset:
    x, y = d["x"], d["y"].astype("int64")
    notes = () if len(y) >= 60000 else (f"{len(y):,} of 60,000 images, a third of the set",)
    pixels = Pixels(255.0, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))
    return Dataset(x, y, tuple(map(str, range(100))), pixels=pixels, notes=notes)


SETS = {
    "digits": NamedSet(
        "1,797 handwritten digits, 1x8x8, built in",
        Defaults("mlp", cohort=10, rounds=20, epochs=5, batch=16, optimiser="Adam", lr=1e-3),
        "dirichlet:0.5",
        20,
    ),
    "motion": NamedSet(
        "generated motion windows, 3x64, 5 activities, 24 users of three kinds (or as many as asked), built in",
        Defaults("har-cnn", cohort=10, rounds=20, epochs=3, batch=16, optimiser="Adam", lr=1e-3),
        "natural",
    ),
    "uci-har": NamedSet(
        "smartphone activity, 9x128, 6 activities, 30 users, 10,299 windows",
        HAR,
        "natural",
        None,
        har.UCI,
        har.uci_dataset,
        "https://archive.ics.uci.edu/dataset/240/human+activity+recognition+using+smartphones",
    ),
    "wisdm": NamedSet(
        "phone accelerometer, 3x200 (raw text) or 3x128 (packed windows), 6 activities, 36 users",
        HAR,
        "natural",
        None,
        har.WISDM,
        har.wisdm_dataset,
        "https://www.cis.fordham.edu/wisdm/dataset.php",
    ),
    "wisdm51": NamedSet(
        "watch accelerometer, 3x200, 18 activities, 46 users, 29,349 windows",
        HAR,
        "natural",
        None,
        har.WISDM51,
        har.wisdm51_dataset,
        "https://archive.ics.uci.edu/dataset/507/wisdm+smartphone+and+smartwatch+activity+and+biometrics+dataset",
    ),
    "mnist": NamedSet(
        "70,000 handwritten digits, 1x28x28",
        GREY,
        "dirichlet:0.5",
        10,
        images.MNIST,
        _image_dataset(tuple("0123456789"), (0.1307,), (0.3081,)),
        "https://ossci-datasets.s3.amazonaws.com/mnist/ (four idx files, in a folder mnist)",
    ),
    "fashion-mnist": NamedSet(
        "70,000 pictures of clothes, 1x28x28, 10 classes",
        GREY,
        "dirichlet:0.5",
        10,
        images.FASHION,
        _image_dataset(tuple(FASHION_LABELS.split()), (0.2860,), (0.3530,)),
        "https://github.com/zalandoresearch/fashion-mnist (four idx files, in a folder fashion-mnist)",
    ),
    "cifar10": NamedSet(
        "60,000 photographs, 3x32x32, 10 classes",
        COLOUR,
        "dirichlet:0.4",
        100,
        images.CIFAR10,
        _image_dataset(
            tuple(CIFAR10_LABELS.split()), (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
        ),
        "https://www.cs.toronto.edu/~kriz/cifar.html (the binary version)",
    ),
    "cifar100": NamedSet(
        "photographs, 3x32x32, 100 classes; 60,000, or a third of them where only the packed subset is at hand",
        COLOUR,
        "dirichlet:0.4",
        50,
        images.CIFAR100,
        _cifar100_dataset,
        "https://www.cs.toronto.edu/~kriz/cifar.html (the binary version)",
    ),
}


def dataset_of(name: str, clients: int | None, data_dir: str | Path | None) -> Dataset:
    """Read or generate the set called ``name``; motion has as many users as are asked for."""
    if name == "digits":
        return digits_dataset()
    if name == "motion":
        return motion_dataset() if clients is None else motion_dataset(clients)
    s = SETS[name]
    assert s.dataset is not None
    found = arrays(name, s.forms, images.DOWNLOADS.get(name, ()), s.source, data_dir)
    dataset = s.dataset(found)
    if len(dataset.x) != len(dataset.y) or not (
        0 <= dataset.y.min(initial=0) <= dataset.y.max(initial=0) < len(dataset.labels)
    ):
        what = (
            f"{len(dataset.x)} examples, {len(dataset.y)} labels up to {dataset.y.max(initial=0)}"
        )
        raise InputError(f"the files of {name} do not agree: {what}; get them anew.")
    return dataset
