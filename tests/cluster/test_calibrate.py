"""`calibrate` as a real Slurm job on two nodes."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from primeslurm.recipe.reading.recipe_files import load_site
from primeslurm.testbed.embedded_slurm.cluster import Cluster
from tests.support.cli import primeslurm
from tests.support.recipes import recipe_data

pytestmark = pytest.mark.cluster


@pytest.mark.campaign
def test_rates_of_two_nodes_are_written_and_used(cluster: Cluster, tmp_path: Path) -> None:
    site = yaml.safe_load((cluster.spec.directory / "site.yaml").read_text()) | {"runs": str(tmp_path / "runs")}
    site["nodes"]["default"] |= {"gpus": 1, "gpu": "h200"}
    text = f"# ours\n{yaml.safe_dump(site)}"
    (tmp_path / "site.yaml").write_text(text)
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe_data(model={"path": "Qwen/Qwen3-0.6B"})))
    plan = primeslurm("plan", "r.yaml", cwd=tmp_path)
    assert plan.code == 0 and "measured on" not in plan.out, plan.err

    script = primeslurm("calibrate", "--dry-run", cwd=tmp_path)
    assert script.code == 0 and "#SBATCH --partition=gpu --nodes=2" in script.out
    assert not (tmp_path / "runs").exists()
    result = primeslurm("calibrate", "--yes", cwd=tmp_path)
    assert result.code == 0, result.err
    assert "+measured:" in result.out
    assert (tmp_path / "site.yaml").read_text().startswith(text)
    rates = load_site(tmp_path / "site.yaml").measured["gpu"]
    assert (rates.device, rates.nodes, rates.ranks_per_node) == ("cpu", 2, 1)
    assert rates.network_gbps_per_gpu and rates.node_gbytes_per_s is None and rates.products_tflops < 10

    measured = primeslurm("plan", "r.yaml", cwd=tmp_path)
    assert measured.code == 0 and "measured on 2 nodes" in " ".join(measured.out.split()), measured.out
    assert step_line(measured.out) != step_line(plan.out)


def step_line(text: str) -> str:
    return next(line for line in text.splitlines() if line.strip().startswith("step "))
