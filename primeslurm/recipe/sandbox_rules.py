"""Which harness goes with which runtime, and what a runtime can hold. Known without verifiers."""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Iterator, Mapping, Sequence

from primeslurm.base.errors import Violation
from primeslurm.recipe.sections.orchestrator import AnyEnvironment
from primeslurm.recipe.sections.sandboxes import (
    ApptainerRuntime,
    E2BRuntime,
    Limits,
    PrimeRuntime,
    SubprocessRuntime,
    sees_packages,
)

HARNESSES = (
    "bash",
    "browser_use",
    "claude_code",
    "codex",
    "hermes_agent",
    "kimi_code",
    "mini_swe_agent",
    "null",
    "openclaw",
    "pi",
    "prime_agent",
    "rlm",
    "terminus_2",
)
"""What verifiers 0.4 ships."""
WITHOUT_CONTAINER = ("bash", "null")
"""Harnesses that verifiers also lets run unprotected on the node."""
WITHOUT_INSTALLING = ("bash", "mini_swe_agent", "null", "terminus_2")
"""Harnesses that are Python scripts, whose packages set-up can install. Others install programs in a container."""
WITHOUT_TOOLS = ("chat", "null", "terminus_2")
"""Harnesses that offer the model no tools of their own: `null` has those of the task, Terminus reads its text."""
PROVIDER_KEYS = {
    "prime": ("PRIME_API_KEY",),
    "modal": ("MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET"),
    "e2b": ("E2B_API_KEY",),
}
"""Hosted runtimes, and the variables with the keys of an account there."""
_CONTAINER = "`runtime: {type: apptainer}`"
ENV_KEY = "env"
"""Key of an environment's args that holds options of the verifiers Env itself (agents, harness, runtime, timeouts)."""


def violations(environments: Sequence[AnyEnvironment], field: str = "environments") -> list[Violation]:
    """Find harnesses and runtimes that do not go together, or that are said twice, in the environments of a field."""
    return [
        Violation(f"{field}.{index}.{found.field}", found.value, found.why, found.fix)
        for index, environment in enumerate(environments)
        for found in (*_raw(environment), *_harness(environment), *_runtime(environment))
    ]


def tunnel_violations(environments: Mapping[str, AnyEnvironment]) -> list[Violation]:
    """Find workers that would share a custom tunnel: its URL leads to one port, where one of them can listen.

    Args:
        environments: all that have workers, by their field.
    """
    found, takers = [], dict[object, str]()
    for field, environment in environments.items():
        port = _tunnel_port(environment)
        if port is None:
            continue
        if environment.workers > 1:
            why = f"a custom tunnel leads to one port, where one of {environment.workers} workers can listen"
            found.append(Violation(f"{field}.workers", str(environment.workers), why, "1"))
        if port in takers:
            why = f"the tunnel of {takers[port]} has it, and their workers may be on one node"
            where = f"{field}.args.{ENV_KEY}.interception.tunnel.port"
            found.append(Violation(where, str(port), why, "another port, with a URL of its own"))
        takers.setdefault(port, field)
    return found


def _tunnel_port(environment: AnyEnvironment) -> object:
    """The node's port of a custom tunnel; None if the environment has none. What is no such option, verifiers says."""
    options: object = environment.args.get(ENV_KEY)
    for key in ("interception", "tunnel"):
        options = options.get(key) if isinstance(options, Mapping) else None
    custom = isinstance(options, Mapping) and options.get("type") == "custom"
    return options.get("port") if custom and isinstance(options, Mapping) else None


def module_name(harness: str) -> str:
    """The module that verifiers imports for a harness."""
    return harness.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()


def offers_tools(harness: str) -> bool:
    """Tell whether a harness that is known offers the model tools of its own."""
    name = module_name(harness)
    return name in ("shell", *HARNESSES) and name not in WITHOUT_TOOLS


def _raw(environment: AnyEnvironment) -> Iterator[Violation]:
    """What `args.env` says of agents beside the typed fields."""
    raw = environment.args.get(ENV_KEY)
    for role, options in (raw if isinstance(raw, Mapping) else {}).items():
        if not isinstance(options, Mapping):
            continue
        field = f"args.{ENV_KEY}.{role}"
        harness = options.get("harness")
        if isinstance(harness, Mapping) and "id" in harness and harness["id"] is None:
            why = "YAML reads null without quotes as nothing, and verifiers then takes bash"
            yield Violation(f"{field}.harness.id", "null", why, '`harness: {id: "null"}`')
        for name in ("harness", "runtime"):
            if name in options and getattr(environment, name) is not None:
                why = f"`{name}` of the environment says it, too"
                yield Violation(f"{field}.{name}", role, why, "keep one of them")


