"""Federations of several data sets."""

from dataclasses import replace

import pytest
import torch

from fedgrove import data
from fedgrove.errors import InputError
from fedgrove.problems import MixedProblem


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
    assert any("filled up with zeros to (64,)" in note for note in mixed.notes)
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
    with pytest.raises(InputError, match="a is a mixed federation itself"):
        data.mix({"a": mixed, "b": rooms})
    with pytest.raises(InputError, match="the clients of crowd are made when they are needed"):
        data.mix({"crowd": data.load("crowd", clients=2), "digits": digits})
