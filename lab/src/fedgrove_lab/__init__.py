"""The lab next to fedgrove: the papers' tables run again, and benchmarks. Not part of the wheel."""
