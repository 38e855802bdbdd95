"""Embedded Slurm clusters: the real Slurm daemons, with many nodes on one machine."""
