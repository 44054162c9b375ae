"""The bytes counted are the bytes written, and the client that was sent them can read them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedgrove import trees
from fedgrove.core import Packet, Report, Task
from fedgrove.trees import Mask
from fedgrove.wire.codec import Bitmap, Delta, Dense, KnownMask, Smallest, can_refer_to_masks
from fedgrove.wire.known_state import KnownState
from fedgrove.wire.message import read_report, read_task, write_report, write_task
from fedgrove.wire.message_costs import (
    BroadcastCosts,
    count_report,
    count_task,
    find_masks_known_to_client,
    find_masks_known_to_server,
)

GENERATOR = torch.Generator().manual_seed(0)
VALUES = {"w": torch.randn(16, 16, generator=GENERATOR), "b": torch.randn(16, generator=GENERATOR)}
MASKS: list[Mask] = [{"w": torch.rand(16, 16, generator=GENERATOR) < 0.5} for _ in range(6)]
CODECS = [Dense(), Bitmap(), Delta(), Smallest()]


def packet(number: int) -> Packet:
    """A packet under one of the masks, or none; its trees are new objects."""
    if number == len(MASKS):
        return Packet(dict(VALUES))
    mask = {name: kept.clone() for name, kept in MASKS[number].items()}
    return Packet(trees.apply_mask(VALUES, mask), mask)


def total(cost: Mapping[str, int]) -> int:
    return sum(cost.values())


EVENTS = st.lists(
    st.tuples(
        st.integers(0, 4),
        st.sampled_from(["train", "evaluate", "lost"]),
        st.integers(0, len(MASKS)),
    ),
    max_size=30,
)


@pytest.mark.parametrize("codec", CODECS, ids=str)
@settings(max_examples=60, deadline=None)
@given(events=EVENTS)
def test_counts_are_lengths_and_clients_in_step_can_read(codec: Any, events: Any) -> None:
    state = KnownState()
    sent = BroadcastCosts()
    masks_of_client: dict[int, Mask] = {}
    for client, verb, number in events:
        if verb == "lost":
            state.forget(client)
            continue
        task = Task(client, {"model": packet(number)}, verb=verb)
        data = write_task(task, codec, find_masks_known_to_client(task, codec, state))
        assert total(count_task(task, codec, state, sent)) == len(data)

        own = masks_of_client.get(client)
        received = read_task(data, codec, {"model": KnownMask.of(own) if own is not None else None})
        assert trees.identical(received.send["model"].values, task.send["model"].values)
        mask = received.send["model"].mask
        assert trees.identical(mask or {}, task.send["model"].mask or {})
        if verb == "train" and mask is not None:
            masks_of_client[client] = mask

        report = Report(client, {"model": received.send["model"], "new": packet(0)}, 5)
        known = find_masks_known_to_server(task, report.give, codec, state.digest)
        data = write_report(report, codec, known)
        assert total(count_report(task, report, codec, state)) == len(data)
        back = read_report(data, codec, known)
        assert trees.identical(back.give["model"].values, task.send["model"].values)


def test_nothing_is_remembered_for_codecs_that_refer_to_nothing() -> None:
    for codec in CODECS:
        state = KnownState()
        count_task(Task(0, {"model": packet(0)}), codec, state, BroadcastCosts())
        assert (
            bool(state.digests) == can_refer_to_masks(codec) == isinstance(codec, Delta | Smallest)
        )


def test_a_codec_of_ones_own_may_refer_to_masks() -> None:
    class Own:
        pass

    assert can_refer_to_masks(Own())  # type: ignore[arg-type]


def test_scoring_leaves_no_trace() -> None:
    state = KnownState()
    count_task(Task(0, {"model": packet(0)}, verb="evaluate"), Delta(), state, BroadcastCosts())
    assert not state.digests
    count_task(Task(0, {"model": packet(0)}), Delta(), state, BroadcastCosts())
    before = state.state()
    count_task(Task(0, {"model": packet(1)}, verb="finetune"), Delta(), state, BroadcastCosts())
    after = state.state()
    assert after["clients"] == before["clients"]
    assert [row[:2] for row in after["bank"]] == [row[:2] for row in before["bank"]]


def test_values_are_measured_once_for_receivers_that_know_different_masks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = KnownState()
    sent = BroadcastCosts()
    for client in range(4):
        # The last of them knows what all are sent then.
        count_task(Task(client, {"model": packet(client + 2)}), Smallest(), state, sent)
    calls = []
    real = Smallest.measure
    monkeypatch.setattr(Smallest, "measure", lambda *given: calls.append(1) or real(*given))
    to_all = packet(5)
    costs = []
    for client in range(4):
        costs.append(count_task(Task(client, {"model": to_all}), Smallest(), state, sent))
    assert len(calls) == 1
    assert len({cost["values"] for cost in costs}) == 1
    assert [cost["mask"] > 0 for cost in costs] == [True, True, True, False]
