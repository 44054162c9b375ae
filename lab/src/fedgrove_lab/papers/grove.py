"""What of Grove's tables is not data."""

from __future__ import annotations

from typing import Any

from .scope import Scope


def values(scope: Scope) -> dict[str, Any]:
    """Return a fifth of the rounds, at least one."""
    return {"fifth": max(1, scope["rounds"] // 5)}
