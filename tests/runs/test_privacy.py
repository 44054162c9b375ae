"""What leaves a client under --privacy: clipped, noised, counted; or refused with a sentence."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import make_run, play, remembered, tensors
from tests.contract import advise, contract_of, small

import fedgrove
from fedgrove import methods, trees
from fedgrove.config.experiment import Experiment
from fedgrove.core import ExpectedPacket, ExpectedReport, Give, Outcome, Packet, Report, Task, Train
from fedgrove.engines import Pool, Serial, Wired
from fedgrove.engines.batched.engine import Batched
from fedgrove.engines.work import perform
from fedgrove.errors import InputError
from fedgrove.methods import CAAFP, FedAvg, FixedPrune, HeteroFL
from fedgrove.runs import privacy
from fedgrove.runs.privacy import Privacy
from fedgrove.runs.rounds import plan, rounds

REFUSED = {
    name: contract_of(name).refused_with_privacy
    for name in methods.names()
    if contract_of(name).refused_with_privacy
}
"""Methods whose clients send what cannot be protected, and a part of the sentence that says what."""


@pytest.fixture
def no_opacus(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it were not installed."""
    monkeypatch.setitem(sys.modules, "opacus.accountants", None)


def change_of(report: Report, task: Task) -> trees.Tree:
    """By how much a report's packets differ from what was sent; updates are changes already."""
    change: trees.Tree = {}
    for name, packet in report.give.items():
        for leaf, value in packet.values.items():
            sent = task.send[name].values[leaf] if name != "update" else torch.zeros_like(value)
            change[f"{name}/{leaf}"] = value.double() - sent.double()
    return change


def first_reports(run) -> list[tuple[Task, Report]]:
    tasks = plan(run, run.initial_state)
    return [(task, perform(run, task, {})[0]) for task in tasks]


# ---- which methods -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", methods.names())
def test_every_method_runs_or_is_refused_before_it_begins(name: str, tmp_path: Path) -> None:
    """Also where what cannot be protected comes in a later exchange, as CA-AFP's evidence does."""
    # Noise 0 needs no accountant, and is refused in the same way.
    run = make_run(small(name), tmp_path, privacy=Privacy(0.5, 0.0))
    if name in REFUSED:
        with pytest.raises(InputError) as caught:
            privacy.check_protected(run)
        sentence = str(caught.value)
        assert sentence.startswith(f"{name} cannot run with privacy: its clients ")
        assert REFUSED[name] in sentence
        return
    try:
        privacy.check_protected(run)
    except InputError as error:
        pytest.fail(advise(name, "refused_with_privacy", str(error).rstrip(".")))


def marked(name: str):
    """A few methods of each kind in every test run, all others in the slow ones."""
    quick = ("fedavg", "feddrop", "fedem", "lg-fedavg", "local", "stc")
    return pytest.param(name, marks=() if name in quick else pytest.mark.slow)


@pytest.mark.parametrize("name", [marked(name) for name in methods.names() if name not in REFUSED])
def test_all_that_a_method_sends_is_clipped(name: str, tmp_path: Path) -> None:
    """Every message of a whole run; the first ones without privacy are longer, or nothing is sent."""
    clip = 0.05
    method = replace(small(name), **contract_of(name).forms_groups_with)
    run = make_run(method, tmp_path / "private", rounds=3, privacy=Privacy(clip, 0.0))
    seen = 0

    class Watched(Serial):
        def map(self, jobs):
            nonlocal seen
            for job, answer in super().map(jobs):
                assert isinstance(answer, Report), answer
                change = change_of(answer, job[1])
                if change:
                    seen += 1
                    rounding = 1e-3 if any("update" in leaf for leaf in change) else 1e-9
                    assert float(trees.sq_norm(change)) ** 0.5 <= clip * (1 + rounding)
                assert not answer.metrics
                yield job, answer

    play(run, Watched())
    assert seen or name == "local"
    free = make_run(method, tmp_path / "free")
    longer = []
    for task, report in first_reports(free):
        change = change_of(report, task)
        longer.append(bool(change) and float(trees.sq_norm(change)) ** 0.5 > clip)
    assert all(longer) or name == "local"


