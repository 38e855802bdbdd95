"""The estimate as data. It is part of the Plan, and `primeslurm plan` prints it."""

from __future__ import annotations

from primeslurm.recipe.fields.section import Section


class RoleMemory(Section):
    """Memory of one GPU of a role [GiB]."""

    role: str
    gpu: str
    gpu_gib: float
    limit_gib: float  # memory that the role may use
    parts: dict[str, float]  # Memory by purpose. The KV cache gets the rest.
    needed_gib: float  # memory that must fit: everything but the KV cache
    host_gib_per_node: float = 0.0  # host memory per node for offloaded data and checkpoint copies
    kv_bytes_per_token: int = 0
    kv_tokens: int = 0  # tokens in the KV cache of one GPU
    longest: float = 0.0  # sequences of the longest length that all engines of the role hold at once
    typical: float = 0.0  # sequences of a quarter of the longest length that they hold

    @property
    def free_gib(self) -> float:
        """Return the rest of the limit [GiB]. Engines use it as KV cache."""
        return round(self.limit_gib - self.needed_gib, 1)


class Quantity(Section):
    """A derived quantity and its derivation."""

    name: str
    value: float
    unit: str
    how: str
    most: float | None = None  # upper bound, if `value` is a lower bound


class Estimate(Section):
    """Memory and other quantities of a run, as far as the model and the GPUs are known."""

    source: str  # source of the model's shape
    roles: tuple[RoleMemory, ...] = ()
    amounts: tuple[Quantity, ...] = ()
    rates: tuple[Quantity, ...] = ()  # rates of the train nodes that the estimate uses, and where they come from
