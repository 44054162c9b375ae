"""Many clients: data when they are needed, scores of a sample, and who is asked."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.conftest import answers, make_run, play, tensors
from tests.contract import contract_of

import fedgrove
from fedgrove import data, methods, problems, seeds
from fedgrove.core import AnyMethod, ClientInfo, Engine
from fedgrove.data import ClientData, Examples, Federation
from fedgrove.engines import Pool, Serial
from fedgrove.engines.batched.engine import Batched
from fedgrove.engines.faulty import with_faults
from fedgrove.errors import InputError
from fedgrove.methods import CAAFP, FedAvg, FedCHAR, FedSNIP
from fedgrove.report.seed_averages import average_over_seeds
from fedgrove.report.tables import print_summaries
from fedgrove.runs.faults import Faults
from fedgrove.runs.memory import Memory
from fedgrove.runs.rounds import draw_cohort, plan_scoring, rounds
from fedgrove.runs.run import Run, build


def crowd_run(folder: Path, clients: int, method: AnyMethod = FedAvg(), **words: Any) -> Run:
    federation = data.load("crowd", clients=clients)
    words = {"rounds": 3, "cohort": 4} | words
    return build(method, federation, Memory(folder), net="mlp:hidden=8", **words)


def in_memory(federation: Federation) -> Federation:
    """The same clients, all made at once."""
    return replace(federation, clients=dict(federation.clients))


def run(federation: Federation, **words: Any) -> fedgrove.Result:
    words = {"rounds": 2, "cohort": 3, "engine": "serial", "net": "mlp:hidden=8"} | words
    method = words.pop("method", "fedavg")
    return fedgrove.run(method, data=federation, progress=False, **words)


def timeless(summary: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in summary.items() if k not in ("seconds", "engine")}


# ---- who trains ----------------------------------------------------------------------------------


@given(ids=st.sets(st.integers(0, 500), min_size=1, max_size=60), seed=st.integers(0, 99))
def test_cohorts_are_those_of_a_draw_from_the_sorted_ids(ids: set[int], seed: int) -> None:
    """As cohorts were drawn before there were many clients: no run changes."""
    federation = data.load("crowd", clients=1)
    federation = replace(federation, clients=dict.fromkeys(ids, federation.client(0)))
    cohort = (len(ids) + 1) // 2
    made = build(FedAvg(), federation, Memory(Path("unused")), cohort=cohort, seed=seed)
    rng = seeds.numpy_rng(seed, 5, "cohort")
    before = sorted(int(k) for k in rng.choice(sorted(ids), cohort, replace=False))
    assert draw_cohort(made, 5) == before


def test_a_cohort_of_a_million(tmp_path: Path) -> None:
    cohort = draw_cohort(crowd_run(tmp_path, 1_000_000, cohort=100), 0)
    assert len(set(cohort)) == 100
    # The mean of 100 uniform numbers is within 4 standard errors, 4 * .29 / 10, of the middle.
    assert abs(sum(cohort) / 100 / 1e6 - 0.5) < 0.12


# ---- lazy and in memory are the same -------------------------------------------------------------


def engines(spawn: Any = ()) -> list[Any]:
    """All engines; ``spawn`` marks the pool that starts afresh, whose worker imports torch first."""
    return [
        pytest.param(Serial(), id="serial"),
        pytest.param(Pool(workers=2, start="fork"), id="pool-fork"),
        pytest.param(Pool(workers=1, start="spawn"), id="pool-spawn", marks=spawn),
        pytest.param(Batched(), id="batched"),
    ]


@pytest.mark.parametrize("engine", engines())
def test_clients_made_when_needed_give_the_result_of_clients_in_memory(engine: Engine) -> None:
    lazy = data.load("crowd", clients=7)
    try:
        one = run(lazy, engine=engine, finetune=(0, 1))
        other = run(in_memory(lazy), engine=engine, finetune=(0, 1))
    finally:
        engine.close()
    assert timeless(one.summary) == timeless(other.summary)
    file = "checkpoint/latest.json"
    states = [json.loads((r.folder.path / file).read_text())["tensors"] for r in (one, other)]
    # The name of a file of tensors holds its checksum.
    assert states[0] == states[1]


def switching(k: int, round: int) -> ClientData:
    """Clients whose labels switch, and who get more examples, from round to round."""
    base = data.load("crowd", clients=4).client(k)
    rows = 10 + round
    train = Examples(base.train.x[:rows], (base.train.y[:rows] + round) % 10)
    return replace(base, train=train, info=replace(base.info, examples=rows))


@pytest.mark.parametrize("engine", engines(spawn=pytest.mark.slow)[1:])
def test_data_that_change_with_the_round(engine: Engine, tmp_path: Path) -> None:
    federation = data.from_clients(switching, 4, classes=10)

    def final(federation: Federation, engine: Engine, name: str) -> Any:
        words = {"net": "mlp:hidden=8", "rounds": 3, "cohort": 2}
        made = build(FedAvg(), federation, Memory(tmp_path / name), **words)
        try:
            return play(made, engine)
        finally:
            engine.close()

    serial = tensors(final(federation, Serial(), "serial"))
    other = tensors(final(federation, engine, "other"))
    for name, leaf in serial.items():
        torch.testing.assert_close(other[name], leaf, rtol=1e-4, atol=1e-5)
    still = data.from_clients(lambda k: switching(k, 0), 4, classes=10)
    same = tensors(final(still, Serial(), "still"))
    assert not all(torch.allclose(same[name], leaf) for name, leaf in serial.items())


def broken(k: int) -> ClientData:
    """Client 1 has lost its data."""
    if k == 1:
        raise OSError("no such disk")
    return data.load("crowd", clients=4).client(k)


@pytest.mark.parametrize("engine", engines(spawn=pytest.mark.slow))
def test_a_client_whose_data_cannot_be_made_is_lost(engine: Engine) -> None:
    federation = data.from_clients(broken, 4, classes=10)
    try:
        summary = run(federation, engine=engine, cohort=4).summary
    finally:
        engine.close()
    assert (summary["scored"], summary["lost"]) == (3, {"crashed": 2})


def test_only_clients_with_a_task_are_made(tmp_path: Path) -> None:
    asked: set[int] = set()
    crowd = data.load("crowd", clients=30)

    def counted(k: int) -> ClientData:
        asked.add(k)
        return crowd.client(k)

    federation = data.from_clients(counted, 30, classes=10, info=lambda k: crowd.info(k))
    assert asked == {0}
    made = build(FedAvg(), federation, Memory(tmp_path), rounds=2, cohort=3, score_on=2)
    for engine in (Serial(), Batched()):
        asked.clear()
        play(replace(made, federation=replace(federation)), engine)
        assert asked <= {*draw_cohort(made, 0), *draw_cohort(made, 1)}


# ---- who is scored -------------------------------------------------------------------------------


def test_all_are_scored_unless_they_are_many(tmp_path: Path) -> None:
    assert crowd_run(tmp_path, 20).scored == tuple(range(20))
    assert crowd_run(tmp_path, 10_000).scored == tuple(range(10_000))
    many = crowd_run(tmp_path, 10_001)
    assert len(many.scored) == 1000
    assert len(plan_scoring(many, many.initial_state)) == 1000
    assert crowd_run(tmp_path, 20, score_on=50).scored == tuple(range(20))


def test_a_smaller_sample_is_part_of_a_larger_one(tmp_path: Path) -> None:
    few, more = (crowd_run(tmp_path, 5000, score_on=n, seed=3) for n in (10, 300))
    assert set(few.scored) < set(more.scored)
    assert (
        few.scored
        == tuple(sorted(few.scored))
        == crowd_run(tmp_path, 5000, score_on=10, seed=3).scored
    )
    assert few.scored != crowd_run(tmp_path, 5000, score_on=10, seed=4).scored


def test_scores_of_a_sample() -> None:
    federation = data.load("crowd", clients=12)
    everybody = run(federation, evaluate=1).summary
    sampled = run(federation, evaluate=1, score_on=4)
    summary = sampled.summary
    assert summary["scored"] == 4
    assert everybody["scored"] == 12
    assert len(summary["accuracy_clients"]) == 4
    # Training does not depend on who is scored.
    assert summary["bytes_up"] == everybody["bytes_up"]
    for client, accuracy in summary["accuracy_clients"].items():
        assert everybody["accuracy_clients"][client] == accuracy
    assert "scored on a sample of 4 of 12 clients (--score-on)" in summary["notes"]
    index = json.loads((sampled.folder.path / "models/index.json").read_text())
    assert index.keys() == summary["accuracy_clients"].keys()
    assert all("scored" not in line for line in sampled.folder.metrics())


def test_no_scores_at_all() -> None:
    federation = data.load("crowd", clients=5)
    result = run(federation, score_on=0)
    summary = result.summary
    assert summary["scored"] == 0
    assert not [key for key in summary if key.startswith("accuracy") and summary[key]]
    assert "accuracy_mean" not in summary
    assert (summary["density"], summary["finetune"], summary["bytes_deliver_down"]) == (None, {}, 0)
    assert "accuracy_mean" not in result.folder.metrics()[-1]
    # The model is kept all the same, as it was delivered.
    index = json.loads((result.folder.path / "models/index.json").read_text())
    assert index == {str(k): "group-000.safetensors" for k in range(5)}
    text = io.StringIO()
    print_summaries([summary, run(federation).summary], text)
    assert "not scored" in text.getvalue()
    assert "no client was scored (--score-on 0)" in text.getvalue()
    assert average_over_seeds({"fedavg-s0": summary}) == []


def measured(k: int) -> ClientData:
    """A client with a number to predict; there is no client 3."""
    if k == 3:
        raise OSError("no such file")
    x = torch.randn(30, 6, generator=torch.Generator().manual_seed(k))
    rows = [Examples(x[a:b], 2 * x[a:b, :1]) for a, b in ((0, 20), (20, 22), (22, 30))]
    return ClientData(*rows, ClientInfo(20))


@pytest.mark.parametrize("engine", ["pool", "batched"])
@pytest.mark.parametrize("method", ["fedavg", "ditto", "ca-afp"])
def test_numbers_of_clients_made_when_needed(method: str, engine: str) -> None:
    problem = problems.numbers()
    federation = data.from_clients(
        measured, 6, classes=1, problem=problem, info=lambda k: ClientInfo(20), name="measured"
    )
    words = {"method": method, "cohort": 6, "evaluate": 1}
    expected = run(federation, **words)
    found = run(federation, **words, engine=engine)
    # Client 3 can neither train nor be scored, in the lines and in the summary alike.
    for line in found.folder.metrics():
        if line["counts"]:
            assert (line["scored"], line["unscored"]) == (5, {"crashed": [3]})
    assert found.summary["scored"] == 5
    assert "1 of 6 clients could not be scored at the end" in found.summary["notes"]
    assert found.summary["mae_mean"] == pytest.approx(expected.summary["mae_mean"], rel=1e-4)


def test_samples_of_mixed_tasks() -> None:
    """A task of which nobody is in the sample has no figures; without a sample there are none."""
    parts = {"rooms": data.load("rooms", clients=5), "tags": data.load("tags", clients=1)}
    mixed = data.mix(parts)
    one = run(mixed, score_on=1, evaluate=1)
    (scored,) = one.summary["metric_clients"]
    # Client 5 is the one of tags.
    task = "tags" if scored == "5" else "rooms"
    assert list(one.summary["tasks"]) == list(one.folder.metrics()[0]["tasks"]) == [task]
    none = run(mixed, score_on=0).summary
    assert "tasks" not in none
    assert (none["metric"], none["scored"], none["metric_clients"]) == (None, 0, {})
    text = io.StringIO()
    print_summaries([none], text)
    assert "not scored" in text.getvalue()


def test_a_table_without_scores_names_the_metric() -> None:
    text = io.StringIO()
    print_summaries([run(data.load("rooms", clients=5), score_on=0).summary], text)
    assert "mae" in text.getvalue()
    assert "accuracy" not in text.getvalue()


def test_a_sample_is_resumed(tmp_path: Path) -> None:
    words = {"method": "ca-afp", "data": "crowd", "clients": 15, "cohort": 3, "rounds": 4}
    words |= {"net": "mlp:hidden=8", "score_on": 3, "set": {"ask": 5}, "engine": "serial"}
    whole = fedgrove.run(**words, out=tmp_path / "whole", progress=False)

    class Stop(Exception):
        pass

    def stop(line: Any) -> None:
        if line["round"] == 3:
            raise Stop

    with pytest.raises(Stop):
        fedgrove.run(**words, out=tmp_path / "part", progress=False, watch=stop)
    resumed = fedgrove.resume(tmp_path / "part", engine="serial", progress=False)
    assert timeless(resumed.summary) == timeless(whole.summary)
    assert "score_on = 3" in whole.folder.config


def test_a_negative_sample_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="score_on is -1; it must be 0 or more"):
        run(data.load("crowd", clients=5), score_on=-1)
    with pytest.raises(InputError, match="score_on is -1"):
        crowd_run(tmp_path, 5, score_on=-1)


# ---- who is asked --------------------------------------------------------------------------------


GROUPED = [CAAFP(phases=(1, 1, 2), ask=6), FedCHAR(warmup=1, ask=6)]


@pytest.mark.parametrize("method", GROUPED, ids=["ca-afp", "fedchar"])
def test_a_sample_forms_the_groups_and_others_join_when_drawn(
    method: AnyMethod, tmp_path: Path
) -> None:
    made = crowd_run(tmp_path, 500, method, rounds=4)
    verbs = []
    groups: list[set[int]] = []
    loop = rounds(made)
    exchange = next(loop)
    while exchange.tasks:
        verbs.append(
            (exchange.state.round, {task.verb.partition(":")[0] for task in exchange.tasks})
        )
        exchange = loop.send(answers(made, Serial(), exchange.tasks))
        groups.append(set(exchange.state.groups))
    state = exchange.state
    # Before each round with groups, those of the cohort who have none join one; all then train.
    trains, joins = {"train"}, {"cluster"}
    assert verbs == [(0, trains), (1, joins), (1, joins), (1, trains), (2, joins), (2, trains),
                     (3, joins), (3, trains)]  # fmt: skip
    assert state.clients == made.sample(6)
    assert len(state.clients) == 6
    assert groups[1] == set(state.clients)
    cohorts = [set(draw_cohort(made, round)) for round in (1, 2, 3)]
    assert set(state.groups) == {*state.clients}.union(*cohorts)


@pytest.mark.parametrize("method", GROUPED, ids=["ca-afp", "fedchar"])
def test_joining_clients_may_fail(method: AnyMethod, tmp_path: Path) -> None:
    """Each round is reached, whoever fails: clients are asked to join once before it."""
    made = crowd_run(tmp_path, 500, method, rounds=4, faults=Faults.parse("crash=0.4"), seed=1)
    assert play(made, with_faults(Serial(), [made])).round == 4


@pytest.mark.parametrize("method", [*GROUPED, FedSNIP(ask=6)], ids=["ca-afp", "fedchar", "fedsnip"])
def test_a_bound_that_is_not_reached_changes_nothing(method: AnyMethod, tmp_path: Path) -> None:
    sizes = (20, 13, 24, 17)
    words = {"sizes": sizes, "rounds": 4}
    bound = play(make_run(method, tmp_path / "a", **words), Serial())
    free = play(make_run(replace(method, ask=1000), tmp_path / "b", **words), Serial())  # type: ignore[type-var]
    assert all(torch.equal(leaf, tensors(free)[name]) for name, leaf in tensors(bound).items())


def test_a_probe_asks_a_sample(tmp_path: Path) -> None:
    made = crowd_run(tmp_path, 1_000_000, FedSNIP(ask=6))
    assert len(made.initial_state.clients) == 6
    assert play(made, Serial()).round == 3


@pytest.mark.parametrize("name", sorted(methods.names()))
def test_a_million_clients_or_a_sentence(name: str, tmp_path: Path) -> None:
    """No method's first state has a place for each of a million clients."""
    contract = contract_of(name)
    words = {"data": "crowd", "clients": 1_000_000, "cohort": 2, "rounds": 2, "score_on": 2}
    words |= {"set": contract.for_a_million, "engine": "serial", "net": "bn-cnn2:width=4"}
    words |= {"out": tmp_path / "run", "progress": False}
    if contract.has_a_place_for_each_client:
        with pytest.raises(InputError, match="clients is 1000000; it must be at most 10000 with a"):
            fedgrove.run(name, **words)
        assert not (tmp_path / "run").exists()
        return
    summary = fedgrove.run(name, **words).summary
    assert (summary["clients"], summary["scored"]) == (1_000_000, 2)
    manifest = (tmp_path / "run/checkpoint/latest.json").stat().st_size
    assert manifest < 20_000
