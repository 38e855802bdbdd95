"""Load, compare, emulate and evaluate recipes."""
