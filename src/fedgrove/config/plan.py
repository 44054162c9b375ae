"""From an experiment to its training: planned and checked first, then a folder, then the loop.

A run alone goes this way, and every run of a sweep.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..data import Federation
from ..errors import InputError, Refusals, together
from ..runs.folder import CHECKPOINT, RunFolder
from ..runs.lockstep import Member, Watch, ignore
from ..runs.memory import Memory
from ..runs.result import Failure, Result
from ..runs.run import Run
from .assemble import look_further
from .experiment import Experiment, Federations
from .toml import to_toml


@dataclass(frozen=True)
class Plan:
    """An experiment with nothing left open, its run, and where its folder is or will be."""

    experiment: Experiment
    run: Run
    path: Path

    @property
    def config(self) -> str:
        """The text of the planned experiment's config.toml."""
        named = (self.experiment.profile, self.experiment.trace)
        files = self.run.federation.files
        # A federation that was made in Python may have files that no option names.
        has_named_data = isinstance(self.experiment.data, str)
        recorded = {path: files[path] for path in files if has_named_data or path in named}
        origin = self.run.origin
        if origin is not None:
            recorded[origin.path] = origin.sha256
        return to_toml(self.experiment, recorded)

    def create_folder(self, reuse: bool = False) -> RunFolder:
        """Make the run folder of the planned experiment; see :meth:`RunFolder.create`."""
        return RunFolder.create(self.path, self.config, reuse)

    def member(self, folder: RunFolder, watch: Watch = ignore, name: str = "") -> Member:
        """Return the experiment's run, ready for :func:`fedgrove.runs.lockstep.train_together`.

        With a ``name``, ``watch`` finds it under "run" in every line.
        """

        def named(line: Mapping[str, Any]) -> None:
            watch({"run": name, **line})

        return Member(
            run=self.run,
            folder=folder,
            every=self.experiment.evaluate,
            watch=named if name else watch,
            name=name,
        )


def plan(experiment: Experiment, path: Path, federations: Federations) -> Plan:
    """Build and check everything of an experiment; nothing is written.

    ``path`` is where the run folder is, or will be.
    """
    federation = None
    try:
        federation = federations.of(experiment)
        memory = Memory(path / CHECKPOINT, elsewhere=federation.elsewhere)
        run = experiment.build(federation, memory)
    except InputError as error:
        refusals = Refusals()
        refusals.add(error)
        look_further(experiment, federations, refusals, cannot_read=federation is None)
        if len(refusals.sentences) == 1:
            raise
        raise together(refusals.sentences) from None
    return Plan(experiment.resolved(run), run, path)


def made_here(experiment: Experiment) -> dict[str, Any]:
    """Return what a result keeps of its experiment: the net, and data made in Python."""
    data = experiment.data
    return {"net": experiment.net, "data": data if isinstance(data, Federation) else None}


def ended(member: Member, experiment: Experiment) -> Result | Failure:
    """Return how the run of a planned experiment ended."""
    if member.summary is not None:
        return Result(member.summary, member.folder, **made_here(experiment))
    return Failure(" ".join(str(member.error).split()), member.folder)
