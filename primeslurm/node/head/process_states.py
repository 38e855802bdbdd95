"""Process states as operators see them."""

from __future__ import annotations

from enum import StrEnum

from primeslurm.node.agent.supervision import ProcessState
from primeslurm.plan.model import Process
from primeslurm.records.fleet import ProcessReport


class FleetState(StrEnum):
    """State of one process in `fleet.json`."""

    STARTING = "STARTING"
    LOADING = "LOADING"
    STALE = "STALE"  # an engine without the current policy, which its router skips; or a router that lacks engines
    HEALTHY = "HEALTHY"
    SUSPECT = "SUSPECT"  # no heartbeat from its node for a while
    SILENT = "SILENT"  # no heartbeat from the process for a while; a trainer rank: the others wait for it
    RESTARTING = "RESTARTING"
    DEAD = "DEAD"  # ended, and the attempt ends with it
    LOST = "LOST"  # given up for this attempt: it ended too often, or its node is lost
    DONE = "DONE"


def fleet_state(
    process: Process, report: ProcessReport | None, *, suspect: bool, silent: bool, lost: bool
) -> FleetState:
    """Return the state to display.

    `suspect` and `silent`: there was no heartbeat from its node, or from the process, for a while. `lost`: it was given
    up.
    """
    if lost:
        return FleetState.LOST
    if report is None:
        return FleetState.STARTING
    if report.state in (ProcessState.LOADING, ProcessState.READY) and (suspect or silent):
        return FleetState.SUSPECT if suspect else FleetState.SILENT
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


def error_message(report: ProcessReport) -> str:
    """Return the error message of a process that exited with an error; empty if a signal ended it."""
    return report.reason if report.exit_code is not None and report.exit_code > 0 else ""


def how_it_died(report: ProcessReport) -> str:
    """Describe the end of a process, in words that follow its name."""
    code = report.exit_code
    how = f"was ended by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"
    again = f" after {report.restarts} restarts" if report.restarts else ""
    return how + again + (f" ({report.reason})" if report.reason else "")
