"""The same agents without Slurm."""
