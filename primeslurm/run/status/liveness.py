"""Who of a run still writes, whatever the clocks of its nodes say, and what can be seen from here of those who do not.

Head and agents replace their files every second, or as often as the head says. How old a file is, two clocks say: that
of its writer in the record, that of the file system in its time of change. The older of the two counts. Neither has to
agree with the clock of who looks: a file that seems old, or from the future, is therefore watched for a moment before
its writer counts as silent. For how long it has been silent is then told by the later of the two clocks: a clock that
was set back by a day makes nobody silent for a day.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from primeslurm.base import files
from primeslurm.base.units import duration
from primeslurm.records.fleet import AgentReport, AssignmentRecord, FleetView
from primeslurm.records.reading import find_record
from primeslurm.run.directory import Attempt

SILENT_S = 10.0
"""Who writes every second and has not written for so long is silent; who writes more rarely, after as many times."""
RECHECK_S = 3.0
"""How long a file that seems old is watched: long enough for a head on a slow file system."""
SKEW_S = 2.0
"""Clocks of a cluster agree to this."""
_GLANCE_S = 0.2
_WRITTEN = (".", "agents", "events", "state")
"""Directories of an attempt that head, agents and processes write to all the time."""

FindCauses = Callable[[Attempt, Sequence[str]], list[str]]
"""What who runs the job knows of nodes that say nothing."""


class HeadSilence(msgspec.Struct, frozen=True):
    """Why what is told of a run is not of this moment."""

    text: str
    """One sentence: who is silent, and for how long."""
    since: float | None = None
    """The head's last word, in Unix seconds; None: nobody can tell."""
    seconds: float | None = None
    """So long ago."""
    agents: int = 0
    """Agents that have a part in the run and have not ended."""
    silent_agents: int = 0
    """Those of them that do not write either."""
    causes: list[str] = []
    """What can be seen from here, and from Slurm."""


@dataclass(frozen=True)
class UnresponsiveAgent:
    """An agent that does not write any more."""

    rank: int
    node: str
    since: float | None
    """Its last word, in Unix seconds."""


@dataclass(frozen=True)
class RunLiveness:
    """What there is of head and agents."""

    silence: HeadSilence | None = None
    """None: the head writes, or has never begun, or the attempt is over."""
    agents: tuple[UnresponsiveAgent, ...] = ()
    """Those that are silent; only looked for where the head is silent, or when asked for."""


def check_liveness(
    attempt: Attempt,
    fleet: FleetView | None,
    now: float,
    *,
    agents: bool = False,
    find_causes: FindCauses = lambda attempt, nodes: [],
    recheck_s: float = RECHECK_S,
) -> RunLiveness:
    """Look at what head and agents of an attempt that has not ended have written.

    Args:
        attempt: whose.
        fleet: what its head said last; None if it has said nothing, or nothing that can be read.
        now: Unix seconds.
        agents: look at every agent even if the head is heard of.
        find_causes: what else is known of silent nodes.
        recheck_s: for how long files that seem old are watched.
    """
    path = attempt.fleet_file
    if fleet is None and not files.exists(path):
        return RunLiveness()
    said = fleet.time if fleet else None
    silent_s = SILENT_S * (fleet.heartbeat_s if fleet else 1.0)
    head_file = {path: said}
    if not agents and not _doubtful(head_file, now, silent_s):
        return RunLiveness()
    assignment = attempt.assignment()
    names = {agent.rank: agent.name for agent in assignment.agents.values()}
    reports = {
        rank: report
        for rank, report in agent_reports(attempt).items()
        if not (report and report.ended) and (rank in names or not names)  # neither spares nor who was replaced
    }
    agent_files = {attempt.agent_file(rank): report.time if report else None for rank, report in reports.items()}
    quiet = unresponsive_writers(head_file | agent_files, now, recheck_s, silent_s)
    found = [
        UnresponsiveAgent(
            rank, report.name if report else names.get(rank, f"rank {rank}"), quiet[attempt.agent_file(rank)]
        )
        for rank, report in sorted(reports.items())
        if attempt.agent_file(rank) in quiet
    ]
    if path not in quiet:
        return RunLiveness(None, tuple(found))
    since = quiet[path]
    head = names.get(0) or next((r.name for rank, r in reports.items() if rank == 0 and r), "")
    causes = file_system_faults(attempt.path)
    if fleet is None:
        causes.append(f"{path} is {'empty' if _size(path) == 0 else 'damaged'}")
    if said is not None and said > now + SKEW_S:
        causes.append(f"the last record of the head is dated {duration(said - now)} in the future: clocks differ")
    causes += _who_else(len(reports), found)
    causes += find_causes(attempt, [name for name in dict.fromkeys([head, *(agent.node for agent in found)]) if name])
    seconds = None if since is None else max(0.0, now - since)
    age = f"for {duration(seconds)}" if seconds is not None else f"in the last {duration(recheck_s)}"
    text = f"the head{f' (on {head})' if head else ''} has not written {age}; this status is from then"
    return RunLiveness(HeadSilence(text, since, seconds, len(reports), len(found), causes), tuple(found))


