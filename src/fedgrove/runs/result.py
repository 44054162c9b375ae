"""How a run ended: with figures, or with a reason."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import InputError
from .folder import RunFolder
from .store import cannot_write


@dataclass(frozen=True)
class Result:
    """A finished run: its figures, and its folder."""

    summary: dict[str, Any]
    folder: RunFolder

    def table(self) -> None:
        """Print the figures."""
        from ..report.tables import print_summaries

        print_summaries([self.summary], elsewhere="the summary")

    def save(self, path: str | Path) -> RunFolder:
        """Copy the run folder; a folder that exists is not touched."""
        target = Path(path)
        if target.exists():
            raise InputError(
                f"the run folder {target} exists; runs are never overwritten: give another name."
            )
        try:
            shutil.copytree(self.folder.path, target)
        except OSError as error:
            shutil.rmtree(target, ignore_errors=True)
            raise cannot_write(target, error) from None
        return RunFolder(target)


@dataclass(frozen=True)
class Failure:
    """A run that could not be finished, and why; its folder holds what was saved."""

    why: str
    folder: RunFolder
