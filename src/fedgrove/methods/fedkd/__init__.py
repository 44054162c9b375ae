"""FedKD: the method, and the parts that only it uses."""

from .method import FedKD

__all__ = ["FedKD"]
