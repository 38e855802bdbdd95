"""Killed and stopped processes."""

from __future__ import annotations

import signal
from collections.abc import Callable
from random import Random

from primeslurm.run.status.run_status import RunStatus
from primeslurm.testbed.embedded_slurm.daemons import OsProcess
from tests.chaos.kinds.injury import Injury, Kind, goal_of, one_of
from tests.chaos.scene import HEAD, Scene

STOPPED_S = (3.0, 20.0)
"""Duration of a stop [s]."""


def _kill(*roles: str) -> Callable[[Scene, Random], Injury]:
    def inject(scene: Scene, dice: Random) -> Injury:
        process, own = one_of(dice, scene.living(*roles))
        attempt = scene.run.latest().number

        def noticed(status: RunStatus) -> bool:
            """Return whether it was restarted or given up, or a new attempt has begun."""
            now = next((p for p in status.processes if p.name == process.name), None)
            return status.attempt > attempt or (now is not None and (now.pid != own.pid or now.state == "LOST"))

        own.send(signal.SIGKILL)
        return Injury(f"{process.name} on {process.node}", noticed, goal_s=goal_of(process.role))

    return inject


def _stop(*roles: str) -> Callable[[Scene, Random], Injury]:
    def inject(scene: Scene, dice: Random) -> Injury:
        process, own = one_of(dice, scene.living(*roles))
        injury = stopped(own, f"{process.name} on {process.node}", dice)
        injury.goal_s = goal_of(process.role)
        return injury

    return inject


def stopped(own: OsProcess, who: str, dice: Random, *nodes: str) -> Injury:
    """Stop a process for some seconds."""
    seconds = round(dice.uniform(*STOPPED_S), 1)
    own.send(signal.SIGSTOP)
    return Injury(
        f"{who} for {seconds} s",
        lasts_s=seconds,
        repair=lambda: own.send(signal.SIGCONT),
        nodes=frozenset(nodes),
    )


def _kill_agent(scene: Scene, dice: Random, *, head: bool) -> Injury:
    agent, own = one_of(dice, [found for found in scene.agents() if (found[0].rank == HEAD) == head])
    attempt = scene.run.latest().number
    own.send(signal.SIGKILL)
    return Injury(
        f"agent {agent.rank} on {agent.node}",
        lambda status: status.attempt > attempt or agent.node in scene.lost_nodes(),
        nodes=frozenset({agent.node}),
        goal_s=goal_of(*scene.roles_on(agent)),
    )


def _stop_agent(scene: Scene, dice: Random, *, head: bool) -> Injury:
    agent, own = one_of(dice, [found for found in scene.agents() if (found[0].rank == HEAD) == head])
    injury = stopped(own, f"agent {agent.rank} on {agent.node}", dice, agent.node)
    injury.goal_s = goal_of(*scene.roles_on(agent))
    return injury


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
    Kind("trainer killed", "SIGKILL to a trainer rank", _kill("trainer"), long=True),
    Kind("trainer stopped", _STOP.format("a trainer rank"), _stop("trainer")),
    Kind(
        "agent killed",
        "SIGKILL to a node's agent that is not the head",
        lambda scene, dice: _kill_agent(scene, dice, head=False),
        long=True,
    ),
    Kind(
        "agent stopped",
        _STOP.format("a node's agent that is not the head"),
        lambda scene, dice: _stop_agent(scene, dice, head=False),
    ),
    Kind(
        "head killed",
        "SIGKILL to the agent that is the head",
        lambda scene, dice: _kill_agent(scene, dice, head=True),
        long=True,
    ),
    Kind(
        "head stopped",
        _STOP.format("the agent that is the head"),
        lambda scene, dice: _stop_agent(scene, dice, head=True),
    ),
)
