"""A run: its loop, its folder, several in lockstep, and its scores."""
