"""Rules for harness, runtime and limits of an environment."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError
from verifiers.v1.utils.loaders import builtin_harness_ids, harness_class

from primeslurm.recipe import Recipe
from primeslurm.recipe.rules import sandboxes
from primeslurm.recipe.rules.recipe import violations
from primeslurm.recipe.sections.orchestrator import Environment
from primeslurm.recipe.sections.sandboxes import SubprocessRuntime


def environment(**fields: Any) -> Environment:
    return Environment.model_validate({"id": "somewhere", **fields})


def found(**fields: Any) -> list[tuple[str, str]]:
    """Return field and text of each violation."""
    recipe = Recipe.model_validate(
        {"name": "x", "max_steps": 1, "seq_len": 8, "model": {"path": "m"}, "environments": []}
    )
    made = recipe.model_copy(update={"environments": (environment(**fields),)})
    return [(each.field, f"{each.value}: {each.why}; {each.fix}") for each in violations(made)]


APPTAINER = {"type": "apptainer"}


def tunnelled(name: str, port: int, **fields: Any) -> dict[str, Any]:
    tunnel = {"type": "custom", "url": f"https://{name}.example", "port": port}
    return {"id": "e", "name": name, "args": {"env": {"interception": {"type": "server", "tunnel": tunnel}}}, **fields}


@pytest.mark.parametrize(
    ("environments", "evaluated", "expected"),
    [
        ([tunnelled("a", 9000), tunnelled("b", 9001)], [tunnelled("c", 9002)], []),
        ([tunnelled("a", 9000, workers=2)], [], ["environments.0.workers"]),
        ([tunnelled("a", 9000), tunnelled("b", 9000)], [], ["environments.1.args.env.interception.tunnel.port"]),
        ([tunnelled("a", 9000)], [tunnelled("b", 9000, workers=3)], ["evaluation.environments.0.workers", "port"]),
        ([{"id": "e", "workers": 9, "args": {"env": {"interception": "server"}}}], [], []),
        (
            [{**tunnelled("a", 9000, workers=2), "args": {"env": {"interception": {"tunnel": {"type": "prime"}}}}}],
            [],
            [],
        ),
    ],
)
def test_custom_tunnel_needs_one_worker_and_its_own_port(
    environments: list[dict[str, Any]], evaluated: list[dict[str, Any]], expected: list[str]
) -> None:
    fields: dict[str, Any] = {"name": "x", "max_steps": 1, "seq_len": 8, "model": {"path": "m"}}
    if evaluated:
        fields["evaluation"] = {"environments": evaluated}
    wrong = [each.field for each in violations(Recipe.model_validate({**fields, "environments": environments}))]
    assert len(wrong) == len(expected)
    assert all(field.endswith(end) for field, end in zip(wrong, expected, strict=True)), wrong


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"harness": {"id": "mini-swe-agnt"}}, "harness.id", "did you mean mini_swe_agent?"),
        ({"harness": {"id": "claude_code"}, "runtime": {"type": "subprocess"}}, "harness.id", "installs programs"),
        (
            {"harness": {"id": "claude_code"}, "runtime": {"type": "docker", "install": False}},
            "runtime.install",
            "must be installed into its container",
        ),
        (
            {"harness": {"id": "mini_swe_agent"}, "runtime": {"type": "subprocess", "trusted": True}},
            "harness.id",
            "removes the sandbox",
        ),
        ({"harness": {"id": "bash"}, "args": {"env": {"agent": {"harness": {"id": "null"}}}}}, "harness", "keep one"),
        ({"runtime": APPTAINER, "args": {"env": {"judge": {"runtime": {"type": "docker"}}}}}, "runtime", "keep one"),
        ({"args": {"env": {"agent": {"harness": {"id": None}}}}}, "harness.id", 'id: "null"'),
        ({"runtime": {**APPTAINER, "limits": {"network": "none"}}}, "limits.network", "no harness could be installed"),
        ({"runtime": {"type": "subprocess", "limits": {"network": ["pypi.org"]}}}, "limits.network", "some hosts"),
        ({"runtime": {"type": "docker", "limits": {"disk_gb": 3}}}, "limits.disk_gb", "does not enforce"),
        ({"runtime": {"type": "modal", "limits": {"disk_gb": 3}}}, "limits.disk_gb", "does not enforce"),
        ({"runtime": {"type": "e2b", "limits": {"disk_gb": 3}}}, "limits.disk_gb", "does not enforce"),
        ({"runtime": {"type": "e2b", "limits": {"cpus": 3}}}, "limits.cpus", "even at e2b; nearest: 4"),
        ({"runtime": {"type": "e2b", "limits": {"cpus": 0.5}}}, "limits.cpus", "even at e2b; nearest: 1"),
        ({"runtime": {"type": "e2b", "limits": {"memory_gb": 0.1}}}, "limits.memory_gb", "nearest: 0.125"),
        ({"runtime": {"type": "prime", "checkpoint": "c", "image": "i"}}, "runtime.image", "keep one"),
        ({"runtime": {"type": "prime", "checkpoint": "c", "limits": {"disk_gb": 3}}}, "limits.disk_gb", "keep one"),
        ({"runtime": {**APPTAINER, "limits": {"processes": 3}}}, "limits.processes", "no such limit"),
        (
            {"runtime": {"type": "subprocess", "trusted": True, "limits": {"memory_gb": 3}}},
            "memory_gb",
            "removes the sandbox",
        ),
        ({"runtime": {"type": "subprocess", "trusted": True, "visible": ["/opt"]}}, "visible", "see all directories"),
    ],
)
def test_contradiction_is_refused(fields: dict[str, Any], field: str, words: str) -> None:
    ((where, why),) = found(**fields)
    assert where.startswith("environments.0.") and where.endswith(field)
    assert words in why


@pytest.mark.parametrize(
    "fields",
    [
        {"harness": {"id": "null"}},
        {"harness": {"id": "claude-code", "version": "2.1.278"}, "runtime": APPTAINER},
        {"harness": {"id": "mini_swe_agent"}, "runtime": {"type": "subprocess", "limits": {"network": "open"}}},
        {"harness": {"id": "a_package_of_mine"}},
        {"runtime": {"type": "subprocess", "trusted": True, "limits": {"network": "open", "wall_time_s": 60}}},
        {"runtime": {"type": "docker", "limits": {"network": ["pypi.org"]}}},
        {"runtime": {**APPTAINER, "install": False, "limits": {"network": "none"}}},
        {"runtime": {"type": "prime", "limits": {"disk_gb": 3}}, "args": {"env": {"agent": {"max_turns": 3}}}},
        {"runtime": {"type": "prime", "checkpoint": "c", "limits": {"cpus": 3}}},
        {"runtime": {**APPTAINER, "limits": {"disk_gb": 3}}},
        {"runtime": {"type": "e2b", "limits": {"cpus": 1, "memory_gb": 4.5}}},
    ],
)
def test_valid_combination_is_accepted(fields: dict[str, Any]) -> None:
    assert found(**fields) == []


def test_all_contradictions_are_reported_in_one_pass() -> None:
    wrong = {"type": "docker", "limits": {"network": "none", "disk_gb": 1, "processes": 1}}
    assert len(found(harness={"id": "bassh"}, runtime=wrong)) == 3


def test_null_without_quotes_is_refused() -> None:
    with pytest.raises(ValidationError, match='write `id: "null"`'):
        environment(harness={"id": None})


def test_subprocess_refuses_an_image() -> None:
    with pytest.raises(ValidationError, match="image"):
        environment(runtime={"type": "subprocess", "image": "python:3.11"})


def test_harness_and_runtime_survive_json() -> None:
    made = environment(harness={"id": "bash", "edit": False}, runtime={"type": "subprocess", "limits": {"cpus": 2}})
    again = Environment.model_validate_json(made.model_dump_json())
    assert again == made
    assert again.harness is not None and again.harness.options == {"id": "bash", "edit": False}
    assert isinstance(again.runtime, SubprocessRuntime) and again.runtime.limits.cpus == 2


def test_lists_of_harnesses_match_verifiers() -> None:
    assert set(sandboxes.HARNESSES) == set(builtin_harness_ids()) - {"node", "utils"}  # what they share
    uncontained = {name for name in sandboxes.HARNESSES if not _needs_container(name)}
    assert uncontained == set(sandboxes.WITHOUT_CONTAINER)


def _needs_container(harness: str) -> bool:
    # vars() ignores values that an earlier test set on a base class.
    return bool(vars(harness_class(harness)).get("NEEDS_CONTAINER", True)) or harness in (
        "mini_swe_agent",
        "terminus_2",
    )
