"""Placement, ports and URLs, by example and by property."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from primeslurm.api.sites import local_site
from primeslurm.base import logs
from primeslurm.base.errors import UsageError
from primeslurm.node.agent.node_context import Addresses, resolve
from primeslurm.plan.batch_job import node_memory
from primeslurm.plan.checks.run_checks import check_plan
from primeslurm.plan.model import NodeRole, Plan
from primeslurm.plan.placement.resources import component_of, resource_requests
from primeslurm.plan.planner import derive
from primeslurm.recipe import Recipe
from primeslurm.recipe.reading.recipe_files import merge
from primeslurm.recipe.rules.recipe import violations
from primeslurm.wire.names import LOCAL_CHECKPOINTS
from tests.support.recipes import recipe_data, site

RUN = Path("/shared/runs/test-run")


def plan_for(local: bool = False, site_changes: dict[str, Any] | None = None, **changes: Any) -> Plan:
    return derive(Recipe.model_validate(recipe_data(**changes)), site(**(site_changes or {})), RUN, local=local)


def disaggregated(
    replicas: int = 1, prefill: tuple[int, int] = (1, 1), decode: tuple[int, int] = (1, 1)
) -> dict[str, Any]:
    return {
        "deployment": {
            "inference": {
                "type": "disaggregated",
                "num_replicas": replicas,
                "prefill": {"nodes_per_replica": prefill[0], "num_replicas": prefill[1]},
                "decode": {"nodes_per_replica": decode[0], "num_replicas": decode[1]},
            }
        }
    }


def test_single_layout_is_one_component_with_the_same_processes() -> None:
    het, single = plan_for(), plan_for(deployment={"layout": "single"})
    assert [group.nodes for group in single.groups] == [2]
    assert {p.name for p in single.processes()} == {p.name for p in het.processes()}
    assert single.process("orchestrator").node == 0


def one_node(train: int | None, inference: dict[str, Any], **changes: Any) -> dict[str, Any]:
    deployment = {"layout": "one_node", "train": {"gpus_per_node": train}, "inference": inference, **changes}
    return {"deployment": deployment}


@pytest.mark.parametrize(
    ("train", "inference", "gpus"),
    [
        (4, {"gpus_per_node": 4}, {"trainer": [0, 1, 2, 3], "engine": [4, 5, 6, 7]}),
        (2, {}, {"trainer": [0, 1], "engine": [2, 3, 4, 5, 6, 7]}),
        (1, {"gpus_per_node": 1}, {"trainer": [0], "engine": [1]}),
        (
            4,
            {"type": "disaggregated", "prefill": {"gpus_per_node": 1}, "decode": {"gpus_per_node": 3}},
            {"trainer": [0, 1, 2, 3], "prefill": [4], "decode": [5, 6, 7]},
        ),
    ],
    ids=["4+4", "2+rest", "1+1", "4+1+3"],
)
@pytest.mark.parametrize("local", [False, True], ids=["slurm", "local"])
def test_one_node_layout_asks_slurm_for_one_node_and_divides_its_gpus(
    local: bool, train: int, inference: dict[str, Any], gpus: dict[str, list[int]]
) -> None:
    plan = plan_for(local=local, **one_node(train, inference))
    (group,), (node,) = plan.groups, plan.nodes
    total = sum(map(len, gpus.values()))
    assert (group.nodes, group.gres, plan.totals.nodes, plan.totals.gpus) == (1, f"gpu:{total}", 1, total)
    used = {role: [gpu for p in node.processes if p.role == role for gpu in p.gpus] for role in gpus}
    assert used == gpus
    ports = [port for process in node.processes for port in process.ports.values()]
    assert len(ports) == len(set(ports)), "two processes of one node prefer the same port"
    assert {p.node for p in node.processes} == {0}
    assert plan.replicas[0].nodes == (0,)
    assert {p.name for p in node.processes} >= {"orchestrator", "router-0", "environment-reverse-text-0"}


def test_one_node_layout_takes_its_part_of_the_nodes_cores_and_memory_once() -> None:
    nodes = {"default": {"partition": "gpu", "gpus": 8, "cpus": 96, "mem": "1600G"}}
    plan = plan_for(site_changes={"nodes": nodes}, **one_node(1, {"gpus_per_node": 1}))
    assert (plan.groups[0].cpus_per_task, plan.groups[0].mem) == (24, "400G")


def colocated(train: int | None, inference: int | None, **changes: Any) -> dict[str, Any]:
    shape = one_node(train, {"gpus_per_node": inference}, colocated=True)
    return merge({**shape, "inference": {"gpu_memory_utilization": 0.4}}, changes)


@pytest.mark.parametrize(
    ("train", "inference", "gpus"), [(1, 1, 1), (4, None, 4), (None, 2, 2), (None, None, 8)], ids=str
)
@pytest.mark.parametrize("local", [False, True], ids=["slurm", "local"])
def test_colocated_trainer_and_engines_use_the_same_gpus_and_slurm_bills_them_once(
    local: bool, train: int | None, inference: int | None, gpus: int
) -> None:
    plan = plan_for(local=local, **colocated(train, inference))
    (group,), (node,) = plan.groups, plan.nodes
    used = {role: [gpu for p in node.processes if p.role == role for gpu in p.gpus] for role in ("trainer", "engine")}
    assert used == {"trainer": list(range(gpus)), "engine": list(range(gpus))}
    assert (group.gres, group.cpus_per_task, plan.totals.gpus) == (f"gpu:{gpus}", 12 * gpus, gpus)
    assert (plan.totals.trainer_gpus, plan.totals.engines) == (gpus, gpus)


def test_a_colocated_trainer_starts_after_the_engines_have_measured_their_gpus() -> None:
    plan = plan_for(**colocated(2, 2))
    for rank in range(2):
        assert plan.process(f"trainer-rank-{rank}").after == ("orchestrator", "engine-r0-0", "engine-r0-1")
    apart = plan_for(**one_node(1, {"gpus_per_node": 1}))
    assert apart.process("trainer-rank-0").after == ("orchestrator",)


def test_a_teacher_has_gpus_of_its_own_beside_colocated_roles() -> None:
    teacher = {"type": "engines", "path": "/models/teacher", "gpus_per_node": 2}
    plan = plan_for(**colocated(2, 2, teacher=teacher, orchestrator={"advantages": "opd"}))
    assert [p.gpus for p in plan.processes() if p.role == "teacher"] == [(2,), (3,)]
    assert (plan.groups[0].gres, plan.totals.gpus) == ("gpu:4", 4)


def test_evaluation_of_a_colocated_recipe_has_the_gpus_for_its_engines_alone() -> None:
    evaluation = {"environments": [{"id": "reverse-text"}]}
    plan = plan_for(**colocated(2, 2, task="eval", evaluation=evaluation))
    assert [p.gpus for p in plan.processes() if p.gpus] == [(0,), (1,)]


def test_the_mooncake_store_has_one_client_on_one_node() -> None:
    inference = {"type": "disaggregated", "prefill": {"gpus_per_node": 1}, "decode": {"gpus_per_node": 1}}
    offload = {"kv_offload": {"type": "mooncake", "cpu": {"bytes": 2**30}}}
    plan = plan_for(**one_node(1, inference), inference=offload)
    assert [p.name for p in plan.processes() if p.role == "store"] == ["store-master", "store-0"]
    for name in ("prefill-r0-0", "decode-r0-0"):
        assert plan.process(name).after == ("store-0",)


BAD = [
    (
        {"deployment": {"train": {"gpus_per_node": 16}}},
        {},
        ["deployment.train.gpus_per_node = 16: nodes of partition gpu have 8 GPUs (nearest: 8)"],
    ),
    (
        {"inference": {"parallel": {"tp": 3}}},
        {},
        ["inference.parallel.tp = 3: must divide the 8 GPUs of each inference node (nearest: 2)"],
    ),
    (
        {"trainer": {"parallelism": {"cp": 3}}},
        {},
        ["trainer.parallelism = dp_replicate=1, cp=3: dp_replicate x cp = 3 must divide the 8 trainer GPUs"],
    ),
    (
        {"trainer": {"parallelism": {"ep": 5}}},
        {},
        ["trainer.parallelism.ep = 5: must divide the 8 GPUs of one FSDP group (nearest: 4)"],
    ),
    (
        {},
        {"nodes": {"default": {"gpus": 0}}},
        [
            "deployment.train: role train needs GPUs, but partition gpu has none",
            "deployment.inference: role inference needs GPUs, but partition gpu has none",
        ],
    ),
    (
        {"deployment": {"layout": "single"}},
        {"nodes": {"train": {"partition": "big", "gpus": 8, "cpus": 8}}},
        ["deployment.layout = single: one allocation cannot span partitions big, gpu (use layout: het)"],
    ),
    (
        one_node(None, {}),
        {},
        [
            "deployment.layout = one_node: the recipe does not say how the roles share the GPUs of the node (set all "
            "but one of deployment.train.gpus_per_node, deployment.inference.gpus_per_node; together they get 8 GPUs)"
        ],
    ),
    (
        one_node(6, {"gpus_per_node": 4}),
        {},
        [
            "deployment.layout = one_node: the roles need at least 10 GPUs, but nodes of partition gpu have 8 "
            "(lower gpus_per_node of a role)"
        ],
    ),
    (
        one_node(4, {"type": "multi_node", "num_replicas": 2, "gpus_per_node": 2}, spares={"train": 1}),
        {},
        [
            "deployment.inference = 2 nodes: all roles share one node (use 1 node and 1 replica, or layout: single or "
            "het)",
            "deployment.spares: all roles share one node, so no node can replace it (leave it out)",
        ],
    ),
]


def test_spares_of_roles_without_nodes_are_refused() -> None:
    split = {"type": "disaggregated", "prefill": {"nodes_per_replica": 1}, "decode": {"nodes_per_replica": 1}}
    with pytest.raises(UsageError) as error:
        plan_for(deployment={"inference": split, "spares": {"inference": 1, "prefill": 1, "teacher": 2}})
    fix = "(leave it out, or use train, prefill, decode)"
    assert [str(violation) for violation in error.value.violations] == [
        f"deployment.spares.inference = 1: this recipe has no inference nodes {fix}",
        f"deployment.spares.teacher = 2: this recipe has no teacher nodes {fix}",
    ]


def test_all_conflicts_with_colocation_are_reported_in_one_pass() -> None:
    shape = {"layout": "single", "colocated": True, "train": {"gpus_per_node": 4}}
    wrong = {"deployment": {**shape, "inference": {"type": "single_node", "gpus_per_node": 2}}}
    assert [str(violation) for violation in violations(Recipe.model_validate(recipe_data(**wrong)))] == [
        "deployment.layout = single: each role has its own nodes with this layout, so no GPUs are shared (use "
        "layout: one_node, or leave deployment.colocated out)",
        "deployment.inference.gpus_per_node = 2: deployment.colocated: the trainer has 4 GPUs, and both use the same "
        "ones (set the same number for both, or leave one out)",
        "inference.gpu_memory_utilization: must be the fraction of each GPU's memory for the engines, because the "
        "trainer gets the rest (deployment.colocated needs it, for example 0.4)",
    ]
    apart = merge(colocated(2, None), {"deployment": {"inference": {"type": "disaggregated"}}})
    apart["deployment"]["inference"].pop("gpus_per_node")
    (violation,) = violations(Recipe.model_validate(recipe_data(**apart)))
    assert str(violation).startswith("deployment.inference.type = disaggregated: cannot share GPUs with the trainer")


@pytest.mark.parametrize(("changes", "site_changes", "expected"), BAD, ids=[str(b[2][0])[:40] for b in BAD])
def test_impossible_placements(changes: dict[str, Any], site_changes: dict[str, Any], expected: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        plan_for(site_changes=site_changes, **changes)
    assert [str(violation) for violation in caught.value.violations] == expected


def test_site_without_nodes_for_a_role_is_refused() -> None:
    recipe = Recipe.model_validate(recipe_data())
    bare = site().model_copy(update={"nodes": {"train": site().nodes["default"]}})
    with pytest.raises(UsageError) as caught:
        derive(recipe, bare, RUN)
    assert [v.field for v in caught.value.violations] == ["deployment", "deployment.inference"]


def test_local_roles_share_the_gpus_of_one_machine(tmp_path: Path) -> None:
    for i in range(4):
        (tmp_path / f"nvidia{i}").touch()
    (tmp_path / "nvidiactl").touch()
    machine = local_site(tmp_path, tmp_path)
    assert (machine.device, machine.nodes["default"].gpus) == ("cuda", 4)
    groups = {"train": {"gpus_per_node": 1}, "inference": {"gpus_per_node": 2}}
    plan = derive(Recipe.model_validate(recipe_data(deployment=groups)), machine, RUN, local=True)
    assert [p.gpus for p in plan.processes() if p.gpus] == [(0,), (1,), (2,)]
    groups["inference"]["gpus_per_node"] = 4
    with pytest.raises(UsageError, match="need 5 GPUs, but this machine has 4"):
        derive(Recipe.model_validate(recipe_data(deployment=groups)), machine, RUN, local=True)


@pytest.mark.parametrize(("cores", "warned"), [(1, True), (3, True), (4, False)], ids=str)
def test_a_local_run_with_fewer_cores_than_gpu_processes_is_warned(cores: int, warned: bool, tmp_path: Path) -> None:
    (tmp_path / "nvidia0").touch()
    (tmp_path / "nvidia1").touch()
    machine = local_site(tmp_path, tmp_path)
    kind = machine.nodes["default"].model_copy(update={"cpus": cores})
    machine = machine.model_copy(update={"nodes": {"default": kind}})
    recipe = Recipe.model_validate(recipe_data(**colocated(2, 2)))
    found = check_plan(recipe, derive(recipe, machine, RUN, local=True))
    assert [f.fix for f in found if f.field == "--local"] == [
        "inside an allocation, start it with srun --cpus-per-task=N"
    ] * warned


shapes = st.fixed_dictionaries(
    {
        "layout": st.sampled_from(["het", "single"]),
        "train": st.integers(1, 4),
        "replicas": st.integers(1, 3),
        "prefill": st.tuples(st.integers(1, 3), st.integers(1, 2)),
        "decode": st.tuples(st.integers(1, 3), st.integers(1, 2)),
        "tp": st.sampled_from([1, 2, 4, 8]),
        "workers": st.integers(1, 3),
    }
)


@given(shapes)
def test_every_placement_is_consistent(shape: dict[str, Any]) -> None:
    changes = disaggregated(shape["replicas"], shape["prefill"], shape["decode"])
    changes["deployment"] |= {"layout": shape["layout"], "train": {"nodes": shape["train"]}}
    changes["inference"] = {"parallel": {"tp": shape["tp"]}}
    changes["environments"] = [{"id": "reverse-text", "workers": shape["workers"]}]
    plan = plan_for(**changes)

    assert [node.index for node in plan.nodes] == list(range(plan.totals.nodes))
    assert sum(group.nodes for group in plan.groups) == plan.totals.nodes
    names = [process.name for process in plan.processes()]
    assert len(set(names)) == len(names)
    for node in plan.nodes:
        ports = [port for process in node.processes for port in process.ports.values()]
        assert len(set(ports)) == len(ports), "two processes of a node prefer one port"
        gpus = [gpu for process in node.processes for gpu in process.gpus]
        assert len(set(gpus)) == len(gpus), "two processes of a node share a GPU"
        assert all(0 <= gpu < 8 for gpu in gpus)
    engines = [name for replica in plan.replicas for name in replica.engines]
    assert sorted(engines) == sorted(p.name for p in plan.processes() if p.role in ("prefill", "decode"))
    for replica in plan.replicas:
        assert {plan.process(name).node for name in replica.engines} == set(replica.nodes)
        assert set(plan.process(replica.router).after) == set(replica.engines)


def test_all_libraries_of_a_node_take_the_same_network_unless_the_site_says_otherwise() -> None:
    named = {
        "GLOO_SOCKET_IFNAME": "${interface}",
        "NCCL_SOCKET_IFNAME": "${nccl_interface}",
        "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME": "${interface}",
        "NCCL_IB_HCA": "${nccl_hcas}",
        "NVSHMEM_HCA_LIST": "${hca_ports}",
    }
    assert named.items() <= plan_for().env.items()
    own = {"NCCL_SOCKET_IFNAME": "bond0", "NVSHMEM_HCA_LIST": ""}
    assert (named | own).items() <= plan_for(site_changes={"env": own}).env.items()


VALUES = (
    *("run_dir", "attempt", "attempt_dir", "run_id", "python", "tmp", "node", "key"),
    *("interface", "nccl_interface", "hcas", "hca_ports", "nccl_hcas", "ucx_devices", "ucx_devices_near"),
)


@settings(max_examples=20)
@given(shapes)
def test_every_placeholder_resolves_to_a_process_that_listens(shape: dict[str, Any]) -> None:
    changes = disaggregated(shape["replicas"], shape["prefill"], shape["decode"])
    changes["inference"] = {"parallel": {"tp": shape["tp"]}}
    plan = plan_for(**changes)
    hosts = {process.name: f"10.0.0.{process.node}" for process in plan.processes()}
    ports = {process.name: process.ports for process in plan.processes()}
    values = dict.fromkeys(VALUES, "/x")
    secrets = {**values, "secret": "s", "generate_token": "g"}
    listening = {f"{hosts[p.name]}:{port}" for p in plan.processes() for port in p.ports.values()}
    for process in plan.processes():
        texts = [(text, values) for text in process.argv]
        texts += [(text, secrets) for text in (*process.env.values(), *plan.env.values())]
        for text, known in texts:
            filled = resolve(text, process.name, Addresses(hosts, ports), known)
            assert "${" not in filled
            for address in re.findall(r"10\.0\.0\.\d+:\d+", filled):
                assert address in listening


MANY = {"type": "multi_node", "num_replicas": 2}


def test_a_job_survives_nodes_only_if_every_component_has_two() -> None:
    plan = plan_for(deployment={"train": {"nodes": 2}, "inference": MANY, "spares": {"inference": 1}})
    assert [(group.name, group.nodes, group.spares) for group in plan.groups] == [
        ("control", 2, 1),
        ("train", 2, 0),
        ("inference", 3, 1),
    ]
    assert plan.survives_nodes
    assert [plan.group_of_rank(rank).name for rank in range(plan.allocated)] == [
        *["control"] * 2,
        *["train"] * 2,
        *["inference"] * 3,
    ]
    assert not plan_for(deployment={"inference": MANY, "spares": {"inference": 1}}).survives_nodes
    assert plan_for(deployment={"layout": "single", "inference": MANY}).survives_nodes


def test_ranks_of_a_trainer_are_one_unit_and_engines_may_hang_for_a_while() -> None:
    plan = plan_for(deployment={"train": {"nodes": 2}}, inference={"hang_timeout_s": 7})
    assert {(p.restart, p.restart_group) for p in plan.processes() if p.role == "trainer"} == {("attempt", "trainer")}
    engines = [p.health for p in plan.processes() if p.role == "engine"]
    assert {health.hang_timeout_s for health in engines if health} == {7} and None not in engines
    alone = plan_for(deployment={"train": {"nodes": 1, "gpus_per_node": 1}})
    assert alone.process("trainer-rank-0").restart_group is None


@pytest.mark.parametrize(
    ("changes", "site_changes", "threads"),
    [
        ({}, {}, "12"),
        ({"slurm": {"train": {"cpus_per_task": 40}}}, {}, "5"),
        ({"slurm": {"train": {"cpus_per_task": 4}}}, {}, "1"),
        ({"deployment": {"train": {"gpus_per_node": 4}}}, {}, "12"),
        ({"deployment": {"train": {"gpus_per_node": 4}}, "slurm": {"train": {"exclusive": True}}}, {}, "24"),
        ({}, {"env": {"OMP_NUM_THREADS": "3"}}, None),
        ({}, {"device": "cpu"}, None),
    ],
    ids=["site", "recipe", "few", "half", "half but all its own", "said", "cpu"],
)
def test_trainer_ranks_share_the_cores_of_their_node(
    changes: dict[str, Any], site_changes: dict[str, Any], threads: str | None
) -> None:
    plan = plan_for(site_changes=site_changes, **changes)
    ranks = [process for node in plan.nodes for process in node.processes if process.role == "trainer"]
    assert {rank.env.get("OMP_NUM_THREADS") for rank in ranks} == {threads}
    assert {rank.env["LOCAL_WORLD_SIZE"] for rank in ranks} == {str(len(ranks))}


@pytest.mark.parametrize(
    ("parallelism", "nodes", "site_env", "value"),
    [
        ({"ep": 8, "ep_backend": "deepep"}, 2, {}, "1"),
        ({"ep": 16, "ep_backend": "deepep"}, 2, {}, None),
        ({"ep": 8, "ep_backend": "deepep"}, 2, {"EP_DISABLE_GIN": "0"}, None),
        ({"ep": 8}, 2, {}, None),
    ],
    ids=["experts on one node", "on two", "said", "torch"],
)
def test_deepep_needs_no_rdma_where_experts_are_on_one_node(
    parallelism: dict[str, Any], nodes: int, site_env: dict[str, str], value: str | None
) -> None:
    trainer = {"parallelism": parallelism, "optimizer": {"max_norm": None}}
    plan = plan_for(site_changes={"env": site_env}, trainer=trainer, deployment={"train": {"nodes": nodes}})
    ranks = [process for node in plan.nodes for process in node.processes if process.role == "trainer"]
    assert len(ranks) == 8 * nodes and {rank.env.get("EP_DISABLE_GIN") for rank in ranks} == {value}


@pytest.mark.parametrize(
    ("gpus", "mem", "exclusive", "asked"),
    [
        (8, "1900G", None, (96, "1900G")),
        (4, "1900G", None, (48, "950G")),
        (1, "1900G", None, (12, "243200M")),
        (1, "2000", None, (12, "250")),
        (4, None, None, (48, None)),
        (4, "0", None, (48, "0")),
        (4, "1900G", True, (96, "1900G")),
    ],
)
def test_a_part_of_a_nodes_gpus_takes_that_part_of_its_cores_and_memory(
    gpus: int, mem: str | None, exclusive: bool | None, asked: tuple[int, str | None]
) -> None:
    kind = {"partition": "gpu", "gpus": 8, "cpus": 96, "mem": mem, "exclusive": exclusive}
    deployment = {"train": {"gpus_per_node": gpus}, "inference": {"gpus_per_node": gpus}}
    for layout in ("het", "single"):
        nodes = {"default": kind} if layout == "single" else {"default": kind, "control": {"cpus": 64, "mem": "100G"}}
        plan = plan_for(site_changes={"nodes": nodes}, deployment={**deployment, "layout": layout})
        found = {group.name: (group.cpus_per_task, group.mem) for group in plan.groups}
        assert found.pop("control", (64, "100G")) == (64, "100G")
        assert set(found.values()) == {asked}


@pytest.mark.parametrize(
    ("layout", "shares"), [("het", [False, True]), ("single", [True, True]), ("one_node", [True, True])]
)
def test_roles_of_one_component_have_the_slurm_options_of_the_trainer(layout: str, shares: list[bool]) -> None:
    deployment = {"layout": layout, "train": {"gpus_per_node": 4}, "inference": {"gpus_per_node": 4}}
    recipe = Recipe.model_validate(recipe_data(deployment=deployment, slurm={"train": {"mem": "80G"}}))
    requests = {request.role: request for request in resource_requests(recipe, site())}
    roles: tuple[NodeRole, ...] = ("inference", "train")
    assert [component_of(recipe, role) == recipe.slurm.train for role in roles] == shares
    assert [node_memory(recipe, requests[role]) == 80 * 2**30 for role in roles] == shares


@pytest.mark.parametrize(
    ("site_changes", "said"),
    [
        ({}, "expandable_segments:True"),
        ({"env": {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}}, None),
        ({"pass_env": ["PYTORCH_ALLOC_CONF"]}, None),
        ({"device": "cpu"}, None),
    ],
    ids=["default", "site", "passed", "cpu"],
)
def test_trainers_use_expandable_segments_by_default(site_changes: dict[str, Any], said: str | None) -> None:
    plan = plan_for(site_changes=site_changes)
    assert {p.env.get("PYTORCH_ALLOC_CONF") for p in plan.processes() if p.role == "trainer"} == {said}
    assert not any("PYTORCH_ALLOC_CONF" in p.env for p in plan.processes() if p.role != "trainer")


def test_copies_of_checkpoints_are_in_a_directory_of_each_train_node() -> None:
    plan = plan_for(checkpoint={"local": "/scratch/x/"}, deployment={"train": {"nodes": 2}})
    own = "/scratch/x/primeslurm-${run_id}-n${node}-checkpoint-${key}"
    ranks = [process for process in plan.processes() if process.role == "trainer"]
    assert {(rank.env[LOCAL_CHECKPOINTS], rank.scratch) for rank in ranks} == {(own, (own,))}
    assert all(not process.scratch for process in plan.processes() if process.role != "trainer")
    assert all(LOCAL_CHECKPOINTS not in process.env for process in plan_for().processes())


def test_warns_of_checkpoint_copies_that_are_never_read() -> None:
    for spares, told in (({}, ["deployment.spares.train: 1"]), ({"spares": {"train": 1}}, [])):
        changes = {"checkpoint": {"local": "/scratch"}, "deployment": {"train": {"nodes": 2}, **spares}}
        findings = check_plan(Recipe.model_validate(recipe_data(**changes)), plan_for(**changes))
        assert [finding.fix for finding in findings if finding.field == "checkpoint.local"] == told


def test_all_processes_get_level_and_format_of_log_lines() -> None:
    assert not {logs.LEVEL, logs.FORMAT} & set(plan_for().env)
    env = plan_for(logging={"level": "warning", "format": "json"}).env
    assert (env[logs.LEVEL], env[logs.FORMAT]) == ("warning", "json")
