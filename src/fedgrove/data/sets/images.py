"""Image sets: MNIST and similar sets from idx files, CIFAR from binary files, SVHN from MATLAB.

MNIST and CIFAR are read from packed npz files as well.
"""

from __future__ import annotations

import gzip
import math
import string
import tarfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ...errors import InputError
from ..dataset import Array, Dataset, Pixels
from ..federation import Defaults
from ..named_set import Arrays, Download, FileFormat, NamedSet, read_npz

IDX_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
"""The files of MNIST and Fashion-MNIST, in the order that readers and downloads expect."""
EMNIST_SOURCE = (
    "https://www.nist.gov/itl/products-and-services/emnist-dataset "
    "(the binary format, gzip.zip; its idx files in a folder emnist)"
)
SVHN_SOURCE = (
    "http://ufldl.stanford.edu/housenumbers/ (format 2, cropped digits; the .mat files in a "
    "folder svhn)"
)
CIFAR_SOURCE = "https://www.cs.toronto.edu/~kriz/cifar.html (the binary version)"
LUMA = (0.299, 0.587, 0.114)
"""How bright red, green and blue are (ITU-R BT.601)."""
IMAGE_DIMENSIONS = 4
"""Dimensions of an array of images: (n, channels, height, width)."""
GREY_BATCH = 10_000
"""The number of images that :func:`make_grey` converts at a time."""


# ---- options of image sets: SET:grey, SET:turned -------------------------------------------------


def make_grey(name: str, dataset: Dataset) -> Dataset:
    """Remove the colours of images; brightness is rounded to whole numbers.

    The images are standardised by the mean and deviation of all of them.
    """
    pixels = dataset.pixels
    if pixels is None or dataset.x.shape[1] != len(LUMA):
        raise InputError(f"{name} has no colours to leave out; use the set without :grey.")
    bright = np.empty((len(dataset.x), 1, *dataset.x.shape[2:]), dtype=np.uint8)
    # In batches: as floats all images together would take eight times their memory.
    for begin in range(0, len(bright), GREY_BATCH):
        batch = dataset.x[begin : begin + GREY_BATCH]
        bright[begin : begin + GREY_BATCH, 0] = np.rint(np.einsum("c,nchw->nhw", LUMA, batch))
    counts = np.bincount(bright.reshape(-1), minlength=256)
    steps = np.arange(256) / pixels.top
    mean = float(np.average(steps, weights=counts))
    deviation = float(np.sqrt(np.average((steps - mean) ** 2, weights=counts)))
    return replace(dataset, x=bright, pixels=Pixels(pixels.top, (mean,), (deviation,)))


def turn_left(name: str, dataset: Dataset) -> Dataset:
    """Turn images left by a quarter: another task that is as hard, as in IFCA's experiments."""
    if dataset.x.ndim != IMAGE_DIMENSIONS:
        raise InputError(f"{name} has no images to turn; use the set without :turned.")
    return replace(dataset, x=np.ascontiguousarray(np.rot90(dataset.x, axes=(2, 3))))


OPTIONS = {"grey": make_grey, "turned": turn_left}
"""What may follow the name of an image set, after a colon."""


def _join_parts(parts: Sequence[Arrays], test: int | None = None) -> Arrays:
    """Join the images and labels of several files; ``test`` is the one with the test part."""
    arrays = {
        "x": np.concatenate([part["x"] for part in parts]),
        "y": np.concatenate([part["y"] for part in parts]),
    }
    if test is not None:
        are_test = [np.full(len(part["y"]), i == test) for i, part in enumerate(parts)]
        arrays["is_test"] = np.concatenate(are_test)
    return arrays


def _image_dataset(
    labels: Sequence[str],
    mean: tuple[float, ...],
    deviation: tuple[float, ...],
    first_label: int = 0,
) -> Callable[[Arrays], Dataset]:
    """Return a function that makes a data set of images with these channel statistics.

    ``first_label`` is the files' number for the first class.
    """

    def make(arrays: Arrays) -> Dataset:
        y = arrays["y"].astype(np.int64) - first_label
        pixels = Pixels(255.0, mean, deviation)
        is_test = arrays.get("is_test")
        return Dataset(arrays["x"], y, tuple(labels), pixels=pixels, is_test=is_test)

    return make


