"""Flower as an engine: the same methods where every client is a separate machine."""
