"""What all tests share."""

from __future__ import annotations

import os

# Processes of a run get this from their agent; those that tests start, from here.
os.environ["PRIMESLURM_SECRET"] = "5ec7e7" * 10 + "5ec7"