# ---- MNIST and Fashion-MNIST ---------------------------------------------------------------------


def read_idx(path: Path, source: str = "its source") -> Array:
    """Read an idx file of unsigned bytes; ``source`` is where to get a complete one.

    Its layout: 0, 0, 8, the number of dimensions, each dimension as big-endian 32 bit, the bytes.
    """
    try:
        blob = path.read_bytes()
        if path.suffix == ".gz":
            blob = gzip.decompress(blob)
        dimensions = blob[3]
        shape = np.frombuffer(blob, ">u4", dimensions, offset=4).tolist()
        header = 4 + 4 * dimensions
        has_bytes = blob[:3] == b"\0\0\x08"
        if not has_bytes or len(blob) != header + math.prod(shape):
            raise ValueError("its length does not match its header")
    # A truncated file fails in any of these ways, depending on where it ends.
    except (OSError, EOFError, IndexError, ValueError, zlib.error) as error:
        raise InputError(
            f"'{path}' is not an idx file of bytes (0, 0, 8, the number of dimensions, each "
            f"dimension as 32 bit, the bytes), or is truncated; download it again from {source}."
        ) from error
    if not math.prod(shape):
        raise InputError(f"'{path}' has no examples; download it again from {source}.")
    return np.frombuffer(blob, np.uint8, offset=header).reshape(shape)


def read_idx_set(paths: Sequence[Path]) -> Arrays:
    """Read the four files of MNIST or Fashion-MNIST, train and test parts together."""
    # The order of IDX_FILES: images and labels of the train part, then of the test part.
    arrays = [read_idx(path) for path in paths]
    return _join_grey(*arrays)


def read_packed_grey(paths: Sequence[Path]) -> Arrays:
    """Read a packed npz with x_train, y_train, x_test, y_test."""
    names = ("x_train", "y_train", "x_test", "y_test")
    packed = read_npz(paths[0], names)
    return _join_grey(*(packed[name] for name in names))


def _join_grey(train_x: Array, train_y: Array, test_x: Array, test_y: Array) -> Arrays:
    """Join train and test parts of images without an axis of channels."""
    parts = [{"x": train_x[:, None], "y": train_y}, {"x": test_x[:, None], "y": test_y}]
    return _join_parts(parts, test=1)


def _idx_formats(packed: str, folders: Sequence[str]) -> tuple[FileFormat, ...]:
    """Return the packed file, or the four idx files in one of the folders."""
    formats = [FileFormat((packed,), read_packed_grey)]
    for folder in folders:
        files = tuple(f"{folder}/{file}.gz" for file in IDX_FILES)
        formats.append(FileFormat(files, read_idx_set))
    return tuple(formats)


def _idx_downloads(folder: str, base: str, md5s: Sequence[str]) -> tuple[Download, ...]:
    files = zip(IDX_FILES, md5s, strict=True)
    return tuple(Download(f"{base}{file}.gz", md5, f"{folder}/{file}.gz") for file, md5 in files)


# ---- EMNIST --------------------------------------------------------------------------------------


def read_emnist(paths: Sequence[Path]) -> Arrays:
    """Read the four files of one split of EMNIST, train and test parts together, images upright.

    Labels are as in the files: from 0, but from 1 in the split `letters`.
    """
    parts = []
    # The order of IDX_FILES: images and labels of the train part, then of the test part.
    for images_at, labels_at in (paths[:2], paths[2:]):
        x = read_idx(images_at, EMNIST_SOURCE)
        y = read_idx(labels_at, EMNIST_SOURCE)
        if x.shape[1:] != (28, 28) or y.shape != x.shape[:1]:
            raise InputError(
                f"'{images_at}' has {x.shape} and '{labels_at}' {y.shape}; n images of 28 x 28 "
                f"and n labels were expected: download both again from {EMNIST_SOURCE}."
            )
        # The files have each picture's columns where MNIST's have its rows.
        parts.append({"x": x.transpose(0, 2, 1)[:, None], "y": y})
    return _join_parts(parts, test=1)


