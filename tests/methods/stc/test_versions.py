"""Versions of a published model: what a client is sent brings it to the newest, and history is bounded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from fedgrove import trees
from fedgrove.core import Carry, Packet
from fedgrove.methods.stc import versions
from fedgrove.methods.stc.ternary import SparseTernary
from fedgrove.runs.checkpoint import state_from_json, state_to_json
from fedgrove.trees import Tree
from fedgrove.wire.codec import Smallest


def vector(*numbers: float) -> Tree:
    return {"w": torch.tensor(numbers)}


def one_of(place: int, value: float, length: int = 8) -> Tree:
    update = torch.zeros(length)
    update[place] = value
    return {"w": update}


def received(
    state: versions.Versions, client: int, memory: Carry, start: Tree, group: int = 0
) -> Tree:
    """What a client holds once it has read what it is sent."""
    carry = dict(memory)
    for name, packet in versions.packets(state, client, group).items():
        carry[name] = packet.values
    model, rest = versions.receive(carry, start)
    assert not rest
    return model


def test_by_hand() -> None:
    """Version 3 is 0 + (1 at 0) + (2 at 1) + (-1 at 0). Who holds version 1 is sent (2 at 1) and (-1 at 0) as one."""
    start = vector(*[0.0] * 8)
    state = versions.first(start)
    assert versions.packets(state, 7) == {}
    state = versions.publish(state, one_of(0, 1.0), room=10)
    state = versions.note(state, [7])
    state = versions.publish(state, one_of(1, 2.0), room=10)
    state = versions.publish(state, one_of(0, -1.0), room=10)
    assert state.numbers == {0: 3}
    assert state.models[0]["w"].tolist() == [0.0, 2.0, 0, 0, 0, 0, 0, 0]
    send = versions.packets(state, 7)
    assert list(send) == ["missed0"]
    assert send["missed0"].values["w"].tolist() == [-1.0, 2.0, 0, 0, 0, 0, 0, 0]
    held = {"held": vector(1.0, 0, 0, 0, 0, 0, 0, 0)}
    assert trees.equal(received(state, 7, held, start), state.models[0])
    # A client that was never asked holds version 0.
    assert trees.equal(received(state, 8, {}, start), state.models[0])


def test_too_old_is_sent_whole_and_forgotten() -> None:
    """An update takes 8 bytes, the model 32: room for a quarter of a model is room for one update."""
    start = vector(*[0.0] * 8)
    state = versions.note(versions.first(start), [1])
    for place in range(3):
        state = versions.publish(state, one_of(place, 1.0), room=0.25)
        if place == 1:
            state = versions.note(state, [2])
    assert len(state.updates[0]) == 1
    assert list(versions.packets(state, 1)) == ["model"]
    assert list(versions.packets(state, 2)) == ["missed0"]
    # Of client 1 nothing is known any more; it is told from nobody else by that.
    assert state.client_versions == {2: (0, 2)}
    old = {"held": vector(*[9.0] * 8)}
    assert trees.equal(received(state, 1, old, start), state.models[0])


def test_without_room_all_is_sent_whole() -> None:
    state = versions.publish(versions.first(vector(*[0.0] * 8)), one_of(0, 1.0), room=0)
    assert list(versions.packets(state, 0)) == ["model"]


def test_a_whole_version_has_no_history() -> None:
    state = versions.publish(versions.first(vector(*[0.0] * 8)), one_of(0, 1.0), room=9)
    state = versions.publish_whole(state, vector(*[2.0] * 8))
    assert (state.numbers, state.updates) == ({0: 2}, {0: ()})
    assert list(versions.packets(state, 0)) == ["model"]
    state = versions.publish(versions.note(state, [3]), one_of(0, 1.0), room=9)
    assert list(versions.packets(state, 3)) == ["missed0"]


def test_what_takes_more_than_the_model_is_not_sent() -> None:
    """Eight of eight: no places to say, a sign each, 8 bits. The model has 256: 32 updates take as much."""
    state = versions.first(vector(*[0.0] * 8))
    for _ in range(31):
        state = versions.publish(state, vector(*[1.0] * 8), room=100)
    assert list(versions.packets(state, 0))[:2] == ["missed0", "missed1"]
    state = versions.publish(state, vector(*[1.0] * 8), room=100)
    assert list(versions.packets(state, 0)) == ["model"]


def test_clients_of_one_version_share_packets() -> None:
    """So that they are made, and their bytes counted, once."""
    state = versions.publish(versions.first(vector(*[0.0] * 8)), one_of(0, 1.0), room=9)
    known: dict = {}
    first = versions.packets(state, 1, known=known)
    assert versions.packets(state, 2, known=known) is first


def test_sums_of_five_updates_take_about_what_the_updates_take() -> None:
    """Sums of five have 243 values at most, which a book holds; one sum of twelve takes far more."""
    g = torch.Generator().manual_seed(0)
    model = {"w": torch.zeros(50_000)}
    state = versions.first(model)
    alone = 0
    everything = model
    for _ in range(12):
        update = SparseTernary(0.1)({"w": torch.randn(50_000, generator=g)})
        state = versions.publish(state, update, room=20)
        everything = trees.map(torch.add, everything, update)
        alone += sum(Smallest().cost(Packet(update)).values())
    send = versions.packets(state, 0)
    assert list(send) == ["missed0", "missed1", "missed2"]
    cost = sum(sum(Smallest().cost(packet).values()) for packet in send.values())
    assert cost <= 1.05 * alone
    assert 1.5 * cost < sum(Smallest().cost(Packet(everything)).values())


# ---- groups --------------------------------------------------------------------------------------


def test_groups_share_the_history_before_they_branched() -> None:
    start = vector(*[0.0] * 8)
    state = versions.note(versions.first(start), [1, 2])
    state = versions.publish(state, one_of(0, 1.0), room=9)
    state = versions.branch(state, [1, 2])
    state = versions.publish(state, one_of(1, 1.0), room=9, group=1)
    state = versions.publish(state, one_of(2, 1.0), room=9, group=2)
    assert set(state.models) == {1, 2}
    # Held before they branched: the updates of before, and of the group since.
    assert received(state, 1, {"held": start}, start, 1)["w"].tolist()[:3] == [1.0, 1.0, 0.0]
    assert received(state, 1, {"held": start}, start, 2)["w"].tolist()[:3] == [1.0, 0.0, 1.0]
    # Held since: whoever changes the group is sent the model whole.
    state = versions.note(state, [1], group=1)
    assert versions.packets(state, 1, 1) == {}
    assert list(versions.packets(state, 1, 2)) == ["model"]
    # A group of a group; what was held of the first still leads to it, what was held of the other does not.
    state = versions.publish(versions.branch(state, [3, 4], of=1), one_of(3, 1.0), room=9, group=3)
    assert list(versions.packets(state, 1, 3)) == ["missed0"]
    assert versions.packets(state, 1, 4) == {}
    state = versions.note(state, [2], group=2)
    assert list(versions.packets(state, 2, 3)) == ["model"]
    assert trees.equal(received(state, 9, {}, start, 3), state.models[3])


def test_a_group_may_stay_beside_those_that_branch_off() -> None:
    """It goes its own way from then on, as they do; what was held before leads to all of them."""
    start = vector(0.0, 0.0, 0.0)
    state = versions.note(versions.publish(versions.first(start), vector(1.0, 0.0, 0.0), 9), [1])
    state = versions.branch(state, [1], stays=True)
    state = versions.publish(state, vector(0.0, 1.0, 0.0), room=9)
    state = versions.publish(state, vector(0.0, 0.0, 1.0), room=9, group=1)
    assert state.models[0]["w"].tolist() == [1.0, 1.0, 0.0]
    assert state.models[1]["w"].tolist() == [1.0, 0.0, 1.0]
    for group in (0, 1):
        assert list(versions.packets(state, 1, group)) == ["missed0"]
        assert trees.equal(received(state, 9, {}, start, group), state.models[group])
    state = versions.note(state, [1])
    assert versions.packets(state, 1) == {}
    assert list(versions.packets(state, 1, 1)) == ["model"]


def test_who_changes_groups_after_long_is_sent_the_model_whole() -> None:
    """Room for two updates: group 1's history has left a client behind, group 2's is complete.

    Nothing known of the client would say that it holds version 0, to which group 2's updates lead.
    """
    start = vector(*[0.0] * 8)
    state = versions.branch(versions.first(start), [1, 2])
    state = versions.publish(state, one_of(2, 1.0), room=0.5, group=2)
    held = {"held": start}
    for place in range(5):
        if place == 1:
            held = {"held": state.models[1]}
            state = versions.note(state, [7], group=1)
        state = versions.publish(state, one_of(place, 1.0), room=0.5, group=1)
    assert list(versions.packets(state, 7, 1)) == ["model"]
    assert trees.equal(received(state, 7, held, start, 2), state.models[2])
    # Once no history reaches back to what it holds, nothing need be known of it.
    for place in range(3):
        state = versions.publish(state, one_of(place, 1.0), room=0.5, group=2)
    assert state.client_versions == {}
    assert trees.equal(received(state, 7, held, start, 2), state.models[2])


def test_what_is_of_no_use_is_sent_whole() -> None:
    """Whatever the history reaches back to, and until the client has reported again."""
    start = vector(0.0, 0.0, 0.0)
    state = versions.publish(versions.first(start), vector(1.0, 0.0, 0.0), room=9)
    state = versions.forget(versions.note(state, [1, 2]), [1, 3])
    for _ in range(2):
        assert [list(versions.packets(state, client)) for client in (1, 3)] == [["model"]] * 2
        assert "model" not in versions.packets(state, 2)
        state = versions.publish(state, vector(0.0, 1.0, 0.0), room=9)
    assert versions.packets(versions.note(state, [1]), 1) == {}


# ---- all that may happen -------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 3), max_size=3), min_size=1, max_size=14),
    st.sampled_from([0.0, 0.3, 1.0, 5.0]),
    st.integers(0, 99),
)
def test_whoever_takes_part_when_holds_the_published_model(turns, room: float, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    start = {"a": torch.randn(5, 4, generator=g), "b": torch.randn(10, generator=g)}
    state = versions.first(start)
    memories: dict[int, Carry] = {}
    for cohort in turns:
        for client in set(cohort):
            model = received(state, client, memories.get(client, {}), start)
            assert trees.distance(model, state.models[0]) < 1e-5
            memories[client] = {"held": model}
        state = versions.note(state, set(cohort))
        update = trees.map(lambda leaf: torch.randn(leaf.shape, generator=g), start)
        state = versions.publish(state, SparseTernary(0.2)(update), room)
        # Bounded, whoever takes part: 6 of 30 numbers with their places take 48 bytes, the model 120.
        assert len(state.updates[0]) <= room * 120 / 48
        assert len(state.client_versions) <= 4


def test_it_can_be_written_and_read() -> None:
    state = versions.note(versions.first(vector(0.0, 0.0)), [4])
    state = versions.branch(versions.publish(state, vector(0.0, 2.0), room=9), [1, 2])
    tensors: Tree = {}
    frozen = state_to_json(state, tensors)
    again = state_from_json(frozen, tensors, versions.first(vector(0.0, 0.0)))
    assert (again.numbers, again.origins, again.client_versions) == (
        state.numbers,
        state.origins,
        state.client_versions,
    )
    assert trees.equal(again.models[2], state.models[2])
    assert trees.equal(again.updates[1][0], state.updates[1][0])


def test_bits_by_hand() -> None:
    """A quarter of 16 places: H(1/4) = .8113 bits each, 12.98; and four signs."""
    assert versions.update_bits(16, 4) == pytest.approx(16 * 0.811278 + 4, abs=1e-4)
    assert versions.update_bits(16, 0) == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("numbers", {0: "x"}),
        ("numbers", {0: True}),
        ("client_versions", {4: 5}),
        ("client_versions", {4: (0, 1, 2)}),
        ("client_versions", {"x": (0, 1)}),
        ("models", {0: {"w": 1.5}}),
        ("updates", {0: "xy"}),
    ],
)
def test_a_value_of_another_type_than_declared_is_refused(field: str, value: Any) -> None:
    """In a checkpoint that somebody edited: the method would fail where it uses the value."""
    state = versions.note(versions.first(vector(0.0, 0.0)), [4])
    tensors: Tree = {}
    frozen = state_to_json(replace(state, **{field: value}), tensors)
    with pytest.raises(ValueError, match=f"{field} of the state does not have the type it is decl"):
        state_from_json(frozen, tensors, versions.first(vector(0.0, 0.0)))
