"""The run that all others are compared with."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.faults.made import contents, killed_after, start


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The run of :mod:`tests.faults.made`, never disturbed."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    process = start(folder, "--json")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    found = contents(folder)
    assert sum(name.startswith("client-") for name in found) == 20
    return found


@pytest.fixture(scope="session")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, killed in its fourth round or later; to be copied."""
    folder = tmp_path_factory.mktemp("killed") / "run"
    killed_after(3, folder)
    return folder
