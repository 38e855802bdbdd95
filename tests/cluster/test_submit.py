"""`submit` checks Slurm's answers before it writes anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from primeslurm.testbed.embedded_slurm.cluster import Cluster
from tests.support.cli import primeslurm
from tests.support.recipes import model_dir, recipe_data

pytestmark = pytest.mark.cluster


@pytest.fixture
def place(cluster: Cluster, tmp_path: Path) -> Path:
    site = yaml.safe_load((cluster.spec.directory / "site.yaml").read_text()) | {"runs": str(tmp_path / "runs")}
    (tmp_path / "site.yaml").write_text(yaml.safe_dump(site))
    write(tmp_path)
    return tmp_path


def write(directory: Path, **changes: Any) -> None:
    data = recipe_data(model={"path": str(model_dir(directory))}, **changes)
    (directory / "r.yaml").write_text(yaml.safe_dump(data))


def test_dry_run_writes_nothing(place: Path) -> None:
    result = primeslurm("submit", "r.yaml", "--dry-run", cwd=place)
    assert result.code == 0, result.err
    assert "#SBATCH hetjob" in result.out
    assert not (place / "runs").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"slurm": {"train": {"partition": "gpus"}}},
            "error: slurm.train.partition = gpus: no such partition (did you mean gpu?)\n",
        ),
        (
            {"deployment": {"train": {"nodes": 9}}},
            "error: slurm.train.partition = gpu: has 4 usable nodes, but the job needs 10: train 9 x 2 GPUs, "
            "inference 1 x 2 GPUs (lower the nodes or replicas of a role, or use another partition)\n",
        ),
    ],
)
def test_unplaceable_job_is_refused(place: Path, changes: dict[str, Any], message: str) -> None:
    write(place, **changes)
    result = primeslurm("submit", "r.yaml", cwd=place)
    assert (result.code, result.out, result.err) == (2, "", message)
    assert not (place / "runs").exists()


def test_unreachable_cluster_exits_with_3(place: Path) -> None:
    site = yaml.safe_load((place / "site.yaml").read_text()) | {"slurm_conf": str(place / "none.conf")}
    (place / "site.yaml").write_text(yaml.safe_dump(site))
    result = primeslurm("submit", "r.yaml", cwd=place)
    assert result.code == 3
    assert result.err.startswith("error: ")
    assert not (place / "runs").exists()
