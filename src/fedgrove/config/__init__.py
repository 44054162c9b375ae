"""Experiments, the settings of their methods, config.toml, grids, sweeps and costs."""