@pytest.mark.parametrize(
    "method",
    [CAAFP(density=1.0, churn=0.0), FixedPrune(static=True)],
    ids=["ca-afp", "fixedprune"],
)
def test_settings_that_leave_out_what_cannot_be_protected(method, tmp_path: Path) -> None:
    run = make_run(method, tmp_path, rounds=6, privacy=Privacy(0.5, 0.01))
    privacy.check_tasks(run, plan(run, run.initial_state))
    assert not getattr(method, "sends_later", "")
    play(run, Serial())


@dataclass(frozen=True)
class Liar(FedAvg):
    """A method whose holds say one thing, and whose clients send another."""

    what: str = "metrics"

    def work(self, verb):
        return (Train(self.objective, self.local), Give(self._send))

    def _send(self, carry, client):
        model = carry["local"]
        if self.what == "metrics":
            return Outcome({"model": Packet(model)}, {"loss": 1.0})
        if self.what == "mask":
            mask = {name: value > 0 for name, value in model.items()}
            return Outcome({"model": Packet(trees.apply_mask(model, mask), mask)})
        return Outcome({"model": Packet(model), "more": Packet(model)})


@pytest.mark.parametrize("what", ["metrics", "mask", "packets"])
def test_what_was_not_announced_does_not_leave(what: str, tmp_path: Path) -> None:
    run = make_run(Liar(what=what), tmp_path, privacy=Privacy(1.0, 1.0))
    with pytest.raises(InputError, match="cannot run with privacy"):
        first_reports(run)


@dataclass(frozen=True)
class LaterScores(FedAvg):
    """A method of a user's own, whose second round asks for something else."""

    def plan(self, state, cohort):
        verb = "train" if state.round == 0 else "train:scores"
        return [replace(task, verb=verb) for task in super().plan(state, cohort)]

    def work(self, verb):
        def expected(task, net):
            return ExpectedReport(
                {
                    "model": ExpectedPacket.of(net.params()),
                    "scores": ExpectedPacket.of(net.params()),
                }
            )

        if verb == "train:scores":
            return (
                Train(self.objective, self.local),
                Give(lambda carry, client: Outcome(), expected),
            )
        return super().work(verb)


def test_a_later_exchange_is_refused_before_it_is_sent(tmp_path: Path) -> None:
    run = make_run(LaterScores(), tmp_path, privacy=Privacy(1.0, 0.0))
    privacy.check_protected(run)
    loop = rounds(run)
    exchange = next(loop)
    answers = Serial().map((run, task) for task in exchange.tasks)
    with pytest.raises(InputError, match="'scores', which is not a change of what they were sent"):
        loop.send((task, answer) for (_, task), answer in answers)


def test_running_statistics_are_refused_and_fedbn_keeps_them(tmp_path: Path) -> None:
    words = {"net": "bn-cnn2", "privacy": Privacy(1.0, 0.0)}
    with pytest.raises(InputError, match=r"cannot send running statistics .* use a net without"):
        privacy.check_protected(make_run(FedAvg(), tmp_path, **words))
    privacy.check_protected(make_run(small("fedbn"), tmp_path, **words))
    group = make_run(FedAvg(), tmp_path, options={"width": 4, "norm": "group"}, **words)
    privacy.check_protected(group)


# ---- clip and noise ------------------------------------------------------------------------------


def test_by_hand(tmp_path: Path) -> None:
    """A change of (3, 4), length 5, with a clip of 1 becomes (0.6, 0.8); a shorter one stays."""
    run = make_run(FedAvg(), tmp_path, privacy=Privacy(1.0, 0.0))
    sent = {"w": torch.tensor([1.0, 1.0], dtype=torch.float64)}
    task = Task(0, {"model": Packet(sent)})
    client = run.client(task, {})
    expected = ExpectedReport({"model": ExpectedPacket.of(sent)})

    def left(*values: float) -> list[float]:
        model = {"w": torch.tensor(values, dtype=torch.float64)}
        given = Outcome({"model": Packet(model)})
        return (
            privacy.protect(run, task, expected, given, client).give["model"].values["w"].tolist()
        )

    assert left(4.0, 5.0) == pytest.approx([1.6, 1.8])
    assert left(1.1, 1.2) == [1.1, 1.2]
    # A training that diverged has no direction: nothing of it leaves.
    assert left(math.nan, 1.0) == [1.0, 1.0]
    assert left(math.inf, 1.0) == [1.0, 1.0]


