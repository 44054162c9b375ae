"""Raw input prepared again is what the clients hold, to the bit."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from fedgrove import data
from fedgrove.data.preparation import IDENTITY, Preparation
from fedgrove.errors import InputError


def test_by_hand() -> None:
    # (5 - 1) / 2 = 2 and (0 - 4) / 4 = -1, channel by channel.
    own = Preparation(mean=(1.0, 4.0), std=(2.0, 4.0), shape=(2, 3), window=3)
    window = np.array([[5.0, 5.0, 1.0], [0.0, 4.0, 8.0]])
    wanted = [[2.0, 2.0, 0.0], [-1.0, 0.0, 1.0]]
    assert own.apply(window[None]).tolist() == [wanted]
    assert own.apply(window[None]).dtype == np.float32
    assert window[0, 0] == 5.0, "the caller's own array stays as it is"


def test_empty_changes_nothing() -> None:
    assert IDENTITY.changes_nothing
    assert IDENTITY.apply([[1, 2]]).tolist() == [[1.0, 2.0]]


@pytest.mark.parametrize("name", ["motion", "digits", "rooms"])
def test_what_clients_hold(name: str) -> None:
    """The raw federation, prepared, is the standardised one."""
    seen = data.load(name, clients=3)
    raw = data.load(name, clients=3, standardise=False)
    for k in seen.ids:
        own = seen.preparation_of(k)
        undone = raw.client(k).test.x.numpy()
        already = raw.preparation_of(k)
        if not already.changes_nothing:
            # Images without standardisation are still divided by their largest value.
            assert already.mean == (0.0,)
            assert already.std == (16.0,)
            undone = undone * 16
        assert np.array_equal(own.apply(undone), seen.client(k).test.x.numpy())
        assert own.labels == seen.labels
        assert own.shape == seen.shape


def test_mixed_clients_keep_their_own() -> None:
    both = data.load("motion+motion-forecast", clients=4)
    alone = data.load("motion", clients=2)
    assert both.preparation_of(1) == alone.preparation_of(1)


def test_json_loses_nothing() -> None:
    own = data.load("motion", clients=2).preparation_of(1)
    again = Preparation.from_json(json.loads(json.dumps(own.to_json())))
    assert again == own
    assert Preparation.from_json({}) == IDENTITY


@pytest.mark.parametrize(
    ("document", "wanted"),
    [
        ({"means": [1]}, "means"),
        ({"mean": [1.0]}, "together"),
        ({"mean": [1.0], "std": [0.0]}, "above 0"),
        ({"mean": [1.0], "std": [1.0, 1.0]}, "1 numbers"),
    ],
)
def test_bad_documents(document: dict[str, Any], wanted: str) -> None:
    with pytest.raises(InputError, match=wanted):
        Preparation.from_json(document)


def test_one_number_for_each_channel() -> None:
    with pytest.raises(
        InputError, match=r"mean is \(0\.0, 0\.0\); it must be a number for each of 3"
    ):
        Preparation(mean=(0.0,) * 2, std=(1.0,) * 2, shape=(3, 64))


def test_another_shape_is_refused() -> None:
    own = Preparation(mean=(0.0,) * 3, std=(1.0,) * 3, shape=(3, 64), window=64)
    with pytest.raises(InputError, match=r"\(64, 4\); it must be a batch of inputs \(3, 64\)"):
        own.apply(np.zeros((64, 4)))


def test_clients_without_names_are_called_by_their_numbers() -> None:
    assert data.load("digits", clients=3).name_of(2) == "2"
