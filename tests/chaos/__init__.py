"""Random faults at random times, in emulated runs on a real Slurm: `python -m tests.chaos --seed 1`.

`kinds` defines the faults, `schedule` draws them from a seed, `runner` injects them and waits for recovery, and
`invariants` checks the run after its end.
"""
