"""Trees in shared memory."""

from __future__ import annotations

import multiprocessing as mp
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedgrove import trees
from fedgrove.engines.pool.shared import ALIGN, Block, SharedMemoryFull, drop, fresh_name, get, put

TYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
]


def gone(block: Block) -> bool:
    try:
        get(block)
    except FileNotFoundError:
        return block.name is None or not (Path("/dev/shm") / block.name).exists()
    return block.name is None


def there_and_back(*forest: trees.Tree) -> list[trees.Tree]:
    block = put(forest)
    back = get(block)
    drop(block.name)
    assert gone(block)
    return back


def test_every_type_comes_back_in_order() -> None:
    tree = {f"{i}": (torch.arange(7) % 2).to(dtype) for i, dtype in enumerate(TYPES)}
    (back,) = there_and_back(tree)
    assert list(back) == list(tree)
    assert [v.dtype for v in back.values()] == TYPES
    assert trees.identical(back, tree)


def test_odd_shapes_and_values_come_back_to_the_bit() -> None:
    odd = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45])
    tree = {
        "scalar": torch.tensor(3.5),
        "none": torch.zeros(0, 4),
        "odd": odd,
        "turned": torch.arange(6.0).view(2, 3).T,
        "part": torch.arange(10)[3:7],
        "moved": torch.ones(2, requires_grad=True),
        "last": torch.zeros(0),
    }
    (back,) = there_and_back(tree)
    for k, v in tree.items():
        assert back[k].shape == v.shape
        assert not back[k].requires_grad
    assert back["odd"].view(torch.int32).tolist() == odd.view(torch.int32).tolist()
    assert torch.equal(back["turned"], tree["turned"])
    assert torch.equal(back["part"], torch.tensor([3, 4, 5, 6]))


def test_several_trees_in_one_block() -> None:
    forest = [{"w": torch.ones(3)}, {}, {"w": torch.zeros(2), "m": torch.tensor([True])}]
    back = there_and_back(*forest)
    assert len(back) == 3
    assert all(trees.identical(a, b) for a, b in zip(forest, back, strict=True))


@pytest.mark.parametrize(
    "forest", [[], [{}], [{}, {}], [{"none": torch.zeros(0, 3, dtype=torch.int8)}]]
)
def test_nothing_to_share_takes_no_memory(forest: list[trees.Tree]) -> None:
    block = put(forest)
    assert block.name is None
    back = get(block)
    drop(block.name)
    assert len(back) == len(forest)
    for tree, original in zip(back, forest, strict=True):
        assert list(tree) == list(original)
        for name, value in original.items():
            assert tree[name].shape == value.shape
            assert tree[name].dtype == value.dtype


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(TYPES), st.lists(st.integers(0, 4), max_size=3)), max_size=6)
)
def test_leaves_do_not_overlap_and_are_aligned(leaves: list[tuple[torch.dtype, list[int]]]) -> None:
    tree = {f"{i}": torch.full(shape, i % 2).to(dtype) for i, (dtype, shape) in enumerate(leaves)}
    block = put([tree])
    assert all(at % ALIGN == 0 for _, _, _, at in block.index[0])
    assert trees.identical(get(block)[0], tree)
    drop(block.name)
    assert gone(block)


def test_what_is_read_is_a_copy() -> None:
    block = put([{"w": torch.zeros(2)}])
    (first,) = get(block)
    first["w"].add_(1)
    (second,) = get(block)
    drop(block.name)
    assert second["w"].tolist() == [0.0, 0.0]
    assert first["w"].tolist() == [1.0, 1.0]


def test_a_block_that_is_gone_is_no_matter() -> None:
    block = put([{"w": torch.zeros(2)}])
    drop(block.name)
    drop(block.name)
    drop("psm_never_was")
    with pytest.raises(FileNotFoundError):
        get(block)


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="memory is not limited here")
def test_more_than_there_is_room_for_is_refused_before_anything_is_written() -> None:
    """One block larger than all of /dev/shm: it is asked for at once, so nothing is filled."""
    space = os.statvfs("/dev/shm")
    size = space.f_frsize * (space.f_blocks + 1)
    # One number that is repeated: the tree itself takes no memory.
    tree = {"w": torch.zeros(1, dtype=torch.uint8).expand(size)}
    name = fresh_name()
    sentence = f"shared memory has no room for {size / 2**20:.1f} MiB (No space left on device);"
    with pytest.raises(SharedMemoryFull, match=re.escape(sentence)) as caught:
        put([tree], name)
    assert str(caught.value).endswith("; free some of /dev/shm, or use engine='serial'.")
    assert not (Path("/dev/shm") / name).exists()
    after = os.statvfs("/dev/shm")
    # Other processes may take a little at the same time.
    assert after.f_bavail > space.f_bavail // 2


def double(block: Block, pipe) -> None:
    torch.set_num_threads(1)
    (tree,) = get(block)
    pipe.send(put([{k: v * 2 for k, v in tree.items()}]))


def test_another_process_reads_it_and_answers() -> None:
    if "fork" not in mp.get_all_start_methods():
        pytest.skip("there is no fork on this system")
    block = put([{"w": torch.tensor([1.5, 2.0])}])
    context = mp.get_context("fork")
    our_end, its_end = context.Pipe()
    process = context.Process(target=double, args=(block, its_end))
    process.start()
    assert our_end.poll(30)
    answer = our_end.recv()
    process.join(30)
    (tree,) = get(answer)
    drop(answer.name)
    drop(block.name)
    assert process.exitcode == 0
    assert tree["w"].tolist() == [3.0, 4.0]
    assert gone(answer)
    assert gone(block)


@pytest.mark.parametrize(
    "leaf",
    [torch.arange(10.0)[::2], torch.arange(12.0).view(3, 4)[:, :1], torch.ones(()).expand(5)],
    ids=["strided", "column", "expanded"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_leaves_that_are_views_with_gaps(leaf: torch.Tensor, dtype: torch.dtype) -> None:
    wide = leaf if dtype == leaf.dtype else leaf.to(dtype).repeat_interleave(2, 0)[::2]
    block = put([{"w": wide}])
    try:
        (tree,) = get(block)
    finally:
        drop(block.name)
    assert torch.equal(tree["w"], wide)


FREED_WHILE_OPENED = """
import mmap
from multiprocessing import shared_memory

import torch

from fedgrove.engines.pool.shared import drop, get, put

block = put([{"w": torch.ones(2)}])
map_memory = mmap.mmap


class FreedMeanwhile(mmap.mmap):
    def __new__(cls, descriptor, size):
        shared_memory.mmap.mmap = map_memory
        mapped = map_memory(descriptor, size)
        drop(block.name)
        return mapped


shared_memory.mmap.mmap = FreedMeanwhile
print(get(block)[0]["w"].tolist())
"""


def test_a_block_that_is_freed_while_it_is_read_is_no_leak() -> None:
    """Python's resource tracker warned of a leaked block when the program ended."""
    words = [sys.executable, "-c", FREED_WHILE_OPENED]
    process = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    assert process.stdout == "[1.0, 1.0]\n"
    assert process.stderr == ""
