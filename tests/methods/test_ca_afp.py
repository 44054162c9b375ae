"""CA-AFP: phases, masks that are exact at every step, evidence when it is used, late joiners."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tests.conftest import admitted, make_run, play, reports
from tests.contract import WHOLE, Contract
from tests.methods.exchanges import CALM, SIZES, Filter, counts, exchanges, tiny, verbs

from fedgrove import methods, trees
from fedgrove.core import Packet, Report, Task
from fedgrove.engines import Serial
from fedgrove.errors import InputError
from fedgrove.methods import CAAFP
from fedgrove.methods.ca_afp.evidence import Gather
from fedgrove.methods.ca_afp.method import State
from fedgrove.methods.ca_afp.phases import Churn, Clock, Phase
from fedgrove.parts.group import nearest
from fedgrove.parts.local import SGD, LocalTraining
from fedgrove.parts.objective import Proximal
from fedgrove.runs.rounds import draw_cohort, plan_scoring, rounds

CONTRACT = Contract(
    off=CAAFP(density=1.0, clusters=1, pull=replace(CAAFP().pull, mu=0.0)),
    sends_masks=True,
    # Phases .5, .1, .4: three fifths of the rounds are dense; and a dense exchange with all four.
    paper_bytes=(0.6 + 0.4 * 0.3) * WHOLE + 8 * 5187 * 4,
    refused_with_privacy="evidence",
    for_a_million={"ask": 5},
)

# ---- phases --------------------------------------------------------------------------------------


def test_the_clock_by_hand() -> None:
    """Phases of 1, 2 and 4 rounds, f = 2: steps before rounds 1, 2 and 4 of phase 3."""
    clocks = [Clock(completed, (1, 2, 4), Churn(every=2)) for completed in range(8)]
    rows = [(c.phase, c.prune_round, c.step_is_due, c.next_step) for c in clocks]
    assert rows == [
        (Phase.WARM_UP, -2, False, 1),
        (Phase.STABILISE, -1, False, 1),
        (Phase.STABILISE, 0, False, 1),
        (Phase.PRUNE, 1, True, 2),
        (Phase.PRUNE, 2, True, 4),
        (Phase.PRUNE, 3, False, 4),
        (Phase.PRUNE, 4, True, None),
        (Phase.PERSONAL, 5, False, None),
    ]
    assert [clock.rounds_until_prune for clock in clocks[:3]] == [3, 2, 1]


def test_the_clock_of_a_run_that_never_prunes() -> None:
    clock = Clock(1, (1, 1, 0), Churn(every=1))
    assert clock.phase is Phase.STABILISE
    assert clock.next_step is None
    assert not Clock(2, (1, 1, 0), Churn(every=1)).step_is_due


@pytest.mark.parametrize(
    ("shares", "rounds", "wanted"),
    [
        ((0, 0, 1), 50, (0, 0, 50)),
        # The ends are 4.5 and 7.5, rounded down: 4 and 7.
        ((0.3, 0.2, 0.5), 15, (4, 3, 8)),
        # 0.7 + 0.2 + 0.1 and 0.29 * 100 are a little less than 1 and 29 as floats.
        ((0.7, 0.2, 0.1), 10, (7, 2, 1)),
        ((0.29, 0.0, 0.71), 100, (29, 0, 71)),
        ((1 / 3, 1 / 6, 1 / 2), 30, (10, 5, 15)),
        # However short: it prunes.
        ((0.3, 0.3, 0.4), 1, (0, 0, 1)),
        ((0.4, 0.5, 0.1), 3, (1, 1, 1)),
        # Rounds, also where they were read as numbers with a point.
        ((15, 15, 20), 50, (15, 15, 20)),
        ((15.0, 15.0, 20.0), 50, (15, 15, 20)),
        ((0, 1, 0), 1, (0, 1, 0)),
    ],
)
def test_phases_in_rounds_by_hand(shares: tuple, rounds: int, wanted: tuple) -> None:
    lengths = CAAFP(phases=shares).lengths(rounds)
    assert lengths == wanted
    assert all(type(length) is int for length in lengths)


@pytest.mark.parametrize("rounds", range(1, 41))
def test_the_default_sums_to_any_rounds_and_prunes(rounds: int) -> None:
    lengths = CAAFP().lengths(rounds)
    assert sum(lengths) == rounds
    assert min(lengths) >= 0
    assert lengths[2] > 0


def test_phases_run_in_order_with_the_right_verbs(tmp_path: Path) -> None:
    """f = 2: evidence from the last 2 of the 3 rounds of phase 2; steps before rounds 1, 2 and 4 of
    phase 3, so evidence in its rounds 1, 2 and 3 and none in 4 and 5."""
    run = tiny(tmp_path, phases=(2, 3, 5), every=2, start=0.7)
    rounds_and_verbs = [(before.round, verbs(tasks)) for before, tasks, _, _ in exchanges(run)]
    assert rounds_and_verbs == [
        (0, {"train"}),
        (1, {"train"}),
        (2, {"cluster"}),
        (2, {"train:near"}),
        (3, {"train:evidence"}),
        (4, {"train:evidence"}),
        (5, {"train:evidence"}),
        (6, {"train:evidence"}),
        (7, {"train:evidence"}),
        (8, {"train:near"}),
        (9, {"train:near"}),
    ]


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ({"phases": (0, 0, 2)}, ["cluster:evidence", "train:evidence", "train:near"]),
        ({"phases": (0, 0, 2), "churn": 0.0}, ["cluster:evidence", "train:near", "train:near"]),
        (
            {"phases": (0, 0, 2), "churn": 0.0, "start": 0.7},
            ["cluster:evidence", "train:evidence", "train:near"],
        ),
        ({"phases": (0, 0, 2), "every": 5}, ["cluster:evidence", "train:near", "train:near"]),
        ({"phases": (0, 0, 2), "density": 1.0}, ["cluster", "train:near", "train:near"]),
        # The first mask keeps everything, so nothing is asked for it.
        ({"phases": (0, 0, 2), "start": 1.0}, ["cluster", "train:evidence", "train:near"]),
        ({"phases": (0, 1, 1)}, ["cluster", "train:evidence", "train:near"]),
        ({"phases": (1, 1, 0)}, ["train", "cluster", "train:near"]),
        ({"phases": (2, 0, 0)}, ["train", "train"]),
        # Shares: all three rounds.
        (
            {"phases": (0, 0, 1), "length": 3},
            ["cluster:evidence", "train:evidence", "train:evidence", "train:near"],
        ),
    ],
)
def test_evidence_is_asked_for_only_when_a_step_uses_it(
    words: dict, wanted: list[str], tmp_path: Path
) -> None:
    seen = []
    for _, tasks, answers, _ in exchanges(tiny(tmp_path, **words)):
        (verb,) = verbs(tasks)
        seen.append(verb)
        for report in answers:
            assert ("evidence" in report.give) == verb.endswith("evidence")
    assert seen == wanted


def test_evidence_gathers_from_step_to_step(tmp_path: Path) -> None:
    """f = 3: steps before rounds 1, 3 and 6 of phase 3. Votes add up between steps."""
    run = tiny(tmp_path, phases=(0, 3, 6), every=3, clusters=1, cohort=4)
    votes = []
    for *_, after in exchanges(run):
        votes.append(float(after.evidence[0]["votes"]) if after.evidence else 0)
    assert votes == [0, 4, 8, 0, 4, 0, 4, 8, 0, 0]


def test_the_clustering_is_with_everyone_is_no_round_and_changes_no_weights(tmp_path: Path) -> None:
    for phases in ((1, 1, 1), (0, 1, 1)):
        run = tiny(tmp_path / str(phases), phases=phases)
        for before, tasks, answers, after in exchanges(run):
            if verbs(tasks) != {"cluster"}:
                assert after.round == before.round + 1
                continue
            assert [task.to for task in tasks] == sorted(run.infos)
            assert after.round == before.round
            assert set(after.groups) == set(run.infos)
            assert all(trees.equal(model, before.models[0]) for model in after.models.values())
            assert trees.equal(after.reference, before.models[0])
            assert not after.masks
            for report in answers:
                update = report.give["update"].values
                assert all(update[k].dtype == torch.float16 for k in run.params)
            # Without a warm-up both sides know the reference: nothing is sent.
            assert all(bool(task.send) == bool(phases[0]) for task in tasks)


@pytest.mark.parametrize("probe_epochs", [1, 3])
def test_updates_are_of_so_many_epochs_however_long_training_is(
    probe_epochs: int, tmp_path: Path
) -> None:
    """One epoch in the paper; three here."""
    assert CAAFP().probe_epochs == 3
    assert methods.ca_afp.PRESETS["paper"].probe_epochs == 1
    updates = {}
    groups = {}
    for epochs in (1, 3):
        run = tiny(
            tmp_path / str(epochs),
            phases=(0, 1, 0),
            local=replace(CALM, epochs=epochs),
            probe_epochs=probe_epochs,
        )
        _, _, answers, after = next(exchanges(run))
        updates[epochs] = [report.give["update"].values for report in answers]
        groups[epochs] = after.groups
    assert groups[1] == groups[3]
    short = updates[1]
    long = updates[3]
    assert all(trees.equal(a, b) for a, b in zip(short, long, strict=True))
    assert all(float(trees.flatten(update).abs().max()) > 0 for update in short)


def test_the_update_is_what_training_adds_and_the_probe_has_a_recipe_of_its_own(
    tmp_path: Path,
) -> None:
    """One step of gradient descent over all of a client's data adds -lr g, and without a pull the
    round after the clustering is the same step from the same model: its model less the start is the
    update. A probe of twice the rate has twice that update, and leaves the round as it was.
    """
    step = LocalTraining(1, 64, SGD(0.5))
    words = {"phases": (0, 1, 0), "clusters": 1, "pull": Proximal(0.0, "reference"), "local": step}
    words["probe_epochs"] = 1
    for factor, probe in ((1, None), (2, LocalTraining(1, 64, SGD(1.0)))):
        run = tiny(tmp_path / str(factor), **words, probe=probe)
        (_, _, answers, _), (_, _, after, _) = exchanges(run)
        updates = {report.of: report.give["update"].values for report in answers}
        for report in after:
            added = trees.sub(report.give["model"].values, run.params)
            for name, leaf in updates[report.of].items():
                # Updates travel in 16 bits.
                assert torch.allclose(leaf.double(), factor * added[name], rtol=2e-3, atol=1e-6)
            assert float(trees.flatten(added).abs().max()) > 1e-3


@pytest.mark.parametrize("phases", [(2, 2, 0), (0, 2, 0)])
def test_training_is_pulled_to_the_reference_and_not_to_the_groups_model(
    phases: tuple, tmp_path: Path
) -> None:
    """One step of gradient descent from w_c with mu = 1 / lr: w_c - lr (g + (w_c - w_ref) / lr) =
    w_ref - lr g, where lr g is what a step without the pull moves. The warm-up has no pull; the
    reference is where it ended."""
    lr = 0.05
    # The method's own pull: what it is to is not a setting.
    pull = replace(CAAFP().pull, mu=1 / lr)
    run = tiny(
        tmp_path,
        phases=phases,
        pull=pull,
        local=LocalTraining(1, 64, SGD(lr)),
        probe_epochs=1,
        clusters=1,
        cohort=5,
    )
    free = make_run(methods.FedAvg(local=run.method.local), tmp_path / "free", sizes=SIZES)
    for before, tasks, answers, after in exchanges(run):
        if verbs(tasks) == {"cluster"}:
            reference = after.reference
            assert trees.equal(reference, before.models[0] if phases[0] else run.params)
            # One epoch is one step here: the update is what it moves, in 16 bits.
            for report in answers:
                (alone,) = reports(free, Serial(), [Task(report.of, {"model": Packet(reference)})])
                update = trees.sub(alone.give["model"].values, reference)
                assert trees.distance(report.give["update"].values, update) < 2**-11 * float(
                    trees.flatten(update).abs().max()
                )
            continue
        for task, report in zip(tasks, answers, strict=True):
            (alone,) = reports(free, Serial(), [Task(task.to, task.send, round=task.round)])
            w = task.send["model"].values
            step = alone.give["model"].values
            if before.groups:
                step = {k: reference[k] + step[k] - w[k] for k in w}
            assert trees.distance(report.give["model"].values, step) < 1e-12
    assert not trees.equal(reference, before.models[0])


# ---- density -------------------------------------------------------------------------------------


@pytest.mark.parametrize("net", ["mlp", "har-cnn"])
@pytest.mark.parametrize(
    "words",
    [
        {"phases": (1, 1, 4), "start": 0.7, "density": 0.3},
        {"phases": (0, 0, 5), "start": 0.7, "density": 0.3, "every": 2},
        {"phases": (0, 1, 4), "density": 0.3},
        {"phases": (0, 1, 4), "start": 1.0, "density": 0.5, "churn": 0.3},
        {"phases": (1, 0, 4), "start": 0.6, "density": 0.3, "churn": 0.9},
    ],
    ids=str,
)
def test_density_is_exact_at_every_step_and_what_is_pruned_is_zero(
    words: dict, net: str, tmp_path: Path
) -> None:
    run = tiny(tmp_path, net=net, **words)
    method = run.method
    warm, stable, last = words["phases"]
    total = run.net.layout.prunable_size
    steps = method.schedule.steps(last)
    wanted = round(method.first * total)
    goal = round(method.density * total)
    seen = 0
    for before, tasks, answers, after in exchanges(run):
        t = after.round - warm - stable + 1
        if before.masks and after.round > before.round and t in steps:
            wanted -= round((wanted - goal) / method.schedule.left(t, last))
        if not after.masks:
            continue
        seen += 1
        assert set(after.masks) == set(after.models) == set(after.groups.values())
        assert set(counts(after).values()) == {wanted}
        for g, mask in after.masks.items():
            assert set(mask) == set(run.net.layout.prunable)
            assert all(bool((after.models[g][k][~m] == 0).all()) for k, m in mask.items())
        for task, report in zip(tasks, answers, strict=True):
            if "model" in report.give and before.masks:
                packet = report.give["model"]
                assert trees.equal(packet.mask, before.masks[before.groups[task.to]])
                assert all(bool((packet.values[k][~m] == 0).all()) for k, m in packet.mask.items())
    assert seen >= last
    assert wanted == goal


def alone(phases: tuple, model: dict, mask: torch.Tensor, evidence: dict | None = None) -> State:
    """Return the state before round 1 of phase 3, with one group of one client, number 7."""
    return State(
        round=0,
        phases=phases,
        clients=(7,),
        prunable=("w",),
        models={0: model},
        masks={0: {"w": mask}},
        groups={7: 0},
        reference=model,
        evidence=evidence or {},
    )


def test_the_mean_of_a_group_under_its_mask_by_hand() -> None:
    """Clients of 1 and 3 examples: (2 + 3 * 6) / 4 = 5, 0 where the mask is, and the bias, which is
    never pruned, (4 + 3 * 0) / 4 = 1. The other group has one client; the third nobody.
    """
    method = CAAFP(phases=(0, 0, 9), density=0.5, every=9, clusters=3)
    start = {"w": torch.tensor([1.0, 0.0]), "b": torch.tensor([1.0])}
    state = State(
        round=2,
        phases=(0, 0, 9),
        clients=(1, 2, 3),
        prunable=("w",),
        models={0: start, 1: start, 2: start},
        masks={group: {"w": torch.tensor([True, False])} for group in range(3)},
        groups={1: 0, 2: 0, 3: 1, 4: 2},
        reference=start,
    )
    reports = []
    # A value outside the mask never gets here; if it did, it would not count.
    for client, examples, w, b in ((1, 1, 2.0, 4.0), (2, 3, 6.0, 0.0), (3, 9, 7.0, 8.0)):
        trained = {"w": torch.tensor([w, 9.0]), "b": torch.tensor([b])}
        signs = {"scores.signs": torch.ones(1, dtype=torch.int8)}
        give = {"model": Packet(trained), "evidence": Packet(signs)}
        reports.append(Report(client, give, examples))
    after = method.fold(state, reports)
    assert {group: model["w"].tolist() for group, model in after.models.items()} == {
        0: [5.0, 0.0],
        1: [7.0, 0.0],
        2: [1.0, 0.0],
    }
    assert [float(model["b"]) for model in after.models.values()] == [1.0, 8.0, 1.0]


def test_pruned_weights_stay_zero_through_fine_tuning(tmp_path: Path) -> None:
    run = tiny(tmp_path, phases=(0, 1, 2), start=0.5)
    state = play(run, Serial())
    for report in admitted(run, Serial(), plan_scoring(run, state, "finetune")):
        mask = state.masks[state.groups[report.of]]
        own = run.memory.read(report.of, run.memory.files[report.of])["own"]
        assert all(bool((own[k][~m] == 0).all()) for k, m in mask.items())
        # It was tuned.
        assert not trees.equal(own, state.models[state.groups[report.of]])
        assert report.metrics["density"] == pytest.approx(0.3, abs=1 / run.net.layout.prunable_size)


def test_what_a_client_sends_outside_the_mask_is_refused_and_would_not_count(
    tmp_path: Path,
) -> None:
    def overstep(report: Report) -> Report:
        everywhere = {k: v + 1 for k, v in report.give["model"].values.items()}
        return replace(report, give={**report.give, "model": Packet(everywhere)})

    run = tiny(tmp_path, phases=(0, 0, 2), every=5)
    seen = 0
    for before, tasks, answers, _ in exchanges(run):
        if not before.masks:
            continue
        lies = [overstep(report) for report in answers]
        for task, lie in zip(tasks, lies, strict=True):
            refusal = run.gate.refuses(lie, task, run.expected(task), run.infos[task.to])
            assert refusal is not None
            assert refusal.reason == "mask"
        # A fold that gets them all the same takes what lies under the mask.
        after = run.method.fold(before, lies)
        for g, mask in after.masks.items():
            assert all(bool((after.models[g][k][~m] == 0).all()) for k, m in mask.items())
            seen += 1
    assert seen >= 2


def test_churn_changes_places_and_regrown_weights_start_at_zero(tmp_path: Path) -> None:
    """At the target already, 10 % of a group's weights change places in a step.

    What comes from outside the mask is zero in the model that is broadcast, and has moved when it
    comes back.
    """
    run = tiny(tmp_path, phases=(0, 0, 3), clusters=1, churn=0.1, density=0.5)
    states = [after for *_, after in exchanges(run)]
    total = run.net.layout.prunable_size
    for one, other in pairwise(states[:3]):
        a = trees.flatten(one.masks[0])
        b = trees.flatten(other.masks[0])
        (model,) = other.models.values()
        assert int((a & ~b).sum()) == int((b & ~a).sum()) == round(0.1 * round(0.5 * total))
        new = trees.flatten(trees.pick(model, run.net.layout.prunable))[b & ~a]
        assert bool((new == 0).all())
    moved = trees.flatten(trees.pick(states[2].models[0], run.net.layout.prunable))
    fresh = (
        trees.flatten(states[1].masks[0])
        & ~trees.flatten(states[0].masks[0])
        & trees.flatten(states[2].masks[0])
    )
    assert float((moved[fresh] != 0).double().mean()) > 0.5


def test_the_first_mask_by_hand(tmp_path: Path) -> None:
    """One group without a warm-up: the score is .5 |w|/max|w| + .25/(1 + Var D) + .25 |mean sign|,
    as the clustering exchange's reports show it, and the round(.3 d) best of all layers together
    stay."""
    run = tiny(tmp_path, phases=(0, 0, 1), clusters=1)
    _, _, answers, after = next(exchanges(run))
    names = run.net.layout.prunable
    w = trees.flatten(trees.pick(run.params, names)).double()
    updates = torch.stack(
        [trees.flatten(trees.pick(r.give["update"].values, names)).double() for r in answers]
    )
    signs = torch.stack([r.give["evidence"].values["scores.signs"].double() for r in answers])
    score = (
        0.5 * w.abs() / w.abs().max()
        + 0.25 / (1 + updates.var(0, unbiased=False))
        + 0.25 * signs.mean(0).abs()
    )
    kept = trees.flatten(after.masks[0])
    assert int(kept.sum()) == round(0.3 * len(w))
    assert float(score[kept].min()) >= float(score[~kept].max()) - 1e-6


def test_the_first_mask_from_far_updates_by_hand() -> None:
    """|w| / max |w| = 1, .5, .5, .5, all signs agree, and the two clients' updates are 1, 0, 0, 0
    and 1, 4, 2, 0: their variances are 0, 4, 1, 0 and Coh 1, .2, .5, 1. The scores are 1, .55, .625
    and .75: of four weights the first and the last stay. The biases' updates, which follow the
    weights', are no evidence.
    """
    method = CAAFP(phases=(0, 0, 2), density=0.5, clusters=1)
    model = {"w": torch.tensor([4.0, -2.0, 2.0, 2.0]), "b": torch.tensor([1.0, 1.0])}
    state = State(
        round=0,
        phases=(0, 0, 2),
        clients=(3, 7),
        prunable=("w",),
        models={0: model},
        reference=model,
    )
    updates = {
        3: {"w": torch.tensor([1.0, 0.0, 0.0, 0.0]), "b": torch.tensor([0.0, 0.0])},
        7: {"w": torch.tensor([1.0, 4.0, 2.0, 0.0]), "b": torch.tensor([6.0, 6.0])},
    }
    evidence = Packet({"scores.signs": torch.ones(4, dtype=torch.int8)})
    reports = []
    for client, update in updates.items():
        give = {"update": Packet(update), "evidence": evidence}
        reports.append(Report(client, give, examples=5))
    after = method.fold(state, reports)
    assert after.masks[0]["w"].tolist() == [True, False, False, True]
    assert after.models[0]["w"].tolist() == [4, 0, 0, 2]
    assert after.models[0]["b"].tolist() == [1, 1]


def test_a_group_of_one_churns_by_magnitude_and_gradient_by_hand() -> None:
    """f = 2, so the step before round 2 of phase 3 sees the round 1 report of the group's client.

    Four of eight weights are in use, which is the target; churn .25 of 4: one weight changes places.
    The client's model is its group's mean, |w| = 4, 3, .5, 1: with Coh = Con = 1 the score is
    .5 |w| / 4 + .25 + .25, least at place 2. The largest gradient outside the mask, -9, is at place
    5. One client's vote of another round differs at place 3 (the sum of signs is 0 there): if it
    counted, 3 would have .125 + .25 + 0 = .375 and fall before 2 with .0625 + .25 + .25 = .5625.
    """
    method = CAAFP(phases=(0, 0, 4), density=0.5, churn=0.25, every=2, clusters=1)
    mask = torch.tensor([1, 1, 1, 1, 0, 0, 0, 0]).bool()
    start = {"w": torch.tensor([4.0, 3.0, 2.0, 1.0, 0.0, 0.0, 0.0, 0.0])}
    gathered = Gather(start["w"], mask)
    signs = torch.tensor([1, 1, 1, 1], dtype=torch.int8)
    gathered.add(start["w"], {"scores.signs": signs})
    state = alone((0, 0, 4), start, mask, {0: gathered.since({})})
    evidence = {
        "scores.signs": torch.tensor([1, 1, 1, -1], dtype=torch.int8),
        "scores.grow": torch.tensor([0.0, -9.0, 0.0, 0.0], dtype=torch.bfloat16),
    }
    trained = {"w": torch.tensor([4.0, 3.0, 0.5, 1.0, 0.0, 0.0, 0.0, 0.0])}
    give = {"model": Packet(trained, {"w": mask}), "evidence": Packet(evidence)}
    after = method.fold(state, [Report(7, give, examples=5)])
    assert after.masks[0]["w"].tolist() == [True, True, False, True, False, True, False, False]
    assert after.models[0]["w"].tolist() == [4, 3, 0, 1, 0, 0, 0, 0]


def test_what_a_step_prunes_does_not_regrow_in_it() -> None:
    """As above, but no weight outside the mask has a gradient: of equal ones the first comes.

    That is place 4, since place 2, which falls in this step, is barred: else nothing would change.
    """
    method = CAAFP(phases=(0, 0, 4), density=0.5, churn=0.25, every=2, clusters=1)
    mask = torch.tensor([1, 1, 1, 1, 0, 0, 0, 0]).bool()
    model = {"w": torch.tensor([4.0, 3.0, 0.5, 1.0, 0.0, 0.0, 0.0, 0.0])}
    state = alone((0, 0, 4), model, mask)
    evidence = {
        "scores.signs": torch.ones(4, dtype=torch.int8),
        "scores.grow": torch.zeros(4, dtype=torch.bfloat16),
    }
    give = {"model": Packet(model, {"w": mask}), "evidence": Packet(evidence)}
    after = method.fold(state, [Report(7, give, examples=5)])
    assert after.masks[0]["w"].tolist() == [True, True, False, True, True, False, False, False]


def test_a_group_of_which_nobody_reported_only_prunes_its_deficit() -> None:
    """Density 1 -> .5 in the only step: the two smallest of four go, and nothing regrows."""
    method = CAAFP(phases=(0, 0, 2), start=1.0, density=0.5, churn=0.5, every=2, clusters=1)
    model = {"w": torch.tensor([1.0, -4.0, 2.0, -3.0])}
    state = alone((0, 0, 2), model, torch.ones(4).bool())
    after = method.fold(state, [])
    assert after.masks[0]["w"].tolist() == [False, True, False, True]


def test_a_group_of_which_nobody_reported_does_not_churn() -> None:
    """Three of four in use, two wanted: a deficit of 1. With a churn of .5 a group that reported
    would prune 2 and regrow 1, in the one free place; this one prunes the smallest and no more.
    """
    method = CAAFP(phases=(0, 0, 2), start=0.75, density=0.5, churn=0.5, every=2, clusters=1)
    assert method.schedule.sizes(2, 2, active=3, target=2, total=4) == (2, 1)
    model = {"w": torch.tensor([1.0, -4.0, 2.0, 0.0])}
    state = alone((0, 0, 2), model, torch.tensor([True, True, True, False]))
    after = method.fold(state, [])
    assert after.masks[0]["w"].tolist() == [False, True, True, False]


def test_groups_of_one_move_their_masks_when_their_client_reports(tmp_path: Path) -> None:
    """As many groups as clients, at the target: 20 % of a group's weights change places."""
    run = tiny(tmp_path, phases=(0, 1, 4), clusters=5, churn=0.2)
    active = round(0.3 * run.net.layout.prunable_size)
    for before, _, answers, after in exchanges(run):
        if not before.masks or after.round == sum(run.method.phases):
            continue
        reported = {before.groups[report.of] for report in answers}
        for group, mask in after.masks.items():
            a = trees.flatten(before.masks[group])
            b = trees.flatten(mask)
            moved = round(0.2 * active) if group in reported else 0
            assert int((a & ~b).sum()) == int((b & ~a).sum()) == moved