def unresponsive_writers(
    files: Mapping[Path, float | None], now: float, recheck_s: float = RECHECK_S, silent_s: float = SILENT_S
) -> dict[Path, float | None]:
    """Find those that do not write any more.

    Args:
        files: each with when its writer says that it wrote it, in Unix seconds; None if it cannot be read.
        now: Unix seconds.
        recheck_s: for how long those that seem old are watched.
        silent_s: those are old that were written so long ago.

    Returns:
        When each was last written, by the later of two clocks; None if both are wrong.
    """
    before = {path: _print(path) for path in files}
    doubtful = _doubtful(files, now, silent_s)
    deadline = time.monotonic() + recheck_s
    while doubtful:
        doubtful = {path for path in doubtful if _print(path) == before[path]}
        if time.monotonic() >= deadline:
            break
        time.sleep(_GLANCE_S if doubtful else 0.0)
    return {
        path: max(_clocks(before[path], said, now), default=None) for path, said in files.items() if path in doubtful
    }


def _doubtful(files: Mapping[Path, float | None], now: float, silent_s: float) -> set[Path]:
    """Those that are old, or from the future, or cannot be read, by what clocks say."""
    ages = {path: min(_clocks(_print(path), said, now), default=None) for path, said in files.items()}
    strange = {path for path, said in files.items() if said is None or said > now + SKEW_S}
    return strange | {path for path, at in ages.items() if at is None or at < now - silent_s}


def agent_reports(attempt: Attempt) -> dict[int, AgentReport | None]:
    """Read the heartbeat of every agent by rank; None for a file that is no heartbeat."""
    found = files.listing(attempt.path / "agents", "*.json")
    return {int(path.stem): find_record(path, AgentReport) for path in found if path.stem.isdecimal()}


def state_from_agent(last: str, own: str | None) -> str:
    """Say in what state a process is whose agent writes while the head does not.

    Args:
        last: the head's last word.
        own: the agent's; None if it does not tell of the process.
    """
    if own is None:
        return last
    if own == "ready":
        return last if last in ("HEALTHY", "STALE") else "HEALTHY"
    return {"waiting": "STARTING", "loading": "LOADING", "failed": "DEAD", "backoff": "RESTARTING"}.get(own) or (
        "RESTARTING" if own == "fallen" else "DONE"
    )


def unresponsive_nodes(assignment: AssignmentRecord, agents: Sequence[UnresponsiveAgent]) -> dict[int, float | None]:
    """By node of the plan: since when its agent says nothing, for those that say nothing."""
    since = {agent.rank: agent.since for agent in agents}
    return {node: since[agent.rank] for node, agent in assignment.agents.items() if agent.rank in since}


def _who_else(agents: int, silent: Sequence[UnresponsiveAgent]) -> list[str]:
    if not agents:
        return []
    if not silent:
        return [f"all {agents} agents write: the head alone is unresponsive"]
    if [agent.rank for agent in silent] == [0]:
        return [f"all other agents write ({agents - 1}): the head's process or node is gone or stopped"]
    if len(silent) == agents:
        return [f"none of the {agents} agents writes either: their file system, their nodes, or all were stopped"]
    names = ", ".join(agent.node for agent in silent[:8]) + (", ..." if len(silent) > 8 else "")
    return [f"{len(silent)} of {agents} agents do not write either: {names}"]


def _print(path: Path) -> tuple[int, int, int, float] | None:
    try:
        # Opened, not only looked at: that is what makes a network file system ask its server.
        with path.open("rb") as handle:
            seen = os.fstat(handle.fileno())
    except OSError:
        return None
    return seen.st_ino, seen.st_mtime_ns, seen.st_size, seen.st_mtime


def _clocks(seen: tuple[int, int, int, float] | None, said: float | None, now: float) -> list[float]:
    """When a file was written, as its writer and its file system say, but nothing from the future."""
    clocks = [said, seen[3] if seen else None]
    return [clock for clock in clocks if clock is not None and 0 < clock <= now + SKEW_S]


def _size(path: Path) -> int:
    try:
        found = files.status(path)
    except OSError:
        return 0
    return found.st_size if found else 0


def file_system_faults(directory: Path) -> list[str]:
    """Tell what keeps a run from writing its directory, as far as it can be seen from here without writing."""
    try:
        seen = files.retrying(directory, lambda: os.statvfs(directory))
        about = {directory / name: files.status(directory / name) for name in _WRITTEN}
        modes = {part: stat.S_IMODE(found.st_mode) for part, found in about.items() if found}
    except OSError as error:
        return [f"{directory} cannot be looked at from here: {error.strerror}"]
    found = []
    if seen.f_flag & os.ST_RDONLY:
        found.append(f"the file system of {directory} is read-only, as this machine sees it")
    if seen.f_blocks and seen.f_bavail == 0:
        found.append(f"the file system of {directory} is full")
    if seen.f_files and seen.f_favail == 0:
        found.append(f"the file system of {directory} has no room for another file (inodes)")
    closed = [f"{part} ({mode:04o})" for part, mode in modes.items() if not mode & stat.S_IWUSR]
    return [*found, *([f"their owner may not write to {', '.join(closed)}"] if closed else [])]
