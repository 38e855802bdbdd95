"""Embedded slurm."""
