"""FedLayerPrune: a fold by hand, masks that lie inside each other, regrowth, and what travels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import make_run, play, tensors
from tests.contract import Contract
from tests.methods.exchanges import exchanges
from tests.methods.fedlayerprune.test_hybrid import TwoConvolutions

from fedgrove import methods, trees
from fedgrove.channels.find_groups import find_groups, find_kept_channels
from fedgrove.core import ClientInfo, Packet, Report
from fedgrove.engines import Serial
from fedgrove.engines.batched.engine import Batched
from fedgrove.engines.pool.engine import Pool
from fedgrove.errors import InputError
from fedgrove.methods.fedlayerprune.fisher import Fisher, GradientVariance, HessianTrace
from fedgrove.methods.fedlayerprune.hybrid import Hybrid, LiteralHybrid, Vote
from fedgrove.methods.fedlayerprune.method import FedLayerPrune, State, equal_bits, grown
from fedgrove.methods.fedlayerprune.rates import (
    Alike,
    Allocated,
    KindAndDepth,
    LearnedSensitivity,
    Piecewise,
    capped,
)
from fedgrove.nets import Net
from fedgrove.parts.local import Adam, LocalTraining
from fedgrove.parts.score import Magnitude

CONTRACT = Contract(
    small={"every": 1},
    off=FedLayerPrune(p_base=0.0),
    one_group=FedLayerPrune(p_base=0.0),
    sends_masks=True,
    # Half of the 5056 weights on average, all biases, a bit for each of 5187.
    paper_bytes=(8 * (5187 - 0.5 * 5056) + 2 * 649) * 3 * 50,
    refused_with_privacy="mask of 'model'",
    # Per-sample gradients become grouped convolutions, of which torch's counter multiplies every group's input with
    # every group's gradient.
    macs_net="mlp",
)

CALM = LocalTraining(1, 8, Adam(1e-2, eps=1e-3))  # see tests/contracts/test_batched.py


def bits(*places: int) -> torch.Tensor:
    return torch.tensor(places).bool()


# ---- the server, by hand -------------------------------------------------------------------------


def state(round: int = 0, **words: Any) -> State:
    """One layer of four weights, which the server has as 9, 8, 7, 6."""
    made = State(
        round=round,
        rounds=10,
        p_base=0.2,
        model={"w": torch.tensor([9.0, 8.0, 7.0, 6.0])},
        mask={"w": bits(1, 1, 1, 1)},
        structure=(),
        prunable=("w",),
        evidence={},
        proportions={},
    )
    return replace(made, **words)


def report(of: int, n: int, values: list[float], mask: torch.Tensor, scores: Any = None) -> Report:
    give = {"model": Packet({"w": torch.tensor(values)}, {"w": mask})}
    if scores is not None:
        give["scores"] = Packet({"scores.w": torch.tensor(scores, dtype=torch.bfloat16)})
    return Report(of, give, n)


TWO = [
    report(0, 1, [2.0, 4.0, 0.0, 0.0], bits(1, 1, 0, 0)),
    report(1, 3, [6.0, 0.0, 1.0, 0.0], bits(1, 0, 1, 0)),
]


def test_the_mean_over_those_who_keep_a_weight_by_hand() -> None:
    """w0 (2 + 3 * 6) / 4 = 5; w1 only client 0: 4; w2 only client 1: 1; w3 nobody: still 6.

    Votes: 1, .25, .75, 0. Above .3 are w0 and w2.
    """
    after = FedLayerPrune(p_base=0.2).fold(state(), TWO)
    assert after.model["w"].tolist() == [5.0, 4.0, 1.0, 6.0]
    assert after.mask["w"].tolist() == [True, False, True, False]
    assert after.stability == 0.5
    assert after.round == 1


def test_the_papers_own_mean_by_hand() -> None:
    """Eq. 11: w1 1/4 * 4 = 1, w2 3/4 * 1 = .75: what few keep shrinks; what nobody keeps stays."""
    after = FedLayerPrune(p_base=0.2, renormalise=False).fold(state(), TWO)
    assert after.model["w"].tolist() == [5.0, 1.0, 0.75, 6.0]


def test_norms_and_biases_are_never_shrunk() -> None:
    """Client 1 has lost the channel of norm "g": its scale is client 0's, not a quarter of it.

    Nobody has that of "h": the server's value stays.
    """
    before = state()
    before = replace(
        before,
        model={**before.model, "g": torch.tensor([5.0]), "h": torch.tensor([3.0])},
        mask={**before.mask, "g": bits(1), "h": bits(1)},
    )
    reports = []
    for kept, answer in zip((1, 0), TWO, strict=True):
        packet = answer.give["model"]
        values = {**packet.values, "g": torch.tensor([2.0 * kept]), "h": torch.tensor([0.0])}
        mask = {**(packet.mask or {}), "g": bits(kept), "h": bits(0)}
        reports.append(replace(answer, give={"model": Packet(values, mask)}))
    for renormalise in (True, False):
        after = FedLayerPrune(p_base=0.2, renormalise=renormalise).fold(before, reports)
        assert after.model["g"].tolist() == [2.0]
        assert after.model["h"].tolist() == [3.0]


def test_regrowth_by_hand() -> None:
    """After round 5: of the two pruned weights half come back, by the mean of those who pruned it.

    w1: only client 1 pruned it, 8. w3: (1 * 1 + 3 * 9) / 4 = 7. So w1; if client 0, which kept it
    and sends 0, counted too, it would have 6. w3 with 9 in both would come back with the 6 it had.
    """
    reports = [
        report(0, 1, [2.0, 4.0, 0.0, 0.0], bits(1, 1, 0, 0), scores=[0, 0, 3, 1]),
        report(1, 3, [6.0, 0.0, 1.0, 0.0], bits(1, 0, 1, 0), scores=[0, 8, 0, 9]),
    ]
    after = FedLayerPrune(p_base=0.2, regrow=0.5).fold(state(round=4), reports)
    assert after.mask["w"].tolist() == [True, True, True, False]
    reports[0] = report(0, 1, [2.0, 4.0, 0.0, 0.0], bits(1, 1, 0, 0), scores=[0, 0, 3, 9])
    after = FedLayerPrune(p_base=0.2, regrow=0.5).fold(state(round=4), reports)
    assert after.mask["w"].tolist() == [True, False, True, True]
    assert after.model["w"][3] == 6.0


def test_a_mask_that_leaves_a_layer_out_keeps_it() -> None:
    """The gate lets it pass: such a client has pruned nothing of that layer, and nothing breaks."""
    unnamed = report(0, 1, [2.0, 4.0, 5.0, 6.0], bits(1, 1, 1, 1), scores=[9, 9, 9, 9])
    unnamed = replace(
        unnamed, give={**unnamed.give, "model": Packet(unnamed.give["model"].values, {})}
    )
    after = FedLayerPrune(p_base=0.2).fold(state(round=4), [unnamed])
    assert bool(after.mask["w"].all())
    assert after.model["w"].tolist() == [2.0, 4.0, 5.0, 6.0]


def test_how_many_come_back() -> None:
    """5 % of 60 pruned weights are 3: those of largest importance outside the mask."""
    mask = {"a": torch.arange(50) < 20, "b": torch.arange(50) < 20}
    importance = {"a": torch.arange(50.0), "b": torch.arange(50.0) / 100}
    after = grown(mask, importance, 0.05)
    assert int(after["a"].sum()) == 23
    assert after["a"][47:].all()
    assert int(after["b"].sum()) == 20
    assert trees.equal(grown(mask, importance, 0.0), mask)


def test_mask_stability_by_hand() -> None:
    before = {
        "a": bits(1, 1, 0),
        "b": bits(
            0,
        ),
    }
    assert (
        equal_bits(
            before,
            {
                "a": bits(1, 0, 0),
                "b": bits(
                    0,
                ),
            },
        )
        == 0.75
    )


def test_the_order_of_clients_does_not_matter() -> None:
    one = FedLayerPrune(p_base=0.2).fold(state(), TWO)
    other = FedLayerPrune(p_base=0.2).fold(state(), TWO[::-1])
    assert trees.identical(tensors(one), tensors(other))


# ---- rounds --------------------------------------------------------------------------------------


def tiny(folder: Path, net: str = "bn-cnn2", **words: Any):
    rounds = words.pop("rounds", 4)
    engine_words = {k: words.pop(k) for k in ("dtype", "sizes", "cohort") if k in words}
    method = FedLayerPrune(**({"local": CALM, "every": 2, "density": 0.5} | words))
    return make_run(method, folder, net=net, rounds=rounds, **engine_words)


def test_a_client_prunes_inside_the_mask_it_trained_under(tmp_path: Path) -> None:
    run = tiny(tmp_path, cohort=4)
    layout = run.net.layout
    for before, tasks, reports, after in exchanges(run):
        p = before.p_base * Piecewise()(before.round, 4)
        rates = KindAndDepth()(layout, p)
        assert all(task.settings["p"] == p for task in tasks)
        for answer in reports:
            mask = answer.give["model"].mask
            assert mask is not None
            for name in layout.prunable:
                assert bool((~mask[name] | before.mask[name]).all())
                kept = float(mask[name].float().mean())
                assert kept <= 1 - min(rates[name], 0.8) + 1 / mask[name].numel()
        # Every two rounds, but not after the last: nothing would train what comes back.
        regrown = after.round == 2
        if not regrown:
            assert all(bool((~after.mask[k] | before.mask[k]).all()) for k in layout.prunable)
        # Scores travel in the rounds before a regrowth, and in no other.
        assert all(("scores" in answer.give) == regrown for answer in reports)
    assert after.round == 4


def test_a_client_keeps_its_share_of_every_layer(tmp_path: Path) -> None:
    """Not more, and fewer only by what units without a weight take along."""
    run = tiny(tmp_path, net="mlp", cohort=4, rounds=2)
    (before, _, reports, _), *_ = exchanges(run)
    rates = capped(KindAndDepth()(run.net.layout, before.p_base), 0.8)
    for answer in reports:
        mask = answer.give["model"].mask
        assert mask is not None
        for name, rate in rates.items():
            wanted = round((1 - rate) * mask[name].numel())
            assert 0.9 * wanted <= int(mask[name].sum()) <= wanted


def test_scores_are_counted_as_scores(tmp_path: Path) -> None:
    run = tiny(tmp_path, dtype=torch.float32)
    costs = []
    for _, _, reports, _ in exchanges(run):
        costs.append(sum(report.cost["up"].get("scores", 0) for report in reports))
    assert [cost > 0 for cost in costs] == [False, True, False, False]


def test_scores_are_sent_with_weights_that_sum_to_one(tmp_path: Path) -> None:
    """After two estimates the average is divided by 1 - .9^2, so that clients can be compared."""
    run = tiny(tmp_path, net="mlp", cohort=4)
    played = exchanges(run)
    next(played)
    # Before the third round, which would replace what clients remember.
    _, _, reports, _ = next(played)
    for answer in reports:
        kept = run.memory.read(answer.of, run.memory.files[answer.of])["importance"]
        mask = answer.give["model"].mask
        assert mask is not None
        for name, average in kept.items():
            expected = (average / (1 - 0.9**2)).masked_fill(mask[name], 0.0)
            sent = answer.give["scores"].values[f"scores.{name}"].double()
            assert torch.allclose(sent, expected.double(), rtol=0.01, atol=0)


def test_channels_are_really_gone(tmp_path: Path) -> None:
    """Half of a rate of about .6 takes channels; what is delivered trains in a smaller network."""
    run = tiny(tmp_path, density=0.4, p_max=0.9, rates=Alike(), regrow=0.0)
    final = play(run, Serial())
    packet = run.method.deliver(final, 0)["model"]
    left = find_kept_channels(run.net, packet.mask)
    assert left is not None
    assert any(not bool(kept.all()) for kept in left.values())


def test_importances_are_smoothed_over_the_rounds_a_client_takes_part_in(tmp_path: Path) -> None:
    run = tiny(tmp_path, net="mlp", cohort=4, rounds=2)
    importances = []
    for _, _, reports, _ in exchanges(run):
        client = reports[0].of
        version = run.memory.files[client]
        importances.append(run.memory.read(client, version)["importance"])
        count = run.memory.read(client, version)["estimates"]["count"]
        assert int(count) == len(importances)
    first, second = importances
    # I2 = .9 I1 + .1 I, so what the second mini-batch alone said is 10 I2 - 9 I1: nowhere below 0.
    said = trees.map(lambda new, old: 10 * new - 9 * old, second, first)
    assert float(trees.flatten(said).min()) > -1e-9
    assert trees.distance(first, second) > 0


@pytest.mark.parametrize(
    "words",
    [
        {"rates": KindAndDepth(strength=GradientVariance())},
        {"rates": KindAndDepth(strength=HessianTrace())},
        {"rates": LearnedSensitivity()},
        {"rates": Allocated()},
        {"score": Magnitude()},
        {"score": Fisher(per_sample=False)},
        {"hybrid": LiteralHybrid(), "renormalise": False},
        {"devices": True},
    ],
    ids=lambda words: next(iter(words)) + "-" + type(next(iter(words.values()))).__name__,
)
def test_every_part_on_every_engine(words: dict[str, Any], tmp_path: Path) -> None:
    serial = play(tiny(tmp_path / "serial", **words), Serial())
    with_processes = Pool(workers=2)
    try:
        pool = play(tiny(tmp_path / "pool", **words), with_processes)
    finally:
        with_processes.close()
    batched = play(tiny(tmp_path / "batched", **words), Batched("cpu"))
    assert trees.identical(tensors(serial), tensors(pool))
    assert trees.distance(tensors(serial), tensors(batched)) < 1e-9
    assert serial.evidence == pytest.approx(batched.evidence)
    assert bool(serial.evidence) == (getattr(words.get("rates"), "measures", None) is not None)


def test_weaker_devices_prune_more(tmp_path: Path) -> None:
    run = tiny(tmp_path, net="mlp", devices=True, cohort=4)
    infos = {
        client: ClientInfo(data.info.examples, bandwidth=[10.0, 40.0, 40.0, 80.0][client])
        for client, data in run.federation.clients.items()
    }
    clients = {k: replace(data, info=infos[k]) for k, data in run.federation.clients.items()}
    run = replace(run, federation=replace(run.federation, clients=clients))
    (_, tasks, reports, _), *_ = exchanges(run)
    p = {task.to: task.settings["p"] for task in tasks}
    assert p[0] > p[1] == p[2] == p[3]
    kept = {r.of: run.net.layout.density(r.give["model"].mask) for r in reports}
    assert kept[0] < kept[1]


def test_figures_of_its_own(tmp_path: Path) -> None:
    run = tiny(tmp_path)
    final = play(run, Serial())
    figures = run.method.server_metrics(final)
    assert 0 < figures["mask_stability"] <= 1
    for name in run.net.layout.prunable:
        assert figures[f"density:{name}"] == pytest.approx(float(final.mask[name].double().mean()))


# ---- bytes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("hybrid", "weights"), [(Hybrid(), 8), (LiteralHybrid(), 3)])
def test_the_papers_bytes_by_hand(hybrid: Hybrid | LiteralHybrid, weights: int) -> None:
    """Convolutions 1 -> 4 and 4 -> 2 of single weights and a head 2 -> 2: 4 + 8 + 4 weights, 8
    biases. At rates .5 our rule keeps 8 weights, the literal one 1 of each layer (by hand in
    test_hybrid.py). Two clients and three rounds, both ways: 12 (4 (weights + 8) + 24 / 8).
    """
    net = Net(TwoConvolutions(), (1, 2, 2))
    method = FedLayerPrune(p_base=0.5, rates=Alike(), schedule=Piecewise(rise=0), hybrid=hybrid)
    assert method.paper_bytes(net, clients=5, cohort=2, rounds=3) == 12 * (4 * (weights + 8) + 3)


def test_a_density_is_that_of_the_literal_rule_too(tmp_path: Path) -> None:
    """So p_base is lower than for our rule, which keeps what the rates say."""
    kept = {}
    for hybrid in (Hybrid(), LiteralHybrid()):
        run = tiny(tmp_path, density=0.5, hybrid=hybrid, rates=Alike(), schedule=Piecewise(rise=0))
        state = run.initial_state
        rates = dict.fromkeys(run.net.layout.prunable, state.p_base)
        share = hybrid.kept_share(rates, find_groups(run.net), run.net.layout)
        kept[type(hybrid)] = (state.p_base, share)
    assert kept[Hybrid] == pytest.approx((0.5, 0.5))
    base, share = kept[LiteralHybrid]
    assert base < 0.4
    # Channels are whole: a net this small reaches the density only nearly.
    assert share == pytest.approx(0.5, abs=0.05)


# ---- presets and refusals ------------------------------------------------------------------------


def test_presets() -> None:
    literal = methods.make("fedlayerprune:literal")
    assert (literal.p_base, literal.p_max, literal.renormalise) == (0.2, 0.6, False)
    assert literal.hybrid == LiteralHybrid()
    assert methods.make("fedlayerprune:reported") == FedLayerPrune(density=0.4)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ({"p_base": 1.5}, r"p_base is 1.5; it must be in \[0, 1\]"),
        ({"p_max": 1.0}, r"p_max is 1.0; it must be in \(0, 1\)"),
        ({"density": 0.0}, r"density is 0.0; it must be in \(0, 1\]"),
        ({"every": 0}, "every is 0; it must be 1 or more rounds"),
        ({"regrow": 2}, r"regrow is 2; it must be in \[0, 1\]"),
    ],
)
def test_settings_outside_their_range_are_refused(words: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        FedLayerPrune(**words)


def test_a_density_below_the_cap_is_refused_before_the_first_round(tmp_path: Path) -> None:
    run = tiny(tmp_path, density=0.1)
    with pytest.raises(InputError, match=r"density is 0\.1; it must be 0.2 or more with p_max 0.8"):
        run.method.init(run.setup)


def test_a_client_without_examples_is_refused(tmp_path: Path) -> None:
    run = tiny(tmp_path, net="mlp")
    start = run.setup
    clients = {**start.clients, 2: replace(start.clients[2], examples=0)}
    with pytest.raises(InputError, match="client 2 has no training examples"):
        run.method.init(replace(start, clients=clients))


def test_a_net_without_channels_is_noted(tmp_path: Path) -> None:
    (note,) = FedLayerPrune().notes(tiny(tmp_path, net="mlp").net)
    assert "single weights only" in note
    assert not FedLayerPrune(hybrid=Hybrid(0.0)).notes(tiny(tmp_path, net="mlp").net)
    assert not FedLayerPrune().notes(tiny(tmp_path, net="bn-cnn2").net)


def test_a_threshold_of_one_is_refused() -> None:
    with pytest.raises(InputError, match="threshold is 1"):
        FedLayerPrune(vote=Vote(1))
