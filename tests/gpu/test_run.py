"""The demo's run on real GPUs (local executor), with the same checks as on an embedded cluster."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.lanes import ALONE

ROOT = Path(__file__).resolve().parents[2]
GPUS = len([path for path in Path("/dev").glob("nvidia[0-9]*") if path.name[6:].isdigit()])

pytestmark = [pytest.mark.gpu, pytest.mark.gpus(ALONE), pytest.mark.timeout(900)]


@pytest.mark.skipif(GPUS < 3, reason="needs three GPUs: trainer, prefill, decode")
def test_the_demo_learns_on_gpus(tmp_path: Path) -> None:
    out, trainer_gpus = tmp_path / "found.json", min(GPUS - 2, 2)
    words = [str(out), "reverse-text", "--set", f"deployment.train.gpus_per_node={trainer_gpus}"]
    done = subprocess.run([sys.executable, "-m", "benchmarks", "gpu_run", *words], cwd=ROOT, check=False)
    assert done.returncode == 0
    summary = json.loads(out.read_text())["cells"]["reverse-text"]["summary"]
    assert summary["last_reward"] - summary["first_reward"] >= 0.3
    assert summary["mixed_version_rollouts"] > 0
    assert summary["staleness_max"] <= 2
    assert summary["mismatch_kl_max"] < 1e-3, "bfloat16 trainer and engines disagree"