def test_groups_of_one_follow_the_schedule(tmp_path: Path) -> None:
    run = tiny(tmp_path, phases=(0, 1, 4), clusters=5, start=0.7, churn=0.2)
    after = play(run, Serial())
    assert set(counts(after).values()) == {round(0.3 * run.net.layout.prunable_size)}


def test_a_density_that_rises(tmp_path: Path) -> None:
    run = tiny(tmp_path, phases=(0, 0, 4), clusters=1, start=0.2, density=0.6)
    total = run.net.layout.prunable_size
    active = [counts(after)[0] for *_, after in exchanges(run)]
    # 20 % first; then R = 2, 1, 1: half of the 40 % that are missing, the rest, nothing.
    assert [round(n / total, 3) for n in active] == [0.2, 0.4, 0.6, 0.6, 0.6]
    assert active[-1] == round(0.6 * total)


# ---- late joiners --------------------------------------------------------------------------------


def without(late: int) -> Filter:
    """Its report on the clustering exchange gets lost."""

    def lose(answers: list[Report]) -> list[Report]:
        clustering = len(answers) == len(SIZES) and all("update" in r.give for r in answers)
        if not clustering:
            return answers
        return [r for r in answers if r.of != late]

    return lose


@pytest.mark.parametrize("phases", [(1, 1, 6), (0, 0, 7)])
def test_a_late_joiner_shows_its_update_when_it_is_drawn_and_joins_the_nearest(
    phases: tuple[int, int, int], tmp_path: Path
) -> None:
    run = tiny(tmp_path, phases=phases)
    drawn = [draw_cohort(run, t) for t in range(phases[0], sum(phases))]
    # Not in the first cohort, and drawn at least twice afterwards.
    late = next(
        k for k in run.infos if k not in drawn[0] and sum(k in cohort for cohort in drawn) > 1
    )
    verbs_of_late = []
    for before, tasks, answers, after in exchanges(run, without(late)):
        mine = next((task for task in tasks if task.to == late), None)
        if mine is None or not before.groups:
            assert late not in after.groups or late in before.groups
            continue
        if not verbs_of_late:
            assert set(mine.send) == ({"reference"} if phases[0] else set())
            assert {task.to for task in tasks if task.verb == "cluster"} == {late}
            assert after.round == before.round + 1
            (update,) = (r.give["update"].values for r in answers if r.of == late)
            vector = trees.flatten({k: v.float() for k, v in update.items()})
            assert after.groups == {**before.groups, late: nearest(vector, before.centres)}
        verbs_of_late.append(mine.verb.partition(":")[0])
    assert verbs_of_late[0] == "cluster"
    assert set(verbs_of_late[1:]) == {"train"}


