"""What receivers hold: digests by client, a bank of contents that is bounded and shared."""

from __future__ import annotations

import gc
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import federation

from fedgrove import methods, trees
from fedgrove.channels.find_groups import find_groups, make_channel_mask
from fedgrove.nets import Net, build
from fedgrove.runs.checkpoint import state_from_json, state_to_json
from fedgrove.runs.folder import RunFolder
from fedgrove.runs.memory import Memory
from fedgrove.runs.run import Run
from fedgrove.trees import Mask
from fedgrove.wire import known_state
from fedgrove.wire.codec import KnownMask, hash_mask
from fedgrove.wire.known_state import KnownState, StoredMask

# As values in float32, a mask of these takes 4 * (40 * 20 + 10) = 3,240 bytes.
SHAPES = {"w": (40, 20), "b": (10,)}


def drawn(seed: int, shapes: Mapping[str, tuple[int, ...]] = SHAPES, density: float = 0.5) -> Mask:
    generator = torch.Generator().manual_seed(seed)
    return {k: torch.rand(shape, generator=generator) < density for k, shape in shapes.items()}


def frozen_and_thawed(client_masks: KnownState) -> KnownState:
    """As a checkpoint writes and reads it."""
    tensors: trees.Tree = {}
    text = json.dumps(state_to_json(client_masks.state(), tensors))
    back = KnownState()
    back.restore(state_from_json(json.loads(text), tensors))
    return back


# ---- what is known -------------------------------------------------------------------------------


def test_a_client_holds_what_it_was_sent_last() -> None:
    client_masks = KnownState()
    assert client_masks.known(3, "model", drawn(0)) is None
    client_masks.note(3, "model", drawn(0))
    client_masks.note(3, "other", drawn(1))
    client_masks.note(3, "model", None)
    for mask in (drawn(0), drawn(5)):
        known = client_masks.known(3, "model", mask)
        assert known is not None
        assert trees.identical(known.mask, drawn(0))
        assert known.digest == KnownMask.of(drawn(0)).digest
    assert client_masks.known(4, "model", drawn(0)) is None
    client_masks.note(3, "model", drawn(2))
    known = client_masks.known(3, "model", drawn(0))
    assert known is not None
    assert trees.identical(known.mask, drawn(2))


def test_what_is_forgotten_is_unknown_and_takes_no_room() -> None:
    client_masks = KnownState()
    for client in (1, 2):
        client_masks.note(client, "model", drawn(0))
        client_masks.note(client, "other", drawn(client))
    client_masks.forget(1)
    client_masks.forget(7)
    assert client_masks.known(1, "model", drawn(0)) is None
    assert client_masks.known(1, "other", drawn(1)) is None
    assert client_masks.known(2, "model", drawn(9)) is not None
    assert set(client_masks.bank) == {hash_mask(drawn(0)), hash_mask(drawn(2))}
    client_masks.forget(2)
    assert not client_masks.bank
    assert not client_masks.digests


def test_clients_share_the_contents_of_equal_masks() -> None:
    client_masks = KnownState()
    for client in range(50):
        client_masks.note(client, "model", drawn(client % 2))
    assert len(client_masks.bank) == 2


def test_a_mask_whose_contents_fell_out_is_still_recognised() -> None:
    client_masks = KnownState()
    for client in range(100):
        client_masks.note(client, "model", drawn(client))
    assert hash_mask(drawn(0)) not in client_masks.bank
    # Unchanged: the digest says all. Changed: nobody knows any more what it changed from.
    known = client_masks.known(0, "model", drawn(0))
    assert known is not None
    assert trees.identical(known.mask, drawn(0))
    assert client_masks.known(0, "model", drawn(1)) is None
    # The newest are there.
    assert client_masks.known(99, "model", drawn(1)) is not None


def test_the_bank_takes_the_room_of_one_model() -> None:
    client_masks = KnownState()
    used = []
    for client in range(100):
        client_masks.note(client, "model", drawn(client))
        used.append(sum(contents.bytes for contents in client_masks.bank.values()))
    assert client_masks.room == 4 * (40 * 20 + 10)
    assert max(used) <= client_masks.room
    # 810 bits are 102 bytes; with names and checksum about 140: some twenty fit.
    assert 15 < len(client_masks.bank) < 32


