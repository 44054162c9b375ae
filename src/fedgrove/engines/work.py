"""The work of one client, stage by stage. Every engine on a CPU calls :func:`perform`."""

from __future__ import annotations

import math
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
    OPTIMISER_PREFIX,
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
from ..errors import FedgroveError, UnexpectedReport
from ..nets import Net
from ..parts import local
from ..runs.privacy import protect
from ..runs.run import Run
from ..seeds import preserve_rng, single_thread
from ..trees import Tree
from ..wire.codec import CostByPart
from ..wire.message_costs import NO_COSTS, BroadcastCosts, count_report, count_task


def make_carry(
    task: Task, memory: Mapping[str, Tree], dtype: torch.dtype, marks: Tree | None = None
) -> Carry:
    """Return the carry with which an engine starts a task (see :mod:`fedgrove.core`).

    Args:
        task: The task.
        memory: The trees that the client remembers.
        dtype: The type of the task's numbers.
        marks: ``carry["client"]``: the client's labels and task, if it has them.
    """
    carry: Carry = {}
    for name, tree in memory.items():
        # No method sees optimiser states: a Train stage that keeps one finds it in the memory.
        if not name.startswith(OPTIMISER_PREFIX):
            carry[name] = tree
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
"""At most this many characters of an error message are kept."""
CLIENT_FAILURES = (Exception, SystemExit, GeneratorExit)
"""Errors in a client's work that only lose its own task. Ctrl-C is not one of them."""


def do_task(run: Run, task: Task, broadcasts: BroadcastCosts, timeout: float | None) -> Answer:
    """Do a client's task in this process, from its memory to the bytes of its report."""
    started = time.monotonic()
    # Copies: work that changes what it was sent, in place, must not change the server's model.
    outcome = perform_and_remember(run, _copy_task(task))
    seconds = time.monotonic() - started
    counted = add_cost(run, task, outcome, broadcasts)
    if timeout is None or seconds <= timeout:
        return counted
    # The work cannot be interrupted here. It is dropped after it is done, and its reply counts.
    return replace(lose_late(task, timeout), cost=counted.cost)


def perform_and_remember(run: Run, task: Task) -> Answer:
    """Do a client's task from its stored memory to its new one; an error only loses the task."""
    memory = run.memory.read(task.to, task.memory)
    try:
        report, remembered = perform(run, task, memory)
    except CLIENT_FAILURES as error:
        return lose_crashed(task, error)
    return store_memory(run, task, report, remembered)


def _copy_task(task: Task) -> Task:
    """Return the task with copies of its packets, as a client on another machine gets it."""
    send = {}
    for name, packet in task.send.items():
        values = trees.map(torch.Tensor.clone, packet.values)
        mask = packet.mask
        if mask is not None:
            mask = trees.map(torch.Tensor.clone, mask)
        send[name] = Packet(values, mask)
    return replace(task, send=send)


def _lose_diverged(task: Task, report: Report, remembered: Mapping[str, Tree]) -> Lost | None:
    """Return the loss of a task whose training diverged: the client keeps what it had before.

    Only what is remembered is looked at, where it is about to be written, and the numbers of the
    report. The gate looks at the packets, on the GPU if they are there.
    """
    what = ""
    for name, tree in remembered.items():
        if not trees.is_finite(tree):
            what = f"weights of its tree {name!r} are"
    for name, number in report.metrics.items():
        if "loss" in name and not math.isfinite(number):
            what = f"its {name} is"
    if not what:
        return None
    return Lost(
        task.to,
        "diverged",
        f"training diverged at client {task.to}: {what} infinite or not a number, and the client "
        "keeps its previous model; a lower learning rate (lr) or a gradient clip may help.",
    )


def store_memory(run: Run, task: Task, report: Report, remembered: Mapping[str, Tree]) -> Answer:
    """Write what the client remembers after a task; return the report with its version.

    If that is not finite, the task is lost as "diverged" and nothing is written.

    The version is used only after the round loop has accepted the report.
    """
    try:
        lost = _lose_diverged(task, report, remembered)
        if lost is not None:
            return lost
        if not remembered:
            return report
        version = run.memory.write(task.to, task.round, task.verb, remembered, task.memory)
    except (FedgroveError, OSError):
        # A full disk is not the client's fault; it ends the run.
        raise
    except Exception as error:
        # For example, the method returned something else than a tree.
        return lose_crashed(task, error)
    return replace(report, memory=version)


