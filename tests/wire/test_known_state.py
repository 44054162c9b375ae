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
from fedgrove.channels.find import channel_mask, groups_of
from fedgrove.nets import Net, build
from fedgrove.runs.folder import RunFolder
from fedgrove.runs.run import Run
from fedgrove.runs.store import Memory, freeze, thaw
from fedgrove.trees import Mask
from fedgrove.wire import known_state as held_module
from fedgrove.wire.codec import Known, digest_of
from fedgrove.wire.known_state import Contents, Held

# As values in float32, a mask of these takes 4 * (40 * 20 + 10) = 3,240 bytes.
SHAPES = {"w": (40, 20), "b": (10,)}


def drawn(seed: int, shapes: Mapping[str, tuple[int, ...]] = SHAPES, density: float = 0.5) -> Mask:
    generator = torch.Generator().manual_seed(seed)
    return {k: torch.rand(shape, generator=generator) < density for k, shape in shapes.items()}


def frozen_and_thawed(held: Held) -> Held:
    """As a checkpoint writes and reads it."""
    tensors: trees.Tree = {}
    text = json.dumps(freeze(held.state(), tensors))
    back = Held()
    back.restore(thaw(json.loads(text), tensors))
    return back


# ---- what is known -------------------------------------------------------------------------------


def test_a_client_holds_what_it_was_sent_last() -> None:
    held = Held()
    assert held.known(3, "model", drawn(0)) is None
    held.note(3, "model", drawn(0))
    held.note(3, "other", drawn(1))
    held.note(3, "model", None)
    for mask in (drawn(0), drawn(5)):
        known = held.known(3, "model", mask)
        assert known is not None
        assert trees.identical(known.mask, drawn(0))
        assert known.digest == Known.of(drawn(0)).digest
    assert held.known(4, "model", drawn(0)) is None
    held.note(3, "model", drawn(2))
    known = held.known(3, "model", drawn(0))
    assert known is not None
    assert trees.identical(known.mask, drawn(2))


def test_what_is_forgotten_is_unknown_and_takes_no_room() -> None:
    held = Held()
    for client in (1, 2):
        held.note(client, "model", drawn(0))
        held.note(client, "other", drawn(client))
    held.forget(1)
    held.forget(7)
    assert held.known(1, "model", drawn(0)) is None
    assert held.known(1, "other", drawn(1)) is None
    assert held.known(2, "model", drawn(9)) is not None
    assert set(held.bank) == {digest_of(drawn(0)), digest_of(drawn(2))}
    held.forget(2)
    assert not held.bank
    assert not held.digests


def test_clients_share_the_contents_of_equal_masks() -> None:
    held = Held()
    for client in range(50):
        held.note(client, "model", drawn(client % 2))
    assert len(held.bank) == 2


def test_a_mask_whose_contents_fell_out_is_still_recognised() -> None:
    held = Held()
    for client in range(100):
        held.note(client, "model", drawn(client))
    assert digest_of(drawn(0)) not in held.bank
    # Unchanged: the digest says all. Changed: nobody knows any more what it changed from.
    known = held.known(0, "model", drawn(0))
    assert known is not None
    assert trees.identical(known.mask, drawn(0))
    assert held.known(0, "model", drawn(1)) is None
    # The newest are there.
    assert held.known(99, "model", drawn(1)) is not None


def test_the_bank_takes_the_room_of_one_model() -> None:
    held = Held()
    used = []
    for client in range(100):
        held.note(client, "model", drawn(client))
        used.append(sum(contents.bytes for contents in held.bank.values()))
    assert held.room == 4 * (40 * 20 + 10)
    assert max(used) <= held.room
    # 810 bits are 102 bytes; with names and checksum about 140: some twenty fit.
    assert 15 < len(held.bank) < 32


def test_the_newest_contents_stay_even_in_a_tiny_model() -> None:
    """Names and checksum alone take more than the 8 bytes of two weights."""
    held = Held()
    for client in range(3):
        held.note(client, "model", {"w": torch.tensor([client == 1, client == 2])})
        assert len(held.bank) == 1
    assert held.known(2, "model", {"w": torch.tensor([True, True])}) is not None


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
    assert trees.identical(Contents.of(mask).mask(), mask)


def test_a_mask_of_channels_takes_a_bit_per_channel() -> None:
    rows = torch.arange(512) % 3 > 0
    columns = torch.arange(512) % 5 > 0
    mask = {"w": (rows[:, None] & columns)[:, :, None, None].expand(512, 512, 3, 3)}
    contents = Contents.of(mask)
    # 1,024 channels are 128 bytes; 2.4 million weights would be 295 kB.
    assert contents.bytes < 200
    assert trees.identical(contents.mask(), {"w": mask["w"].contiguous()})


