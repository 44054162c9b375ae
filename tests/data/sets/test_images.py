"""EMNIST's idx files and SVHN's .mat files, in the formats they are published in."""

import gzip
import struct

import numpy as np
import pytest
import scipy.io
import torch

from fedgrove import data
from fedgrove.data.named_set import cache_folder
from fedgrove.data.sets import images
from fedgrove.errors import InputError
from fedgrove.runs.files import fresh_name

PARTS = (("train", 300), ("test", 60))


@pytest.fixture(autouse=True)
def _no_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("FEDGROVE_DATA", raising=False)
    monkeypatch.setenv("FEDGROVE_CACHE", str(tmp_path / "cache"))


def idx(array):
    magic = struct.pack(">BBBB", 0, 0, 8, array.ndim)
    sizes = struct.pack(f">{array.ndim}I", *array.shape)
    return magic + sizes + array.astype(np.uint8).tobytes()


def glyph():
    """An upright L, its foot to the right: unlike itself when turned or mirrored."""
    picture = np.zeros((28, 28), np.uint8)
    picture[4:24, 6] = 255
    picture[23, 6:18] = 200
    return picture


def write_emnist(folder, split="balanced", classes=47, first=0, zipped=True):
    """Every picture is the glyph, stored as EMNIST stores it: columns where rows belong."""
    folder.mkdir(parents=True, exist_ok=True)
    for part, n in PARTS:
        lying = np.stack([glyph().T] * n)
        files = {
            f"emnist-{split}-{part}-images-idx3-ubyte": idx(lying),
            f"emnist-{split}-{part}-labels-idx1-ubyte": idx(np.arange(n) % classes + first),
        }
        for name, blob in files.items():
            path = folder / (name + ".gz" * zipped)
            path.write_bytes(gzip.compress(blob) if zipped else blob)


def examples(federation):
    for client in federation.clients.values():
        yield from (client.train, client.validation, client.test)


@pytest.mark.parametrize(
    ("name", "split", "classes", "first", "labels"),
    [
        ("emnist", "balanced", 47, 0, ("0", "9", "A", "Z", "a", "t")),
        ("emnist:byclass", "byclass", 62, 0, ("0", "9", "A", "Z", "a", "z")),
        ("emnist:bymerge", "bymerge", 47, 0, ("0", "9", "A", "Z", "a", "t")),
        ("emnist:letters", "letters", 26, 1, ("A", "Z")),
        ("emnist:digits", "digits", 10, 0, ("0", "9")),
        ("emnist:mnist", "mnist", 10, 0, ("0", "9")),
    ],
)
def test_emnist_is_read_upright_with_labels_from_0(tmp_path, name, split, classes, first, labels):
    write_emnist(tmp_path / "emnist", split, classes, first)
    f = data.load(name, partition="iid", clients=2, standardise=False, data_dir=tmp_path)
    assert (f.shape, f.classes, len(f.labels)) == ((1, 28, 28), classes, classes)
    assert (f.labels[0], f.labels[-1]) == (labels[0], labels[-1])
    assert set(labels) <= set(f.labels)
    upright = glyph() / 255
    seen = set()
    total = 0
    for part in examples(f):
        total += len(part)
        seen |= set(part.y.tolist())
        for picture in part.x.numpy():
            assert np.allclose(picture[0], upright, atol=1e-6)
    assert total == 360
    assert seen == set(range(classes))


def test_the_label_of_a_picture_stays_with_it(tmp_path):
    """The brightness of pixel (0, 0) is the label: parts and order may change, pairs may not."""
    for part, n in PARTS:
        x = np.zeros((n, 28, 28))
        x[:, 0, 0] = np.arange(n) % 47
        stem = tmp_path / f"emnist-balanced-{part}"
        stem.with_name(f"{stem.name}-images-idx3-ubyte").write_bytes(idx(x))
        stem.with_name(f"{stem.name}-labels-idx1-ubyte").write_bytes(idx(np.arange(n) % 47))
    paths = []
    for part, _ in PARTS:
        paths.append(tmp_path / f"emnist-balanced-{part}-images-idx3-ubyte")
        paths.append(tmp_path / f"emnist-balanced-{part}-labels-idx1-ubyte")
    arrays = images.read_emnist(paths)
    assert arrays["x"].shape == (360, 1, 28, 28)
    assert np.array_equal(arrays["x"][:, 0, 0, 0], arrays["y"])


