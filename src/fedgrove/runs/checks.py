"""Checks before a run begins: the method fits the network, and loss and metric work on the data.

A metric that gives a table where it should give a column is not an error to torch: it broadcasts,
and every score is wrong. One that raises would end the run after its last round.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import methods, nets
from ..channels.submodel import groups_from_plain
from ..core import Train, WithNotes, WithPrediction, WithTrainedStart, WithTuning
from ..data import ClientData, Federation
from ..errors import FedgroveError, InputError, UnfitError, list_some
from ..metrics import Metric, as_numbers
from ..parts.objective import Objective, check_fits, check_whole
from ..problems import MixedProblem, Problem, client_marks, restrict_outputs
from ..trees import Tree
from .guard import check_state, describe_error, explain_errors
from .per_task import states_by_task

if TYPE_CHECKING:
    from .run import Run

# ---- the method and the network ------------------------------------------------------------------

PARTLY = 0.5
"""Below this share of parameters that channels reach, a note says what stays whole."""


def check_fit(run: Run) -> None:
    """Check a run before its first round: its method must accept its network.

    What it refuses is refused with both names.
    """
    try:
        with explain_errors(run.method, "nets"):
            _ = run.nets
        _check_training(run)
        _check_finetuning(run)
        with explain_errors(run.method, "init"):
            state = run.initial_state
        check_state(run.method, "init", state)
    except UnfitError as error:
        method = methods.name_of(run.method)
        raise InputError(f"{method} cannot be used with net {_net_name(run)}: {error}") from None


def _check_training(run: Run) -> None:
    """Refuse a loss for classes if there are none, and networks that do not exist.

    And augmentation of inputs that are no images.
    """
    local = run.method.local
    shape = run.net.shape
    if local is not None and local.augment is not None and len(shape) != 3:
        raise InputError(
            f"local.augment is set, and inputs have the shape {shape}; it changes images, "
            "(channels, height, width). Leave it out (--set local.augment=none)."
        )
    own = getattr(run.method, "objective", None)
    # The objective that a method has by default is what it needs, as LogitCalibration of FedLC.
    is_replaced = type(own) is not type(getattr(type(run.method), "objective", None))
    if isinstance(own, Objective) and is_replaced:
        check_whole(own)
    objectives = [own]
    try:
        stages = run.work("train")
    except Exception:
        # It has no such verb; or an error, which a client reports when it trains.
        stages = ()
    for stage in stages:
        if isinstance(stage, Train):
            run.net_named(stage.net)
            objectives.append(stage.objective)
    for objective in objectives:
        if isinstance(objective, Objective):
            check_fits(objective, run.net.problem)


def _check_finetuning(run: Run) -> None:
    """Refuse to fine-tune a model that may have no part in what a client predicts."""
    names_tree = isinstance(run.method, WithTuning)
    if isinstance(run.method, WithPrediction) and not names_tree and max(run.finetune) > 0:
        raise InputError(
            f"finetune is {','.join(map(str, run.finetune))}; {methods.name_of(run.method)} "
            "has its own way to predict, and does not name what to fine-tune. Give 0, or give the "
            'method the name of a tree of its carry: tuned = "model".'
        )


def check_stages(run: Run) -> None:
    """Check before a run that the work of "use" is made of stages."""
    try:
        run.work("use")
    except FedgroveError as error:
        raise InputError(str(error)) from None
    except Exception:
        # An error in the method's code, which a client reports when it works.
        return


def make_notes(run: Run, state: Any, density: float | None) -> list[str]:
    """Return a run's notes on how the method treats the network; none for most.

    Args:
        run: The run.
        state: Its last state.
        density: The mean density of the models; None without scores.
    """
    layout = run.net.layout
    name = _net_name(run)
    notes = []
    if run.origin is not None:
        head = ", its head from scratch" if run.origin.body else ""
        notes.append(
            f"{name} started from the weights in {run.origin.path}{head}; every device has them, "
            "and sending them is not counted"
        )
    starts_trained = isinstance(run.method, WithTrainedStart) and run.method.starts_trained
    if run.origin is None and starts_trained:
        notes.append(
            f"{methods.name_of(run.method)} started from scratch, but its paper starts from "
            "trained weights: no init= was given"
        )
    if layout.frozen:
        why = f"freeze={run.frozen:g}" if run.frozen else "requires_grad=False"
        notes.append(
            f"{list_some(layout.frozen)} of {name} are frozen ({why}): they do not change and are "
            "not sent"
        )
    if run.frozen and run.origin is None:
        notes.append(f"the frozen layers of {name} are random: no init= was given")
    if layout.state:
        notes.append(
            f"{list_some(layout.state)} of {name} change in its forward pass: every call starts "
            "from the values before training, because all clients share one module"
        )
    is_pruned = density is not None and density < 1
    if is_pruned and layout.never_pruned:
        notes.append(
            f"{list_some(layout.never_pruned)} of {name} are not in a layer whose weights are "
            "pruned: they stay dense, and density does not count them"
        )
    notes += _note_channels(run, state)
    if isinstance(run.method, WithNotes):
        with explain_errors(run.method, "notes"):
            notes += run.method.notes(run.net)
    return notes


def _note_channels(run: Run, state: Any) -> list[str]:
    """Return a note if a method removes channels and most of the network has none."""
    # The network is the same for all tasks, if they are kept apart.
    first = next(iter(states_by_task(state).values()))
    structure = getattr(first, "structure", None)
    if not structure:
        return []
    reached: set[str] = set()
    groups = groups_from_plain(structure)
    for group in groups:
        reached.update(place.tensor for place in group.places)
    layout = run.net.layout
    share = layout.count(reached & set(layout.params)) / layout.size
    if share >= PARTLY:
        return []
    makers = list_some([group.name for group in groups])
    return [
        f"channels can be removed from {makers} only: {1 - share:.0%} of the parameters of "
        f"{_net_name(run)} are not in a removable channel, and are kept in every model"
    ]


def _net_name(run: Run) -> str:
    return type(run.net.module).__name__


# ---- loss and metric -----------------------------------------------------------------------------

SIZES = (2, 7)
"""Two batch sizes: what is right for one by chance, such as two outputs, is not for both."""
TRIED = 3
"""How many clients are tried, if the data of the first cannot be made."""


def check_problem(run: Run) -> None:
    """Check before a run that loss and metric give a number for each example."""
    federation = run.federation
    problem = federation.problem
    if not federation.is_lazy:
        # Clients that are made when they are needed are checked when they are made.
        for data in federation.clients.values():
            _check_labels(federation, data)
    if not isinstance(problem, MixedProblem):
        client = _find_client(federation)
        if client is not None:
            _try_problem(run, problem, client)
        return
    for number, task in enumerate(problem.tasks):
        own = (k for k in federation.ids if federation.info(k).task == task.name)
        for k in islice(own, 1):
            _try_problem(run, task.problem, federation.client(k), number)


def _check_labels(federation: Federation, client: ClientData) -> None:
    """Refuse a client's own labels that do not fit, or that no target can have."""
    if client.labels is None:
        return
    task = client.info.task
    client_marks(federation.problem, federation.classes, client.labels, task)
    # A user's own problem does not declare its targets; numbers show themselves.
    y = client.train.y
    is_yes_or_no = bool(((y == 0) | (y == 1)).all())
    if not federation.problem.for_task(task).kind and y.is_floating_point() and not is_yes_or_no:
        raise InputError("a client has labels, but its targets are numbers; leave the labels out.")


