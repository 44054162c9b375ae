"""Nets nobody wrote for us, times methods, times engines: right, or one sentence before any folder."""

from __future__ import annotations

import copy
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import admitted, federation, play, remembered, tensors
from tests.nets.strange import CLASSES, NETS, SHAPE
from torch import Tensor, nn

import fedgrove as fg
from fedgrove import methods, nets, trees
from fedgrove.cli import main
from fedgrove.core import AnyMethod, Engine
from fedgrove.engines import Pool, Serial
from fedgrove.engines.batched.engine import Batched
from fedgrove.errors import FedgroveError, InputError
from fedgrove.nets import Net
from fedgrove.parts.local import Adam, LocalTraining
from fedgrove.runs.checks import make_notes
from fedgrove.runs.memory import Memory
from fedgrove.runs.rounds import plan_scoring
from fedgrove.runs.run import Run, build

# A larger eps than usual: Adam would make 1e-16 into 1e-2 where a gradient is nothing but rounding,
# as that of a bias before a norm.
RECIPE = LocalTraining(2, 8, Adam(1e-2, eps=1e-3))
METHODS: dict[str, AnyMethod] = {
    "fedavg": methods.FedAvg(local=RECIPE),
    "fedbn": methods.FedBN(local=RECIPE),
    "lg-fedavg": methods.LGFedAvg(local=RECIPE),
    "ca-afp": methods.CAAFP(local=RECIPE, phases=(0, 0, 1)),
    "heterofl": methods.HeteroFL(local=RECIPE, widths=(0.5, 0.75)),
    "safl": methods.SAFL(local=RECIPE, densities=(0.5,), guided=1, tune=1, clusters=2),
    "fedsnip": methods.FedSNIP(local=RECIPE),
}
FEW_NETS = ["gru", "branch on data", "in-place input", "tied layers", "norms only", "group norm"]
FEW_NETS += ["counter", "running mean", "numpy"]
FEW_METHODS = ["fedavg", "ca-afp", "heterofl"]

REFUSED = {
    "channels": r"cannot be used with net \w+: it has no channels that can be removed\.",
    "norms": r"cannot be used with net \w+: it has no norm layers after its channels; score",
    "weights": r"cannot be used with net \w+: it has no weights that can be pruned",
    "layers": r"cannot be used with net \w+: the last 2 layers are shared, and it has 1 with",
    "complex": r"net 'Fourier' has 'filters' of type torch.complex64; parameters are real",
    "pair": r"net 'Pair' gave a tuple of 2 .* it must return only the logits",
}
"""The sentences by the word that the table has for them."""


