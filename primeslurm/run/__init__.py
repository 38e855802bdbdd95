"""The run directory: what a run leaves on disk, and how to read it."""
