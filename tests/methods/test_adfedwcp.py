"""AdFedWCP and FedWCP: personal models, masks that change, what is sent and what is counted."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import make_run, play, remembered, tensors
from tests.contract import Contract
from tests.methods.exchanges import exchanges
from torch import nn

import fedgrove as fg
from fedgrove import methods, nets, trees
from fedgrove.config.experiment import Experiment
from fedgrove.config.grid import alternatives
from fedgrove.config.settings import assign
from fedgrove.config.toml import from_toml, to_toml
from fedgrove.core import Batch, Carry, ClientInfo, Engine, Packet, Report, Task, Train
from fedgrove.engines import Pool, Serial, Wired
from fedgrove.engines.batched.engine import Batched
from fedgrove.engines.work import make_carry, perform
from fedgrove.errors import InputError
from fedgrove.methods import AdFedWCP, FedWCP
from fedgrove.methods.adfedwcp import kmeans
from fedgrove.methods.adfedwcp.anneal import AnnealedPull
from fedgrove.methods.adfedwcp.centroids import Adaptive, Fixed
from fedgrove.methods.adfedwcp.importance import (
    Hits,
    Prototypes,
    by_magnitude,
    imprinted,
    layers_of,
    weighed,
)
from fedgrove.methods.adfedwcp.method import (
    State,
    begin_personal,
    clustered_weights,
    use_personal,
)
from fedgrove.parts import local
from fedgrove.parts.local import SGD, Adam, LocalTraining
from fedgrove.runs.rounds import plan_scoring

CONTRACT = Contract(
    small={"allocation": Adaptive(k_min=3, k_max=8)},
    alone=AdFedWCP(allocation=Fixed(0), importance="alike", pull=AnnealedPull(fixed=0.0)),
    has_a_place_for_each_client=True,
    # 8 centroids of 32 bits in three layers, 3 bits for each of 5056 weights, 131 biases.
    paper_bytes=2 * 3 * 50 * (8 * 4 * 3 + 5056 * 3 / 8 + 131 * 4),
    refused_with_privacy="numbers next to their model",
    # Imprinting also multiplies embeddings with prototypes, a tenth of a pass of so small a net.
    most_macs=1.1,
)

CALM = LocalTraining(1, 8, Adam(1e-2, eps=1e-3))  # see tests/contracts/test_batched.py


def tiny(method: Any, folder: Path, **words: Any):
    bandwidths = words.pop("bandwidths", None)
    run = make_run(replace(method, local=CALM), folder, **({"cohort": 4} | words))
    if bandwidths is None:
        return run
    clients = {}
    for k, data in run.federation.clients.items():
        info = ClientInfo(data.info.examples, bandwidth=bandwidths[k])
        clients[k] = replace(data, info=info)
    return replace(run, federation=replace(run.federation, clients=clients))


def line_4(method: Any, batches: int) -> list[tuple[float, float]]:
    """Two weights after some batches of ClientUpdate, trained in place and by the pure form.

    They are (ln 3, 5), and the mask prunes the second. Every batch is one example, 1, of class 0. The
    shared model is (ln 3 - 1, 3), so the pull is along (1, 2).
    """
    net = nets.Net(nn.Linear(1, 2, bias=False), (1,))
    stage = next(stage for stage in method.work("train") if isinstance(stage, Train))
    one = torch.ones(1)
    batch = Batch(one[:, None], torch.tensor([0]), one, torch.arange(1), torch.tensor(0))
    carry: Carry = {
        "personal": {"weight": torch.tensor([[math.log(3)], [5.0]])},
        "model": {"weight": torch.tensor([[math.log(3) - 1], [3.0]])},
        "kept": {"weight": torch.tensor([[True], [False]])},
        "settings": {"round": torch.tensor(0.0)},
        "aux": {},
    }
    in_place = local.train(net, stage, carry, [batch] * batches)
    pure = local.start_training(net, stage, carry)
    for _ in range(batches):
        pure = local.step(net, stage, pure, batch)
    # Not in place: the personal model of the start of the round is the pull's origin.
    assert carry["personal"]["weight"].flatten().tolist() == [pytest.approx(math.log(3)), 5]
    return [tuple(found["trained"]["weight"].flatten().tolist()) for found in (in_place, pure)]


LINE_4 = FedWCP(k=2, pull=AnnealedPull(fixed=0.5), local=LocalTraining(1, 1, SGD(0.1)))


def test_the_gradient_is_taken_under_the_mask_and_moves_all_weights_by_hand() -> None:
    """ClientUpdate, line 4: th <- th - eta (grad l(th M) + lambda (th^t - th_g)).

    Under the mask the logits are (ln 3, 0), so p = (3/4, 1/4) and the gradient is (-1/4, 1/4): with
    eta .1 and lambda .5, th = (ln 3 - .1 (-.25 + .5), 5 - .1 (.25 + 1)). Without the mask p would
    be (.02, .98); a step from th M would end at (..., -.125).
    """
    expected = (math.log(3) - 0.025, 4.875)
    for found in line_4(LINE_4, 1):
        assert found == pytest.approx(expected)


def test_pruned_weights_may_be_zeroed_before_every_batch_by_hand() -> None:
    """As in the authors' code: the first step is from (ln 3, 0) and ends at (ln 3 - .025, -.125).

    The second is from (ln 3 - .025, 0) again: p_1 = 1 / (1 + 3 e^-.025), and the weights end at
    (ln 3 - .05 + .1 p_1, -.1 (p_1 + 1)). After the last batch nothing is zeroed.
    """
    method = replace(LINE_4, zero_pruned="batch")
    for found in line_4(method, 1):
        assert found == pytest.approx((math.log(3) - 0.025, -0.125))
    p = 1 / (1 + 3 * math.exp(-0.025))
    expected = (math.log(3) - 0.025 - 0.1 * (-p + 0.5), -0.1 * (p + 1))
    for found in line_4(method, 2):
        assert found == pytest.approx(expected)


def memory_of(run: Any, client: int) -> dict[str, Any]:
    return dict(run.memory.read(client, run.memory.files[client]))


@pytest.mark.parametrize(
    ("net", "shape", "classes", "reductions"),
    [
        ("lenet", (3, 32, 32), 10, {8: 0.9050, 16: 0.8736, 32: 0.8421}),
        ("leafcnn", (1, 28, 28), 47, {8: 0.9054, 16: 0.8741, 32: 0.8429}),
    ],
)
def test_the_papers_reductions_are_exact(
    net: str, shape: tuple[int, ...], classes: int, reductions: dict[int, float]
) -> None:
    """Table 2, to the digit (it prints 90.53 where its own formula gives 90.54)."""
    module = nets.Net(nets.build(net, shape, classes, 0), shape)
    dense = methods.FedAvg().paper_bytes(module, 2, 2, 1)
    for k, reduction in reductions.items():
        share = FedWCP(k=k).paper_bytes(module, 2, 2, 1) / dense
        assert round(1 - share, 4) == reduction


def test_layers_are_weighed_before_the_first_round(tmp_path: Path) -> None:
    run = tiny(AdFedWCP(), tmp_path)
    (_, tasks, reports, after), second, *_ = exchanges(run)
    assert {task.verb for task in tasks} == {"weigh"}
    assert not any(task.send or report.give for task, report in zip(tasks, reports, strict=True))
    assert after.round == 0
    layers = len(run.net.layout.prunable)
    for report in reports:
        weights = [report.metrics[f"layer{i}"] for i in range(layers)]
        assert sum(weights) == pytest.approx(1)
        assert after.omegas[report.of] == pytest.approx(tuple(weights))
    assert second[1][0].verb == "train"


def test_layers_weighed_otherwise(tmp_path: Path) -> None:
    """By magnitude nobody is asked first: the initial weights are the same everywhere."""
    run = tiny(AdFedWCP(importance="magnitude"), tmp_path / "magnitude")
    layers = [(name,) for name in run.net.layout.prunable]
    played = list(exchanges(run))
    before, tasks, _, _ = played[0]
    _, _, reports, after = played[-1]
    assert {task.verb for task in tasks} == {"train"}
    initial = pytest.approx(weighed(by_magnitude(run.params, layers)))
    assert all(omega == initial for omega in before.omegas.values())
    memory = memory_of(run, 0)
    used = {k: memory["personal"][k] * memory["kept"][k] for k in run.net.layout.prunable}
    assert after.omegas[0] == pytest.approx(weighed(by_magnitude(used, layers)))
    assert 0 <= reports[0].metrics["accuracy"] <= 1

    run = tiny(AdFedWCP(importance="gradient"), tmp_path / "gradient")
    first, second, *_ = exchanges(run)
    assert {task.verb for task in first[1]} == {"weigh"}
    assert {task.verb for task in second[1]} == {"train"}
    for _, _, reports, after in (first, second):
        for report in reports:
            assert sum(after.omegas[report.of]) == pytest.approx(1)
            assert len(set(after.omegas[report.of])) > 1


def test_importance_and_accuracy_are_those_of_the_model_in_use(tmp_path: Path) -> None:
    """After training, under the new mask, and on the client's training data."""
    run = tiny(AdFedWCP(allocation=Adaptive(k_min=3, k_max=8)), tmp_path)
    *_, (_, _, reports, _) = exchanges(run)
    layers = layers_of(run.net.layout)
    for report in reports:
        memory = memory_of(run, report.of)
        used = trees.apply_mask(memory["personal"], memory["kept"])
        data = run.federation.client(report.of).train
        count = len(data)
        weight = torch.ones(count, dtype=torch.float64)
        batch = Batch(data.x, data.y, weight, torch.arange(count), torch.tensor(0))
        prototypes = Prototypes()(run.net, used, batch, {})
        hits = Hits()(run.net, used, batch, {"prototypes": prototypes})
        reported = [report.metrics[f"layer{i}"] for i in range(len(layers))]
        assert reported == pytest.approx(imprinted(hits, layers))
        right = run.net(used, data.x, train=False).logits.argmax(1) == data.y
        assert report.metrics["accuracy"] == pytest.approx(float(right.double().mean()))


