"""FedDST: readjustment and server by hand, when masks move, and that new weights are trained."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import make_run, play
from tests.contract import Contract
from tests.methods.exchanges import exchanges, verbs

from fedgrove import methods, trees
from fedgrove.core import ClientInfo, Packet, Report, Setup, Task
from fedgrove.engines import Serial
from fedgrove.errors import InputError
from fedgrove.methods.feddst import FedDST, State, cosine, readjust
from fedgrove.nets import Net
from fedgrove.parts.local import LocalTraining
from fedgrove.parts.robust import Median
from fedgrove.runs.run import Run

CONTRACT = Contract(
    small={"every": 1, "until": 2, "churn": 0.3},
    off=FedDST(density=1.0),
    # Nobody readjusts a mask in the first round.
    one_group=FedDST(),
    sends_masks=True,
    # A fifth of 5056 weights is 1011, and 131 biases. Readjusted in rounds 0 and 1, so two masks go up and three
    # down, one bit a weight.
    paper_bytes=8 * (1011 + 131) * 3 * 50 + 5056 / 8 * 3 * 5,
    refused_with_privacy="mask of 'model'",
)

NET = Net(torch.nn.Linear(6, 1), (6,))


def row(*values: float) -> torch.Tensor:
    return torch.tensor([values])


def kept(*places: int) -> torch.Tensor:
    return row(*(float(i in places) for i in range(6))).bool()


def test_cosine_by_hand() -> None:
    """Round 0: 0.4 / 2 * 2; round 2 of 8: 0.2 (1 + cos 45 deg) = 0.2 * 1.7071; round 4: 0.2."""
    assert cosine(0.4, 0, 8) == 0.4
    assert cosine(0.4, 2, 8) == pytest.approx(0.2 * (1 + math.sqrt(0.5)))
    assert cosine(0.4, 4, 8) == pytest.approx(0.2)


def readjusted(share: float) -> torch.Tensor:
    run_client: Any = None
    carry = {
        "settings": {"share": torch.tensor(share)},
        "model.mask": {"weight": kept(0, 1, 2, 3)},
        "first": {"weight": row(4.0, -1.0, 0.5, 2.0, 0.0, 0.0)},
        "gradient": {"weight": row(9.0, 9.0, 0.2, 9.0, -0.1, 0.3)},
    }
    return readjust(carry, run_client)["readjusted.mask"]["weight"]


def test_a_readjustment_by_hand() -> None:
    """Half of four weights: 0.5 and -1 are the smallest and fall.

    Outside are then the places 1, 2, 4, 5 with |gradients| 9, .2, .1, .3: the largest two are 1,
    which was just dropped and comes back, and 5.
    """
    assert torch.equal(readjusted(0.5), kept(0, 1, 3, 5))


def test_a_share_of_nothing_swaps_nothing() -> None:
    """An eighth of four weights is half a weight, which rounds to 0."""
    assert torch.equal(readjusted(0.125), kept(0, 1, 2, 3))


def test_the_server_by_hand() -> None:
    """Two of six weights stay. Clients of 1 and 3 examples hold places 0, 1 and 1, 2.

    Place 1: (1*2 + 3*6) / 4 = 5; place 0 is the first client's alone: 4; place 2 the second's: -7.
    The largest two are places 1 and 2. Place 5, in the mask before, has nobody: however large it
    was, it is gone.
    """
    first = {"weight": row(0.0, 9.0, 0.0, 0.0, 0.0, 99.0), "bias": torch.tensor([0.0])}
    state = State(1, first, {"weight": kept(1, 5)}, until=9)
    one = Packet(
        {"weight": row(4.0, 2.0, 0.0, 0.0, 0.0, 0.0), "bias": torch.tensor([1.0])},
        {"weight": kept(0, 1)},
    )
    two = Packet(
        {"weight": row(0.0, 6.0, -7.0, 0.0, 0.0, 0.0), "bias": torch.tensor([3.0])},
        {"weight": kept(1, 2)},
    )
    after = FedDST().fold(state, [Report(0, {"model": one}, 1), Report(1, {"model": two}, 3)])
    assert after.round == 2
    assert after.model["weight"].tolist() == [[0.0, 5.0, -7.0, 0.0, 0.0, 0.0]]
    assert after.model["bias"].tolist() == [2.5]
    assert torch.equal(after.mask["weight"], kept(1, 2))


def test_a_round_without_answers_changes_nothing_but_its_number() -> None:
    first = {"weight": row(0.0, 9.0, 0.0, 0.0, 0.0, 99.0), "bias": torch.tensor([0.0])}
    state = State(1, first, {"weight": kept(1, 5)}, until=9)
    after = FedDST().fold(state, [])
    assert after.round == 2
    assert trees.identical(after.model, first)
    assert torch.equal(after.mask["weight"], kept(1, 5))


def test_it_begins_with_the_largest_weights() -> None:
    weights = {"weight": row(1.0, -5.0, 2.0, -3.0, 4.0, 0.5), "bias": torch.tensor([7.0])}
    start = Setup(weights, NET, {0: ClientInfo(1)}, 10, lambda j: weights)
    state = FedDST(density=0.5).init(start)
    assert state.model["weight"].tolist() == [[0.0, -5.0, 0.0, -3.0, 4.0, 0.0]]
    assert state.model["bias"].tolist() == [7.0]
    assert state.until == 5


@pytest.mark.parametrize(
    ("every", "until", "rounds"),
    [(10, None, [1, 11, 21]), (10, 12, [1, 11]), (4, 9, [1, 5]), (1, 3, [0, 1, 2]), (3, 0, [])],
)
def test_when_masks_are_readjusted(every: int, until: int | None, rounds: list[int]) -> None:
    """The second round is the first; from `until` on, or half of the 50 rounds, none."""
    weights = {"weight": row(1.0, -5.0, 2.0, -3.0, 4.0, 0.5), "bias": torch.tensor([7.0])}
    method = FedDST(density=0.5, every=every, until=until)
    state = method.init(Setup(weights, NET, {0: ClientInfo(1)}, 50, lambda j: weights))
    found = []
    for r in range(50):
        (task,) = method.plan(replace(state, round=r), [0])
        if task.verb == "train:readjust":
            found.append(r)
            assert task.settings == {"share": cosine(0.05, r, state.until)}
        else:
            assert task.verb == "train"
    assert found == rounds


def tiny(folder: Path, **words: Any) -> Run:
    made = FedDST(**({"every": 1, "churn": 0.3, "until": 3, "local": LocalTraining(2, 8)} | words))
    return make_run(made, folder, rounds=5, dtype=torch.float32)


def test_masks_keep_their_numbers_move_and_then_stay(tmp_path: Path) -> None:
    run = tiny(tmp_path)
    masks = []
    for before, tasks, answers, after in exchanges(run):
        counts = {k: int(m.sum()) for k, m in before.mask.items()}
        assert sum(counts.values()) == round(0.2 * run.net.layout.count(counts))
        moves = before.round < 3
        assert verbs(tasks) == {"train:readjust" if moves else "train"}
        for report in answers:
            packet = report.give["model"]
            assert packet.mask is not None
            assert {k: int(m.sum()) for k, m in packet.mask.items()} == counts
            assert trees.equal(packet.mask, before.mask) != moves
        assert {k: int(m.sum()) for k, m in after.mask.items()} == counts
        masks.append(trees.flatten(after.mask))
        assert torch.equal(masks[-1], trees.flatten(before.mask)) != moves


def test_new_weights_are_trained_in_the_same_round(tmp_path: Path) -> None:
    """Otherwise they would be 0 when they are sent, and fall at the server at once."""
    run = tiny(tmp_path)
    (_, _, answers, after), *_ = exchanges(run)
    before = trees.flatten(run.method.init(run.setup).mask)
    for report in answers:
        packet = report.give["model"]
        new = trees.flatten(packet.mask or {}) & ~before
        values = trees.flatten(trees.pick(packet.values, packet.mask or {}))
        assert int(new.sum()) > 0
        assert bool((values[new] != 0).any())
    assert bool((trees.flatten(after.mask) & ~before).any())


def test_epochs_are_split_before_and_after(tmp_path: Path) -> None:
    for epochs, after, expected in [(5, 2, [3, 2]), (3, 1, [2, 1]), (1, 1, [1]), (2, 4, [2])]:
        run = tiny(tmp_path, local=LocalTraining(epochs, 8), after=after)
        stages = run.work("train:readjust")
        trained = [s.local.epochs for s in stages if isinstance(s, methods.feddst.Train)]
        assert trained == expected


def test_one_epoch_readjusts_first_and_then_trains(tmp_path: Path) -> None:
    state = play(tiny(tmp_path, local=LocalTraining(1, 8)), Serial())
    assert state.round == 5


def test_under_a_median_a_liar_decides_only_what_nobody_else_has() -> None:
    """Three clients hold place 1: 2, 3 and 1e6 have the median 3. Only honest ones hold place 2.

    Place 4 is the third client's alone, who decides it, as docs/methods.md says.
    """
    first = {"weight": row(0.0, 1.0, 1.0, 0.0, 0.0, 0.0), "bias": torch.tensor([0.0])}
    state = State(0, first, {"weight": kept(1, 2)}, until=9)
    answers = []
    for k, (places, values) in enumerate(
        [
            ((1, 2), (0, 2, 3, 0, 0, 0)),
            ((1, 2), (0, 3, 4, 0, 0, 0)),
            ((1, 4), (0, 1e6, 0, 0, 1e6, 0)),
        ]
    ):
        packet = Packet(
            {"weight": row(*map(float, values)), "bias": torch.tensor([0.0])},
            {"weight": kept(*places)},
        )
        answers.append(Report(k, {"model": packet}, 5))
    after = FedDST(mean=Median()).fold(state, answers)
    assert after.model["weight"].tolist() == [[0.0, 0.0, 3.5, 0.0, 1e6, 0.0]]


def test_bytes_by_hand() -> None:
    """Six weights and a bias: density 1/2 keeps 3 + 1 numbers, 8 bytes each per client and round.

    10 rounds, until 5, every 2: readjusted in rounds 1 and 3. Two masks up, three down, 6/8 bytes:
    8 * 4 * 2 * 10 + 6/8 * 2 * 5 = 640 + 7.5.
    """
    method = FedDST(density=0.5, every=2)
    assert method.paper_bytes(NET, 9, 2, 10) == round(647.5)
    assert FedDST(density=1.0).paper_bytes(NET, 9, 2, 10) == 8 * 7 * 2 * 10


def test_density_1_never_readjusts(tmp_path: Path) -> None:
    run = make_run(FedDST(density=1.0, every=1), tmp_path)
    tasks: list[Task] = run.method.plan(run.initial_state, [0, 1])
    assert verbs(tasks) == {"train"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"density": 0.0}, r"^density is 0\.0; it must be in \(0, 1\]\.$"),
        ({"churn": 1.5}, r"^churn is 1\.5; it must be in \[0, 1\]\.$"),
        ({"every": 0}, r"^every is 0; it must be 1 or more rounds\.$"),
        ({"until": -1}, r"^until is -1; it must be 0 or more, or none\.$"),
        ({"after": 0}, r"^after is 0; it must be 1 or more epochs\.$"),
    ],
)
def test_what_is_out_of_range_is_refused(words: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        FedDST(**words)
