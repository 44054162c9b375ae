"""HeteroFL: the method, and what it does besides choosing channels: scaler, loss and norms."""

from .method import HeteroFL, State

__all__ = ["HeteroFL", "State"]