def test_weak_devices_get_fewer_centroids_where_that_is_asked(tmp_path: Path) -> None:
    rule = Adaptive(k_min=2, upper=False, memory=True, speed=True)
    plain = AdFedWCP(allocation=replace(rule, memory=False, speed=False))
    counts = []
    for i, method in enumerate((plain, AdFedWCP(allocation=rule))):
        run = tiny(method, tmp_path / str(i), sizes=(24, 24, 12, 12))
        weak = ClientInfo(24, speed=0.25, memory=1 << 28)
        clients = dict(run.federation.clients)
        clients[0] = replace(clients[0], info=weak)
        run = replace(run, federation=replace(run.federation, clients=clients))
        *_, (_, tasks, _, _) = exchanges(run)
        counts.append({task.to: sum(task.settings["k"]) for task in tasks})
    assert counts[1][0] < counts[0][0]
    assert counts[1][1] <= counts[0][1]


def test_what_the_paper_counts_of_an_uplink_by_hand(tmp_path: Path) -> None:
    """k = 4 in three layers of 5056 weights, 131 biases: 3 * 4 * 32 + 2 * 5056 + 32 * 131 bits."""
    run = tiny(FedWCP(k=4), tmp_path)
    *_, (_, _, _, after) = exchanges(run)
    assert run.net.layout.size == 5187
    assert run.method.server_metrics(after) == {
        "centroids": 4,
        "uplink_counted": pytest.approx((384 + 10112 + 4192) / (32 * 5187)),
    }