def _emnist(split: str, about: str, labels: str, first_label: int = 0) -> NamedSet:
    """Define a split of EMNIST; ``first_label`` is the files' number for the first class."""
    formats = []
    # Our folder, that of the archive and that of torchvision.
    for folder in ("emnist", "gzip", "EMNIST/raw"):
        files = []
        for part in ("train", "test"):
            files.append(f"{folder}/emnist-{split}-{part}-images-idx3-ubyte.gz")
            files.append(f"{folder}/emnist-{split}-{part}-labels-idx1-ubyte.gz")
        formats.append(FileFormat(tuple(files), read_emnist))
    return NamedSet(
        about=f"{about}, 1x28x28, {len(labels)} classes",
        defaults=GREY,
        partition="dirichlet:0.4",
        clients=100,
        formats=tuple(formats),
        # Statistics as published for the whole set, used for every split; not measured here.
        dataset=_image_dataset(labels, (0.1736,), (0.3317,), first_label),
        source=EMNIST_SOURCE,
    )


# ---- SVHN ----------------------------------------------------------------------------------------


def read_svhn(path: Path) -> Arrays:
    """Read one .mat file of cropped digits: X (32, 32, 3, n) of bytes, y (n, 1) of 1 to 10.

    Label 10 is the digit 0.
    """
    # Imported here: it takes a tenth of the time in which all of fedgrove is imported.
    import scipy.io

    expected = (
        "a MATLAB file with X (32, 32, 3, n) of unsigned bytes and y (n, 1) of labels 1 to 10 was "
        f"expected: download it again from {SVHN_SOURCE}"
    )
    try:
        contents = scipy.io.loadmat(path, variable_names=["X", "y"])
        x = np.asarray(contents["X"])
        y = np.asarray(contents["y"]).reshape(-1)
    except KeyError as error:
        raise InputError(f"'{path}' has no array {error}; {expected}.") from error
    # A file that is truncated, or no MATLAB file at all, fails inside of scipy in ways that differ
    # between its versions and with the place where it ends; all of them mean the same here.
    except Exception as error:
        raise InputError(f"'{path}' cannot be read; {expected}.") from error
    is_images = x.dtype == np.uint8 and x.shape == (32, 32, 3, len(y))
    is_labels = y.dtype.kind in "iuf" and bool(np.isin(y, np.arange(1, 11)).all())
    if not is_images or not is_labels:
        raise InputError(
            f"'{path}' has X {x.dtype} {x.shape} and {len(y)} labels y {y.dtype}; {expected}."
        )
    if not len(y):
        raise InputError(f"'{path}' has no examples; download it again from {SVHN_SOURCE}.")
    return {"x": x.transpose(3, 2, 0, 1), "y": y.astype(np.int64) % 10}


def read_svhn_set(paths: Sequence[Path]) -> Arrays:
    """Read the parts of SVHN together, in the order given: train, test and perhaps extra."""
    return _join_parts([read_svhn(path) for path in paths], test=1)


def _svhn(about: str, *parts: str) -> NamedSet:
    """Define SVHN with these parts."""
    formats = []
    for folder in ("svhn/", "SVHN/", ""):
        files = tuple(f"{folder}{part}_32x32.mat" for part in parts)
        formats.append(FileFormat(files, read_svhn_set))
    return NamedSet(
        about=about,
        defaults=COLOUR,
        partition="dirichlet:0.4",
        clients=100,
        formats=tuple(formats),
        dataset=_image_dataset(string.digits, (0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)),
        source=SVHN_SOURCE,
    )


# ---- CIFAR ---------------------------------------------------------------------------------------


