"""The lines a person sees, from the lines a run writes."""

import io
import multiprocessing
import subprocess
import sys
import time
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from fedgrove.report import progress
from fedgrove.report.progress import (
    MOST_ROWS,
    RunStatus,
    describe_end,
    describe_sweep,
    show_progress,
    status_line,
    status_page,
    status_table,
)

LINE = {"round": 1, "bytes_up": 1 << 19, "bytes_down": 1 << 19, "accuracy_mean": 0.5}


def test_plain_lines_come_now_and_then_and_at_the_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    with show_progress(4) as watch:
        for n in (1, 2, 3, 4):
            clock[0] += 2  # rounds 1 (the first), 4 (the last); 2 and 3 come too soon after 1
            watch({**LINE, "round": n})
    first, last = capsys.readouterr().err.splitlines()
    assert first == "round 1/4  accuracy 50.0 %  1.0 MiB  2 s  6 s left"
    assert last == "round 4/4  accuracy 50.0 %  4.0 MiB  8 s  0 s left; fine-tuning and scoring"


def test_a_resumed_run_counts_what_was_sent_before_but_judges_time_by_now(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    with show_progress(4, past=[LINE, {**LINE, "round": 2}]) as watch:
        clock[0] += 10
        watch({"round": 3, "bytes_up": 0, "bytes_down": 0})
    # 2 MiB of before; the accuracy seen last; one round took 10 s, so one more will
    assert capsys.readouterr().err == "round 3/4  accuracy 50.0 %  2.0 MiB  10 s  10 s left\n"


def test_an_exchange_that_completes_no_round_repeats_no_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedgrove.report.progress.PRINT_EVERY", 0.0)
    with show_progress(3) as watch:
        for n in (1, 1, 2, 3):
            watch({**LINE, "round": n})
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["round 1/3", "round 2/3", "round 3/3"]
    # What the exchange sent is in the next line.
    assert "3.0 MiB" in lines[1]


def test_quiet_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with show_progress(1, quiet=True) as watch:
        watch(LINE)
    assert capsys.readouterr() == ("", "")


def test_a_terminal_gets_a_live_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with show_progress(1) as watch:
        watch(LINE)
    assert "fine-tuning and scoring" in sys.stderr.getvalue()
    assert "accuracy 50.0 %" in sys.stderr.getvalue()


STATUS = RunStatus(
    "runs/a", "ditto", "digits", "training", 3, 10, 3 << 20, "accuracy 90.0 %", 6.0, 14.0
)


def in_text(runs: list[RunStatus], height: int = 20) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(status_table(runs, height))
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.seen.append(tag)


def test_a_line_says_what_is_left_only_of_a_run_that_goes_on() -> None:
    assert status_line(STATUS).endswith("accuracy 90.0 %, 3.0 MiB, 6 s, about 14 s left")
    assert status_line(replace(STATUS, state="finished")).endswith("3.0 MiB, 6 s")
    assert (
        status_line(replace(STATUS, score="", left=None))
        == "runs/a: training, round 3/10, 3.0 MiB, 6 s"
    )


def test_the_last_sentence_says_how_it_ended() -> None:
    assert describe_end(replace(STATUS, state="finished", why="accuracy 95.0 %")) == (
        "runs/a is finished. accuracy 95.0 %. Its table: fedgrove compare runs/a"
    )
    assert "fedgrove resume runs/a" in describe_end(replace(STATUS, state="stopped"))
    assert (
        describe_end(replace(STATUS, state="failed", why="no."))
        == "runs/a failed after 3 rounds: no."
    )


def test_a_table_shows_those_that_train_first_and_says_how_many_more() -> None:
    runs = [replace(STATUS, path=f"r{i}", state="finished") for i in range(5)]
    text = in_text([*runs, replace(STATUS, path="[red]x")], height=2)
    lines = text.splitlines()
    assert lines[1].startswith("[red]x")
    assert lines[2].startswith("r0")
    assert lines[3] == "... and 4 more"


def test_of_a_sweep_the_time_left_is_that_of_all() -> None:
    # 6 s for 3 of 20 rounds, and 10 + 7 are ahead.
    text = in_text([STATUS, replace(STATUS, path="b", state="waiting", round=0, spent=0.0)])
    assert text.splitlines()[-1] == "2 runs: 3 of 20 rounds, 6.0 MiB, 6 s, about 34 s left"
    assert "left" not in text.splitlines()[0]
    over = replace(STATUS, state="failed")
    assert "2 failed" in status_page("x", [over, over])
    assert "left" not in describe_sweep([over, over])


@pytest.mark.parametrize("several", [False, True])
def test_names_stay_text_on_a_page(several: bool) -> None:
    bad = "<script>alert(1)</script>"
    look = replace(STATUS, path=bad, method=bad, data=bad, score=bad, state="failed", why=bad)
    page = status_page(bad, [look] * (2 if several else 1))
    tags = Tags()
    tags.feed(page)
    assert "script" not in tags.seen
    assert "&lt;script&gt;" in page


def test_a_page_refreshes_until_all_is_over() -> None:
    over = replace(STATUS, state="finished")
    assert "http-equiv" in status_page("x", [STATUS, over])
    assert "http-equiv" not in status_page("x", [over])


def test_a_page_without_rounds_and_one_of_many_runs_open() -> None:
    assert "<svg" not in status_page("x", [RunStatus("a", "m", "d", "waiting")])
    assert "no longer" not in status_page("x", [])
    long = tuple((i, float(i % 7)) for i in range(100_000))
    many = status_page("x", [replace(STATUS, scores=long, traffic=long)] * 10_000)
    assert "and 9800 more" in many
    assert many.count("<tr>") == MOST_ROWS + 1
    one = status_page("x", [replace(STATUS, scores=long, traffic=long)])
    assert len(one) < 100_000


# ---- a forecast ----------------------------------------------------------------------------------


def wait_for_answer(work: progress._Work) -> None:
    for _ in range(1000):
        work.take()
        if work._process is None:
            return
        time.sleep(0.01)
    raise AssertionError("the process of the forecast did not answer")


def test_a_forecast_weighs_rounds_by_their_work() -> None:
    work = progress._Work(4, lambda: [90.0, 6.0, 6.0, 0.0, 8.0])
    # Before: four equal rounds.
    assert work.share_ahead(0, 1) == 3
    work.ask()
    wait_for_answer(work)
    # (6 + 6 + 0 + 8) / 90; resumed after the first round: (6 + 0 + 8) / 6; at the end: 8 / 102.
    assert work.share_ahead(0, 1) == pytest.approx(20 / 90)
    assert work.share_ahead(1, 2) == pytest.approx(14 / 6)
    assert work.share_ahead(0, 4) == pytest.approx(8 / 102)


def test_a_forecast_that_fails_leaves_rounds_alike() -> None:
    def fail() -> list[float]:
        raise ValueError

    work = progress._Work(4, fail)
    work.ask()
    wait_for_answer(work)
    assert work.share_ahead(0, 1) == 3


def test_only_a_long_run_is_forecast_and_its_process_ends_with_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [100.0]

    def now() -> float:
        # Waiting ends only where time passes.
        clock[0] += 1e-6
        return clock[0]

    monkeypatch.setattr(progress.time, "monotonic", now)

    def train(seconds: float) -> int:
        with show_progress(4, forecast=lambda: [time.sleep(60)]) as watch:  # type: ignore[func-returns-value]
            clock[0] += seconds
            watch(LINE)
            count = len(multiprocessing.active_children())
        assert multiprocessing.active_children() == []
        return count

    # Four rounds of 14 s are less than a minute, and of 16 s more.
    assert train(14.0) == 0
    assert train(16.0) == 1
    assert "16 s  48 s left" in capsys.readouterr().err


def test_the_process_of_a_forecast_ends_with_a_run_that_is_killed(tmp_path: Path) -> None:
    program = """
import os, sys, time
from fedgrove.report.progress import _Work
work = _Work(2, lambda: [time.sleep(60)])
work.ask()
print(work._process.pid, flush=True)
os.kill(os.getpid(), 9)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False
    )
    child = int(done.stdout)
    for _ in range(500):
        if not is_alive(child):
            return
        time.sleep(0.02)
    raise AssertionError("the process of the forecast goes on without the run")


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that ended and that nobody has asked for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
