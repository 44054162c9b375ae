"""File formats, and the options of an export."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor, nn

from ..errors import InputError, check, unknown
from ..renamed import find_old_names
from . import executorch, onnx

Predict = Callable[[Tensor], Tensor]
"""Inputs (batch, *shape) to logits."""


class Format(Protocol):
    """A file format; the modules ``onnx`` and ``executorch`` are such."""

    SUFFIX: str
    EXTRA: str
    NEEDS: tuple[str, ...]

    def write(
        self, module: nn.Module, shape: tuple[int, ...], path: Path, notes: Mapping[str, str], /
    ) -> None:
        """Export a module that takes inputs of ``shape`` to a file."""

    def quantise(
        self, module: nn.Module, plain: Path, x: Tensor, path: Path, /
    ) -> tuple[float, float] | None:
        """Export a module in int8, calibrated on ``x``; ``plain`` is the float file.

        Returns the shares of weights and of MACs that are in int8, or None if they are not known.
        """

    def load(self, path: Path, /) -> Predict:
        """Load an exported file as a function from inputs to logits."""


FORMATS: dict[str, Format] = {"onnx": onnx, "executorch": executorch}


@dataclass(frozen=True)
class ExportRequest:
    """How to export; an unknown format, or a missing package, is refused here."""

    to: str = "onnx"
    int8: bool = False
    standardised: bool = False
    """Whether the file takes inputs that are standardised already."""
    align: int = 1
    """Shrunk layers have a multiple of this many channels, where their full width allows."""

    def __post_init__(self) -> None:
        if self.to not in FORMATS:
            raise unknown("format", self.to, FORMATS)
        check(self.align >= 1, "align", self.align, "1 (as pruned) or more, such as 16")
        needs = self.format.NEEDS
        missing = [name for name in needs if importlib.util.find_spec(name) is None]
        if missing:
            raise InputError(
                f"a file for {self.to} needs {', '.join(missing)}, not installed here; "
                f"pip install 'fedgrove[{self.format.EXTRA}]'"
            )

    @property
    def format(self) -> Format:
        """The module that writes and reads the exported files."""
        return FORMATS[self.to]

    def names(self, client: int) -> dict[str, str]:
        """The names of a client's exported files and of its model card."""
        stem = f"client-{client:05d}"
        suffix = self.format.SUFFIX
        names = {"shrunk": f"{stem}{suffix}", "card": f"{stem}{suffix}.md"}
        if self.int8:
            names["int8"] = f"{stem}.int8{suffix}"
        return names


__getattr__ = find_old_names(__name__)
