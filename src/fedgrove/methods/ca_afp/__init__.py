"""CA-AFP: the method, and the parts that only it uses."""

from .method import CAAFP, PRESETS

__all__ = ["CAAFP", "PRESETS"]
