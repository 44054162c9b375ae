"""Clients that fail and reports that lie: every fault, on methods and engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import make_run, remembered, tensors
from tests.contract import small

from fedgrove import methods, trees
from fedgrove.core import Engine
from fedgrove.engines import Pool, Serial, Wired
from fedgrove.engines.batched.engine import Batched
from fedgrove.engines.faulty import Faulty
from fedgrove.errors import InputError
from fedgrove.methods.ca_afp import CAAFP
from fedgrove.parts.local import Adam, LocalTraining
from fedgrove.runs.faults import FAULT_KINDS, Faults
from fedgrove.runs.folder import CHECKPOINT, RunFolder
from fedgrove.runs.lockstep import Member, train_alone, train_together
from fedgrove.runs.run import Run

SHARE = 0.3
WORD_OF = {
    "crash": "crashed",
    "late": "late",
    "silent": "unanswered",
    "nan": "not finite",
    "inf": "not finite",
    "huge": "too long",
    "scale": "too long",
    "duplicate": "duplicate",
    "impostor": "client",
    "examples": "examples",
    "memory": "memory",
    "metrics": "metrics",
    "rename": "packets",
    "tensor": "tensors",
    "shape": "tensors",
    "dtype": "tensors",
    "none": "malformed",
    "mask": "mask",
    "garbage": "malformed",
}
"""The word under which each fault is counted; a turned sign cannot be seen."""
ABOUT_TENSORS = ("crash", "nan", "memory", "rename", "tensor", "shape", "mask", "scale")
"""What SAFL's reports, of fewer channels, may be told by."""
LOST_REASONS = ("crash", "late", "silent")
FOUR_ROUNDS: dict[str, Any] = {"rounds": 4, "cohort": 6, "sizes": (20, 13, 24, 17, 15, 22)}
NAMED = {
    "fedavg": methods.FedAvg(),
    "ca-afp": CAAFP(phases=(1, 1, 2), clusters=2),
    "safl": replace(small("safl"), densities=(0.8, 0.5)),
}


def member(method: Any, folder: Path, faults: str = "", **words: Any) -> Member:
    """A run of four rounds, ready for a lockstep."""
    run_words = FOUR_ROUNDS | words
    if faults:
        run_words["faults"] = Faults.parse(faults)
    made = make_run(method, folder / "run" / CHECKPOINT, **run_words)
    return Member(made, RunFolder.create(folder / "run", ""), every=0)


def played(method: Any, folder: Path, faults: str = "", engine: Engine | None = None) -> Member:
    """The same, run to its end."""
    made = member(method, folder, faults)
    train_alone(made, Faulty(engine or Serial()))
    return made


def trained(made: Member) -> trees.Tree:
    """All that the run has learnt: the server's state, and what clients remember."""
    return {**tensors(made.exchange.state), **remembered(made.run)}


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], trees.Tree]:
    """What a method learns with these faults; each is trained once for all kinds compared with it."""

    @cache
    def learnt(name: str, faults: str) -> trees.Tree:
        return trained(played(NAMED[name], tmp_path_factory.mktemp("reference"), faults))

    return learnt


def spoilt_runs() -> Iterator[Any]:
    """Every method with every fault; of those that fail alike whatever is sent, one method is enough."""
    for name in NAMED:
        for kind in FAULT_KINDS:
            marks = () if name != "safl" or kind in ABOUT_TENSORS else pytest.mark.slow
            yield pytest.param(name, kind, id=f"{name}-{kind}", marks=marks)


@pytest.mark.parametrize(("name", "kind"), list(spoilt_runs()))
def test_a_fault_costs_its_report_and_nothing_else(
    name: str, kind: str, tmp_path: Path, references: Callable[[str, str], trees.Tree]
) -> None:
    """The result is bit-equal to the run in which the same clients crashed."""
    method = NAMED[name]
    spoilt = played(method, tmp_path / kind, f"{kind}={SHARE}")
    summary = spoilt.summary
    assert summary is not None
    if kind == "flip":
        assert summary["lost"] == summary["refused"] == {}
        return
    counted = summary["lost" if kind in LOST_REASONS else "refused"]
    own_mask = name == "safl" and kind == "mask"
    if own_mask:
        # A client of SAFL chooses its mask: that it has every channel is no lie to be seen.
        return
    assert list(counted) == [WORD_OF[kind]]
    assert counted[WORD_OF[kind]] >= 3
    reference = "" if kind == "duplicate" else f"crash={SHARE}"
    assert trees.identical(trained(spoilt), references(name, reference))


@pytest.mark.parametrize("kind", ["crash", "silent", "duplicate", "garbage", "nan"])
def test_in_lockstep_each_run_has_its_own_losses(kind: str, tmp_path: Path) -> None:
    """A report that one run lacks is not made up for by another run's."""
    faults = f"{kind}={SHARE}"
    runs = {"faulty": (faults, 0), "clean": ("", 1), "second": (faults, 2)}
    alone = {}
    for name, (text, seed) in runs.items():
        made = member(methods.FedAvg(), tmp_path / "alone" / name, text, seed=seed)
        train_alone(made, Faulty(Serial()))
        alone[name] = made
    members = [
        member(methods.FedAvg(), tmp_path / "together" / name, text, seed=seed)
        for name, (text, seed) in runs.items()
    ]
    assert len(list(train_together(members, Faulty(Serial())))) == 3
    for name, made in zip(runs, members, strict=True):
        assert made.error is None
        assert trees.identical(trained(made), trained(alone[name]))
        assert made.summary is not None
        assert alone[name].summary is not None
        for key in ("lost", "refused", "bytes_up", "bytes_down"):
            assert made.summary[key] == alone[name].summary[key]
    assert members[1].summary is not None
    assert members[1].summary["lost"] == members[1].summary["refused"] == {}


