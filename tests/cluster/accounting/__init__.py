"""A Slurm cluster with accounting and a hand-written slurm.conf, and an ordinary user who submits to it."""
