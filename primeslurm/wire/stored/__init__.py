"""What stays on the file system: joint checkpoints, and records of which files are whole."""
