"""Federations whose clients a user's function creates; every client is checked every time."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core import ClientInfo
from ..errors import FedgroveError, InputError, check
from ..problems import CLASSES, Problem, client_marks
from .arrays import choose_defaults
from .federation import ClientData, Defaults, Examples, Federation, LazyClients, takes_round
from .preparation import Preparation


def from_clients(
    client: Callable[..., ClientData],
    clients: int,
    *,
    classes: int,
    problem: Problem = CLASSES,
    info: Callable[..., ClientInfo] | None = None,
    name: str = "clients",
    labels: Sequence[str] | None = None,
    defaults: Defaults | None = None,
    notes: Sequence[str] = (),
) -> Federation:
    """Make a federation of clients 0..clients-1 that a function creates when they are needed.

    Args:
        client: ``client(k)`` returns the data of client k; ``client(k, round)``, with a parameter
            called round, the data in a round, if they change over time. The same arguments must
            always give the same data: a client may be created several times, and in another
            process. Inputs in float64 become float32.
        clients: The number of clients.
        classes: The number of outputs.
        problem: What the targets are.
        info: ``info(k)``, or ``info(k, round)`` if it changes, returns what the server knows about
            a client, with the number of its training examples. Without it the data are created to
            find out.
        name: The name of the federation.
        labels: The names of the outputs; by default their numbers.
        defaults: How the data are trained unless options override it.
        notes: Caveats that belong in every table of results.

    Raises:
        InputError: An argument is wrong, or the function returns data that a run cannot use.
    """
    check(callable(client), "client", client, "a function of k that returns a ClientData")
    info_is_valid = info is None or callable(info)
    check(info_is_valid, "info", info, "a function of k that returns a ClientInfo")
    check(_is_whole(clients) and clients >= 1, "clients", clients, "a whole number, 1 or more")
    fewest = 2 if problem.kind == CLASSES.kind else 1
    are_enough = _is_whole(classes) and classes >= fewest
    check(are_enough, "classes", classes, f"a whole number, {fewest} or more")
    by_round = takes_round(client)
    when = {"round": 0} if by_round else {}
    first = _call("client(0)", client, 0, **when)
    shape = _example_shape(first, "x")
    make = CheckedClient(client, shape, classes, problem, _example_shape(first, "y"))
    first = make.check("client(0)", first)
    if info is not None:
        info = CheckedInfoByRound(info) if takes_round(info) else CheckedInfo(info)
    lazy = LazyClients(make, int(clients), info, by_round)
    # Either from info(0), or from the data of client 0.
    examples = lazy.info_of(0).examples if info is not None else first.info.examples
    allowed = f"the number of training examples of client 0, which is {len(first.train)}"
    check(len(first.train) == examples, "info(0).examples", examples, allowed)
    if labels is None:
        labels = list(map(str, range(classes)))
    if defaults is None:
        defaults = choose_defaults(shape)
    return Federation(
        name,
        lazy,
        classes=classes,
        labels=tuple(labels),
        shape=shape,
        defaults=replace(defaults, cohort=min(defaults.cohort, clients)),
        notes=tuple(notes),
        problem=problem,
        preparation=Preparation(labels=tuple(labels), shape=shape),
    )


def _is_whole(number: Any) -> bool:
    return isinstance(number, int | np.integer) and not isinstance(number, bool)


def _example_shape(client: Any, name: str) -> tuple[int, ...]:
    """Return the shape of one input (x) or target (y); () of an object that is then refused."""
    examples = getattr(getattr(client, "train", None), name, None)
    if not isinstance(examples, Tensor):
        return ()
    return tuple(examples.shape[1:])


def _call(what: str, f: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call a user's function; an error in it becomes a sentence."""
    try:
        return f(*arguments, **options)
    except FedgroveError:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines() or ["no reason given"]
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(frame.filename).name}, line {frame.lineno}"
        raise InputError(
            f"{what} raised {type(error).__name__}: {lines[0]} (at {place}); call it directly to "
            "see the complete error."
        ) from error


def _check_info(what: str, info: Any) -> ClientInfo:
    if not isinstance(info, ClientInfo):
        raise InputError(
            f"{what} returns a {type(info).__name__}; it must return a fedgrove.ClientInfo."
        )
    return info


# ---- the checks ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class CheckedInfo:
    """Calls a user's ``info(k)`` and refuses anything but a ClientInfo."""

    info: Callable[[int], Any]

    def __call__(self, k: int) -> ClientInfo:
        """Return what the server knows about client k."""
        return _check_info(f"info({k})", _call(f"info({k})", self.info, k))


