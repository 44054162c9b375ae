"""File formats, and the options of an export."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor, nn

from ..errors import InputError, check, unknown
from ..methods.grove.byte_budget import parse_size
from ..renamed import find_old_names
from . import executorch, litert, onnx

Predict = Callable[[Tensor], Tensor]
"""Inputs (batch, *shape) to outputs."""


class Format(Protocol):
    """A file format; the modules ``onnx``, ``executorch`` and ``litert`` are such."""

    SUFFIX: str
    EXTRA: str
    NEEDS: tuple[str, ...]

    def write(
        self, module: nn.Module, shape: tuple[int, ...], path: Path, notes: Mapping[str, str], /
    ) -> None:
        """Export a module that takes inputs of ``shape`` to a file.

        ``notes`` are the metadata; ``notes["output"]`` is the name of the output.
        """

    def quantise(
        self, module: nn.Module, plain: Path, x: Tensor, path: Path, /
    ) -> tuple[float, float] | None:
        """Export a module in int8, calibrated on ``x``; ``plain`` is the float file.

        Returns the shares of weights and of MACs that are in int8, or None if they are not known.
        """

    def load(self, path: Path, /) -> Predict:
        """Load an exported file as a function from inputs to outputs."""


FORMATS: dict[str, Format] = {"onnx": onnx, "executorch": executorch, "litert": litert}


def missing_packages(to: str) -> list[str]:
    """Return the packages that an export format needs and that are not installed."""
    return [name for name in FORMATS[to].NEEDS if importlib.util.find_spec(name) is None]


@dataclass(frozen=True)
class ExportRequest:
    """How to export; an unknown format, or a missing package, is refused here."""

    to: str = "onnx"
    int8: bool = False
    standardised: bool = False
    """Whether the file takes inputs that are standardised already."""
    align: int = 1
    """Shrunk layers have a multiple of this many channels, where their full width allows."""
    size: str | None = None
    """The most that a file may take, as "80kB"; int8 is tried where the float file takes more."""

    def __post_init__(self) -> None:
        if self.to not in FORMATS:
            raise unknown("format", self.to, FORMATS)
        check(self.align >= 1, "align", self.align, "1 (as pruned) or more, such as 16")
        # Refuses what is no size.
        _ = self.most_bytes
        missing = missing_packages(self.to)
        if missing:
            raise InputError(
                f"a file for {self.to} needs {', '.join(missing)}, not installed here; "
                f"pip install 'fedgrove[{self.format.EXTRA}]'"
            )

    @property
    def most_bytes(self) -> float | None:
        """The most bytes that an exported file may take; None: any number."""
        return parse_file_size(self.size)

    @property
    def format(self) -> Format:
        """The module that writes and reads the exported files."""
        return FORMATS[self.to]

    def names(self, stem: str) -> dict[str, str]:
        """The names of the files that may be exported, by version; each may have a card."""
        suffix = self.format.SUFFIX
        return {"shrunk": f"{stem}{suffix}", "int8": f"{stem}.int8{suffix}"}


def parse_file_size(text: str | None) -> float | None:
    """Parse the largest size of an exported file.

    >>> parse_file_size("80kB"), parse_file_size(None)
    (80000.0, None)
    """
    if text is None:
        return None
    return parse_size(text, "size", "the most bytes of a file, such as '80kB' or '1.5MB'")


__getattr__ = find_old_names(__name__)
