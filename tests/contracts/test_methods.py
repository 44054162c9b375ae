"""What holds for every method: it is a value, it is pure, and with its features off it is FedAvg."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import answers, make_run, play, remembered, reports, tensors
from tests.contract import WHOLE, advise, contract_of, small

from fedgrove import methods, trees
from fedgrove.config.experiment import Experiment
from fedgrove.config.toml import from_toml, to_toml
from fedgrove.core import ClientInfo, Packet, Report, Task, WithPaper
from fedgrove.engines import Serial
from fedgrove.engines.work import perform
from fedgrove.parts.aggregate import Averaging
from fedgrove.parts.robust import ClippedMean, GeometricMedian, Median, MultiKrum, TrimmedMean
from fedgrove.runs.checkpoint import state_from_json, state_to_json
from fedgrove.runs.rounds import draw_cohort, plan, plan_scoring, rounds
from fedgrove.runs.run import Run

EVERY = [pytest.param(small(name), id=name) for name in methods.names()]


@pytest.mark.parametrize("method", EVERY)
def test_is_a_frozen_value(method) -> None:
    assert pickle.loads(pickle.dumps(method)) == method
    assert copy.deepcopy(method) == method
    assert hash(method) == hash(copy.deepcopy(method))
    with pytest.raises(FrozenInstanceError):
        setattr(method, fields(method)[0].name, None)
    assert methods.find(methods.name_of(method)) is type(method)


@pytest.mark.parametrize("method", EVERY)
def test_is_rebuilt_from_its_toml(method) -> None:
    assert from_toml(to_toml(Experiment(method))).method == method


@pytest.mark.parametrize("method", EVERY)
def test_every_state_comes_back_from_a_checkpoint(method, tmp_path: Path) -> None:
    """Its fields have the types that they are declared with, or a resumed run would be refused."""
    run = make_run(method, tmp_path, rounds=6)
    loop = rounds(run)
    exchange = next(loop)
    while True:
        kept: dict[str, torch.Tensor] = {}
        frozen = json.loads(json.dumps(state_to_json(exchange.state, kept)))
        again = state_from_json(frozen, kept, run.initial_state)
        assert trees.identical(tensors(again), tensors(exchange.state))
        assert again.round == exchange.state.round
        if not exchange.tasks:
            break
        exchange = loop.send(answers(run, Serial(), exchange.tasks))


@pytest.mark.parametrize("method", EVERY)
def test_leaves_global_randomness_and_its_inputs_alone(method, tmp_path: Path) -> None:
    run = make_run(method, tmp_path)
    state, before_rng = run.method.init(run.setup), torch.get_rng_state()
    while state.round == 0:  # exchanges that are not a round come first
        before_state = copy.deepcopy(tensors(state))
        tasks = plan(run, state)
        packets = [packet for task in tasks for packet in task.send.values()]
        sent = copy.deepcopy([packet.values for packet in packets])
        after = run.method.fold(state, reports(run, Serial(), tasks))
        assert trees.identical(tensors(state), before_state)
        assert all(
            trees.identical(a, packet.values) for a, packet in zip(sent, packets, strict=True)
        )
        assert torch.equal(torch.get_rng_state(), before_rng)
        assert state.round == 0
        assert after is not state
        state = after
    assert state.round == 1


# The CNN has linear layers too.
@pytest.mark.parametrize("net", [pytest.param("mlp", marks=pytest.mark.slow), "bn-cnn2"])
@pytest.mark.parametrize("method", EVERY)
def test_zeros_under_a_mask_have_no_sign(method, net: str, tmp_path: Path) -> None:
    """What a mask drops is +0.0 in all that travels, as it is after a codec."""
    run = make_run(method, tmp_path, net=net, dtype=torch.float32)
    packets: list[Packet] = []
    loop = rounds(run)
    exchange = next(loop)
    while exchange.tasks:
        answers = list(reports(run, Serial(), exchange.tasks))
        for message in [task.send for task in exchange.tasks] + [r.give for r in answers]:
            packets += message.values()
        exchange = loop.send(zip(exchange.tasks, answers, strict=True))
    for task in plan_scoring(run, exchange.state):
        packets += task.send.values()

    dropped = 0
    for packet in packets:
        for name, mask in (packet.mask or {}).items():
            zeros = packet.values[name][~mask]
            assert trees.identical({name: zeros}, {name: torch.zeros_like(zeros)})
            dropped += len(zeros)
    name = methods.name_of(method)
    sends_masks = bool(dropped)
    what = "packets travel under masks" if sends_masks else "no packet travels under a mask"
    assert sends_masks == contract_of(name).sends_masks, advise(name, "sends_masks", what)


@pytest.mark.parametrize("method", EVERY)
def test_the_order_of_reports_does_not_matter(method, tmp_path: Path) -> None:
    run = make_run(method, tmp_path)
    state = run.method.init(run.setup)
    while state.round == 0:
        answers = list(reports(run, Serial(), plan(run, state)))
        one, other = (run.method.fold(state, order) for order in (answers, answers[::-1]))
        assert trees.distance(tensors(one), tensors(other)) < 1e-14
        state = one


@pytest.mark.parametrize("method", EVERY)
def test_fold_keeps_no_reports(method, tmp_path: Path) -> None:
    """At no time are more than two reports alive: the server's memory does not grow with the clients."""
    run = make_run(method, tmp_path)
    state = run.method.init(run.setup)
    (first, *_) = reports(run, Serial(), plan(run, state))
    alive: list[weakref.ref[Report]] = []
    most = 0
    # All that is alive by now is left out of the collections below, which else look through the
    # whole process, twelve times.
    gc.freeze()

    def stream() -> Iterator[Report]:
        nonlocal most
        for _ in range(12):
            report = copy.deepcopy(first)
            alive.append(weakref.ref(report))
            yield report
            del report
            gc.collect()
            most = max(most, sum(ref() is not None for ref in alive))

    run.method.fold(state, stream())
    gc.unfreeze()
    assert most <= 2


