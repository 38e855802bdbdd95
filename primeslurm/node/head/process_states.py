"""States of processes in the words of an operator."""

from __future__ import annotations

from enum import StrEnum

from primeslurm.node.agent.supervision import ProcessState
from primeslurm.plan.model import Process
from primeslurm.records.fleet import ProcessReport


class FleetState(StrEnum):
    """State of one process."""

    STARTING = "STARTING"
    LOADING = "LOADING"
    STALE = "STALE"
    """Up, but not on the current policy version: its router leaves it out. Of a router: it lacks engines."""
    HEALTHY = "HEALTHY"
    SUSPECT = "SUSPECT"
    """Its node has not been heard of for a while."""
    SILENT = "SILENT"
    """Runs, but has not been heard of for a while; a trainer rank: the others wait for it."""
    RESTARTING = "RESTARTING"
    DEAD = "DEAD"
    """Ended, and its attempt ends with it."""
    LOST = "LOST"
    """Given up for this attempt: ended too often, or its node is lost."""
    DONE = "DONE"


def fleet_state(
    process: Process, report: ProcessReport | None, *, suspect: bool, silent: bool, lost: bool
) -> FleetState:
    """Return the operator's word for what a node reports of a process.

    Args:
        process: which.
        report: its part of the newest heartbeat of its node; None without one.
        suspect: the node has not been heard of for a while.
        silent: the process has not been heard of for a while, by its node.
        lost: the process was given up.
    """
    if lost:
        return FleetState.LOST
    if report is None:
        return FleetState.STARTING
    if report.state in (ProcessState.LOADING, ProcessState.READY) and suspect:
        return FleetState.SUSPECT
    if report.state in (ProcessState.LOADING, ProcessState.READY) and silent:
        return FleetState.SILENT
    if report.state == ProcessState.READY:
        return FleetState.HEALTHY if report.healthy or process.health is None else FleetState.STALE
    if report.state == ProcessState.FAILED:
        return FleetState.DEAD if process.restart == "attempt" else FleetState.LOST
    return {
        ProcessState.WAITING: FleetState.STARTING,
        ProcessState.LOADING: FleetState.LOADING,
        ProcessState.BACKOFF: FleetState.RESTARTING,
        ProcessState.FALLEN: FleetState.RESTARTING,
    }.get(ProcessState(report.state), FleetState.DONE)


def message(report: ProcessReport) -> str:
    """Return the error that a process has ended with by itself, as its log tells it; empty if a signal has ended it."""
    return report.reason if report.exit_code is not None and report.exit_code > 0 else ""


def how_it_died(report: ProcessReport) -> str:
    """Tell how a process has ended, in words that follow its name."""
    code = report.exit_code
    how = f"was ended by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"
    again = f" after {report.restarts} restarts" if report.restarts else ""
    return how + again + (f" ({report.reason})" if report.reason else "")
