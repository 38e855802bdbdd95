"""Plan and checks of a deployment that tenants share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from primeslurm.base.errors import UsageError
from primeslurm.models.catalog import catalog
from primeslurm.plan.checks.compatibility import conflicts
from primeslurm.plan.checks.rule import RuleContext
from primeslurm.plan.checks.unsupported import unsupported
from primeslurm.plan.estimates.estimate import engine_layout, trainer_layout
from primeslurm.plan.estimates.trainer_memory import trainer_memory
from primeslurm.plan.planner import derive
from primeslurm.recipe import Recipe
from primeslurm.recipe.reading.recipe_files import merge
from primeslurm.recipe.rules.recipe import violations
from tests.support.recipes import site

RUN = Path("/shared/runs/lab")
DATA: dict[str, Any] = {
    "name": "lab",
    "task": "tenants",
    "seq_len": 128,
    "model": {"path": "/models/tiny"},
    "tenants": {"max_tenants": 3, "max_rank": 24},
    "deployment": {
        "train": {"gpus_per_node": 1},
        "inference": {"type": "multi_node", "nodes_per_replica": 2, "gpus_per_node": 1},
    },
}


def recipe(**changes: Any) -> Recipe:
    return Recipe.model_validate(merge(DATA, changes))


def test_a_deployment_has_a_service_engines_a_router_and_a_tenant_host() -> None:
    plan = derive(recipe(), site(), RUN)
    processes = {process.name: process for process in plan.processes()}
    assert sorted(processes) == ["engine-r0-0", "engine-r0-1", "router-0", "tenant-host", "tinker"]
    assert [(node.role, [p.name for p in node.processes]) for node in plan.nodes][:2] == [
        ("control", ["tenant-host"]),
        ("train", ["tinker"]),
    ]
    assert processes["tinker"].gpus == (0,) and plan.totals.trainer_gpus == 1
    assert {process.restart for process in processes.values()} == {"in_place"}, "each restarts alone"
    assert processes["tenant-host"].after == ("tinker", "router-0")
    service = processes["tinker"].argv
    assert service[service.index("--engines") + 1] == "http://${addr:router-0:http}"
    host = processes["tenant-host"].argv
    assert host[host.index("--service") + 1] == "http://${addr:tinker:http}"
    assert host[host.index("--router") + 1] == "http://${addr:router-0:http}"


def test_the_ranks_of_the_service_restart_together_and_only_the_first_serves() -> None:
    plan = derive(recipe(deployment={"train": {"nodes": 2, "gpus_per_node": 4}}), site(), RUN)
    ranks = [process for process in plan.processes() if process.role == "tinker"]
    assert [rank.name for rank in ranks] == ["tinker", *(f"tinker-rank-{number}" for number in range(1, 8))]
    assert {(rank.restart, rank.restart_group) for rank in ranks} == {("unit", "tinker")}
    assert [rank.gpus for rank in ranks] == [(gpu,) for _ in range(2) for gpu in range(4)]
    assert [(rank.env["RANK"], rank.env["LOCAL_RANK"]) for rank in ranks[3:5]] == [("3", "3"), ("4", "0")]
    assert {(rank.env["WORLD_SIZE"], rank.env["MASTER_ADDR"]) for rank in ranks} == {("8", "${host:tinker}")}
    assert ranks[0].ports.keys() == {"http", "master"} and ranks[0].health and not ranks[0].heartbeats
    assert not any(rank.ports or rank.health for rank in ranks[1:]) and all(rank.heartbeats for rank in ranks[1:])
    assert "--engines" not in ranks[1].argv and plan.totals.trainer_gpus == 8
    assert derive(recipe(deployment={"train": {"gpus_per_node": None}}), site(), RUN).totals.trainer_gpus == 8


def test_ranks_must_fit_the_layout_and_the_model() -> None:
    with pytest.raises(UsageError, match=r"trainer\.parallelism\.ep = 3"):
        derive(recipe(deployment={"train": {"gpus_per_node": 4}}, trainer={"parallelism": {"ep": 3}}), site(), RUN)
    layout = recipe(trainer={"parallelism": {"ep": 2, "cp": 3}})
    found = conflicts(RuleContext(layout, site(), [], catalog()["Qwen/Qwen3-8B"].shape))
    assert {finding.field for finding in found} == {"trainer.parallelism.ep", "trainer.parallelism.cp"}


def test_engines_have_room_for_two_versions_of_each_tenant() -> None:
    engine = derive(recipe(), site(), RUN).process("engine-r0-0")
    argv = engine.argv
    assert "--enable-lora" in argv
    assert argv[argv.index("--max-loras") + 1] == "6"
    assert argv[argv.index("--max-lora-rank") + 1] == "32", "the next rank that vLLM has"
    assert engine.env["PRIMESLURM_ADAPTERS"] == "${run_dir}/tinker/checkpoints"


@pytest.mark.parametrize("layout", ["single", "one_node"])
def test_without_a_control_node_the_host_runs_beside_the_service(layout: str) -> None:
    plan = derive(recipe(deployment={"layout": layout, "inference": {"nodes_per_replica": 1}}), site(), RUN)
    first = [process.name for process in plan.nodes[0].processes]
    assert {"tinker", "tenant-host"} <= set(first)


def test_everything_that_does_not_work_is_named_in_one_pass() -> None:
    bad = recipe(
        environments=[{"id": "reverse-text"}],
        trainer={"lora": {"rank": 8}, "parallelism": {"ep": 2, "ep_backend": "deepep"}},
        inference={
            "quantization": "fp8",
            "expert_parallel": True,
            "router": {"type": "dynamo"},
            "speculative": {"method": "ngram", "num_tokens": 2},
            "batch_invariant": True,
        },
        deployment={"inference": {"type": "disaggregated"}},
    )
    found = [violation.field for violation in violations(bad)]
    for field in (
        *("environments", "trainer.lora", "inference.quantization", "inference.expert_parallel"),
        *("inference.router.type", "inference.speculative", "inference.batch_invariant"),
        *("trainer.parallelism.ep_backend", "deployment.inference.type"),
    ):
        assert found.count(field) == 1, field


def test_the_section_is_needed_for_its_task_only() -> None:
    without = Recipe.model_validate({**DATA, "tenants": None})
    assert [str(each) for each in violations(without)] == [
        "tenants: task tenants needs this section (add `tenants: {max_tenants: 4, max_rank: 32}`)"
    ]
    assert [each.field for each in violations(recipe(task="serve"))] == ["tenants"]
    replicas = recipe(deployment={"inference": {"num_replicas": 2}})
    assert [each.field for each in violations(replicas)] == ["deployment.inference.num_replicas"]


def test_more_gpus_than_a_node_has_are_refused() -> None:
    with pytest.raises(UsageError):
        derive(recipe(deployment={"inference": {"gpus_per_node": 9}}), site(), RUN)


def test_a_model_whose_adapters_vllm_cannot_apply_is_an_error() -> None:
    dense, moe = catalog()["Qwen/Qwen3-8B"].shape, catalog()["Qwen/Qwen3-30B-A3B"].shape
    assert not unsupported(recipe(), dense, dense.model_type)
    (finding,) = unsupported(recipe(), moe, moe.model_type)
    assert (finding.level, finding.field) == ("error", "model.path") and "experts" in finding.text


def test_estimates_count_the_adapters_of_all_tenants() -> None:
    shape = catalog()["Qwen/Qwen3-8B"].shape
    one, four = (recipe(tenants={"max_tenants": number}) for number in (1, 4))
    engines = [engine_layout(each, "engine", 1, shape).adapter_bytes for each in (one, four)]
    assert engines[1] == 4 * engines[0] > 2 * 24 * 36 * 4096
    trainers = [trainer_layout(each, 1, shape) for each in (one, four)]
    assert trainers[1].lora_parameters == 4 * trainers[0].lora_parameters == 4 * engines[0] // 4
    assert trainers[0].tokens == 8192 and trainers[0].logit_tokens == 1024
    alone, shared = (trainer_memory(shape, trainer_layout(recipe(), gpus, shape)) for gpus in (1, 8))
    assert shared.weights == alone.weights // 8 and shared.optimizer == alone.optimizer, "one rank has all adapters"
