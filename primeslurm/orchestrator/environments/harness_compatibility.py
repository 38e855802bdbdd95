"""Checks that an environment's tasks, harnesses and runtimes fit together. They need no rollout."""

from __future__ import annotations

from collections.abc import Sequence

import verifiers.v1 as vf
from verifiers.v1.runtimes import SubprocessConfig

from primeslurm.base.errors import Violation
from primeslurm.orchestrator.environments.shell import ShellHarness
from primeslurm.recipe.rules.sandboxes import ENV_KEY, offers_tools
from primeslurm.recipe.sections.orchestrator import Environment

_SHIPPED = "verifiers.v1.harnesses."


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


def _tool_servers(env: vf.Env) -> Sequence[object]:
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
