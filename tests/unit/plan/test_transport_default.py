"""Default of `weights.transport`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from primeslurm.plan.auto_fields import choose_transport, resolve_auto_fields
from primeslurm.plan.checks.compatibility import conflicts
from primeslurm.plan.checks.rule import RuleContext
from primeslurm.plan.planner import derive, make_emulated_plan
from primeslurm.recipe import Recipe
from tests.support.recipes import recipe_data, site
from tests.unit.plan.test_plan import RUN, colocated

BACKENDS = {"nccl": "primeslurm_collective", "filesystem": "primeslurm_filesystem"}


def recipe(**changes: Any) -> Recipe:
    return Recipe.model_validate(recipe_data(**changes))


@pytest.mark.parametrize(
    ("changes", "device", "transport", "reason"),
    [
        ({}, "cuda", "nccl", "separate GPUs"),
        ({"deployment": {"layout": "single"}}, "cuda", "nccl", "separate GPUs"),
        ({}, "cpu", "filesystem", "no GPUs"),
        (colocated(4, 4), "cuda", "filesystem", "share GPUs"),
        ({"trainer": {"lora": {"save_adapter": True}}}, "cuda", "filesystem", "LoRA"),
        ({"inference": {"batch_invariant": True}}, "cuda", "filesystem", "batch-invariant"),
        ({"weights": {"keep": 20}}, "cuda", "filesystem", "weights.keep"),
        ({"weights": {"deltas": True}}, "cuda", "filesystem", "weights.deltas"),
        ({"weights": {"transport": "filesystem"}}, "cuda", "filesystem", "set by the recipe"),
        ({"weights": {"transport": "nccl"}}, "cpu", "nccl", "set by the recipe"),
    ],
)
def test_weights_go_over_nccl_only_where_it_works(
    changes: dict[str, Any], device: str, transport: str, reason: str
) -> None:
    chosen = choose_transport(recipe(**changes), device)
    assert chosen.transport == transport and reason in chosen.reason
    resolved = resolve_auto_fields(recipe(**changes), None, device)
    where = site(device=device)
    errors = [finding for finding in conflicts(RuleContext(resolved, where, [], None)) if finding.level == "error"]
    assert resolved.weights.transport == transport and not errors
    engine = derive(recipe(**changes), where, RUN).process("engine-r0-0")
    assert BACKENDS[transport] in " ".join(engine.argv)


def test_emulated_runs_use_files_also_on_a_site_with_gpus() -> None:
    planned = make_emulated_plan(recipe(), site(), Path("/shared/runs/test-run"), None)
    assert planned.plan.weight_transport == choose_transport(recipe(), "cpu")
    assert planned.recipe.weights.transport == "filesystem"
