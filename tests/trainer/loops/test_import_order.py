"""torch and torchtitan are patched before any import of torchtitan."""

from __future__ import annotations

import subprocess
import sys

PATCHED = """
import sys
import primeslurm.trainer
assert "torch" not in sys.modules
from torchtitan.distributed.fsdp import disable_fsdp_gradient_division
from torchtitan.models.utils import MoEStateDictAdapter
print(MoEStateDictAdapter._caculate_indices_from_placements.__module__)
"""


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)


def test_importing_torchtitan_patches_it() -> None:
    done = python(PATCHED)
    assert (done.returncode, done.stdout) == (0, "primeslurm.nn.compat\n"), done.stderr


def test_earlier_import_of_torchtitan_is_rejected() -> None:
    done = python("import torchtitan, primeslurm.trainer")
    assert "has to be imported before torchtitan" in done.stderr
