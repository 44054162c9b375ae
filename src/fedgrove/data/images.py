"""Image sets: MNIST and its kin from idx, CIFAR from its binary files, SVHN from MATLAB's.

MNIST and CIFAR are read from packed npz as well.
"""

from __future__ import annotations

import gzip
import math
import tarfile
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ..errors import InputError
from .dataset import Array, Dataset, Pixels
from .files import Arrays, Download, FileFormat, need, npz

IDX = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
"""The files of MNIST and Fashion-MNIST; both the readers and the downloads follow this order."""
EMNIST_SOURCE = (
    "https://www.nist.gov/itl/products-and-services/emnist-dataset "
    "(the binary format, gzip.zip; its idx files in a folder emnist)"
)
SVHN_SOURCE = (
    "http://ufldl.stanford.edu/housenumbers/ (format 2, cropped digits; the .mat files in a "
    "folder svhn)"
)


OPTIONS = ("grey", "turned")
"""What may follow the name of a set of images, after a colon."""
LUMA = (0.299, 0.587, 0.114)
"""How bright red, green and blue are (ITU-R BT.601)."""
IMAGES = 4
"""Dimensions of an array of images: (n, channels, height, width)."""
AT_ONCE = 10_000
"""Images that lose their colours at once."""


def grey(name: str, dataset: Dataset) -> Dataset:
    """The images without their colours, in whole steps of brightness.

    They are standardised by the mean and deviation of all of them.
    """
    pixels = dataset.pixels
    if pixels is None or dataset.x.shape[1] != len(LUMA):
        raise InputError(f"{name} has no colours to leave out; take the set without :grey.")
    bright = np.empty((len(dataset.x), 1, *dataset.x.shape[2:]), dtype=np.uint8)
    # In pieces: as floats all images together would take eight times their room.
    for begin in range(0, len(bright), AT_ONCE):
        piece = dataset.x[begin : begin + AT_ONCE]
        bright[begin : begin + AT_ONCE, 0] = np.rint(np.einsum("c,nchw->nhw", LUMA, piece))
    counts = np.bincount(bright.reshape(-1), minlength=256)
    steps = np.arange(256) / pixels.top
    mean = float(np.average(steps, weights=counts))
    deviation = float(np.sqrt(np.average((steps - mean) ** 2, weights=counts)))
    return replace(dataset, x=bright, pixels=Pixels(pixels.top, (mean,), (deviation,)))


def turned(name: str, dataset: Dataset) -> Dataset:
    """The images turned left by a quarter: another task that is as hard, as in IFCA's trials."""
    if dataset.x.ndim != IMAGES:
        raise InputError(f"{name} has no images to turn; take the set without :turned.")
    return replace(dataset, x=np.ascontiguousarray(np.rot90(dataset.x, axes=(2, 3))))


# ---- MNIST and Fashion-MNIST ---------------------------------------------------------------------


