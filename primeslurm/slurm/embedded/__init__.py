"""The embedded cluster: Slurm's real daemons on one machine."""
