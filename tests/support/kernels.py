"""What this machine's kernel can do."""

from __future__ import annotations

import subprocess

from primeslurm.testbed.embedded_slurm import page_merging


def merges_pages() -> bool:
    """Whether processes may ask that equal pages be merged."""
    try:
        subprocess.run(["true"], preexec_fn=page_merging.ask, check=True)
    except subprocess.SubprocessError:
        return False
    return True
