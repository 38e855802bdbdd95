"""Limits of a deployment that several tenants share."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PositiveFloat, PositiveInt

from primeslurm.recipe.fields.section import Section

# The largest rank that vLLM's kernels for adapters have.
LARGEST_RANK = 512
# Tokens that the Tinker service computes in one pass, including padding. A longer sequence is computed alone.
BATCH_TOKENS = 8192
# Tokens whose logits it computes at once.
LOGIT_TOKENS = 1024


class Tenants(Section):
    """Limits of a deployment, for `task: tenants`. Memory for adapters is reserved up to these limits."""

    max_tenants: PositiveInt = 4
    """Largest number of tenants. Paused tenants count, removed ones do not."""
    max_rank: Annotated[int, Field(ge=1, le=LARGEST_RANK)] = 32
    """Largest LoRA rank of a tenant or client. Larger values slow down all of them."""
    disk_gb: PositiveFloat | None = None
    """Disk quota of a tenant that sets no `tenant.disk_gb`, and the largest one that a tenant can set [GB]. Default: no
    quota."""

    @property
    def engine_adapters(self) -> int:
        """Adapters that an engine can use at once: the newest version of each tenant, and the one before."""
        return 2 * self.max_tenants
