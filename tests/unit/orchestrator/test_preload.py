"""Imports of forked environment workers."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import sys
import primeslurm.orchestrator.worker.preload
import huggingface_hub.constants
print(huggingface_hub.constants.HF_HUB_OFFLINE, sorted({"torch", "verifiers.v1", "renderers"} - sys.modules.keys()))
"""


def test_preload_sets_the_hub_offline() -> None:
    env = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "True []\n"
