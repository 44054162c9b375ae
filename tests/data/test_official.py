"""Clients that are tested on the test part that their data set was published with."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.data.test_named_set import cifar_batches, idx

import fedgrove
from fedgrove import data
from fedgrove.cli import main
from fedgrove.data import Federation
from fedgrove.data.dataset import Dataset
from fedgrove.data.split import split
from fedgrove.errors import InputError

TRAIN = 300
TEST = 60


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """MNIST's four files: image i has the class i mod 10 and is all of one grey, 10 times its class."""
    (tmp_path / "mnist").mkdir()
    for part, count in (("train", TRAIN), ("t10k", TEST)):
        y = np.arange(count) % 10
        # Images of the test part are brighter by 5: which part an image is from can be seen.
        grey = 10 * y + 5 * (part == "t10k")
        x = np.broadcast_to(grey[:, None, None], (count, 28, 28))
        (tmp_path / "mnist" / f"{part}-images-idx3-ubyte").write_bytes(idx(x))
        (tmp_path / "mnist" / f"{part}-labels-idx1-ubyte").write_bytes(idx(y))
    return tmp_path


def load(folder: Path, **options: object) -> Federation:
    given = {"partition": "classes:3", "clients": 4, "split": "official", **options}
    return data.load("mnist", data_dir=folder, standardise=False, **given)


def greys(x: torch.Tensor) -> list[int]:
    return (255 * x[:, 0, 0, 0]).round().int().tolist()


def test_rows_by_hand() -> None:
    # Rows 0 to 5 are for training, rows 6 to 9 are the official test part.
    y = np.array([0, 1, 2, 0, 1, 2, 0, 1, 2, 2])
    is_test = np.arange(10) >= 6
    dataset = Dataset(np.zeros((10, 1)), y, ("a", "b", "c"), is_test=is_test)
    one, two = split(dataset, [np.array([0, 2, 3]), np.array([1, 4])], "official", seed=0)
    # The first client has classes 0 and 2: test rows 6, 8 and 9. The second has class 1: row 7.
    assert one.train.tolist() == [0, 2, 3]
    assert one.test.tolist() == [6, 8, 9]
    assert (two.train.tolist(), two.test.tolist()) == ([1, 4], [7])
    assert not len(one.validation)


@pytest.mark.parametrize("validation", [0.0, 0.2])
def test_clients_are_tested_on_all_official_examples_of_their_classes(
    folder: Path, validation: float
) -> None:
    federation = load(folder, validation=validation)
    assert federation.split == "official"
    trained = 0
    for client in federation.clients.values():
        own = torch.cat([client.train.y, client.validation.y])
        classes = sorted(set(own.tolist()))
        assert len(classes) == 3
        # Six of the 60 test images have each class.
        assert sorted(client.test.y.tolist()) == sorted(6 * classes)
        assert greys(client.test.x) == [10 * label + 5 for label in client.test.y.tolist()]
        assert greys(client.train.x) == [10 * label for label in client.train.y.tolist()]
        assert (len(client.validation) > 0) == (validation > 0)
        trained += len(own)
    # Nothing of the training part is held out but for validation.
    assert trained == TRAIN
    assert any("all official test examples of the classes it has" in n for n in federation.notes)


def test_other_splits_divide_all_examples_as_before(folder: Path) -> None:
    random = load(folder, split="random")
    parts = [part for c in random.clients.values() for part in (c.train, c.test)]
    assert sum(map(len, parts)) == TRAIN + TEST


def test_test_inputs_are_stored_once(folder: Path) -> None:
    federation = load(folder, partition="iid")
    tests = [client.test for client in federation.clients.values()]
    assert all(test is tests[0] for test in tests)
    noisy = load(folder, partition="iid", scenario="drift")
    labels = {tuple(client.test.y.tolist()) for client in noisy.clients.values()}
    # The labels of 40 % of the clients are random, their images are those of all.
    assert len(labels) == 3
    shared = {client.test.shared.data_ptr() for client in noisy.clients.values()}
    assert len(shared) == 1
    again = pickle.loads(pickle.dumps(federation.clients[0].test))
    assert torch.equal(again.x, tests[0].x)
    x, y = again.take(torch.tensor([3, 0]))
    assert torch.equal(x, tests[0].x[[3, 0]])
    assert torch.equal(y, tests[0].y[[3, 0]])


