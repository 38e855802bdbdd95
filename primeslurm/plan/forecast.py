"""The estimate as data: it is part of the Plan, and printed by `primeslurm plan`."""

from __future__ import annotations

from primeslurm.recipe.fields.section import Section


class RoleMemory(Section):
    """The memory of one GPU of a role, in GiB."""

    role: str
    gpu: str
    gpu_gib: float
    limit_gib: float
    """What the role may use of a GPU."""
    parts: dict[str, float]
    """What it is used for. The KV cache takes what the others leave."""
    needed_gib: float
    """What must fit: everything but the KV cache."""
    host_gib_per_node: float = 0.0
    """Host memory of a node for what is offloaded."""
    kv_bytes_per_token: int = 0
    kv_tokens: int = 0
    """Tokens in one GPU's KV cache."""
    longest: float = 0.0
    """Sequences of the longest length that all engines of the role hold at once."""
    typical: float = 0.0
    """The same for sequences of a quarter of that length."""

    @property
    def free_gib(self) -> float:
        """What is left of the limit; for engines it becomes KV cache."""
        return round(self.limit_gib - self.needed_gib, 1)


class Quantity(Section):
    """One derived quantity, and how it was worked out."""

    name: str
    value: float
    unit: str
    how: str
    most: float | None = None
    """Upper bound, where `value` is a lower bound."""


class Estimate(Section):
    """What the plan needs and gives, as far as the model and the GPUs are known."""

    source: str
    """Where the shape of the model is from."""
    roles: tuple[RoleMemory, ...] = ()
    amounts: tuple[Quantity, ...] = ()