def module(net: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return NETS[net]().double()


def made(net: str, method: str, folder: Path) -> Run:
    return build(
        METHODS[method],
        federation(SHAPE, (20, 13, 24, 17)),
        Memory(folder),
        net=module(net),
        rounds=2,
        cohort=3,
        finetune=(0, 1),
    )


def ended(run: Run, engine: Engine) -> tuple[dict[str, Tensor], list[dict[str, float]], Any]:
    """All that the run leaves, and every client's scores; no client may be lost."""
    state = play(run, engine)
    scores = [dict(r.metrics) for r in admitted(run, engine, plan_scoring(run, state, "finetune"))]
    return tensors(state) | remembered(run), scores, state


def word_of(sentence: str) -> str:
    (word,) = [word for word, pattern in REFUSED.items() if re.search(pattern, sentence)]
    assert sentence.endswith(".")
    return word


def word_for(net: str, method: str, engines: list[Engine], folder: Path) -> str:
    """ "right", with a star where a note says more; or the word for the sentence."""
    results = []
    for engine in engines:
        try:
            run = made(net, method, folder / engine.name)
        except FedgroveError as error:
            return word_of(str(error))
        tree, scores, state = ended(run, engine)
        results.append((engine, run, tree, scores, state))
    _, run, expected, expected_scores, state = results[0]
    said = make_notes(run, state, expected_scores[0]["density"])
    for engine, other, tree, scores, _ in results[1:]:
        assert trees.distance(tree, expected) < 1e-9, (net, method, engine.name)
        for mine, alone in zip(scores, expected_scores, strict=True):
            assert mine == pytest.approx(alone, abs=1e-9)
        if isinstance(engine, Batched):
            said += engine.notes(other)
    if method in ("ca-afp", "fedsnip", "heterofl", "safl"):
        # Never silently dense.
        assert min(score["density"] for score in expected_scores) < 1
    return "right*" if said else "right"


@pytest.mark.parametrize("method", FEW_METHODS)
@pytest.mark.parametrize("net", FEW_NETS)
def test_right_or_one_sentence(net: str, method: str, tmp_path: Path) -> None:
    word = word_for(net, method, [Serial(), Batched()], tmp_path)
    assert word == table()[net][method]


@pytest.mark.slow
def test_the_whole_matrix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """28 nets x 7 methods x 3 engines; the table of docs/nets.md."""
    rows = {}
    for net in NETS:
        rows[net] = {}
        for method in METHODS:
            folder = tmp_path / f"{net}-{method}"
            pool = Pool(workers=1)
            try:
                rows[net][method] = word_for(net, method, [Serial(), pool, Batched()], folder)
            finally:
                pool.close()
    with capsys.disabled():
        print()
        print(f"| net | {' | '.join(METHODS)} |")
        for net, words in rows.items():
            print(f"| {net} | {' | '.join(words.values())} |")
    assert rows == table()


def table() -> dict[str, dict[str, str]]:
    """What docs/nets.md promises."""
    text = (Path(__file__).parents[2] / "docs/nets.md").read_text()
    rows = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
        if cells[0] in NETS and len(cells) == len(METHODS) + 1:
            rows[cells[0]] = dict(zip(METHODS, cells[1:], strict=True))
    return rows


def test_the_page_has_every_net() -> None:
    assert list(table()) == list(NETS)
    assert len(NETS) >= 20


# ---- what is known of a net ----------------------------------------------------------------------


def test_weights_of_recurrent_and_attention_layers_are_prunable() -> None:
    layout = Net(module("gru"), SHAPE).layout
    gates = [f"gru.weight_{kind}_l{i}" for i in range(2) for kind in ("ih", "hh")]
    assert layout.prunable == (*gates, "head.weight")
    # 3 gates of 6: from 3 inputs, then from 6; each with 6 of their own; the head.
    assert layout.prunable_size == 3 * 6 * (3 + 6) + 3 * 6 * (6 + 6) + 6 * 3
    assert "encoder.self_attn.in_proj_weight" in Net(module("transformer"), SHAPE).layout.prunable
    assert Net(module("transformer"), SHAPE).layout.never_pruned == ("place",)


def test_frozen_parameters_stay_as_they_are(tmp_path: Path) -> None:
    net = Net(module("frozen features"), SHAPE)
    assert list(net.params()) == ["head.weight", "head.bias"]
    assert net.layout.frozen == ("features.weight", "features.bias")
    assert net.layout.size == 12 * 3 + 3
    before = net.module.features.weight.clone()
    run = made("frozen features", "fedavg", tmp_path)
    _, _, state = ended(run, Serial())
    assert torch.equal(run.net.module.features.weight, before)
    (note,) = make_notes(run, state, 1.0)
    assert "features.weight, features.bias of Frozen are frozen" in note


def test_an_input_that_is_written_to_is_a_copy() -> None:
    net = Net(module("in-place input"), SHAPE)
    assert net.layout.writes_input
    x = torch.ones(2, *SHAPE, dtype=torch.float64)
    once = net(net.params(), x, train=False).logits
    assert torch.equal(x, torch.ones_like(x))
    assert torch.equal(net(net.params(), x, train=False).logits, once)
    assert not Net(module("gru"), SHAPE).layout.writes_input


@pytest.mark.parametrize(
    ("net", "names"), [("counter", ("calls",)), ("running mean", ("mean",)), ("gru", ())]
)
def test_what_a_forward_pass_changes_is_put_back(net: str, names: tuple[str, ...]) -> None:
    made = Net(module(net), SHAPE)
    assert made.layout.state == names
    x = torch.ones(2, *SHAPE, dtype=torch.float64)
    # Of a copy too, whose attributes are its own.
    for each in (made, copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        before = [copy.deepcopy(getattr(each.module, name)) for name in names]
        once = each(each.params(), x, train=True).logits
        assert torch.equal(each(each.params(), x, train=True).logits, once)
        after = [getattr(each.module, name) for name in names]
        assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))


class Keeps(nn.Linear):
    """Keeps its input, a list and a count where torch and we do not look for them."""

    def __init__(self) -> None:
        super().__init__(36, CLASSES)
        self.seen: list[int] = []
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.seen.append(len(x))
        self.last = x
        return super().forward(x.flatten(1))


def test_attributes_of_any_kind_are_put_back() -> None:
    made = Net(Keeps().double(), SHAPE)
    assert set(made.layout.state) == {"count", "seen", "last"}
    count, seen, last = made.module.count, list(made.module.seen), made.module.last
    made(made.params(), torch.ones(5, *SHAPE, dtype=torch.float64), train=False)
    assert (made.module.count, made.module.seen) == (count, seen)
    assert made.module.last is last


