"""Which method to take: those that fit are tried for a few rounds and judged on validation data."""
