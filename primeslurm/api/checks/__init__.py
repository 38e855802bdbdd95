"""Checks of a recipe on this machine and with Slurm."""
