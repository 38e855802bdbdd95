"""Sandboxes for the programs of rollouts: bubblewrap on the node itself, and our changes to verifiers' containers.

`install` replaces verifiers' runtimes. `runtime` is the replacement that runs programs with bubblewrap: `bwrap_sandbox`
starts one sandbox, in which `sandbox_init` starts programs. `bwrap_args` says what it sees, and `limits` what it may
use. `containers` and `apptainer` adapt container engines. `uv_scripts` finds a Python for harnesses that are scripts.
"""
