"""The lines a person sees, from the lines a run writes."""

import io
import sys

import pytest

from fedgrove.report import progress
from fedgrove.report.progress import watching

LINE = {"round": 1, "bytes_up": 1 << 19, "bytes_down": 1 << 19, "accuracy_mean": 0.5}


def test_plain_lines_come_now_and_then_and_at_the_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    with watching(4) as watch:
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
    with watching(4, past=[LINE, {**LINE, "round": 2}]) as watch:
        clock[0] += 10
        watch({"round": 3, "bytes_up": 0, "bytes_down": 0})
    # 2 MiB of before; the accuracy seen last; one round took 10 s, so one more will
    assert capsys.readouterr().err == "round 3/4  accuracy 50.0 %  2.0 MiB  10 s  10 s left\n"


def test_quiet_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with watching(1, quiet=True) as watch:
        watch(LINE)
    assert capsys.readouterr() == ("", "")


def test_a_terminal_gets_a_live_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with watching(1) as watch:
        watch(LINE)
    assert "fine-tuning and scoring" in sys.stderr.getvalue()
    assert "accuracy 50.0 %" in sys.stderr.getvalue()
