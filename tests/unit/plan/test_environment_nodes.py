"""Environment nodes in a plan: placement of workers, Slurm requests, and refused recipes."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from primeslurm.api.recipes.emulation import cluster_for, for_emulation, site_of
from primeslurm.base.errors import UsageError
from primeslurm.plan.checks.capacity import environment_capacity
from primeslurm.plan.model import Plan
from primeslurm.plan.planner import derive, requests_of
from primeslurm.recipe import Recipe, Site
from primeslurm.recipe.rules.recipe import violations
from primeslurm.slurm.render import render

SITE: dict[str, Any] = {
    "schema": 1,
    "name": "site",
    "nodes": {
        "control": {"partition": "cpu", "cpus": 32, "mem": "256G"},
        "default": {"partition": "gpu", "gpus": 8, "cpus": 96, "gres": "gpu:h200"},
    },
}
BIG = {"partition": "big", "cpus": 64, "mem": "100G", "constraint": "local", "scratch": "/local/"}


def site(**nodes: Any) -> Site:
    return Site.model_validate(SITE | {"nodes": SITE["nodes"] | nodes})


def recipe(nodes: dict[str, Any] | None, workers: tuple[int, ...] = (8, 3), **changes: Any) -> Recipe:
    fields: dict[str, Any] = {
        "schema": 1,
        "name": "r",
        "seq_len": 1024,
        "model": {"path": "/m"},
        "environments": [{"id": "e", "name": f"e{i}", "workers": count} for i, count in enumerate(workers)],
        "deployment": {"train": {"nodes": 2}, "inference": {"type": "multi_node", "nodes_per_replica": 2}},
    }
    deployment = fields["deployment"] | changes.pop("deployment", {})
    if nodes is not None:
        deployment["environments"] = nodes
    return Recipe.model_validate({**fields, "deployment": deployment, **changes})


def planned(made: Recipe, where: Site | None = None, **options: Any) -> Plan:
    return derive(made, where or site(), Path("/runs/r"), **options)


def workers(plan: Plan) -> dict[int, Counter[str]]:
    """Return the number of workers of each environment, by node."""
    found = {
        node.index: Counter(p.name.split("-")[1] for p in node.processes if p.role == "environment")
        for node in plan.nodes
    }
    return {node: counts for node, counts in found.items() if counts}


def test_workers_of_each_environment_are_spread_over_all_nodes() -> None:
    plan = planned(recipe({"nodes": 4}))
    assert [group.name for group in plan.groups] == ["control", "train", "inference", "environments"]
    nodes = [node for node in plan.nodes if node.role == "environments"]
    assert [node.index for node in nodes] == [5, 6, 7, 8]
    spread = workers(plan)
    assert [counts["e0"] for counts in spread.values()] == [2, 2, 2, 2]
    assert sorted(counts["e1"] for counts in spread.values()) == [0, 1, 1, 1]
    assert [p.role for p in plan.nodes[0].processes] == ["orchestrator"]
    assert all(not p.gpus for node in nodes for p in node.processes)
    worker = plan.process("environment-e1-2")
    assert worker.after == ("orchestrator",) and worker.restart == "in_place"
    assert ("--orchestrator", "tcp://${addr:orchestrator:envs}") in list(
        zip(worker.argv, worker.argv[1:], strict=False)
    )
    assert ("--node", "${node}") in list(zip(worker.argv, worker.argv[1:], strict=False))
    assert (plan.totals.environment_nodes, plan.totals.nodes) == (4, 9)


def test_without_environment_nodes_workers_run_on_the_head() -> None:
    plan = planned(recipe(None))
    assert workers(plan) == {0: Counter(e0=8, e1=3)} and plan.totals.environment_nodes == 0
    assert plan.groups[0].nodes == 1, "the head gets no spare without a reason"
    assert workers(planned(recipe(None, deployment={"layout": "single"}))) == {0: Counter(e0=8, e1=3)}


def test_environment_nodes_request_cores_and_memory_of_recipe_or_site() -> None:
    plan = planned(recipe({"nodes": 3}, slurm={"environments": {"constraint": "nvme"}}))
    group = plan.groups[3]
    assert (group.partition, group.gres, group.cpus_per_task, group.mem) == ("cpu", None, 32, "256G"), (
        "its kind of node is that of control"
    )
    assert group.constraint == "nvme"
    asked = {"nodes": 3, "cpus": 48, "memory": "90G"}
    plan = planned(recipe(asked, deployment={"spares": {"environments": 1}}), site(environments=BIG))
    group = plan.groups[3]
    assert (group.partition, group.cpus_per_task, group.mem, group.constraint) == ("big", 48, "90G", "local")
    assert (group.nodes, group.spares) == (4, 1)
    (line,) = [line for line in render(plan).splitlines() if "--partition=big" in line]
    assert "--nodes=4 --ntasks-per-node=1 --cpus-per-task=48 --mem=90G" in line and "gres" not in line


def test_job_survives_the_loss_of_an_environment_node() -> None:
    """Slurm takes a node away from a job only if every component has two."""
    plan = planned(recipe({"nodes": 2}))
    assert plan.groups[0].nodes == 2 and plan.survives_nodes
    assert render(plan).count("--no-kill") == 5  # four components and srun
    assert not planned(recipe({"nodes": 1})).survives_nodes


def test_rollout_files_are_on_the_node_disk() -> None:
    own = "/local/primeslurm-${run_id}-n${node}-environments-${key}"
    for worker in planned(recipe({"nodes": 2}), site(environments=BIG)).nodes[-1].processes:
        assert worker.env["TMPDIR"] == own and worker.scratch == (own,)
    for worker in planned(recipe({"nodes": 2})).nodes[-1].processes:
        assert "TMPDIR" not in worker.env and worker.scratch == (), (
            "the TMPDIR of the plan is the directory of the agent"
        )
        assert worker.env == {"VF_RUN_ID": "${run_id}"}


def test_local_run_has_an_agent_per_environment_node() -> None:
    plan = planned(recipe({"nodes": 2}), site(environments=BIG).model_copy(update={"device": "cpu"}), local=True)
    assert [node.role for node in plan.nodes][-2:] == ["environments"] * 2


SFT = {"task": "sft", "sft": {"data": {"type": "jsonl", "path": "/d"}}, "environments": ()}
SPARES = {"deployment": {"spares": {"environments": 1}}}
CPUS, MEM = ({"slurm": {"environments": asked}} for asked in ({"cpus_per_task": 8}, {"mem": "8G"}))
REFUSED: list[tuple[dict[str, Any] | None, dict[str, Any], str, str]] = [
    ({"nodes": 2, "cpus": 65}, {}, "deployment.environments.cpus", "nearest: 64"),
    ({"nodes": 2}, {"deployment": {"layout": "single"}}, "deployment.environments", "layout: het"),
    ({"nodes": 2}, SFT, "deployment.environments", "leave it out"),
    (None, SPARES, "deployment.spares.environments", "nodes: 1"),
    ({"nodes": 2, "cpus": 4}, CPUS, "deployment.environments.cpus", "keep one"),
    ({"nodes": 2, "memory": "4G"}, MEM, "deployment.environments.memory", "keep one"),
]


@pytest.mark.parametrize(("nodes", "changes", "field", "fix"), REFUSED, ids=lambda value: str(value)[:40])
def test_contradicting_node_options_are_refused(
    nodes: dict[str, Any] | None, changes: dict[str, Any], field: str, fix: str
) -> None:
    made = recipe(nodes, **changes)
    found = violations(made)
    try:
        planned(made, site(environments=BIG))
    except UsageError as error:
        found += error.violations
    assert [fix in violation.fix for violation in found if violation.field == field] == [True], found


def test_unknown_field_is_named() -> None:
    with pytest.raises(ValueError, match="max_rollouts_per_nodes"):
        recipe({"nodes": 2, "max_rollouts_per_nodes": 3})


CAPACITY = [
    (recipe({"nodes": 2}, (128,)), "", "64 workers of a core fit on 64"),
    (recipe({"nodes": 2}, (129,)), "error: .*65 workers of 1 CPU cores, but has 64", ""),
    (recipe({"nodes": 2, "cpus_per_worker": 16}, (9,)), "error: .*5 workers of 16 CPU cores, but has 64", ""),
    (recipe({"nodes": 2, "cpus": 4}, (10,)), "error: .*5 workers of 1 CPU cores, but has 4", ""),
    (recipe({"nodes": 2, "memory_per_worker": "60G"}, (4,)), "error: .*2 workers of 60G, but has 100 GiB", ""),
    (recipe({"nodes": 2, "memory_per_worker": "60G", "memory": "119G"}, (4,)), "error: .*has 119 GiB", ""),
    (recipe({"nodes": 4}, (3,)), "warning: .*3 workers leave 1 of 4 nodes idle", ""),
    (recipe({"nodes": 2, "max_rollouts_per_node": 100}, (4,)), "warning: .*run 200 of 256", "twice batch_size"),
    (recipe(None, (40,)), "warning: .*40 environment workers share the 32 CPU cores of the head node", ""),
    (recipe(None, (32,)), "", ""),
]


SANDBOXES = [
    ({"type": "apptainer", "limits": {"memory_gb": 2}}, {}, 238),  # 128 of 2 GB on 100 GiB
    ({"type": "apptainer", "limits": {"memory_gb": 0.8}}, {}, None),
    ({"type": "apptainer", "limits": {"memory_gb": 2}}, {"max_rollouts_per_node": 50}, None),
    ({"type": "modal", "limits": {"memory_gb": 2}}, {}, None),
    ({"type": "apptainer"}, {}, None),
    ({"type": "subprocess"}, {}, 596),  # 4 GB, and files of 1 GB, by default
    ({"type": "subprocess", "limits": {"memory_gb": 0.5}}, {}, 179),
    ({"type": "subprocess", "limits": {"memory_gb": 0.5, "disk_gb": 0.3}}, {}, None),
    ({"type": "subprocess", "trusted": True}, {}, None),
]


@pytest.mark.parametrize(("runtime", "more", "expected"), SANDBOXES, ids=str)
def test_sandboxes_that_may_take_more_memory_than_a_node_has(
    runtime: dict[str, Any], more: dict[str, Any], expected: int | None
) -> None:
    environments = [{"id": "e", "workers": 4, "runtime": runtime}]
    made = recipe({"nodes": 2, **more}, environments=environments)
    requests, _ = requests_of(made, site(environments=BIG), local=False)
    found = [finding.text for finding in environment_capacity(made, requests) if "by their limits" in finding.text]
    text = f"a node has 100 GiB, but its 128 rollouts may use {expected} GiB by their limits"
    assert found == ([] if expected is None else [text])


@pytest.mark.parametrize(("made", "expected", "why"), CAPACITY, ids=lambda value: str(value)[:40] if value else "-")
def test_nodes_that_are_too_small_or_too_many_are_found(made: Recipe, expected: str, why: str) -> None:
    where = site(environments=BIG)
    requests, problems = requests_of(made, where, local=False)
    assert not problems
    found = [f"{finding.level}: {finding.text}" for finding in environment_capacity(made, requests)]
    assert len(found) == bool(expected), (found, why)
    assert not expected or re.search(expected, found[0]), found


def test_emulated_cluster_ignores_the_size_of_real_nodes() -> None:
    """Nodes of the emulated cluster claim sixteen cores and the memory of this machine."""
    made = for_emulation(recipe({"nodes": 3, "cpus": 512, "memory": "4000G"}))
    spec = cluster_for(made)
    assert (spec.nodes, spec.control_nodes) == (4, 5), "with a spare of control"
    plan = planned(made, site_of(spec))
    assert (plan.groups[3].partition, plan.groups[3].mem) == ("cpu", None)
