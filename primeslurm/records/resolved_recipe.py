"""The part of `recipe.resolved.json` that reports and advice read, from any release.

Programs that run something read all of it as `primeslurm.recipe.Recipe`. Here, missing fields have a default and
unknown fields are ignored.
"""

from __future__ import annotations

from typing import Any

import msgspec

FILE = "recipe.resolved.json"


class RoleNodes(msgspec.Struct, frozen=True):
    """`deployment.inference.prefill` or `.decode`."""

    num_replicas: int | None = None


class InferenceNodes(msgspec.Struct, frozen=True):
    """`deployment.inference`."""

    type: str = ""
    prefill: RoleNodes = RoleNodes()
    decode: RoleNodes = RoleNodes()


class DeploymentOfRun(msgspec.Struct, frozen=True):
    """`deployment`."""

    inference: InferenceNodes | None = None


class OrchestratorOfRun(msgspec.Struct, frozen=True):
    """`orchestrator`."""

    batch_size: int = 0
    max_inflight_rollouts: int | None = None


class InferenceOfRun(msgspec.Struct, frozen=True):
    """`inference`."""

    kv_offload: Any = None


class EvaluationOfRun(msgspec.Struct, frozen=True):
    """`evaluation`."""

    keep_best: str | None = None


class RunRecipe(msgspec.Struct, frozen=True):
    """`recipe.resolved.json`."""

    task: str = "rl"
    max_steps: int = 0
    deployment: DeploymentOfRun | None = None
    orchestrator: OrchestratorOfRun | None = None
    inference: InferenceOfRun | None = None
    evaluation: EvaluationOfRun | None = None

    @property
    def batch_size(self) -> int:
        """Rollouts per step; 0 for a run without rollouts."""
        return self.orchestrator.batch_size if self.orchestrator else 0
