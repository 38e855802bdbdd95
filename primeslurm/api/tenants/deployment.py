"""Commands about the tenants of a deployment: add, list, pause, resume, remove, and keys of clients."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import msgspec
import yaml

from primeslurm.api.runs.run import Run, find_run
from primeslurm.api.tenants.recipes import DeploymentUrls, deployment_recipe, limit_violations, over_limit, read_tenant
from primeslurm.base import durable, files
from primeslurm.base.errors import UsageError, Violation
from primeslurm.base.paths import is_file, shipped
from primeslurm.recipe import Recipe
from primeslurm.recipe.fields.suggestions import suggestion
from primeslurm.records.reading import find_record
from primeslurm.run.directory_security import permission_problems
from primeslurm.run.status.run_status import RunStatus
from primeslurm.run.tenants import TenantDirectory, Wanted, add_tenant, key_of, tenants_of, user_of
from primeslurm.wire.transport.addresses import Addresses

_USER = re.compile(r"[A-Za-z0-9][\w-]{0,63}", re.ASCII)


class TenantStatus(msgspec.Struct, frozen=True):
    """State of one tenant, as `primeslurm tenant list --json` prints it."""

    name: str
    wanted: str
    """running, paused or removed: the last command about the tenant."""
    state: str
    """waiting, starting, running, stopping, back-off, paused, completed or removed."""
    reason: str
    """Why its run last ended, or why it waits. Empty if there is nothing to say."""
    failures: int  # consecutive ends without a new checkpoint
    directory: str  # of its run
    max_steps: int | None = None
    step: int | None = None
    reward: float | None = None
    version: int | None = None


@dataclass(frozen=True)
class SharedDeployment:
    """A run of `task: tenants`. Only the URL of its service needs a running job."""

    run: Run

    @cached_property
    def recipe(self) -> Recipe:
        """The recipe of the deployment. Raises UsageError if the run is another kind of run, and RunError."""
        return deployment_recipe(self.run.path)

    def tenants(self) -> list[TenantDirectory]:
        """Return the tenants that are not removed, the oldest first."""
        return [each for each in tenants_of(self.run.path) if each.wanted != "removed"]

    def add(self, path: Path, overrides: Sequence[str] = (), name: str | None = None) -> TenantDirectory:
        """Check a tenant's recipe, and add the tenant. Raises UsageError with all reasons why it cannot be one."""
        limits = self.recipe.tenants
        assert limits is not None
        read = read_tenant(_file_or_ready(path), self.run.path, self.recipe, DeploymentUrls(), overrides, name)
        problems = list(permission_problems(self.run.path))
        examination = read.examined(self.run.path / "tenants", environments=True)
        problems += examination.errors
        variants = [limit_violations(each, self.recipe) for each in read.draft.variants()[:1]]
        problems += [each for found in variants for each in found]
        name = str(read.draft.data.get("name", ""))
        problems += self._clashes(name)
        if len(self.tenants()) >= limits.max_tenants:
            fix = "`primeslurm tenant remove` one, or start a deployment with more"
            why = f"the deployment already has {limits.max_tenants} tenants, as tenants.max_tenants allows"
            problems.append(Violation("tenants", "", why, fix))
        if problems:
            raise UsageError(problems)
        examination.refuse()
        key_of(self.run.path, user_of(name))
        tenant = add_tenant(self.run.path, name, yaml.safe_dump({**read.text, "name": name}, sort_keys=False))
        if tenant is None:
            raise UsageError(self._clashes(name))
        return tenant

    def _clashes(self, name: str) -> list[Violation]:
        there = {each.name: each for each in tenants_of(self.run.path)}
        if name not in there:
            return []
        text = "is a tenant already" if there[name].wanted != "removed" else "was a tenant, and its results are kept"
        return [Violation("name", name, text, "choose another name with --name")]

    def tenant(self, name: str) -> TenantDirectory:
        """Return a tenant by name. Raises UsageError if there is none."""
        names = [each.name for each in self.tenants()]
        if name not in names:
            why = f"{self.run.name} has no such tenant"
            raise UsageError([Violation("NAME", name, why, suggestion(name, names))])
        return TenantDirectory(self.run.path / "tenants" / name)

    def want(self, name: str, wanted: Wanted) -> TenantDirectory:
        """Tell the tenant host to run, pause or remove a tenant. Raises UsageError if there is none of that name."""
        tenant = self.tenant(name)
        tenant.want(wanted)
        return tenant

    def set_disk_quota(self, name: str, disk_gb: float) -> None:
        """Change a tenant's disk quota. Raises UsageError if there is no such tenant, or the quota is too large."""
        tenant, limits = self.tenant(name), self.recipe.tenants
        assert limits is not None
        if limits.disk_gb is not None and disk_gb > limits.disk_gb:
            raise UsageError([over_limit("--disk-gb", f"{disk_gb:g}", f"{limits.disk_gb:g}")])
        recipe = yaml.safe_load(files.read_text(tenant.recipe_file))
        recipe["tenant"] = (recipe.get("tenant") or {}) | {"disk_gb": disk_gb}
        times = tenant.recipe_file.stat()
        durable.write(tenant.recipe_file, yaml.safe_dump(recipe, sort_keys=False))
        os.utime(tenant.recipe_file, ns=(times.st_atime_ns, times.st_mtime_ns))  # tenants are ordered by this time

    def key(self, user: str) -> tuple[str | None, str]:
        """Return the URL of the Tinker service (None if it does not run), and a user's key, which may be new.

        Raises UsageError if the name cannot be one of a user.
        """
        _ = self.recipe
        if not _USER.fullmatch(user):
            why = "must be letters, digits, `_` and `-`"
            raise UsageError([Violation("USER", user, why, "for example alice")])
        if problems := permission_problems(self.run.path):
            raise UsageError(problems)
        return self._service(), key_of(self.run.path, user)

    def _service(self) -> str | None:
        attempt = self.run.directory.latest()
        addresses = find_record(attempt.addresses_file, Addresses)
        if attempt.end() is not None or addresses is None:
            return None
        return f"http://{addresses.hosts['tinker']}:{addresses.ports['tinker']['http']}"

    def status(self, tenant: TenantDirectory) -> tuple[TenantStatus, RunStatus | None]:
        """Return the state of a tenant, and of its run, if it has one. Raises RunError if the run is damaged."""
        run, state = Run(tenant.run.path), tenant.state()
        status = run.status() if tenant.run.exists() and tenant.run.attempts() else None
        progress = status and status.metrics
        return (
            TenantStatus(
                name=tenant.name,
                wanted=tenant.wanted,
                state=state.state,
                reason=state.reason,
                failures=state.failures,
                directory=str(tenant.run.path),
                max_steps=status.max_steps if status else None,
                step=status.step if status else None,
                reward=progress.get("reward/mean") if progress else None,
                version=status.version if status else None,
            ),
            status,
        )


def _file_or_ready(path: Path) -> Path:
    """Return the file of a ready tenant if the path is its bare name and no such file exists; else the path."""
    ready = shipped("recipes") / "tenants" / f"{path.name.removesuffix('.yaml')}.yaml"
    return ready if path.parent == Path() and not is_file(path) and is_file(ready) else path


def find_deployment(name: str, runs: Path | None = None) -> SharedDeployment:
    """Return a deployment by its name or directory. Raises RunError if there is none, UsageError if it is not one."""
    deployment = SharedDeployment(find_run(name, runs))
    _ = deployment.recipe
    return deployment
