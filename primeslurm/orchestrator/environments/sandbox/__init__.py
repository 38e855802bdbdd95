"""Sandboxes for the programs of rollouts: bubblewrap on the node itself, and our changes to verifiers' containers.

`install` replaces verifiers' runtimes. `runtime` is the replacement that runs programs with bubblewrap: `bwrap_sandbox`
starts one sandbox, `bwrap_args` says what it sees, `limits` what it may use, and `sandbox_init` starts programs inside.
`containers` and `apptainer` adapt container engines. `uv_scripts` finds a Python for harnesses that are scripts.
"""
