"""Where the numbers go besides the run directory: trackers, metrics servers, files, commands."""
