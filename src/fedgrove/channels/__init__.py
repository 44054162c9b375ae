"""Channels: which fall together, which to keep, and really smaller networks."""
