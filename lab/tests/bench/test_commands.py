"""The commands of the page on performance are those there are."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from fedgrove.cli import main

PAGE = Path(__file__).parents[3] / "docs" / "performance.md"
COMMANDS = sorted(
    set(re.findall(r"^fedgrove (bench .+)$|`fedgrove (bench .+?)`", PAGE.read_text(), re.M))
)


@pytest.mark.parametrize("command", [fenced or inline for fenced, inline in COMMANDS])
def test_commands_parse(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    # A word that there is not is refused before help is given.
    assert main([*shlex.split(command), "--help"]) == 0
    assert "Usage" in capsys.readouterr().out


def test_a_wrong_one_does_not() -> None:
    assert len(COMMANDS) > 8
    assert main(["bench", "scale", "--size", "1e3", "--help"]) == 2
    assert main(["bench", "method", "--help"]) == 2


def test_without_a_command_the_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("fedgrove: fedgrove bench needs one of the commands device, engine, ")
