"""Power cuts of a run, on a separate file system that loses unflushed data."""
