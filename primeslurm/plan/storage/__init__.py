"""The plan on disk: each command once, and of each process a row of values."""
