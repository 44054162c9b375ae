"""Names and values that a paper's TOML file refers to, as ``"$rounds"`` or ``"{rounds} rounds"``.

``"$name"`` is the value itself, whatever its type; in a list it is spliced where it is a list. In
any other text ``{name}`` is the value as text: numbers in their shortest form, lists with commas
between, ``{weights:/}`` with slashes instead, and ``{clients|all}`` is "all" where the value is
None or 0. A value may refer to others in turn.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

NO_VALUE = {"none": None}
"""TOML has no null: ``"$none"`` stands for it."""
FIELD = re.compile(r"\{(\w+)(?:\|([^{}:]*))?(?::([^{}]*))?\}")
"""``{name}``, ``{name|instead of none}``, ``{name:separator}``."""


class Scope(Mapping[str, Any]):
    """Values by name; looking one up fills in what it refers to.

    >>> scope = Scope({"rounds": 50, "half": "$rounds", "about": "{half} rounds", "a": [1, 0.5]})
    >>> scope["about"], scope["half"], scope.fill(["$a", 2]), scope.fill("{a:/}")
    ('50 rounds', 50, [1, 0.5, 2], '1/0.5')
    """

    def __init__(self, *layers: Mapping[str, Any]) -> None:
        """Take layers of values; a later layer wins."""
        self._values: dict[str, Any] = dict(NO_VALUE)
        for layer in layers:
            self._values.update(layer)

    def __getitem__(self, name: str) -> Any:
        return self.fill(self._values[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def extend(self, *layers: Mapping[str, Any]) -> Scope:
        """Return a scope with further layers on top."""
        return Scope(self._values, *layers)

    def fill(self, value: Any) -> Any:
        """Return a value with everything filled in that it refers to."""
        if isinstance(value, str):
            if value.startswith("$"):
                return self[value[1:]]
            return FIELD.sub(self._show, value)
        if isinstance(value, list):
            return self._fill_list(value)
        if isinstance(value, dict):
            return {key: self.fill(item) for key, item in value.items()}
        return value

    def _fill_list(self, items: list[Any]) -> list[Any]:
        filled: list[Any] = []
        for item in items:
            # A table in a list is a row's: its own values are not known yet.
            value = item if isinstance(item, dict) else self.fill(item)
            is_reference = isinstance(item, str) and item.startswith("$")
            if is_reference and isinstance(value, list | tuple):
                filled.extend(value)
            else:
                filled.append(value)
        return filled

    def _show(self, match: re.Match[str]) -> str:
        name, instead, separator = match.groups()
        value = self[name]
        if instead is not None and not value:
            return instead
        if isinstance(value, list | tuple):
            return (separator or ",").join(show_number(item) for item in value)
        return show_number(value)


def show_number(value: Any) -> str:
    """Return a number in its shortest form, and anything else as it is.

    >>> show_number(1.0), show_number(0.25), show_number("iid")
    ('1', '0.25', 'iid')
    """
    return f"{value:g}" if isinstance(value, float) else str(value)
