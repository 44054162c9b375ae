"""Models of which a client keeps a part."""

from __future__ import annotations

import torch
from torch import nn

from fedgrove import trees
from fedgrove.core import Carry, Client, ClientInfo
from fedgrove.nets import Net
from fedgrove.parts.personal import complete, share_received, use_personal

NET = Net(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), (2,))
LAYOUT = NET.layout
START = {name: torch.zeros(shape) for name, shape in LAYOUT.shapes.items()}
CLIENT = Client(0, ClientInfo(1), None, {}, NET, START, 0)  # type: ignore[arg-type]


def ones(*names: str, value: float = 1.0) -> trees.Tree:
    return {name: torch.full(LAYOUT.shapes[name], value) for name in names}


def values(tree: trees.Tree) -> dict[str, float]:
    return {k: float(v.flatten()[0]) for k, v in tree.items()}


def test_at_first_the_rest_comes_from_the_start() -> None:
    carry = complete({"model": ones("1.bias", "1.weight"), "aux": {}}, CLIENT)
    assert values(carry["model"]) == {
        "0.weight": 0.0,
        "0.bias": 0.0,
        "1.weight": 1.0,
        "1.bias": 1.0,
    }
    assert list(carry["model"]) == list(LAYOUT.shapes)
    assert list(carry["received"]) == ["1.bias", "1.weight"]
    assert "aux" in carry


def test_later_the_rest_comes_from_what_was_kept_and_what_is_received_wins() -> None:
    carry: Carry = {
        "model": ones("1.weight"),
        "kept": ones("0.weight", "0.bias", "1.weight", "1.bias", value=5.0),
    }
    whole = complete(carry, CLIENT)["model"]
    assert values(whole) == {"0.weight": 5.0, "0.bias": 5.0, "1.weight": 1.0, "1.bias": 5.0}
    assert list(carry) == ["model", "kept"]
    assert list(carry["model"]) == ["1.weight"]


def test_a_client_that_receives_nothing_uses_its_own() -> None:
    carry = complete({"kept": ones(*LAYOUT.shapes, value=2.0)}, CLIENT)
    assert set(values(carry["model"]).values()) == {2.0}
    assert carry["received"] == {}


def test_what_came_goes_back_and_the_rest_stays() -> None:
    local = ones(*LAYOUT.shapes, value=3.0)
    outcome = share_received({"received": ones("1.weight"), "local": local}, CLIENT)
    assert list(outcome.give["model"].values) == ["1.weight"]
    assert list(outcome.memory["kept"]) == ["0.weight", "0.bias", "1.bias"]
    assert trees.equal({**outcome.give["model"].values, **outcome.memory["kept"]}, local)


def test_all_or_nothing_leaves_the_other_out() -> None:
    local = ones(*LAYOUT.shapes)
    everything = share_received({"received": local, "local": local}, CLIENT)
    assert (set(everything.give), dict(everything.memory)) == ({"model"}, {})
    nothing = share_received({"received": {}, "local": local}, CLIENT)
    assert (dict(nothing.give), set(nothing.memory)) == ({}, {"kept"})


def test_a_client_uses_its_personal_model_then_what_it_received_then_the_start() -> None:
    received = ones("1.bias")
    own = ones("1.bias", value=2.0)
    # Without the entry "personal": clients with and without one are scored in one batch.
    assert use_personal({"model": received, "personal": own}, CLIENT) == {"model": own}
    assert use_personal({"model": received}, CLIENT) == {"model": received}
    assert use_personal({}, CLIENT) == {"model": START}
