"""AdFedWCP: the method, and the parts that only it uses."""

from .method import AdFedWCP

__all__ = ["AdFedWCP"]