@dataclass(frozen=True)
class CheckedInfoByRound:
    """Calls a user's ``info(k, round)`` and refuses anything but a ClientInfo."""

    info: Callable[..., Any]

    # A parameter called round is how LazyClients knows that the answer changes.
    def __call__(self, k: int, round: int) -> ClientInfo:
        """Return what the server knows about client k in a round."""
        what = f"info({k}, {round})"
        return _check_info(what, _call(what, self.info, k, round=round))


@dataclass(frozen=True)
class CheckedClient:
    """Creates a client's data and refuses data that a run could not use, or would misread.

    Args:
        make: The user's function.
        shape: The shape of one input of the first client; all clients have the same.
        classes: The number of outputs.
        problem: What the targets are.
        columns: The shape of one target of the first client; all clients have the same.
    """

    make: Callable[..., Any]
    shape: tuple[int, ...]
    classes: int
    problem: Problem
    columns: tuple[int, ...]

    def __call__(self, k: int, **when: int) -> ClientData:
        """Return the client, perhaps in a round."""
        return self.check(f"client({k})", self.make(k, **when))

    def check(self, what: str, data: Any) -> ClientData:
        """Return the data in the types that networks and the problem take, or refuse them."""
        if not isinstance(data, ClientData):
            raise InputError(
                f"{what} returns a {type(data).__name__}; it must return a ClientData "
                "(fedgrove.data.ClientData)."
            )
        train = self._check_part(f"{what}.train", data.train)
        validation = self._check_part(f"{what}.validation", data.validation)
        test = self._check_part(f"{what}.test", data.test)
        _check_info(f"{what}.info", data.info)
        if data.info.examples != len(data.train):
            raise InputError(
                f"{what}.info has {data.info.examples} examples and there are {len(data.train)} "
                "to train on; they must agree: ClientInfo(len(train))."
            )
        # Refuses labels that do not fit the problem.
        client_marks(self.problem, self.classes, data.labels, data.info.task)
        return replace(data, train=train, validation=validation, test=test)

    def _check_part(self, what: str, part: Any) -> Examples:
        is_examples = isinstance(part, Examples)
        if not is_examples or not isinstance(part.x, Tensor) or not isinstance(part.y, Tensor):
            raise InputError(
                f"{what} must be Examples(x, y) of two tensors; for NumPy arrays call "
                "torch.from_numpy."
            )
        if tuple(part.x.shape[1:]) != self.shape or len(part.x) != len(part.y):
            raise InputError(
                f"{what} has x of shape {tuple(part.x.shape)} and y of shape "
                f"{tuple(part.y.shape)}; inputs have the shape {self.shape}, as those of the first "
                "client, and there is one target for each."
            )
        if tuple(part.y.shape[1:]) != self.columns:
            raise InputError(
                f"{what} has y of shape {tuple(part.y.shape)}; the first client has "
                f"{('n', *self.columns)}, and all clients must have the same."
            )
        # NumPy makes float64; networks have float32.
        x = part.x.float() if part.x.dtype == torch.float64 else part.x
        return Examples(x, self._check_targets(what, part.y))

    def _check_targets(self, what: str, y: Tensor) -> Tensor:
        """Return the targets in the type of their problem; a custom problem takes any type."""
        if self.problem.kind == "classes":
            return self._check_classes(what, y)
        if self.problem.kind in ("labels", "numbers"):
            return self._check_columns(what, y)
        return y

    def _check_classes(self, what: str, y: Tensor) -> Tensor:
        if y.is_floating_point() or y.is_complex() or y.dim() != 1:
            raise InputError(
                f"{what} has y of {y.dtype} and shape {tuple(y.shape)}; classes are whole numbers "
                "of shape (n,). If the targets are not classes, give problem=."
            )
        y = y.long()
        if len(y) and not (int(y.min()) >= 0 and int(y.max()) < self.classes):
            raise InputError(
                f"{what} has classes from {int(y.min())} to {int(y.max())}; with "
                f"classes={self.classes} they go from 0 to {self.classes - 1}: leave out examples "
                "without a class."
            )
        return y

    def _check_columns(self, what: str, y: Tensor) -> Tensor:
        """Check numbers or several labels, one column for each output."""
        columns = 1 if y.dim() == 1 else y.shape[-1]
        if y.dim() > 2 or y.is_complex() or columns != self.classes:
            raise InputError(
                f"{what} has y of {y.dtype} and shape {tuple(y.shape)}; with "
                f"classes={self.classes} {self.problem.kind} are real, of shape "
                f"(n, {self.classes})."
            )
        if not y.is_floating_point():
            y = y.to(torch.float32)
        if self.problem.kind == "labels" and not bool(((y == 0) | (y == 1)).all()):
            raise InputError(
                f"{what} has values in y other than 0 and 1, and labels must be 0 or 1."
            )
        if not bool(torch.isfinite(y).all()):
            raise InputError(f"{what} has NaN or infinity in y; fill in or drop these rows.")
        return y