class OtherInTraining(nn.Linear):
    """Gives something else while it is trained, as nets with helper heads do."""

    def __init__(self, way: str) -> None:
        super().__init__(36, CLASSES)
        self.way = way

    def forward(self, x: Tensor) -> Any:
        out = super().forward(x.flatten(1))
        if not self.training:
            return out
        if self.way == "tuple":
            return out, out
        return out.argmax(1, keepdim=True).expand(-1, CLASSES).to(x.dtype)


@pytest.mark.parametrize(
    ("net", "sentence"),
    [
        (OtherInTraining("tuple"), "net 'OtherInTraining, in train mode,' gave a tuple of 2"),
        (OtherInTraining("argmax"), "net 'OtherInTraining' cannot be trained: a batch of two"),
        (nn.Sequential(nn.Flatten(), nn.Linear(36, 3)).requires_grad_(False), "has no parameter"),
    ],
)
def test_what_cannot_be_trained_is_refused(net: nn.Module, sentence: str) -> None:
    with pytest.raises(InputError, match=re.escape(sentence)):
        nets.build(net, SHAPE, CLASSES, 0)


class Centred(nn.Module):
    """Takes the batch's mean away: padding would change it."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(36, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return self.head(x - x.mean(0))


def test_a_net_that_mixes_examples_is_not_padded(tmp_path: Path) -> None:
    trees_by_engine = []
    centred = Centred().double()
    engine: Any
    for engine in (Serial(), Batched()):
        run = build(
            METHODS["fedavg"],
            federation(SHAPE, (20, 13, 24, 17)),
            Memory(tmp_path / engine.name),
            net=centred,
            rounds=2,
            cohort=3,
        )
        tree, _, _ = ended(run, engine)
        trees_by_engine.append(tree)
    assert "Centred" in engine.notes(run)[0]
    assert trees.identical(*trees_by_engine)


class Noisy(nn.Module):
    """Draws noise in eval mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(36, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return self.head(x + torch.randn_like(x))


@pytest.mark.parametrize("method", [METHODS["fedavg"], methods.IFCA(local=RECIPE, clusters=2)])
def test_noise_in_eval_mode_is_the_same_on_every_engine(method: AnyMethod, tmp_path: Path) -> None:
    """A client chooses its group by losses that it measures, with noise in them."""
    noisy = Noisy().double()
    found = []
    pool = Pool(workers=2)
    for number, engine in enumerate([Serial(), Serial(), pool, Batched()]):
        # What the process drew before must not matter.
        torch.manual_seed(number)
        run = build(
            method,
            federation(SHAPE, (20, 13, 24, 17)),
            Memory(tmp_path / str(number)),
            net=noisy,
            rounds=2,
            cohort=3,
            finetune=(0, 1),
        )
        tree, scores, _ = ended(run, engine)
        found.append((tree, scores))
    pool.close()
    for tree, scores in found[1:]:
        assert trees.identical(tree, found[0][0])
        assert scores == found[0][1]


# ---- from the command line -----------------------------------------------------------------------

FILE = """
import torch
from torch import nn


class Branch(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.low = nn.Linear(64, 8)
        self.high = nn.Linear(64, 8)
        self.head = nn.Linear(8, classes)

    def forward(self, x):
        x = x.flatten(1)
        return self.head(torch.relu(self.high(x) if x.sum() > 0 else self.low(x)))
"""


def test_a_fall_back_is_noted_and_a_refusal_makes_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").write_text(FILE)
    words = {"net": "x.py:Branch", "clients": 3, "cohort": 2, "rounds": 1, "progress": False}
    serial = fg.run("fedavg", engine="serial", **words).summary
    batched = fg.run("fedavg", engine="batched", **words).summary
    assert batched["accuracy_clients"] == serial["accuracy_clients"]
    assert serial["notes"] == []
    (note,) = batched["notes"]
    assert note.startswith("clients with Branch were trained one after another, not at once")
    assert main(["run", "heterofl", "--net", "x.py:Branch", "--set", "widths=0.5"]) == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert "heterofl cannot be used with net Branch: it has no channels" in sentence
    kept = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert kept == ["fedavg-digits-s0", "fedavg-digits-s0-2"]


def test_fedbn_without_norms_says_so() -> None:
    words = {"clients": 3, "cohort": 2, "rounds": 1, "engine": "serial", "progress": False}
    (note,) = fg.run("fedbn", net="mlp", **words).summary["notes"]
    assert note == "the net has no norm layers, so that fedbn shares all of it: this is fedavg"
