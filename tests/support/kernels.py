"""Features of this machine's kernel."""

from __future__ import annotations

import subprocess

from primeslurm.slurm.embedded import equal_pages


def merges_pages() -> bool:
    """Return whether processes may request page merging."""
    try:
        subprocess.run(["true"], preexec_fn=equal_pages.ask, check=True)
    except subprocess.SubprocessError:
        return False
    return True
