"""FedMP: the method, and the parts that only it uses."""

from .method import FedMP

__all__ = ["FedMP"]
