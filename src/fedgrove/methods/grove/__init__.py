"""Grove: the method, and the parts that only it uses."""

from .method import PRESETS, Grove

__all__ = ["PRESETS", "Grove"]
