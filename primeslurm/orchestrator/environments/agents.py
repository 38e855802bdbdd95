"""From the recipe's harness and runtime to the options of agents in verifiers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verifiers.v1.utils.loaders import default_harness_id, harness_class

from primeslurm.recipe.sandbox_rules import HARNESSES, WITHOUT_CONTAINER, WITHOUT_INSTALLING, module_name
from primeslurm.recipe.sections.orchestrator import AnyEnvironment
from primeslurm.recipe.sections.sandboxes import (
    STAGES,
    ApptainerRuntime,
    ContainerRuntime,
    HostedRuntime,
    Limits,
    Runtime,
)


def agent_options(environment: AnyEnvironment) -> dict[str, Any]:
    """Give what each agent of an environment gets that its own options in `args.env` do not say."""
    options: dict[str, Any] = {}
    if environment.harness is not None:
        options["harness"] = environment.harness.options
    runtime = environment.runtime
    if runtime is None:
        return options
    stage = runtime.limits.wall_time_s
    options["timeout"] = dict.fromkeys(STAGES, stage)
    options["runtime"] = _runtime(runtime)
    if runtime.secrets:
        options["secrets"] = list(runtime.secrets)
    return options


def completed(said: Mapping[str, Any], agent: Mapping[str, Any], taskset: str) -> dict[str, Any]:
    """Complete what `args.env` says of one agent.

    Args:
        said: that.
        agent: `agent_options` of the environment.
        taskset: its id, which says the harness where nobody else does.
    """
    options = {**agent, **said}
    harness = {"id": default_harness_id(taskset), **(options.get("harness") or {})}
    if secrets := options.pop("secrets", None):
        options["harness"] = {**harness, "forward_env": secrets}
    contained = _needs_container(harness["id"])
    runtime = options.setdefault("runtime", {"type": "apptainer" if contained else "subprocess"})
    if contained and runtime.get("type") == "subprocess" and module_name(harness["id"]) in WITHOUT_INSTALLING:
        # What verifiers wants a container for, that programs and node do not see one another, our sandboxes give.
        harness_class(harness["id"]).NEEDS_CONTAINER = False
    return options


def _needs_container(harness: str) -> bool:
    name = module_name(harness)
    return name not in WITHOUT_CONTAINER if name in HARNESSES else bool(harness_class(harness).NEEDS_CONTAINER)


def _runtime(runtime: Runtime) -> dict[str, Any]:
    options: dict[str, Any] = {"type": runtime.type}
    if isinstance(runtime, ContainerRuntime):
        options |= {name: value for name in ("image", "workdir") if (value := getattr(runtime, name)) is not None}
        options |= _limits(runtime.limits)
    if isinstance(runtime, HostedRuntime):  # the rest of its fields are verifiers' own, by their names
        options |= runtime.model_dump(mode="json", exclude=set(ContainerRuntime.model_fields))
    if isinstance(runtime, ApptainerRuntime):  # it has no such option: `containers` closes the network
        options.pop("allow", None)
    return options


def _limits(limits: Limits) -> dict[str, Any]:
    """The limits that containers hold; those of a subprocess are held by our own sandbox."""
    options: dict[str, Any] = {"cpu": limits.cpus, "memory": limits.memory_gb, "disk": limits.disk_gb}
    options = {name: value for name, value in options.items() if value is not None}
    if limits.network == "none":
        options["allow"] = []
    elif isinstance(limits.network, tuple):
        options["allow"] = list(limits.network)
    return options