def test_the_newest_contents_stay_even_in_a_tiny_model() -> None:
    """Names and checksum alone take more than the 8 bytes of two weights."""
    client_masks = KnownState()
    for client in range(3):
        client_masks.note(client, "model", {"w": torch.tensor([client == 1, client == 2])})
        assert len(client_masks.bank) == 1
    assert client_masks.known(2, "model", {"w": torch.tensor([True, True])}) is not None


# ---- contents ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mask",
    [
        {},
        drawn(0),
        {"w": torch.ones(3, 4, dtype=torch.bool), "b": torch.zeros(5, dtype=torch.bool)},
        {"w": torch.zeros(0, 3, dtype=torch.bool), "s": torch.tensor(True)},
        {"w": drawn(1)["w"].T},
    ],
    ids=["none", "some", "constant", "empty", "transposed"],
)
def test_contents_come_back(mask: Mask) -> None:
    assert trees.identical(StoredMask.of(mask).mask(), mask)


def test_a_mask_of_channels_takes_a_bit_per_channel() -> None:
    rows = torch.arange(512) % 3 > 0
    columns = torch.arange(512) % 5 > 0
    mask = {"w": (rows[:, None] & columns)[:, :, None, None].expand(512, 512, 3, 3)}
    contents = StoredMask.of(mask)
    # 1,024 channels are 128 bytes; 2.4 million weights would be 295 kB.
    assert contents.bytes < 200
    assert trees.identical(contents.mask(), {"w": mask["w"].contiguous()})


def test_a_digest_is_computed_once_for_the_same_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    computed = []

    def counting(mask: Mask) -> bytes:
        computed.append(mask)
        return hash_mask(mask)

    monkeypatch.setattr(known_state, "hash_mask", counting)
    client_masks = KnownState()
    mask = drawn(0)
    assert client_masks.digest(mask) == client_masks.digest(dict(mask)) == hash_mask(mask)
    assert len(computed) == 1
    assert client_masks.digest({"w": mask["w"]}) == hash_mask({"w": mask["w"]})
    assert client_masks.digest({"b": mask["w"], "w": mask["b"]}) != client_masks.digest(mask)


def test_a_digest_follows_what_is_written_into_a_mask() -> None:
    client_masks = KnownState()
    mask = drawn(0)
    before = client_masks.digest(mask)
    name = next(iter(mask))
    mask[name].logical_not_()
    assert client_masks.digest(mask) == hash_mask(mask) != before
    with torch.inference_mode():
        uncounted = {name: kept.clone() for name, kept in mask.items()}
        before = client_masks.digest(uncounted)
        uncounted[name].logical_not_()
        assert client_masks.digest(uncounted) == hash_mask(uncounted) != before


def test_a_digest_is_never_that_of_a_mask_which_is_gone() -> None:
    """Tensors that are freed leave their ids to others."""
    client_masks = KnownState()
    for seed in range(300):
        mask = drawn(seed, {"w": (3, 3)})
        assert client_masks.digest(mask) == hash_mask(mask)
        del mask
        gc.collect(0)


# ---- any sequence of events ----------------------------------------------------------------------

# Small ones, so that ten clients with two packets hold more than the bank has room for: the values
# take 4 * 64 bytes, the contents of a mask about 35.
MASKS = [drawn(seed, {"w": (8, 8)}) for seed in range(40)]
EVENTS = st.lists(
    st.tuples(
        st.integers(0, 9), st.sampled_from(["model", "other", None]), st.integers(0, len(MASKS) - 1)
    ),
    max_size=80,
)


def happen(client_masks: KnownState, events: Any, truth: dict[tuple[int, str], Mask]) -> None:
    """Apply events: a packet received, or (None) a client forgotten."""
    for client, packet, number in events:
        if packet is None:
            client_masks.forget(client)
            for key in [key for key in truth if key[0] == client]:
                del truth[key]
            continue
        # Another object each time, as methods make them.
        client_masks.note(client, packet, {k: v.clone() for k, v in MASKS[number].items()})
        truth[client, packet] = MASKS[number]


