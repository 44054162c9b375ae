"""Flower as an engine: the same methods where every client is a machine of its own."""
