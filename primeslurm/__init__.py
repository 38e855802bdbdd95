"""Slurm-native asynchronous RL post-training: one recipe, one command."""

__version__ = "0.1.0"
