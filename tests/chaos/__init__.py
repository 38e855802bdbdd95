"""Random faults at random times, in emulated runs on the real Slurm: `python -m tests.chaos --seed 1`.

`kinds` says what can happen, `schedule` (by a seed) what does, `runner` lets it happen and waits until the run is well
again, and `invariants` says what must hold when the run has ended.
"""
