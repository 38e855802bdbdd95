"""What an environment needs of the machines that its workers run on."""

from __future__ import annotations

import functools
import importlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.harnesses.bash import BashHarnessConfig
from verifiers.v1.utils.loaders import harness_config_type

from primeslurm.base.errors import Violation
from primeslurm.orchestrator.environments import remote_sandboxes
from primeslurm.orchestrator.environments.chat import ChatHarness
from primeslurm.orchestrator.environments.sandbox import bwrap_args, disk, limits, namespaces, uv_scripts
from primeslurm.recipe.sandbox_rules import HARNESSES, WITHOUT_INSTALLING, module_name
from primeslurm.recipe.sections.orchestrator import AnyEnvironment
from primeslurm.recipe.sections.sandboxes import ApptainerRuntime, SubprocessRuntime, closes_network, sees_packages

LOCKED = ("mini_swe_agent",)
"""Harnesses whose packages `primeslurm install --harness NAME` installs."""
_CONTAINERS = ("apptainer", "docker", "podman")
_BY_ITSELF = "install that in an environment in .venv/harnesses, or `runtime: {type: apptainer}`"


@dataclass(frozen=True)
class HostNeeds:
    """What must be there."""

    runtimes: tuple[str, ...]
    """subprocess: a working bubblewrap; apptainer, docker, podman: their command; of hosted ones `hosted` knows."""
    harnesses: tuple[str, ...]
    """Harnesses whose scripts run with the node's packages: their packages must be installed."""


def needs(environment: AnyEnvironment, env: vf.Env) -> HostNeeds:
    """Say what an environment, loaded with what the recipe says of it, needs of its workers' machines."""
    used: dict[str, None] = {}
    harnesses: dict[str, None] = {}
    for role, spec in env._agent_specs.items():
        harness = env._harnesses[role]
        if isinstance(harness, ChatHarness) and not harness.EXECUTES_CODE:  # runs no program
            continue
        used[spec.runtime.type] = None
        if spec.runtime.type == "subprocess" or sees_packages(environment.runtime):
            harnesses[harness.config.id] = None
    for server in _servers(env):
        if not server.config.url and not getattr(server.config, "colocated", False):
            used[server.config.runtime.type] = None
    if isinstance(environment.runtime, SubprocessRuntime) and environment.runtime.trusted:
        used.pop("subprocess", None)
    return HostNeeds(tuple(used), tuple(harnesses))


def unmet(environment: AnyEnvironment, env: vf.Env) -> list[Violation]:
    """Find what an environment needs and this machine has not."""
    wanted = needs(environment, env)
    found = [problem for kind in wanted.runtimes for problem in _runtime(kind, env)]
    if sees_packages(environment.runtime):
        found += _of_the_system()
    if closes_network(environment.runtime) and shutil.which(namespaces.ENTERING) is None:
        why = f"`{namespaces.ENTERING}` is not installed here, and opens the way to the model"
        found.append(Violation("environments.runtime.limits.network", "none", why, "install util-linux"))
    if isinstance(environment.runtime, ApptainerRuntime) and environment.runtime.limits.disk_gb is not None:
        found += _disk(environment.runtime.limits.disk_gb)
    return found + [problem for harness in wanted.harnesses for problem in _harness(harness)]


def notes(environment: AnyEnvironment, env: vf.Env) -> list[Violation]:
    """Find what rollouts do that not everybody wants: fetch harnesses from the internet, show a key."""
    return [*_downloads(environment, env), *_shown_key(env)]


def _downloads(environment: AnyEnvironment, env: vf.Env) -> list[Violation]:
    """Harnesses are installed into each container, wherever it runs."""
    if sees_packages(environment.runtime):
        return []
    found: dict[tuple[str, str], Violation] = {}
    for role, spec in env._agent_specs.items():
        harness, kind = env._harnesses[role], spec.runtime.type
        if kind not in _CONTAINERS or (isinstance(harness, ChatHarness) and not harness.EXECUTES_CODE):
            continue
        name = harness.config.id
        why = f"each rollout installs harness {name} into its container: nodes must reach PyPI, or whence it comes"
        fix = "`install: false` there, or `runtime: {type: subprocess}` where the task's programs are on the nodes"
        found[name, kind] = Violation("environments.runtime", kind, why, fix)
    return list(found.values())


