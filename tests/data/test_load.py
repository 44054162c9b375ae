import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedgrove as fg
from fedgrove import data
from fedgrove.data.dataset import Dataset, Pixels
from fedgrove.data.preparation import fit_preparation
from fedgrove.data.sets.generated import make_motion
from fedgrove.errors import InputError
from fedgrove.problems import Unit


def check_shape(f):
    assert list(f.clients) == list(range(len(f.clients)))
    assert len(f.labels) == f.classes
    for c in f.clients.values():
        assert c.info.examples == len(c.train) > 0
        assert len(c.test) > 0
        for part in (c.train, c.validation, c.test):
            assert part.x.shape == (len(part), *f.shape)
            assert part.x.dtype == torch.float32
            assert part.y.dtype == torch.int64
            assert part.x.is_contiguous()
            assert ((part.y >= 0) & (part.y < f.classes)).all()


@pytest.mark.parametrize("name", ["digits", "motion"])
@pytest.mark.parametrize(
    "partition", [None, "iid", "dirichlet:0.5", "dirichlet-clients:0.5", "classes:2", "shards"]
)
def test_built_in_sets_under_every_partition(name, partition):
    f = data.load(name, partition=partition, clients=12)
    assert len(f.clients) == 12
    assert f.defaults.cohort <= 12
    check_shape(f)


def test_a_set_is_a_function_of_its_seed():
    one = data.load("digits")
    again = data.load("digits")
    other = data.load("digits", seed=1)
    assert all(torch.equal(one.clients[k].train.x, again.clients[k].train.x) for k in one.clients)
    assert [len(c.train) for c in one.clients.values()] != [
        len(c.train) for c in other.clients.values()
    ]


def test_digits_are_dealt_once_each_and_standardised_as_a_whole():
    f = data.load("digits")
    x = torch.cat([p.x for c in f.clients.values() for p in (c.train, c.validation, c.test)])
    assert len(x) == 1797
    assert float(x.mean()) == pytest.approx(0, abs=1e-3)
    assert float(x.std()) == pytest.approx(1, abs=1e-3)
    raw = data.load("digits", standardise=False)
    assert float(raw.clients[0].train.x.max()) == 1.0
    assert float(raw.clients[0].train.x.min()) == 0.0


def test_channels_are_standardised_on_the_clients_own_training_windows():
    f = data.load("motion", clients=6)
    for c in f.clients.values():
        assert c.train.x.mean(dim=(0, 2)) == pytest.approx(np.zeros(3), abs=1e-5)
        assert c.train.x.std(dim=(0, 2)) == pytest.approx(np.ones(3), abs=1e-3)
        assert abs(float(c.test.x.mean())) > 1e-6


def test_scaling_by_hand():
    # Training rows 0 and 1 of one channel: 1, 3 -> mean 2, deviation 1; the test value 5 becomes 3.
    # The second channel does not move: it is centred only. Pixels: (51 / 255 - 0.1) / 0.5 = 0.2.
    x = np.array([[1, 7], [3, 7], [5, 8]], dtype=np.float64)
    own = fit_preparation(Dataset(x, np.zeros(3, int), ("a",)), np.array([0, 1]), True)
    assert own.scale(x.astype(np.float32)).tolist() == [[-1, 0], [1, 0], [3, 1]]
    image = Dataset(
        np.full((1, 1, 1, 1), 51, np.uint8),
        np.zeros(1, int),
        ("a",),
        pixels=Pixels(255.0, (0.1,), (0.5,)),
    )
    for standardise in (True, False):
        scaled = fit_preparation(image, None, standardise).scale(image.x.astype(np.float32))
        assert scaled.item() == pytest.approx(0.2, abs=1e-6)