def unpack(residual: Array) -> Array:
    """Undo the prediction of the packed CIFAR data files.

    They have planes R-G, G, B-G, differenced along rows and columns, modulo 256. Residuals
    (3, N, 32, 32) become (N, 3, 32, 32) red, green, blue.
    """
    # Bytes throughout: the packing subtracted modulo 256, so sums that wrap around undo it exactly.
    planes = residual.cumsum(2, dtype=np.uint8).cumsum(3, dtype=np.uint8)
    planes[0] += planes[1]
    planes[2] += planes[1]
    return np.ascontiguousarray(np.moveaxis(planes, 0, 1))


def read_packed_colour(paths: Sequence[Path]) -> Arrays:
    """Read packed CIFAR parts (res, y), in the order given; of several the last is the test part.

    One file alone has images of both parts, and does not tell them apart.
    """
    parts = []
    for path in paths:
        packed = read_npz(path, ("res", "y"))
        parts.append({"x": unpack(packed["res"]), "y": packed["y"]})
    return _join_parts(parts, test=len(parts) - 1 if len(parts) > 1 else None)


def read_records(blob: bytes, labels: int, name: str) -> Arrays:
    """Read CIFAR's binary records: ``labels`` label bytes, then 3 x 32 x 32 bytes.

    CIFAR-100 has two label bytes, the coarse one and the fine one; the last, the fine one, counts.
    """
    length = labels + 3 * 32 * 32
    if not blob or len(blob) % length:
        raise InputError(
            f"'{name}' is not a CIFAR binary file, or is truncated; "
            f"download it again from its source."
        )
    rows = np.frombuffer(blob, np.uint8).reshape(-1, length)
    return {"x": rows[:, labels:].reshape(-1, 3, 32, 32), "y": rows[:, labels - 1]}


def _read_tar(path: Path, members: Sequence[str], labels: int) -> Arrays:
    """Read the members of a tar file in memory: nothing is unpacked to disk.

    The last member is the test part.
    """
    parts = []
    try:
        with tarfile.open(path) as tar:
            for member in members:
                file = tar.extractfile(member)
                # None is a member that is not a regular file, such as a folder.
                if file is not None:
                    parts.append(read_records(file.read(), labels, member))
    except (tarfile.TarError, KeyError, OSError, EOFError) as error:
        raise InputError(
            f"'{path}' is not the expected archive ({error}); download it again from its source."
        ) from error
    return _join_parts(parts, test=len(parts) - 1)


def _cifar_formats(
    folder: str, archive: str, members: tuple[str, ...], labels: int
) -> tuple[FileFormat, ...]:
    """Return the binary files, unpacked in ``folder`` or still in the archive.

    The last of the members is the test part.
    """
    files = tuple(f"{folder}/{member}" for member in members)

    def read_files(paths: Sequence[Path]) -> Arrays:
        parts = [read_records(path.read_bytes(), labels, str(path)) for path in paths]
        return _join_parts(parts, test=len(parts) - 1)

    def read_archive(paths: Sequence[Path]) -> Arrays:
        return _read_tar(paths[0], files, labels)

    return (FileFormat(files, read_files), FileFormat((archive,), read_archive))


def _cifar_download(archive: str, md5: str) -> tuple[Download, ...]:
    return (Download(f"https://www.cs.toronto.edu/~kriz/{archive}", md5, archive),)


def make_cifar100(arrays: Arrays) -> Dataset:
    """Make the data set of CIFAR-100, of which only a third may be available."""
    labels = list(map(str, range(100)))
    make = _image_dataset(labels, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))
    dataset = make(arrays)
    # The packed subset is read if the whole set is not available.
    if len(dataset.y) < 60000:
        note = f"{len(dataset.y):,} of 60,000 images, a third of the set"
        return replace(dataset, notes=(note,))
    return dataset


# ---- the sets ------------------------------------------------------------------------------------

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
COLOUR = Defaults("lenet", cohort=100, rounds=100, epochs=1, batch=64, optimiser="Adam", lr=1e-3)
FASHION_LABELS = "T-shirt trouser pullover dress coat sandal shirt sneaker bag ankle-boot"
CIFAR10_LABELS = "airplane automobile bird cat deer dog frog horse ship truck"
EMNIST_MERGED = string.digits + string.ascii_uppercase + "abdefghnqrt"
"""The classes of the splits that do not distinguish a small letter from a similar capital."""