def _shown_key(env: vf.Env) -> list[Violation]:
    """A program of the node gets the key of `search` by its command line, so that its tools do not inherit it.

    In a container, too, that program is a process of the node: no variable of a shell before it would hide the key.
    """
    shown = any(
        isinstance(env._harnesses[role].config, BashHarnessConfig)
        and env._harnesses[role].config.search
        and spec.runtime.type not in remote_sandboxes.PROVIDERS
        for role, spec in env._agent_specs.items()
    )
    why = "SERPER_API_KEY is in the command line of its program, which other users of the node can read"
    fix = "nodes of your own (`exclusive`), a hosted runtime, or no `search`"
    return [Violation("environments.harness.search", "true", why, fix)] if shown else []


def _servers(env: vf.Env) -> Iterator[Any]:
    """The tool servers that are known before any rollout."""
    yield from type(env.taskset).task_type().toolsets(env.taskset.config.task)
    yield from env.taskset.toolsets(env.taskset.config)


def _runtime(kind: str, env: vf.Env) -> Iterator[Violation]:
    if kind == "subprocess":
        if why := _bubblewrap():
            fix = "install bubblewrap, or `runtime: {type: apptainer}`, or `trusted: true` there if you trust its tasks"
            yield Violation("environments.runtime", kind, why, fix)
    elif kind in _CONTAINERS and shutil.which(kind) is None:
        yield Violation(
            "environments.runtime", kind, f"`{kind}` is not installed here", "install it, or another runtime"
        )
    elif kind in remote_sandboxes.PROVIDERS:
        yield from remote_sandboxes.unmet(kind, env)


def _disk(disk_gb: float) -> Iterator[Violation]:
    """What apptainer mounts a disk of fixed size with."""
    if lacking := disk.lacking():
        why = f"apptainer cannot hold it here: {', '.join(lacking)} is lacking"
        fix = "leave it out, or install them (fuse2fs, fuse-overlayfs, e2fsprogs)"
        yield Violation("environments.runtime.limits.disk_gb", f"{disk_gb:g}", why, fix)


def _of_the_system() -> Iterator[Violation]:
    """Directories that containers cannot be shown, as theirs of that name hold the image's programs."""
    for path in uv_scripts.environment_directories():
        if path in bwrap_args.NEVER or path.is_relative_to("/usr"):
            why = f"Python is in {path}, where a container has programs of its own"
            fix = "true, or install into an environment whose Python is elsewhere, such as uv's (uv python install)"
            yield Violation("environments.runtime.install", "false", why, fix)


@functools.cache
def _bubblewrap() -> str:
    return limits.bubblewrap_works()


def _harness(harness: str) -> Iterator[Violation]:
    name = module_name(harness)
    if name not in HARNESSES:
        return
    if name not in WITHOUT_INSTALLING:
        why = "installs programs into its container, which a subprocess has not"
        yield Violation("environments.harness", harness, why, "`runtime: {type: apptainer}`")
        return
    try:
        uv_scripts.find_python(script(name))
    except uv_scripts.MissingPackagesError as error:
        if name in LOCKED:
            yield Violation("environments.harness", harness, str(error), f"primeslurm install --harness {name}")
        else:
            yield Violation("environments.harness", harness, f"not installed: {', '.join(error.lacking)}", _BY_ITSELF)


def script(harness: str) -> str:
    """The Python script of a harness that verifiers ships, as it runs with this harness's default version."""
    if harness in ("bash", "null"):
        from verifiers.v1.harnesses.utils.launch import CHAT_PROGRAM_SOURCE

        return str(CHAT_PROGRAM_SOURCE)
    module = importlib.import_module(f"verifiers.v1.harnesses.{harness}.harness")
    return str(module.PROGRAM_SOURCE).replace("{version}", harness_config_type(harness)().version)
