"""The demo's model and an embedded cluster, for all end-to-end tests."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from primeslurm.run.directory import RunDirectory
from primeslurm.run.history import rows
from tests.support.runs import Demo
from tests.support.slurm import require_slurm
from tests.support.unmeasured import unmeasured

ROOT = Path(__file__).resolve().parents[2]


def turns_on_policy(run: RunDirectory, steps: int) -> list[dict[str, Any]]:
    """Check that rollouts have several turns, are on-policy and agree with the trainer, and return the metrics."""
    table = rows(run.path)
    assert [row["step"] for row in table] == list(range(1, steps + 1))
    events = [line for path in run.path.glob("attempts/*/events/*.jsonl") for line in path.read_text().splitlines()]
    assert not [line for line in events if "rollout_failed" in line]
    for row in table:
        assert row["trainer/on_policy_fraction"] == 1.0 and row["trainer/mismatch_kl"] < 1e-3, row
        assert row["rollouts/turns_mean"] > 1 and row["rollouts/failed"] == 0, row
    return table


@pytest.fixture(scope="session")
def model() -> Path:
    """Return the demo's warm-started model, and make it if necessary."""
    directory = ROOT / ".primeslurm" / "reverse-text"
    subprocess.run(["scripts/warm_start.sh", str(directory)], cwd=ROOT, env=unmeasured(), check=True, timeout=2400)
    return directory / "model"


@pytest.fixture(scope="session")
def demo(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    """Yield an embedded cluster of four GPU nodes."""
    require_slurm()
    made = Demo(ROOT, tmp_path_factory.mktemp("e2e"))
    made.up()
    yield made
    made.down()