def test_slow_clients_get_fewer_centroids(tmp_path: Path) -> None:
    run = tiny(AdFedWCP(), tmp_path, bandwidths=[5.0, 100.0, 5.0, 100.0], sizes=(24, 24, 12, 12))
    *_, (_, tasks, reports, _) = exchanges(run)
    k = {task.to: sum(task.settings["k"]) for task in tasks}
    assert k[0] < k[1]
    found = {r.of: r.give["model"].values for r in reports}
    for task in tasks:
        for number, name in zip(task.settings["k"], run.net.layout.prunable, strict=True):
            assert len(found[task.to][name].unique()) <= number


def test_the_shared_model_never_overwrites_a_personal_one(tmp_path: Path) -> None:
    """Without a pull a client trains on from where it was, whatever the others send."""
    alone = tiny(
        FedWCP(k=4, pull=AnnealedPull(fixed=0.0)), tmp_path / "alone", sizes=(20,), cohort=1
    )
    beside = tiny(
        FedWCP(k=4, pull=AnnealedPull(fixed=0.0)), tmp_path / "beside", sizes=(20, 13), cohort=2
    )
    play(alone, Serial())
    play(beside, Serial())
    assert trees.identical(memory_of(alone, 0)["personal"], memory_of(beside, 0)["personal"])


