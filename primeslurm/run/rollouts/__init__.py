"""Reads the rollouts of a run: those in its archive, and finished ones that wait in the spool."""
