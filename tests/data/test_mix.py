"""Federations of several data sets: in Python, and by name with a + between them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import fedgrove
from fedgrove import data
from fedgrove.data.dataset import Dataset, Pixels
from fedgrove.data.mix import divide_clients, names_several, split_names, split_option
from fedgrove.data.sets.images import make_grey, turn_left
from fedgrove.errors import InputError
from fedgrove.problems import MixedProblem, client_marks


def test_clients_keep_their_task_and_targets():
    rooms = data.load("rooms", clients=3)
    digits = data.load("digits", clients=2)
    features = {k: replace(c, **flat(c)) for k, c in digits.clients.items()}
    digits = replace(digits, clients=features, shape=(64,))
    mixed = data.mix({"rooms": rooms, "digits": digits})
    assert [c.info.task for c in mixed.clients.values()] == ["rooms"] * 3 + ["digits"] * 2
    assert (mixed.shape, mixed.classes) == ((64,), 11)
    assert mixed.labels[:2] == ("rooms: temperature", "digits: 0")
    # Eight features, then zeros.
    x = mixed.clients[0].test.x
    assert torch.equal(x[:, :8], rooms.clients[0].test.x)
    assert not x[:, 8:].any()
    # A class stands in the one column that a number needs.
    y = mixed.clients[3].train.y
    assert y.dtype == torch.float32
    assert torch.equal(y[:, 0].long(), digits.clients[0].train.y)
    assert any("padded with zeros to (64,)" in note for note in mixed.notes)
    assert mixed.defaults.cohort == rooms.defaults.cohort + digits.defaults.cohort


def flat(client):
    parts = {}
    for name in ("train", "validation", "test"):
        part = getattr(client, name)
        parts[name] = replace(part, x=part.x.flatten(1))
    return parts


def test_the_same_labels_share_the_outputs():
    one = data.load("digits", clients=2)
    other = data.load("digits", clients=3, seed=1)
    mixed = data.mix({"a": one, "b": other})
    assert isinstance(mixed.problem, MixedProblem)
    assert mixed.classes == 10
    assert [task.first for task in mixed.problem.tasks] == [0, 0]
    assert mixed.clients[0].train.y.dtype == torch.int64


def test_what_cannot_be_mixed_is_refused():
    digits = data.load("digits", clients=2)
    rooms = data.load("rooms", clients=2)
    with pytest.raises(InputError, match="cannot be brought to one shape"):
        data.mix({"digits": digits, "rooms": rooms})
    with pytest.raises(InputError, match="two or more"):
        data.mix({"rooms": rooms})
    mixed = data.mix({"a": rooms, "b": data.load("tags", clients=2)})
    with pytest.raises(InputError, match="a is a mixed federation;"):
        data.mix({"a": mixed, "b": rooms})
    with pytest.raises(InputError, match="the clients of crowd are created when needed"):
        data.mix({"crowd": data.load("crowd", clients=2), "digits": digits})


# ---- by name: a+b ----------------------------------------------------------------------------------


def images(path: Path, shape: tuple[int, ...], classes: int, users: int = 4) -> str:
    """A file of images with as many users."""
    rng = np.random.default_rng(0)
    n = 20 * users
    x = rng.normal(size=(n, *shape)).astype(np.float32)
    np.savez(path, x=x, y=np.arange(n) % classes, client=np.arange(n) % users)
    return str(path)


def test_words() -> None:
    assert split_names("a+b") == {"a": "a", "b": "b"}
    assert split_option("split", None, ["a", "b"]) == [None, None]
    assert split_option("split", "random", ["a", "b"]) == ["random", "random"]
    assert divide_clients(None, ["a", "b"]) == [None, None]
    assert divide_clients(30, ["a", "b", "c"]) == [10, 10, 10]
    assert divide_clients(7, ["a", "b", "c"]) == [3, 2, 2]


@pytest.mark.parametrize("given", ["a+", "+", "a++b"])
def test_an_empty_name_is_refused(given: str) -> None:
    with pytest.raises(InputError, match="names with a \\+ between them"):
        data.load(given)


def test_a_file_whose_name_has_a_plus_is_one_set(tmp_path: Path) -> None:
    path = images(tmp_path / "a+b.npz", (1, 4, 4), classes=3)
    assert not names_several(path)
    assert len(data.load(path).clients) == 4


def test_clients_are_those_of_each_set_alone() -> None:
    """As equal numbers as can be, and to the bit what each set deals with the same seed."""
    both = data.load("motion+motion-forecast", clients=5, seed=3)
    motion = data.load("motion", clients=3, seed=3)
    ahead = data.load("motion-forecast", clients=2, seed=3)
    assert (len(both.clients), both.name, both.shape) == (5, "motion+motion-forecast", (3, 64))
    tasks = [client.info.task for client in both.clients.values()]
    assert tasks == ["motion"] * 3 + ["motion-forecast"] * 2
    for k in range(3):
        mine = both.clients[k]
        assert torch.equal(mine.train.x, motion.clients[k].train.x)
        # Classes stand in the first of the forecasts' columns.
        assert torch.equal(mine.train.y[:, 0].long(), motion.clients[k].train.y)
    for k in range(2):
        assert torch.equal(both.clients[3 + k].test.y, ahead.clients[k].test.y)
    # 3 channels, 8 samples each; the 5 activities are the first of these outputs.
    assert both.classes == 24
    assert isinstance(both.problem, MixedProblem)
    assert [(task.first, task.outputs) for task in both.problem.tasks] == [(0, 5), (0, 24)]


def test_images_are_brought_to_one_shape(tmp_path: Path) -> None:
    """Grey 2 x 2 beside colours 4 x 4: resized, and the channel repeated."""
    small = images(tmp_path / "small.npz", (1, 2, 2), classes=2)
    large = images(tmp_path / "large.npz", (3, 4, 4), classes=5)
    both = data.load(f"{small}+{large}")
    assert (both.shape, both.classes, len(both.clients)) == ((3, 4, 4), 5, 8)
    raw = data.load(small).clients[0].train.x[0, 0]
    (a, b), (c, d) = raw
    x = both.clients[0].train.x[0]
    assert torch.equal(x[0], x[1])
    assert torch.equal(x[0], x[2])
    # Sample centres of 4 on 2 lie at -.25, .25, .75 and 1.25, the outer ones held at the edge.
    top = torch.stack([a, 0.75 * a + 0.25 * b, 0.25 * a + 0.75 * b, b])
    bottom = torch.stack([c, 0.75 * c + 0.25 * d, 0.25 * c + 0.75 * d, d])
    expected = torch.stack([top, 0.75 * top + 0.25 * bottom, 0.25 * top + 0.75 * bottom, bottom])
    assert torch.allclose(x[0], expected, atol=1e-6)
    (note,) = [note for note in both.notes if note.startswith("small: images")]
    assert note == (
        "small: images (1, 2, 2) to (3, 4, 4): resized (bilinear), grey channel repeated"
    )
    # A client of the narrow task can never say one of the other outputs.
    assert isinstance(both.problem, MixedProblem)
    own = client_marks(both.problem, both.classes, None, "small")
    outputs = torch.tensor([[0.0, 1.0, 9.0, 9.0, 9.0]])
    sums = both.problem.sums(outputs, torch.tensor([1]), torch.ones(1), own)
    assert both.problem.select_sums(sums, "small")["correct"] == 1
    assert both.labels[0] == "small: 0 | large: 0"
    assert both.labels[4] == "large: 4"


def test_an_empty_part_has_the_common_shape(tmp_path: Path) -> None:
    small = images(tmp_path / "small.npz", (1, 2, 2), classes=2)
    large = images(tmp_path / "large.npz", (1, 4, 4), classes=2)
    both = data.load(f"{small}+{large}", validation=0)
    assert both.clients[0].validation.x.shape == (0, 1, 4, 4)


def test_channels_that_are_neither_one_nor_equal_are_refused(tmp_path: Path) -> None:
    two = images(tmp_path / "two.npz", (2, 4, 4), classes=2)
    three = images(tmp_path / "three.npz", (3, 4, 4), classes=2)
    with pytest.raises(InputError, match=r"two \(2, 4, 4\), three \(3, 4, 4\) cannot be brought"):
        data.load(f"{two}+{three}")


def test_grey() -> None:
    """.299 R + .587 G + .114 B, in whole steps: 100, 200 and 50 give 29.9 + 117.4 + 5.7 = 153."""
    x = np.array([[[[100]], [[200]], [[50]]], [[[0]], [[0]], [[0]]]], dtype=np.uint8)
    colours = Dataset(x, np.zeros(2, int), ("a",), pixels=Pixels(255.0, (0.0,) * 3, (1.0,) * 3))
    made = make_grey("mine:grey", colours)
    assert made.x.tolist() == [[[[153]]], [[[0]]]]
    assert made.pixels is not None
    # Mean and deviation of 153 / 255 = .6 and 0.
    assert made.pixels.mean == pytest.approx((0.3,))
    assert made.pixels.deviation == pytest.approx((0.3,))
    with pytest.raises(InputError, match="digits:grey has no colours"):
        data.load("digits:grey")
    with pytest.raises(InputError, match="there is no data set 'digits:gray'"):
        data.load("digits:gray")


def test_turned() -> None:
    """A quarter to the left: the right column is the upper row."""
    x = np.array([[[[1, 2], [3, 4]]]])
    made = turn_left("mine:turned", Dataset(x, np.zeros(1, int), ("a",)))
    assert made.x.tolist() == [[[[2, 4], [1, 3]]]]
    both = data.load("digits+digits:turned", clients=4, partition="iid")
    upright, other = both.clients[0], both.clients[2]
    assert (upright.info.task, other.info.task) == ("digits", "digits:turned")
    # One seed deals both sets alike, so that the images are the same ones. They were standardised
    # by means over all pixels, which turning does not change.
    assert torch.allclose(torch.rot90(upright.train.x, dims=(2, 3)), other.train.x, atol=1e-5)
    with pytest.raises(InputError, match="motion:turned has no images to turn"):
        data.load("motion:turned")


def test_a_word_for_each_set_comes_back_from_config() -> None:
    mixed = data.load("rooms+tags", clients=4, partition="iid+natural")
    assert mixed.partition == "iid+natural"
    assert mixed.split == "random"
    again = data.load("rooms+tags", clients=4, partition=mixed.partition, split=mixed.split)
    for k, client in mixed.clients.items():
        assert torch.equal(client.train.x, again.clients[k].train.x)
    with pytest.raises(InputError, match="one for all 2 data sets, or one for each"):
        data.load("rooms+tags", partition="iid+iid+iid")


def test_devices_go_by_the_numbers_of_the_whole(tmp_path: Path) -> None:
    profile = tmp_path / "mine.csv"
    lines = ["client,up,down,speed,memory"]
    lines += [f"{k},{k + 1},10,1,1000" for k in range(4)]
    profile.write_text("\n".join(lines))
    mixed = data.load("rooms+tags", clients=4, profile=str(profile))
    assert [client.info.up for client in mixed.clients.values()] == [1, 2, 3, 4]
    assert [client.info.task for client in mixed.clients.values()] == ["rooms"] * 2 + ["tags"] * 2
    assert list(mixed.files) == [str(profile)]
    with pytest.raises(InputError, match="has no line for client 4"):
        data.load("rooms+tags", clients=5, profile=str(profile))


def test_own_outputs_are_still_there() -> None:
    parts = {"a": data.load("rooms", clients=2), "b": data.load("tags", clients=2)}
    assert data.mix(parts).classes == 6
    assert data.mix(parts, outputs="shared").classes == 5
    with pytest.raises(InputError, match="outputs is 'none'; it must be own or shared"):
        data.mix(parts, outputs="none")


def test_figures_of_each_task() -> None:
    result = fedgrove.run(
        "ifca", data="motion+motion-forecast", clients=4, cohort=3, rounds=2, epochs=1,
        engine="serial", progress=False,
    )  # fmt: skip
    summary = result.summary
    tasks = summary["tasks"]
    assert [task["clients"] for task in tasks.values()] == [2, 2]
    assert [task["metric"] for task in tasks.values()] == ["accuracy", "rmse"]
    for direction in ("bytes_up", "bytes_down"):
        assert sum(task[direction] for task in tasks.values()) == summary[direction]
    lines = result.folder.metrics()
    for line in lines:
        own = line["bytes_tasks"].values()
        assert sum(task["bytes_up"] for task in own) == line["bytes_up"]
        assert 0 < line["purity"] <= 1
        assert line["groups"] >= 1
    assert summary["purity"] == lines[-1]["purity"]
