"""`python -m primeslurm`."""

from primeslurm.cli import main

main()
