"""Slurm: the batch script of a Plan, its submission, Slurm's commands, and clusters embedded in one machine."""
