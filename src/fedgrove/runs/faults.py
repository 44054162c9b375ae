"""Which clients fail or lie, and when: a function of the seed, so that a run can be repeated."""

from __future__ import annotations

from dataclasses import dataclass

from .. import seeds
from ..core import SCORING_VERBS, Task
from ..errors import InputError, check, unknown
from ..renamed import find_old_names

FAULT_KINDS = {
    "crash": "the client gets its task and fails immediately",
    "late": "the client does its work, and the answer comes too late",
    "silent": "the answer never comes, without an error",
    "nan": "a value of the report is NaN",
    "inf": "a value of the report is infinite",
    "huge": "a value of the report is 1e30",
    "scale": "the update is multiplied by 1000",
    "flip": "the sign of the update is flipped",
    "duplicate": "the report is sent twice",
    "impostor": "the report names a different client",
    "examples": "the report claims a thousand times the client's examples",
    "metrics": "the report's numbers are NaN",
    "memory": "the report names a version of memory that does not exist",
    "rename": "a packet has a wrong name",
    "tensor": "a tensor of a packet is missing",
    "shape": "a tensor has a wrong shape",
    "dtype": "a tensor is complex",
    "none": "a packet contains no values",
    "mask": "a packet has a mask that was not requested, or lacks its mask",
    "garbage": "the answer is not a report at all",
}
"""What can go wrong with a task, by the word of ``--faults``."""


@dataclass(frozen=True)
class Faults:
    """The probability of each fault, per task. Scoring is never disturbed: it is the measurement.

    >>> Faults.parse("crash=0.1,nan=0.02").shares
    (('crash', 0.1), ('nan', 0.02))
    """

    shares: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        total = 0.0
        for kind, share in self.shares:
            if kind not in FAULT_KINDS:
                raise unknown("fault", kind, list(FAULT_KINDS))
            check(0 <= share <= 1, f"faults {kind}", share, "a probability between 0 and 1")
            total += share
        # At most one fault hits a task, so their probabilities add up.
        check(total <= 1 + 1e-9, "faults", self.text, "probabilities that add up to at most 1")

    @classmethod
    def parse(cls, text: str) -> Faults:
        """Parse the faults of a run as the command line writes them: ``crash=0.1,late=0.2``."""
        shares: dict[str, float] = {}
        for word in text.split(","):
            kind, _, number = word.partition("=")
            kind = kind.strip()
            try:
                share = float(number)
            except ValueError:
                raise InputError(
                    f"faults is '{text}'; it must be kinds with their probabilities, such as "
                    "crash=0.1,late=0.2."
                ) from None
            if kind in shares:
                raise InputError(f"faults is '{text}'; it names {kind} twice.")
            shares[kind] = share
        return cls(tuple(shares.items()))

    @property
    def text(self) -> str:
        """The faults of a run as the command line writes them."""
        return ",".join(f"{kind}={share:g}" for kind, share in self.shares)

    def hit(self, seed: int, task: Task) -> str | None:
        """Return the simulated fault that hits a task of a run, if one does."""
        if not self.shares or task.verb in SCORING_VERBS:
            return None
        words = (task.round, task.attempt, task.to, task.verb, "fault")
        drawn = seeds.numpy_rng(seed, *words).random()
        for kind, share in self.shares:
            if drawn < share:
                return kind
            drawn -= share
        return None


NO_FAULTS = Faults()


__getattr__ = find_old_names(__name__)
