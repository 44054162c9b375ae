"""What follows from the methods: the stub for editors, and the lists of methods in the docs."""

from __future__ import annotations

from generate import ROOT, Files

from fedgrove import methods

STUB = ROOT / "src" / "fedgrove" / "methods" / "__init__.pyi"


def stub() -> Files:
    """``methods/__init__.pyi``: every name with its type, for editors and type checkers."""
    lines = ["# Written by tools/generate.py: do not edit.", ""]
    for name in methods.__all__:
        lines.append(f"from ._lookup import {name} as {name}")
    for name in methods.names():
        module = name.replace("-", "_")
        cls = methods.find(name).__name__
        lines.append(f"from .{module} import {cls} as {cls}")
    return {STUB: "\n".join(lines) + "\n"}
