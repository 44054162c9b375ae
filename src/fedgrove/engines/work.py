"""One client's work, stage by stage: the same function in this process or in a worker."""

from __future__ import annotations

import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from .. import seeds, trees
from ..channels.shrink import find_small_net
from ..channels.small_net import SmallNet
from ..core import (
    GRADIENT_PASSES,
    SCORING_VERBS,
    Answer,
    Batch,
    Batches,
    Carry,
    Client,
    Edit,
    Give,
    Lost,
    Measure,
    Outcome,
    Packet,
    Report,
    Stage,
    Task,
    Train,
    check_names,
)
from ..errors import FedgroveError
from ..nets import Net
from ..parts import local
from ..runs.privacy import protect
from ..runs.run import Run
from ..seeds import preserve_rng, single_thread
from ..trees import Tree
from ..wire.codec import CostByPart
from ..wire.message_costs import NO_COSTS, BroadcastCosts, count_report, count_task


def initial_carry(
    task: Task, memory: Mapping[str, Tree], dtype: torch.dtype, marks: Tree | None = None
) -> Carry:
    """The carry a task starts with (see :mod:`fedgrove.core`); ``marks`` are its "client"."""
    carry: Carry = dict(memory)
    # After the memory: a packet wins over a remembered tree of the same name.
    for name, packet in task.send.items():
        carry[name] = packet.values
        if packet.mask is not None:
            carry[name + ".mask"] = packet.mask
    numbers = {"round": task.round, **task.settings}
    carry["settings"] = {name: torch.tensor(n, dtype=dtype) for name, n in numbers.items()}
    if marks:
        carry["client"] = marks
    carry["aux"] = {}
    return carry


LONGEST_LINE = 300
"""Letters of an error that are kept."""
CLIENT_FAILURES = (Exception, SystemExit, GeneratorExit)
"""What a client's work may end with and cost its own task only. Ctrl-C is not among them."""


def answer(run: Run, task: Task, broadcasts: BroadcastCosts, timeout: float | None) -> Answer:
    """Do a task in this process, from the client's memory to the bytes of its report."""
    started = time.monotonic()
    memory = run.memory.read(task.to, task.memory)
    try:
        # Copies: work that changes what it was sent, in place, must not change the server's model.
        report, remembered = perform(run, _copied(task), memory)
    except CLIENT_FAILURES as error:
        outcome: Answer = crashed(task, error)
    else:
        outcome = with_memory(run, task, report, remembered)
    took_too_long = timeout is not None and time.monotonic() - started > timeout
    counted = with_cost(run, task, outcome, broadcasts)
    if timeout is not None and took_too_long:
        # The work cannot be interrupted here: it is lost once it is done, and its reply paid for.
        return replace(late(task, timeout), cost=counted.cost)
    return counted


def _copied(task: Task) -> Task:
    """The task with packets of its own, as a client gets it that is somewhere else."""
    send = {}
    for name, packet in task.send.items():
        values = {k: v.clone() for k, v in packet.values.items()}
        mask = None
        if packet.mask is not None:
            mask = {k: v.clone() for k, v in packet.mask.items()}
        send[name] = Packet(values, mask)
    return replace(task, send=send)


def with_memory(run: Run, task: Task, report: Report, remembered: Mapping[str, Tree]) -> Answer:
    """The report, once what the client remembers is written as a new version.

    It counts when the round loop accepts the report, not before.
    """
    if not remembered:
        return report
    try:
        version = run.memory.write(task.to, task.round, task.verb, remembered, task.memory)
    except (FedgroveError, OSError):
        # A full disk is not the client's fault, and ends the run.
        raise
    except Exception as error:
        # Such as a tree that is none.
        return crashed(task, error)
    return replace(report, memory=version)


