"""Clients that a function makes, checked as they come: every client, every time, in one place."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core import ClientInfo
from ..errors import FedgroveError, InputError
from ..problems import Problem, client_marks
from .federation import ClientData, Examples
from .lazy import takes_round


def called(what: str, f: Callable[..., Any], *arguments: Any, **words: Any) -> Any:
    """What a user's function gives; an error in it becomes a sentence."""
    try:
        return f(*arguments, **words)
    except FedgroveError:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines() or ["no reason given"]
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(frame.filename).name}, line {frame.lineno}"
        raise InputError(
            f"{what} raised {type(error).__name__}: {lines[0]} (at {place}); call it by itself."
        ) from error


def check_info(what: str, info: Any) -> ClientInfo:
    """What a user's ``info`` gave, if it is what the server knows of a client."""
    if not isinstance(info, ClientInfo):
        raise InputError(
            f"{what} gives a {type(info).__name__}; it must give a fedgrove.ClientInfo."
        )
    return info


def checked_info(info: Callable[..., Any]) -> Callable[..., ClientInfo]:
    """A user's ``info``, checked whenever it is asked; with a round if it takes one."""
    return CheckedInfoByRound(info) if takes_round(info) else CheckedInfo(info)


@dataclass(frozen=True)
class CheckedInfo:
    """Tells what the server knows of a client, or refuses what is something else."""

    info: Callable[[int], Any]

    def __call__(self, k: int) -> ClientInfo:
        """What is known of client k."""
        return check_info(f"info({k})", called(f"info({k})", self.info, k))


@dataclass(frozen=True)
class CheckedInfoByRound:
    """The same for a client that changes with the rounds."""

    info: Callable[..., Any]

    def __call__(self, k: int, round: int) -> ClientInfo:
        """What is known of client k in a round."""
        what = f"info({k}, {round})"
        return check_info(what, called(what, self.info, k, round=round))


@dataclass(frozen=True)
class Checked:
    """Makes a client's data and refuses what a run could not use, or would use wrongly.

    ``columns`` is the shape of one target of the first client: all clients have the same.
    """

    make: Callable[..., Any]
    shape: tuple[int, ...]
    classes: int
    problem: Problem
    columns: tuple[int, ...]

    def __call__(self, k: int, **when: int) -> ClientData:
        """The client, perhaps of a round."""
        return self.checked(f"client({k})", self.make(k, **when))

    def checked(self, what: str, data: Any) -> ClientData:
        """The data in the types that networks and their problem have, or a refusal."""
        if not isinstance(data, ClientData):
            raise InputError(
                f"{what} gives a {type(data).__name__}; it must give a ClientData "
                "(fedgrove.data.ClientData)."
            )
        train = self._part(f"{what}.train", data.train)
        validation = self._part(f"{what}.validation", data.validation)
        test = self._part(f"{what}.test", data.test)
        check_info(f"{what}.info", data.info)
        if data.info.examples != len(data.train):
            raise InputError(
                f"{what}.info says {data.info.examples} examples and there are {len(data.train)} "
                "to train on; they must agree: ClientInfo(len(train))."
            )
        # Refuses labels of its own that do not fit.
        client_marks(self.problem, self.classes, data.labels, data.info.task)
        return replace(data, train=train, validation=validation, test=test)

    def _part(self, what: str, part: Any) -> Examples:
        is_examples = isinstance(part, Examples)
        if not is_examples or not isinstance(part.x, Tensor) or not isinstance(part.y, Tensor):
            raise InputError(
                f"{what} must be Examples(x, y) of two tensors; for arrays of NumPy call "
                "torch.from_numpy."
            )
        if tuple(part.x.shape[1:]) != self.shape or len(part.x) != len(part.y):
            raise InputError(
                f"{what} has x of shape {tuple(part.x.shape)} and y of shape "
                f"{tuple(part.y.shape)}; inputs are {self.shape} as the first client's, with as "
                "many targets."
            )
        if tuple(part.y.shape[1:]) != self.columns:
            raise InputError(
                f"{what} has y of shape {tuple(part.y.shape)}; the first client has "
                f"{('n', *self.columns)}, and all must have the same."
            )
        # float64 is what NumPy makes; networks have float32.
        x = part.x.float() if part.x.dtype == torch.float64 else part.x
        return Examples(x, self._targets(what, part.y))

    def _targets(self, what: str, y: Tensor) -> Tensor:
        """The targets in the type of their problem; one of the user's own takes any."""
        kind = self.problem.kind
        if kind == "classes":
            return self._classes(what, y)
        if kind in ("labels", "numbers"):
            return self._columns(what, y)
        return y

    def _classes(self, what: str, y: Tensor) -> Tensor:
        given = f"{what} has y of {y.dtype} and shape {tuple(y.shape)}"
        if y.is_floating_point() or y.is_complex() or y.dim() != 1:
            raise InputError(
                f"{given}; classes are whole numbers of shape (n,). If it is none, say what it is "
                "with problem=."
            )
        y = y.long()
        if len(y) and not (int(y.min()) >= 0 and int(y.max()) < self.classes):
            raise InputError(
                f"{what} has classes from {int(y.min())} to {int(y.max())}; with "
                f"classes={self.classes} they go from 0 to {self.classes - 1}: leave out examples "
                "without a class."
            )
        return y

    def _columns(self, what: str, y: Tensor) -> Tensor:
        """Numbers or several labels, one column for each output."""
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
            raise InputError(f"{what} has y of other values than 0 and 1, which labels are.")
        if not bool(torch.isfinite(y).all()):
            raise InputError(f"{what} has y with NaN or infinity; fill or drop such rows.")
        return y