def _find_client(federation: Federation) -> ClientData | None:
    """Return the first client whose data can be made; one without data is lost in training."""
    for k in islice(federation.ids, TRIED):
        try:
            return federation.client(k)
        except FedgroveError:
            raise
        except Exception:
            continue
    return None


def _try_problem(run: Run, problem: Problem, client: ClientData, task: int | None = None) -> None:
    """Try loss and metric on a few examples of a client."""
    examples = max((client.train, client.validation, client.test), key=len)
    if not len(examples):
        return
    federation = run.federation
    own = client_marks(federation.problem, federation.classes, client.labels, client.info.task)
    rows = torch.arange(SIZES[-1]) % len(examples)
    outputs = _run_untrained(run, examples.x[rows])
    y = examples.y[rows]
    if task is not None:
        assert isinstance(federation.problem, MixedProblem)
        mine = federation.problem.tasks[task]
        outputs, y = mine.select(outputs, y, torch.tensor(True))
        own = mine.select_marks(own)
    found: list[dict[str, Tensor]] = []
    with torch.random.fork_rng(devices=[]):
        # The largest last, and twice: what is drawn at random differs by itself.
        for size in (*SIZES, SIZES[-1]):
            some = outputs[:size]
            losses = _try_loss(problem, some, y[:size], own)
            numbers = _try_metric(problem.metric, restrict_outputs(some, own), y[:size])
            found.append({f"the loss of {problem.name}": losses, **numbers})
    few, many, again = found
    for what, number in many.items():
        has_other_shape = number.shape[1:] != few[what].shape[1:]
        is_random = not torch.equal(number, again[what])
        if has_other_shape or not (is_random or _are_close(number[: SIZES[0]], few[what])):
            raise InputError(
                f"{what} of an example changes with the other examples of its batch; it must "
                "depend only on the example, because batches may be padded. "
                f"{_show_shapes(outputs, y)}"
            )


