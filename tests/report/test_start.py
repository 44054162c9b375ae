"""What is seen before the first round, and on terminals that can do little."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

import fedgrove
from fedgrove.report.ascii import is_unicode
from fedgrove.report.progress import watching
from fedgrove.report.start import ERASE, is_live, starting

LINE = {"round": 1, "bytes_up": 0, "bytes_down": 0, "accuracy_mean": 0.5}


class Terminal(io.StringIO):
    """A terminal that keeps what was written."""

    def isatty(self) -> bool:
        return True


def terminal_for(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Put a terminal in the place of stderr."""
    made = Terminal()
    monkeypatch.setattr(sys, "stderr", made)
    monkeypatch.setenv("TERM", "xterm")
    return made


def test_a_terminal_is_told_at_once_and_then_the_line_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = terminal_for(monkeypatch)
    with starting("loading torch") as say:
        assert terminal.getvalue() == f"{ERASE}fedgrove: loading torch ..."
        say("reading the data")
    assert terminal.getvalue().endswith(f"{ERASE}fedgrove: reading the data ...{ERASE}")


def test_the_line_is_gone_before_an_error_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_for(monkeypatch)
    with pytest.raises(ValueError, match="x"), starting("loading"):
        raise ValueError("x")
    assert terminal.getvalue().endswith(ERASE)


def test_quiet_and_logs_get_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_for(monkeypatch)
    with starting("loading", quiet=True):
        pass
    assert terminal.getvalue() == ""
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with starting("loading"):
        pass
    assert sys.stderr.getvalue() == ""


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_for(monkeypatch)
    monkeypatch.setenv("TERM", "dumb")
    assert not is_live(terminal)
    with watching(1, title="round 0/1  fedavg on digits") as watch:
        watch(LINE)
    first, last = terminal.getvalue().splitlines()
    assert first == "round 0/1  fedavg on digits"
    assert last.startswith("round 1/1  accuracy 50.0 %")
    assert "\033" not in terminal.getvalue()


def test_encodings_that_have_every_sign() -> None:
    assert all(is_unicode(name) for name in ("utf-8", "UTF8", "utf_16"))
    assert not any(is_unicode(name) for name in ("ascii", "latin-1", "cp437", "US-ASCII"))


def test_a_terminal_without_signs_gets_words_for_them() -> None:
    program = (
        "import sys\n"
        "from fedgrove.report.ascii import write_ascii_where_needed as w\n"
        "w()\nprint('3 ± 1 × 2 … é')\nprint('µ', file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={
            **os.environ,
            "PYTHONPATH": str(Path(fedgrove.__file__).parents[1]),
            "PYTHONIOENCODING": "ascii",
        },
        capture_output=True,
        check=True,
    )
    assert done.stdout == b"3 +- 1 x 2 ... ?\n"
    assert done.stderr == b"u\n"
