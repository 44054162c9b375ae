"""Channels: which are removed together, which to keep, and really smaller networks."""