def add_cost(
    run: Run,
    task: Task,
    outcome: Answer,
    broadcasts: BroadcastCosts,
    counted: Mapping[str, CostByPart] = NO_COSTS,
) -> Answer:
    """Return the engine's answer with the bytes of its messages.

    A report that cannot be encoded is lost.

    Args:
        run: The run.
        task: The task.
        outcome: The answer.
        broadcasts: The costs of packets that go to several clients.
        counted: The costs of packets of the report that are already known.
    """
    down = count_task(task, run.method.codec, run.known_state, broadcasts)
    if isinstance(outcome, Lost):
        return replace(outcome, cost={"down": down})
    try:
        up = count_report(task, outcome, run.method.codec, run.known_state, counted)
    except Exception as error:
        return replace(lose_unreadable(task, error), cost={"down": down})
    return replace(outcome, cost={"down": down, "up": up})


# ---- why a task is lost --------------------------------------------------------------------------


def lose_crashed(task: Task, error: BaseException) -> Lost:
    """Return the loss of a task whose work ended with an error in the engine."""
    return Lost(
        task.to, "crashed", f"client {task.to} could not {task.verb}: {explain_error(error)}"
    )


def lose_unreadable(task: Task, error: BaseException) -> Lost:
    """Return the loss of a task whose reply could not be encoded or read."""
    sentence = f"the reply of client {task.to} cannot be read: {explain_error(error)}"
    return Lost(task.to, "unreadable", sentence)


def refuse_undecoded(task: Task, error: UnexpectedReport) -> Lost:
    """Return the loss of a task whose answer was refused before it was decoded."""
    return Lost(task.to, error.reason, f"client {task.to} sent {error}")


def lose_late(task: Task, timeout: float) -> Lost:
    """Return the loss of a task that was not answered in time."""
    return Lost(task.to, "late", f"client {task.to} did not answer within {timeout:g} s.")


def _first_line(error: BaseException) -> str:
    """Return the first line of an error's message, shortened if it is long."""
    try:
        lines = str(error).strip().splitlines()
    except Exception:
        return "an error without a readable message"
    line = lines[0] if lines else ""
    return line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]} ..."


def explain_error(error: BaseException) -> str:
    """Return an error in a client's work as a sentence, with the line that raised it.

    fedgrove's own errors are sentences already and need no line of code.
    """
    text = _first_line(error).rstrip(".")
    if isinstance(error, FedgroveError):
        return f"{text}."
    frames = traceback.extract_tb(error.__traceback__)
    place = f" (at {Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {text}{place}."


# ---- one client's work ---------------------------------------------------------------------------


def perform(run: Run, task: Task, memory: Mapping[str, Tree]) -> tuple[Report, Mapping[str, Tree]]:
    """Do the work of a task in an engine: all stages of one client.

    Args:
        run: The run.
        task: The task.
        memory: The trees that the client remembers.

    Returns:
        The report, and the trees that the client remembers now; no trees if nothing changed.
    """
    client = run.client(task, dict(memory))
    outcome, computed = run_stages(run, task, client)
    remembered = merge_memory(task, memory, outcome)
    macs = 0
    for stage, per_example in computed:
        macs += per_example * count_examples(run, stage, client)
    report = Report(task.to, outcome.give, client.info.examples, outcome.metrics, macs=macs)
    return report, remembered


Computed = list[tuple[Train | Measure, int]]
"""The Train and Measure stages of a task, each with its multiply-accumulates per example."""


def run_stages(run: Run, task: Task, client: Client) -> tuple[Outcome, Computed]:
    """Run all stages of a task; return the outcome, and what was computed."""
    dtype = next(iter(run.params.values())).dtype
    carry = make_carry(task, client.memory, dtype, run.marks(client))
    outcome = Outcome()
    computed: Computed = []
    states: dict[str, Tree] = {}
    # Privacy protects the difference from what was sent, and work may change that in place.
    received = _copy_task(task) if run.privacy else task
    with single_thread(), preserve_rng():
        for number, stage in number_stages(run.work(task.verb)):
            if isinstance(stage, Train | Measure):
                carry, per_example = run_stage(run, task, stage, carry, client, number, states)
                computed.append((stage, per_example))
            elif isinstance(stage, Edit):
                carry = stage.f(carry, client)
            elif isinstance(stage, Give):
                outcome = finish_work(run, received, stage, carry, client)
    if states:
        outcome = replace(outcome, states=states)
    return outcome, computed


def finish_work(run: Run, task: Task, stage: Give, carry: Carry, client: Client) -> Outcome:
    """Run the last stage; with ``--privacy`` clip what leaves the client and add noise."""
    outcome = stage.f(carry, client)
    if run.privacy is None:
        return outcome
    return protect(run, task, stage.expected(task, run.net), outcome, client)


