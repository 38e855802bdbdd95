"""Sandboxes of providers: what hosts need, the options that providers receive, and rollouts at a fake provider."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import ValidationError
from verifiers.v1.errors import SandboxError
from verifiers.v1.runtimes import E2BConfig, ModalConfig, PrimeConfig, provision_runtime

from benchmarks.support.ports import free_port
from primeslurm.api.checks import environments as api_environments
from primeslurm.base.errors import UsageError
from primeslurm.orchestrator import environments
from primeslurm.orchestrator.environments import checks
from primeslurm.recipe import Recipe
from primeslurm.recipe.rules.sandboxes import PROVIDER_KEYS
from primeslurm.recipe.sections.orchestrator import Environment
from primeslurm.recipe.sections.sandboxes import ContainerRuntime, HostedRuntime, Runtime
from tests.support import prime_service, recipes
from tests.support.prime_service import PrimeService
from tests.support.scripted_engine import ScriptedEngine, tool_call
from tests.support.verifiers_restored import restored
from tests.unit.orchestrator import test_harbor

CONFIGS: dict[str, Any] = {"prime": PrimeConfig, "modal": ModalConfig, "e2b": E2BConfig}
CUSTOM_TUNNEL = {"type": "server", "tunnel": {"type": "custom", "url": "https://me.example", "port": 9000}}


def environment(runtime: dict[str, Any], **env: Any) -> Environment:
    args = {"env": env} if env else {}
    return Environment.model_validate({"id": "tool-use", "harness": {"id": "bash"}, "runtime": runtime, "args": args})


def missing(kind: str, **env: Any) -> list[tuple[str, str, str]]:
    limits = {"cpus": 2, "memory_gb": 4, "network": ["pypi.org"]}
    made = environment({"type": kind, "image": "python:3.12", "limits": limits}, **env)
    loaded = environments.load_from_recipe(made)
    assert checks.needs(made, loaded).runtimes == (kind,)
    return [(each.field, each.why, each.fix) for each in checks.missing_needs(made, loaded)]


def options_of(runtime: dict[str, Any]) -> Any:
    (spec,) = environments.load_from_recipe(environment(runtime))._agent_specs.values()
    return spec.runtime


@pytest.fixture(autouse=True)
def _no_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in [name for names in PROVIDER_KEYS.values() for name in names]:
        monkeypatch.delenv(name, raising=False)


def use_client_module(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    providers = {kind: replace(provider, module=module) for kind, provider in checks.PROVIDERS.items()}
    monkeypatch.setattr(checks, "PROVIDERS", providers)


def test_all_providers_of_recipes_are_checked() -> None:
    of_recipes = {kind.model_fields["type"].default for kind in get_args(get_args(Runtime)[0])}
    assert set(checks.PROVIDERS) == set(PROVIDER_KEYS) == of_recipes & {"prime", "modal", "e2b"}


@pytest.mark.parametrize("kind", PROVIDER_KEYS)
def test_client_keys_and_tunnel_are_required(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_client_module(monkeypatch, "no_such_module")
    problems = missing(kind)
    assert len(problems) == 1 + len(PROVIDER_KEYS[kind]) + (kind != "prime")
    assert "is not installed here" in problems[0][1] and "pip install" in problems[0][2]
    assert all(f"pass_env: [{name}]" in "".join(fix for _, _, fix in problems) for name in PROVIDER_KEYS[kind])
    if kind != "prime":
        assert problems[-1][0] == "environments.args.env.interception" and "PRIME_API_KEY" in problems[-1][1]
    use_client_module(monkeypatch, "json")
    for name in PROVIDER_KEYS[kind]:
        monkeypatch.setenv(name, "x")
    assert missing(kind, interception=CUSTOM_TUNNEL) == []
    monkeypatch.setenv("PRIME_API_KEY", "y")
    assert missing(kind) == []


def test_keys_in_files_of_the_clients_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_client_module(monkeypatch, "json")
    (tmp_path / ".prime").mkdir()
    (tmp_path / ".prime" / "config.json").write_text('{"api_key": "x"}')
    (tmp_path / ".modal.toml").write_text("[default]")
    assert missing("prime") == [] == missing("modal")
    assert [field for field, _, _ in missing("e2b")] == ["environments.runtime"]


def test_key_that_jobs_do_not_get_counts_as_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Recipe.model_validate(recipes.recipe_data(pass_env=["E2B_API_KEY"]))
    site = recipes.site(pass_env=["MODAL_TOKEN_ID"])
    kept_back = api_environments._kept_back(recipe, site)
    assert kept_back == dict.fromkeys(("PRIME_API_KEY", "MODAL_TOKEN_SECRET"), "")
    use_client_module(monkeypatch, "json")
    for name, value in kept_back.items():
        monkeypatch.setenv(name, value)
    assert missing("prime") != []


def test_limits_and_fields_of_a_provider_become_its_options() -> None:
    limits = {"cpus": 3, "memory_gb": 6, "network": ["pypi.org"]}
    fields = {"gpu": "H100:2", "region": "eu", "creates_per_sec": 2}
    options = options_of({"type": "modal", "image": "i", "limits": limits, **fields})
    assert isinstance(options, ModalConfig)
    assert (options.image, options.cpu, options.memory, options.allow) == ("i", 3, 6, ["pypi.org"])
    assert (options.gpu, options.region, options.creates_per_sec) == ("H100:2", "eu", 2)
    with pytest.raises(ValidationError, match="gpu"):
        environment({"type": "prime", "gpu": "2"})


@pytest.mark.parametrize("kind", get_args(HostedRuntime))
def test_recipe_fields_and_defaults_of_a_provider_are_verifiers_own(kind: type[ContainerRuntime]) -> None:
    config = CONFIGS[kind.model_fields["type"].default]
    fields = set(kind.model_fields) - set(ContainerRuntime.model_fields)
    in_limits = {"allow", "block", "cpu", "memory", "disk", "network_access"}
    assert fields == set(config.model_fields) - in_limits - set(ContainerRuntime.model_fields)
    options = environments.agent_options(Environment.model_validate({"id": "tool-use", "runtime": kind()}))
    assert config.model_validate(options["runtime"]) == config()


def test_network_address_that_a_provider_cannot_allow_is_refused() -> None:
    with pytest.raises(UsageError, match=r"10\.0\.0\.1"):
        options_of({"type": "modal", "limits": {"network": ["10.0.0.1"]}})


KEY = "of-the-account"
model = test_harbor.model


@pytest.fixture
def provider(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PrimeService]:
    """A fake of Prime Intellect, for the real client and runtime."""
    with restored(monkeypatch), prime_service.serving(PrimeService(tmp_path / "box", KEY)) as service:
        monkeypatch.setenv("PRIME_API_BASE_URL", service.url)
        monkeypatch.setenv("PRIME_API_KEY", KEY)
        yield service


def recipe(model: str, **runtime: Any) -> Recipe:
    """A recipe whose sandbox reaches the model through a port of this host."""
    port = free_port()
    tunnel = {"type": "custom", "url": f"http://127.0.0.1:{port}", "port": port}
    args = {"path": str(test_harbor.EXAMPLES), "env": {"interception": {"type": "server", "tunnel": tunnel}}}
    return test_harbor.recipe(model, "shell", args=args, runtime={"type": "prime", "image": "python:3.12", **runtime})


async def test_harbor_task_is_set_up_solved_and_graded_at_the_provider(
    provider: PrimeService, model: str, tmp_path: Path
) -> None:
    limits = {"cpus": 2, "memory_gb": 4, "disk_gb": 3, "network": "none"}
    own = {"region": "eu", "labels": ["mine"], "idle_timeout": 600, "gpu": "A100:2"}
    made = recipe(model, limits=limits, **own)
    with ScriptedEngine(Path(model), [tool_call("sh", command=test_harbor.SOLUTION), "Done."]) as engine:
        engine.version = 3
        (rollout,) = await test_harbor.played(made, engine, tmp_path)
    assert rollout.info.reward == 1.0 and rollout.info.turns == 2
    (request,) = provider.created
    assert (request["docker_image"], request["region"], request["idle_timeout_minutes"]) == ("python:3.12", "eu", 10)
    assert (request["cpu_cores"], request["memory_gb"], request["disk_size_gb"]) == (2, 4, 3)
    assert (request["gpu_type"], request["gpu_count"]) == ("A100", 2)
    assert "mine" in request["labels"] and len(request["labels"]) == 2, "verifiers adds the run's id"
    assert [each["allowlist"] for each in provider.policies] == [["127.0.0.1"], None], "the tests have an open network"
    assert provider.deleted == [prime_service.ID]
    assert KEY not in "".join((*provider.commands, json.dumps(provider.created)))


async def test_wrong_key_is_an_error_of_the_rollout(provider: PrimeService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIME_API_KEY", "another")
    with pytest.raises(SandboxError, match="provisioning failed"):
        async with provision_runtime(PrimeConfig()):
            pass
    assert provider.created == []
