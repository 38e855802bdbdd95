"""The torchtitan trainer: parallelism, loss, checkpoints, weight transfer, the RL and SFT loops.

Importing `primeslurm.nn` makes sure that torch and torchtitan are patched before any module of torchtitan is imported.
Apart from that the package imports nothing, so that `__main__` can choose the device and block signals before torch is
there.
"""

from __future__ import annotations

import sys

import primeslurm.nn  # noqa: F401  installs the import hook

if "torchtitan" in sys.modules and "primeslurm.nn.compat" not in sys.modules:
    raise ImportError("primeslurm.trainer has to be imported before torchtitan")