def test_a_digest_is_computed_once_for_the_same_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    computed = []

    def counting(mask: Mask) -> bytes:
        computed.append(mask)
        return digest_of(mask)

    monkeypatch.setattr(held_module, "digest_of", counting)
    held = Held()
    mask = drawn(0)
    assert held.digest(mask) == held.digest(dict(mask)) == digest_of(mask)
    assert len(computed) == 1
    assert held.digest({"w": mask["w"]}) == digest_of({"w": mask["w"]})
    assert held.digest({"b": mask["w"], "w": mask["b"]}) != held.digest(mask)


def test_a_digest_follows_what_is_written_into_a_mask() -> None:
    held = Held()
    mask = drawn(0)
    before = held.digest(mask)
    name = next(iter(mask))
    mask[name].logical_not_()
    assert held.digest(mask) == digest_of(mask) != before
    with torch.inference_mode():
        uncounted = {name: kept.clone() for name, kept in mask.items()}
        before = held.digest(uncounted)
        uncounted[name].logical_not_()
        assert held.digest(uncounted) == digest_of(uncounted) != before


def test_a_digest_is_never_that_of_a_mask_which_is_gone() -> None:
    """Tensors that are freed leave their ids to others."""
    held = Held()
    for seed in range(300):
        mask = drawn(seed, {"w": (3, 3)})
        assert held.digest(mask) == digest_of(mask)
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


def happen(held: Held, events: Any, truth: dict[tuple[int, str], Mask]) -> None:
    """Apply events: a packet received, or (None) a client forgotten."""
    for client, packet, number in events:
        if packet is None:
            held.forget(client)
            for key in [key for key in truth if key[0] == client]:
                del truth[key]
            continue
        # Another object each time, as methods make them.
        held.note(client, packet, {k: v.clone() for k, v in MASKS[number].items()})
        truth[client, packet] = MASKS[number]


@settings(max_examples=150, deadline=None)
@given(EVENTS, EVENTS)
def test_it_is_right_bounded_and_exact_after_a_checkpoint(before: Any, after: Any) -> None:
    truth: dict[tuple[int, str], Mask] = {}
    held = Held()
    happen(held, before, truth)
    resumed = frozen_and_thawed(held)
    happen(resumed, after, dict(truth))
    happen(held, after, truth)

    used = sum(contents.bytes for contents in held.bank.values())
    assert used <= held.room or len(held.bank) == 1 or not held.bank
    # Nothing is kept that nobody holds.
    assert set(held.bank) <= {digest_of(mask) for mask in truth.values()}
    for client in range(10):
        for packet in ("model", "other"):
            mask = truth.get((client, packet))
            for coming in (MASKS[0], mask):
                if coming is None:
                    continue
                known = held.known(client, packet, coming)
                again = resumed.known(client, packet, coming)
                assert (known is None) == (again is None)
                if known is not None:
                    assert mask is not None
                    assert trees.identical(known.mask, mask)
                    assert known.digest == digest_of(mask)
            if mask is not None:
                assert held.known(client, packet, mask) is not None
    assert list(held.bank) == list(resumed.bank)
    assert json.dumps(freeze(held.state(), {})) == json.dumps(freeze(resumed.state(), {}))


@settings(max_examples=50, deadline=None)
@given(EVENTS, EVENTS)
def test_it_can_go_back_to_a_state(before: Any, undone: Any) -> None:
    held = Held()
    happen(held, before, {})
    state = held.state()
    text = json.dumps(freeze(state, {}))
    happen(held, undone, {})
    held.restore(state)
    assert json.dumps(freeze(held.state(), {})) == text
    happen(held, undone, {})
    other = Held()
    happen(other, before, {})
    happen(other, undone, {})
    assert list(held.bank) == list(other.bank)


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
        for group in groups_of(net):
            channels[group.name] = torch.rand(group.size, generator=generator) < 0.5
        mask = channel_mask(net, channels)
        as_bytes += sum(kept.numel() for kept in mask.values())
        run.held.note(client, "model", mask)
    run_folder = RunFolder.create(folder / "run", "")
    run_folder.save(run, run.initial_state)
    written = sum(path.stat().st_size for path in (folder / "run" / "checkpoint").iterdir())
    again = Run(methods.FedAvg(), data, net, Memory(folder / "run" / "checkpoint"), cohort=2)
    run_folder.restore(again)
    assert again.held.digests == run.held.digests
    assert len(again.held.bank) == clients
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