def test_what_is_sent_is_clustered_and_what_is_kept_is_not(tmp_path: Path) -> None:
    run = tiny(FedWCP(k=4), tmp_path)
    played = list(exchanges(run))
    for _, _, reports, _ in played[-1:]:
        for report in reports:
            sent = report.give["model"].values
            kept = memory_of(run, report.of)
            # The trained weights, not those of the start of the round and not those under the mask.
            numbers = torch.full((3,), 4.0)
            clusters = clustered_weights(run.net.layout, kept["personal"], numbers, 4)
            assert trees.identical(clusters, trees.pick(sent, clusters))
            for name in run.net.layout.prunable:
                assert len(sent[name].unique()) <= 4
                assert len(kept["personal"][name].unique()) > 4
                assert torch.equal(kept["kept"][name], sent[name] != 0)
            for name in set(sent) - set(run.net.layout.prunable):
                assert torch.equal(sent[name], kept["personal"][name])
    # The client uses its personal model under the mask.
    *_, (_, _, _, after) = played
    task = plan_scoring(run, after)[0]
    report, _ = perform(run, task, memory_of(run, 0))
    assert report.metrics["density"] == pytest.approx(
        run.net.layout.density(memory_of(run, 0)["kept"])
    )


def test_centroids_follow_the_mean_accuracy_by_hand() -> None:
    """The mean accuracy is .5, then (.6 + .8) / 2 = .7 and then .4: it rises by .2 and falls by .3.

    A client with the fewest examples has k_data = 5. Behind round 2 of 4 it gets
    5 * 1.5 * (1 - .1 * .2) = 7.35, so 8; behind round 3 5 * 1.75 * (1 + 1.5 * .3) = 12.69, so 13.
    """
    method = AdFedWCP(importance="alike")
    state = State(
        round=1,
        rounds=4,
        model={"w": torch.zeros(4)},
        layers=("0",),
        weights=("w",),
        sizes=(4,),
        size=4,
        devices={3: (10, 50.0, 1.0, 0), 7: (30, 50.0, 1.0, 0)},
        fewest=10,
        most=30,
        omegas={3: (1.0,), 7: (1.0,)},
        weighed=True,
        accuracy=0.5,
    )
    give = {"model": Packet({"w": torch.ones(4)})}
    reports = []
    for client, accuracy in ((3, 0.6), (7, 0.8)):
        reports.append(Report(client, give, 10, {"accuracy": accuracy}))
    risen = method.fold(state, reports)
    assert (risen.accuracy, risen.change) == pytest.approx((0.7, 0.2))
    assert method.centroids(risen, 3) == [8.0]
    fallen = method.fold(risen, [Report(7, give, 10, {"accuracy": 0.4})])
    assert (fallen.accuracy, fallen.change) == pytest.approx((0.4, -0.3))
    assert method.centroids(fallen, 3) == [13.0]


