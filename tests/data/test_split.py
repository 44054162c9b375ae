import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fedgrove.data import partition, split
from fedgrove.data.dataset import Dataset, ids
from fedgrove.data.windows import windowed

LENGTH = 8
STEP = 4


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
    return windowed(signal, np.repeat(y, n), np.repeat(user, n), "abcd", LENGTH, STEP)


@given(recordings(), st.integers(0, 99))
@settings(deadline=None, max_examples=150)
def test_blocks_never_put_a_raw_sample_on_both_sides(dataset, seed):
    owned = [np.flatnonzero(dataset.user == u) for u in np.unique(dataset.user)]
    done = split.split(dataset, owned, "blocks", seed)
    test = samples(dataset, np.concatenate([r.test for r in done] or [[]]).astype(int))
    for rows, mine in zip(done, owned, strict=True):
        assert not samples(dataset, rows.train) & test
        assert not samples(dataset, rows.validation) & test
        assert not samples(dataset, rows.train) & samples(dataset, rows.validation)
        assert set(dataset.y[rows.train]) == set(dataset.y[mine])  # no class is lost to training
        for c in np.unique(dataset.y[mine]):  # and every class that has two blocks is tested
            several = len(np.unique(dataset.block[mine][dataset.y[mine] == c])) > 1
            assert (c in dataset.y[rows.test]) == several


@given(recordings(), st.integers(0, 99), st.integers(2, 4))
@settings(deadline=None, max_examples=60)
def test_nor_between_clients_that_share_a_recording(dataset, seed, clients):
    if len(dataset.y) < 40:
        return
    size = np.bincount(dataset.block)
    label = split.majority(dataset.block, dataset.y, len(size))
    dealt = partition.deal(
        partition.parse("iid"), label, size, clients, np.random.default_rng(seed)
    )
    owned = [np.flatnonzero(np.isin(dataset.block, units)) for units in dealt]
    done = split.split(dataset, owned, "blocks", seed)
    test = samples(dataset, np.concatenate([r.test for r in done]))
    train = samples(dataset, np.concatenate([np.r_[r.train, r.validation] for r in done]))
    assert not train & test


@given(st.lists(st.integers(0, 4), min_size=1, max_size=80).map(np.array), st.integers(0, 99))
@settings(deadline=None)
def test_random_uses_every_row_once_and_is_stratified(y, seed):
    dataset = Dataset(np.zeros((len(y), 1)), y, tuple("abcde"))
    (rows,) = split.split(dataset, [np.arange(len(y))], "random", seed)
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
    (rows,) = split.split(Dataset(np.zeros((40, 1)), y, ("a", "b")), [np.arange(40)], "random", 5)
    assert [np.bincount(y[p]).tolist() for p in parts_of(rows)] == [[7, 22], [1, 2], [2, 6]]


def test_blocks_by_hand():
    # One user, one activity, a run of 15 windows: five pieces of three, one held out (3 of 15 is a
    # fifth). The neighbours of an inner piece are dropped, one on each side; of an outer piece, one.
    dataset = windowed(
        np.zeros((LENGTH + 14 * STEP, 1)),
        np.zeros(64, int),
        np.zeros(64, int),
        ("a",),
        LENGTH,
        STEP,
    )
    for seed in range(8):
        (rows,) = split.split(dataset, [np.arange(15)], "blocks", seed)
        first = rows.test[0]
        assert rows.test.tolist() == [first, first + 1, first + 2]
        assert first % 3 == 0
        lost = {first - 1, first + 3} & set(range(15))
        assert len(rows.validation) == 1
        assert not lost & {*rows.train.tolist(), *rows.validation.tolist()}


def test_the_draw_depends_on_the_seed_and_the_client_alone():
    y = ids(np.arange(200) % 4)
    dataset = Dataset(np.zeros((200, 1)), y, tuple("abcd"))
    mine = np.arange(100)
    other = np.arange(100, 200)
    alone = split.split(dataset, [mine], "random", 1)[0]
    both = split.split(dataset, [mine, other], "random", 1)[0]
    assert alone.test.tolist() == both.test.tolist()
    assert alone.test.tolist() != split.split(dataset, [mine], "random", 2)[0].test.tolist()


def test_very_unequal_blocks_do_not_hand_the_test_part_the_large_one():
    y = np.zeros(42, int)
    block = np.repeat([0, 1], [40, 2])
    dataset = Dataset(
        np.zeros((42, 1)), y, ("a",), block=block, start=block * 1000 + np.arange(42), reach=1
    )
    for seed in range(5):
        (rows,) = split.split(dataset, [np.arange(42)], "blocks", seed)
        assert rows.test.tolist() == [40, 41]
