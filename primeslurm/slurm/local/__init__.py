"""Run a Plan's agents on this machine without Slurm."""
