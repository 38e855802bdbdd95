"""Checks of a loaded environment, without a rollout: its parts fit together, and this host has what it needs."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.harnesses.bash import BashHarnessConfig
from verifiers.v1.runtimes import SubprocessConfig
from verifiers.v1.utils.loaders import harness_config_type
from verifiers.v1.utils.prime import load_prime_config

from primeslurm.base.errors import Violation
from primeslurm.orchestrator.environments.chat import ChatHarness
from primeslurm.orchestrator.environments.sandbox import apptainer, bwrap_args, limits, uv_scripts
from primeslurm.orchestrator.environments.shell import ShellHarness
from primeslurm.recipe.rules.sandboxes import (
    ENV_KEY,
    HARNESSES,
    PROVIDER_KEYS,
    WITHOUT_INSTALLING,
    module_name,
    offers_tools,
)
from primeslurm.recipe.sections.orchestrator import AnyEnvironment, Environment
from primeslurm.recipe.sections.sandboxes import ApptainerRuntime, SubprocessRuntime, closes_network, sees_packages

_SHIPPED = "verifiers.v1.harnesses."
# Harnesses whose packages `primeslurm install --harness NAME` installs.
LOCKED = ("mini_swe_agent",)
_CONTAINERS = ("apptainer", "docker", "podman")
_RUNTIME = "environments.runtime"


def contradictions(environment: Environment, env: vf.Env) -> list[Violation]:
    """Find agents that lack a container, or whose harness cannot use the environment's tools."""
    violations = []
    task, has_tools = type(env.taskset).task_type(), bool(_tool_servers(env))
    for role, agent in env._agent_specs.items():
        harness = env._harnesses[role]
        in_container = [f"harness {harness.config.id}"] if harness.NEEDS_CONTAINER else []
        in_container += [task.__name__] if task.NEEDS_CONTAINER else []
        if in_container and isinstance(agent.runtime, SubprocessConfig):
            why = f"{' and '.join(in_container)} must run in a container"
            field = _field(environment, role, "runtime")
            violations.append(Violation(field, agent.runtime.type, why, "`runtime: {type: apptainer}`"))
        if has_tools and not harness.SUPPORTS_MCP:
            why = "it cannot use the tools that the environment serves"
            field = _field(environment, role, "harness")
            violations.append(Violation(field, harness.config.id, why, "`harness: {id: bash}`"))
    return violations


def without_reward(environment: Environment, env: vf.Env, task: vf.Task) -> list[Violation]:
    """Warn if no code gives rollouts of the first task a reward."""
    # Methods that compute rewards in another way cannot be analysed, so they suppress the warning.
    has_own = type(task).score is not vf.Task.score or type(task).finalize is not vf.Task.finalize
    if has_own or type(env).finalize is not vf.Env.finalize or task.hooks("reward") or task.plugged_judges():
        return []
    why = f"no method of {type(task).__name__} is marked `@vf.reward`, and no judge is named: every rollout gets 0"
    return [Violation("environments.id", environment.id, why, "mark the method that computes it with `@vf.reward`")]


def tool_users(environment: Environment, env: vf.Env) -> list[tuple[str, str]]:
    """List the agents that offer the model tools: the recipe's field of their harness, and its id."""
    has_tools = bool(_tool_servers(env))
    harnesses = {_field(environment, role, "harness"): env._harnesses[role] for role in env._agent_specs}
    return [(field, each.config.id) for field, each in harnesses.items() if has_tools or _has_own_tools(each)]


def _tool_servers(env: vf.Env) -> Sequence[Any]:
    task, options = type(env.taskset).task_type(), env.taskset.config
    return [*type(env.taskset).toolsets(options), *task.toolsets(options.task)]


def _has_own_tools(harness: vf.Harness) -> bool:
    if isinstance(harness, ShellHarness):
        return True
    modules = [kind.__module__ for kind in type(harness).__mro__]
    names = [module.removeprefix(_SHIPPED).partition(".")[0] for module in modules if module.startswith(_SHIPPED)]
    return any(offers_tools(name) for name in names)


def _field(environment: Environment, role: str, part: str) -> str:
    explicit = dict(environment.args.get(ENV_KEY) or {}).get(role)  # type: ignore[call-overload]
    return f"environments.args.{ENV_KEY}.{role}.{part}" if part in (explicit or {}) else f"environments.{part}"


