"""An emulated plan equals the real one except for the started modules."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from primeslurm.api.recipes.emulation import refuse_too_large
from primeslurm.api.recipes.loading import load
from primeslurm.base.errors import UsageError
from primeslurm.plan.commands.command import Command
from primeslurm.plan.placement.resources import WITHOUT_GPUS
from primeslurm.plan.planner import derive
from primeslurm.plan.stand_ins import STAND_INS, emulate, memory_mib
from primeslurm.recipe import Recipe
from tests.support.processes import start_process
from tests.support.recipes import recipe_data, site


def test_emulated_plan_differs_only_in_modules() -> None:
    shape = {
        "deployment": {"inference": {"type": "disaggregated", "num_replicas": 2}},
        "inference": {"kv_offload": {"type": "mooncake", "cpu": {"bytes": 2**30}}},
        "teacher": {"type": "engines", "path": "/models/teacher"},
        "trainer": {"loss": {"type": "dppo", "ref_kl": 0.1}},
    }
    real = derive(Recipe.model_validate(recipe_data(**shape)), site(), Path("/shared/runs/x"))
    emulated = emulate(real)
    fields = {"argv", "imports"}
    for mine, theirs in zip(emulated.processes(), real.processes(), strict=True):
        assert mine.model_dump(exclude=fields) == theirs.model_dump(exclude=fields)
        assert mine.imports == ((STAND_INS[mine.role],) if theirs.imports else ())
        differing = [(a, b) for a, b in zip(mine.argv, theirs.argv, strict=True) if a != b]
        assert [a for a, _ in differing] == ([STAND_INS[mine.role]] if mine.role in STAND_INS else [])
    assert emulated.emulated and not real.emulated
    without = {"nodes", "emulated"}
    assert emulated.model_dump(exclude=without) == real.model_dump(exclude=without)
    assert [node.model_dump(exclude={"processes"}) for node in emulated.nodes] == [
        node.model_dump(exclude={"processes"}) for node in real.nodes
    ]
    assert any(process.imports for process in real.processes())
    roles = {process.role for process in real.processes()}
    assert roles - STAND_INS.keys() == {"orchestrator", "router"}, "these run for real"


def test_embedded_cluster_has_the_nodes_of_the_job_and_spares() -> None:
    loaded = load(Path(__file__).with_name("small.yaml"), emulate=True)
    plan, spec = loaded.plan(), loaded.cluster
    assert spec is not None and any(group.spares for group in plan.groups)
    without = sum(group.nodes for group in plan.groups if group.name in WITHOUT_GPUS)
    assert (spec.control_nodes, spec.nodes) == (without, plan.allocated - without)


def test_every_emulated_module_exists() -> None:
    for module in STAND_INS.values():
        assert "emulated" in module and importlib.util.find_spec(module)


@pytest.mark.parametrize("name", ["store-master", "store-1"])
def test_emulated_store_is_healthy_at_the_probed_address(name: str) -> None:
    changes = {"inference": {"kv_offload": {"type": "mooncake", "cpu": {"bytes": 2**40}}}}
    plan = emulate(derive(Recipe.model_validate(recipe_data(**changes)), site(), Path("/shared/runs/x")))
    process = next(p for p in plan.processes() if p.role == "store" and (p.name == name) == (name == "store-master"))
    assert process.health is not None
    server = start_process(
        Command(process.argv, process.env, tuple(process.ports)),
        {f"addr:store-master:{port}": "127.0.0.1:1" for port in ("rpc", "metadata")},
        Path("/dev/null"),
    )
    try:
        server.wait(process.health.path)
    finally:
        server.stop()


def test_run_that_exceeds_memory_is_refused_with_a_fitting_size() -> None:
    plan = load(Path(__file__).with_name("small.yaml"), emulate=True).plan()
    needed = memory_mib(plan)
    assert 300 < needed < 1500
    refuse_too_large(plan, needed)
    with pytest.raises(UsageError, match=r"about 5 nodes would fit") as error:
        refuse_too_large(plan, needed * 5 // plan.allocated + 1)
    assert f"{plan.allocated} nodes, {len(plan.processes())} processes" in str(error.value)


def test_spec_of_512_nodes_is_valid() -> None:
    changes = ["deployment.train.nodes=255", "deployment.inference.num_replicas=128", "deployment.spares.train=0"]
    loaded = load(
        Path(__file__).with_name("small.yaml"), emulate=True, overrides=[*changes, "orchestrator.batch_size=512"]
    )
    assert loaded.cluster is not None and loaded.cluster.nodes == 512
