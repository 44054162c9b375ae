"""PFedGate: the method, and the parts that only it uses."""

from .method import PFedGate

__all__ = ["PFedGate"]