def test_a_new_client_begins_at_the_networks_start_under_its_clustering(tmp_path: Path) -> None:
    """Also in a later round: the shared model pulls it, and is not where it begins."""
    run = tiny(FedWCP(k=3), tmp_path)
    shared = {name: leaf + 1 for name, leaf in run.params.items()}
    task = Task(0, {"model": Packet(shared)}, {"k": [3.0, 3.0, 3.0]}, round=2)
    client = run.client(task, {})
    begun = begin_personal(make_carry(task, {}, torch.float64), client)
    assert trees.identical(begun["personal"], run.params)
    for name in run.net.layout.prunable:
        clustered = kmeans.cluster(run.params[name], torch.tensor(3), 8)
        assert torch.equal(begun["kept"][name], clustered != 0)
        assert 0 < int(begun["kept"][name].sum()) < clustered.numel()
    # It goes on with what it has from then on.
    assert begin_personal(begun, client) is begun


def test_a_client_uses_its_personal_model_under_its_mask(tmp_path: Path) -> None:
    run = tiny(FedWCP(k=3), tmp_path)
    *_, (_, tasks, _, _) = exchanges(run)
    memory = memory_of(run, 0)
    task = replace(tasks[0], to=0)
    used = use_personal(make_carry(task, memory, torch.float64), run.client(task, memory))
    for name, leaf in memory["personal"].items():
        kept = memory["kept"].get(name, torch.ones_like(leaf))
        assert torch.equal(used["model"][name], leaf * kept)
    assert trees.identical(used["model.mask"], memory["kept"])
    # A client that has never trained uses the shared model.
    new = make_carry(task, {}, torch.float64)
    assert use_personal(new, run.client(task, {}))["model"] is new["model"]


def test_a_pruned_weight_may_return(tmp_path: Path) -> None:
    run = tiny(FedWCP(k=3), tmp_path, rounds=4)
    returned = 0
    before: dict[str, torch.Tensor] | None = None
    for _ in exchanges(run):
        kept = memory_of(run, 0)["kept"]
        if before is not None:
            returned += sum(int((kept[name] & ~before[name]).sum()) for name in kept)
        before = kept
    assert returned > 0


def test_a_pruned_weight_may_begin_at_0_again(tmp_path: Path) -> None:
    """Then the personal model is 0 wherever its mask is, and models become sparser.

    They become as sparse where weights are zeroed before every batch, though the last step moves
    them once more.
    """
    kept_share = {}
    for zero_pruned in ("never", "round", "batch"):
        method = FedWCP(k=3, zero_pruned=zero_pruned)
        run = tiny(method, tmp_path / zero_pruned, rounds=4)
        for _ in exchanges(run):
            pass
        memory = memory_of(run, 0)
        pruned = {name: memory["personal"][name][~mask] for name, mask in memory["kept"].items()}
        all_are_0 = all(bool((values == 0).all()) for values in pruned.values())
        assert all_are_0 is (zero_pruned == "round")
        shares = [mask.double().mean() for mask in memory["kept"].values()]
        kept_share[zero_pruned] = float(sum(shares) / len(shares))
    assert kept_share["round"] < kept_share["never"]
    assert kept_share["batch"] < kept_share["never"]


@pytest.mark.parametrize("zero_pruned", ["round", "batch"])
def test_every_engine_zeroes_the_same_weights(zero_pruned: Any, tmp_path: Path) -> None:
    found = []
    engines: list[Engine] = [Serial(), Wired(), Pool(workers=2), Batched()]
    for engine in engines:
        method = FedWCP(k=3, zero_pruned=zero_pruned)
        # Ragged: some clients have fewer batches, and must not be zeroed once more behind their last.
        run = tiny(method, tmp_path / engine.name, net="bn-cnn2", sizes=(20, 9, 24, 17))
        found.append((tensors(play(run, engine)), remembered(run)))
        engine.close()
    (state, memory), *exact, (stacked_state, stacked_memory) = found
    for other_state, other_memory in exact:
        assert trees.identical(state, other_state)
        assert trees.identical(memory, other_memory)
    assert trees.distance(state, stacked_state) < 1e-9
    assert trees.distance(memory, stacked_memory) < 1e-9


