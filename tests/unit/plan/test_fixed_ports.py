"""Ports that a recipe fixes: where they are used, and which are refused."""

from __future__ import annotations

from typing import Any

import pytest

from primeslurm.base.errors import UsageError
from primeslurm.plan.checks.run_checks import check_plan
from primeslurm.plan.model import Plan
from primeslurm.recipe import Recipe
from primeslurm.recipe.fields.types import LAST_PORT
from primeslurm.recipe.reading.recipe_files import load_recipe, merge
from tests.support.recipes import recipe_data, write_recipe
from tests.unit.plan.test_plan import colocated, disaggregated, one_node, plan_for

ROUTER, BACKEND = 8000, 8100


def ports_of(plan: Plan) -> dict[str, list[tuple[int, int]]]:
    """Return node and HTTP port of every process whose port is fixed, by role."""
    ports: dict[str, list[tuple[int, int]]] = {}
    for process in plan.processes():
        if process.fixed_ports:
            assert process.fixed_ports == ("http",)
            ports.setdefault(process.role, []).append((process.node, process.ports["http"]))
    return ports


def fixed(changes: dict[str, Any], **ports: int) -> dict[str, Any]:
    return merge(changes, {"deployment": {"inference": ports}})


def refused(changes: dict[str, Any], *, local: bool = False) -> list[tuple[str, str, str, str]]:
    with pytest.raises(UsageError) as caught:
        plan_for(local=local, **changes)
    return [(v.field.removeprefix("deployment.inference."), v.value, v.why, v.fix) for v in caught.value.violations]


def test_every_router_and_engine_uses_the_fixed_ports_of_its_node() -> None:
    replicas = {"deployment": {"inference": {"num_replicas": 2, "nodes_per_replica": 2, "gpus_per_node": 2}}}
    plan = plan_for(**fixed(replicas, router_port=ROUTER, backend_port=BACKEND))
    first, second = (replica.nodes for replica in plan.replicas)
    assert ports_of(plan) == {
        "router": [(first[0], ROUTER), (second[0], ROUTER)],
        "engine": [(node, port) for node in (*first, *second) for port in (BACKEND, BACKEND + 1)],
    }
    others = {port for p in plan.processes() for name, port in p.ports.items() if name not in p.fixed_ports}
    assert min(others) == 20000 and not ports_of(plan_for(**replicas))


@pytest.mark.parametrize("local", [False, True], ids=["slurm", "local"])
@pytest.mark.parametrize("changes", [one_node(4, {"gpus_per_node": 4}), colocated(4, 4)], ids=["split", "colocated"])
def test_engines_that_share_the_node_with_the_trainer_use_the_fixed_ports(changes: dict[str, Any], local: bool) -> None:
    plan = plan_for(local=local, **fixed(changes, router_port=ROUTER, backend_port=BACKEND))
    assert ports_of(plan) == {"router": [(0, ROUTER)], "engine": [(0, BACKEND + i) for i in range(4)]}


def test_decode_engines_of_the_same_node_use_the_ports_after_prefill_engines() -> None:
    shares = {"type": "disaggregated", "prefill": {"gpus_per_node": 2}, "decode": {"gpus_per_node": 2}}
    plan = plan_for(**fixed(one_node(4, shares), backend_port=BACKEND))
    assert ports_of(plan) == {
        "prefill": [(0, BACKEND), (0, BACKEND + 1)],
        "decode": [(0, BACKEND + 2), (0, BACKEND + 3)],
    }
    apart = plan_for(**fixed(disaggregated(), backend_port=BACKEND))
    assert [port for _, port in ports_of(apart)["decode"]] == list(range(BACKEND, BACKEND + 8))


@pytest.mark.parametrize(
    ("ports", "field", "why"),
    [
        ({"router_port": ROUTER, "backend_port": ROUTER - 7}, "backend_port", "engine-r0-7 and router-0"),
        ({"router_port": 20000}, "router_port", "router-0 and engine-r0-0"),
        ({"backend_port": 20001}, "backend_port", "engine-r0-0 and router-0"),
    ],
    ids=["each other", "router and planned", "engine and planned"],
)
def test_a_fixed_port_that_another_process_of_the_node_has_is_refused(
    ports: dict[str, int], field: str, why: str
) -> None:
    ((name, value, reason, fix),) = refused(fixed({}, **ports))
    assert (name, value, fix) == (field, str(ports[field]), "use another port, or leave it out")
    assert reason.startswith(f"{why} would both listen on port")


def test_two_routers_on_this_machine_are_refused() -> None:
    replicas = {"deployment": {"inference": {"num_replicas": 2, "gpus_per_node": 1}, "train": {"gpus_per_node": 1}}}
    ((name, value, why, fix),) = refused(fixed(replicas, router_port=ROUTER), local=True)
    assert (name, value, fix) == ("router_port", str(ROUTER), "leave it out, or submit to Slurm")
    assert "router-0 and router-1 would both listen on port 8000 of this machine" in why


def test_engine_ports_beyond_the_last_port_are_refused() -> None:
    ((name, value, why, fix),) = refused(fixed({}, backend_port=LAST_PORT - 6))
    assert (name, value, fix) == ("backend_port", str(LAST_PORT - 6), f"use at most {LAST_PORT - 7}, or leave it out")
    assert why == "engine-r0-7 would need port 65536, and the last port is 65535"
    plan_for(**fixed({}, backend_port=LAST_PORT - 7))


@pytest.mark.parametrize(
    ("ports", "named"),
    [
        ({"router_port": 32767, "backend_port": 61000}, {}),
        ({"router_port": 32768}, {"router_port": "router-0 cannot start while one of them has port 32768"}),
        ({"router_port": 60999, "backend_port": 32761}, {"router_port": "port 60999", "backend_port": "port 32768"}),
    ],
    ids=["outside", "first", "last, and an engine after the first"],
)
def test_warns_of_a_fixed_port_that_an_outgoing_connection_may_have(
    ports: dict[str, int], named: dict[str, str]
) -> None:
    changes = fixed({}, **ports)
    found = check_plan(Recipe.model_validate(recipe_data(**changes)), plan_for(**changes))
    warnings = {f.field.removeprefix("deployment.inference."): f for f in found if f.field.endswith("_port")}
    assert warnings.keys() == named.keys()
    for name, text in named.items():
        warning = warnings[name]
        assert (warning.level, warning.value) == ("warning", str(ports[name])) and text in warning.text
        assert "Linux gives ports 32768 to 60999 to outgoing connections" in warning.text and warning.fix


@pytest.mark.parametrize(("port", "fix"), [(80, "nearest: 1024"), (0, "nearest: 1024"), (70000, "nearest: 65535")])
def test_a_port_that_nobody_may_use_is_refused(tmp_path: Any, port: int, fix: str) -> None:
    path = write_recipe(tmp_path / "r.yaml", **fixed({}, router_port=port))
    with pytest.raises(UsageError) as caught:
        load_recipe(path)
    (violation,) = caught.value.violations
    assert (violation.field, violation.value) == ("deployment.inference.router_port", str(port))
    assert violation.fix == fix and violation.why
