"""A tenant's run: its trainer is a Tinker service, and its engines belong to a deployment."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, PositiveFloat, PositiveInt

from primeslurm.recipe.fields.section import Section
from primeslurm.recipe.fields.types import HttpUrl

# Scale of adapters of a Tinker service: a weight changes by ALPHA / rank times the product of the adapter's factors.
ALPHA = 32.0
# Range of weights of tenants.
LEAST_WEIGHT, MOST_WEIGHT = 0.01, 100.0


class Tenant(Section):
    """Addresses of the deployment, and the limits of this tenant.

    The run's trainer reads a key of the deployment, and its gateway reads the secret, from files in its run directory.
    """

    service: HttpUrl
    """URL of the Tinker service, for example `http://node1:8410`."""
    router: HttpUrl
    """URL of the router of the deployment's engines, for example `http://node2:8100`."""
    adapters: str
    """Directory `tinker/checkpoints` of the deployment's run directory, in which the service exports adapters. Requests
    name an adapter by its path below this directory."""
    max_inflight: PositiveInt | None = None
    """Largest number of requests to the deployment's engines at once; further requests wait. Default: no limit."""
    tokens_per_second: PositiveFloat | None = None
    """Largest average rate of sampled tokens; requests wait while the average is above it. Default: no limit."""
    disk_gb: PositiveFloat | None = None
    """Disk quota: largest size of this tenant's run directory and its checkpoints in the Tinker service [GB]. A tenant
    that uses more is paused with a checkpoint. It continues when it uses 5 % less, or its quota is raised. Default:
    `tenants.disk_gb` of the deployment."""
    weight: float = Field(1.0, ge=LEAST_WEIGHT, le=MOST_WEIGHT)
    """Share of the Tinker service while requests of others wait, for example 2: twice the tokens of a tenant or client
    of weight 1. Clients of the Tinker API have weight 1."""

    @property
    def deployment(self) -> Path:
        """The deployment's run directory, which has its secret and all keys."""
        return Path(self.adapters).parent.parent