def read_idx(path: Path, source: str = "its source") -> Array:
    """An idx file of unsigned bytes; ``source`` is where a whole one is to be had.

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
            raise ValueError("its length is not what it states")
    # A truncated file fails in any of these ways, depending on where it ends.
    except (OSError, EOFError, IndexError, ValueError, zlib.error) as error:
        raise InputError(
            f"'{path}' is not an idx file of bytes (0, 0, 8, the number of dimensions, each "
            f"dimension as 32 bit, the bytes), or is truncated; download it again from {source}."
        ) from error
    if not math.prod(shape):
        raise InputError(f"'{path}' holds no examples; download it again from {source}.")
    return np.frombuffer(blob, np.uint8, offset=header).reshape(shape)


def idx_set(paths: Sequence[Path]) -> Arrays:
    """The four files of MNIST or Fashion-MNIST, train and test parts together."""
    # The order of IDX: images and labels of the train part, then of the test part.
    train = read_idx(paths[0])
    train_y = read_idx(paths[1])
    test = read_idx(paths[2])
    test_y = read_idx(paths[3])
    return {"x": np.concatenate([train, test])[:, None], "y": np.concatenate([train_y, test_y])}


def packed_grey(paths: Sequence[Path]) -> Arrays:
    """A packed npz with x_train, y_train, x_test, y_test."""
    packed = npz(paths[0])
    need(packed, ("x_train", "y_train", "x_test", "y_test"), str(paths[0]))
    return {
        "x": np.concatenate([packed["x_train"], packed["x_test"]])[:, None],
        "y": np.concatenate([packed["y_train"], packed["y_test"]]),
    }


def _idx_forms(packed: str, folders: Sequence[str]) -> tuple[FileFormat, ...]:
    """The packed file, or the four idx files in one of the folders."""
    forms = [FileFormat((packed,), packed_grey)]
    for folder in folders:
        files = tuple(f"{folder}/{file}.gz" for file in IDX)
        forms.append(FileFormat(files, idx_set))
    return tuple(forms)


def _idx_downloads(folder: str, base: str, md5s: Sequence[str]) -> tuple[Download, ...]:
    downloads = []
    for file, md5 in zip(IDX, md5s, strict=True):
        downloads.append(Download(f"{base}{file}.gz", md5, f"{folder}/{file}.gz"))
    return tuple(downloads)


# ---- EMNIST --------------------------------------------------------------------------------------


def emnist_set(paths: Sequence[Path]) -> Arrays:
    """The four files of one split of EMNIST, train and test parts together, images upright.

    Labels are as in the files: from 0, but from 1 in the split `letters`.
    """
    xs = []
    ys = []
    # The order of IDX: images and labels of the train part, then of the test part.
    for images_at, labels_at in (paths[:2], paths[2:]):
        x = read_idx(images_at, EMNIST_SOURCE)
        y = read_idx(labels_at, EMNIST_SOURCE)
        if x.shape[1:] != (28, 28) or y.shape != x.shape[:1]:
            raise InputError(
                f"'{images_at}' holds {x.shape} and '{labels_at}' {y.shape}; n images of 28 x 28 "
                f"and n labels were expected: download both again from {EMNIST_SOURCE}."
            )
        # The files hold each picture's columns where MNIST's hold its rows.
        xs.append(x.transpose(0, 2, 1))
        ys.append(y)
    return {"x": np.concatenate(xs)[:, None], "y": np.concatenate(ys)}


def emnist_forms(split: str) -> tuple[FileFormat, ...]:
    """The four idx files of a split, in the folder of ours, of the archive or of torchvision."""
    forms = []
    for folder in ("emnist", "gzip", "EMNIST/raw"):
        files = []
        for part in ("train", "test"):
            files.append(f"{folder}/emnist-{split}-{part}-images-idx3-ubyte.gz")
            files.append(f"{folder}/emnist-{split}-{part}-labels-idx1-ubyte.gz")
        forms.append(FileFormat(tuple(files), emnist_set))
    return tuple(forms)


# ---- SVHN ----------------------------------------------------------------------------------------


def read_svhn(path: Path) -> Arrays:
    """One .mat file of cropped digits: X (32, 32, 3, n) of bytes, y (n, 1) of 1 to 10.

    Label 10 is the digit 0.
    """
    # Here and not above: it takes a tenth of the time in which all of fedgrove is imported.
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
            f"'{path}' holds X {x.dtype} {x.shape} and {len(y)} labels y {y.dtype}; {expected}."
        )
    if not len(y):
        raise InputError(f"'{path}' holds no examples; download it again from {SVHN_SOURCE}.")
    return {"x": x.transpose(3, 2, 0, 1), "y": y.astype(np.int64) % 10}


def svhn_set(paths: Sequence[Path]) -> Arrays:
    """The parts of SVHN together, in the order given."""
    xs = []
    ys = []
    for path in paths:
        part = read_svhn(path)
        xs.append(part["x"])
        ys.append(part["y"])
    return {"x": np.concatenate(xs), "y": np.concatenate(ys)}


def svhn_forms(parts: Sequence[str]) -> tuple[FileFormat, ...]:
    """The .mat files of these parts, in a folder of their own or beside the other sets."""
    forms = []
    for folder in ("svhn/", "SVHN/", ""):
        forms.append(FileFormat(tuple(f"{folder}{part}_32x32.mat" for part in parts), svhn_set))
    return tuple(forms)


# ---- CIFAR ---------------------------------------------------------------------------------------


def unpack(residual: Array) -> Array:
    """Undo the prediction of the packed CIFAR files.

    They hold planes R-G, G, B-G, differenced along rows and columns, modulo 256. Residuals
    (3, N, 32, 32) become (N, 3, 32, 32) red, green, blue.
    """
    # Bytes throughout: the packing subtracted modulo 256, so sums that wrap around undo it exactly.
    planes = residual.cumsum(2, dtype=np.uint8).cumsum(3, dtype=np.uint8)
    planes[0] += planes[1]
    planes[2] += planes[1]
    return np.ascontiguousarray(np.moveaxis(planes, 0, 1))


def packed_colour(paths: Sequence[Path]) -> Arrays:
    """Packed CIFAR parts (res, y), in the order given."""
    xs = []
    ys = []
    for path in paths:
        packed = npz(path)
        need(packed, ("res", "y"), str(path))
        xs.append(unpack(packed["res"]))
        ys.append(packed["y"])
    return {"x": np.concatenate(xs), "y": np.concatenate(ys)}


def records(blob: bytes, labels: int, name: str) -> Arrays:
    """CIFAR's binary records: ``labels`` label bytes, then 3 x 32 x 32 bytes.

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


