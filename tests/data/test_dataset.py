import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedgrove.data.dataset import (
    MAX_PIECES,
    MIN_WINDOWS,
    Dataset,
    count_within_groups,
    cut_into_pieces,
    cut_windows,
    find_overlaps,
    find_window_starts,
    number_runs,
)
from fedgrove.errors import InputError

groups = st.lists(st.integers(0, 5), min_size=1, max_size=60).map(np.array)


@given(groups)
def test_positions_count_up_within_each_group(group):
    place = count_within_groups(group)
    for g in np.unique(group):
        assert place[group == g].tolist() == list(range((group == g).sum()))


@given(groups)
def test_runs_change_exactly_where_a_column_changes(column):
    run = number_runs(column)
    assert run[0] == 0
    assert (np.diff(run) == (np.diff(column) != 0)).all()


@given(
    st.lists(st.integers(0, 50), max_size=20),
    st.lists(st.integers(0, 50), max_size=20),
    st.integers(1, 9),
)
def test_overlapping_is_what_it_says(a, b, reach):
    expected = [any(abs(i - j) < reach for j in b) for i in a]
    mask = find_overlaps(np.array(a, dtype=np.int64), np.array(b, dtype=np.int64), reach)
    assert mask.tolist() == expected


def test_windows_by_hand():
    # Samples 0..9; user 1 does activity 0 in samples 0-4 and activity 1 in 5-9. Windows of 4, 2
    # apart: run 0 holds samples 0-4, so one window at 0 (the next would need sample 5); run 1 holds
    # 5-9, so one at 5.
    signal = np.arange(20, dtype=np.float32).reshape(10, 2)
    rows = Dataset(signal, np.repeat([0, 1], 5), ("a", "b"), np.ones(10, dtype=int))
    dataset = cut_windows(rows, length=4, step=2)
    assert dataset.start.tolist() == [0, 5]
    assert dataset.y.tolist() == [0, 1]
    assert dataset.x[1].tolist() == [[10, 12, 14, 16], [11, 13, 15, 17]]


def test_a_recording_shorter_than_a_window_is_refused():
    rows = Dataset(np.zeros((6, 1)), np.array([0, 0, 0, 1, 1, 1]), ("a", "b"), np.zeros(6))
    with pytest.raises(InputError, match="4 samples without a break"):
        cut_windows(rows, length=4, step=2)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(2, 6), st.integers(1, 6))
def test_no_window_leaves_its_run(lengths, length, step):
    run = np.repeat(np.arange(len(lengths)), lengths)
    first = find_window_starts(run, length, step)
    assert all(run[s] == run[s + length - 1] for s in first)
    assert len(first) == sum((n - length) // step + 1 for n in lengths if n >= length)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_pieces_are_contiguous_and_large_enough(lengths):
    run = np.repeat(np.arange(len(lengths)), lengths)
    piece = cut_into_pieces(run)
    assert (np.diff(piece) >= 0).all()
    for r, n in enumerate(lengths):
        sizes = np.unique(piece[run == r], return_counts=True)[1]
        assert len(sizes) == min(max(n // MIN_WINDOWS, 1), MAX_PIECES)
        assert sizes.min() >= min(MIN_WINDOWS, n)
        assert np.ptp(sizes) <= 1
