"""A model that leaves for a device: one client's own model, really shrunk, as a file that runs without fedgrove."""