def _are_close(some: Tensor, other: Tensor) -> bool:
    if not some.is_floating_point():
        return torch.equal(some, other)
    rounding = torch.finfo(some.dtype).eps ** 0.5
    return torch.allclose(some, other, rtol=rounding, atol=rounding, equal_nan=True)


def _run_untrained(run: Run, x: Tensor) -> Tensor:
    """Return the outputs of the untrained network, or of a copy if a pass may change it."""
    net = run.net if nets.is_built_in(run.net.module) else copy.deepcopy(run.net)
    dtype = next(iter(run.params.values())).dtype
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            return net(net.params(), x.to(dtype), train=False).logits
        except Exception as error:
            raise InputError(
                f"net {_net_name(run)} could not be run on the data of a client, "
                f"{describe_error(error)}; its inputs are {x.dtype} of shape {tuple(x.shape)}."
            ) from error


def _try_loss(problem: Problem, outputs: Tensor, y: Tensor, own: Tree) -> Tensor:
    """Return the losses, after checking that there is one for each example."""
    what = f"the loss of {problem.name}"
    given = outputs.clone().requires_grad_()
    losses: Tensor = _try_call(what, problem.loss, restrict_outputs(given, own), y)
    _check_tensor(what, losses, outputs, y)
    if not losses.requires_grad:
        raise InputError(
            f"{what} has no gradient with respect to the outputs; compute it from them, without "
            "detach, item, numpy or a comparison."
        )
    return losses.detach()


def _try_metric(metric: Metric, outputs: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Return the metric's numbers by what they are, after checking them."""
    what = f"the metric {metric.name}"
    numbers = _try_call(what, metric.of_examples, outputs.clone(), y)
    found = {what: numbers}
    if isinstance(numbers, Mapping):
        found = {f"{what}, {name},": number for name, number in numbers.items()}
    for name, number in found.items():
        _check_tensor(name, number, outputs, y)
        # A number for each output is averaged; anything else is a slip, such as (n, 1) - (n,).
        if number.dim() > 1 and number.shape != outputs.shape:
            raise InputError(
                f"{name} gives a tensor of shape {tuple(number.shape)} for {len(y)} examples; it "
                f"must give one number for each, ({len(y)},). {_show_shapes(outputs, y)}"
            )
    tree = metric.sums(outputs.clone(), y, torch.ones(len(y), dtype=outputs.dtype))
    sums = {name: as_numbers(value) for name, value in tree.items()}
    value = _try_call(f"the value of {what}", metric.value, {**sums, "total": float(len(y))})
    lowest, highest = metric.value_range
    try:
        is_valid = math.isfinite(value) and lowest <= float(value) <= highest
    except (TypeError, ValueError):
        is_valid = False
    if not is_valid and bool(torch.isfinite(outputs).all()):
        allowed = "a finite number"
        if metric.share:
            allowed = "a number between 0 and 1, as it is a share"
        raise InputError(f"the value of {what} is {value!r}; it must be {allowed}.")
    return found


def _check_tensor(what: str, numbers: Any, outputs: Tensor, y: Tensor) -> None:
    """Refuse what is not a tensor of real numbers with one row for each example."""
    if not isinstance(numbers, Tensor):
        raise InputError(
            f"{what} gives a {type(numbers).__name__}; it must give a tensor of one number for "
            "each example."
        )
    has_rows = numbers.dim() > 0 and len(numbers) == len(y)
    if not has_rows or numbers.is_complex():
        raise InputError(
            f"{what} gives {numbers.dtype} of shape {tuple(numbers.shape)} for {len(y)} examples; "
            f"it must give a real number for each, ({len(y)},): the library takes their mean."
        )
    # Of inputs that are not finite nothing else can be expected.
    is_finite = bool(torch.isfinite(numbers).all())
    if not is_finite and bool(torch.isfinite(outputs).all()):
        raise InputError(
            f"{what} is not finite on the first examples of a client and the outputs of the "
            "untrained network; it must be."
        )


def _show_shapes(outputs: Tensor, y: Tensor) -> str:
    return (
        f"Here outputs are {tuple(outputs.shape)} and y is {tuple(y.shape)}: give them one shape, "
        "for example with y.reshape(outputs.shape), and take the mean over the numbers of one "
        "example."
    )


def _try_call(what: str, f: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return f(*arguments)
    except FedgroveError:
        raise
    except Exception as error:
        raise InputError(
            f"{what} could not be computed on a few examples, {describe_error(error)}."
        ) from error
