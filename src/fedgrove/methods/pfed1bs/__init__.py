"""PFed1BS: the method, and the parts that only it uses."""

from .method import PFed1BS

__all__ = ["PFed1BS"]
