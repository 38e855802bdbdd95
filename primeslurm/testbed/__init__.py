"""Everything that lets a run work on a machine without a cluster or GPUs.

- `emulated`: emulated engines, trainer ranks, environment workers and KV stores, for `--emulate`.
- `embedded_slurm`: real Slurm daemons with many nodes on one machine, for `primeslurm cluster`.
- `cpu_engine`: patches of vLLM for engines on CPUs.

The product reaches this package in two places only: `primeslurm.api.testbed` imports it, and
`primeslurm.inference.plugin` loads `cpu_engine` if the engine runs on a CPU. import-linter enforces that.
"""
