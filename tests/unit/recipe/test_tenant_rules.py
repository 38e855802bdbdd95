"""Rules and plan of a tenant's run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from primeslurm.api.sites import local_site
from primeslurm.plan.model import Plan
from primeslurm.plan.planner import derive
from primeslurm.recipe import Recipe
from primeslurm.recipe.reading.recipe_files import merge
from primeslurm.recipe.rules.recipe import violations
from tests.support.planning import reviewed
from tests.support.recipes import site

TENANT = {"service": "http://a:1", "router": "http://b:2", "adapters": "/shared/adapters"}


def tenant_recipe(**changes: Any) -> Recipe:
    base = {
        "name": "tenant",
        "seq_len": 64,
        "model": {"path": "/models/tiny"},
        "environments": [{"id": "reverse-text"}],
        "trainer": {"lora": {"rank": 8}},
        "tenant": TENANT,
    }
    return Recipe.model_validate(merge(base, changes))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"trainer": {"lora": None}}, "trainer.lora"),
        ({"trainer": {"lora": {"alpha": 16}}}, "trainer.lora.alpha"),
        ({"trainer": {"lora": {"targets": ["q_proj"]}}}, "trainer.lora.targets"),
        ({"trainer": {"lora": {"engines": "merged"}}}, "trainer.lora.engines"),
        ({"trainer": {"lora": {"save_adapter": True}}}, "trainer.lora.save_adapter"),
        ({"trainer": {"optimizer": {"type": "muon"}}}, "trainer.optimizer.type"),
        ({"trainer": {"loss": {"type": "custom", "function": "a.b:c"}}}, "trainer.loss.type"),
        ({"trainer": {"parallelism": {"cp": 2}}}, "trainer.parallelism"),
        ({"trainer": {"memory": {"lm_head_chunk": 8}}}, "trainer.memory"),
        ({"trainer": {"router_replay": True}}, "trainer.router_replay"),
        ({"trainer": {"fp8": True}}, "trainer.fp8"),
        ({"trainer": {"compile": True}}, "trainer.compile"),
        ({"model": {"vlm": {}}}, "model.vlm"),
        ({"deployment": {"layout": "single"}}, "deployment"),
        ({"inference": {"parallel": {"tp": 2}}}, "inference"),
        ({"weights": {"transport": "nccl"}}, "weights.transport"),
        ({"weights": {"deltas": True}}, "weights.deltas"),
        ({"checkpoint": {"local": "/dev/shm"}}, "checkpoint.local"),
        ({"orchestrator": {"sampling": {"temperature": 0.5}}}, "orchestrator.sampling.temperature"),
        (
            {"environments": [{"id": "reverse-text", "sampling": {"temperature": 2}}]},
            "environments.0.sampling.temperature",
        ),
        ({"task": "serve", "environments": []}, "task"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_the_deployment_cannot_do_is_one_error(changes: dict[str, Any], field: str) -> None:
    (violation,) = violations(tenant_recipe(**changes))
    assert violation.field == field and violation.why and violation.fix


def test_all_mistakes_are_found_in_one_pass() -> None:
    recipe = tenant_recipe(
        trainer={"lora": None, "optimizer": {"type": "sgd"}, "fp8": True}, deployment={"layout": "single"}
    )
    fields = [violation.field for violation in violations(recipe)]
    assert fields == ["deployment", "trainer.lora", "trainer.optimizer.type", "trainer.fp8"]


def outline(plan: Plan) -> dict[str, tuple[str, int, tuple[int, ...]]]:
    return {process.name: (process.role, process.node, process.gpus) for process in plan.processes()}


@pytest.mark.parametrize("local", [True, False])
def test_all_processes_share_one_node_without_gpus(tmp_path: Path, local: bool) -> None:
    recipe = tenant_recipe()
    assert violations(recipe) == []
    plan = derive(recipe, local_site(tmp_path, tmp_path) if local else site(), tmp_path / "tenant", local=local)
    assert outline(plan) == {
        "gateway": ("router", 0, ()),
        "trainer-rank-0": ("trainer", 0, ()),
        "orchestrator": ("orchestrator", 0, ()),
        "environment-reverse-text-0": ("environment", 0, ()),
    }
    assert (plan.totals.gpus, plan.totals.engines, plan.allocated) == (0, 1, 1)
    (replica,) = plan.replicas
    assert (replica.router, replica.engines) == ("gateway", ("gateway",))
    assert not plan.pass_env, "keys of the deployment are in no environment"
    assert plan.process("trainer-rank-0").restart == "in_place"


def test_resources_of_the_deployment_are_not_estimated() -> None:
    findings, estimate = reviewed(tenant_recipe(), site())
    assert estimate is None and not [finding for finding in findings if finding.field != "model.path"]
