"""What this machine's kernel can do."""

from __future__ import annotations

import subprocess

from primeslurm.slurm.embedded import equal_pages


def merges_pages() -> bool:
    """Whether processes may ask that equal pages be merged."""
    try:
        subprocess.run(["true"], preexec_fn=equal_pages.ask, check=True)
    except subprocess.SubprocessError:
        return False
    return True
