"""Errors in a user's code: a method's function that fails, or returns what it must not."""

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
from ..core import AnyMethod, Task, WithServerMetrics
from ..errors import FedgroveError, MethodError
from ..nets.user_files import find_user_file
from .per_task import states_by_task

T = TypeVar("T")

DEBUG = "FEDGROVE_DEBUG"
"""The environment variable that shows users' errors with their traceback."""
LONGEST_ERROR = 300
"""How many characters of an error's text are shown."""
NOT_THE_METHODS = (FedgroveError, OSError, torch.OutOfMemoryError)
"""Errors that are sentences already, or that engines and the command line handle."""


@contextmanager
def explain_errors(
    method: AnyMethod, function: str, passed_through: Iterable[BaseException] = ()
) -> Iterator[None]:
    """Turn an error in a user's method into a :class:`MethodError` with one sentence.

    An error in a method of this library is a bug, and keeps its traceback.

    Args:
        method: The method whose function is called.
        function: The function's name, for the sentence.
        passed_through: Errors that only passed through the function, and are not turned.
    """
    try:
        yield
    except NOT_THE_METHODS:
        raise
    except Exception as error:
        is_ours = type(method).__module__.startswith(f"{methods.__name__}.")
        is_others = any(error is other for other in passed_through)
        if is_ours or is_others or os.environ.get(DEBUG):
            raise
        raise MethodError(_blame(method, function, error)) from error


def record_errors(items: Iterable[T], errors: list[BaseException]) -> Iterator[T]:
    """Yield a run's items; an error in getting one of them is added to ``errors``."""
    try:
        yield from items
    except Exception as error:
        errors.append(error)
        raise


def _blame(method: AnyMethod, function: str, error: Exception) -> str:
    """Return the sentence about an error in a function of a method."""
    text = " ".join(str(error).split())[:LONGEST_ERROR].rstrip(".")
    what = f"{type(error).__name__}: {text}" if text else type(error).__name__
    file = find_user_file(type(method))
    see = "" if file is None else f"; see {file.path}"
    try:
        own_file = inspect.getsourcefile(type(method))
    except (TypeError, OSError):
        # A class that was typed into an interpreter.
        own_file = None
    frames = traceback.extract_tb(error.__traceback__)
    # The last line in the method's own file, or else the last of all.
    frame = frames[-1]
    for other in frames:
        if other.filename == own_file:
            frame = other
    place = f"{Path(frame.filename).name}, line {frame.lineno}"
    return (
        f"{methods.name_of(method)}: {function} ended with {what} (at {place}){see}. "
        f"{DEBUG}=1 shows the traceback."
    )


def describe_error(error: BaseException) -> str:
    """Return an error in a run as part of a sentence, with its place if it is a user's."""
    try:
        lines = str(error).strip().splitlines()
    except Exception:
        lines = ["an error without a description"]
    text = lines[0] if lines else "no reason given"
    if len(text) > LONGEST_ERROR:
        text = f"{text[:LONGEST_ERROR]} ..."
    if isinstance(error, FedgroveError):
        return text.rstrip(".")
    text = f"{type(error).__name__}: {text.rstrip('.')}"
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return text
    return f"{text} (at {Path(frames[-1].filename).name}, line {frames[-1].lineno})"


# ---- what a method's functions return ------------------------------------------------------------


def check_state(method: AnyMethod, function: str, state: Any) -> None:
    """Refuse a run whose method returns no state, for example None."""
    _check_returned(method, function, state, hasattr(state, "round"), "a state, which has a round")


def check_planned(method: AnyMethod, planned: Any) -> None:
    """Refuse a plan that is no list of tasks, for example None."""
    _check_returned(method, "plan", planned, isinstance(planned, Iterable), "a list of tasks")


def check_sent(method: AnyMethod, task: Task) -> None:
    """Refuse a task with something else than packets by name, for example None."""
    if not isinstance(task.send, Mapping):
        raise MethodError(
            f"{methods.name_of(method)}: a task sends a {type(task.send).__name__}; deliver and "
            "plan must give packets by name, as in {'model': Packet(tree)}."
        )


def _check_returned(
    method: AnyMethod, function: str, returned: Any, is_right: bool, what: str
) -> None:
    if not is_right:
        raise MethodError(
            f"{methods.name_of(method)}: {function} gives a {type(returned).__name__}; it must "
            f"return {what}."
        )


def server_metrics_of(method: AnyMethod, state: Any) -> dict[str, dict[str, float]]:
    """Return a method's numbers about a state, under "figures"; nothing if it has none.

    If the server keeps tasks apart, the names of the numbers begin with the name of their task.
    """
    function = _find_server_metrics(method)
    if not function:
        return {}
    numbers: dict[str, float] = {}
    for task, own in states_by_task(state).items():
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
        message = (
            f"{name}: figures is now server_metrics; the old name will be removed in the next "
            "release."
        )
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return "figures"
    return ""


def _call_server_metrics(method: AnyMethod, function: str, state: Any) -> dict[str, float]:
    """Return the numbers of one state, after checking that they are numbers."""
    with explain_errors(method, function):
        given = getattr(method, function)(state)
    is_mapping = isinstance(given, Mapping)
    _check_returned(method, function, given, is_mapping, "a dictionary of numbers")
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
