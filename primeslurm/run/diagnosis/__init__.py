"""What went wrong in a run, why, and what would help."""
