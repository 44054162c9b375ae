"""Arithmetic on named tensors."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.func import vmap

from fedgrove import trees

A = {"w": torch.tensor([[1.0, -2.0], [3.0, 0.5]]), "b": torch.tensor([4.0])}
B = {"w": torch.tensor([[1.0, 1.0], [1.0, 1.0]]), "b": torch.tensor([-1.0])}

NUMBERS = st.floats(-100, 100, allow_nan=False, width=32)


@st.composite
def forests(draw: st.DrawFn) -> list[trees.Tree]:
    """One to four trees of the same shapes: a vector and a scalar."""
    n = draw(st.integers(1, 4))
    rows = draw(st.lists(st.lists(NUMBERS, min_size=n, max_size=n), min_size=1, max_size=4))
    return [{"a": torch.tensor(row), "b": torch.tensor(row[0])} for row in rows]


def test_map_goes_leaf_by_leaf_in_the_order_of_the_first_tree() -> None:
    other = {"b": B["b"], "w": B["w"]}
    result = trees.map(torch.add, A, other)
    assert list(result) == ["w", "b"]
    assert result["w"].tolist() == [[2.0, -1.0], [4.0, 1.5]]
    assert result["b"].tolist() == [3.0]


def test_map_refuses_trees_of_other_names_and_says_which() -> None:
    with pytest.raises(ValueError, match=r"differ in names: \['b', 'c'\]"):
        trees.map(torch.add, A, {"w": A["w"], "c": A["b"]})


def test_sub() -> None:
    assert trees.sub(A, B)["w"].tolist() == [[0.0, -3.0], [2.0, -0.5]]


def test_pick_keeps_the_asked_order_and_shares_the_tensors() -> None:
    picked = trees.pick(A, ("b", "w"))
    assert list(picked) == ["b", "w"]
    assert picked["w"] is A["w"]
    with pytest.raises(KeyError):
        trees.pick(A, ("nothing",))


def test_masked_zeroes_what_the_mask_drops_and_leaves_what_it_does_not_name() -> None:
    mask = {"w": torch.tensor([[True, False], [False, True]])}
    result = trees.apply_mask(A, mask)
    assert result["w"].tolist() == [[1.0, 0.0], [0.0, 0.5]]
    assert result["b"] is A["b"]
    assert A["w"].tolist() == [[1.0, -2.0], [3.0, 0.5]]


def test_masked_leaves_no_sign_where_it_puts_a_zero() -> None:
    # What is kept keeps its bits, a -0.0 among them; what is dropped is +0.0, whatever it was.
    values = torch.tensor([-2.0, -0.0, -math.inf, math.nan, -0.0, -3.0])
    mask = torch.tensor([False, False, False, False, True, True])
    wanted = {"w": torch.tensor([0.0, 0.0, 0.0, 0.0, -0.0, -3.0])}
    assert trees.identical(trees.apply_mask({"w": values}, {"w": mask}), wanted)


def test_masked_keeps_the_type_and_stacks() -> None:
    counts = {"n": torch.tensor([3, 4])}
    masked = trees.apply_mask(counts, {"n": torch.tensor([True, False])})
    assert trees.identical(masked, {"n": torch.tensor([3, 0])})
    rows = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]])
    masks = torch.tensor([[True, False], [False, True]])
    stacked = vmap(lambda w, m: trees.apply_mask({"w": w}, {"w": m}))(rows, masks)
    assert trees.identical(stacked, {"w": torch.tensor([[-1.0, 0.0], [0.0, -4.0]])})


def test_sq_norm() -> None:
    # 1 + 4 + 9 + 0.25 + 16 = 30.25
    assert float(trees.sq_norm(A)) == 30.25


def test_flat_and_size() -> None:
    assert trees.flatten(A).tolist() == [1.0, -2.0, 3.0, 0.5, 4.0]
    assert trees.size(A) == 5
    assert trees.size({}) == 0
    assert trees.size({"n": torch.tensor(3), "none": torch.zeros(0, 4)}) == 1


@given(forests())
def test_unstack_undoes_stack(forest: list[trees.Tree]) -> None:
    stacked = trees.stack(forest)
    assert stacked["a"].shape == (len(forest), *forest[0]["a"].shape)
    again = trees.unstack(stacked, len(forest))
    assert all(trees.equal(a, b) for a, b in zip(forest, again, strict=True))


@given(forests())
def test_distance_is_zero_exactly_for_the_same_numbers_and_symmetric(
    forest: list[trees.Tree],
) -> None:
    first = forest[0]
    last = forest[-1]
    assert trees.distance(first, first) == 0
    assert trees.distance(first, last) == trees.distance(last, first)
    assert (trees.distance(first, last) == 0) == trees.equal(first, last)


def test_distance_is_the_largest_difference() -> None:
    # w: 0, 3, 2, 0.5; b: 5
    assert trees.distance(A, B) == 5.0
    assert trees.distance({}, {}) == 0.0
    assert trees.distance({"none": torch.zeros(0)}, {"none": torch.zeros(0)}) == 0.0


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_distance_does_not_hide_a_number_that_is_none(order: str) -> None:
    values = {"a": torch.tensor([0.0]), "b": torch.tensor([math.nan])}
    spoilt = {k: values[k] for k in order}
    assert not trees.distance(spoilt, {"a": torch.zeros(1), "b": torch.zeros(1)}) < 1


def test_distance_looks_at_every_name_of_both() -> None:
    with pytest.raises((KeyError, ValueError)):
        trees.distance({"w": A["w"]}, A)


def test_equal_wants_names_shapes_and_values() -> None:
    assert trees.equal(A, {k: v.clone() for k, v in A.items()})
    assert not trees.equal(A, {"w": A["w"]})
    assert not trees.equal({"w": A["w"]}, A)
    assert not trees.equal(A, {"w": A["w"].flatten(), "b": A["b"]})
    assert not trees.equal(A, {"w": A["w"] + 1e-6, "b": A["b"]})


def test_equal_wants_the_same_type() -> None:
    assert not trees.equal({"b": A["b"]}, {"b": A["b"].double()})


def test_identical_means_the_same_bits() -> None:
    zero = {"z": torch.tensor([0.0])}
    minus_zero = {"z": torch.tensor([-0.0])}
    assert trees.equal(zero, minus_zero)
    assert not trees.identical(zero, minus_zero)
    nan = {"n": torch.tensor(math.nan)}
    assert not trees.equal(nan, nan)
    assert trees.identical(nan, {"n": torch.tensor(math.nan)})
    # 0x7fc00000 is torch's NaN; the last bit makes it another one.
    other_nan = {"n": torch.tensor(0x7FC00001, dtype=torch.int32).view(torch.float32)}
    assert not trees.identical(nan, other_nan)


def test_identical_wants_names_types_and_shapes() -> None:
    assert trees.identical(A, {"b": A["b"].clone(), "w": A["w"].clone()})
    assert trees.identical({}, {})
    assert not trees.identical(A, {"w": A["w"]})
    assert not trees.identical({"w": A["w"]}, A)
    assert not trees.identical(A, {"w": A["w"].flatten(), "b": A["b"]})
    assert not trees.identical({"n": torch.zeros(2)}, {"n": torch.zeros(2, dtype=torch.int32)})


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.int8, torch.int64, torch.float16, torch.bfloat16, torch.float64],
    ids=str,
)
def test_identical_takes_any_type_and_layout(dtype: torch.dtype) -> None:
    square = torch.tensor([[1, 0], [1, 1]]).to(dtype)
    tree = {"turned": square.T, "part": square[::2, ::2], "one": square[0, 0], "no": square[:0]}
    copied = {name: value.clone() for name, value in tree.items()}
    assert trees.identical(tree, copied)
    assert not trees.identical(tree, copied | {"turned": square.clone()})


# ---- leaves that are views of one vector ---------------------------------------------------------


def test_consecutive_views_are_one_vector_without_a_copy() -> None:
    whole = torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    tree = {"w": whole[1:5].view(2, 2), "none": whole[:0], "b": whole[5]}
    vector = trees.as_vector(tree)
    assert vector is not None
    assert vector.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]
    vector[0] = 7.0
    assert tree["w"].tolist() == [[7.0, 2.0], [3.0, 4.0]]


def no_vectors() -> dict[str, trees.Tree]:
    whole = torch.arange(6.0)
    rows = whole.view(2, 3)
    return {
        "nothing": {},
        "no numbers": {"w": whole[:0]},
        "another order": {"b": whole[4:], "w": whole[:4]},
        "a gap": {"w": whole[:3], "b": whole[4:]},
        "an overlap": {"w": whole[:3], "b": whole[2:]},
        "a transposed leaf": {"w": rows.t()},
        "a column": {"w": rows[:, 0], "b": whole[1:2]},
        "a leaf expanded": {"w": whole[:1].expand(3), "b": whole[1:]},
        "another type": {"w": whole[:2], "b": whole.view(torch.int32)[2:]},
        "tensors of their own": {"w": whole[:2].clone(), "b": whole[2:].clone()},
    }


@pytest.mark.parametrize("kind", list(no_vectors()))
def test_what_is_no_vector(kind: str) -> None:
    assert trees.as_vector(no_vectors()[kind]) is None


def test_neighbours_in_memory_are_no_vector() -> None:
    # One buffer, but two storages that know nothing of each other, side by side.
    memory = bytearray(16)
    first = torch.frombuffer(memory, dtype=torch.float32, count=2)
    second = torch.frombuffer(memory, dtype=torch.float32, count=2, offset=8)
    assert second.data_ptr() == first.data_ptr() + 8
    assert trees.as_vector({"w": first, "b": second}) is None


@given(forests())
def test_a_flat_tree_is_its_vector(forest: list[trees.Tree]) -> None:
    for tree in forest:
        flat = trees.flatten(tree)
        vector = trees.as_vector(trees.unflatten(flat, tree))
        assert vector is not None
        assert torch.equal(vector, flat)
        assert vector.data_ptr() == flat.data_ptr()


def test_layouts_agree_in_names_order_and_shapes() -> None:
    assert trees.same_layout(A, B)
    assert not trees.same_layout(A, {"b": A["b"], "w": A["w"]})
    assert not trees.same_layout(A, {"w": A["w"]})
    assert not trees.same_layout(A, {"w": A["w"].view(4), "b": A["b"]})


# ---- numbers chosen by a mask --------------------------------------------------------------------

ODD = (0.0, -0.0, math.nan, math.inf, -math.inf, 1.5, -2.0)
TYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.reshape(-1).view(trees.INTEGER_TYPES[tensor.dtype.itemsize]).tolist()


@given(
    st.lists(st.tuples(st.sampled_from(ODD), st.booleans(), st.sampled_from(ODD)), min_size=1),
    st.sampled_from(TYPES),
    st.sampled_from(ODD),
)
def test_where_is_torch_where_to_the_bit(
    rows: list[tuple[float, bool, float]], dtype: torch.dtype, fill: float
) -> None:
    """Zeros of either sign, NaN and infinity too, on either side of the mask."""
    value = torch.tensor([one for one, _, _ in rows], dtype=dtype)
    mask = torch.tensor([kept for _, kept, _ in rows])
    other = torch.tensor([another for _, _, another in rows], dtype=dtype)
    assert bits(trees.where(mask, value, other)) == bits(torch.where(mask, value, other))
    assert bits(trees.where(mask, value, fill)) == bits(value.masked_fill(~mask, fill))
    assert bits(trees.where(mask, value)) == bits(value.masked_fill(~mask, 0))
    assert trees.select(value, mask).dtype == dtype
    assert bits(trees.select(value, mask)) == bits(value[mask])
    assert trees.find_true(mask).tolist() == mask.nonzero().flatten().tolist()


def test_where_keeps_the_type_of_whole_numbers_and_takes_any_strides() -> None:
    whole = torch.arange(6).view(2, 3)
    mask = whole % 2 == 0
    assert trees.where(mask, whole).tolist() == [[0, 0, 2], [0, 4, 0]]
    assert trees.where(mask, whole).dtype == torch.int64
    # Columns first: neither lies in memory as it is read.
    assert trees.where(mask.T, whole.T).tolist() == [[0, 0], [0, 4], [2, 0]]
    assert trees.select(whole.T, mask.T).tolist() == [0, 4, 2]


def test_where_lets_gradients_and_vmap_through() -> None:
    mask = torch.tensor([True, False])
    weights = torch.tensor([2.0, 3.0], requires_grad=True)
    trees.where(mask, weights * 5).sum().backward()
    assert weights.grad is not None
    assert weights.grad.tolist() == [5.0, 0.0]
    slope = torch.func.grad(lambda x: (trees.apply_mask({"w": x}, {"w": mask})["w"] ** 2).sum())
    assert slope(torch.tensor([2.0, 3.0])).tolist() == [4.0, 0.0]
    rows = vmap(lambda x: trees.where(mask, x, -1.0))(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert rows.tolist() == [[1.0, -1.0], [3.0, -1.0]]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=4), st.integers(0, 2**16), st.booleans())
def test_any_along_is_any_over_all_other_dimensions(
    shape: list[int], seed: int, is_transposed: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(shape, generator=generator) < 0.3
    if is_transposed:
        mask = mask.transpose(0, -1)
    for dim in range(mask.dim()):
        expected = [bool(part.any()) for part in mask.unbind(dim)]
        assert trees.any_along(mask, dim).tolist() == expected
        assert trees.any_along(mask.to(torch.uint8), dim).tolist() == expected


def test_booleans_are_counted_and_joined_as_torch_does() -> None:
    mask = torch.tensor([[True, False], [True, True]])
    row = torch.tensor([[True, False]])
    assert trees.count_true(mask) == trees.count_true(mask.t()) == trees.count_true(mask.int()) == 3
    assert torch.equal(trees.and_masks(mask, row), mask & row)
    assert torch.equal(trees.and_masks(mask.t(), row), mask.t() & row)
    assert trees.and_masks(torch.tensor(True), torch.tensor(False)).tolist() is False