def test_a_client_that_keeps_some_classes_is_tested_on_these(folder: Path) -> None:
    federation = load(folder, partition="iid", scenario="restricted:2")
    for client in federation.clients.values():
        classes = set(client.train.y.tolist())
        assert len(classes) == 2
        assert set(client.test.y.tolist()) == classes
        assert len(client.test) == 12


@pytest.mark.parametrize("engine", ["serial", "wired", "pool", "batched"])
def test_every_engine_scores_the_same_examples(folder: Path, engine: str) -> None:
    federation = load(folder, partition="classes:2")
    options = {"rounds": 1, "cohort": 4, "epochs": 3, "lr": 0.1, "net": "mlp", "progress": False}
    result = fedgrove.run("local", data=federation, engine=engine, **options)
    for k, client in federation.clients.items():
        raw = 255 * client.test.x.numpy()
        predicted = torch.from_numpy(result.model(k).outputs(raw)).argmax(1)
        right = (predicted == client.test.y).double().mean()
        assert result.summary["accuracy_clients"][str(k)] == pytest.approx(float(right))
    # With two of ten equally frequent classes, not by chance.
    assert result.summary["accuracy_mean"] > 0.4


def test_sets_know_their_test_part(tmp_path: Path) -> None:
    """CIFAR's is the last file; `:grey` keeps it."""
    inside = tmp_path / "cifar-10-batches-bin"
    inside.mkdir()
    names = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
    for name, blob in cifar_batches(1, names):
        (inside / name).write_bytes(blob)
    for name in ("cifar10", "cifar10:grey"):
        federation = data.load(
            name, data_dir=tmp_path, clients=3, partition="iid", split="official"
        )
        assert sum(len(client.train) for client in federation.clients.values()) == 300
        assert {len(client.test) for client in federation.clients.values()} == {60}


def test_data_without_an_official_test_part_are_refused() -> None:
    with pytest.raises(InputError) as error:
        data.load("digits", split="official")
    assert str(error.value) == (
        "split is official, and digits has no official test part, or its files do not tell it "
        "apart; use split random, or blocks if the data have blocks."
    )
    x = np.random.default_rng(0).normal(size=(20, 3))
    with pytest.raises(InputError, match="split is official, and arrays has no official test part"):
        data.from_arrays(x, np.arange(20) % 2, split="official")
    with pytest.raises(InputError, match="split is 'official'"):
        data.load("crowd", split="official")


def test_on_the_command_line(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--data", "mnist", "--data-dir", str(folder), "--clients", "4", "--rounds", "1"]
    words += ["--partition", "classes:3", "--engine", "serial", "--metric", "balanced_accuracy"]
    assert main(["run", "local", *words, "--split", "official", "--out", "a", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["split"] == "official"
    assert 0 <= summary["balanced_accuracy_pooled"] <= 1
    assert 'split = "official"' in Path("a/config.toml").read_text()
    about = json.loads(Path("a/models/preparation.json").read_text())
    assert {client["test"] for client in about["clients"].values()} == {18}
    assert main(["run", "local", *words, "--split", "random", "--out", "b"]) == 0
    capsys.readouterr()
    assert main(["compare", "a", "b", "--json"]) == 0
    # They are tested on different examples: neither is marked as the better one.
    assert main(["compare", "a", "b"]) == 0
    assert "* the best" not in capsys.readouterr().out
    assert main(["export", "a", "--client", "0", "--data-dir", str(folder)]) == 0
    capsys.readouterr()
    assert main(["run", "local", "--split", "official"]) == 2
    assert "--split is official, and digits has no official test part" in capsys.readouterr().err
    assert main(["run", "local", *words, "--split", "official", "--smoke"]) == 0
