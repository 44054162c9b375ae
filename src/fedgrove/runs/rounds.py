"""A run and its loop. ``rounds`` is a generator: the caller maps tasks, logs, checkpoints and stops.

::

    loop = rounds(run)
    exchange = next(loop)
    while exchange.tasks:
        exchange = loop.send(report for _, report in engine.map((run, task) for task in exchange.tasks))

Several generators and one ``engine.map`` make runs in lockstep.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from .. import nets, seeds
from ..core import AnyMethod, Batch, Batches, Carry, Client, Edit, Give, Info, Measure, Outcome, Report, Stage, Start, Task, Train
from ..data import Federation
from ..errors import EngineError, InputError, check
from ..nets import Net
from ..parts.gate import Gate
from ..parts.local import SGD, Adam, LocalTraining
from ..parts.objective import CrossEntropy
from .store import Held, Memory
from ..trees import Tree

SCORING = ("evaluate", "finetune")
"""The verbs every run has beside its method's own: their traffic is counted apart."""


@dataclass(frozen=True, eq=False)
class Run:
    """A method on a federation: everything that decides the result, and where clients keep what they remember."""

    method: AnyMethod
    federation: Federation
    net: Net
    memory: Memory
    rounds: int = 20
    cohort: int = 10
    seed: int = 0
    finetune: tuple[int, ...] = (0,)
    gate: Gate = field(default_factory=Gate)
    held: Held = field(default_factory=Held)

    def __post_init__(self) -> None:
        clients = len(self.federation.clients)
        check(self.rounds >= 1, "rounds", self.rounds, "1 or more")
        check(1 <= self.cohort <= clients, "cohort", self.cohort, f"between 1 and the number of clients, {clients}")
        check(bool(self.finetune) and min(self.finetune) >= 0, "finetune", self.finetune, "lengths of 0 or more epochs")
        if self.method.local is None:
            object.__setattr__(self, "method", with_recipe(self.method, recipe_of(self.federation)))

    @cached_property
    def infos(self) -> dict[int, Info]:
        """What the server knows of each client."""
        return {k: client.info for k, client in self.federation.clients.items()}

    @cached_property
    def params(self) -> Tree:
        """The network's initial parameters: both sides draw them from the seed."""
        return self.net.params()

    @cached_property
    def start(self) -> Start:
        """What the server knows before the first round."""

        def fresh(j: int) -> Tree:
            return self.net.redraw(seeds.derive(self.seed, "net", j))

        return Start(self.params, self.net.layout, self.infos, self.rounds, fresh)

    def client(self, task: Task, memory: dict[str, Tree]) -> Client:
        """The client a task is for, with what it remembers."""
        data = self.federation.clients[task.to]
        # A verb's qualifier, "train:evidence", says what else is done: training draws what it would draw without it.
        seed = seeds.derive(self.seed, task.round, task.to, task.verb.partition(":")[0])
        return Client(task.to, data.info, data, memory, self.net.layout, self.params, seed)

    def work(self, verb: str) -> tuple[Stage, ...]:
        """What a client does: the method's own verbs, and the two every method ends with."""
        if verb == "evaluate":
            return (*self.method.work("use"), *_scored("model", 0), Give(self._scores((0,), keep=False)))
        if verb == "finetune":
            stages: list[Stage] = [*self.method.work("use")]
            for n in self.finetune:
                stages.append(Train(CrossEntropy(), self._for(n), end=f"tuned{n}") if n else Edit(_as_it_is))
                stages += _scored(f"tuned{n}", n)
            return (*stages, Give(self._scores(self.finetune, keep=True)))
        return self.method.work(verb)

    def _for(self, epochs: int) -> LocalTraining | None:
        return replace(self.method.local, epochs=epochs) if self.method.local else None

    def _scores(self, lengths: Sequence[int], keep: bool) -> Any:
        def give(carry: Carry, client: Client) -> Outcome:
            mask = carry.get("model.mask")
            metrics = {"density": client.layout.density(mask), "params": float(kept(client.layout.size, mask))}
            for n in lengths:
                for split in ("test", "validation"):
                    sums = carry[f"{split}{n}"]
                    total = float(sums["total"]) if sums else 0.0
                    metrics[f"{split}{n}"] = float(sums["correct"]) / total if total else 0.0
                    metrics[f"{split}_loss{n}"] = float(sums["loss"]) / total if total else 0.0
            return Outcome(metrics=metrics, memory={"own": carry[f"tuned{lengths[-1]}"]} if keep else {})

        return give


def kept(size: int, mask: dict[str, Tensor] | None) -> int:
    """Parameters that are left under a mask."""
    return size - sum(int((~m).sum()) for m in (mask or {}).values())