@dataclass(frozen=True)
class Provider:
    """Requirements of a provider of hosted sandboxes."""

    module: str  # The Python package of its client
    install: str  # Argument of `pip install`
    key_file: str | None = None  # File below the home directory where the client also looks for keys


PROVIDERS: Mapping[str, Provider] = {
    "prime": Provider("prime_sandboxes", "prime-sandboxes"),
    "modal": Provider("modal", "'verifiers[modal]'", ".modal.toml"),
    "e2b": Provider("e2b", "'verifiers[e2b]'"),
}


@dataclass(frozen=True)
class HostNeeds:
    """Requirements on the hosts of an environment's workers."""

    # subprocess: bubblewrap. apptainer, docker, podman: the command. A key of `PROVIDERS`: its client and a key.
    runtimes: tuple[str, ...]
    harnesses: tuple[str, ...]  # Harnesses that are scripts and run with the host's packages


def needs(environment: AnyEnvironment, env: vf.Env) -> HostNeeds:
    """Return what an environment needs. `env` was loaded for it."""
    runtimes: dict[str, None] = {}
    harnesses: dict[str, None] = {}
    for role, spec in env._agent_specs.items():
        harness = env._harnesses[role]
        if _runs_no_program(harness):
            continue
        runtimes[spec.runtime.type] = None
        if spec.runtime.type == "subprocess" or sees_packages(environment.runtime):
            harnesses[harness.config.id] = None
    for server in _tool_servers(env):
        if not server.config.url and not getattr(server.config, "colocated", False):
            runtimes[server.config.runtime.type] = None
    # Trusted programs run without a sandbox, so they do not need bubblewrap.
    if isinstance(environment.runtime, SubprocessRuntime) and environment.runtime.trusted:
        runtimes.pop("subprocess", None)
    return HostNeeds(tuple(runtimes), tuple(harnesses))


def missing_needs(environment: AnyEnvironment, env: vf.Env) -> list[Violation]:
    """List what an environment needs and this host lacks. `env` was loaded for it."""
    required = needs(environment, env)
    runtime = environment.runtime
    violations = [problem for kind in required.runtimes for problem in _missing_for_runtime(kind, env)]
    if sees_packages(runtime):
        violations += _pythons_among_system_programs()
    if closes_network(runtime) and shutil.which(apptainer.NSENTER) is None:
        why = f"`{apptainer.NSENTER}` is not installed here, and containers need it to reach the model"
        violations.append(Violation(f"{_RUNTIME}.limits.network", "none", why, "install util-linux"))
    disk_gb = runtime.limits.disk_gb if isinstance(runtime, ApptainerRuntime) else None
    if disk_gb is not None and (programs := apptainer.missing_for_disks()):
        why = f"apptainer cannot enforce it, because this host has no {' and no '.join(programs)}"
        fix = "leave it out, or install fuse2fs, fuse-overlayfs and e2fsprogs"
        violations.append(Violation(f"{_RUNTIME}.limits.disk_gb", f"{disk_gb:g}", why, fix))
    return violations + [problem for harness in required.harnesses for problem in _missing_for_harness(harness)]


def side_effects(environment: AnyEnvironment, env: vf.Env) -> list[Violation]:
    """List side effects of rollouts that some users do not want: downloads, and a key in a command line."""
    downloads: dict[tuple[str, str], Violation] = {}
    shows_key = False
    for role, spec in env._agent_specs.items():
        harness, kind = env._harnesses[role], spec.runtime.type
        if kind in _CONTAINERS and not sees_packages(environment.runtime) and not _runs_no_program(harness):
            name = harness.config.id
            why = f"each rollout installs harness {name} in its container: nodes must reach PyPI, or its download site"
            fix = "`install: false` there, or `runtime: {type: subprocess}` if the nodes have the tasks' programs"
            downloads[name, kind] = Violation(_RUNTIME, kind, why, fix)
        is_search = isinstance(harness.config, BashHarnessConfig) and harness.config.search
        # verifiers passes the key in a command line, so that the agent's tools do not inherit it. Programs in a
        # container are processes of the node, too, and their command lines are visible there.
        shows_key |= bool(is_search) and kind not in PROVIDERS
    violations = list(downloads.values())
    if shows_key:
        why = "SERPER_API_KEY is in the command line of its program, which other users of the node can read"
        fix = "use nodes of your own (`exclusive`), a hosted runtime, or no `search`"
        violations.append(Violation("environments.harness.search", "true", why, fix))
    return violations


