"""Image sets: MNIST and its kin from idx, CIFAR from its binary files, both from packed npz."""

from __future__ import annotations

import gzip
import math
import tarfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..errors import InputError
from .dataset import Array
from .files import Arrays, Download, Form, need, npz

IDX = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


def read_idx(path: Path) -> Array:
    """An idx file of unsigned bytes: 0, 0, 8, number of dimensions, each as big-endian 32 bit, then the bytes."""
    try:
        blob = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        shape = np.frombuffer(blob, ">u4", blob[3], offset=4).tolist()
        if blob[:3] != b"\0\0\x08" or len(blob) != 4 + 4 * len(shape) + math.prod(shape):
            raise ValueError("its length is not what it states")
    except (OSError, EOFError, IndexError, ValueError, zlib.error) as error:
        raise InputError(
            f"'{path}' is not an idx file of bytes, or is cut short; get it again."
        ) from error
    return np.frombuffer(blob, np.uint8, offset=4 + 4 * len(shape)).reshape(shape)


def idx_set(paths: Sequence[Path]) -> Arrays:
    """The four files of MNIST or Fashion-MNIST, train and test parts together."""
    train, train_y, test, test_y = (read_idx(path) for path in paths)
    return {"x": np.concatenate([train, test])[:, None], "y": np.concatenate([train_y, test_y])}


def packed_grey(paths: Sequence[Path]) -> Arrays:
    """A packed npz with x_train, y_train, x_test, y_test."""
    d = npz(paths[0])
    need(d, ("x_train", "y_train", "x_test", "y_test"), str(paths[0]))
    return {
        "x": np.concatenate([d["x_train"], d["x_test"]])[:, None],
        "y": np.concatenate([d["y_train"], d["y_test"]]),
    }


def unpack(residual: Array) -> Array:
    """Undo the packed CIFAR files' prediction: planes R-G, G, B-G, differenced along rows and columns, modulo 256.

    (3, N, 32, 32) residuals become (N, 3, 32, 32) red, green, blue.
    """
    p = residual.cumsum(2, dtype=np.uint8).cumsum(3, dtype=np.uint8)
    p[0] += p[1]
    p[2] += p[1]
    return np.ascontiguousarray(np.moveaxis(p, 0, 1))


def packed_colour(paths: Sequence[Path]) -> Arrays:
    """Packed CIFAR parts (res, y), in the order given."""
    parts = [npz(path) for path in paths]
    for path, part in zip(paths, parts, strict=True):
        need(part, ("res", "y"), str(path))
    return {
        "x": np.concatenate([unpack(d["res"]) for d in parts]),
        "y": np.concatenate([d["y"] for d in parts]),
    }


def records(blob: bytes, labels: int, name: str) -> Arrays:
    """CIFAR's binary records: ``labels`` label bytes (the last one is the fine one), then 3 x 32 x 32 bytes."""
    if not blob or len(blob) % (labels + 3072):
        raise InputError(
            f"'{name}' is not a CIFAR binary file, or is cut short; get it again from its source."
        )
    rows = np.frombuffer(blob, np.uint8).reshape(-1, labels + 3072)
    return {"x": rows[:, labels:].reshape(-1, 3, 32, 32), "y": rows[:, labels - 1]}


def _binary(blobs: Sequence[tuple[str, bytes]], labels: int) -> Arrays:
    parts = [records(blob, labels, name) for name, blob in blobs]
    return {k: np.concatenate([part[k] for part in parts]) for k in ("x", "y")}


def _tar(path: Path, members: Sequence[str]) -> list[tuple[str, bytes]]:
    """The members of a tar file, read in memory: nothing is unpacked to disk."""
    try:
        with tarfile.open(path) as tar:
            return [(m, file.read()) for m in members if (file := tar.extractfile(m)) is not None]
    except (tarfile.TarError, KeyError, OSError, EOFError) as error:
        raise InputError(
            f"'{path}' is not the expected archive ({error}); get it again from its source."
        ) from error


def _cifar_forms(
    folder: str, archive: str, members: tuple[str, ...], labels: int
) -> tuple[Form, ...]:
    inside = tuple(f"{folder}/{m}" for m in members)
    return (
        Form(inside, lambda paths: _binary([(str(p), p.read_bytes()) for p in paths], labels)),
        Form((archive,), lambda paths: _binary(_tar(paths[0], inside), labels)),
    )


def _idx_forms(packed: str, folders: Sequence[str]) -> tuple[Form, ...]:
    original = tuple(
        Form(tuple(f"{folder}/{file}.gz" for file in IDX), idx_set) for folder in folders
    )
    return (Form((packed,), packed_grey), *original)


def _idx_downloads(folder: str, base: str, md5s: Sequence[str]) -> tuple[Download, ...]:
    return tuple(
        Download(f"{base}{f}.gz", md5, f"{folder}/{f}.gz") for f, md5 in zip(IDX, md5s, strict=True)
    )


MNIST = _idx_forms("mnist.npz", ("mnist", "MNIST/raw"))
FASHION = _idx_forms("fashion_mnist.npz", ("fashion-mnist", "FashionMNIST/raw"))
CIFAR10 = (
    Form(("cifar10_train_0.npz", "cifar10_train_1.npz", "cifar10_test.npz"), packed_colour),
    *_cifar_forms(
        "cifar-10-batches-bin",
        "cifar-10-binary.tar.gz",
        (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"),
        1,
    ),
)
CIFAR100_SUBSET = Form(("cifar100_subset.npz",), packed_colour)
CIFAR100 = (
    *_cifar_forms("cifar-100-binary", "cifar-100-binary.tar.gz", ("train.bin", "test.bin"), 2),
    CIFAR100_SUBSET,
)

# Checksums as the sources' best-known reader documents them.
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
