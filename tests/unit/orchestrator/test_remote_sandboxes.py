"""What sandboxes of providers need is asked before a rollout is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import ValidationError
from verifiers.v1.runtimes import E2BConfig, ModalConfig, PrimeConfig

from primeslurm.api import environments as api_environments
from primeslurm.base.errors import UsageError
from primeslurm.orchestrator import environments
from primeslurm.orchestrator.environments import agents, host_needs, remote_sandboxes
from primeslurm.recipe import Recipe
from primeslurm.recipe.sandbox_rules import PROVIDER_KEYS
from primeslurm.recipe.sections.orchestrator import Environment
from primeslurm.recipe.sections.sandboxes import ContainerRuntime, HostedRuntime, Runtime
from tests.support import recipes

CONFIGS: dict[str, Any] = {"prime": PrimeConfig, "modal": ModalConfig, "e2b": E2BConfig}
CUSTOM = {"type": "server", "tunnel": {"type": "custom", "url": "https://me.example", "port": 9000}}


def unmet(kind: str, **env: Any) -> list[tuple[str, str, str]]:
    runtime = {"type": kind, "image": "python:3.12", "limits": {"cpus": 2, "memory_gb": 4, "network": ["pypi.org"]}}
    made = Environment.model_validate(
        {"id": "tool-use", "harness": {"id": "bash"}, "runtime": runtime, "args": {"env": env} if env else {}}
    )
    loaded = environments.load(made.id, made.args, agents.agent_options(made))
    assert host_needs.needs(made, loaded).runtimes == (kind,)
    return [(found.field, found.why, found.fix) for found in host_needs.unmet(made, loaded)]


@pytest.fixture(autouse=True)
def nothing_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for names in PROVIDER_KEYS.values():
        for name in names:
            monkeypatch.delenv(name, raising=False)


def installed(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    providers = {kind: replace(provider, module=module) for kind, provider in remote_sandboxes.PROVIDERS.items()}
    monkeypatch.setattr(remote_sandboxes, "PROVIDERS", providers)


def test_providers_are_those_of_recipes() -> None:
    of_recipes = {kind.model_fields["type"].default for kind in get_args(get_args(Runtime)[0])}
    assert set(remote_sandboxes.PROVIDERS) == set(PROVIDER_KEYS) == of_recipes & {"prime", "modal", "e2b"}


@pytest.mark.parametrize("kind", PROVIDER_KEYS)
def test_client_keys_and_tunnel_are_asked_for(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, "no_such_module")
    found = unmet(kind)
    own = len(PROVIDER_KEYS[kind])
    assert len(found) == 1 + own + (kind != "prime")
    assert "is not installed here" in found[0][1] and "pip install" in found[0][2]
    assert [name for name in PROVIDER_KEYS[kind] if f"pass_env: [{name}]" in "".join(fix for _, _, fix in found)]
    if kind != "prime":
        assert found[-1][0] == "environments.args.env.interception" and "PRIME_API_KEY" in found[-1][1]
    installed(monkeypatch, "json")
    for name in PROVIDER_KEYS[kind]:
        monkeypatch.setenv(name, "x")
    assert unmet(kind, interception=CUSTOM) == []
    monkeypatch.setenv("PRIME_API_KEY", "y")
    assert unmet(kind) == []


def test_keys_may_lie_where_clients_look_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, "json")
    (tmp_path / ".prime").mkdir()
    (tmp_path / ".prime" / "config.json").write_text('{"api_key": "x"}')
    (tmp_path / ".modal.toml").write_text("[default]")
    assert unmet("prime") == [] == unmet("modal")
    assert [field for field, _, _ in unmet("e2b")] == ["environments.runtime"]


def test_limits_are_what_the_provider_is_asked_for() -> None:
    runtime = {"type": "modal", "image": "i", "limits": {"cpus": 3, "memory_gb": 6, "network": ["pypi.org"]}}
    made = Environment.model_validate({"id": "tool-use", "harness": {"id": "bash"}, "runtime": runtime})
    env = environments.load(made.id, made.args, agents.agent_options(made))
    (spec,) = env._agent_specs.values()
    asked = spec.runtime
    assert isinstance(asked, ModalConfig)
    assert (asked.image, asked.cpu, asked.memory, asked.allow) == ("i", 3, 6, ["pypi.org"])


@pytest.mark.parametrize("kind", get_args(HostedRuntime))
def test_fields_are_verifiers_own_with_its_defaults(kind: type[ContainerRuntime]) -> None:
    theirs = CONFIGS[kind.model_fields["type"].default]
    ours = set(kind.model_fields) - set(ContainerRuntime.model_fields)
    said_by_limits = {"allow", "block", "cpu", "memory", "disk", "network_access"}
    assert ours == set(theirs.model_fields) - said_by_limits - set(ContainerRuntime.model_fields)
    options = agents._runtime(kind())  # type: ignore[arg-type]
    assert theirs.model_validate(options) == theirs()


def test_fields_of_a_provider_are_what_it_is_asked_for() -> None:
    runtime = {"type": "modal", "gpu": "H100:2", "region": "eu", "creates_per_sec": 2}
    made = Environment.model_validate({"id": "tool-use", "harness": {"id": "bash"}, "runtime": runtime})
    (spec,) = environments.load(made.id, made.args, agents.agent_options(made))._agent_specs.values()
    assert (spec.runtime.gpu, spec.runtime.region, spec.runtime.creates_per_sec) == ("H100:2", "eu", 2)
    with pytest.raises(ValidationError, match="gpu"):
        Environment.model_validate({"id": "tool-use", "runtime": {"type": "prime", "gpu": "2"}})


def test_hosts_that_a_provider_cannot_tell_apart_are_named_by_check() -> None:
    runtime = {"type": "modal", "limits": {"network": ["10.0.0.1"]}}
    made = Environment.model_validate({"id": "tool-use", "harness": {"id": "bash"}, "runtime": runtime})
    with pytest.raises(UsageError, match=r"10\.0\.0\.1"):
        environments.load(made.id, made.args, agents.agent_options(made))


def test_a_key_that_jobs_do_not_get_is_as_good_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Recipe.model_validate(recipes.recipe_data(pass_env=["E2B_API_KEY"]))
    site = recipes.site(pass_env=["MODAL_TOKEN_ID"])
    kept_back = api_environments._kept_back(recipe, site)
    assert kept_back == dict.fromkeys(("PRIME_API_KEY", "MODAL_TOKEN_SECRET"), "")
    installed(monkeypatch, "json")
    for name, value in kept_back.items():
        monkeypatch.setenv(name, value)
    assert unmet("prime") != []
