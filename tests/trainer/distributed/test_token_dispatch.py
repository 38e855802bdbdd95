"""Dispatch of tokens to experts and back, with the benchmark's ranks: values and gradients."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.support.servers import rank_environment

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.campaign
def test_tokens_come_back_from_their_experts(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    words = ["token_dispatch", "--tokens", "96", "--rounds", "1", "--backends", "torch", "--out", str(out)]
    ours = rank_environment(0, 1, 0)  # other tests make this process a rank, which the benchmark is not
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    argv = [sys.executable, "-m", "benchmarks", *words]
    done = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    errors = json.loads(out.read_text())["torch"]["errors"]
    assert errors.keys() == {"out", "grad_x", "grad_scores"}
    assert all(0 <= error < 0.01 for error in errors.values())  # of bfloat16; a wrong expert would be off by a half