def with_cost(
    run: Run,
    task: Task,
    outcome: Answer,
    broadcasts: BroadcastCosts,
    counted: Mapping[str, CostByPart] = NO_COSTS,
) -> Answer:
    """The answer with what its messages cost; a report that cannot be written is lost.

    ``counted``: what some of its packets take, where that is known.
    """
    down = count_task(task, run.method.codec, run.known_state, broadcasts)
    if isinstance(outcome, Lost):
        return replace(outcome, cost={"down": down})
    try:
        up = count_report(task, outcome, run.method.codec, run.known_state, counted)
    except Exception as error:
        return replace(unreadable(task, error), cost={"down": down})
    return replace(outcome, cost={"down": down, "up": up})


# ---- why a task is lost --------------------------------------------------------------------------


def crashed(task: Task, error: BaseException) -> Lost:
    """The client's work ended with an error."""
    return Lost(task.to, "crashed", f"client {task.to} could not {task.verb}: {explained(error)}")


def unreadable(task: Task, error: BaseException) -> Lost:
    """The reply could not be written as bytes, or read."""
    sentence = f"the reply of client {task.to} cannot be read: {explained(error)}"
    return Lost(task.to, "unreadable", sentence)


def late(task: Task, timeout: float) -> Lost:
    """There was no answer in time."""
    return Lost(task.to, "late", f"client {task.to} did not answer within {timeout:g} s.")


def _first_line(error: BaseException) -> str:
    """What an error says, in one line that is not too long."""
    try:
        lines = str(error).strip().splitlines()
    except Exception:
        return "an error that cannot say what it is"
    line = lines[0] if lines else ""
    return line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]} ..."


def explained(error: BaseException) -> str:
    """An error as a sentence; with the place where it was raised, unless fedgrove meant it."""
    text = _first_line(error).rstrip(".")
    if isinstance(error, FedgroveError):
        return f"{text}."
    frames = traceback.extract_tb(error.__traceback__)
    place = f" (at {Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {text}{place}."


# ---- one client's work ---------------------------------------------------------------------------


def perform(run: Run, task: Task, memory: Mapping[str, Tree]) -> tuple[Report, Mapping[str, Tree]]:
    """Do a task: the report, and what the client remembers from now on (empty if unchanged)."""
    client = run.client(task, dict(memory))
    outcome, computed = do_stages(run, task, client)
    remembered = all_remembered(task, memory, outcome)
    macs = 0
    for stage, per_example in computed:
        macs += per_example * examples_seen(run, stage, client)
    report = Report(task.to, outcome.give, client.info.examples, outcome.metrics, macs=macs)
    return report, remembered


Computed = list[tuple[Train | Measure, int]]
"""The stages that compute, each with its multiply-accumulates per example."""


def do_stages(run: Run, task: Task, client: Client) -> tuple[Outcome, Computed]:
    """All stages of a task: what leaves the client, and what it computed."""
    dtype = next(iter(run.params.values())).dtype
    carry = initial_carry(task, client.memory, dtype, run.marks(client))
    outcome = Outcome()
    computed: Computed = []
    # What is protected is the change of what was sent, which work might alter in place.
    received = _copied(task) if run.privacy else task
    with single_thread(), preserve_rng():
        for number, stage in numbered(run.work(task.verb)):
            if isinstance(stage, Train | Measure):
                carry, per_example = worked(run, stage, carry, client, number)
                computed.append((stage, per_example))
            elif isinstance(stage, Edit):
                carry = stage.f(carry, client)
            elif isinstance(stage, Give):
                outcome = given(run, received, stage, carry, client)
    return outcome, computed


def given(run: Run, task: Task, stage: Give, carry: Carry, client: Client) -> Outcome:
    """What leaves a client, and what it remembers; with ``--privacy`` clipped and noised."""
    outcome = stage.f(carry, client)
    if run.privacy is None:
        return outcome
    return protect(run, task, stage.expected(task, run.net), outcome, client)


def all_remembered(task: Task, memory: Mapping[str, Tree], outcome: Outcome) -> Mapping[str, Tree]:
    """What a client remembers after its work, also from before; empty if it is as it was."""
    if not outcome.memory:
        return {}
    # The scoring itself keeps a model.
    if task.verb not in SCORING_VERBS:
        check_names(outcome.memory, "a memory")
    return {**memory, **outcome.memory}