def test_motion_of_one_kind_swings_where_another_kinds_next_activity_does():
    # Kind 0 running (a = 4): 0.8 x 1.5^3 / 1.5 = 1.8 Hz = kind 1 jogging (a = 3): 0.8 x 1.5^2.
    dataset = make_motion(6)

    def peak(user, activity):
        x = dataset.x[(dataset.user == user) & (dataset.y == activity)]
        power = np.abs(np.fft.rfft(x - x.mean(axis=2, keepdims=True), 512)) ** 2
        return np.fft.rfftfreq(512, 1 / 20)[power.mean(axis=(0, 1)).argmax()]

    assert peak(0, 4) == pytest.approx(1.8, rel=0.2)
    assert peak(1, 3) == pytest.approx(1.8, rel=0.2)
    assert peak(2, 3) == pytest.approx(2.7, rel=0.2)


def test_more_motion_users_leave_the_first_ones_as_they_are():
    few = make_motion(3)
    many = make_motion(5)
    assert np.array_equal(few.x, many.x[: len(few.x)])


def test_random_split_of_overlapping_windows_names_the_leak():
    assert any("leaks" in n for n in data.load("motion", split="random").notes)
    assert not any("leaks" in n for n in data.load("motion").notes)


def test_to_casts_inputs_only():
    f = data.load("digits").to(torch.float64)
    assert f.clients[0].train.x.dtype == f.clients[0].test.x.dtype == torch.float64
    assert f.clients[0].train.y.dtype == torch.int64


def own(n=120, clients=4, shape=(3,)):
    rng = np.random.default_rng(0)
    return rng.normal(size=(n, *shape)), np.arange(n) % 3, np.arange(n) % clients


@pytest.mark.parametrize(
    ("shape", "net"), [((3,), "mlp"), ((2, 16), "har-cnn"), ((1, 8, 8), "mnist-cnn")]
)
def test_own_arrays(shape, net):
    f = data.from_arrays(*own(shape=shape))
    check_shape(f)
    assert len(f.clients) == 4
    assert (f.shape, f.classes, f.defaults.net, f.name) == (shape, 3, net, "arrays")


def test_own_names_of_classes_and_clients():
    x, y, client = own()
    words = np.array(["walk", "run", "sit"])[y]
    f = data.from_arrays(x, words, np.array(["ann", "bob", "cy", "di"])[client])
    assert f.labels == ("run", "sit", "walk")
    assert len(f.clients) == 4


def test_own_arrays_without_clients_are_dealt():
    x, y, _ = own()
    assert len(data.from_arrays(x, y).clients) == 10
    assert len(data.from_arrays(x, y, partition="classes:1", clients=3).clients) == 3


def test_own_blocks_stay_together():
    # x is the block's number, so a block on both sides would show as an equal value.
    block = np.repeat(np.arange(24), 5)
    f = data.from_arrays(
        block[:, None].astype(float), block // 2 % 3, block // 12, block=block, standardise=False
    )
    assert len(f.clients) == 2
    for c in f.clients.values():
        held = set(c.test.x.ravel().tolist())
        assert held
        assert not held & {*c.train.x.ravel().tolist(), *c.validation.x.ravel().tolist()}


def test_blocks_may_be_numbered_per_client():
    x, y, _ = own()
    client = np.arange(120) // 60
    block = np.arange(120) // 5
    one = data.from_arrays(x, y, client, block=block)
    two = data.from_arrays(x, y, client, block=block % 12)
    assert all(one.clients[k].train.x.equal(two.clients[k].train.x) for k in (0, 1))


def test_own_file(tmp_path):
    x, y, client = own()
    np.savez(tmp_path / "mine.npz", x=x, y=y, client=client)
    f = data.load(tmp_path / "mine.npz")
    g = data.load(str(tmp_path / "mine.npz"))
    assert f.name == g.name == "mine"
    assert torch.equal(f.clients[2].test.x, g.clients[2].test.x)
    assert torch.equal(f.clients[2].test.x, data.from_arrays(x, y, client).clients[2].test.x)


def test_a_client_that_cannot_be_split_is_left_out_and_that_is_said():
    x, y, client = own()
    client = client.copy()
    client[0] = 99  # one example
    f = data.from_arrays(x, y, client)
    assert len(f.clients) == 4
    assert f.notes == ("1 client with too little data left out: 99",)