@settings(max_examples=150, deadline=None)
@given(EVENTS, EVENTS)
def test_it_is_right_bounded_and_exact_after_a_checkpoint(before: Any, after: Any) -> None:
    truth: dict[tuple[int, str], Mask] = {}
    client_masks = KnownState()
    happen(client_masks, before, truth)
    resumed = frozen_and_thawed(client_masks)
    happen(resumed, after, dict(truth))
    happen(client_masks, after, truth)

    used = sum(contents.bytes for contents in client_masks.bank.values())
    assert used <= client_masks.room or len(client_masks.bank) == 1 or not client_masks.bank
    # Nothing is kept that nobody holds.
    assert set(client_masks.bank) <= {hash_mask(mask) for mask in truth.values()}
    for client in range(10):
        for packet in ("model", "other"):
            mask = truth.get((client, packet))
            for coming in (MASKS[0], mask):
                if coming is None:
                    continue
                known = client_masks.known(client, packet, coming)
                again = resumed.known(client, packet, coming)
                assert (known is None) == (again is None)
                if known is not None:
                    assert mask is not None
                    assert trees.identical(known.mask, mask)
                    assert known.digest == hash_mask(mask)
            if mask is not None:
                assert client_masks.known(client, packet, mask) is not None
    assert list(client_masks.bank) == list(resumed.bank)
    assert json.dumps(state_to_json(client_masks.state(), {})) == json.dumps(
        state_to_json(resumed.state(), {})
    )


@settings(max_examples=50, deadline=None)
@given(EVENTS, EVENTS)
def test_it_can_go_back_to_a_state(before: Any, undone: Any) -> None:
    client_masks = KnownState()
    happen(client_masks, before, {})
    state = client_masks.state()
    text = json.dumps(state_to_json(state, {}))
    happen(client_masks, undone, {})
    client_masks.restore(state)
    assert json.dumps(state_to_json(client_masks.state(), {})) == text
    happen(client_masks, undone, {})
    other = KnownState()
    happen(other, before, {})
    happen(other, undone, {})
    assert list(client_masks.bank) == list(other.bank)


# ---- in a checkpoint -----------------------------------------------------------------------------


def state_file_of(net: Net, folder: Path, clients: int) -> tuple[int, int, int]:
    """The bytes of a checkpoint's files after clients were sent channel masks of their own.

    Beside it, of the model alone and of the masks as a byte per weight.
    """
    data = federation((3, 32, 32), (20, 20), dtype=torch.float32)
    run = Run(methods.FedAvg(), data, net, Memory(folder / "run" / "checkpoint"), cohort=2)
    as_bytes = 0
    for client in range(clients):
        generator = torch.Generator().manual_seed(client)
        channels = {}
        for group in find_groups(net):
            channels[group.name] = torch.rand(group.size, generator=generator) < 0.5
        mask = make_channel_mask(net, channels)
        as_bytes += sum(kept.numel() for kept in mask.values())
        run.known_state.note(client, "model", mask)
    run_folder = RunFolder.create(folder / "run", "")
    run_folder.save(run, run.initial_state)
    written = sum(path.stat().st_size for path in (folder / "run" / "checkpoint").iterdir())
    again = Run(methods.FedAvg(), data, net, Memory(folder / "run" / "checkpoint"), cohort=2)
    run_folder.restore(again)
    assert again.known_state.digests == run.known_state.digests
    assert len(again.known_state.bank) == clients
    model = sum(leaf.numel() * leaf.element_size() for leaf in run.params.values())
    return written, model, as_bytes


def test_masks_of_a_hundred_clients_take_a_small_part_of_a_checkpoint(tmp_path: Path) -> None:
    net = Net(build("resnet18", (3, 32, 32), 10, 0, width=16), (3, 32, 32))
    written, model, as_bytes = state_file_of(net, tmp_path, 100)
    assert as_bytes > 20 * model
    assert written < 1.1 * model


@pytest.mark.slow
def test_a_hundred_clients_of_resnet18(tmp_path: Path) -> None:
    """The model is 44.7 MB; a byte per weight and client would be 1,117 MB more."""
    net = Net(build("resnet18", (3, 32, 32), 10, 0), (3, 32, 32))
    written, model, as_bytes = state_file_of(net, tmp_path, 100)
    print(
        f"model {model / 1e6:.1f} MB, masks a byte per weight {as_bytes / 1e6:.1f} MB, "
        f"checkpoint {written / 1e6:.1f} MB = {written / model:.3f} models"
    )
    assert as_bytes > 1e9
    assert written < 1.02 * model
