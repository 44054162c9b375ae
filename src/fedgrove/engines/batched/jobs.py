"""Jobs under way, and which of them can be stacked: equal stages, equal shapes, similar widths.

Runs that differ only in floats share a stack. :func:`to_template` takes every float out of a stage
(learning rate, mu, decay, clip ...) and leaves a hashable template; :func:`from_template` builds
the stage again with floats or tensors in their place. Under ``vmap`` each client's stage then has
that client's values. Parts read ``self.mu`` as always; they must only not branch on it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ...channels.shrink import find_small_net
from ...channels.small_net import SmallNet
from ...core import Carry, Client, Lost, Measure, Outcome, Stage, Task, Train
from ...runs.run import Run
from ...seeds import single_thread
from ...trees import Tree
from ..work import CLIENT_FAILURES, count_examples, count_macs, find_pass, lose_crashed, run_stage

WIDTH_CLASSES = 4
"""Clients train together if they keep about the same share of channels, in this many classes.

The widths of a stack's layers are rounded up to multiples of full width / WIDTH_CLASSES. More
classes would waste less, but every new width is a new shape, for which kernels are chosen and a
graph is captured. This takes as long as tens of rounds, and masks that change lose a few channels
in every round."""
LITTLE_WORK = 1 << 34
"""Multiply-accumulates of a step of all clients, up to which a GPU mostly waits for kernels
to start. One stack in full width then takes less time than several narrow ones, and is neither
narrowed before nor widened after."""


@dataclass(frozen=True, eq=False)
class Work:
    """What the clients of a run do for a verb."""

    stages: tuple[tuple[int, Stage], ...]
    """Each stage with its number among the stages of its type, which seeds depend on."""
    key: Any
    """What jobs must share to be stacked: the networks and the stages' templates."""
    templates: tuple[tuple[Any, tuple[float, ...]], ...] = ()
    """The template and hyperparameters of each stage; only stacked stages use them."""


@dataclass(eq=False)
class ClientJob:
    """A task under way in the batched engine."""

    run: Run
    task: Task
    client: Client
    carry: Carry
    work: Work
    outcome: Outcome = field(default_factory=Outcome)
    states: dict[str, Tree] = field(default_factory=dict)
    """The optimiser states that its stages have kept so far."""
    lost: Lost | None = None
    """Why the work ended early; None: it did not."""
    macs: int = 0
    """Multiply-accumulates so far, counted as if the client worked alone."""
    thin: SmallNet | None = None
    """The smaller net that the current stage can train in place of the masked one."""
    in_full_width: bool = False
    """Whether the client trains in full width, even if there is a smaller net."""


def split_into_stacks(
    jobs: Sequence[ClientJob], stage: Train | Measure, is_on_gpu: bool = False
) -> list[list[ClientJob]]:
    """Split jobs into stacks: trees of equal names and shapes, smaller nets of similar width.

    On a GPU small networks of any width share a stack. Sets every job's ``thin`` and
    ``in_full_width`` for this stage, and counts its multiply-accumulates. A job whose carry is not
    made of trees is lost.
    """
    any_width: dict[Any, list[ClientJob]] = {}
    # By id, because many clients share a tree.
    shapes: dict[int, Any] = {}
    for job in jobs:
        try:
            net = job.run.nets[stage.net]
            job.thin = None
            if isinstance(stage, Train):
                job.thin = find_small_net(net, job.carry.get(stage.mask_name))
            key = list_shapes(job.carry, shapes)
            # In the client's own width, not the stack's.
            per_example = count_macs(net, stage, job.thin)
            job.macs += per_example * count_examples(job.run, stage, job.client)
        except Exception as error:
            job.lost = lose_crashed(job.task, error)
            continue
        any_width.setdefault(key, []).append(job)
    stacks: list[list[ClientJob]] = []
    for together in any_width.values():
        is_little = is_on_gpu and is_little_work(together, stage)
        by_width: dict[int, list[ClientJob]] = {}
        for job in together:
            job.in_full_width = is_little
            width = WIDTH_CLASSES if is_little else width_class(job.thin)
            by_width.setdefault(width, []).append(job)
        stacks += by_width.values()
    return stacks