# MD5 sums as torchvision (MNIST, Fashion-MNIST) and the CIFAR page state them.
SETS = {
    "mnist": NamedSet(
        about="70,000 handwritten digits, 1x28x28",
        defaults=GREY,
        partition="dirichlet:0.5",
        clients=10,
        formats=_idx_formats("mnist.npz", ("mnist", "MNIST/raw")),
        dataset=_image_dataset(string.digits, mean=(0.1307,), deviation=(0.3081,)),
        source=(
            "https://ossci-datasets.s3.amazonaws.com/mnist/ (four idx files, in a folder mnist)"
        ),
        downloads=_idx_downloads(
            "mnist",
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            (
                "f68b3c2dcbeaaa9fbdd348bbdeb94873",
                "d53e105ee54ea40749a09fcbcd1e9432",
                "9fb629c4189551a2d022fa330f9573f3",
                "ec29112dd5afa0611ce80d1b7f02629c",
            ),
        ),
    ),
    "fashion-mnist": NamedSet(
        about="70,000 pictures of clothes, 1x28x28, 10 classes",
        defaults=GREY,
        partition="dirichlet:0.5",
        clients=10,
        formats=_idx_formats("fashion_mnist.npz", ("fashion-mnist", "FashionMNIST/raw")),
        dataset=_image_dataset(FASHION_LABELS.split(), mean=(0.2860,), deviation=(0.3530,)),
        source=(
            "https://github.com/zalandoresearch/fashion-mnist "
            "(four idx files, in a folder fashion-mnist)"
        ),
        downloads=_idx_downloads(
            "fashion-mnist",
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            (
                "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
                "25c81989df183df01b3e8a0aad5dffbe",
                "bef4ecab320f06d8554ea6380940ec79",
                "bb300cfdad3c16e7a12a480ee83cd310",
            ),
        ),
    ),
    # After a colon comes the split of the set, as a preset comes after the name of a method.
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
    "svhn": _svhn("99,289 digits of house numbers, 3x32x32", "train", "test"),
    "svhn:extra": _svhn(
        "630,420 digits of house numbers, 3x32x32, with the easier extra part",
        "train",
        "test",
        "extra",
    ),
    "cifar10": NamedSet(
        about="60,000 photographs, 3x32x32, 10 classes",
        defaults=COLOUR,
        partition="dirichlet:0.4",
        clients=100,
        formats=(
            FileFormat(
                ("cifar10_train_0.npz", "cifar10_train_1.npz", "cifar10_test.npz"),
                read_packed_colour,
            ),
            *_cifar_formats(
                folder="cifar-10-batches-bin",
                archive="cifar-10-binary.tar.gz",
                members=(*(f"data_batch_{part}.bin" for part in range(1, 6)), "test_batch.bin"),
                labels=1,
            ),
        ),
        dataset=_image_dataset(
            CIFAR10_LABELS.split(),
            mean=(0.4914, 0.4822, 0.4465),
            deviation=(0.2470, 0.2435, 0.2616),
        ),
        source=CIFAR_SOURCE,
        downloads=_cifar_download("cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530"),
    ),
    "cifar100": NamedSet(
        about=(
            "photographs, 3x32x32, 100 classes; 60,000, or a third of them if only the packed "
            "subset is available"
        ),
        defaults=COLOUR,
        partition="dirichlet:0.4",
        clients=50,
        formats=(
            *_cifar_formats(
                folder="cifar-100-binary",
                archive="cifar-100-binary.tar.gz",
                members=("train.bin", "test.bin"),
                labels=2,
            ),
            # The subset has a third of the images, so whole files are preferred.
            FileFormat(("cifar100_subset.npz",), read_packed_colour),
        ),
        dataset=make_cifar100,
        source=CIFAR_SOURCE,
        downloads=_cifar_download("cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8"),
    ),
}
