"""Rounds of methods compared with FedAvg's, and what they go into."""

from __future__ import annotations

import io
import json
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedgrove.cli import main
from fedgrove.engines.batched.counting import attach_costs
from fedgrove.engines.batched.engine import Batched
from fedgrove.engines.work import perform
from fedgrove.errors import InputError
from fedgrove.runs.folder import RunFolder
from fedgrove.runs.memory import Memory
from fedgrove.runs.rounds import Admission
from fedgrove.trees import flatten
from fedgrove.wire.message_costs import count_report
from fedgrove_lab.bench import round_profile
from fedgrove_lab.bench.methods import (
    MethodsOptions,
    TimedExchange,
    checks,
    measure,
    summarise,
)
from fedgrove_lab.bench.report import print_methods, write_methods_page
from fedgrove_lab.bench.round_profile import PARTS, Profile, part_of

SLOW = """
import time
from dataclasses import dataclass

from fedgrove.core import Edit
from fedgrove.methods import FedAvg


def doze(carry, client):
    time.sleep(0.05)
    return carry


@dataclass(frozen=True)
class Slow(FedAvg):
    def work(self, verb):
        stages = super().work(verb)
        if not stages:
            return stages
        return (*stages[:-1], Edit(doze), stages[-1])

    def fold(self, state, reports):
        time.sleep(0.15)
        return super().fold(state, reports)
"""


def exchanged(kind: str, seconds: float, macs: int = 10, masks: bool = False) -> TimedExchange:
    return TimedExchange(kind, not kind.startswith("cluster"), seconds, macs, masks)


@pytest.fixture
def rows() -> list[dict[str, Any]]:
    look = Profile()
    look.seconds.update({"engine": 0.5, "edits": 0.25})
    look.places.update({"wire/count.py:count_up": 0.25})
    return summarise(
        {
            "fedavg": [exchanged("train", s) for s in (9.0, 1.0, 2.0, 3.0)],
            "ours": [
                exchanged("train", 8.0),
                exchanged("train", 5.0, masks=True),
                exchanged("cluster", 50.0),
                exchanged("train:more", 12.0, macs=40),
            ],
        },
        {"fedavg": [], "ours": [("train", Profile()), ("train", look), ("train", look)]},
        {"fedavg": {"train": 0.5}, "ours": {}},
    )


def test_rows_by_hand(rows: list[dict[str, Any]]) -> None:
    # Without the first, FedAvg's rounds take 1, 2 and 3: a median of 2.
    base, train, cluster, more = rows
    assert (base["median_s"], base["exchanges"], base["device_s"]) == (2.0, 3, 0.5)
    assert (train["times"], train["new_masks"], train["exchanges"]) == (2.5, 1, 1)
    # The only one of its kind is kept.
    assert (cluster["times"], cluster["counts"]) == (25.0, False)
    # Six times as long, for four times as much work.
    assert (more["times"], more["work"], more["times_for_work"]) == (6.0, 4.0, 1.5)
    assert train["parts"] == {**dict.fromkeys(PARTS, 0.0), "engine": 0.5, "edits": 0.25}
    assert train["places"] == {"wire/count.py:count_up": 0.25}
    assert more["parts"] == {}


def test_claims_by_hand(rows: list[dict[str, Any]]) -> None:
    clock, work = checks(rows).values()
    assert clock == {
        "value": 6.0, "bound": 2.0, "ok": False, "at": "ours (train:more) 6.00, ours (train) 2.50"
    }  # fmt: skip
    assert (work["value"], work["at"], work["ok"]) == (2.5, "ours (train) 2.50", False)
    rows[1]["times_for_work"] = 1.75
    work = checks(rows)["each within twice, for equal work"]
    assert (work["value"], work["at"], work["ok"]) == (1.75, "ours (train) 1.75", True)
    # FedAvg alone claims nothing.
    assert checks(rows[:1]) == {}


