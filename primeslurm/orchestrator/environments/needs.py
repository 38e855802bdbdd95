"""What an environment needs of the host that its rollouts run on, and what cannot work anywhere."""

from __future__ import annotations

import os
import shutil

import verifiers.v1 as vf
from verifiers.v1.runtimes import SubprocessConfig

from primeslurm.errors import Violation

_PROGRAMS = {"apptainer": "apptainer", "docker": "docker", "podman": "podman"}
"""Program by type of runtime."""
_KEYS = {"prime": "PRIME_API_KEY", "modal": "MODAL_TOKEN_ID", "e2b": "E2B_API_KEY"}
"""Variable that holds the key, by type of hosted runtime."""


def contradictions(env: vf.Env) -> list[Violation]:
    """Find agents whose harness, tasks and runtime do not go together."""
    found = []
    task, options = type(env.taskset).task_type(), env.taskset.config
    tools = type(env.taskset).toolsets(options) or task.toolsets(options.task)
    for role, agent in env._agent_specs.items():
        harness, field = env._harnesses[role], f"environments.args.env.{role}"
        needy = [f"harness {harness.config.id}"] if harness.NEEDS_CONTAINER else []
        needy += [task.__name__] if task.NEEDS_CONTAINER else []
        if needy and isinstance(agent.runtime, SubprocessConfig):
            why = f"{' and '.join(needy)} must run in a container"
            found.append(Violation(f"{field}.runtime.type", agent.runtime.type, why, "nearest: apptainer"))
        if tools and not harness.SUPPORTS_MCP:
            why = "it cannot use the tools that the environment serves"
            found.append(Violation(f"{field}.harness.id", harness.config.id, why, "nearest: bash"))
    return found


def missing(env: vf.Env) -> list[Violation]:
    """Find what runtimes of the environment's agents need and this host has not."""
    found = []
    for role, agent in env._agent_specs.items():
        kind, field = agent.runtime.type, f"environments.args.env.{role}.runtime.type"
        program, key = _PROGRAMS.get(kind), _KEYS.get(kind)
        if program and shutil.which(program) is None:
            found.append(
                Violation(field, kind, f"there is no program {program}", "install it, or take another runtime")
            )
        if key and not os.environ.get(key):
            found.append(Violation(field, kind, f"the variable {key} is not set", "set it, and name it in pass_env"))
    return found
