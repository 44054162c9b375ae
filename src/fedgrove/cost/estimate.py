"""What a method will cost before anything is trained: bytes, parameters, MACs, memory."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..core import AnyMethod, Info, Report, Task, bytes_of_paper
from ..data import ClientData, Defaults, Examples, Federation
from ..data.lazy import LazyClients
from ..engines.work import perform
from ..errors import check
from ..parts.local import LocalTraining
from ..runs.checksums import SHORT
from ..runs.rounds import exchanges_of_a_round, plan
from ..runs.run import Run, build, recipe_of
from ..runs.store import Memory, version_of
from ..wire.codec import Bitmap, Dense
from ..wire.count import BroadcastCosts, count_down, count_up
from ..wire.ledger import Ledger

EXAMPLES = 9_999_999
"""What a stand-in client says it holds: as many digits as any client will ever need."""
LONGEST_NUMBER = 25
"""The longest a number gets in JSON: sign, 17 digits, point, exponent."""

MessageCosts = dict[str, dict[str, int]]
"""Direction -> part of the cost -> bytes."""


def cost(
    method: AnyMethod,
    *,
    net: str | nn.Module,
    shape: tuple[int, ...],
    classes: int,
    clients: int,
    cohort: int,
    rounds: int,
    recipe: LocalTraining | None = None,
) -> dict[str, Any]:
    """Count what a run would send and what a client needs, with stand-in clients of a few zeros.

    ``bytes_up`` and ``bytes_down`` are upper bounds by the static codec (whose lengths follow from
    shapes and masks, not from values): the run is played to its end, one client really doing the
    work of each kind of task that comes up and answering for all others; messages are measured with
    every number in their heads at its longest. Evaluation and the delivery of the last model are
    not included, as in ``summary.json``. ``reduction_paper`` is 1 - bytes_paper / (8 d cohort
    rounds), d parameters. ``memory`` is that of one training step by ``recipe``, or by the method's
    own ``local``.

    >>> from fedgrove.methods import FedAvg
    >>> size = {"clients": 30, "cohort": 10, "rounds": 50}
    >>> figures = cost(FedAvg(), net="har-cnn", shape=(9, 128), classes=6, **size)
    >>> figures["params"], figures["mib_paper"], figures["reduction_paper"]
    (89254, 340.5, 0.0)
    """
    check(clients >= 1, "clients", clients, "1 or more")
    local = method.local or recipe or LocalTraining()
    federation = _stand_in_federation(shape, classes, clients, cohort, rounds)
    with tempfile.TemporaryDirectory() as scratch:
        run = build(
            _quick(method, local),
            federation,
            Memory(Path(scratch)),
            net=net,
            rounds=rounds,
            cohort=cohort,
        )
        sent = _play(run)
    layout = run.net.layout
    paper = bytes_of_paper(method, run.net, clients, cohort, rounds)
    # Four bytes per parameter, down and up.
    dense = 8 * layout.size * cohort * rounds
    return {
        "clients": clients,
        "cohort": cohort,
        "rounds": rounds,
        **sent.totals(),
        "bytes_paper": paper,
        "mib_paper": None if paper is None else round(paper / 2**20, 1),
        "reduction_paper": None if paper is None else round(1 - paper / dense, 6),
        "params": layout.size,
        "macs": layout.macs,
        "memory": layout.memory(local.batch, local.optimiser.slots),
    }


def of_run(run: Run, net: str | nn.Module) -> dict[str, Any]:
    """The cost of a run that was built and not started."""
    return cost(
        run.method,
        net=net,
        shape=run.federation.shape,
        classes=run.federation.classes,
        clients=len(run.infos),
        cohort=run.cohort,
        rounds=run.rounds,
        recipe=recipe_of(run.federation.defaults),
    )


def _stand_in_federation(
    shape: tuple[int, ...], classes: int, clients: int, cohort: int, rounds: int
) -> Federation:
    """As many clients, each with two examples of zeros."""
    zeros = Examples(torch.zeros(2, *shape), torch.zeros(2, dtype=torch.int64))
    client = ClientData(zeros, zeros, zeros, Info(EXAMPLES))
    return Federation(
        name="zeros",
        clients=LazyClients(Same(client), clients),
        classes=classes,
        labels=tuple(str(label) for label in range(classes)),
        shape=shape,
        defaults=Defaults("mlp", cohort, rounds, 1, 2, "SGD", 0.1),
    )


@dataclass(frozen=True)
class Same:
    """Makes every client alike."""

    client: ClientData

    def __call__(self, k: int) -> ClientData:
        """The one there is."""
        return self.client


def _quick(method: AnyMethod, local: LocalTraining) -> AnyMethod:
    """The method with one batch of two, one epoch, and a codec whose lengths are static."""
    codec = method.codec if isinstance(method.codec, Dense) else Bitmap()
    short = replace(local, epochs=1, batch=2)
    quick: AnyMethod = replace(method, local=short, codec=codec)  # type: ignore[type-var]
    return quick


def _play(run: Run) -> Ledger:
    """The bytes of all exchanges."""
    total = Ledger()
    state = run.initial_state
    # Tasks that look alike are done once: their answers would be as long.
    done: dict[Any, tuple[Report, MessageCosts]] = {}
    exchanges = 0
    while state.round < run.rounds:
        answers = []
        for task in plan(run, state):
            key = _kind(task)
            if key not in done:
                report, remembered = perform(run, task, {})
                if remembered:
                    # Nothing is written: only the version travels, and the last is the longest.
                    report = replace(report, memory=version_of(run.rounds, task.verb, "0" * SHORT))
                done[key] = (report, _longest(run, task, report))
            report, costs = done[key]
            total.add(costs)
            run.memory.accept(task.to, report.memory)
            answers.append(replace(report, of=task.to))
        folded = run.method.fold(state, answers)
        exchanges = exchanges_of_a_round(run, state, folded, exchanges)
        state = folded
    return total


def _kind(task: Task) -> Any:
    """What the lengths of both messages depend on: packets, masks, verb, version and numbers."""
    numbers = tuple(sorted((name, str(value)) for name, value in task.settings.items()))
    packets = []
    for name, packet in task.send.items():
        mask_shapes = _shapes(packet.mask or {})
        ones = tuple(int(leaf.count_nonzero()) for leaf in (packet.mask or {}).values())
        packets.append((name, _shapes(packet.values), mask_shapes, ones))
    return task.verb, task.memory, numbers, tuple(packets)


def _shapes(tree: Mapping[str, Tensor]) -> Any:
    return tuple((name, tuple(leaf.shape), leaf.dtype) for name, leaf in tree.items())


def _longest(run: Run, task: Task, report: Report) -> MessageCosts:
    """Both messages by part, with every number in their heads as long as it can get."""
    largest_id = run.federation.ids[-1]
    task = replace(task, to=largest_id, round=run.rounds)
    report = replace(report, of=largest_id)
    codec = run.method.codec
    down = dict(count_down(task, codec, run.held, BroadcastCosts()))
    up = dict(count_up(task, report, codec, run.held))
    down["header"] += _slack(task.settings)
    up["header"] += _slack(report.metrics)
    return {"down": down, "up": up}


def _slack(numbers: Mapping[str, Any]) -> int:
    """How much longer the numbers of a message head may get."""
    slack = 0
    for value in numbers.values():
        items = value if isinstance(value, Iterable) else [value]
        for item in items:
            slack += max(0, LONGEST_NUMBER - len(json.dumps(item)))
    return slack
