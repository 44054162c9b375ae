"""The parts that methods are made of: one file per role, frozen dataclasses with one call."""
