"""pFed1BS: the vote, what travels, and that the pull brings sketches together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.conftest import make_run, play, remembered, reports
from tests.contract import Contract

from fedgrove import methods, trees
from fedgrove.core import Packet, Report
from fedgrove.engines import Serial
from fedgrove.errors import InputError
from fedgrove.methods.pfed1bs import PFed1BS, SignPull, State
from fedgrove.runs.rounds import plan

CONTRACT = Contract(
    alone=PFed1BS(pull=SignPull(weight=0.0, mu=0.0)),
    why_no_liar_spoils_it="clients vote, and are sent signs",
    paper_bytes=2 * 519 / 8 * 3 * 50,
    refused_with_privacy="sketch",
    # It projects all parameters in every step.
    most_macs=1.6,
)


def test_the_vote_by_hand() -> None:
    """3 examples for (+ + -), 2 for (- + -), 1 for (- - +): 3 - 3, 5 - 1, 1 - 5; a tie is positive."""
    state = State(4, {"signs": torch.tensor([False, False, True])})
    sent = {0: (3, [True, True, False]), 1: (2, [False, True, False]), 2: (1, [False, False, True])}
    given = []
    for client, (examples, bits) in sent.items():
        packet = Packet({"signs": torch.tensor(bits)})
        given.append(Report(client, {"sketch": packet}, examples))
    after = PFed1BS().fold(state, given)
    assert after.round == 5
    assert after.consensus["signs"].tolist() == [True, True, False]
    # Nobody reports: the consensus is as it was.
    assert PFed1BS().fold(state, []).consensus["signs"].tolist() == [False, False, True]


def test_a_bit_for_each_projection_both_ways(tmp_path: Path) -> None:
    """A tenth of 5187 parameters: 519 signs, 65 bytes, and what a message has to say beside them."""
    run = make_run(PFed1BS(), tmp_path, dtype=torch.float32)
    for _, answer in Serial().map((run, task) for task in plan(run, run.initial_state)):
        assert isinstance(answer, Report)
        (packet,) = answer.give.values()
        assert packet.values["signs"].shape == (519,)
        for direction in ("down", "up"):
            parts = dict(answer.cost[direction])
            parts.pop("header")
            assert 65 <= sum(parts.values()) < 130


def test_at_first_all_agree_with_the_initial_model(tmp_path: Path) -> None:
    run = make_run(PFed1BS(), tmp_path)
    (task, *_) = plan(run, run.initial_state)
    carry = {"consensus": task.send["consensus"].values}
    client = run.client(task, {})
    begun = run.method._begin(carry, client)
    # The pull is all but 0 there: log 2 / gamma for each of 519.
    loss, _ = SignPull(mu=0.0)(
        None,  # type: ignore[arg-type]
        trees.pick(client.start, client.layout.params),
        None,  # type: ignore[arg-type]
        begun,
    )
    assert float(loss) < 5e-4 * 519 / 1e4


def agreement(weight: float, folder: Path) -> float:
    """The share of signs in which clients agree with the consensus after three rounds."""
    method = replace(methods.PFed1BS(), pull=SignPull(weight=weight))
    run = make_run(method, folder, dtype=torch.float32, cohort=4)
    state = play(run, Serial())
    shares = []
    for report in reports(run, Serial(), plan(run, state)):
        same = report.give["sketch"].values["signs"] == state.consensus["signs"]
        shares.append(float(same.float().mean()))
    return sum(shares) / len(shares)


def test_the_pull_brings_sketches_together(tmp_path: Path) -> None:
    assert agreement(0.0, tmp_path / "alone") < agreement(0.1, tmp_path / "pulled") - 0.02


def test_models_stay_with_their_clients(tmp_path: Path) -> None:
    run = make_run(PFed1BS(), tmp_path)
    state = play(run, Serial())
    assert run.method.deliver(state, 0) == {}
    names = {name.split("/")[1] for name in remembered(run)}
    assert names == {"personal"}


def test_a_share_of_nothing_is_refused() -> None:
    with pytest.raises(InputError, match=r"share is 0.0; it must be in \(0, 1\]"):
        PFed1BS(share=0.0)
