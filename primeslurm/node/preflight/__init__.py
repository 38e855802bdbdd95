"""Checks of a node before it takes part in a run."""