# ---- averages that survive liars -----------------------------------------------------------------

ROBUST: list[Averaging] = [
    Median(),
    TrimmedMean(0.25),
    ClippedMean(),
    MultiKrum(0.25),
    GeometricMedian(),
]
AVERAGING = [param for param in EVERY if param.id != "local"]
"""All methods but `local`, which has nothing to average."""


def test_every_method_but_local_has_an_average() -> None:
    without = [name for name in methods.names() if not hasattr(small(name), "mean")]
    assert without == ["local"]


def averages() -> Iterator[Any]:
    """Every method with every rule: two a method on the MLP and one on the CNN, in turn; the rest is slow.

    Below, before a liar, every method meets every rule, for one round.
    """
    for turn, param in enumerate(AVERAGING):
        (method,) = param.values
        for number, rule in enumerate(ROBUST):
            for net, turns in (("mlp", (0, 2)), ("bn-cnn2", (1,))):
                is_its_turn = (number - turn) % len(ROBUST) in turns
                marks = () if is_its_turn else pytest.mark.slow
                name = f"{param.id}-{type(rule).__name__}-{net}"
                yield pytest.param(method, rule, net, id=name, marks=marks)


@pytest.mark.parametrize(("method", "rule", "net"), list(averages()))
def test_takes_every_average(method, rule: Averaging, net: str, tmp_path: Path) -> None:
    """Two rounds, sub-models and BatchNorm included; the state can be written, and so resumed."""
    method = replace(method, mean=rule)
    assert from_toml(to_toml(Experiment(method))).method == method
    run = make_run(method, tmp_path, net=net, rounds=2, dtype=torch.float32)
    state = play(run, Serial())
    assert state.round == 2
    for name, leaf in tensors(state).items():
        assert bool(torch.isfinite(leaf).all()), name
        # Variances stay what they are: means and medians of variances, not below 0.
        assert not name.endswith("running_var") or bool((leaf >= 0).all())