def test_windows_without_blocks_say_that_neighbours_may_be_on_both_sides(tmp_path):
    x, y, client = own(shape=(2, 16))
    note = "windows without block: neighbouring windows may be on both sides of the split"
    assert data.from_arrays(x, y, client).notes == (note,)
    np.savez(tmp_path / "mine.npz", x=x, y=y, client=client)
    assert data.load(tmp_path / "mine.npz").notes == (note,)
    assert note not in data.from_arrays(x, y, client, block=np.arange(120) // 5).notes
    assert note not in data.from_arrays(*own()).notes


def test_the_share_of_validation_is_a_word(tmp_path):
    x, y, client = own()
    np.savez(tmp_path / "mine.npz", x=x, y=y, client=client)
    # 30 rows for each client, 10 of each class: 6 in test; of 24 left a tenth is 2, a half 12.
    for share, n in ((0, 0), (0.1, 2), (0.5, 12)):
        for f in (
            data.from_arrays(x, y, client, validation=share),
            data.load(tmp_path / "mine.npz", validation=share),
        ):
            assert f.validation == share
            assert f.notes == ()
            check_shape(f)
            for c in f.clients.values():
                assert (len(c.train), len(c.validation), len(c.test)) == (24 - n, n, 6)
    assert data.load("digits").validation == 0


def test_clients_without_validation_examples_are_counted_in_a_note():
    # Client 0 has two blocks of each class, too few for validation; client 1 has four.
    block = np.repeat(np.arange(18), 5)
    client = (block >= 6).astype(int)
    x = block[:, None].astype(float)
    f = data.from_arrays(x, block % 3, client, block=block, validation=0.1)
    assert [len(c.validation) for c in f.clients.values()] == [0, 15]
    assert f.notes == ("1 of 2 clients have no validation examples",)


X, YY, C = own()
BAD = [
    (lambda: data.load("digits", validation=0.6), "validation is 0.6; it must be from 0"),
    (lambda: data.from_arrays(X, YY, validation=-1), "validation is -1"),
    (lambda: data.load("digit"), "did you mean 'digits'"),
    (lambda: data.load("digits", split="block"), "blocks"),
    (lambda: data.load("digits", split="blocks"), "cannot be split by blocks"),
    (lambda: data.load("digits", partition="natural"), "no natural users"),
    (lambda: data.load("digits", profile="phone"), "phones"),
    (lambda: data.load("digits", clients=0), "clients is 0"),
    (lambda: data.load("digits", clients=5000), "at most 898"),
    (lambda: data.load("nothing.npz"), "there is no file"),
    (lambda: data.describe("digit"), "did you mean"),
    (lambda: data.from_arrays(X[:, 0], YY), "x is"),
    (lambda: data.from_arrays(X, YY[:-1]), "y is"),
    (lambda: data.from_arrays(X, np.where(YY > 0, np.nan, 1.5)), "y is .* NaN"),
    (lambda: data.from_arrays(X, YY[:-1] + 0.5), "y is"),
    (lambda: data.from_arrays(X, YY * 5 + 1.7e9), "deviation 1e-05 of their mean .* subtract a"),
    (lambda: data.from_arrays(X, YY * 5 + 1.7e9, standardise=False), "subtract a constant first"),
    (lambda: data.from_arrays(X, YY * 1e-10 + 1), "subtract a constant first"),
    (lambda: data.from_arrays(X, YY * 1e300), r"y is .* up to .*e\+300'; .* divide"),
    (lambda: data.from_arrays(X, YY * 1e-20), "multiply them by a constant"),
    (lambda: data.from_arrays(X * 1e300, YY), r"x is .* up to .*e\+300'; .* divide"),
    (lambda: data.from_arrays(X, np.stack([YY, YY], 1) + 5), "0 or 1 for several labels"),
    (lambda: data.from_arrays(X, YY[:, None]), "of whole numbers"),
    (lambda: data.from_arrays(X, YY + 0.5, partition="dirichlet:1"), "needs classes"),
    (lambda: data.from_arrays(X, YY + 0.5, scenario="noisy"), "changes classes"),
    (lambda: data.load("rooms", partition="classes:2"), "needs classes"),
    (lambda: data.from_arrays(X, YY * 0), "two classes"),
    (lambda: data.from_arrays(X, YY, C[:5]), "client is"),
    (lambda: data.from_arrays(np.where(X > 2, np.nan, X), YY), "finite"),
    (lambda: data.from_arrays(X, YY, C, clients=5), "at most 4"),
    (lambda: data.from_arrays(X, YY, C, split="blocks"), "without block"),
    (lambda: data.from_arrays(X, YY, np.arange(120)), "enough examples"),
    (lambda: data.from_arrays(X[:0], YY[:0]), "two classes"),
]


@pytest.mark.parametrize(("act", "says"), BAD, ids=itertools.count())
def test_bad_input_is_refused_in_a_sentence(act, says):
    with pytest.raises(InputError, match=says) as caught:
        act()
    assert str(caught.value).endswith(".")


def test_a_pickle_is_never_opened(tmp_path):
    np.savez(tmp_path / "evil.npz", x=np.array([{}], dtype=object), y=np.zeros(1))
    (tmp_path / "text.npz").write_text("not a zip")
    for name in ("evil.npz", "text.npz"):
        with pytest.raises(InputError, match="cannot be read as npz"):
            data.load(tmp_path / name)
    np.savez(tmp_path / "half.npz", x=np.zeros((3, 1)))
    with pytest.raises(InputError, match="has no y"):
        data.load(tmp_path / "half.npz")


def test_names_and_descriptions():
    assert {
        "digits",
        "motion",
        "motion-forecast",
        "rooms",
        "tags",
        "diabetes",
        "crowd",
        "uci-har",
        "uci-har-forecast",
        "wisdm",
        "wisdm51",
        "mit-bih",
        "audio-mnist",
        "mnist",
        "fashion-mnist",
        "emnist",
        "emnist:byclass",
        "emnist:bymerge",
        "emnist:letters",
        "emnist:digits",
        "emnist:mnist",
        "svhn",
        "svhn:extra",
        "cifar10",
        "cifar100",
    } <= set(data.names())
    assert all("\n" not in data.describe(n) for n in data.names())


# ---- what y is ------------------------------------------------------------------------------------


def saved(tmp_path, y):
    np.savez(tmp_path / "mine.npz", x=X, y=y, client=C)
    return data.load(tmp_path / "mine.npz")


def test_y_decides_what_the_problem_is(tmp_path):
    whole = saved(tmp_path, YY)
    assert (whole.problem.name, whole.clients[0].train.y.dtype) == ("classes", torch.int64)
    one = saved(tmp_path, YY + 0.5)
    assert (one.problem.name, one.classes, one.notes) == ("numbers", 1, ())
    assert one.clients[0].train.y.shape[1:] == (1,)
    two = saved(tmp_path, np.stack([YY + 0.5, YY - 0.5], 1))
    assert (two.problem.name, two.classes, two.labels) == ("numbers", 2, ("y0", "y1"))
    yes = saved(tmp_path, np.stack([YY > 0, YY > 1, YY > 2], 1))
    assert (yes.problem.name, yes.classes, yes.notes) == ("labels", 3, ())


def test_what_is_ambiguous_is_said(tmp_path):
    (note,) = saved(tmp_path, YY.astype(float)).notes
    assert "read as numbers" in note
    assert "astype(int)" in note
    (note,) = saved(tmp_path, np.stack([YY > 0, YY > 1], 1).astype(float)).notes
    assert "read as several labels" in note


def test_numbers_are_learnt_in_units_of_the_training_rows():
    federation = data.from_arrays(X, 10.0 * YY + 0.5, C)
    rows = torch.cat([client.train.y for client in federation.clients.values()]).double()
    unit = federation.problem.loss.unit
    assert unit.mean[0] == pytest.approx(float(rows.mean()))
    assert unit.scale[0] == pytest.approx(float(rows.std(correction=0)))
    plain = data.from_arrays(X, 10.0 * YY + 0.5, C, standardise=False)
    assert plain.problem.loss.unit == Unit()


def test_small_numbers_and_constants_are_learnt_too():
    # Of deviation about 1e-9: no constant, though far smaller than 1.
    small = data.from_arrays(X, 1e-9 * YY + 1e-12, C)
    rows = torch.cat([client.train.y for client in small.clients.values()])
    unit = small.problem.loss.unit
    assert unit.scale[0] == pytest.approx(float(rows.double().std(correction=0)))
    assert unit.outputs_of(rows).std(correction=0) == pytest.approx(1, rel=1e-4)
    # The float64 mean of a tenth is not a tenth to the last digit: no deviation to divide by.
    assert data.from_arrays(X, YY * 0 + 0.1, C).problem.loss.unit.scale == (1.0,)


@given(mean=st.floats(-1e12, 1e12), exponent=st.floats(-6, 2))
def test_numbers_that_are_accepted_are_told_apart_in_float32(mean, exponent):
    """To a fiftieth of their deviation, and so is every error that is reported."""
    y = mean + (1 + abs(mean)) * 10**exponent * np.linspace(-1, 1, len(X))
    try:
        federation = data.from_arrays(X, y, C, standardise=False)
    except InputError:
        assert y.std() < 1e-5 * abs(y.mean())
        return
    parts = []
    for client in federation.clients.values():
        parts += [client.train.y, client.validation.y, client.test.y]
    stored = torch.cat(parts).double().flatten().sort().values.numpy()
    assert np.abs(stored - y).max() <= 0.02 * y.std()


# ---- few training examples -----------------------------------------------------------------------


def test_at_most_n_training_examples_and_the_same_test_part():
    whole = data.load("digits", clients=4, seed=3)
    few = data.load("digits", clients=4, seed=3, train_examples=20)
    assert few.train_examples == 20
    for k in range(4):
        train = few.client(k).train
        assert len(train) == few.client(k).info.examples == min(20, len(whole.client(k).train))
        assert torch.equal(few.client(k).test.y, whole.client(k).test.y)
        # Classes keep their shares, up to rounding.
        counts = torch.bincount(whole.client(k).train.y, minlength=10)
        expected = counts * len(train) / counts.sum()
        assert (torch.bincount(train.y, minlength=10) - expected).abs().max() < 1


def test_inputs_are_scaled_by_the_examples_that_are_left():
    few = data.load("motion", clients=3, train_examples=10)
    x = few.client(0).train.x
    assert x.shape[0] == 10
    assert float(x.mean((0, 2)).abs().max()) < 1e-5


def test_a_limit_applies_to_made_and_mixed_clients_too():
    crowd = data.load("crowd", clients=5, train_examples=7)
    assert [len(crowd.client(k).train) for k in range(5)] == [7] * 5
    assert crowd.infos[0].examples == 7
    both = data.load("motion+motion-forecast", clients=4, train_examples=6)
    assert [len(both.client(k).train) for k in range(4)] == [6] * 4
    assert both.train_examples == 6
    x, y = np.zeros((40, 3), np.float32), np.arange(40) % 2
    own = data.from_arrays(x, y, np.arange(40) % 2, train_examples=4)
    assert torch.bincount(own.client(0).train.y).tolist() == [4]


def test_a_run_on_divided_data_with_a_limit_resumes(tmp_path):
    few = data.load("digits", clients=3, train_examples=8)
    result = fg.run("fedavg", data=few, rounds=1, out=tmp_path / "run", engine="serial")
    longer = fg.resume(result.folder.path, data=few, rounds=2)
    assert longer.summary["rounds"] == 2
    assert longer.summary["train_examples"] == 8


def test_a_limit_below_one_is_refused():
    with pytest.raises(InputError, match="train_examples is 0; it must be above 0"):
        data.load("digits", train_examples=0)


def test_rows_without_clients_are_divided_with_a_note():
    x, y = np.zeros((60, 3), np.float32), np.arange(60) % 2
    made_up = data.from_arrays(x, y, clients=3)
    (note,) = made_up.notes
    assert note.startswith("the data name no clients: their rows are divided among 3 clients")
    assert data.from_arrays(x, y, clients=3, partition="iid").notes == ()
    assert data.from_arrays(x, y, np.arange(60) % 3).notes == ()