def recipe_of(federation: Federation) -> LocalTraining:
    """The data set's own way to train."""
    d = federation.defaults
    if d.optimiser == "SGD":
        return LocalTraining(d.epochs, d.batch, SGD(d.lr, d.momentum, d.weight_decay))
    return LocalTraining(d.epochs, d.batch, Adam(d.lr, weight_decay=d.weight_decay))


def with_recipe(method: AnyMethod, local: LocalTraining) -> AnyMethod:
    """The same method, training by another recipe."""
    changed: AnyMethod = replace(method, local=local)  # type: ignore[type-var]
    return changed


def _as_it_is(carry: Carry, client: Client) -> Carry:
    return {**carry, "tuned0": carry["model"]}


def correct(net: Net, params: Tree, batch: Batch, carry: Carry) -> Tree:
    """How many examples of a batch the model gets right, of how many, and the sum of their losses."""
    logits = net(params, batch.x, train=False).logits
    right = (logits.argmax(1) == batch.y).to(batch.weight.dtype)
    loss = F.cross_entropy(logits, batch.y, reduction="none")
    w = batch.weight
    return {"correct": (right * w).sum(), "total": w.sum(), "loss": (loss * w).sum()}


def _scored(of: str, n: int) -> tuple[Measure, Measure]:
    return (
        Measure(f"test{n}", correct, Batches("test"), of=of),
        Measure(f"validation{n}", correct, Batches("validation"), of=of),
    )


# ---- the loop ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Exchange:
    """The tasks that follow from a state; no tasks when the last round is folded.

    ``refused`` says why reports of the exchange before were left out.
    """

    state: Any
    tasks: list[Task]
    refused: tuple[str, ...] = ()


def rounds(run: Run, state: Any = None) -> Generator[Exchange, Iterable[Report], None]:
    """Plan, wait for the reports, gate and fold them, until ``run.rounds`` rounds are done.

    With ``state``, goes on from there: randomness depends on the round, not on what happened before it.
    """
    state = run.method.init(run.start) if state is None else state
    refused: list[str] = []
    while state.round < run.rounds:
        tasks = plan(run, state)
        reports = yield Exchange(state, tasks, tuple(refused))
        refused = []
        state = run.method.fold(state, gated(run, reports, refused, tasks))
    yield Exchange(state, [], tuple(refused))


def plan(run: Run, state: Any) -> list[Task]:
    """The tasks of the next exchange, stamped with the round."""
    tasks = run.method.plan(state, draw_cohort(run, state.round))
    return [replace(task, round=state.round) for task in tasks]


def draw_cohort(run: Run, round: int) -> list[int]:
    """The clients of a round: drawn without replacement, in order of their ids."""
    rng = seeds.numpy_rng(run.seed, round, "cohort")
    return sorted(int(k) for k in rng.choice(sorted(run.infos), run.cohort, replace=False))


def gated(run: Run, reports: Iterable[Report], refused: list[str], tasks: Sequence[Task] = ()) -> Iterator[Report]:
    """The reports on ``tasks`` that a method may see; why the others were refused goes into ``refused``."""
    usable, sent = 0, {task.to: task.send for task in tasks}
    for report in reports:
        reason = run.gate.refuses(report, run.net.layout, run.infos, sent.get(report.of))
        if reason is None:
            usable += 1
            yield report
        else:
            refused.append(reason)
    if not usable:
        cause = f": {refused[-1]}" if refused else "."
        raise EngineError(f"no usable report came back, so there is nothing to fold{cause}")


def evaluation(run: Run, state: Any, verb: str = "evaluate") -> list[Task]:
    """Tasks that have every client score the model it would use now."""
    deliver = run.method.deliver
    return [Task(k, deliver(state, k), verb=verb, round=state.round) for k in run.infos]


def build(
    method: AnyMethod,
    federation: Federation,
    memory: Memory,
    *,
    net: Any = None,
    rounds: int | None = None,
    cohort: int | None = None,
    seed: int = 0,
    finetune: Sequence[int] = (0,),
) -> Run:
    """A run with the data set's defaults where nothing was said."""
    d = federation.defaults
    module = nets.build(net if net is not None else d.net, federation.shape, federation.classes, seed)
    size = min(d.cohort, len(federation.clients)) if cohort is None else cohort
    if not federation.clients:
        raise InputError(f"{federation.name} has no clients left; ask for fewer clients or another partition.")
    length = d.rounds if rounds is None else rounds
    run = Run(method, federation, Net(module, federation.shape), memory, length, size, seed, tuple(finetune))
    run.method.init(run.start)  # what a method refuses, it refuses before anything is written
    return run
