"""Image sets: MNIST and its kin from idx, CIFAR from its binary files, both from packed npz."""

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
from .files import Arrays, Download, Form, need, npz

IDX = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
"""The files of MNIST and Fashion-MNIST; both the readers and the downloads follow this order."""


OPTIONS = ("grey",)
"""What may follow the name of a set of images, after a colon."""
LUMA = (0.299, 0.587, 0.114)
"""How bright red, green and blue are (ITU-R BT.601)."""
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


# ---- MNIST and Fashion-MNIST ---------------------------------------------------------------------


def read_idx(path: Path) -> Array:
    """An idx file of unsigned bytes.

    Its layout: 0, 0, 8, the number of dimensions, each dimension as big-endian 32 bit, the bytes.
    """
    try:
        blob = path.read_bytes()
        if path.suffix == ".gz":
            blob = gzip.decompress(blob)
        dimensions = blob[3]
        shape = np.frombuffer(blob, ">u4", dimensions, offset=4).tolist()
        header = 4 + 4 * dimensions
        holds_bytes = blob[:3] == b"\0\0\x08"
        if not holds_bytes or len(blob) != header + math.prod(shape):
            raise ValueError("its length is not what it states")
    # A truncated file fails in any of these ways, depending on where it ends.
    except (OSError, EOFError, IndexError, ValueError, zlib.error) as error:
        raise InputError(
            f"'{path}' is not an idx file of bytes, or is truncated; download it again."
        ) from error
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


def _idx_forms(packed: str, folders: Sequence[str]) -> tuple[Form, ...]:
    """The packed file, or the four idx files in one of the folders."""
    forms = [Form((packed,), packed_grey)]
    for folder in folders:
        files = tuple(f"{folder}/{file}.gz" for file in IDX)
        forms.append(Form(files, idx_set))
    return tuple(forms)


def _idx_downloads(folder: str, base: str, md5s: Sequence[str]) -> tuple[Download, ...]:
    downloads = []
    for file, md5 in zip(IDX, md5s, strict=True):
        downloads.append(Download(f"{base}{file}.gz", md5, f"{folder}/{file}.gz"))
    return tuple(downloads)


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
) -> tuple[Form, ...]:
    """The binary files, unpacked in ``folder`` or still in the archive."""
    files = tuple(f"{folder}/{member}" for member in members)

    def read_files(paths: Sequence[Path]) -> Arrays:
        blobs = []
        for path in paths:
            blobs.append((str(path), path.read_bytes()))
        return _from_records(blobs, labels)

    def read_archive(paths: Sequence[Path]) -> Arrays:
        return _from_records(_tar(paths[0], files), labels)

    return (Form(files, read_files), Form((archive,), read_archive))


# ---- the forms each set is published in, the preferred one first ---------------------------------

MNIST = _idx_forms("mnist.npz", ("mnist", "MNIST/raw"))
FASHION = _idx_forms("fashion_mnist.npz", ("fashion-mnist", "FashionMNIST/raw"))
CIFAR10 = (
    Form(("cifar10_train_0.npz", "cifar10_train_1.npz", "cifar10_test.npz"), packed_colour),
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
    Form(("cifar100_subset.npz",), packed_colour),
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
