"""FedGen: the method, and the parts that only it uses."""

from .method import FedGen

__all__ = ["FedGen"]
