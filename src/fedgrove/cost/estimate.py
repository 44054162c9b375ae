"""What a method will cost before anything is trained: bytes, parameters, multiply-accumulates, memory."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..core import AnyMethod, Info, Report, Task
from ..data import ClientData, Defaults, Examples, Federation
from ..engines import work
from ..errors import check
from ..parts.local import LocalTraining
from ..runs.rounds import Run, build, plan, recipe_of
from ..runs.store import Memory
from ..wire.codec import Bitmap, Dense
from ..wire.ledger import Ledger

EXAMPLES = 9_999_999
"""What a stand-in client says it holds: as many digits as any client will ever need."""
NUMBER = 25
"""The longest a number gets in JSON: sign, 17 digits, point, exponent."""


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
    """Count what a run would send and what a client needs, with stand-in clients of a few zero examples.

    ``bytes_up`` and ``bytes_down`` are upper bounds by the static codec (whose lengths follow from shapes and masks,
    not from values): the run is played to its end, one client really doing the work of each kind of task that comes up
    and answering for all others; messages are measured with every number in their heads at its longest. Evaluation and
    the delivery of the last model are not in it, as in ``summary.json``.
    ``reduction_paper`` is 1 - bytes_paper / (8 d cohort rounds), d parameters. ``memory`` is that of one training
    step by ``recipe``, or by the method's own ``local``.

    >>> from fedgrove.methods import FedAvg
    >>> found = cost(FedAvg(), net="har-cnn", shape=(9, 128), classes=6, clients=30, cohort=10, rounds=50)
    >>> found["params"], found["mib_paper"], found["reduction_paper"]
    (89254, 340.5, 0.0)
    """
    check(clients >= 1, "clients", clients, "1 or more")
    local = method.local or recipe or LocalTraining()
    with tempfile.TemporaryDirectory() as scratch:
        run = _stand_in(
            method, local, net, shape, classes, clients, cohort, rounds, Memory(Path(scratch))
        )
        sent = _sent(run)
    layout = run.net.layout
    paper, dense = (
        method.paper_bytes(layout, clients, cohort, rounds),
        8 * layout.size * cohort * rounds,
    )
    return {
        "clients": clients,
        "cohort": cohort,
        "rounds": rounds,
        **{k: v for k, v in sent.totals().items() if not k.endswith("parts")},
        "bytes_paper": paper,
        "mib_paper": round(paper / 2**20, 1),
        "reduction_paper": round(1 - paper / dense, 6),
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
        recipe=recipe_of(run.federation),
    )


def _stand_in(
    method: AnyMethod,
    local: LocalTraining,
    net: str | nn.Module,
    shape: tuple[int, ...],
    classes: int,
    clients: int,
    cohort: int,
    rounds: int,
    memory: Memory,
) -> Run:
    """A run of the same size on zeros: one batch of two, one epoch, a static codec."""
    zeros = Examples(torch.zeros(2, *shape), torch.zeros(2, dtype=torch.int64))
    one = ClientData(zeros, zeros, zeros, Info(EXAMPLES))
    defaults = Defaults("mlp", cohort, rounds, 1, 2, "SGD", 0.1)
    labels = tuple(map(str, range(classes)))
    federation = Federation(
        "zeros", dict.fromkeys(range(clients), one), classes, labels, shape, defaults
    )
    codec = method.codec if isinstance(method.codec, Dense) else Bitmap()
    small: Any = replace(method, local=replace(local, epochs=1, batch=2), codec=codec)  # type: ignore[type-var]
    return build(small, federation, memory, net=net, rounds=rounds, cohort=cohort)


def _sent(run: Run) -> Ledger:
    """The bytes of all exchanges. Tasks that look alike are done once: their answers would be as long."""
    total, state, done = (
        Ledger(),
        run.method.init(run.start),
        dict[Any, tuple[Report, dict[str, dict[str, int]]]](),
    )
    while state.round < run.rounds:
        answers = []
        for task in plan(run, state):
            key = _kind(task)
            if key not in done:
                report, _ = work.perform(run, task, {})
                done[key] = report, _longest(run, task, report)
            report, both = done[key]
            total.add(both)
            answers.append(replace(report, of=task.to))
        state = run.method.fold(state, answers)
    return total


def _kind(task: Task) -> Any:
    """What the length of a task and of its report depends on: what is sent under which mask, and what is asked."""
    numbers = tuple(sorted((k, str(v)) for k, v in task.settings.items()))
    packets = tuple(
        (name, _shape(p.values), _shape(p.mask or {}, count=True)) for name, p in task.send.items()
    )
    return task.verb, numbers, packets


def _shape(tree: Mapping[str, torch.Tensor], count: bool = False) -> Any:
    return tuple(
        (k, tuple(v.shape), v.dtype, int(v.count_nonzero()) if count else 0)
        for k, v in tree.items()
    )


def _longest(run: Run, task: Task, report: Report) -> dict[str, dict[str, int]]:
    """Both messages by part, with every number in their heads as long as it can get."""
    last = max(run.infos)
    task, report = replace(task, to=last, round=run.rounds), replace(report, of=last)
    down = dict(work.count_down(run, task, work.Sent()))
    up = dict(work.count_up(run, task, report))
    down["header"] += _slack(task.settings)
    up["header"] += _slack(report.metrics)
    return {"down": down, "up": up}


def _slack(numbers: Mapping[str, Any]) -> int:
    """How much longer the numbers of a head may get."""
    every = [x for v in numbers.values() for x in (v if isinstance(v, Iterable) else [v])]
    return sum(max(0, NUMBER - len(json.dumps(x))) for x in every)