def is_little_work(jobs: Sequence[ClientJob], stage: Train | Measure) -> bool:
    """Return whether a step of all these clients, in full width, is too little for a GPU."""
    net = jobs[0].run.nets[stage.net]
    batches, _ = find_pass(net, stage)
    macs = len(jobs) * batches.size * count_macs(net, stage, None)
    return macs <= LITTLE_WORK


def width_class(thin: SmallNet | None) -> int:
    """Return a client's share of kept channels in steps of 1 / ``WIDTH_CLASSES``, rounded up."""
    if thin is None or not thin.channels:
        return WIDTH_CLASSES
    kept = 0
    total = 0
    for flags in thin.channels.values():
        kept += int(flags.sum())
        total += len(flags)
    return -(-WIDTH_CLASSES * kept // total)


def list_shapes(carry: Carry, known: dict[int, Any] | None = None) -> Any:
    """Return the names, shapes and types of a client's trees, as the key of its stack.

    All trees count, because an objective may read any of them, or test whether it exists: a client
    with a memory is not stacked with a new client.

    Args:
        carry: The trees.
        known: Caches the shapes by id of a tree, for trees that stay alive.
    """
    if known is None:
        known = {}
    shapes = []
    for name, tree in sorted(carry.items()):
        if id(tree) not in known:
            known[id(tree)] = tuple((k, tuple(v.shape), v.dtype) for k, v in tree.items())
        shapes.append((name, known[id(tree)]))
    return tuple(shapes)


def get_data_and_seed(job: ClientJob) -> tuple[int, int, int]:
    """Return the data's identity and the seed: duplicates agree in both."""
    return id(job.run.federation), job.task.to, job.client.seed


def run_alone(job: ClientJob, number: int) -> int:
    """Run a Train or Measure stage of one client exactly as the serial engine does.

    Returns:
        The multiply-accumulates, which the caller adds to the job's.
    """
    place, stage = job.work.stages[number]
    assert isinstance(stage, Train | Measure)
    try:
        with single_thread():
            job.carry, per_example = run_stage(
                job.run, job.task, stage, job.carry, job.client, place, job.states
            )
    except CLIENT_FAILURES as error:
        job.lost = lose_crashed(job.task, error)
        return 0
    return per_example * count_examples(job.run, stage, job.client)


# ---- stages as templates -------------------------------------------------------------------------


@dataclass(frozen=True)
class Slot:
    """Stands for the ``index``-th hyperparameter."""

    index: int


@dataclass(frozen=True)
class Template:
    """A dataclass whose floats are replaced by slots."""

    type: type[Any]
    fields: tuple[tuple[str, Any], ...]


def to_template(value: Any, hyperparameters: list[float]) -> Any:
    """Return the template of a stage or part; append its floats to ``hyperparameters``.

    >>> from fedgrove.parts.objective import Proximal
    >>> hyperparameters = []
    >>> first = to_template(Proximal(0.5), hyperparameters)
    >>> second = to_template(Proximal(0.1), hyperparameters)
    >>> first == second, hyperparameters
    (False, [0.5, 0.1])
    >>> to_template(Proximal(0.5), []) == to_template(Proximal(0.1), [])
    True
    """
    # A 0 stays in the template: it switches a term off, and code that skips the term tests for it.
    if isinstance(value, float) and value:
        hyperparameters.append(value)
        return Slot(len(hyperparameters) - 1)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = []
        for field in dataclasses.fields(value):
            fields.append((field.name, to_template(getattr(value, field.name), hyperparameters)))
        return Template(type(value), tuple(fields))
    if isinstance(value, tuple):
        return tuple(to_template(item, hyperparameters) for item in value)
    return value


def from_template(template: Any, hyperparameters: Any) -> Any:
    """Build the stage with ``hyperparameters[i]`` in place of its i-th float.

    >>> from fedgrove.parts.objective import Proximal
    >>> hyperparameters = []
    >>> template = to_template(Proximal(0.5), hyperparameters)
    >>> from_template(template, [2 * value for value in hyperparameters])
    Proximal(mu=1.0, to='model')
    """
    if isinstance(template, Slot):
        return hyperparameters[template.index]
    if isinstance(template, Template):
        # Not through __init__: its checks compare values, which a tensor under vmap cannot do.
        stage = object.__new__(template.type)
        for name, value in template.fields:
            object.__setattr__(stage, name, from_template(value, hyperparameters))
        return stage
    if isinstance(template, tuple):
        return tuple(from_template(item, hyperparameters) for item in template)
    return template