def worked(
    run: Run, stage: Train | Measure, carry: Carry, client: Client, number: int
) -> tuple[Carry, int]:
    """A Train or Measure stage, the ``number``-th of its kind; torch's generator is moved.

    Beside the carry: the multiply-accumulates that it took for one example.
    """
    net = run.net_named(stage.net)
    if isinstance(stage, Train):
        # Dropout draws from torch's global generator, seeded anew per stage: the same bits in any
        # process.
        torch.default_generator.manual_seed(seeds.derive(client.seed, "noise", number))
        result = trained(net, stage, carry, local.epochs(net, stage, client, number))
        # Found before, and remembered.
        thin = find_small_net(net, carry.get(stage.mask_name))
        return result, macs_per_example(net, stage, thin)
    # Most networks draw nothing in eval mode. One that does must not depend on what was drawn
    # before, in this process or another.
    torch.default_generator.manual_seed(seeds.derive(client.seed, "measure", number))
    measured = _measured(run, stage, carry, client, number)
    return {**carry, stage.name: measured}, macs_per_example(net, stage, None)


def trained(net: Net, stage: Train, carry: Carry, batches: Iterable[Batch]) -> Carry:
    """A Train stage; under a mask that removes whole channels it runs on the smaller net.

    The same result as training masked, but for the order of sums; dropout draws fewer bits, and
    agrees in distribution.
    """
    thin = find_small_net(net, carry.get(stage.mask_name))
    if thin is None:
        return local.train(net, stage, carry, batches)
    small = local.train(thin.net, stage, thin.narrow_carry(carry, stage.whole), batches)
    return {**carry, stage.end: thin.widen(small[stage.end]), "aux": thin.widen(small["aux"])}


def macs_per_example(net: Net, stage: Train | Measure, thin: SmallNet | None) -> int:
    """The multiply-accumulates of a stage for one example, each time that it is seen.

    Of training, those of the net that is really trained, ``thin`` where there is one; a Measure
    runs in full width. Frozen layers count once: nothing goes back through those in front.
    """
    if isinstance(stage, Train):
        forward = net.layout.macs if thin is None else thin.macs(net.layout)
        frozen = net.layout.frozen_macs
        step = GRADIENT_PASSES * (forward - frozen) + frozen
        return step + stage.objective.more_macs(net, forward)
    passes: int | Callable[[Net], int] = getattr(stage.f, "passes", 1)
    if callable(passes):
        passes = passes(net)
    return passes * net.layout.macs


def examples_seen(run: Run, stage: Train | Measure, client: Client) -> int:
    """How many examples a stage works on; each counts anew in every epoch."""
    over, epochs = pass_of(run.nets[stage.net], stage)
    return epochs * over.seen(len(getattr(client.data, over.split)))


def pass_of(net: Net, stage: Train | Measure) -> tuple[Batches, int]:
    """Which examples a stage goes through, and how often."""
    if isinstance(stage, Train):
        return local.batches_of(net, stage), local.recipe(stage).epochs
    return stage.over, 1


def numbered(stages: Sequence[Stage]) -> Iterator[tuple[int, Stage]]:
    """Stages with their position among those of their kind, which seeds depend on.

    So an additional Edit does not change what a Train draws: a method with its features off is
    FedAvg to the bit.
    """
    seen: Counter[type[Stage]] = Counter()
    for stage in stages:
        yield seen[type(stage)], stage
        seen[type(stage)] += 1


def _measured(run: Run, stage: Measure, carry: Carry, client: Client, number: int) -> Tree:
    """The sum over batches; empty if there are none."""
    total: Tree | None = None
    with torch.no_grad():
        for batch in client.batches(stage.over, number):
            value = stage.f(run.net_named(stage.net), carry[stage.of], batch, carry)
            total = value if total is None else trees.map(torch.add, total, value)
    return {} if total is None else total