@pytest.mark.parametrize("width", [80, 160])
def test_table_and_page(
    rows: list[dict[str, Any]], width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    text = io.StringIO()
    content = {"rows": rows, "checks": checks(rows)}
    print_methods(content, text)
    said = " ".join(text.getvalue().split())
    assert "ours train" in said
    assert "(cluster)" in said
    assert "DOES NOT HOLD: each within twice fedavg's round 6.0 (bound 2.0; worst at ours" in said
    assert max(len(line) for line in text.getvalue().splitlines()) <= width
    write_methods_page(content, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    for word in ("an exchange, by part", "ours: train", "DOES NOT HOLD", "edits"):
        assert word in page


def test_parts_of_functions() -> None:
    parts = {
        Batched.map: "engine",
        perform: "engine",
        count_report: "counting",
        attach_costs: "counting",
        Memory.write: "memory",
        RunFolder.save: "checkpoint",
        Admission.admit: "server",
        # These are whatever they are called for.
        flatten: None,
        json.dumps: None,
    }
    for function, part in parts.items():
        assert part_of(function.__code__) == part


def test_a_look_counts_the_seconds_of_its_own_thread() -> None:
    other = threading.Thread(target=time.sleep, args=(0.3,))
    with Profile() as look:
        other.start()
        time.sleep(0.1)
    other.join()
    # Nothing of fedgrove's is at work.
    assert set(look.seconds) == {"other"}
    assert look.seconds["other"] > 0.08


@pytest.mark.parametrize("engine", ["serial", "batched"])
def test_real_rounds(engine: str, tmp_path: Path) -> None:
    """An Edit that takes 50 ms a client, and a fold that takes 150, are found."""
    (tmp_path / "slow.py").write_text(SLOW)
    own = f"{tmp_path}/slow.py:Slow"
    said: list[str] = []
    asked = MethodsOptions("digits", [own], engine, "cpu", rounds=3, cohort=2)
    base, slow = measure(asked, said.append)
    assert [base["method"], slow["method"]] == ["fedavg", own]
    assert (base["exchanges"], slow["exchanges"]) == (2, 2)
    # The same work: an Edit runs no network.
    assert slow["work"] == 1
    assert slow["median_s"] > 0.25
    assert slow["parts"]["edits"] > 0.09
    assert slow["parts"]["server"] > 0.14
    assert base["parts"]["edits"] < 0.05
    assert base["parts"]["engine"] > 0
    assert base["parts"]["checkpoint"] > 0
    assert said[-1] == "round 3 of 3: done"


def test_a_look_ends_whatever_happens_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while it looks, another look inside, another handler: none keeps it from ending."""
    before = signal.getsignal(signal.SIGPROF)

    def interrupted(frame: object) -> tuple[str, str]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(round_profile, "find_part", interrupted)
        with pytest.raises(KeyboardInterrupt), Profile():
            time.sleep(5)
    with Profile() as outer, Profile() as inner:
        time.sleep(0.05)
    assert sum(inner.seconds.values()) > 0.02
    with Profile():
        signal.signal(signal.SIGPROF, signal.SIG_IGN)
        time.sleep(0.02)
    assert signal.getsignal(signal.SIGPROF) == before
    assert set(outer.seconds) <= {"other"}


def test_masks_that_are_new_are_counted() -> None:
    asked = MethodsOptions(
        "digits", ["efficientfl"], "serial", "cpu", rounds=4, cohort=2, split=False
    )
    *_, row = measure(asked)
    # Its one mask is new in the second round, and stays.
    assert (row["method"], row["exchanges"], row["new_masks"]) == ("efficientfl", 3, 1)
    assert row["parts"] == {}
    asked = MethodsOptions(
        "digits", ["fedlayerprune"], "serial", "cpu", rounds=3, cohort=2, split=False
    )
    row = measure(asked)[1]
    assert row["new_masks"] == row["exchanges"] > 0


def test_what_cannot_be_measured_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words, sentence in {
        ("--scene", "uci-hra"): "there is no scene 'uci-hra'; did you mean 'uci-har'",
        ("--methods", "grov"): "there is no method 'grov'; did you mean 'grove'",
        ("--rounds", "2"): "rounds is 2; it must be 3 or more",
        ("--engine", "bached"): "there is no engine 'bached'; did you mean 'batched'",
        (
            "--engine",
            "pool",
            "--device",
            "cuda",
        ): "--device is cuda, and torch finds no CUDA device",
    }.items():
        if "cuda" in words and torch.cuda.is_available():
            continue
        assert main(["bench", "methods", *words]) == 2
        assert sentence in " ".join(capsys.readouterr().err.split())


def test_a_method_that_cannot_be_run_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text(SLOW.replace("if not stages:", "if stages[-1] is None:"))
    said: list[str] = []
    asked = MethodsOptions(
        "digits", [f"{path}:Slow"], "serial", "cpu", rounds=3, cohort=2, split=False
    )
    (row,) = measure(asked, said.append)
    assert row["method"] == "fedavg"
    assert said[0].startswith(f"left out: {path}:Slow: slow: work('use') ended with IndexError")
    # Without FedAvg there is nothing to compare with.
    with pytest.raises(InputError, match="cohort is 1000"):
        measure(replace(asked, cohort=1000))


@pytest.mark.slow
def test_all_methods(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "methods", "--scene", "digits", "--rounds", "13", "--cohort", "3"]
    assert main([*words, "--device", "cpu", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    rows = said["rows"]
    named = {row["method"] for row in rows}
    assert named == {"fedavg", "ca-afp", "fedlayerprune", "adfedwcp", "safl", "fedapta", "grove"}
    # Those that send masks were measured while masks changed.
    changing = {row["method"] for row in rows if row["counts"] and row["new_masks"]}
    assert changing >= {"ca-afp", "fedlayerprune", "fedapta"}
    assert set(said["checks"]) == {
        "each within twice fedavg's round",
        "each within twice, for equal work",
    }