@pytest.mark.parametrize(("folder", "zipped"), [("gzip", True), ("EMNIST/raw", False)])
def test_emnist_is_found_as_the_archive_and_torchvision_leave_it(tmp_path, folder, zipped):
    write_emnist(tmp_path / folder, zipped=zipped)
    assert data.load("emnist", clients=3, data_dir=tmp_path).classes == 47


def test_the_word_behind_the_colon_is_part_of_no_file_name(tmp_path):
    write_emnist(tmp_path / "emnist", "letters", 26, 1)
    data.load("emnist:letters", clients=3, data_dir=tmp_path)
    names = [path.name for path in (cache_folder() / "unpacked").iterdir()]
    assert len(names) == 1
    assert names[0].startswith("emnist-letters-")
    assert fresh_name(tmp_path, "fedavg-emnist:letters-s0").name == "fedavg-emnist-letters-s0"


def test_a_set_with_a_colon_in_its_name_takes_options_and_company(tmp_path):
    write_emnist(tmp_path / "emnist", "letters", 26, 1)
    write_emnist(tmp_path / "emnist", "digits", 10)
    upright = data.load("emnist:letters", clients=2, data_dir=tmp_path)
    turned = data.load("emnist:letters:turned", clients=2, data_dir=tmp_path)
    assert turned.name == "emnist:letters:turned"
    assert turned.shape == upright.shape
    assert not torch.equal(turned.clients[0].train.x, upright.clients[0].train.x)
    with pytest.raises(InputError, match="emnist:letters:grey has no colours"):
        data.load("emnist:letters:grey", clients=2, data_dir=tmp_path)
    both = data.load("emnist:letters+emnist:digits:turned", clients=4, data_dir=tmp_path)
    tasks = [client.info.task for client in both.clients.values()]
    assert tasks == ["emnist:letters"] * 2 + ["emnist:digits:turned"] * 2
    for wrong in ("emnist:grey:letters", "emnist:letters:", "emnist:letters:gray"):
        with pytest.raises(InputError, match=f"there is no data set '{wrong}'"):
            data.load(wrong, clients=2, data_dir=tmp_path)


def test_an_unknown_split_names_those_there_are():
    with pytest.raises(InputError, match="did you mean 'emnist:letters'"):
        data.load("emnist:letter")


def refused(name, folder, *words):
    with pytest.raises(InputError) as caught:
        data.load(name, clients=3, data_dir=folder)
    for word in words:
        assert word in str(caught.value), word
    assert str(caught.value).endswith(".")


def test_broken_emnist_files_say_what_was_expected_and_where_to_get_them(tmp_path):
    folder = tmp_path / "emnist"
    write_emnist(folder)
    labels = folder / "emnist-balanced-train-labels-idx1-ubyte.gz"
    pictures = folder / "emnist-balanced-test-images-idx3-ubyte.gz"
    whole = labels.read_bytes()

    labels.write_bytes(whole[:-9])
    refused("emnist", tmp_path, str(labels), "truncated", "nist.gov")
    # 0, 0, 13 would be an idx file of floats.
    labels.write_bytes(gzip.compress(b"\0\0\x0d" + gzip.decompress(whole)[3:]))
    refused("emnist", tmp_path, str(labels), "not an idx file of bytes", "nist.gov")
    labels.write_bytes(gzip.compress(idx(np.arange(299) % 47)))
    refused("emnist", tmp_path, str(labels), "(300, 28, 28)", "(299,)", "nist.gov")
    labels.write_bytes(whole)
    pictures.write_bytes(gzip.compress(idx(np.zeros((60, 8, 8)))))
    refused("emnist", tmp_path, str(pictures), "(60, 8, 8)", "28 x 28", "nist.gov")
    pictures.unlink()
    refused("emnist", tmp_path, "emnist-balanced-test-images", "is missing", "nist.gov")


def test_labels_of_another_split_are_refused(tmp_path):
    write_emnist(tmp_path / "emnist", "digits", classes=11)
    refused("emnist:digits", tmp_path, "do not agree", "up to 10")
    # Letters are numbered from 1: a 0 is none of them.
    write_emnist(tmp_path / "emnist", "letters", classes=26, first=0)
    refused("emnist:letters", tmp_path, "do not agree")


