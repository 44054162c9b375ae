"""Trees on disk, and what clients remember."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save
from torch import Tensor

from fedgrove import trees
from fedgrove.errors import DamageError, EngineError, InputError
from fedgrove.runs import memory as memories
from fedgrove.runs.files import write_bytes
from fedgrove.runs.memory import (
    Memory,
    decode_tree,
    encode_tree,
    join_trees,
    memory_file_name,
    read_named_tree,
    read_tree,
    split_trees,
    write_tree,
)

TYPES = [
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int64,
]


def every_type() -> trees.Tree:
    return {str(d): (torch.arange(6).view(2, 3) % 2).to(d) for d in TYPES}


# ---- files ---------------------------------------------------------------------------------------


def test_a_tree_comes_back_with_its_types_bits_and_order(tmp_path: Path) -> None:
    odd = {
        "zero": torch.tensor(-0.0),
        "nan": torch.tensor([float("nan"), float("inf")]),
        "none": torch.zeros(0, 3),
    }
    tree = {"z": torch.ones(1), **every_type(), "a": torch.tensor(3.0), **odd}
    write_tree(tmp_path / "t.safetensors", tree)
    back = read_tree(tmp_path / "t.safetensors")
    assert list(back) == list(tree)
    for k, v in tree.items():
        assert (back[k].dtype, back[k].shape) == (v.dtype, v.shape)
        assert back[k].view(-1).view(torch.uint8).tolist() == v.view(-1).view(torch.uint8).tolist()
    assert [p.name for p in tmp_path.iterdir()] == ["t.safetensors"]


def test_views_of_one_vector_and_transposed_leaves_are_written(tmp_path: Path) -> None:
    w = torch.arange(6.0)
    tree = {"a": w[:2], "b": w[2:], "c": w.view(2, 3).T, "d": torch.ones(2, requires_grad=True)}
    write_tree(tmp_path / "t", tree)
    assert trees.identical(read_tree(tmp_path / "t"), {k: v.detach() for k, v in tree.items()})


def test_an_empty_tree(tmp_path: Path) -> None:
    write_tree(tmp_path / "t", {})
    assert read_tree(tmp_path / "t") == {}


def test_several_trees_in_one_file(tmp_path: Path) -> None:
    forest = {
        "kept": {"fc/1.weight": torch.ones(2), "b": torch.zeros(1)},
        "own": {"b": torch.tensor(5)},
    }
    write_tree(tmp_path / "t", join_trees(forest))
    back = split_trees(read_tree(tmp_path / "t"))
    assert list(back) == ["kept", "own"]
    assert all(trees.identical(back[k], forest[k]) for k in forest)


def test_a_file_is_replaced_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "f"
    write_bytes(path, b"old")
    with monkeypatch.context() as patch:
        patch.setattr("os.replace", lambda a, b: (_ for _ in ()).throw(OSError("killed")))
        with pytest.raises(EngineError, match=r"f could not be written: killed"):
            write_bytes(path, b"new")
        with pytest.raises(EngineError, match="killed"):
            write_tree(path, {"w": torch.ones(1)})
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["f"]
    write_bytes(path, b"new")
    assert path.read_bytes() == b"new"


# ---- safetensors ---------------------------------------------------------------------------------

shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
names = st.text(st.characters(codec="utf-8"), max_size=6).filter(lambda n: n != "__metadata__")


@st.composite
def leaves(draw: st.DrawFn) -> Tensor:
    shape = draw(shapes)
    dtype = draw(st.sampled_from(list(memories._DTYPES)))
    return torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)


@given(st.dictionaries(names, leaves(), max_size=5))
def test_the_bytes_are_those_of_the_library(tree: dict[str, Tensor]) -> None:
    assert encode_tree(tree) == save(tree, metadata={"order": json.dumps(list(tree))})


@given(st.dictionaries(names, leaves(), max_size=5))
def test_the_tree_comes_back_in_its_order(tree: dict[str, Tensor]) -> None:
    again = decode_tree(encode_tree(tree), Path("f"))
    assert list(again) == list(tree)
    for name, leaf in tree.items():
        assert again[name].dtype == leaf.dtype
        assert again[name].shape == leaf.shape
        assert torch.equal(again[name], leaf)


def test_it_is_a_copy_in_both_directions() -> None:
    leaf = torch.ones(3)
    data = encode_tree({"w": leaf, "v": leaf[1:]})
    leaf.zero_()
    first = decode_tree(data, Path("f"))
    assert first["w"].tolist() == [1.0, 1.0, 1.0]
    first["w"].zero_()
    assert first["v"].tolist() == [1.0, 1.0]
    assert decode_tree(data, Path("f"))["w"].tolist() == [1.0, 1.0, 1.0]


def test_tensors_that_lie_in_another_order_are_written_by_row() -> None:
    transposed = torch.arange(6.0).view(2, 3).T
    data = encode_tree({"w": transposed})
    assert decode_tree(data, Path("f"))["w"].tolist() == transposed.tolist()
    assert data.endswith(transposed.contiguous().numpy().tobytes())


def test_a_type_that_no_file_can_hold_is_refused() -> None:
    with pytest.raises(
        TypeError, match=r"w has dtype torch\.complex64, which the files of a run cannot"
    ):
        encode_tree({"w": torch.ones(1, dtype=torch.complex64)})


# ---- memory --------------------------------------------------------------------------------------


def kept(value: float) -> dict[str, trees.Tree]:
    return {"own": {"w": torch.tensor([value])}}


def test_a_version_counts_once_it_is_accepted(tmp_path: Path) -> None:
    memory = Memory(tmp_path / "deep" / "folder")
    assert memory.read(3, memory.files.get(3)) == {}
    version = memory.write(3, 1, "train", kept(1.0))
    assert memory.files == {}
    memory.accept(3, version)
    memory.accept(4, None)
    assert memory.files == {3: version}
    assert re.fullmatch(r"1\.train\.[0-9a-f]{16}", version)
    assert memory.read(3, version)["own"]["w"].item() == 1.0


def test_versions_of_rounds_verbs_and_attempts_do_not_overwrite_each_other(tmp_path: Path) -> None:
    memory = Memory(tmp_path)
    written = {}
    for client in (0, 1):
        for round in (0, 1, 11):
            for verb in ("train", "train:evidence", "finetune"):
                # Several attempts at one exchange, say.
                for _ in range(3):
                    value = float(len(written))
                    version = memory.write(client, round, verb, kept(value))
                    written[client, version] = value
    assert len(written) == 2 * 3 * 3 * 3
    for (client, version), value in written.items():
        assert memory.read(client, version)["own"]["w"].item() == value


def test_two_exchanges_of_one_round_keep_their_versions_apart(tmp_path: Path) -> None:
    """An exchange that is not a round leaves the round as it was."""
    memory = Memory(tmp_path)
    for number in range(4):
        before = memory.files.get(0)
        version = memory.write(0, 0, "train", kept(number), current=before)
        assert version != before
        if before is not None:
            assert memory.read(0, before)["own"]["w"].item() == number - 1
        memory.accept(0, version)


@pytest.mark.parametrize(
    "version", ["../1.train", "1/train", "/etc/passwd", "..", "1.train\0", "", "1 train", "a" * 101]
)
def test_a_version_is_never_a_path(version: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not a version of a client's memory"):
        memory_file_name(0, version)
    if version:
        with pytest.raises(InputError):
            Memory(tmp_path).read(0, version)


def test_memory_can_be_opened_at_an_earlier_commit(tmp_path: Path) -> None:
    memory = Memory(tmp_path)
    memory.accept(0, memory.write(0, 0, "train", kept(1.0)))
    committed = dict(memory.files)
    memory.accept(0, memory.write(0, 1, "train", kept(2.0)))
    again = Memory(tmp_path, committed)
    assert again.read(0, again.files[0])["own"]["w"].item() == 1.0


def test_the_same_again_is_not_written_again(tmp_path: Path) -> None:
    memory = Memory(tmp_path)
    version = memory.write(0, 0, "train", kept(1.0))
    path = tmp_path / memory_file_name(0, version)
    before = path.stat().st_mtime_ns
    assert memory.write(0, 0, "train", kept(1.0), current=version) == version
    assert path.stat().st_mtime_ns == before


def test_what_a_client_remembers_is_checked_when_it_is_read(tmp_path: Path) -> None:
    memory = Memory(tmp_path)
    version = memory.write(0, 0, "train", kept(1.0))
    path = tmp_path / memory_file_name(0, version)
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    # A run that is resumed has nothing at hand but the files.
    memory = Memory(tmp_path)
    with pytest.raises(DamageError, match=rf"{path.name} is damaged: its content has changed"):
        memory.read(0, version)
    path.unlink()
    with pytest.raises(DamageError, match=rf"{path.name} is missing"):
        memory.read(0, version)


@pytest.mark.parametrize("name", ["../{}", "/{}", "a/{}", "..", "", "zero\0"])
def test_a_name_that_leads_out_of_the_folder_is_refused(name: str, tmp_path: Path) -> None:
    outside = Memory(tmp_path / "outside")
    written = memory_file_name(0, outside.write(0, 0, "train", kept(1.0)))
    (tmp_path / "memory").mkdir()
    with pytest.raises(DamageError):
        read_named_tree(tmp_path / "memory", name.format(f"outside/{written}"))


def test_a_link_that_leads_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    outside = Memory(tmp_path / "outside")
    version = outside.write(0, 0, "train", kept(1.0))
    name = memory_file_name(0, version)
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / name).symlink_to(tmp_path / "outside" / name)
    with pytest.raises(DamageError, match="outside of"):
        Memory(tmp_path / "memory").read(0, version)


def test_what_is_written_into_a_memory_at_hand_is_not_read_again(tmp_path: Path) -> None:
    memory = Memory(tmp_path)
    own = torch.tensor([1.0, 2.0])
    version = memory.write(3, 0, "train", {"own": {"w": own}})
    # Without a file, it is still at hand.
    path = tmp_path / memory_file_name(3, version)
    data = path.read_bytes()
    path.unlink()
    # Behind torch's back too: it is a copy.
    own.numpy()[0] = 9.0
    memory.read(3, version)["own"]["w"].numpy()[0] = 8.0
    assert memory.read(3, version)["own"]["w"].tolist() == [1.0, 2.0]
    path.write_bytes(data)
    # Another process has nothing at hand, and reads the file.
    other = pickle.loads(pickle.dumps(memory))
    assert other.read(3, version)["own"]["w"].tolist() == [1.0, 2.0]


def test_memories_at_hand_take_bounded_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory(tmp_path)
    size = len(encode_tree({"own/w": torch.zeros(2)}))
    monkeypatch.setattr(memories, "RECENT_BYTES", 2 * size)
    # Two of them fit.
    versions = []
    for client in range(3):
        values = torch.tensor([1.0, float(client)])
        versions.append(memory.write(client, 0, "train", {"own": {"w": values}}))
    assert memory._recent.get(memory_file_name(0, versions[0])) is None
    assert memory._recent.get(memory_file_name(2, versions[2])) is not None
    assert memory.read(0, versions[0])["own"]["w"].tolist() == [1.0, 0.0]


def test_a_version_that_was_replaced_is_not_kept_at_hand(tmp_path: Path) -> None:
    """Not before the new one is accepted: a client whose report is refused goes back to it."""
    memory = Memory(tmp_path)
    first = memory.write(0, 0, "train", {"own": {"w": torch.zeros(3)}})
    memory.accept(0, first)
    second = memory.write(0, 1, "train", {"own": {"w": torch.ones(3)}}, first)
    assert memory._recent.get(memory_file_name(0, first)) is not None
    memory.accept(0, second)
    assert memory._recent.get(memory_file_name(0, first)) is None
    assert memory._recent.get(memory_file_name(0, second)) is not None
    # It is still in its file.
    assert torch.equal(memory.read(0, first)["own"]["w"], torch.zeros(3))
    # The same version again stays.
    memory.accept(0, second)
    assert memory._recent.get(memory_file_name(0, second)) is not None
