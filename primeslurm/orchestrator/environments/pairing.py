"""Whether an environment's tasks, its agents' harnesses and their runtimes go together, known before any rollout."""

from __future__ import annotations

import verifiers.v1 as vf
from verifiers.v1.runtimes import SubprocessConfig

from primeslurm.errors import Violation
from primeslurm.recipe.sandbox_rules import ENV_KEY
from primeslurm.recipe.sections.orchestrator import Environment


def contradictions(environment: Environment, env: vf.Env) -> list[Violation]:
    """Find agents whose harness, tasks and runtime do not go together.

    Args:
        environment: as the recipe has it.
        env: what was loaded for that.
    """
    found = []
    task, options = type(env.taskset).task_type(), env.taskset.config
    tools = type(env.taskset).toolsets(options) or task.toolsets(options.task)
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


def _field(environment: Environment, role: str, part: str) -> str:
    """Where the recipe says it of this agent."""
    said = dict(environment.args.get(ENV_KEY) or {}).get(role)  # type: ignore[call-overload]
    return f"environments.args.{ENV_KEY}.{role}.{part}" if part in (said or {}) else f"environments.{part}"