@settings(max_examples=60)
@given(
    values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=6),
    keeps=st.lists(st.booleans(), min_size=6, max_size=6),
    clip=st.floats(1e-3, 1e3),
    name=st.sampled_from(["model", "update"]),
)
def test_no_change_is_longer_than_the_clip(values, keeps, clip, name, tmp_path_factory) -> None:
    run = RUNS.setdefault("one", make_run(FedAvg(), tmp_path_factory.mktemp("privacy")))
    run = replace(run, privacy=Privacy(clip, 0.0))
    mask = {"w": torch.tensor(keeps[: len(values)])}
    wanted = trees.apply_mask({"w": torch.tensor(values, dtype=torch.float64)}, mask)
    sent = trees.apply_mask({"w": torch.ones(len(values), dtype=torch.float64)}, mask)
    task = Task(0, {"model": Packet(sent, mask)})
    expected = ExpectedReport({name: ExpectedPacket.of(sent, mask)})
    outcome = Outcome({name: Packet(wanted, mask)})
    packet = privacy.protect(run, task, expected, outcome, run.client(task, {})).give[name]
    start = sent["w"] if name == "model" else torch.zeros(len(values), dtype=torch.float64)
    # What the sum rounds: half a unit in the last place of numbers up to the clip and 1.
    rounding = 1e-12 * (1 + clip)
    assert float((packet.values["w"] - start).norm()) <= clip + rounding
    assert not packet.values["w"][~mask["w"]].any()


RUNS: dict[str, object] = {}


@pytest.mark.parametrize("secret", [False, True])
def test_noise_has_the_deviation_it_should(secret: bool, tmp_path: Path) -> None:
    """20,000 numbers: their deviation is within 2 % (four times its own deviation, 1/sqrt(2n)), their
    mean within four deviations of 0, and 4.6 % are beyond two deviations, as of a normal."""
    n, clip, noise = 20_000, 0.5, 3.0
    run = make_run(FedAvg(), tmp_path, privacy=Privacy(clip, noise, secret=secret))
    sent = {"w": torch.zeros(n, dtype=torch.float64)}
    kept = {"w": torch.arange(n) % 2 == 0}
    drawn = {}
    for k, mask in ((0, None), (1, None), (0, kept)):
        task = Task(k, {"model": Packet(sent, mask)})
        client = run.client(task, {})
        outcome = Outcome({"model": Packet(sent, mask)})
        expected = ExpectedReport({"model": ExpectedPacket.of(sent, mask)})
        left = privacy.protect(run, task, expected, outcome, client).give["model"].values["w"]
        if mask is not None:
            # Only what is kept has noise.
            assert torch.equal(left != 0, mask["w"])
            continue
        sigma = noise * clip
        assert float(left.std()) == pytest.approx(sigma, rel=0.02)
        assert abs(float(left.mean())) < 4 * sigma / n**0.5
        assert float((left.abs() > 2 * sigma).double().mean()) == pytest.approx(0.0455, abs=0.006)
        drawn[k] = left
        again = privacy.protect(run, task, expected, outcome, client).give["model"].values["w"]
        assert torch.equal(left, again) == (not secret)
    assert abs(float(torch.corrcoef(torch.stack([drawn[0], drawn[1]]))[0, 1])) < 0.03


@pytest.mark.parametrize("name", ["fedavg", "feddrop", "stc"])
def test_an_infinite_clip_without_noise_changes_no_bit(name: str, tmp_path: Path) -> None:
    plain = play(make_run(small(name), tmp_path / "plain"), Serial())
    for clip in (math.inf, 1e9):
        private = make_run(small(name), tmp_path / str(clip), privacy=Privacy(clip, 0.0))
        assert trees.identical(tensors(play(private, Serial())), tensors(plain))


