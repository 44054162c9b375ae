import numpy as np
import pytest
import torch

from fedgrove import data
from fedgrove.data import profile, scenario
from fedgrove.errors import InputError


def changed(a, b, part):
    return {
        k
        for k in a.clients
        if not torch.equal(getattr(a.clients[k], part).y, getattr(b.clients[k], part).y)
    }


@pytest.fixture(scope="module")
def clean():
    return data.load("motion", clients=20)


@pytest.mark.parametrize(
    ("text", "tested"),
    [("noisy", False), ("noisy:all", True), ("drift", True), ("drift:train", False)],
)
def test_two_fifths_of_clients_are_touched_and_inputs_never(clean, text, tested):
    wrong = data.load("motion", clients=20, scenario=text)
    touched = changed(clean, wrong, "train")
    assert len(touched) == 8  # 0.4 x 20
    assert changed(clean, wrong, "test") == (touched if tested else set())
    assert changed(clean, wrong, "validation") <= touched
    assert all(
        torch.equal(clean.clients[k].train.x, wrong.clients[k].train.x) for k in clean.clients
    )
    assert any("random labels" in note for note in wrong.notes) == tested


def test_share_of_wrong_labels():
    # 30 % replaced, of which 1 in 5 is right by chance: 24 % wrong; drift: 80 % wrong.
    y = np.zeros(20000, dtype=np.int64)
    noisy = scenario.corrupted(scenario.parse("noisy"), y, 5, np.random.default_rng(0))
    drift = scenario.corrupted(scenario.parse("drift"), y, 5, np.random.default_rng(0))
    assert (noisy != 0).mean() == pytest.approx(0.24, abs=0.01)
    assert np.bincount(drift) / 20000 == pytest.approx(np.full(5, 0.2), abs=0.015)
    assert not y.any()


def test_restricted_keeps_k_of_the_clients_own_classes(clean):
    few = data.load("motion", clients=20, scenario="restricted:2")
    for client in few.clients.values():
        assert len(client.train.y.unique()) == 2
        assert set(client.test.y.tolist()) <= set(client.train.y.tolist())
    assert few.classes == 5
    assert len({tuple(c.train.y.unique().tolist()) for c in few.clients.values()}) > 3


@pytest.mark.parametrize(
    "text", ["nosy", "noisy:some", "restricted", "restricted:x", "restricted:0", "drift:2"]
)
def test_wrong_words_are_refused(text):
    with pytest.raises(InputError, match="scenario"):
        scenario.parse(text)


def test_more_classes_than_there_are_is_refused():
    with pytest.raises(InputError, match="at most 5 classes"):
        data.load("motion", scenario="restricted:6")


def test_adfedwcp_bandwidth_is_the_papers():
    b = np.array([profile.info("adfedwcp", 1, k, 0).bandwidth for k in range(2000)])
    assert (b == np.round(b)).all()
    assert 5 <= b.min() < b.max() <= 100
    assert b.mean() == pytest.approx(52.5, abs=1.2)  # standard error 15.83 / sqrt(2000) = 0.35
    assert b.std() == pytest.approx(15.83, abs=0.8)


def test_phones_are_three_tiers_and_do_not_depend_on_other_clients():
    infos = [profile.info("phones", 1, k, 0) for k in range(1000)]
    shares = [sum(i.bandwidth == tier[1] for i in infos) / 1000 for tier in profile.TIERS]
    assert shares == pytest.approx([0.3, 0.4, 0.3], abs=0.05)
    assert infos[7] == profile.info("phones", 1, 7, 0)