def test_a_file_of_no_examples_is_named(tmp_path):
    write_emnist(tmp_path / "emnist", zipped=False)
    at = tmp_path / "emnist" / "emnist-balanced-test-images-idx3-ubyte"
    at.write_bytes(idx(np.zeros((0, 28, 28))))
    (tmp_path / "emnist" / "emnist-balanced-test-labels-idx1-ubyte").write_bytes(idx(np.zeros(0)))
    with pytest.raises(InputError, match=r"^'.*-test-images-idx3-ubyte' has no examples; "):
        data.load("emnist", clients=3, data_dir=tmp_path)
    (tmp_path / "svhn").mkdir()
    nothing = {"X": np.zeros((32, 32, 3, 0), np.uint8), "y": np.zeros((0, 1), np.uint8)}
    for part in ("train", "test"):
        scipy.io.savemat(tmp_path / "svhn" / f"{part}_32x32.mat", nothing)
    with pytest.raises(InputError, match=r"^'.*train_32x32.mat' has no examples; "):
        data.load("svhn", clients=3, data_dir=tmp_path)


# ---- SVHN ----------------------------------------------------------------------------------------


def cropped(n):
    """Digits as the files hold them: X (32, 32, 3, n); image i is i in red, its row in green."""
    x = np.zeros((32, 32, 3, n), np.uint8)
    x[:, :, 0] = np.arange(n) % 251
    x[:, :, 1] = np.arange(32)[:, None, None]
    y = (np.arange(n) % 10 + 1).astype(np.uint8)
    return {"X": x, "y": y[:, None]}


def write_svhn(folder, parts=("train", "test"), **changed):
    folder.mkdir(parents=True, exist_ok=True)
    for part, n in zip(parts, (300, 60, 90), strict=False):
        # The originals are compressed MATLAB 5 files.
        contents = {**cropped(n), **changed}
        scipy.io.savemat(folder / f"{part}_32x32.mat", contents, do_compression=True)


@pytest.mark.parametrize("folder", ["svhn", "SVHN", "."])
def test_svhn_comes_with_channels_first_and_10_as_0(tmp_path, folder):
    write_svhn(tmp_path / folder)
    f = data.load("svhn", partition="iid", clients=2, standardise=False, data_dir=tmp_path)
    assert (f.shape, f.classes, f.labels) == ((3, 32, 32), 10, tuple("0123456789"))
    total = 0
    for part in examples(f):
        total += len(part)
        for picture, label in zip((part.x * 255).round().int(), part.y, strict=True):
            number = int(picture[0, 0, 0])
            # Image i has label i mod 10 + 1, and 10 is the digit 0; 251 images, then 49 more.
            assert int(label) in ((number + 1) % 10, (number + 252) % 10)
            assert picture[1, :, 5].tolist() == list(range(32))
            assert not picture[2].any()
    assert total == 360


def test_the_extra_digits_are_a_set_of_their_own(tmp_path):
    write_svhn(tmp_path / "svhn", ("train", "test", "extra"))
    small = data.load("svhn", clients=3, data_dir=tmp_path)
    large = data.load("svhn:extra", clients=3, data_dir=tmp_path)
    assert sum(len(part) for part in examples(small)) == 360
    assert sum(len(part) for part in examples(large)) == 450
    (tmp_path / "svhn" / "extra_32x32.mat").unlink()
    refused("svhn:extra", tmp_path, "of 3 files 'svhn/extra_32x32.mat' is missing", "ufldl.stan")


def test_broken_svhn_files_say_what_was_expected_and_where_to_get_them(tmp_path):
    folder = tmp_path / "svhn"
    file = folder / "train_32x32.mat"
    write_svhn(folder)
    whole = file.read_bytes()
    for blob in (b"", whole[:200], whole[: len(whole) // 2], whole[:-5], b"no MATLAB" * 40):
        file.write_bytes(blob)
        refused("svhn", tmp_path, str(file), "(32, 32, 3, n)", "ufldl.stanford.edu")
    scipy.io.savemat(file, {"X": cropped(5)["X"]})
    refused("svhn", tmp_path, str(file), "no array 'y'", "ufldl.stanford.edu")
    for name, wrong in (
        ("y", np.ones((299, 1), np.uint8)),
        ("y", np.zeros((300, 1), np.uint8)),
        ("y", np.full((300, 1), 1.5)),
        ("X", np.zeros((300, 32, 32, 3), np.uint8)),
        ("X", np.zeros((32, 32, 3, 300))),
    ):
        write_svhn(folder, ("train",), **{name: wrong})
        refused("svhn", tmp_path, str(file), "labels 1 to 10", "ufldl.stanford.edu")


def test_a_missing_svhn_says_where_it_was_looked_for(tmp_path):
    refused("svhn", tmp_path, "svhn/train_32x32.mat", str(tmp_path), "--data-dir", "ufldl.stan")
