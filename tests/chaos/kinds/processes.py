"""Killed and stopped processes."""

from __future__ import annotations

import signal
from collections.abc import Callable
from random import Random

from primeslurm.run.status.run_status import RunStatus
from primeslurm.testbed.embedded_slurm.daemons import OsProcess
from tests.chaos.faulty_deployment import HEAD, FaultyDeployment
from tests.chaos.kinds.fault_effect import FaultEffect, Kind, goal_of, one_of

STOPPED_S = (3.0, 20.0)
"""Duration of a stop [s]."""


def _kill(*roles: str) -> Callable[[FaultyDeployment, Random], FaultEffect]:
    def inject(deployment: FaultyDeployment, rng: Random) -> FaultEffect:
        process, os_process = one_of(rng, deployment.living(*roles))
        attempt = deployment.run.latest().number

        def noticed(status: RunStatus) -> bool:
            """Return whether it was restarted or given up, or a new attempt has begun."""
            now = next((p for p in status.processes if p.name == process.name), None)
            return status.attempt > attempt or (now is not None and (now.pid != os_process.pid or now.state == "LOST"))

        os_process.send(signal.SIGKILL)
        return FaultEffect(f"{process.name} on {process.node}", noticed, goal_s=goal_of(process.role))

    return inject


def _stop(*roles: str) -> Callable[[FaultyDeployment, Random], FaultEffect]:
    def inject(deployment: FaultyDeployment, rng: Random) -> FaultEffect:
        process, os_process = one_of(rng, deployment.living(*roles))
        effect = stopped(os_process, f"{process.name} on {process.node}", rng)
        effect.goal_s = goal_of(process.role)
        return effect

    return inject


def stopped(os_process: OsProcess, who: str, rng: Random, *nodes: str) -> FaultEffect:
    """Stop a process for some seconds."""
    seconds = round(rng.uniform(*STOPPED_S), 1)
    os_process.send(signal.SIGSTOP)
    return FaultEffect(
        f"{who} for {seconds} s",
        lasts_s=seconds,
        repair=lambda: os_process.send(signal.SIGCONT),
        nodes=frozenset(nodes),
    )


def _kill_agent(deployment: FaultyDeployment, rng: Random, *, head: bool) -> FaultEffect:
    agent, os_process = one_of(rng, [pair for pair in deployment.agents() if (pair[0].rank == HEAD) == head])
    attempt = deployment.run.latest().number
    os_process.send(signal.SIGKILL)
    return FaultEffect(
        f"agent {agent.rank} on {agent.node}",
        lambda status: status.attempt > attempt or agent.node in deployment.lost_nodes(),
        nodes=frozenset({agent.node}),
        goal_s=goal_of(*deployment.roles_on(agent)),
    )


def _stop_agent(deployment: FaultyDeployment, rng: Random, *, head: bool) -> FaultEffect:
    agent, os_process = one_of(rng, [pair for pair in deployment.agents() if (pair[0].rank == HEAD) == head])
    effect = stopped(os_process, f"agent {agent.rank} on {agent.node}", rng, agent.node)
    effect.goal_s = goal_of(*deployment.roles_on(agent))
    return effect


_STOP = f"SIGSTOP to {{}}, SIGCONT after {STOPPED_S[0]:.0f} to {STOPPED_S[1]:.0f} s"
PROCESSES = (
    Kind("engine killed", "SIGKILL to a prefill or decode engine", _kill("prefill", "decode")),
    Kind("engine stopped", _STOP.format("a prefill or decode engine"), _stop("prefill", "decode")),
    Kind("router killed", "SIGKILL to a router", _kill("router")),
    Kind("router stopped", _STOP.format("a router"), _stop("router")),
    Kind("environment worker killed", "SIGKILL to an environment worker", _kill("environment")),
    Kind("environment worker stopped", _STOP.format("an environment worker"), _stop("environment")),
    Kind("store killed", "SIGKILL to the master or a client of the KV store", _kill("store")),
    Kind("store stopped", _STOP.format("the master or a client of the KV store"), _stop("store")),
    Kind("orchestrator killed", "SIGKILL to the orchestrator", _kill("orchestrator")),
    Kind("orchestrator stopped", _STOP.format("the orchestrator"), _stop("orchestrator")),
    Kind("trainer killed", "SIGKILL to a trainer rank", _kill("trainer")),
    Kind("trainer stopped", _STOP.format("a trainer rank"), _stop("trainer")),
    Kind(
        "agent killed",
        "SIGKILL to a node's agent that is not the head",
        lambda deployment, rng: _kill_agent(deployment, rng, head=False),
    ),
    Kind(
        "agent stopped",
        _STOP.format("a node's agent that is not the head"),
        lambda deployment, rng: _stop_agent(deployment, rng, head=False),
    ),
    Kind(
        "head killed",
        "SIGKILL to the agent that is the head",
        lambda deployment, rng: _kill_agent(deployment, rng, head=True),
    ),
    Kind(
        "head stopped",
        _STOP.format("the agent that is the head"),
        lambda deployment, rng: _stop_agent(deployment, rng, head=True),
    ),
)
