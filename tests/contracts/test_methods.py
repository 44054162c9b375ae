"""What holds for every method: it is a value, it is pure, and with its features off it is FedAvg."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import make_run, play, remembered, reports, small, tensors

from fedgrove import methods, trees
from fedgrove.config.experiment import Experiment
from fedgrove.config.toml import from_toml, to_toml
from fedgrove.core import ClientInfo, Packet, Report, Task
from fedgrove.engines import Serial
from fedgrove.engines.work import perform
from fedgrove.methods.adfedwcp.anneal import AnnealedPull
from fedgrove.methods.adfedwcp.centroids import Fixed
from fedgrove.methods.clusterfl import Clustered
from fedgrove.methods.fedgen.generator import GeneratedFeatures
from fedgrove.methods.fedkd.lowrank import Energy
from fedgrove.methods.fedlc import LogitCalibration
from fedgrove.methods.fedntd import NotTrueDistillation
from fedgrove.methods.moon import ModelContrast
from fedgrove.methods.pfed1bs.sketch import SignPull
from fedgrove.parts.aggregate import Averaging
from fedgrove.parts.objective import Proximal
from fedgrove.parts.robust import ClippedMean, GeometricMedian, Median, MultiKrum, TrimmedMean
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


SENDS_MASKS = {
    *("ca-afp", "global-ft", "efficientfl", "fedsnip", "fixedprune"),
    *(
        "fedapta",
        "fedlayerprune",
        "feddst",
        "fedmask",
        "fedmp",
        "fedprune",
        "lotteryfl",
        "pfedgate",
    ),
    *("feddrop", "fedrolex", "heterofl", "hermes", "safl"),
    *("caldas-dropout", "fedlps"),
}


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
    assert bool(dropped) == (methods.name_of(method) in SENDS_MASKS)


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


ONE_GROUP = {
    "lotteryfl": methods.LotteryFL(density=1.0),
    "feddst": methods.FedDST(),  # nobody readjusts a mask in the first round
    "ifca": methods.IFCA(clusters=1),
    "feddrop": methods.FedDrop(widths=(1.0,)),
    "caldas-dropout": methods.CaldasDropout(share=1.0),
    "hermes": methods.Hermes(densities=()),
    "safl": methods.SAFL(densities=()),
    "fedlayerprune": methods.FedLayerPrune(p_base=0.0),
    "fedapta": methods.FedAPTA(ratios=(0.0,), grouping=None),
}
"""All clients together: of a parameter that only a liar has, or a group of his own, he decides."""


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
    method = ONE_GROUP.get(methods.name_of(method), method)
    run, first = liars_run(method, tmp_path)
    for rule in ROBUST:
        robust = replace(run, method=replace(method, mean=rule))
        assert from_toml(to_toml(Experiment(robust.method))).method == robust.method
        assert largest_sent(robust, first, None) < 10, rule
        assert largest_sent(robust, first, 1) < 10, rule


@pytest.mark.parametrize("method", AVERAGING)
def test_one_liar_spoils_the_weighted_mean(method, tmp_path: Path) -> None:
    if methods.name_of(method) == "clusterfl":
        pytest.skip("its eigenvectors set a liar apart")
    if methods.name_of(method) == "fedmask":
        pytest.skip("its server sends bits, whatever it is told")
    if methods.name_of(method) == "pfed1bs":
        pytest.skip("clients vote, and are sent signs")
    method = ONE_GROUP.get(methods.name_of(method), method)
    assert largest_sent(*liars_run(method, tmp_path), 1) > 1e15


# ---- turned off ----------------------------------------------------------------------------------


def used(task: Task) -> trees.Tree:
    """The model a client gets; with one model to choose from, that one."""
    packet = task.send.get("model") or task.send.get("model0")
    return packet.values if packet else {}


UNPULLED = replace(methods.CAAFP().pull, mu=0.0)
OFF = {
    "fedprox": methods.FedProx(pull=Proximal(0.0)),
    "fedapta": methods.FedAPTA(ratios=(0.0,), grouping=None),
    "fedbn": methods.FedBN(),  # the network has no norm layers
    "lg-fedavg": methods.LGFedAvg(shared=3),  # all three layers of the network
    "fixedprune": methods.FixedPrune(density=1.0),
    "fedlayerprune": methods.FedLayerPrune(p_base=0.0),
    "ditto": methods.Ditto(),  # its global model is never touched by the personal one
    "ca-afp": methods.CAAFP(density=1.0, clusters=1, pull=UNPULLED),
    "global-ft": methods.GlobalFT(density=1.0, pull=UNPULLED),
    "fedchar": methods.FedCHAR(warmup=1, clusters=1),  # as ditto
    "fedsnip": methods.FedSNIP(density=1.0),
    "feddst": methods.FedDST(density=1.0),
    "fedprune": methods.FedPrune(density=1.0),
    "fedmp": methods.FedMP(most=0.0),
    "fedkd": methods.FedKD(distil=0.0, energy=Energy(1.0, 1.0)),
    "lotteryfl": methods.LotteryFL(density=1.0),
    "pfedgate": methods.PFedGate(budget=1.0),
    "efficientfl": methods.EfficientFL(density=1.0, bits=0),
    "ifca": methods.IFCA(clusters=1),
    "fedem": methods.FedEM(components=1),
    "qfedcg": methods.QFedCG(share=1.0, bits=32),
    "heterofl": methods.HeteroFL(),  # these devices hold all of it
    "fedrolex": methods.FedRolex(widths=(1.0,)),
    "feddrop": methods.FedDrop(widths=(1.0,)),
    "hermes": methods.Hermes(densities=()),  # as fedbn
    "safl": methods.SAFL(densities=()),
    "moon": methods.MOON(contrast=ModelContrast(mu=0.0)),
    "fedbabu": methods.FedBABU(head=0),
    "fedntd": methods.FedNTD(distil=NotTrueDistillation(beta=0.0)),
    "fedlc": methods.FedLC(objective=LogitCalibration(tau=0.0)),
    "fedlps": methods.FedLPS(encoder=0.0, widths=(1.0,)),
    "fedgen": replace(small("fedgen"), generated=GeneratedFeatures(alpha=0.0)),
    "caldas-dropout": methods.CaldasDropout(share=1.0),
    "stc": methods.STC(up=1.0, down=1.0, ternary=False),
    "fedpaq": methods.FedPAQ(levels=0),
    "grove": methods.make("grove:off"),
}
ALONE = OFF | {
    "fedprox": methods.FedProx(
        pull=Proximal(0.0)
    ),  # its pull is to last round's model, which local does not have
    "clusterfl": methods.ClusterFL(tie=Clustered(0.0, 0.0, 0.0)),
    "adfedwcp": methods.AdFedWCP(
        allocation=Fixed(0), importance="alike", pull=AnnealedPull(fixed=0.0)
    ),
    "fedwcp": methods.FedWCP(k=0, pull=AnnealedPull(fixed=0.0)),
    "pfed1bs": methods.PFed1BS(pull=SignPull(weight=0.0, mu=0.0)),
}
"""Methods with what `local` does not have taken away: it prunes nothing and pulls towards nothing."""


@pytest.mark.parametrize("method", EVERY)
def test_one_client_is_local_training(method, tmp_path: Path) -> None:
    """With one client, averaging changes nothing: every method trains as `local` does."""
    if methods.name_of(method) == "fedmask":
        pytest.skip("its weights are never trained: see the next test")
    method = ALONE.get(methods.name_of(method), method)
    alone = make_run(methods.Local(), tmp_path / "alone", sizes=(20,), dtype=torch.float32)
    run = make_run(method, tmp_path / "run", sizes=(20,), dtype=torch.float32)
    play(alone, Serial())
    state = play(run, Serial())
    (task,) = plan_scoring(run, state)
    whole = remembered(alone)
    mine = dict(used(task))
    kept = "0/kept" if task.send else ("0/kept", "0/personal")  # who is handed nothing uses its own
    mine |= {k.split("/", 2)[2]: v for k, v in remembered(run).items() if k.startswith(kept)}
    assert trees.identical(
        {k: mine[k] for k in run.net.layout.shapes},
        {k.split("/", 2)[2]: v for k, v in whole.items()},
    )


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
    run = make_run(OFF[name], tmp_path / "b", dtype=torch.float32)
    other = play(run, Serial())
    (task, *_) = plan_scoring(run, other)
    assert trees.identical({k: used(task)[k] for k in plain.model}, plain.model)


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
    run = make_run(method, tmp_path)
    name, whole = methods.name_of(method), 8 * 5187 * 3 * 50
    expected = {
        "local": 0,
        "lg-fedavg": 8 * 4355 * 3 * 50,
        **dict.fromkeys(("fixedprune", "fedsnip", "efficientfl"), 0.3 * whole),
        # phases .5, .1, .4: three fifths of the rounds are dense; and a dense exchange with all four
        **dict.fromkeys(("ca-afp", "global-ft"), (0.6 + 0.4 * 0.3) * whole + 8 * 5187 * 4),
        "fedchar": 8 * 5187 * 3 * 51,
        # A step after each of 49 rounds, down to .3 of 5056 weights: the mean over the 50 rounds is .65 of them, to
        # rounding; 131 biases; and 49 times 4 bytes a weight.
        "fedprune": 8 * 131 * 3 * 50
        + 8 * 3 * sum(round(5056 * (1 - 0.7 * s / 49)) for s in range(50))
        + 4 * 5056 * 3 * 49,
        # 150 draws of 4 clients: each is drawn 37 times and two once more. Nine tenths are left each time, down to half:
        # 5056, 4550, 4095, 3686, 3317, 2985, 2686, 2528 weights, then 2528; and 131 biases. Each of the first seven
        # times in between is once what goes up and once what comes down.
        "lotteryfl": 4
        * (
            2 * 131 * 150
            + 4 * (5056 + 2 * (4550 + 4095 + 3686 + 3317 + 2985 + 2686) + 2528)
            + 2 * 2528 * (150 - 28)
        ),
        # Ratio .4: 38 of 64 units: 12*38+38 = 494, 38*38+38 = 1482, 38*3+3 = 117: 2093.
        "fedmp": 8 * 2093 * 3 * 50,
        # A fifth of 768 + 4096 + 192 = 5056 weights is 1011, and 131 biases. Readjusted in rounds 0 and 1, so two masks
        # go up and three down, one bit a weight.
        "feddst": 8 * (1011 + 131) * 3 * 50 + 5056 / 8 * 3 * 5,
        # all down; up half of the 5056 weights and 131 biases
        "pfedgate": 4 * (5187 + 2528 + 131) * 3 * 50,
        "ifca": 4 * 5187 * (3 + 1) * 3 * 50,
        # half the units: 12*32+32 = 416, 32*32+32 = 1056, 32*3+3 = 99: 1571 in all. One round of stage 1 with all four,
        # 49 of stage 2; K = 2: (2K + 1) M + p M
        "safl": 4 * (4 * (5 * 5187 + 1571) + 2 * 49 * 3 * 1571),
        # three quarters: 12*48+48 = 624, 48*48+48 = 2352, 48*3+3 = 147: 3123; clients take it and half in turn
        **dict.fromkeys(
            ("feddrop", "fedlps", "fedrolex", "heterofl"), 8 * (3123 + 1571) / 2 * 3 * 50
        ),
        # A quarter of 768 + 4096 weights is 1216. The first layer, whose mean |w| is .148 beside .062, loses the least
        # that it may, .9 of a quarter: 14.4 units, and the second the rest, 16.3; whole: 15 and 16. 49 and 48 stay:
        # 12*49+49 = 637, 49*48+48 = 2400, 48*3+3 = 147: 3184. Of a half 28.8 and 32.6, whole 29 and 33; 35 and 31
        # stay: 455, 1116, 96: 1667.
        "fedapta": 8 * (3184 + 1667) / 2 * 3 * 50,
        # the same 3123 for all clients
        "caldas-dropout": 8 * 3123 * 3 * 50,
        # all but the last layer's 195
        "fedbabu": 8 * (5187 - 195) * 3 * 50,
        # and the generator down, 3 classes and 3 of noise to 5 to 64: 6*5+5 = 35, 5*64+64 = 384: 419
        "fedgen": whole + 4 * 419 * 3 * 50,
        # half of the 768 + 4096 + 192 = 5056 weights on average, all biases, a bit for each of 5187
        "fedlayerprune": (8 * (5187 - 0.5 * 5056) + 2 * 649) * 3 * 50,
        # 8 and 4 centroids of 32 bits in three layers, 3 and 2 bits for each of 5056 weights, 131 biases
        "adfedwcp": 2 * 3 * 50 * (8 * 4 * 3 + 5056 * 3 / 8 + 131 * 4),
        "fedwcp": 2 * 3 * 50 * (4 * 4 * 3 + 5056 * 2 / 8 + 131 * 4),
        "fedem": 2 * whole,
        # Half the values in a quarter of the bits, an eighth: 87.5 % less.
        "qfedcg": whole / 8,
        # 5056 weights, one bit each, down and up.
        "fedmask": 2 * 5056 / 8 * 3 * 50,
        "hermes": 4 * (4 * (5187 + 1571) + 2 * 49 * 3 * 1571),
        # A hundredth of 5187 is 52; log(.618)/log(.99) = 47.9, so b* = 6, and .99^64 = .5256: 6 + 1/.4744 + 1 = 9.108
        # bits each and four bytes are 63.20. Four clients, three at a time: 4/3 updates come down for each that goes up.
        "stc": 63.201 * (1 + 4 / 3) * 3 * 50,
        # 4 bits and a sign: ten levels and 0 are eleven; and the length.
        "fedpaq": (4 * 5187 + 5187 * 5 / 8 + 4) * 3 * 50,
        "pfed1bs": 2 * 519 / 8 * 3 * 50,
        # A tenth of 768, 64, 4096 and 64 numbers: 77, 6, 410 and 6; n H(k/n) + k bits are 437.82, 34.73, 2332.27 and
        # 34.73, and with four magnitudes 370.944 bytes. Half of the head's 195, 98: 293 bits, 40.625 bytes. Down, all
        # that was missed: of 4 clients 3 at a time (1 - .25^t) / .75 updates in round t; over 50 rounds
        # (50 - 1/.75) / .75 / 50 = 1.29778.
        "grove": (370.944 + 40.625 + 370.944 * 1.29778) * 3 * 50,
    }.get(name, whole)
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
