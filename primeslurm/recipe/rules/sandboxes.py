"""Rules for harnesses and runtimes: which of them work together, and which limits a runtime supports.

The rules do not import verifiers, so `check` also works where it is not installed.
"""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Iterator, Mapping, Sequence

from primeslurm.base.errors import Violation
from primeslurm.recipe.sections import sandboxes
from primeslurm.recipe.sections.orchestrator import AnyEnvironment

# Harnesses of verifiers 0.4.
HARNESSES = (
    *("bash", "browser_use", "claude_code", "codex", "hermes_agent", "kimi_code", "mini_swe_agent"),
    *("null", "openclaw", "pi", "prime_agent", "rlm", "terminus_2"),
)
# Harnesses that verifiers also runs without any container or sandbox.
WITHOUT_CONTAINER = ("bash", "null")
# Harnesses that are Python scripts, whose packages set-up can install. The others install programs into a container.
WITHOUT_INSTALLING = ("bash", "mini_swe_agent", "null", "terminus_2")
# Harnesses that add no tools: `null` uses those of the task, and Terminus parses the model's text.
WITHOUT_TOOLS = ("chat", "null", "terminus_2")
# Environment variables with the account keys of each hosted runtime.
PROVIDER_KEYS = {
    "prime": ("PRIME_API_KEY",),
    "modal": ("MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET"),
    "e2b": ("E2B_API_KEY",),
}
_CONTAINER = "`runtime: {type: apptainer}`"
# Key of an environment's args that holds options of the verifiers Env itself (agents, harness, runtime, timeouts).
ENV_KEY = "env"


def violations(environments: Sequence[AnyEnvironment], field: str = "environments") -> list[Violation]:
    """Return contradictions between harness, runtime and limits of each environment."""
    return [
        Violation(f"{field}.{index}.{problem.field}", problem.value, problem.why, problem.fix)
        for index, environment in enumerate(environments)
        for problem in (*_agent_options(environment), *_harness(environment), *_runtime(environment))
    ]


def tunnel_violations(environments: Mapping[str, AnyEnvironment]) -> list[Violation]:
    """Return environments whose workers would share the port of a custom tunnel. Only one worker can listen on it."""
    problems, field_by_port = [], dict[object, str]()
    for field, environment in environments.items():
        port = _tunnel_port(environment)
        if port is None:
            continue
        if environment.workers > 1:
            why = "a custom tunnel leads to one port, on which only one worker can listen"
            problems.append(Violation(f"{field}.workers", str(environment.workers), why, "use workers: 1"))
        if port in field_by_port:
            why = f"is also the port of {field_by_port[port]}, and workers of both may run on one node"
            where = f"{field}.args.{ENV_KEY}.interception.tunnel.port"
            problems.append(Violation(where, str(port), why, "use another port and another URL"))
        field_by_port.setdefault(port, field)
    return problems


def _tunnel_port(environment: AnyEnvironment) -> object:
    """Return the port of a custom tunnel on the node; None if there is no tunnel, or its options are invalid."""
    # verifiers reports invalid options.
    options: object = environment.args.get(ENV_KEY)
    for key in ("interception", "tunnel"):
        options = options.get(key) if isinstance(options, Mapping) else None
    custom = isinstance(options, Mapping) and options.get("type") == "custom"
    return options.get("port") if custom and isinstance(options, Mapping) else None


def module_name(harness: str) -> str:
    return harness.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()


def offers_tools(harness: str) -> bool:
    """Return whether a harness of verifiers adds tools for the model."""
    name = module_name(harness)
    return name in ("shell", *HARNESSES) and name not in WITHOUT_TOOLS


def _agent_options(environment: AnyEnvironment) -> Iterator[Violation]:
    """Check the options of agents in `args.env`."""
    agents = environment.args.get(ENV_KEY)
    for role, options in (agents if isinstance(agents, Mapping) else {}).items():
        if not isinstance(options, Mapping):
            continue
        field = f"args.{ENV_KEY}.{role}"
        harness = options.get("harness")
        if isinstance(harness, Mapping) and "id" in harness and harness["id"] is None:
            why = "YAML reads null without quotes as no value, and verifiers then uses bash"
            yield Violation(f"{field}.harness.id", "null", why, 'write `harness: {id: "null"}`')
        for name in ("harness", "runtime"):
            if name in options and getattr(environment, name) is not None:
                why = f"`{name}` of the environment already sets this"
                yield Violation(f"{field}.{name}", role, why, "keep one of them")


