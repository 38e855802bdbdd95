"""Start or resume a tenant's run on this machine: `python -m primeslurm.api.tenants.starting`.

The tenant host starts this process, so that a slow or broken start of one tenant cannot stop the others.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from primeslurm.api import submission
from primeslurm.api.checks.recipe_check import read_file_metadata
from primeslurm.api.tenants.recipes import (
    DeploymentUrls,
    deployment_recipe,
    limit_violations,
    read_tenant,
    tenant_site,
)
from primeslurm.base import durable, files
from primeslurm.base.errors import PrimeslurmError, UsageError
from primeslurm.plan.planner import make_plan
from primeslurm.recipe import Recipe
from primeslurm.records import resolved_recipe as recipe_record
from primeslurm.run.directory import was_never_submitted
from primeslurm.run.tenants import TenantDirectory, key_of, user_of


def start(run_dir: Path, tenant: TenantDirectory, urls: DeploymentUrls) -> None:
    """Submit a tenant's run to the local executor, or resume it. Raises PrimeslurmError or OSError."""
    key_of(run_dir, user_of(tenant.name))
    if was_never_submitted(tenant.run.path):  # the host was killed while the run was submitted
        files.remove_tree(tenant.run.path)
    deployment = deployment_recipe(run_dir)
    recipe = read_tenant(tenant.recipe_file, run_dir, deployment, urls, name=tenant.name).draft.valid_value()
    if tenant.run.exists():
        _readdress(tenant, recipe)
        submission.resume(tenant.run, tenant.run.latest())
        return
    if problems := limit_violations(recipe, deployment):
        raise UsageError(problems)
    site = tenant_site(tenant.path)
    planned = make_plan(recipe, site, tenant.run.path, read_file_metadata(recipe), local=True)
    submission.submit(planned, tenant.recipe_file, None)


def _readdress(tenant: TenantDirectory, recipe: Recipe) -> None:
    """Put the present addresses of the deployment into the recipe that the run's processes read."""
    assert recipe.tenant is not None
    path = tenant.run.path / recipe_record.FILE
    resolved = files.read_json(path) or {}
    durable.write_json(path, resolved | {"tenant": recipe.tenant.model_dump(mode="json")})


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m primeslurm.api.tenants.starting", description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--tenant", required=True)
    parser.add_argument("--service", required=True)
    parser.add_argument("--router", required=True)
    arguments = parser.parse_args()
    tenant = TenantDirectory(arguments.run_dir / "tenants" / arguments.tenant)
    try:
        start(arguments.run_dir, tenant, DeploymentUrls(arguments.service, arguments.router))
    except (PrimeslurmError, OSError) as error:
        sys.exit(f"error: {error}".replace("\n", "; "))


if __name__ == "__main__":
    main()
