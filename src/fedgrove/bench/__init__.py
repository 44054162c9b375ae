"""What fedgrove costs, measured beside the plain way in the same run: ``fedgrove bench``."""
