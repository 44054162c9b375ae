"""crowd: as many generated clients as asked for, a million too, each made when it is needed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from ..core import ClientInfo
from ..errors import check
from ..seeds import derive, numpy_rng
from .build import Choices
from .dataset import Array
from .devices import Devices
from .federation import ClientData, Defaults, Examples, Federation
from .lazy import LazyClients

CLASSES = 10
SHAPE = (1, 8, 8)
KINDS = 3
"""Kinds of clients, who give the same patterns different labels."""
FEWEST = 30
MOST = 70
"""Examples of a client, of all three parts."""
NOISE = 2.0
"""The deviation of an example from its pattern, whose own values have deviation 1."""
TEST = 0.2


def crowd(choices: Choices, defaults: Defaults) -> Federation:
    """So many clients; nothing is made of them until they are asked for."""
    check(choices.partition in (None, "natural"), "partition", choices.partition, "natural")
    check(choices.scenario in (None, "none"), "scenario", choices.scenario, "none")
    check(choices.split in (None, "random"), "split", choices.split, "random")
    assert choices.clients is not None
    devices = choices.devices.of_clients({})
    devices.check_all_there(choices.clients)
    make = CrowdClient(choices.seed, choices.validation, devices)
    return Federation(
        "crowd",
        LazyClients(make, choices.clients, make.info),
        classes=CLASSES,
        labels=tuple(str(label) for label in range(CLASSES)),
        shape=SHAPE,
        defaults=defaults,
        notes=("generated, not measured",),
        validation=choices.validation,
        trace=devices.trace,
        files=devices.files,
    )


@dataclass(frozen=True)
class CrowdClient:
    """Makes client k from the seed and k alone.

    There are ten patterns of 8 x 8. Client k is of kind k mod 3: what is class c for kind 0 is
    class c + 1 for kind 1, so one model for all does worse than one per kind. Classes are not
    equally frequent: each client draws their shares.
    """

    seed: int
    validation: float
    devices: Devices

    def __call__(self, k: int) -> ClientData:
        """The client's examples."""
        rng = numpy_rng(self.seed, "crowd", k)
        examples, test, validation = self._sizes(k)
        shares = rng.dirichlet(np.ones(CLASSES))
        pattern = rng.choice(CLASSES, examples, p=shares)
        noise = NOISE * rng.standard_normal((examples, *SHAPE), dtype=np.float32)
        x = torch.from_numpy(_patterns()[pattern] + noise)
        y = torch.from_numpy((pattern + k % KINDS) % CLASSES)
        # Drawn in no order, so that the first rows are as good a test part as any.
        first = test + validation
        tested = Examples(x[:test], y[:test])
        validated = Examples(x[test:first], y[test:first])
        trained = Examples(x[first:], y[first:])
        return ClientData(trained, validated, tested, self.info(k))

    def info(self, k: int) -> ClientInfo:
        """What the server knows of the client, without its examples."""
        examples, test, validation = self._sizes(k)
        return self.devices.info(examples - test - validation, k, self.seed)

    def _sizes(self, k: int) -> tuple[int, int, int]:
        """How many examples in all, in the test part and in the validation part."""
        examples = FEWEST + derive(self.seed, "crowd", "size", k) % (MOST - FEWEST + 1)
        test = round(TEST * examples)
        validation = round(self.validation * (examples - test))
        return examples, test, validation


@cache
def _patterns() -> Array:
    """The same for every seed, as the classes of a measured set would be."""
    return numpy_rng(0, "crowd", "patterns").standard_normal((CLASSES, *SHAPE), dtype=np.float32)
