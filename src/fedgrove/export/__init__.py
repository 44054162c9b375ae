"""Export: one client's own model, really shrunk, as a file that runs without fedgrove."""