def _from_records(blobs: Sequence[tuple[str, bytes]], labels: int) -> Arrays:
    """The records of several files, given as (name, bytes), one after the other."""
    xs = []
    ys = []
    for name, blob in blobs:
        part = records(blob, labels, name)
        xs.append(part["x"])
        ys.append(part["y"])
    return {"x": np.concatenate(xs), "y": np.concatenate(ys)}


def _tar(path: Path, members: Sequence[str]) -> list[tuple[str, bytes]]:
    """The members of a tar file, read in memory: nothing is unpacked to disk."""
    blobs = []
    try:
        with tarfile.open(path) as tar:
            for member in members:
                file = tar.extractfile(member)
                # None is a member that is not a regular file, such as a folder.
                if file is not None:
                    blobs.append((member, file.read()))
    except (tarfile.TarError, KeyError, OSError, EOFError) as error:
        raise InputError(
            f"'{path}' is not the expected archive ({error}); download it again from its source."
        ) from error
    return blobs


def _cifar_forms(
    folder: str, archive: str, members: tuple[str, ...], labels: int
) -> tuple[FileFormat, ...]:
    """The binary files, unpacked in ``folder`` or still in the archive."""
    files = tuple(f"{folder}/{member}" for member in members)

    def read_files(paths: Sequence[Path]) -> Arrays:
        blobs = []
        for path in paths:
            blobs.append((str(path), path.read_bytes()))
        return _from_records(blobs, labels)

    def read_archive(paths: Sequence[Path]) -> Arrays:
        return _from_records(_tar(paths[0], files), labels)

    return (FileFormat(files, read_files), FileFormat((archive,), read_archive))


# ---- the forms each set is published in, the preferred one first ---------------------------------

MNIST = _idx_forms("mnist.npz", ("mnist", "MNIST/raw"))
FASHION = _idx_forms("fashion_mnist.npz", ("fashion-mnist", "FashionMNIST/raw"))
CIFAR10 = (
    FileFormat(("cifar10_train_0.npz", "cifar10_train_1.npz", "cifar10_test.npz"), packed_colour),
    *_cifar_forms(
        folder="cifar-10-batches-bin",
        archive="cifar-10-binary.tar.gz",
        members=(
            "data_batch_1.bin",
            "data_batch_2.bin",
            "data_batch_3.bin",
            "data_batch_4.bin",
            "data_batch_5.bin",
            "test_batch.bin",
        ),
        labels=1,
    ),
)
# The subset comes last: it holds a third of the images, so whole files are preferred.
CIFAR100 = (
    *_cifar_forms(
        folder="cifar-100-binary",
        archive="cifar-100-binary.tar.gz",
        members=("train.bin", "test.bin"),
        labels=2,
    ),
    FileFormat(("cifar100_subset.npz",), packed_colour),
)

# MD5 sums as torchvision (MNIST, Fashion-MNIST) and the CIFAR page state them.
DOWNLOADS = {
    "mnist": _idx_downloads(
        "mnist",
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        (
            "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "d53e105ee54ea40749a09fcbcd1e9432",
            "9fb629c4189551a2d022fa330f9573f3",
            "ec29112dd5afa0611ce80d1b7f02629c",
        ),
    ),
    "fashion-mnist": _idx_downloads(
        "fashion-mnist",
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        (
            "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "25c81989df183df01b3e8a0aad5dffbe",
            "bef4ecab320f06d8554ea6380940ec79",
            "bb300cfdad3c16e7a12a480ee83cd310",
        ),
    ),
    "cifar10": (
        Download(
            "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
            "c32a1d4ab5d03f1284b67883e8d87530",
            "cifar-10-binary.tar.gz",
        ),
    ),
    "cifar100": (
        Download(
            "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
            "03b5dce01913d631647c71ecec9e9cb8",
            "cifar-100-binary.tar.gz",
        ),
    ),
}
