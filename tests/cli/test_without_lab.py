"""Without the lab, its two commands say how to get it, and everything else works."""

from __future__ import annotations

import subprocess
import sys

HIDE_THE_LAB = "import sys; sys.modules['fedgrove_lab'] = None"
"""Python then neither finds nor imports the package."""


def call_without_lab(*arguments: str) -> subprocess.CompletedProcess[str]:
    script = f"{HIDE_THE_LAB}; from fedgrove.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_its_commands_say_how_to_get_it() -> None:
    for command in ("paper", "bench"):
        ended = call_without_lab(command, "grove")
        assert ended.returncode == 2
        assert f"fedgrove {command} is part of the package fedgrove_lab" in ended.stderr
        assert "pip install -e lab, or put lab/src on PYTHONPATH" in ended.stderr


def test_help_does_not_list_them() -> None:
    ended = call_without_lab("--help")
    assert ended.returncode == 0
    assert "sweep" in ended.stdout
    assert "paper" not in ended.stdout
