import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fedgrove.data import partition, split
from fedgrove.data.dataset import Dataset, cut_windows, number_values
from fedgrove.errors import InputError

LENGTH = 8
STEP = 4
SHARE = 0.1


def parts_of(rows):
    return rows.train, rows.validation, rows.test


def samples(dataset, rows):
    return {s for i in dataset.start[rows].tolist() for s in range(i, i + dataset.reach)}


@st.composite
def recordings(draw):
    """A raw series of a few users, each doing a few things once or more often."""
    # User, activity, samples.
    stretch = st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(1, 90))
    drawn = draw(st.lists(stretch, min_size=1, max_size=12))
    assume(max(n for _, _, n in drawn) >= LENGTH)
    user, y, n = (np.array(c) for c in zip(*sorted(drawn), strict=True))
    signal = np.zeros((n.sum(), 1), dtype=np.float32)
    rows = Dataset(signal, np.repeat(y, n), tuple("abcd"), np.repeat(user, n))
    return cut_windows(rows, LENGTH, STEP)


@given(recordings(), st.integers(0, 99))
@settings(deadline=None, max_examples=150)
def test_blocks_never_put_a_raw_sample_on_both_sides(dataset, seed):
    owned = [np.flatnonzero(dataset.user == u) for u in np.unique(dataset.user)]
    done = split.split(dataset, owned, "blocks", seed, SHARE)
    test = samples(dataset, np.concatenate([r.test for r in done] or [[]]).astype(int))
    for rows, mine in zip(done, owned, strict=True):
        assert not samples(dataset, rows.train) & test
        assert not samples(dataset, rows.validation) & test
        assert not samples(dataset, rows.train) & samples(dataset, rows.validation)
        assert set(dataset.y[rows.train]) == set(dataset.y[mine])  # no class is lost to training
        not_train = np.r_[rows.validation, rows.test]
        assert not set(dataset.block[rows.train]) & set(dataset.block[not_train])
        assert not set(dataset.block[rows.validation]) & set(dataset.block[rows.test])
        for c in np.unique(dataset.y[mine]):  # and every class that has two blocks is tested
            several = len(np.unique(dataset.block[mine][dataset.y[mine] == c])) > 1
            assert (c in dataset.y[rows.test]) == several
            # Test may have taken all but one.
            tested = np.unique(dataset.block[rows.test][dataset.y[rows.test] == c])
            left = len(np.unique(dataset.block[mine][dataset.y[mine] == c])) - len(tested)
            assert (c in dataset.y[rows.validation]) == (left > 1)


@given(recordings(), st.integers(0, 99), st.integers(2, 4))
@settings(deadline=None, max_examples=60)
def test_nor_between_clients_that_share_a_recording(dataset, seed, clients):
    if len(dataset.y) < 40:
        return
    size = np.bincount(dataset.block)
    label = split.majority_label(dataset.block, dataset.y, len(size))
    dealt = partition.assign_units(
        partition.parse("iid"), label, size, clients, np.random.default_rng(seed)
    )
    owned = [np.flatnonzero(np.isin(dataset.block, units)) for units in dealt]
    done = split.split(dataset, owned, "blocks", seed, SHARE)
    test = samples(dataset, np.concatenate([r.test for r in done]))
    validation = samples(dataset, np.concatenate([r.validation for r in done]))
    train = samples(dataset, np.concatenate([r.train for r in done]))
    assert not train & test
    assert not validation & test
    assert not train & validation


@given(st.lists(st.integers(0, 4), min_size=1, max_size=80).map(np.array), st.integers(0, 99))
@settings(deadline=None)
def test_random_uses_every_row_once_and_is_stratified(y, seed):
    dataset = Dataset(np.zeros((len(y), 1)), y, tuple("abcde"))
    (rows,) = split.split(dataset, [np.arange(len(y))], "random", seed, SHARE)
    assert sorted(np.concatenate(parts_of(rows)).tolist()) == list(range(len(y)))
    for c, n in zip(*np.unique(y, return_counts=True), strict=True):
        assert (y[rows.test] == c).sum() == min(max(round(0.2 * n), 1), n - 1)
        assert (y[rows.train] == c).sum() >= 1
    rest = len(y) - len(rows.test)
    spare = rest - len(np.unique(y))
    assert len(rows.validation) == min(max(1, round(0.1 * rest)), spare)


def test_by_hand():
    # 10 of class 0 and 30 of class 1: test 2 and 6, rest 8 and 24; a tenth of 32 is 3: 0.8 and 2.4
    # by largest remainder are 1 and 2; train 7 and 22.
    y = np.repeat([0, 1], [10, 30])
    dataset = Dataset(np.zeros((40, 1)), y, ("a", "b"))
    (rows,) = split.split(dataset, [np.arange(40)], "random", 5, SHARE)
    assert [np.bincount(y[p]).tolist() for p in parts_of(rows)] == [[7, 22], [1, 2], [2, 6]]


def test_blocks_by_hand():
    # One user, one activity, a run of 15 windows: five pieces of three, one held out (3 of 15 is a
    # fifth). The neighbours of an inner piece are dropped, one on each side; of an outer piece, one.
    # A tenth of the 10 or 11 windows left is less than any piece, so validation is the smallest: a
    # neighbour of the test piece, of which two windows are left.
    zeros = np.zeros(64, int)
    rows = Dataset(np.zeros((LENGTH + 14 * STEP, 1)), zeros, ("a",), zeros)
    dataset = cut_windows(rows, LENGTH, STEP)
    for seed in range(8):
        (rows,) = split.split(dataset, [np.arange(15)], "blocks", seed, SHARE)
        first = rows.test[0]
        assert rows.test.tolist() == [first, first + 1, first + 2]
        assert first % 3 == 0
        lost = {first - 1, first + 3} & set(range(15))
        assert rows.validation.tolist() in (
            [first - 3, first - 2],
            [first + 4, first + 5],
        )
        assert not lost & {*rows.train.tolist(), *rows.validation.tolist()}


