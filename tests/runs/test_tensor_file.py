"""Tests of fedgrove.runs.tensor_file: the bytes are those of safetensors' own library."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save
from torch import Tensor

from fedgrove.runs.tensor_file import WORDS, TensorFile, pieces_of

shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
names = st.text(st.characters(codec="utf-8"), max_size=6).filter(lambda n: n != "__metadata__")


@st.composite
def leaves(draw: st.DrawFn) -> Tensor:
    shape = draw(shapes)
    dtype = draw(st.sampled_from(list(WORDS)))
    return torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)


@given(st.dictionaries(names, leaves(), max_size=5))
def test_the_bytes_are_those_of_the_library(tree: dict[str, Tensor]) -> None:
    expected = save(tree, metadata={"order": json.dumps(list(tree))})
    assert b"".join(TensorFile.of(tree).pieces) == expected
    assert b"".join(pieces_of(tree)) == expected


@given(st.dictionaries(names, leaves(), max_size=5))
def test_the_tree_comes_back_in_its_order(tree: dict[str, Tensor]) -> None:
    again = TensorFile.of(tree).tree()
    assert list(again) == list(tree)
    for name, leaf in tree.items():
        assert again[name].dtype == leaf.dtype
        assert again[name].shape == leaf.shape
        assert torch.equal(again[name], leaf)


def test_it_is_a_copy_in_both_directions() -> None:
    leaf = torch.ones(3)
    file = TensorFile.of({"w": leaf, "v": leaf[1:]})
    leaf.zero_()
    first = file.tree()
    assert first["w"].tolist() == [1.0, 1.0, 1.0]
    first["w"].zero_()
    assert first["v"].tolist() == [1.0, 1.0]
    assert file.tree()["w"].tolist() == [1.0, 1.0, 1.0]


def test_tensors_that_lie_in_another_order_are_written_by_row() -> None:
    transposed = torch.arange(6.0).view(2, 3).T
    assert TensorFile.of({"w": transposed}).tree()["w"].tolist() == transposed.tolist()
    _, body = pieces_of({"w": transposed})
    assert bytes(body) == transposed.contiguous().numpy().tobytes()


def test_a_type_that_no_file_can_hold_is_refused() -> None:
    with pytest.raises(TypeError, match=r"w is of torch\.complex64, which a run's files do not"):
        TensorFile.of({"w": torch.ones(1, dtype=torch.complex64)})
