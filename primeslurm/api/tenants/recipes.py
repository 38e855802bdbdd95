"""Recipes of tenants: RL recipes without the sections that belong to the deployment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from primeslurm.api.checks.recipe_check import Examination, examine
from primeslurm.api.sites import local_site, with_python
from primeslurm.base import files
from primeslurm.base.errors import RunError, UsageError, Violation
from primeslurm.plan.commands.engine import EXPORTS
from primeslurm.recipe import Recipe, Site
from primeslurm.recipe.reading.recipe_files import Draft, read_recipe
from primeslurm.recipe.reading.validation_errors import InputFault
from primeslurm.records import resolved_recipe as recipe_record

# Sections of a recipe that the deployment sets for all tenants.
_OF_DEPLOYMENT = ("model", "deployment", "inference", "slurm", "tenants")
_ADDRESSES = ("service", "router", "adapters")
# A tenant's run has this long, less half a minute, to end its step and write its last checkpoint [s].
CHECKPOINT_S = 330
# Address of a deployment that does not run.
UNKNOWN = "http://unknown:1"


@dataclass(frozen=True)
class DeploymentUrls:
    """URLs of a deployment's Tinker service and router."""

    service: str = UNKNOWN
    router: str = UNKNOWN


@dataclass(frozen=True)
class TenantRecipe:
    """A tenant's recipe, valid or not."""

    text: Mapping[str, Any]
    """The data of the file, with `extends` and overrides applied, and without what the deployment sets."""
    draft: Draft[Recipe]
    """The whole recipe."""

    def examined(self, directory: Path, *, environments: bool) -> Examination:
        """Check the recipe for a run on this machine. With `environments`, they are loaded."""
        site = Draft(Site, lambda _: (), {}, tenant_site(directory))
        return examine(self.draft, site, local=True, environments=environments)


def deployment_recipe(run_dir: Path) -> Recipe:
    """Return the recipe of a deployment. Raises RunError, and UsageError if it is another kind of run."""
    try:
        recipe = Recipe.model_validate_json(files.read_bytes(run_dir / recipe_record.FILE))
    except (OSError, ValueError) as error:
        raise RunError(f"{run_dir / recipe_record.FILE} cannot be read: {error}") from None
    if recipe.tenants is None:
        why = f"is a run of task {recipe.task}, which has no tenants"
        raise UsageError([Violation("RUN", str(run_dir), why, "name a run of task: tenants")])
    return recipe


def read_tenant(
    path: Path,
    run_dir: Path,
    deployment: Recipe,
    urls: DeploymentUrls,
    overrides: Sequence[str] = (),
    name: str | None = None,
) -> TenantRecipe:
    """Read a tenant's recipe, and complete it for a deployment. All its faults are in `draft`."""
    text: dict[str, Any] = {}

    def complete(data: dict[str, Any]) -> list[InputFault]:
        nonlocal text
        text = {**data}
        input_faults = [
            _fault(field, "the deployment sets it for all tenants") for field in _OF_DEPLOYMENT if field in data
        ]
        for field in _OF_DEPLOYMENT:
            data.pop(field, None)
        tenant = data.get("tenant") or {}
        if isinstance(tenant, dict):
            input_faults += [_fault(f"tenant.{key}", "the deployment sets it") for key in _ADDRESSES if key in tenant]
            own = {"service": urls.service, "router": urls.router}
            data["tenant"] = tenant | own | {"adapters": EXPORTS.replace("${run_dir}", str(run_dir))}
        data["model"] = deployment.model.model_dump(mode="json", exclude_defaults=True)
        data["slurm"] = {"checkpoint_signal_s": CHECKPOINT_S}
        data.setdefault("schema", 1)
        data.setdefault("seq_len", deployment.seq_len)
        return input_faults

    draft = read_recipe(path, overrides, name, complete)
    return TenantRecipe(text, draft)


def limit_violations(recipe: Recipe, deployment: Recipe) -> list[Violation]:
    """Return the limits of the deployment that a tenant's recipe exceeds."""
    assert deployment.tenants is not None
    limits: dict[str, tuple[float, float]] = {"seq_len": (recipe.seq_len, deployment.seq_len)}
    if recipe.trainer.lora is not None:
        limits["trainer.lora.rank"] = (recipe.trainer.lora.rank, deployment.tenants.max_rank)
    if recipe.tenant is not None and recipe.tenant.disk_gb is not None and deployment.tenants.disk_gb is not None:
        limits["tenant.disk_gb"] = (recipe.tenant.disk_gb, deployment.tenants.disk_gb)
    return [over_limit(field, value, limit) for field, (value, limit) in limits.items() if value > limit]


def over_limit(field: str, value: object, limit: object) -> Violation:
    """Describe a value that is above a limit of the deployment."""
    return Violation(field, str(value), f"the deployment allows at most {limit}", f"nearest: {limit}")


def tenant_site(runs: Path) -> Site:
    """Describe this machine for a tenant's run, which uses no GPU."""
    return with_python(local_site(runs, Path("/nonexistent")))


def _fault(field: str, why: str) -> InputFault:
    return InputFault(Violation(field, "", why, "leave it out"), tuple(field.split(".")))