def _harness(environment: AnyEnvironment) -> Iterator[Violation]:
    if environment.harness is None:
        return
    harness, runtime = environment.harness.id, environment.runtime
    name = module_name(harness)
    if name not in HARNESSES:
        # Other packages may export harnesses, so only a likely misspelling is refused.
        close = difflib.get_close_matches(name, HARNESSES, n=1, cutoff=0.7)
        if close and not _installed(name):
            yield Violation("harness.id", harness, "no such harness", f"did you mean {close[0]}?")
        return
    if sandboxes.sees_packages(runtime) and name not in WITHOUT_INSTALLING:
        why = f"{harness} is not a Python script and must be installed into its container"
        fix = f"use install: true, or one of {', '.join(WITHOUT_INSTALLING)}"
        yield Violation("runtime.install", "false", why, fix)
    if not isinstance(runtime, sandboxes.SubprocessRuntime):
        return
    if name not in WITHOUT_INSTALLING:
        why = "installs programs into its container, and a subprocess has no container"
        fix = f"use {_CONTAINER}, or one of {', '.join(WITHOUT_INSTALLING)}"
        yield Violation("harness.id", harness, why, fix)
    elif runtime.trusted and name not in WITHOUT_CONTAINER:
        why = "runs programs that need a sandbox, and `trusted` removes the sandbox"
        yield Violation("harness.id", harness, why, f"leave `trusted` out, or use {_CONTAINER}")


def _runtime(environment: AnyEnvironment) -> Iterator[Violation]:
    runtime = environment.runtime
    if runtime is None:
        return
    limits, network = runtime.limits, runtime.limits.network
    field = "runtime.limits"
    if isinstance(network, tuple) and runtime.type in ("subprocess", "apptainer"):
        why = f"{runtime.type} cannot allow only some hosts"
        fix = "use none or open, or runtime docker, podman or a hosted one"
        yield Violation(f"{field}.network", ", ".join(network), why, fix)
    if network == "none" and isinstance(runtime, sandboxes.ApptainerRuntime) and runtime.install:
        why = "the container never has a network, so no harness could be installed into it"
        yield Violation(f"{field}.network", network, why, "use `install: false` in the runtime, or network: open")
    if limits.processes is not None and not isinstance(runtime, sandboxes.SubprocessRuntime):
        why = f"verifiers has no such limit for {runtime.type}"
        yield Violation(f"{field}.processes", str(limits.processes), why, "leave it out")
    if limits.disk_gb is not None and runtime.type not in ("subprocess", "apptainer", "prime"):
        why = f"verifiers does not enforce this limit with {runtime.type}"
        yield Violation(f"{field}.disk_gb", f"{limits.disk_gb:g}", why, "leave it out")
    if isinstance(runtime, sandboxes.PrimeRuntime) and runtime.checkpoint is not None:
        for where, value in (("runtime.image", runtime.image), (f"{field}.disk_gb", limits.disk_gb)):
            if value is not None:
                yield Violation(where, str(value), "`checkpoint` of the runtime already sets it", "keep one of them")
    if isinstance(runtime, sandboxes.E2BRuntime):
        yield from _e2b_sizes(limits, field)
    if isinstance(runtime, sandboxes.SubprocessRuntime) and runtime.trusted:
        for name, value in limits.model_dump(exclude_none=True, exclude={"wall_time_s"}).items():
            if value != "open":
                why = "is enforced by the sandbox, and `trusted` removes the sandbox"
                yield Violation(f"{field}.{name}", str(value), why, "leave one of them out")
        if runtime.visible:
            why = "without a sandbox, programs see all directories"
            yield Violation("runtime.visible", ", ".join(runtime.visible), why, "leave it out")


def _e2b_sizes(limits: sandboxes.Limits, field: str) -> Iterator[Violation]:
    # E2B refuses other sizes only when the first rollout creates its sandbox.
    cpus, memory_gb = limits.cpus, limits.memory_gb
    if cpus is not None and cpus != 1 and cpus % 2:
        nearest = max(1, 2 * round(cpus / 2))
        yield Violation(f"{field}.cpus", f"{cpus:g}", "must be 1 or even at e2b", f"nearest: {nearest}")
    if memory_gb is not None and (memory_gb < 0.125 or memory_gb * 512 % 1):
        nearest_gb = max(0.125, round(memory_gb * 512) / 512)
        why = "must be an even number of MiB and at least 128 MiB at e2b"
        yield Violation(f"{field}.memory_gb", f"{memory_gb:g}", why, f"nearest: {nearest_gb:g}")


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # a missing parent package, or a module without a spec
        return False