def test_the_draw_depends_on_the_seed_and_the_client_alone():
    y = number_values(np.arange(200) % 4)
    dataset = Dataset(np.zeros((200, 1)), y, tuple("abcd"))
    mine = np.arange(100)
    other = np.arange(100, 200)
    alone = split.split(dataset, [mine], "random", 1, SHARE)[0]
    both = split.split(dataset, [mine, other], "random", 1, SHARE)[0]
    assert alone.test.tolist() == both.test.tolist()
    assert alone.test.tolist() != split.split(dataset, [mine], "random", 2, SHARE)[0].test.tolist()


def test_very_unequal_blocks_do_not_hand_the_test_part_the_large_one():
    y = np.zeros(42, int)
    block = np.repeat([0, 1], [40, 2])
    dataset = Dataset(
        np.zeros((42, 1)), y, ("a",), block=block, start=block * 1000 + np.arange(42), reach=1
    )
    for seed in range(5):
        (rows,) = split.split(dataset, [np.arange(42)], "blocks", seed, SHARE)
        assert rows.test.tolist() == [40, 41]


def chains(*sizes):
    """One client; for each class its chains of windows, of which neighbours overlap by half."""
    size = np.array([n for of_class in sizes for n in of_class])
    label = np.repeat(np.arange(len(sizes)), [len(of_class) for of_class in sizes])
    block = np.repeat(np.arange(len(size)), size)
    start = block * 1000 + np.concatenate([np.arange(n) for n in size]) * STEP
    y = np.repeat(label, size)
    return Dataset(np.zeros((len(y), 1)), y, tuple("abcd"), block=block, start=start, reach=LENGTH)


def test_validation_holds_whole_chains_as_test_does():
    """It was cut from the edge of training chains, which share their recording with training."""
    # Class 0 has five chains of ten, class 1 three, class 2 two, class 3 one. Test takes one of
    # each class that has two (a fifth of 50, 30 and 20 is 10, 6 and 4). A tenth of the 40 and 20
    # windows left is less than a chain, so validation takes one chain of classes 0 and 1; the one
    # chain that test left of class 2 and that of class 3 stay in training.
    dataset = chains([10] * 5, [10] * 3, [10] * 2, [10])
    for seed in range(8):
        (rows,) = split.split(dataset, [np.arange(110)], "blocks", seed, SHARE)
        assert np.bincount(dataset.y[rows.test], minlength=4).tolist() == [10, 10, 10, 0]
        assert np.bincount(dataset.y[rows.validation], minlength=4).tolist() == [10, 10, 0, 0]
        assert np.bincount(dataset.y[rows.train], minlength=4).tolist() == [30, 10, 10, 10]
        held = [set(dataset.block[part].tolist()) for part in parts_of(rows)]
        assert sum(len(blocks) for blocks in held) == len(set.union(*held)) == 11


def test_the_share_of_validation_in_chains():
    # Ten chains of four; test takes two. Of the 32 windows left a quarter is 8, two chains, and a
    # half 16, four; a tenth is 3.2, to which one chain is nearer than none.
    dataset = chains([4] * 10)
    for share, windows in ((0.0, 0), (0.1, 4), (0.25, 8), (0.5, 16)):
        (rows,) = split.split(dataset, [np.arange(40)], "blocks", 3, share)
        assert [len(part) for part in parts_of(rows)] == [32 - windows, windows, 8]


def test_the_share_of_validation_in_single_rows():
    # 50 of each class, 10 each in test; of the 80 left 8, 20 and 40.
    y = np.repeat([0, 1], 50)
    dataset = Dataset(np.zeros((100, 1)), y, ("a", "b"))
    for share, n in ((0.0, 0), (0.1, 8), (0.25, 20), (0.5, 40)):
        (rows,) = split.split(dataset, [np.arange(100)], "random", 3, share)
        assert [len(part) for part in parts_of(rows)] == [80 - n, n, 20]


@pytest.mark.parametrize("kind", ["blocks", "random"])
def test_the_test_part_does_not_depend_on_the_share(kind):
    dataset = chains([4] * 10, [3, 9, 5, 5])
    tests = []
    for share in (0.0, 0.1, 0.5):
        (rows,) = split.split(dataset, [np.arange(62)], kind, 3, share)
        tests.append(rows.test.tolist())
    assert tests[0] == tests[1] == tests[2]


def test_a_mixed_block_that_holds_all_of_a_class_goes_back_to_training():
    # Two blocks of four rows of class 0, and one that holds the only row of class 1 beside three of
    # class 0: whichever test leaves, training keeps class 1 unless test has it.
    y = np.zeros(12, int)
    y[11] = 1
    block = np.repeat([0, 1, 2], 4)
    dataset = Dataset(
        np.zeros((12, 1)), y, ("a", "b"), block=block, start=block * 9 + np.arange(12), reach=1
    )
    for seed in range(12):
        (rows,) = split.split(dataset, [np.arange(12)], "blocks", seed, SHARE)
        assert 11 not in rows.validation


@pytest.mark.parametrize("share", [-0.1, 0.51, float("nan")])
def test_a_share_that_cannot_be_held_out_is_refused(share):
    with pytest.raises(InputError, match=r"validation is .*; it must be from 0, .* to 0\.5\."):
        split.check_validation(share)