def merge_memory(task: Task, memory: Mapping[str, Tree], outcome: Outcome) -> Mapping[str, Tree]:
    """Return all that a client remembers after its stages; nothing if that did not change."""
    if not outcome.memory and not outcome.states:
        return {}
    # Scoring itself keeps a model under a reserved name.
    if task.verb not in SCORING_VERBS:
        check_names(outcome.memory, "a memory")
    return {**memory, **outcome.memory, **outcome.states}


def run_stage(
    run: Run,
    task: Task,
    stage: Train | Measure,
    carry: Carry,
    client: Client,
    number: int,
    states: dict[str, Tree],
) -> tuple[Carry, int]:
    """Run a Train or Measure stage of one client in an engine.

    This reseeds torch's global generator.

    Args:
        run: The run.
        task: The client's task.
        stage: The stage.
        carry: The carry before the stage.
        client: The client.
        number: The position of the stage among those of its kind; its seed depends on it.
        states: The optimiser states that the stages of the task keep; this stage adds its own.

    Returns:
        The carry after the stage, and its multiply-accumulates for one example.
    """
    net = run.net_named(stage.net)
    if isinstance(stage, Train):
        # Dropout draws from torch's global generator. It is reseeded for each stage, so that every
        # process draws the same bits.
        torch.default_generator.manual_seed(seeds.derive(client.seed, "noise", number))
        place = local.place_of_state(task.verb, number)
        state = local.find_state(net, stage, carry, client.memory, place)
        batches = local.epochs(net, stage, client, number)
        trained = train_shrunk(net, stage, {**carry, **state}, batches)
        result, kept = local.take_state(trained, place)
        states.update(kept)
        # Cached: training has just looked it up.
        thin = find_small_net(net, carry.get(stage.mask_name))
        return result, count_macs(net, stage, thin)
    # Most networks draw nothing in eval mode. One that does must not depend on what was drawn
    # before, in this process or another.
    torch.default_generator.manual_seed(seeds.derive(client.seed, "measure", number))
    measured = _sum_batches(run, stage, carry, client, number)
    return {**carry, stage.name: measured}, count_macs(net, stage, None)


def train_shrunk(net: Net, stage: Train, carry: Carry, batches: Iterable[Batch]) -> Carry:
    """Run a Train stage in an engine, on a smaller network if the mask removes channels.

    The result equals that of masked training up to the order of sums. Dropout draws fewer bits, so
    with dropout only the distribution is equal.
    """
    thin = find_small_net(net, carry.get(stage.mask_name))
    if thin is None:
        return local.train(net, stage, carry, batches)
    small = local.train(thin.net, stage, thin.narrow_carry(carry, stage.whole), batches)
    trained = {stage.end: small[stage.end], "aux": small["aux"]}
    for name, tree in small.items():
        if name.startswith(OPTIMISER_PREFIX):
            trained[name] = tree
    return {**carry, **{name: thin.widen(tree) for name, tree in trained.items()}}


def count_macs(net: Net, stage: Train | Measure, thin: SmallNet | None) -> int:
    """Count the multiply-accumulates of a stage that an engine runs, for one example and epoch.

    Training counts the network that is really trained, which is ``thin`` if there is one. Measuring
    runs at full width. Frozen layers count once, because no gradient goes back through them.
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


def count_examples(run: Run, stage: Train | Measure, client: Client) -> int:
    """Count the examples that a stage sees when an engine runs it, once per epoch."""
    over, epochs = find_pass(run.nets[stage.net], stage)
    return epochs * client.count_seen(over)


def find_pass(net: Net, stage: Train | Measure) -> tuple[Batches, int]:
    """Return which examples an engine feeds to a stage, and in how many epochs."""
    if isinstance(stage, Train):
        return local.batches_of(net, stage), local.recipe(stage).epochs
    return stage.over, 1


def number_stages(stages: Sequence[Stage]) -> Iterator[tuple[int, Stage]]:
    """Yield each stage that an engine runs with its position among those of its kind.

    Seeds depend on that position.

    An additional Edit therefore does not change what a Train stage draws: a method with its
    features off equals FedAvg to the bit.
    """
    seen: Counter[type[Stage]] = Counter()
    for stage in stages:
        yield seen[type(stage)], stage
        seen[type(stage)] += 1


def _sum_batches(run: Run, stage: Measure, carry: Carry, client: Client, number: int) -> Tree:
    """Return the sum over batches; an empty tree if there are none."""
    total: Tree | None = None
    with torch.no_grad():
        for batch in client.batches(stage.over, number):
            value = stage.f(run.net_named(stage.net), carry[stage.of], batch, carry)
            total = value if total is None else trees.map(torch.add, total, value)
    return {} if total is None else total
