"""A stage as a template and hyperparameters, so that runs which differ in floats share a stack.

``to_template`` takes every float out of a stage (learning rate, mu, decay, clip ...) and leaves a
hashable template; ``from_template`` builds the stage again with floats or tensors in their place.
Under ``vmap`` each client's stage then holds that client's own values. Parts read ``self.mu`` as
always; they must only not branch on it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any


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
    """The template of a stage or part; its floats are appended to ``hyperparameters``.

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
    """The stage again, with ``hyperparameters[i]`` in place of its i-th float.

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
