"""Detects engines that can never start, because all of them keep failing with the same error. Pure.

Then the recipe, the model or the installation is wrong, and further restarts would fail, too. Errors that another try
or another node may not have, such as a broken GPU or a taken port, are left to restarts and new attempts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from primeslurm.base.errors import signature
from primeslurm.node.agent.supervision import ProcessState
from primeslurm.plan.model import VLLM_ROLES, Process
from primeslurm.records.fleet import Ending, Outcome, ProcessReport
from primeslurm.run.diagnosis.failure_signatures import is_transient

# Failed starts of one engine that are enough, if every other engine of the role has failed in the same way once.
ENOUGH_STARTS = 2


@dataclass(frozen=True)
class _FailedStart:
    process: str
    starts: int
    error: str


class FailedStarts:
    """Judges the engine roles that have not served in this attempt yet."""

    def __init__(self, processes: Iterable[Process]) -> None:
        self._roles: dict[str, list[Process]] = defaultdict(list)
        for process in processes:
            if process.role in VLLM_ROLES:
                self._roles[process.role].append(process)

    def check(self, report: Callable[[str], ProcessReport | None], lost: Collection[str]) -> Ending | None:
        """End the attempt if all engines of a role keep failing to start with the same error.

        `report` returns the newest report of a process, by name.
        """
        for role, processes in list(self._roles.items()):
            reports = [(process, report(process.name)) for process in processes if process.name not in lost]
            if any(each is not None and each.state == ProcessState.READY for _, each in reports):
                del self._roles[role]  # one engine works, so the role can work
            elif failed := _common_failure(reports):
                reason = (
                    f"{failed.process} cannot start: {failed.starts} starts in a row ended with the same error, and "
                    f"no process of role {role} has been ready: {failed.error}"
                )
                return Ending(Outcome.FAILED, reason, failed.process, error=failed.error)
        return None


def _common_failure(reports: Iterable[tuple[Process, ProcessReport | None]]) -> _FailedStart | None:
    """Return the most frequent failure that all engines share. Engines of one restart group count as one."""
    failures: dict[str, dict[str, _FailedStart]] = {}  # by engine and error signature
    for process, report in reports:
        errors = failures.setdefault(process.restart_group or process.name, {})
        if report is None or not report.failed_starts or is_transient(report.start_error):
            continue
        failed = _FailedStart(process.name, report.failed_starts, report.start_error)
        kind = signature(failed.error)
        errors[kind] = max(failed, errors.get(kind, failed), key=lambda each: each.starts)
    for kind in set.intersection(*map(set, failures.values())) if failures else ():
        worst = max((errors[kind] for errors in failures.values()), key=lambda each: each.starts)
        if worst.starts >= ENOUGH_STARTS:
            return worst
    return None