def test_what_was_sent_to_lost_clients_is_counted(tmp_path: Path) -> None:
    clean = played(methods.FedAvg(), tmp_path / "clean").summary
    assert clean is not None
    for kind, pays_for_reply in (("crash", False), ("silent", False), ("late", True)):
        lost = played(methods.FedAvg(), tmp_path / kind, f"{kind}={SHARE}").summary
        assert lost is not None
        assert lost["bytes_down"] == clean["bytes_down"]
        assert (lost["bytes_up"] == clean["bytes_up"]) is pays_for_reply


@pytest.mark.parametrize("name", ["fedsnip", "ca-afp", "feddrop"])
def test_a_task_is_paid_for_once_where_masks_travel_too(name: str, tmp_path: Path) -> None:
    """What a client holds decides what a task costs: counted once, and noted once."""
    bytes_down = {}
    for kind in ("crash", "silent", "duplicate", "none"):
        faults = "" if kind == "none" else f"{kind}={SHARE}"
        made = played(small(name), tmp_path / kind, faults)
        bytes_down[kind] = [line["bytes_down"] for line in made.folder.metrics()]
    assert bytes_down["silent"] == bytes_down["crash"]
    assert bytes_down["duplicate"] == bytes_down["none"]


def test_faults_follow_from_the_seed(tmp_path: Path) -> None:
    def lines(folder: Path, seed: int) -> list[Any]:
        made = member(methods.FedAvg(), folder, "crash=0.5", seed=seed)
        train_alone(made, Faulty(Serial()))
        return [line.get("lost") for line in made.folder.metrics()]

    assert lines(tmp_path / "a", 0) == lines(tmp_path / "b", 0)
    assert lines(tmp_path / "c", 1) != lines(tmp_path / "d", 0)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("crash", "it must be kinds with their probabilities"),
        ("crash=0.6,late=0.5", "add up to at most 1"),
        ("crash=1.5", "a probability between 0 and 1"),
        ("crush=0.5", "crash"),
        ("crash=0.1,crash=0.2", "names crash twice"),
        ("crash=nan", "a probability between 0 and 1"),
    ],
)
def test_faults_that_make_no_sense(text: str, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        Faults.parse(text)


# ---- everything with everything ------------------------------------------------------------------

ENGINES: dict[str, Callable[[], Engine]] = {
    "serial": Serial,
    "pool": lambda: Pool(workers=2),
    "batched": Batched,
    "wired": Wired,
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAULT_KINDS)
@pytest.mark.parametrize("name", methods.names())
def test_every_method_with_every_fault_on_every_engine(
    name: str, kind: str, tmp_path: Path
) -> None:
    """All engines end alike: the same losses, the same model to rounding."""
    # See tests/contracts/test_batched.py: with the usual eps Adam magnifies rounding.
    calm = replace(small(name), local=LocalTraining(2, 8, Adam(1e-2, eps=1e-3)))
    ends: dict[str, Member] = {}
    for engine_name, make in ENGINES.items():
        engine = make()
        ends[engine_name] = played(calm, tmp_path / engine_name, f"{kind}={SHARE}", engine)
        engine.close()
    serial = ends.pop("serial")
    assert serial.summary is not None
    for made in ends.values():
        assert made.summary is not None
        assert made.summary["lost"] == serial.summary["lost"]
        assert made.summary["refused"] == serial.summary["refused"]
        expected = trained(serial)
        found = trained(made)
        assert found.keys() == expected.keys()
        for leaf, value in found.items():
            torch.testing.assert_close(value, expected[leaf], rtol=1e-8, atol=1e-9)


def test_an_exchange_below_the_quorum_is_tried_again_and_then_the_run_ends(
    tmp_path: Path,
) -> None:
    made = member(methods.FedAvg(), tmp_path, "crash=1", quorum=0.5)
    ended = list(train_together([made], Faulty(Serial())))
    assert ended == [made]
    assert "abandoned 3 times" in str(made.error)
    assert "the quorum is 3" in str(made.error)
    # The attempts were paid for, and are on record.
    lines = made.folder.metrics()
    assert len(lines) == 3
    assert all(line["abandoned"] and line["bytes_down"] > 0 for line in lines)
    # Resumed, it tries other clients and other draws.
    other = Member(_again(made, tmp_path), made.folder, every=0)
    list(train_together([other], Serial()))
    assert other.error is None
    assert other.exchange.state.round == 4


def _again(made: Member, tmp_path: Path) -> Run:
    """The same run, built anew as a resume does."""
    return make_run(methods.FedAvg(), tmp_path / "run" / CHECKPOINT, **FOUR_ROUNDS, quorum=0.5)
