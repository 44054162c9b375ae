"""One trial of loss and metric on a few examples of a client, before anything is written.

A metric that gives a table where it should give a column is not an error to torch: it broadcasts,
and every figure is wrong. One that raises would end the run after its last round.
"""

from __future__ import annotations

import copy
import math
import traceback
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import nets
from ..data import ClientData, Examples
from ..errors import FedgroveError, InputError
from ..problems import Metric, MixedProblem, Problem, client_marks, restrict_outputs
from ..trees import Tree

if TYPE_CHECKING:
    from .run import Run

SIZES = (2, 7)
"""Two batches, since what is right for one only by chance, such as two outputs, is not for both."""
TRIED = 3
"""How many clients are asked for data, where those of the first cannot be made."""


def check_stages(run: Run) -> None:
    """Refuse what a client does to use its model, if it is not made of stages."""
    try:
        run.work("use")
    except FedgroveError as error:
        raise InputError(str(error)) from None
    except Exception:
        # An error in the method's own code shows when a client is asked.
        return


def check_problem(run: Run) -> None:
    """Refuse a loss or a metric that does not give a number for each example."""
    federation = run.federation
    problem = federation.problem
    if not federation.is_lazy:
        # Those that are made when they are needed are checked when they are made.
        for data in federation.clients.values():
            _check_labels(run, data)
    if not isinstance(problem, MixedProblem):
        client = _some_client(run)
        if client is not None:
            _try(run, problem, client)
        return
    for number, task in enumerate(problem.tasks):
        own = (k for k in federation.ids if federation.info(k).task == task.name)
        for k in islice(own, 1):
            _try(run, task.problem, federation.client(k), number)


def _check_labels(run: Run, client: ClientData) -> None:
    """Refuse labels of a client's own that do not fit, or that no target can have."""
    if client.labels is None:
        return
    federation = run.federation
    task = client.info.task
    client_marks(federation.problem, federation.classes, client.labels, task)
    # A problem of the user's own says nothing of its targets; numbers show themselves.
    y = client.train.y
    is_yes_or_no = bool(((y == 0) | (y == 1)).all())
    if not federation.problem.for_task(task).kind and y.is_floating_point() and not is_yes_or_no:
        raise InputError("a client has labels, but its targets are numbers; leave the labels out.")


def _some_client(run: Run) -> ClientData | None:
    """The first client whose data can be made; a client that has none is lost when it is asked."""
    for k in islice(run.federation.ids, TRIED):
        try:
            return run.federation.client(k)
        except FedgroveError:
            raise
        except Exception:
            continue
    return None


def _try(run: Run, problem: Problem, client: ClientData, task: int | None = None) -> None:
    part = _largest(client)
    if not len(part):
        return
    federation = run.federation
    own = client_marks(federation.problem, federation.classes, client.labels, client.info.task)
    rows = torch.arange(SIZES[-1]) % len(part)
    outputs = _outputs(run, part.x[rows])
    y = part.y[rows]
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
                f"{what} of an example changes with the other examples of its batch; it must be "
                f"the example's own, since batches may be filled up. {_shapes_of(outputs, y)}"
            )


def _are_close(some: Tensor, other: Tensor) -> bool:
    if not some.is_floating_point():
        return torch.equal(some, other)
    rounding = torch.finfo(some.dtype).eps ** 0.5
    return torch.allclose(some, other, rtol=rounding, atol=rounding, equal_nan=True)


def _largest(client: ClientData) -> Examples:
    return max((client.train, client.validation, client.test), key=len)


def _outputs(run: Run, x: Tensor) -> Tensor:
    """What the untrained network gives, of a copy of it: a forward pass may change its module."""
    net = run.net
    if not nets.is_ours(net.module):
        net = copy.deepcopy(net)
    dtype = next(iter(run.params.values())).dtype
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            return net(net.params(), x.to(dtype), train=False).logits
        except Exception as error:
            name = type(net.module).__name__
            raise InputError(
                f"net {name} could not be run on the data of a client, {_reason(error)}; its "
                f"inputs are {x.dtype} of shape {tuple(x.shape)}."
            ) from error


def _try_loss(problem: Problem, outputs: Tensor, y: Tensor, own: Tree) -> Tensor:
    """What the loss gives, once it is known to be of each example."""
    what = f"the loss of {problem.name}"
    given = outputs.clone().requires_grad_()
    losses: Tensor = _called(what, problem.loss, restrict_outputs(given, own), y)
    _check_tensor(what, losses, outputs, y)
    if not losses.requires_grad:
        raise InputError(
            f"{what} has no gradient with respect to the outputs; compute it from them, without "
            "detach, item, numpy or a comparison."
        )
    return losses.detach()


def _try_metric(metric: Metric, outputs: Tensor, y: Tensor) -> dict[str, Tensor]:
    """The metric's numbers by what they are, once they are known to be of each example."""
    what = f"the metric {metric.name}"
    numbers = _called(what, metric.of_examples, outputs.clone(), y)
    found = {what: numbers}
    if isinstance(numbers, Mapping):
        found = {f"{what}, {name},": number for name, number in numbers.items()}
    for of_it, number in found.items():
        _check_tensor(of_it, number, outputs, y)
        # A number for each output is averaged; anything else is a slip, such as (n, 1) - (n,).
        if number.dim() > 1 and number.shape != outputs.shape:
            raise InputError(
                f"{of_it} gives a tensor of shape {tuple(number.shape)} for {len(y)} examples; it "
                f"must give one number for each, ({len(y)},). {_shapes_of(outputs, y)}"
            )
    tree = metric.sums(outputs.clone(), y, torch.ones(len(y), dtype=outputs.dtype))
    sums = {name: float(value) for name, value in tree.items()}
    value = _called(f"the value of {what}", metric.value, {**sums, "total": float(len(y))})
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
            f"it must give a real number for each, ({len(y)},): no mean over them, which the "
            "library takes."
        )
    # Of inputs that are not finite nothing else can be expected.
    is_finite = bool(torch.isfinite(numbers).all())
    if not is_finite and bool(torch.isfinite(outputs).all()):
        raise InputError(
            f"{what} is not finite on the first examples of a client and the outputs of the "
            "untrained network; it must be."
        )


def _shapes_of(outputs: Tensor, y: Tensor) -> str:
    return (
        f"Here outputs are {tuple(outputs.shape)} and y is {tuple(y.shape)}: bring them to one "
        "shape, as with y.reshape(outputs.shape), and take the mean over an example's own numbers."
    )


def _called(what: str, f: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return f(*arguments)
    except FedgroveError:
        raise
    except Exception as error:
        raise InputError(
            f"{what} could not be computed on a few examples, {_reason(error)}."
        ) from error


def _reason(error: Exception) -> str:
    """An error and the place where it was raised."""
    lines = str(error).strip().splitlines() or ["no reason given"]
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{Path(frame.filename).name}, line {frame.lineno}"
    return f"{type(error).__name__}: {lines[0]} (at {place})"
