"""Disk use of tenants: the files of their runs, and their checkpoints in the Tinker service."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import yaml

from primeslurm.api.tenants.host import DiskUse
from primeslurm.base import files
from primeslurm.recipe.sections.tenant_deployment import Tenants
from primeslurm.run.tenants import SESSIONS_FILE, TenantDirectory, tenants_of

log = logging.getLogger(__name__)
# Time between two measurements of all tenants [s].
INTERVAL_S = 30.0


def measure(tenant: TenantDirectory, run_dir: Path, limits: Tenants) -> DiskUse:
    """Measure a tenant with a quota; without one, its use counts as 0. Raises OSError or ValueError."""
    recipe = yaml.safe_load(files.read_text(tenant.recipe_file))
    limit_gb = (recipe.get("tenant") or {}).get("disk_gb") or limits.disk_gb
    if limit_gb is None:
        return DiskUse()
    directories = [tenant.path]
    for session in files.read_json(tenant.run.path / SESSIONS_FILE) or []:
        directories += files.listing(run_dir / "tinker" / "checkpoints", f"{session}:*")
    return DiskUse(sum(_size(directory) for directory in directories), limit_gb * 1e9)


def _size(directory: Path) -> int:
    statuses = [files.status(path) for path in files.files_below(directory)]
    return sum(status.st_size for status in statuses if status is not None)


class DiskMonitor(threading.Thread):
    """Measures all tenants in turn. It is a thread, because a large directory on a busy file system takes long."""

    def __init__(self, run_dir: Path, limits: Tenants) -> None:
        super().__init__(name="disk-use", daemon=True)
        self._run_dir, self._limits = run_dir, limits
        self.uses: dict[str, DiskUse] = {}
        """The last measurement of each tenant."""

    def run(self) -> None:
        while True:
            self.measure_all()
            threading.Event().wait(INTERVAL_S)

    def measure_all(self) -> None:
        try:
            tenants = tenants_of(self._run_dir)
        except OSError as error:
            log.warning("%s", error)
            return
        for tenant in tenants:
            try:
                if tenant.wanted == "running":
                    self.uses[tenant.name] = measure(tenant, self._run_dir, self._limits)
            except (OSError, ValueError, yaml.YAMLError) as error:  # the others must not suffer
                log.warning("disk use of tenant %s: %s", tenant.name, error)
