"""Faults of nodes and of Slurm."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Callable
from random import Random

from tests.chaos.faulty_deployment import HEAD, Agent, FaultyDeployment
from tests.chaos.kinds.fault_effect import FaultEffect, Kind, NoTargetError, goal_of, one_of
from tests.chaos.kinds.processes import STOPPED_S, stopped
from tests.support.faults import kill_node, revive_controller, revive_node, set_down, warn

DOWN_S = 60.0
"""Time until a node that is DOWN is returned to service [s]."""


def _node(deployment: FaultyDeployment, rng: Random) -> Agent:
    """Return a node of the job other than the head's."""
    return one_of(
        rng, [agent for agent, _ in deployment.agents() if agent.rank != HEAD and deployment.daemon(agent.node)]
    )


def _revive(deployment: FaultyDeployment, node: str) -> Callable[[], None]:
    def repair() -> None:
        if deployment.daemon(node) is None:
            revive_node(deployment.cluster, node)

    return repair


def _resume(deployment: FaultyDeployment, node: str) -> None:
    with contextlib.suppress(subprocess.CalledProcessError):  # it has come back by itself
        deployment.slurm("scontrol", "update", f"nodename={node}", "state=resume")


def _lose_node(deployment: FaultyDeployment, rng: Random) -> FaultEffect:
    agent, attempt = _node(deployment, rng), deployment.run.latest().number
    goal = goal_of(*deployment.roles_on(agent))
    kill_node(deployment.cluster, agent.node)
    deployment.went_down(agent.node)
    return FaultEffect(
        f"{agent.node}, agent {agent.rank}",
        lambda status: status.attempt > attempt or agent.node in deployment.lost_nodes(),
        lasts_s=DOWN_S,
        repair=_revive(deployment, agent.node),
        nodes=frozenset({agent.node}),
        goal_s=goal,
        waits_for_repair=False,
    )


def _drain_node(deployment: FaultyDeployment, rng: Random) -> FaultEffect:
    agent, seconds = _node(deployment, rng), round(rng.uniform(*STOPPED_S), 1)
    deployment.slurm("scontrol", "update", f"nodename={agent.node}", "state=drain", "reason=chaos")
    return FaultEffect(
        f"{agent.node} for {seconds} s",
        lasts_s=seconds,
        repair=lambda: _resume(deployment, agent.node),
    )


def _set_node_down(deployment: FaultyDeployment, rng: Random) -> FaultEffect:
    agent, attempt = _node(deployment, rng), deployment.run.latest().number
    goal = goal_of(*deployment.roles_on(agent))
    set_down(deployment.conf, agent.node, "chaos")
    deployment.went_down(agent.node)
    return FaultEffect(
        f"{agent.node}, agent {agent.rank}",
        lambda status: status.attempt > attempt or agent.node in deployment.lost_nodes(),
        lasts_s=DOWN_S,
        repair=lambda: _resume(deployment, agent.node),
        nodes=frozenset({agent.node}),
        # Slurm kills every process of the step on the node. The next step there removes their files.
        leaves=frozenset({f"-{attempt}-a{agent.rank}-"}),
        goal_s=goal,
        waits_for_repair=False,
    )


def _kill_slurmd(deployment: FaultyDeployment, rng: Random) -> FaultEffect:
    agent, seconds = _node(deployment, rng), round(rng.uniform(*STOPPED_S), 1)
    daemon = deployment.daemon(agent.node)
    assert daemon is not None
    daemon.send(signal.SIGKILL)
    effect = FaultEffect(f"{agent.node} for {seconds} s", lasts_s=seconds, repair=_revive(deployment, agent.node))
    return _may_be_down(effect, deployment, agent)


def _stop_slurmd(deployment: FaultyDeployment, rng: Random) -> FaultEffect:
    agent = _node(deployment, rng)
    daemon = deployment.daemon(agent.node)
    assert daemon is not None
    return _may_be_down(stopped(daemon, agent.node, rng), deployment, agent)


def _may_be_down(effect: FaultEffect, deployment: FaultyDeployment, agent: Agent) -> FaultEffect:
    """A restarted controller sets nodes that do not answer DOWN, and ends their jobs."""
    deployment.went_down(agent.node)
    effect.nodes = frozenset({agent.node})
    effect.leaves = frozenset({f"-{deployment.run.latest().number}-a{agent.rank}-"})
    return effect


def _kill_slurmctld(deployment: FaultyDeployment, rng: Random) -> FaultEffect:
    daemon, seconds = deployment.daemon("slurmctld"), round(rng.uniform(*STOPPED_S), 1)
    if daemon is None:
        raise NoTargetError
    # The controller restarts with these nodes DOWN, and ends their jobs.
    lately, attempt = deployment.down_lately, deployment.run.latest().number
    there = [agent for agent, _ in deployment.agents() if agent.node in lately]
    goal = goal_of(*(role for agent in there for role in deployment.roles_on(agent)))
    daemon.send(signal.SIGKILL)

    def repair() -> None:
        if deployment.daemon("slurmctld") is None:
            revive_controller(deployment.cluster)

    return FaultEffect(
        f"slurmctld for {seconds} s",
        lasts_s=seconds,
        repair=repair,
        nodes=lately,
        leaves=frozenset(f"-{attempt}-a{agent.rank}-" for agent in there),
        goal_s=goal,
    )


def _stop_slurmctld(deployment: FaultyDeployment, rng: Random) -> FaultEffect:
    daemon = deployment.daemon("slurmctld")
    if daemon is None:
        raise NoTargetError
    return stopped(daemon, "slurmctld", rng)


def _preempt(deployment: FaultyDeployment, rng: Random) -> FaultEffect:
    job, attempt = deployment.run.latest().job(), deployment.run.latest().number
    if job is None or deployment.daemon("slurmctld") is None:
        raise NoTargetError
    warn(deployment.conf, job.job_id)
    return FaultEffect(f"job {job.job_id}", lambda status: status.attempt > attempt, goal_s=goal_of("trainer"))


NODES = (
    Kind(
        "node lost",
        "a node that is not the head's loses power, and comes back after a minute",
        _lose_node,
    ),
    Kind(
        "node set down",
        "an administrator sets a node that is not the head's DOWN, and back after a minute",
        _set_node_down,
    ),
    Kind("node drained", "an administrator drains a node for 3 to 20 s", _drain_node),
    Kind("slurmd killed", "SIGKILL to a slurmd, started again after 3 to 20 s", _kill_slurmd),
    Kind("slurmd stopped", "SIGSTOP to a slurmd, SIGCONT after 3 to 20 s", _stop_slurmd),
    Kind("slurmctld killed", "SIGKILL to Slurm's controller, started again after 3 to 20 s", _kill_slurmctld),
    Kind("slurmctld stopped", "SIGSTOP to Slurm's controller, SIGCONT after 3 to 20 s", _stop_slurmctld),
    Kind("preemption", "USR2 to every task of the job", _preempt),
)
