"""A trained federation, and all its models as files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fedgrove as fg
from fedgrove.export.figures import Exported
from fedgrove.export.formats import ExportRequest
from fedgrove.export.make import export_client
from fedgrove.export.source import opened


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained federation: one model of digits for three clients."""
    out = tmp_path_factory.mktemp("digits") / "run"
    words: dict[str, Any] = {
        "clients": 3,
        "cohort": 3,
        "rounds": 5,
        "evaluate": 0,
        "partition": "iid",
    }
    return fg.run("fedavg", data="digits", engine="serial", out=out, **words).folder.path


@pytest.fixture(scope="session")
def everyone(digits: Path) -> dict[int, Exported]:
    """All its models, in the folder of the run, in int8 too."""
    source = opened(digits)
    options = ExportRequest(int8=True)
    return {client: export_client(source, client, options, None) for client in source.files}
