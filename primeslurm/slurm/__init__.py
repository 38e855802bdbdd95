"""Slurm: the batch script of a Plan, its submission, and typed wrappers of Slurm's commands."""