def _harness(environment: AnyEnvironment) -> Iterator[Violation]:
    if environment.harness is None:
        return
    given, runtime = environment.harness.id, environment.runtime
    name = module_name(given)
    if name not in HARNESSES:
        close = difflib.get_close_matches(name, HARNESSES, n=1, cutoff=0.7)
        if close and not _installed(name):
            yield Violation("harness.id", given, "no such harness", f"did you mean {close[0]}?")
        return
    if sees_packages(runtime) and name not in WITHOUT_INSTALLING:
        why = f"{given} is no Python script, and must be installed into its container"
        yield Violation("runtime.install", "false", why, f"true, or one of {', '.join(WITHOUT_INSTALLING)}")
    if not isinstance(runtime, SubprocessRuntime):
        return
    if name not in WITHOUT_INSTALLING:
        why = "installs programs into its container, which a subprocess has not"
        yield Violation("harness.id", given, why, f"{_CONTAINER}, or one of {', '.join(WITHOUT_INSTALLING)}")
    elif runtime.trusted and name not in WITHOUT_CONTAINER:
        why = "drives programs that must not see the node, and `trusted` takes the sandbox away"
        yield Violation("harness.id", given, why, f"runtime without `trusted`, or {_CONTAINER}")


def _runtime(environment: AnyEnvironment) -> Iterator[Violation]:
    runtime = environment.runtime
    if runtime is None:
        return
    limits, network = runtime.limits, runtime.limits.network
    field = "runtime.limits"
    if isinstance(network, tuple) and runtime.type in ("subprocess", "apptainer"):
        why = f"{runtime.type} cannot let some hosts through and not others"
        yield Violation(f"{field}.network", ", ".join(network), why, "none, open, or runtime docker or a hosted one")
    if network == "none" and isinstance(runtime, ApptainerRuntime) and runtime.install:
        why = "no harness could be installed into its container, which has no network from its start"
        yield Violation(f"{field}.network", network, why, "`install: false` in the runtime, or open")
    if limits.processes is not None and not isinstance(runtime, SubprocessRuntime):
        why = f"verifiers gives {runtime.type} no such limit"
        yield Violation(f"{field}.processes", str(limits.processes), why, "leave it out")
    if limits.disk_gb is not None and runtime.type not in ("subprocess", "apptainer", "prime"):
        why = f"{runtime.type} has no such limit, and would not hold it"
        yield Violation(f"{field}.disk_gb", f"{limits.disk_gb:g}", why, "leave it out")
    if isinstance(runtime, PrimeRuntime) and runtime.checkpoint is not None:
        for where, value in (("runtime.image", runtime.image), (f"{field}.disk_gb", limits.disk_gb)):
            if value is not None:
                yield Violation(where, str(value), "`checkpoint` of the runtime has its own", "keep one of them")
    if isinstance(runtime, E2BRuntime):
        yield from _sizes_at_e2b(limits, field)
    if isinstance(runtime, SubprocessRuntime) and runtime.trusted:
        for name, value in limits.model_dump(exclude_none=True, exclude={"wall_time_s"}).items():
            if value != "open":
                why = "is held by the sandbox, which `trusted` takes away"
                yield Violation(f"{field}.{name}", str(value), why, "leave one of them out")
        if runtime.visible:
            why = "without a sandbox programs see everything"
            yield Violation("runtime.visible", ", ".join(runtime.visible), why, "leave it out")


def _sizes_at_e2b(limits: Limits, field: str) -> Iterator[Violation]:
    """E2B has sizes of sandboxes of its own, and says so only when a rollout asks for one."""
    cpus, memory_gb = limits.cpus, limits.memory_gb
    if cpus is not None and cpus != 1 and cpus % 2:
        near = max(1, 2 * round(cpus / 2))
        yield Violation(f"{field}.cpus", f"{cpus:g}", "e2b has 1 core or an even number of them", f"{near}")
    if memory_gb is not None and (memory_gb < 0.125 or memory_gb * 512 % 1):
        enough = max(0.125, round(memory_gb * 512) / 512)
        why = "e2b has an even number of MiB, of 128 at least"
        yield Violation(f"{field}.memory_gb", f"{memory_gb:g}", why, f"{enough:g}")


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