def lied(report: Report) -> Report:
    """What a client sends, and 1e20 more of it."""
    give = {}
    for name, packet in report.give.items():
        values = trees.map(lambda leaf: leaf.float() + 1e20, packet.values)
        give[name] = Packet(trees.apply_mask(values, packet.mask or {}), packet.mask)
    return replace(report, give=give)


def liars_run(method, tmp_path: Path) -> tuple[Run, list[Report]]:
    """A run of everybody, and the reports of its first exchange, in which no average has a part yet."""
    run = make_run(method, tmp_path, cohort=4, dtype=torch.float32)
    return run, list(reports(run, Serial(), plan(run, run.method.init(run.setup))))


def largest_sent(run: Run, first: list[Report], liar: int | None) -> float:
    """The largest number that other clients are sent in round 1, after a liar took part in 0."""
    state = run.method.init(run.setup)
    answers: Iterable[Report] = first
    while state.round == 0:
        state = run.method.fold(state, (lied(r) if r.of == liar else r for r in answers))
        tasks = plan(run, state)
        answers = reports(run, Serial(), tasks)
    largest = 0.0
    for task in tasks:
        for packet in task.send.values():
            if task.to != liar:
                largest = max(largest, float(trees.flatten(packet.values).double().abs().max()))
    return largest


@pytest.mark.parametrize("method", AVERAGING)
def test_survives_a_liar(method, tmp_path: Path) -> None:
    name = methods.name_of(method)
    method = contract_of(name).one_group or method
    run, first = liars_run(method, tmp_path)
    for rule in ROBUST:
        robust = replace(run, method=replace(method, mean=rule))
        assert from_toml(to_toml(Experiment(robust.method))).method == robust.method
        assert largest_sent(robust, first, None) < 10, rule
        spoilt = f"one of four clients spoils the model, in spite of mean={rule}"
        assert largest_sent(robust, first, 1) < 10, advise(name, "one_group", spoilt)


@pytest.mark.parametrize("method", AVERAGING)
def test_one_liar_spoils_the_weighted_mean(method, tmp_path: Path) -> None:
    name = methods.name_of(method)
    contract = contract_of(name)
    if contract.why_no_liar_spoils_it:
        pytest.skip(contract.why_no_liar_spoils_it)
    method = contract.one_group or method
    largest = largest_sent(*liars_run(method, tmp_path), 1)
    assert largest > 1e15, advise(name, "why_no_liar_spoils_it", "a liar did nothing")


# ---- turned off ----------------------------------------------------------------------------------


def used(task: Task) -> trees.Tree:
    """The model a client gets; with one model to choose from, that one."""
    packet = task.send.get("model") or task.send.get("model0")
    return packet.values if packet else {}


OFF = [name for name in methods.names() if contract_of(name).off is not None]


@pytest.mark.parametrize("method", EVERY)
def test_one_client_is_local_training(method, tmp_path: Path) -> None:
    """With one client, averaging changes nothing: every method trains as `local` does."""
    name = methods.name_of(method)
    contract = contract_of(name)
    if not contract.trains_weights:
        pytest.skip("its weights are never trained")
    method = contract.alone or contract.off or method
    alone = make_run(methods.Local(), tmp_path / "alone", sizes=(20,), dtype=torch.float32)
    run = make_run(method, tmp_path / "run", sizes=(20,), dtype=torch.float32)
    play(alone, Serial())
    state = play(run, Serial())
    (task,) = plan_scoring(run, state)
    whole = remembered(alone)
    mine = dict(used(task))
    kept = "0/kept" if task.send else ("0/kept", "0/personal")  # who is handed nothing uses its own
    mine |= {k.split("/", 2)[2]: v for k, v in remembered(run).items() if k.startswith(kept)}
    other = "with one client it is not local to the bit"
    assert trees.identical(
        {k: mine[k] for k in run.net.layout.shapes},
        {k.split("/", 2)[2]: v for k, v in whole.items()},
    ), advise(name, "off or alone", other)


