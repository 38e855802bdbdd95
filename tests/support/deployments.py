"""Directories of deployments that tenants share, without a job."""

from __future__ import annotations

from pathlib import Path

import yaml

from primeslurm.base.files import write_json
from primeslurm.plan.planner import derive
from primeslurm.recipe import Recipe
from primeslurm.records.attempt import EndRecord, JobRecord
from primeslurm.run.directory import RunDirectory
from primeslurm.wire.transport import secret
from tests.support.recipes import model_dir, site


def make_deployment(root: Path, max_tenants: int = 2) -> Path:
    """Make a deployment below `root`/runs whose job has ended. Tenants may have rank 16, 128 tokens and 5 GB."""
    recipe = Recipe.model_validate(
        {
            "name": "lab",
            "task": "tenants",
            "seq_len": 128,
            "model": {"path": str(model_dir(root, model_type="qwen3")), "dtype": "float32"},
            "tenants": {"max_tenants": max_tenants, "max_rank": 16, "disk_gb": 5},
        }
    )
    run = RunDirectory(root / "runs" / "lab")
    run.path.mkdir(parents=True, mode=0o700)
    attempt = run.attempt(1)
    attempt.prepare(derive(recipe, site(), run.path))
    attempt.record_job(JobRecord("999999", "local", 1.0))
    attempt.record_end(EndRecord("cancelled", "cancelled by the user", "", None, False, "", 2.0))
    (run.path / "recipe.resolved.json").write_text(recipe.model_dump_json(by_alias=True))
    write_json(run.path / "lock.json", {"run_id": "lab-1", "created_at": 1.0})
    secret.create(run.path)
    return run.path


def write_tenant(path: Path, **changes: object) -> Path:
    """Write the recipe of a tenant."""
    data: dict[str, object] = {
        "name": path.stem,
        "max_steps": 3,
        "environments": [{"id": "reverse-text"}],
        "orchestrator": {"batch_size": 8, "group_size": 4},
        "trainer": {"lora": {"rank": 8}},
    }
    path.write_text(yaml.safe_dump(data | changes))
    return path
