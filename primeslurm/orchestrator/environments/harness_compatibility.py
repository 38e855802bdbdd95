"""Whether an environment's tasks, its agents' harnesses and their runtimes go together, known before any rollout."""

from __future__ import annotations

from collections.abc import Sequence

import verifiers.v1 as vf
from verifiers.v1.runtimes import SubprocessConfig

from primeslurm.base.errors import Violation
from primeslurm.orchestrator.environments.shell import ShellHarness
from primeslurm.recipe.sandbox_rules import ENV_KEY, offers_tools
from primeslurm.recipe.sections.orchestrator import Environment

_SHIPPED = "verifiers.v1.harnesses."


def contradictions(environment: Environment, env: vf.Env) -> list[Violation]:
    """Find agents whose harness, tasks and runtime do not go together.

    Args:
        environment: as the recipe has it.
        env: what was loaded for that.
    """
    found = []
    task, tools = type(env.taskset).task_type(), _served(env)
    for role, agent in env._agent_specs.items():
        harness = env._harnesses[role]
        needy = [f"harness {harness.config.id}"] if harness.NEEDS_CONTAINER else []
        needy += [task.__name__] if task.NEEDS_CONTAINER else []
        if needy and isinstance(agent.runtime, SubprocessConfig):
            why = f"{' and '.join(needy)} must run in a container"
            field = _field(environment, role, "runtime")
            found.append(Violation(field, agent.runtime.type, why, "`runtime: {type: apptainer}`"))
        if tools and not harness.SUPPORTS_MCP:
            why = "it cannot use the tools that the environment serves"
            field = _field(environment, role, "harness")
            found.append(Violation(field, harness.config.id, why, "`harness: {id: bash}`"))
    return found


def unrewarded(environment: Environment, env: vf.Env, task: vf.Task) -> list[Violation]:
    """Say so if nothing gives rollouts of a task a reward, as far as can be seen: all would get 0.

    Args:
        environment: as the recipe has it.
        env: what was loaded for that.
        task: its first one.
    """
    own = type(task).score is not vf.Task.score or type(task).finalize is not vf.Task.finalize
    if own or type(env).finalize is not vf.Env.finalize or task.hooks("reward") or task.plugged_judges():
        return []
    why = f"no method of {type(task).__name__} is marked `@vf.reward`, and no judge is named: every rollout gets 0"
    return [Violation("environments.id", environment.id, why, "mark what returns the reward with `@vf.reward`")]


def tool_users(environment: Environment, env: vf.Env) -> list[tuple[str, str]]:
    """List the agents that offer the model tools: where the recipe says their harness, and its name.

    Args:
        environment: as the recipe has it.
        env: what was loaded for that.
    """
    served = bool(_served(env))
    harnesses = {_field(environment, role, "harness"): env._harnesses[role] for role in env._agent_specs}
    return [(field, harness.config.id) for field, harness in harnesses.items() if served or _has_tools(harness)]


def _served(env: vf.Env) -> Sequence[object]:
    """The tool servers of the environment."""
    task, options = type(env.taskset).task_type(), env.taskset.config
    return [*type(env.taskset).toolsets(options), *task.toolsets(options.task)]


def _has_tools(harness: vf.Harness) -> bool:
    """Tell whether a harness, or one that it is made of, is known to have tools of its own."""
    if isinstance(harness, ShellHarness):
        return True
    modules = [kind.__module__ for kind in type(harness).__mro__]
    names = [module.removeprefix(_SHIPPED).partition(".")[0] for module in modules if module.startswith(_SHIPPED)]
    return any(offers_tools(name) for name in names)


def _field(environment: Environment, role: str, part: str) -> str:
    """Where the recipe says it of this agent."""
    said = dict(environment.args.get(ENV_KEY) or {}).get(role)  # type: ignore[call-overload]
    return f"environments.args.{ENV_KEY}.{role}.{part}" if part in (said or {}) else f"environments.{part}"
