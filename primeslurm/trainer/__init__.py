"""The torchtitan trainer: parallelism, loss, checkpoints, weight transfer, the RL and SFT loops.

Importing `primeslurm.nn` patches torch and torchtitan before use. The package imports nothing else, so that `__main__`
can choose the device and block signals before torch is imported.
"""

from __future__ import annotations

import sys

import primeslurm.nn  # noqa: F401  installs the import hook

if "torchtitan" in sys.modules and "primeslurm.nn.compat" not in sys.modules:
    raise ImportError("primeslurm.trainer has to be imported before torchtitan")
