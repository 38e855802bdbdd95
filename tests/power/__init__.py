"""A run whose power is cut: on a file system of its own, which forgets what was not flushed."""
