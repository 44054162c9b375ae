"""STC: the method, and the parts that only it uses."""

from .method import STC

__all__ = ["STC"]
