"""FedAPTA: the method, and the parts that only it uses."""

from .method import PRESETS, FedAPTA

__all__ = ["PRESETS", "FedAPTA"]
