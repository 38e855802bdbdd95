"""A Slurm cluster with accounting whose slurm.conf is written by hand, and an ordinary user who submits to it."""