@pytest.mark.parametrize(
    "method", [FedAvg(), HeteroFL(widths=(0.75, 0.5), masked=False), small("ditto")]
)
def test_engines_agree(method, tmp_path: Path) -> None:
    """Serial, pool and wired to the bit, batched to 1e-9: noise is the client's own."""

    def made(folder: str):
        return make_run(method, tmp_path / folder, privacy=Privacy(0.1, 0.5))

    reference = made("serial")
    state = tensors(play(reference, Serial()))
    for engine in (Pool(workers=2), Wired()):
        run = made(engine.name)
        try:
            assert trees.identical(tensors(play(run, engine)), state)
        finally:
            engine.close()
        assert trees.identical(remembered(run), remembered(reference))
    assert trees.distance(tensors(play(made("batched"), Batched())), state) < 1e-9
    free = tensors(play(make_run(method, tmp_path / "free"), Serial()))
    assert trees.distance(free, state) > 1e-3


def test_secret_memory_has_a_salt_and_other_noise_each_time(tmp_path: Path) -> None:
    """A version of a memory is named by its checksum: with a salt it says nothing of the memory."""
    run = make_run(small("ditto"), tmp_path, privacy=Privacy(1.0, 0.1, secret=True))
    task = plan(run, run.initial_state)[0]
    first, kept = perform(run, task, {})
    second, kept_again = perform(run, task, {})
    assert trees.identical(kept["personal"], kept_again["personal"])
    assert not torch.equal(kept["privacy.salt"]["salt"], kept_again["privacy.salt"]["salt"])
    assert not trees.equal(first.give["model"].values, second.give["model"].values)
    play(run, Serial())


def test_a_resumed_loop_draws_the_same_noise(tmp_path: Path) -> None:
    run = make_run(FedAvg(), tmp_path, privacy=Privacy(0.1, 0.5), rounds=4)
    whole = play(run, Serial())
    loop = rounds(run)
    exchange = next(loop)
    for _ in range(2):
        answers = Serial().map((run, task) for task in exchange.tasks)
        exchange = loop.send((task, answer) for (_, task), answer in answers)
    again = rounds(run, exchange.state, exchange.attempt, exchange.number)
    exchange = next(again)
    while exchange.tasks:
        answers = Serial().map((run, task) for task in exchange.tasks)
        exchange = again.send((task, answer) for (_, task), answer in answers)
    assert trees.identical(tensors(exchange.state), tensors(whole))


# ---- what it guarantees --------------------------------------------------------------------------


def test_messages_are_counted_by_client(tmp_path: Path) -> None:
    """Who was asked most often counts; noise 0 guarantees nothing, and nothing sent costs nothing."""
    run = make_run(FedAvg(), tmp_path, privacy=Privacy(1.0, 0.0))
    lines = [{"private_messages": [0, 1]}, {"private_messages": [1]}, {"private_messages": []}]
    figures = privacy.summarise(run, lines)
    assert figures["privacy"]["messages"] == 2
    assert figures["privacy"]["epsilon"] is None
    assert "nothing is guaranteed" in privacy.make_notes(figures)[0]
    assert privacy.compute_epsilon(1.0, 0, 1e-5) == 0.0
    assert privacy.summarise(replace(run, privacy=None), lines) == {}
    alone = make_run(small("local"), tmp_path, privacy=Privacy(1.0, 0.0))
    assert privacy.list_messages(alone, plan(alone, alone.initial_state)) == {
        "private_messages": []
    }
    tasks = plan(run, run.initial_state)
    assert privacy.list_messages(run, tasks) == {"private_messages": [task.to for task in tasks]}