def test_the_old_name_of_zeroing_works_for_one_release() -> None:
    """In Python, with --set, in a sweep and in config.toml."""
    old = "AdFedWCP.returns = False is now zero_pruned = 'round'; the old name will be removed"
    with pytest.warns(DeprecationWarning, match=old):
        assert AdFedWCP(returns=False) == AdFedWCP(zero_pruned="round")
    with pytest.warns(DeprecationWarning, match="zero_pruned = 'never'"):
        assert FedWCP(k=8, returns=True) == FedWCP(k=8)
    with pytest.warns(DeprecationWarning, match="FedWCP.returns = false is now"):
        assert assign(FedWCP(), "returns=false").zero_pruned == "round"
    assert alternatives(FedWCP(), "returns=true,false") == ["returns=true", "returns=false"]
    text = to_toml(Experiment(FedWCP(), data="digits"))
    new = 'zero_pruned = "never"'
    assert new in text
    with pytest.warns(DeprecationWarning, match="zero_pruned = 'round'"):
        assert from_toml(text.replace(new, "returns = false")).method.zero_pruned == "round"
    sentence = "zero_pruned is 'maybe'; it must be never or round or batch"
    with (
        pytest.warns(DeprecationWarning, match="FedWCP.returns = maybe is now"),
        pytest.raises(InputError, match=sentence),
    ):
        assign(FedWCP(), "returns=maybe")


def test_a_clustered_broadcast(tmp_path: Path) -> None:
    run = tiny(FedWCP(k=8, broadcast=4), tmp_path)
    *_, (_, tasks, _, _) = exchanges(run)
    values = tasks[0].send["model"].values
    assert all(len(values[name].unique()) <= 4 for name in run.net.layout.prunable)


@pytest.mark.parametrize("importance", ["imprint", "magnitude", "gradient", "alike"])
def test_every_engine_finds_the_same_centroids(importance: Any, tmp_path: Path) -> None:
    # Few centroids: they take most of the time.
    method = AdFedWCP(importance=importance, allocation=Adaptive(k_min=3, k_max=8))
    serial = play(tiny(method, tmp_path / "serial"), Serial())
    batched = play(tiny(method, tmp_path / "batched"), Batched())
    assert trees.distance(tensors(serial), tensors(batched)) < 1e-9
    for client, omega in serial.omegas.items():
        assert omega == pytest.approx(batched.omegas[client])


def test_imprinting_needs_classes() -> None:
    words: dict[str, Any] = {
        "clients": 3,
        "cohort": 2,
        "rounds": 1,
        "engine": "serial",
        "progress": False,
    }
    with pytest.raises(InputError, match="imprinting, which needs classes, and the targets are"):
        fg.run(AdFedWCP(), data="rooms", **words)
    for importance in ("alike", "magnitude", "gradient"):
        result = fg.run(AdFedWCP(importance=importance), data="rooms", **words)
        assert result.summary["metric"] == "mae"


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: FedWCP(k=1), "k is 1"),
        (lambda: AdFedWCP(broadcast=1), r"broadcast is 1; it must be 0, or in 2\.\.256"),
        (lambda: AdFedWCP(importance="size"), "importance is 'size'; it must be one of imprint, "),
        (
            lambda: FedWCP(zero_pruned="epoch"),
            "zero_pruned is 'epoch'; it must be one of never, ro",
        ),
        (lambda: AdFedWCP(allocation=Adaptive(k_min=40)), "k_max is 32"),
    ],
)
def test_impossible_settings_are_refused(make: Any, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        make()


def test_names() -> None:
    assert isinstance(methods.make("adfedwcp"), AdFedWCP)
    assert isinstance(methods.make("fedwcp"), FedWCP)