@pytest.mark.parametrize("net", ["mlp", "har-cnn"])
def test_fedmask_with_its_features_off_is_the_initial_network(net: str, tmp_path: Path) -> None:
    """Nothing pruned, nothing rescaled, and no score that training could bring below 0."""
    method = methods.FedMask(density=1.0, scale=1e6, rescale=False)
    run = make_run(method, tmp_path, net=net, dtype=torch.float32)
    engine = Serial()
    for task in plan_scoring(run, play(run, engine), "finetune"):
        # Fine-tuned for 0 epochs: what the client uses, and keeps.
        _, kept = perform(replace(run, finetune=(0,)), task, run.memory.read(task.to, task.memory))
        assert trees.identical(kept["own"], run.params)
    assert len(run.memory.files) == 4


@pytest.mark.parametrize("name", OFF)
def test_with_its_features_off_it_is_fedavg(name: str, tmp_path: Path) -> None:
    plain = play(make_run(methods.FedAvg(), tmp_path / "a", dtype=torch.float32), Serial())
    run = make_run(contract_of(name).off, tmp_path / "b", dtype=torch.float32)
    other = play(run, Serial())
    (task, *_) = plan_scoring(run, other)
    mine = {k: used(task)[k] for k in plain.model}
    rounded = trees.distance(mine, plain.model)
    other = f"with {contract_of(name).off} it is not FedAvg to the bit: {rounded:.1g} away"
    assert trees.identical(mine, plain.model), advise(name, "off", other)


@pytest.mark.parametrize("method", EVERY)
def test_every_client_can_use_its_model_before_any_training(method, tmp_path: Path) -> None:
    run = make_run(method, tmp_path)
    state = run.method.init(run.setup)
    for task in plan_scoring(run, state):
        report, kept = perform(run, task, {})
        assert 0 <= report.metrics["test0"] <= 1
        assert not kept


@pytest.mark.parametrize("method", EVERY)
def test_the_papers_bytes(method, tmp_path: Path) -> None:
    """8 bytes per parameter that travels, client and round; buffers are not counted.

    mlp (12, 3): 64*12+64 = 832, 64*64+64 = 4160, 3*64+3 = 195: 5187 in all; its last two layers 4355.
    """
    name = methods.name_of(method)
    expected = contract_of(name).paper_bytes
    if not isinstance(method, WithPaper):
        assert expected is None
        pytest.skip("no paper of it counts bytes")
    if expected is None:
        # Who counts otherwise than FedAvg has worked it out by hand.
        own = "it has a paper_bytes of its own, which is to be worked out by hand"
        is_fedavgs = type(method).paper_bytes is methods.FedAvg.paper_bytes
        assert is_fedavgs, advise(name, "paper_bytes", own)
        expected = WHOLE
    run = make_run(method, tmp_path)
    assert run.method.paper_bytes(run.net, 4, 3, 50) == round(expected)


def test_a_cohort_depends_on_seed_and_round_alone(tmp_path: Path) -> None:
    run = make_run(methods.FedAvg(), tmp_path, sizes=(12,) * 9, cohort=4)
    cohorts = [draw_cohort(run, t) for t in range(6)]
    assert cohorts == [draw_cohort(run, t) for t in range(6)]
    assert all(len(set(c)) == 4 and c == sorted(c) and set(c) <= set(range(9)) for c in cohorts)
    assert len({tuple(c) for c in cohorts}) > 1
    assert cohorts != [draw_cohort(replace(run, seed=1), t) for t in range(6)]


def test_info_is_what_the_server_knows() -> None:
    assert ClientInfo(3).bandwidth > 0