def test_epsilon_is_that_of_opacus() -> None:
    """Ten messages with noise 4, delta 1e-5. By hand: RDP of order a is 10 a / (2·16), and opacus'
    epsilon is min over a of RDP + log((a-1)/a) - (log delta + log a) / (a-1); at a = 7 that is
    2.1875 + log(6/7) - (log 1e-5 + log 7) / 6 = 2.1875 - 0.1542 + 1.9188 - 0.3243 = 3.6278, and
    its other orders come to no more than 0.05 less."""
    accountants = pytest.importorskip("opacus.accountants")
    accountant = accountants.RDPAccountant()
    for _ in range(10):
        accountant.step(noise_multiplier=4.0, sample_rate=1.0)
    found = privacy.compute_epsilon(4.0, 10, 1e-5)
    assert found == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-12)
    assert 3.5778 <= found <= 3.6278 + 1e-4


def test_without_opacus_a_run_does_not_begin(no_opacus: None, tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = {"clients": 3, "cohort": 2, "rounds": 1, "engine": "serial", "progress": False}
    with pytest.raises(InputError, match=r"needs opacus.*pip install 'fedgrove\[dp\]'"):
        fedgrove.run("fedavg", privacy="clip=1,noise=1", out=out, **words)
    assert not out.exists()


def test_a_run_tells_epsilon_and_is_resumed_exactly(tmp_path: Path) -> None:
    pytest.importorskip("opacus")
    words = {"clients": 4, "cohort": 2, "epochs": 1, "engine": "serial", "progress": False}

    class Stop(Exception):
        pass

    def stop(line) -> None:
        if line["round"] == 2:
            raise Stop

    text = "clip=0.5,noise=2"
    whole = fedgrove.run("fedavg", privacy=text, rounds=4, out=tmp_path / "whole", **words)
    with pytest.raises(Stop):
        fedgrove.run("fedavg", privacy=text, rounds=4, out=tmp_path / "cut", watch=stop, **words)
    resumed = fedgrove.resume(tmp_path / "cut", engine="serial", progress=False)
    told = whole.summary["privacy"]
    assert told["messages"] <= 4
    assert told["epsilon"] == pytest.approx(privacy.compute_epsilon(2.0, told["messages"], 1e-5))
    assert told["epsilon_replaced"] == pytest.approx(
        privacy.compute_epsilon(1.0, told["messages"], 1e-5)
    )
    assert told["epsilon_replaced"] > told["epsilon"]
    assert resumed.summary["privacy"] == told
    assert resumed.summary["accuracy_clients"] == whole.summary["accuracy_clients"]
    assert any("epsilon" in note for note in whole.summary["notes"])
    saved = json.loads((tmp_path / "whole" / "summary.json").read_text())
    assert saved["privacy"] == told
    assert 'privacy = "clip=0.5,noise=2"' in (tmp_path / "whole" / "config.toml").read_text()


# ---- words ---------------------------------------------------------------------------------------


def test_words() -> None:
    assert Privacy.parse("clip=2, noise=0.5,delta=1e-6,secret=1") == Privacy(2, 0.5, 1e-6, True)
    assert Privacy.parse("clip=inf,noise=0").does_nothing


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("clip=1", "it must have noise"),
        ("noise=1", "it must have clip"),
        ("clip=1,noise=x", "it must be names with their numbers"),
        ("clip=1,clip=2,noise=1", "names clip twice"),
        ("clip=1,niose=1", "noise"),
        ("clip=0,noise=1", "privacy clip is 0"),
        ("clip=nan,noise=1", "privacy clip is nan"),
        ("clip=inf,noise=1", "at most 1e\\+30, since noise is measured in clips"),
        ("clip=1e31,noise=1", "at most 1e\\+30, since noise is measured in clips"),
        ("clip=1,noise=1e7", "privacy noise is 10000000.0; it must be 0, or from 1e-06 to 1e"),
        ("clip=1,noise=1e-300", "it must be 0, or from 1e-06 to 1e"),
        ("clip=1,noise=-1", "privacy noise is -1"),
        ("clip=1,noise=1,delta=1", "privacy delta is 1"),
        ("clip=1,noise=1,secret=2", "privacy secret is 2"),
    ],
)
def test_wrong_words_are_refused(text: str, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        Experiment(FedAvg(), privacy=text)
