"""Features of this machine's kernel."""

from __future__ import annotations

import subprocess

from primeslurm.testbed.embedded_slurm import page_merging


def merges_pages() -> bool:
    """Return whether processes may request page merging."""
    try:
        subprocess.run(["true"], preexec_fn=page_merging.ask, check=True)
    except subprocess.SubprocessError:
        return False
    return True
