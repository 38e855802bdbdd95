"""Faults of nodes and of Slurm."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Callable
from random import Random

from tests.chaos.kinds.injury import Injury, Kind, NobodyThereError, goal_of, one_of
from tests.chaos.kinds.processes import STOPPED_S, stopped
from tests.chaos.scene import HEAD, Agent, Scene
from tests.support.faults import kill_node, revive_controller, revive_node, set_down, warn

DOWN_S = 60.0
"""Time until a node that is DOWN is returned to service [s]."""


def _node(scene: Scene, dice: Random) -> Agent:
    """Return a node of the job other than the head's."""
    return one_of(dice, [agent for agent, _ in scene.agents() if agent.rank != HEAD and scene.daemon(agent.node)])


def _revive(scene: Scene, node: str) -> Callable[[], None]:
    def repair() -> None:
        if scene.daemon(node) is None:
            revive_node(scene.cluster, node)

    return repair


def _resume(scene: Scene, node: str) -> None:
    with contextlib.suppress(subprocess.CalledProcessError):  # it has come back by itself
        scene.slurm("scontrol", "update", f"nodename={node}", "state=resume")


def _lose_node(scene: Scene, dice: Random) -> Injury:
    agent, attempt = _node(scene, dice), scene.run.latest().number
    goal = goal_of(*scene.roles_on(agent))
    kill_node(scene.cluster, agent.node)
    scene.went_down(agent.node)
    return Injury(
        f"{agent.node}, agent {agent.rank}",
        lambda status: status.attempt > attempt or agent.node in scene.lost_nodes(),
        lasts_s=DOWN_S,
        repair=_revive(scene, agent.node),
        nodes=frozenset({agent.node}),
        goal_s=goal,
        waits_for_repair=False,
    )


def _drain_node(scene: Scene, dice: Random) -> Injury:
    agent, seconds = _node(scene, dice), round(dice.uniform(*STOPPED_S), 1)
    scene.slurm("scontrol", "update", f"nodename={agent.node}", "state=drain", "reason=chaos")
    return Injury(
        f"{agent.node} for {seconds} s",
        lasts_s=seconds,
        repair=lambda: _resume(scene, agent.node),
    )


def _set_node_down(scene: Scene, dice: Random) -> Injury:
    agent, attempt = _node(scene, dice), scene.run.latest().number
    goal = goal_of(*scene.roles_on(agent))
    set_down(scene.conf, agent.node, "chaos")
    scene.went_down(agent.node)
    return Injury(
        f"{agent.node}, agent {agent.rank}",
        lambda status: status.attempt > attempt or agent.node in scene.lost_nodes(),
        lasts_s=DOWN_S,
        repair=lambda: _resume(scene, agent.node),
        nodes=frozenset({agent.node}),
        # Slurm kills every process of the step on the node. The next step there removes their files.
        leaves=frozenset({f"-{attempt}-a{agent.rank}-"}),
        goal_s=goal,
        waits_for_repair=False,
    )


def _kill_slurmd(scene: Scene, dice: Random) -> Injury:
    agent, seconds = _node(scene, dice), round(dice.uniform(*STOPPED_S), 1)
    daemon = scene.daemon(agent.node)
    assert daemon is not None
    daemon.send(signal.SIGKILL)
    injury = Injury(f"{agent.node} for {seconds} s", lasts_s=seconds, repair=_revive(scene, agent.node))
    return _may_be_down(injury, scene, agent)


def _stop_slurmd(scene: Scene, dice: Random) -> Injury:
    agent = _node(scene, dice)
    daemon = scene.daemon(agent.node)
    assert daemon is not None
    return _may_be_down(stopped(daemon, agent.node, dice), scene, agent)


def _may_be_down(injury: Injury, scene: Scene, agent: Agent) -> Injury:
    """A restarted controller sets nodes that do not answer DOWN, and ends their jobs."""
    scene.went_down(agent.node)
    injury.nodes = frozenset({agent.node})
    injury.leaves = frozenset({f"-{scene.run.latest().number}-a{agent.rank}-"})
    return injury


def _kill_slurmctld(scene: Scene, dice: Random) -> Injury:
    daemon, seconds = scene.daemon("slurmctld"), round(dice.uniform(*STOPPED_S), 1)
    if daemon is None:
        raise NobodyThereError
    # The controller restarts with these nodes DOWN, and ends their jobs.
    lately, attempt = scene.down_lately, scene.run.latest().number
    there = [agent for agent, _ in scene.agents() if agent.node in lately]
    goal = goal_of(*(role for agent in there for role in scene.roles_on(agent)))
    daemon.send(signal.SIGKILL)

    def repair() -> None:
        if scene.daemon("slurmctld") is None:
            revive_controller(scene.cluster)

    return Injury(
        f"slurmctld for {seconds} s",
        lasts_s=seconds,
        repair=repair,
        nodes=lately,
        leaves=frozenset(f"-{attempt}-a{agent.rank}-" for agent in there),
        goal_s=goal,
    )


def _stop_slurmctld(scene: Scene, dice: Random) -> Injury:
    daemon = scene.daemon("slurmctld")
    if daemon is None:
        raise NobodyThereError
    return stopped(daemon, "slurmctld", dice)


def _preempt(scene: Scene, dice: Random) -> Injury:
    job, attempt = scene.run.latest().job(), scene.run.latest().number
    if job is None or scene.daemon("slurmctld") is None:
        raise NobodyThereError
    warn(scene.conf, job.job_id)
    return Injury(f"job {job.job_id}", lambda status: status.attempt > attempt, goal_s=goal_of("trainer"))


NODES = (
    Kind(
        "node lost",
        "a node that is not the head's loses power, and comes back after a minute",
        _lose_node,
        long=True,
    ),
    Kind(
        "node set down",
        "an administrator sets a node that is not the head's DOWN, and back after a minute",
        _set_node_down,
        long=True,
    ),
    Kind("node drained", "an administrator drains a node for 3 to 20 s", _drain_node),
    Kind("slurmd killed", "SIGKILL to a slurmd, started again after 3 to 20 s", _kill_slurmd),
    Kind("slurmd stopped", "SIGSTOP to a slurmd, SIGCONT after 3 to 20 s", _stop_slurmd),
    Kind("slurmctld killed", "SIGKILL to Slurm's controller, started again after 3 to 20 s", _kill_slurmctld),
    Kind("slurmctld stopped", "SIGSTOP to Slurm's controller, SIGCONT after 3 to 20 s", _stop_slurmctld),
    Kind("preemption", "USR2 to every task of the job", _preempt, long=True),
)
