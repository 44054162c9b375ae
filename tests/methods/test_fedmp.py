"""FedMP: recovery, time and reward by hand, and when bandits learn."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import make_run, play
from tests.contract import Contract
from tests.methods.exchanges import exchanges

from fedgrove import trees
from fedgrove.channels.find_groups import find_groups, find_kept_channels, make_channel_mask
from fedgrove.channels.submodel import fill_missing_channels
from fedgrove.core import ClientInfo, Packet, Report, Setup
from fedgrove.data.federation import Examples
from fedgrove.engines import Serial
from fedgrove.errors import InputError
from fedgrove.methods.fedmp import EUCB, FedMP, mean_loss, rewarded, seconds
from fedgrove.nets import Net
from fedgrove.runs.run import Run

CONTRACT = Contract(
    off=FedMP(most=0.0),
    sends_masks=True,
    # Ratio .4: 38 of 64 units: 12*38+38 = 494, 38*38+38 = 1482, 38*3+3 = 117: 2093.
    paper_bytes=8 * 2093 * 3 * 50,
    refused_with_privacy="numbers next to their model",
)

NET = Net(torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1)), (1,))
FIRST = {
    "0.weight": torch.tensor([[1.0], [-4.0], [3.0], [2.0]]),
    "0.bias": torch.tensor([0.1, 0.2, 0.3, 0.4]),
    "2.weight": torch.tensor([[1.0, 2.0, 3.0, 4.0]]),
    "2.bias": torch.tensor([0.5]),
}
METHOD = FedMP()


def start() -> Setup:
    return Setup(FIRST, NET, {0: ClientInfo(1), 1: ClientInfo(3)}, 5, lambda j: FIRST)


def filled(value: float, kept: list[bool]) -> Packet:
    """A sub-model whose numbers are all the same."""
    mask = make_channel_mask(NET, {"0": torch.tensor(kept)})
    values = trees.map(lambda leaf: torch.full_like(leaf, value), FIRST)
    return Packet(trees.apply_mask(values, mask), mask)


def test_a_sub_model_keeps_the_filters_of_largest_l1() -> None:
    """Ratio 1/2 of 1, 4, 3, 2: the second and third stay."""
    state = METHOD.init(start())
    halves = replace(METHOD, bandit=AlwaysHalf())
    (task,) = halves.plan(state, [0])
    packet = task.send["model"]
    assert packet.mask is not None
    assert packet.mask["0.bias"].tolist() == [False, True, True, False]
    assert packet.values["0.weight"].flatten().tolist() == [0.0, -4.0, 3.0, 0.0]
    assert packet.values["2.weight"].flatten().tolist() == [0.0, 2.0, 3.0, 0.0]


class AlwaysHalf(EUCB):
    """A bandit that plays 1/2."""

    def __call__(self, edges: Any, plays: Any, draw: float) -> float:
        return 0.5


def test_recovery_by_hand() -> None:
    """The sub-model's numbers in its channels, the server's own in the others."""
    whole = fill_missing_channels(filled(9.0, [False, True, True, False]), FIRST, find_groups(NET))
    assert whole["0.weight"].flatten().tolist() == [1.0, 9.0, 9.0, 2.0]
    torch.testing.assert_close(whole["0.bias"], torch.tensor([0.1, 9.0, 9.0, 0.4]))
    assert whole["2.weight"].flatten().tolist() == [1.0, 9.0, 9.0, 4.0]
    assert whole["2.bias"].tolist() == [9.0]


def test_the_mean_by_hand() -> None:
    """1 example with all of it, at 9; 3 with half, at 5: (9 + 3*5) / 4 = 6 where both are.

    In the first channel the second counts as the model was: (9 + 3*1) / 4 = 3; in the last of the
    second layer (9 + 3*4) / 4 = 5.25.
    """
    metrics = {"seconds": 1.0, "loss": 0.5}
    one = Report(0, {"model": Packet(filled(9.0, [True] * 4).values)}, 1, metrics)
    two = Report(1, {"model": filled(5.0, [False, True, True, False])}, 3, metrics)
    after = METHOD.fold(METHOD.init(start()), [one, two])
    assert after.model["0.weight"].flatten().tolist() == [3.0, 6.0, 6.0, 3.75]
    assert after.model["2.weight"].flatten().tolist() == [3.0, 6.0, 6.0, 5.25]
    assert after.model["2.bias"].tolist() == [6.0]
    assert after.loss == 0.5


def test_seconds_by_hand() -> None:
    """Computing 3 * 5e6 * 100 * 2 / (.5 * 1e9) = 6; sending 2 * 32e6 bits at 64 Mbit/s = 1."""
    info = ClientInfo(100, bandwidth=64.0, speed=0.5)
    assert seconds(info, macs=5_000_000, params=1_000_000, epochs=2) == 7.0


def test_rewards_by_hand() -> None:
    """Times 1, 3 and 2 have the mean 2: gaps .5, .5 and 0, which counts as .1."""
    assert rewarded(0.5, {0: 1.0, 1: 3.0, 2: 2.0}) == {0: 1.0, 1: 1.0, 2: 5.0}
    # A loss that rises gains nothing, and times of 0 divide nothing.
    assert rewarded(-0.5, {0: 1.0, 1: 3.0}) == {0: 0.0, 1: 0.0}
    assert rewarded(0.5, {0: 0.0}) == {0: 5.0}


def test_mean_loss_by_hand() -> None:
    """(1*2 + 3*6) / 4."""
    assert mean_loss({0: (1, 2.0), 1: (3, 6.0)}) == 5.0


def answered(method: FedMP, state: Any, loss: float) -> Any:
    packet = Packet(state.model)
    both = [
        Report(k, {"model": packet}, 1, {"seconds": time, "loss": loss})
        for k, time in ((0, 1.0), (1, 3.0))
    ]
    return method.fold(state, both)


def test_bandits_learn_from_the_second_round_on() -> None:
    """The loss falls from 2 to 1.5 in the second round: .5 over a gap of .5 is 1, for both."""
    first = METHOD.init(start())
    second = answered(METHOD, first, 2.0)
    assert (second.loss, second.edges, second.plays) == (2.0, {}, {})
    third = answered(METHOD, second, 1.5)
    for client in (0, 1):
        played = METHOD.ratio(second, client)
        assert third.plays[client] == ((played, 1.0),)
        assert third.edges[client] == (0.0, played, 0.8)
        # Then the interval below is tried, which was not played.
        assert METHOD.ratio(third, client) < played
    assert METHOD.ratio(second, 0) != METHOD.ratio(second, 1)


def test_only_those_who_answered_learn() -> None:
    state = answered(METHOD, METHOD.init(start()), 2.0)
    report = Report(1, {"model": Packet(state.model)}, 1, {"seconds": 1.0, "loss": 1.0})
    after = METHOD.fold(state, [report])
    assert list(after.plays) == [1]
    # Nobody: the model, the loss and the bandits stay.
    empty = METHOD.fold(after, [])
    assert (empty.round, empty.loss, empty.plays) == (3, after.loss, after.plays)


def test_a_loss_that_is_a_lie_leaves_numbers_finite() -> None:
    state = answered(METHOD, METHOD.init(start()), 1e308)
    assert state.loss == 1e6
    after = answered(METHOD, state, 1.0)
    assert all(abs(reward) < 1e8 for plays in after.plays.values() for _, reward in plays)


def tiny(folder: Path, **words: Any) -> Run:
    return make_run(FedMP(**words), folder, rounds=5, dtype=torch.float32, net="bn-cnn2")


def test_clients_train_smaller_models_and_say_how_long_it_took(tmp_path: Path) -> None:
    run = tiny(tmp_path)
    layout = run.net.layout
    narrow = 0
    for before, tasks, answers, _ in exchanges(run):
        for task, report in zip(tasks, answers, strict=True):
            ratio = run.method.ratio(before, task.to)
            left = find_kept_channels(run.net, task.send["model"].mask)
            for group in find_groups(run.net):
                count = group.size if left is None else int(left[group.name].sum())
                assert count == max(1, round((1 - ratio) * group.size))
            epochs = run.method.local.epochs
            whole = seconds(run.infos[task.to], layout.macs, layout.size, epochs)
            if left is None:
                assert report.metrics["seconds"] == whole
            else:
                assert 0 < report.metrics["seconds"] < whole
                narrow += 1
    assert narrow > 5


def test_with_too_few_examples_for_a_fold_no_bandit_learns(tmp_path: Path) -> None:
    run = tiny(tmp_path)
    clients = {}
    for k, data in run.federation.clients.items():
        few = Examples(data.train.x[:9], data.train.y[:9])
        clients[k] = replace(data, train=few, info=replace(data.info, examples=9))
    run = replace(run, federation=replace(run.federation, clients=clients))
    state = play(run, Serial())
    assert state.loss is None
    assert state.plays == {}


def mean_gap(method: FedMP) -> float:
    """How far the times of two devices are from their mean, in rounds 50 to 100.

    One is half as fast as the other; time grows with what is kept; the loss keeps falling.
    """
    state = replace(method.init(start()), loss=1.0)
    gaps = []
    for _ in range(100):
        ratios = [method.ratio(state, client) for client in (0, 1)]
        times = (2 * (1 - ratios[0]), 1 - ratios[1])
        metrics = [{"seconds": time, "loss": 0.95 * state.loss} for time in times]
        packet = Packet(state.model)
        state = method.fold(state, [Report(k, {"model": packet}, 1, metrics[k]) for k in (0, 1)])
        gaps.append(abs(times[0] - times[1]) / sum(times))
    return sum(gaps[50:]) / 50


def test_bandits_bring_the_times_of_devices_together() -> None:
    """A single interval that is never divided draws ratios at random."""
    seeds = range(3)
    learnt = sum(mean_gap(FedMP(draw=seed)) for seed in seeds)
    drawn = sum(mean_gap(FedMP(draw=seed, bandit=EUCB(finest=9.0))) for seed in seeds)
    assert learnt < 0.8 * drawn


def test_a_ratio_of_zero_is_the_whole_model(tmp_path: Path) -> None:
    run = tiny(tmp_path, most=0.0)
    for task in run.method.plan(run.initial_state, [0, 1]):
        assert task.send["model"].mask is None
    assert play(run, Serial()).plays == {}


@pytest.mark.parametrize("most", [-0.1, 1.0])
def test_an_impossible_ratio_is_refused(most: float) -> None:
    with pytest.raises(InputError, match=rf"^most is {most}; it must be in \[0, 1\)\.$"):
        FedMP(most=most)


def test_a_net_without_channels_is_refused() -> None:
    net = Net(torch.nn.Linear(3, 2), (3,))
    params = net.params()
    with pytest.raises(InputError, match="it has no channels that can be removed"):
        METHOD.init(Setup(params, net, {0: ClientInfo(1)}, 5, lambda j: params))


def test_both_directions_count() -> None:
    """32 Mbit down at 64 Mbit/s and up at 16: half a second and two."""
    device = ClientInfo(1, bandwidth=16.0, downlink=64.0)
    assert seconds(device, macs=0, params=1_000_000, epochs=1) == 2.5


def test_a_bandit_forgets_what_no_longer_counts() -> None:
    """.5^20 is below a millionth, .5^19 is not."""
    assert EUCB(discount=0.5).remembered == 20
    assert EUCB(discount=1.0).remembered == 10_000