def test_a_late_joiner_drawn_alone_takes_up_the_round(tmp_path: Path) -> None:
    run = tiny(tmp_path, phases=(0, 3, 0), cohort=1)
    ((late,), *_) = (draw_cohort(run, t) for t in range(3))
    states = [after for *_, after in exchanges(run, without(late))]
    assert [state.round for state in states] == [0, 1, 2, 3]
    assert late in states[1].groups
    assert all(trees.equal(states[1].models[g], model) for g, model in states[0].models.items())


def test_a_late_joiner_joins_its_twin(tmp_path: Path) -> None:
    """Client 4 holds client 0's data and misses the clustering: it joins 0, wherever that is."""
    run = tiny(tmp_path, phases=(0, 3, 0), cohort=5, sizes=(20, 13, 24, 17, 20), clusters=3)
    run.federation.clients[4] = run.federation.clients[0]
    states = [after for *_, after in exchanges(run, without(4))]
    assert 4 not in states[0].groups
    assert len(set(states[0].groups.values())) == 3
    assert states[1].groups[4] == states[1].groups[0]


# ---- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ({"density": 0.0}, r"density is 0\.0; it must be in \(0, 1\]"),
        ({"density": 1.2}, r"density is 1\.2; it must be in \(0, 1\]"),
        ({"start": 0.0}, r"start is 0\.0; it must be in \(0, 1\]"),
        ({"churn": 2.0}, r"churn is 2\.0; it must be in \[0, 1\]"),
        ({"every": 0}, r"every is 0; it must be 1 or more rounds"),
        ({"clusters": -1}, r"clusters is -1; it must be 0 \(chosen\) or more"),
        (
            {"weights": (0.5, 0.5, 0.5)},
            r"weights is \(0\.5, 0\.5, 0\.5\); it must be three numbers of 0 or more, sum 1",
        ),
        (
            {"phases": (1, -1, 3)},
            r"phases is \(1, -1, 3\); it must be three numbers of 0 or more: whole rounds, or shares that sum to 1",
        ),
        ({"phases": (1, 2)}, r"phases is \(1, 2\); it must be three numbers of 0 or more: .*"),
        ({"phases": (0.3, 0.3, 0.3)}, r"phases is .*; it must be .* shares that sum to 1"),
        ({"phases": (1.5, 2, 3)}, r"phases is .*; it must be .* shares that sum to 1"),
        ({"phases": None}, r"phases is None; it must be three numbers of 0 or more: .*"),
    ],
)
def test_impossible_values_get_a_sentence(words: dict, sentence: str) -> None:
    with pytest.raises(InputError, match=f"^{sentence}\\.$"):
        CAAFP(**words)


@pytest.mark.parametrize(
    "words", [{"phases": (0, 1, 1), "every": 1}, {"phases": (0, 0, 4), "every": 5}]
)
def test_a_density_that_no_step_can_reach_gets_a_sentence(words: dict, tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"start is 0\.7; it must be the density, 0\.3, where no step follows"
    ):
        CAAFP(start=0.7, **words).lengths(sum(words["phases"]))


def test_phases_that_do_not_sum_to_the_rounds_get_a_sentence(tmp_path: Path) -> None:
    run = tiny(tmp_path, phases=(1, 1, 1), length=4)
    with pytest.raises(
        InputError,
        match=r"^phases is \(1, 1, 1\); it must be three numbers that sum to the rounds, 4, "
        r"or shares of them that sum to 1\.$",
    ):
        next(rounds(run))
    with pytest.raises(InputError, match="sum to the rounds, 4"):
        run.method.paper_bytes(run.net, 5, 4, 4)
