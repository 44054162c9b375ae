"""Facts of the real sets; skipped where they are not at hand."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from fedgrove import data
from fedgrove.data import split
from fedgrove.data.named_set import read_dataset
from fedgrove.data.sets import SETS
from fedgrove.errors import InputError

FOLDER = os.environ.get("FEDGROVE_DATA", "")


def needs(*files):
    here = FOLDER and all((Path(FOLDER) / f).exists() for f in files)
    return pytest.mark.skipif(
        not here, reason=f"FEDGROVE_DATA does not name a folder with {', '.join(files)}"
    )


@needs("uci_har.npz")
def test_uci_har():
    dataset = read_dataset("uci-har", SETS["uci-har"], None, FOLDER)
    assert dataset.x.shape == (10299, 9, 128)
    assert np.bincount(dataset.y).tolist() == [1722, 1544, 1406, 1777, 1906, 1944]
    assert len(np.unique(dataset.block)) == 857
    f = data.load("uci-har", data_dir=FOLDER, validation=0.1)
    assert (len(f.clients), f.shape, f.classes, f.notes) == (30, (9, 128), 6, ())
    assert all(len(c.test.y.unique()) == 6 for c in f.clients.values())
    assert all(len(c.validation.y.unique()) == 6 for c in f.clients.values())

    # Chains are whole on one side: no half of a window is a half of a window of another part.
    def halves(part):
        return {w.tobytes() for x in part.x.numpy() for w in (x[:, :64], x[:, 64:])}

    for c in list(f.clients.values())[:5]:
        assert not halves(c.train) & halves(c.test)
        assert not halves(c.validation) & halves(c.test)
        assert not halves(c.train) & halves(c.validation)
    # No window was dropped, as it would be where a chain is cut.
    assert sum(len(p) for c in f.clients.values() for p in (c.train, c.validation, c.test)) == 10299


@needs("uci_har.npz")
def test_uci_har_forecast():
    f = data.load("uci-har+uci-har-forecast", data_dir=FOLDER, clients=8)
    assert (len(f.clients), f.shape, f.classes) == (8, (9, 128), 72)
    dataset = read_dataset("uci-har-forecast", SETS["uci-har-forecast"], None, FOLDER)
    # All windows but the last of each of the 857 chains.
    assert len(dataset.x) == 10299 - 857
    assert dataset.targets.shape == (9442, 72)


@pytest.mark.slow
@needs("mnist.npz", "fashion_mnist.npz", "cifar10_test.npz")
def test_images_of_several_sets():
    names = "mnist+fashion-mnist+digits+cifar10:grey"
    f = data.load(names, data_dir=FOLDER, clients=8, partition="iid:10")
    assert (len(f.clients), f.shape, f.classes) == (8, (1, 32, 32), 10)
    # Standardised anew, so of mean 0 and deviation 1, but for which images were drawn.
    x = torch.cat([f.clients[k].train.x for k in (6, 7)])
    assert abs(float(x.mean())) < 0.3
    assert 0.7 < float(x.std()) < 1.3


@needs("wisdm_windows128.npz")
def test_wisdm():
    f = data.load("wisdm", data_dir=FOLDER)
    assert (len(f.clients), f.classes) == (36, 6)
    if f.shape == (3, 128):
        assert f.notes == ("windows are 128 steps, not the raw file",)
        with pytest.raises(InputError, match="order of its packed windows in time is lost"):
            data.load("wisdm", split="blocks", data_dir=FOLDER)


@needs("wisdm51_watch_acc_raw.npz")
def test_wisdm51():
    dataset = read_dataset("wisdm51", SETS["wisdm51"], None, FOLDER)
    assert dataset.x.shape == (29349, 3, 200)
    assert len(np.unique(dataset.user)) == 46
    assert len(dataset.labels) == len(np.unique(dataset.y)) == 18
    owned = [np.flatnonzero(dataset.user == u) for u in range(46)]
    for rows in split.split(dataset, owned, "blocks", 3):
        rest = np.sort(dataset.start[np.r_[rows.train, rows.validation]])
        assert min(np.abs(rest - s).min() for s in dataset.start[rows.test]) >= 200
        assert 0.15 < len(rows.test) / (len(rest) + len(rows.test)) < 0.3


@needs("mit_bih.npz")
def test_mit_bih():
    f = data.load("mit-bih", data_dir=FOLDER)
    assert (len(f.clients), f.shape, f.classes, f.split) == (47, (4, 128), 5, "blocks")
    assert "201+202" in f.names.values()
    # Beats whose windows overlap are not on both sides: some are in no part.
    examples = sum(len(c.train) + len(c.test) for c in f.clients.values())
    assert 62000 < examples <= 62762


@needs("audio_mnist.npz")
def test_audio_mnist():
    f = data.load("audio-mnist", data_dir=FOLDER)
    assert (len(f.clients), f.shape, f.classes) == (60, (1, 32, 32), 10)
    assert all(len(c.train) + len(c.test) == 500 for c in f.clients.values())
    assert sum(c.kind == "0" for c in f.clients.values()) == 12


@needs("mnist.npz")
def test_mnist():
    f = data.load("mnist", data_dir=FOLDER)
    assert (len(f.clients), f.shape) == (10, (1, 28, 28))
    assert sum(len(p) for c in f.clients.values() for p in (c.train, c.validation, c.test)) == 70000


@needs("cifar100_subset.npz")
def test_cifar100():
    f = data.load("cifar100", data_dir=FOLDER)
    assert (len(f.clients), f.shape, f.classes) == (50, (3, 32, 32), 100)
    assert f.notes == ("20,000 of 60,000 images, a third of the set",)


@pytest.mark.slow
@needs("cifar10_train_0.npz", "cifar10_train_1.npz", "cifar10_test.npz")
def test_cifar10():
    dataset = read_dataset("cifar10", SETS["cifar10"], None, FOLDER)
    assert dataset.x.shape == (60000, 3, 32, 32)
    assert dataset.y[:10].tolist() == [6, 9, 9, 4, 1, 1, 2, 7, 8, 3]
    means = dataset.x[:50000].mean(axis=(0, 2, 3)) / 255
    assert means.tolist() == pytest.approx([0.49140, 0.48216, 0.44653], abs=1e-5)
