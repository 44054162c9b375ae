"""FedLayerPrune: the method, and the parts that only it uses."""

from .method import PRESETS, FedLayerPrune

__all__ = ["PRESETS", "FedLayerPrune"]
