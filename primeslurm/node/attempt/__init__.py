"""Start and end of an attempt."""
