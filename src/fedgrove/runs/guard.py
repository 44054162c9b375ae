"""A method's own functions: what goes wrong in a user's code becomes one sentence."""

from __future__ import annotations

import inspect
import math
import os
import traceback
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

from .. import methods
from ..core import AnyMethod, WithServerMetrics
from ..errors import FedgroveError, MethodError
from ..nets.custom import file_of
from .per_task import states_of

T = TypeVar("T")

DEBUG = "FEDGROVE_DEBUG"
"""The environment variable that shows users' errors with their traceback."""
LONGEST = 300
"""Letters of an error that are shown."""
NOT_THE_METHODS = (FedgroveError, OSError, torch.OutOfMemoryError)
"""Errors that are sentences already, or that engines and the command line answer to."""


@contextmanager
def calling(
    method: AnyMethod, function: str, others: Iterable[BaseException] = ()
) -> Iterator[None]:
    """Turn an error of a user's method into a sentence; a bug of ours shows its traceback.

    ``others`` are errors that only passed through the function.
    """
    try:
        yield
    except NOT_THE_METHODS:
        raise
    except Exception as error:
        is_ours = type(method).__module__.startswith(f"{methods.__name__}.")
        passed_through = any(error is other for other in others)
        if is_ours or passed_through or os.environ.get(DEBUG):
            raise
        raise MethodError(_sentence(method, function, error)) from error


def noted(items: Iterable[T], errors: list[BaseException]) -> Iterator[T]:
    """The items; an error on the way to one of them is added to ``errors``."""
    try:
        yield from items
    except Exception as error:
        errors.append(error)
        raise


def _sentence(method: AnyMethod, function: str, error: Exception) -> str:
    text = " ".join(str(error).split())[:LONGEST].rstrip(".")
    said = f"{type(error).__name__}: {text}" if text else type(error).__name__
    file = file_of(type(method))
    see = f"; see {file.path}" if file is not None else ""
    return (
        f"{methods.name_of(method)}: {function} ended with {said} (at {_place(method, error)}){see}"
        f". {DEBUG}=1 shows the traceback."
    )


def _place(method: AnyMethod, error: Exception) -> str:
    """The last line in the method's own file that led to the error, or else the very last."""
    frames = traceback.extract_tb(error.__traceback__)
    try:
        own_file = inspect.getsourcefile(type(method))
    except (TypeError, OSError):
        # A class that was typed into an interpreter.
        own_file = None
    place = frames[-1]
    for frame in frames:
        if frame.filename == own_file:
            place = frame
    return f"{Path(place.filename).name}, line {place.lineno}"


def check_state(method: AnyMethod, function: str, state: Any) -> None:
    """Refuse what is no state, as where a function forgets to return it."""
    if not hasattr(state, "round"):
        raise MethodError(
            f"{methods.name_of(method)}: {function} gives a {type(state).__name__}; it must return "
            "the next state, which has a round."
        )


def server_metrics_of(method: AnyMethod, state: Any) -> dict[str, dict[str, float]]:
    """Return a method's numbers about a state, under "figures"; nothing if it has none.

    If the server keeps tasks apart, the names of the numbers begin with the name of their task.
    """
    function = _find_server_metrics(method)
    if not function:
        return {}
    numbers: dict[str, float] = {}
    for task, own in states_of(state).items():
        for name, number in _call_server_metrics(method, function, own).items():
            numbers[f"{task}.{name}" if task else name] = number
    return {"figures": numbers}


def _find_server_metrics(method: AnyMethod) -> str:
    """Return the name of the function that a method has for this; "" if it has none."""
    if isinstance(method, WithServerMetrics):
        return "server_metrics"
    # The old name; goes with the next release (:mod:`fedgrove.renamed`).
    if callable(getattr(method, "figures", None)):
        name = methods.name_of(method)
        message = f"{name}: figures is now server_metrics; the old name goes with the next release."
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return "figures"
    return ""


def _call_server_metrics(method: AnyMethod, function: str, state: Any) -> dict[str, float]:
    """Return the numbers of one state, after checking that they are numbers."""
    with calling(method, function):
        given = getattr(method, function)(state)
    if not isinstance(given, Mapping):
        kind = type(given).__name__
        raise MethodError(
            f"{methods.name_of(method)}: {function} gives a {kind}; give a dictionary."
        )
    numbers = {}
    for name, value in given.items():
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError):
            number = math.nan
        if not math.isfinite(number):
            raise MethodError(
                f"{methods.name_of(method)}: the number {name!r} of {function} is {value!r:.80}; "
                "give one finite number, or leave it out."
            )
        numbers[str(name)] = number
    return numbers
