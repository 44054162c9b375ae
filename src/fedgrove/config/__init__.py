"""What a person asks for: experiments, their settings, config.toml, grids and sweeps."""
