"""SAFL: the method, and the parts that only it uses."""

from .method import SAFL

__all__ = ["SAFL"]