def _runs_no_program(harness: vf.Harness) -> bool:
    return isinstance(harness, ChatHarness) and not harness.EXECUTES_CODE


def _missing_for_runtime(kind: str, env: vf.Env) -> Iterator[Violation]:
    if kind == "subprocess":
        if why := _bubblewrap_problem():
            fix = "install bubblewrap, use `runtime: {type: apptainer}`, or set `trusted: true` if you trust the tasks"
            yield Violation(_RUNTIME, kind, why, fix)
    elif kind in _CONTAINERS and shutil.which(kind) is None:
        yield Violation(_RUNTIME, kind, f"`{kind}` is not installed here", "install it, or use another runtime")
    elif kind in PROVIDERS:
        yield from _missing_for_provider(kind, env)


# Cached, because all environments of a recipe share the host.
@functools.cache
def _bubblewrap_problem() -> str:
    return limits.bubblewrap_problem()


def _missing_for_provider(kind: str, env: vf.Env) -> Iterator[Violation]:
    provider = PROVIDERS[kind]
    if importlib.util.find_spec(provider.module) is None:
        why = f"the Python package `{provider.module}` is not installed here"
        fix = f"`pip install {provider.install}` where jobs run, or use another runtime"
        yield Violation(_RUNTIME, kind, why, fix)
    for name in _missing_keys(kind):
        fix = f"export it in the shell you submit from, and add `pass_env: [{name}]`"
        yield Violation(_RUNTIME, kind, f"jobs do not get {name}", fix)
    # Programs at a provider reach the model through a tunnel. Without another choice it is Prime Intellect's.
    tunnel: Any = getattr(env.config.interception, "tunnel", None)
    if kind != "prime" and (tunnel is None or str(tunnel.type) == "prime"):
        for name in _missing_keys("prime"):
            why = f"its programs reach the model through a tunnel of Prime Intellect, and jobs do not get {name}"
            fix = f"`pass_env: [{name}]`, or `interception: {{type: server, tunnel: {{type: custom, ...}}}}`"
            yield Violation("environments.args.env.interception", "prime", why, fix)


def _missing_keys(kind: str) -> list[str]:
    """Return the variables with a provider's keys that are unset, unless its client finds the keys in a file."""
    file = PROVIDERS[kind].key_file
    if (kind == "prime" and load_prime_config().get("api_key")) or (file and (Path.home() / file).is_file()):
        return []
    return [name for name in PROVIDER_KEYS[kind] if not os.environ.get(name)]


def _pythons_among_system_programs() -> Iterator[Violation]:
    """Find Pythons in directories that cannot be mounted, because the image has programs of its own there."""
    for path in uv_scripts.environment_directories():
        if path in bwrap_args.NEVER_SHOWN or path.is_relative_to("/usr"):
            why = f"Python is in {path}, where a container has programs of its own"
            fix = "use `install: true`, or an environment whose Python is elsewhere, such as uv's (uv python install)"
            yield Violation(f"{_RUNTIME}.install", "false", why, fix)


def _missing_for_harness(harness: str) -> Iterator[Violation]:
    name = module_name(harness)
    if name not in HARNESSES:  # nothing is known about the needs of other packages
        return
    field = "environments.harness"
    if name not in WITHOUT_INSTALLING:
        why = "it installs programs in a container, and a subprocess has none"
        yield Violation(field, harness, why, "`runtime: {type: apptainer}`")
        return
    try:
        uv_scripts.find_python(harness_script(name))
    except uv_scripts.MissingPackagesError as error:
        if name in LOCKED:
            yield Violation(field, harness, str(error), f"primeslurm install --harness {name}")
        else:
            fix = "install them in an environment in .venv/harnesses, or use `runtime: {type: apptainer}`"
            yield Violation(field, harness, f"not installed: {', '.join(error.missing)}", fix)


def harness_script(harness: str) -> str:
    """Return the Python script of a harness of verifiers, for the harness's default version."""
    if harness in ("bash", "null"):
        from verifiers.v1.harnesses.utils.launch import CHAT_PROGRAM_SOURCE

        return str(CHAT_PROGRAM_SOURCE)
    module = importlib.import_module(f"verifiers.v1.harnesses.{harness}.harness")
    return str(module.PROGRAM_SOURCE).replace("{version}", harness_config_type(harness)().version)
