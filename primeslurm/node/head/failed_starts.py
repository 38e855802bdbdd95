"""Whether engines of a role can never start: all of them end before they are ready, again and again alike. Pure.

A start fails alike where the recipe, the model or the installation is wrong: further restarts would end so, too. What
another try or another node may be free of (a GPU's fault, a port that is taken) is left to restarts and new attempts.
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

STARTS_ALIKE = 2
"""So many failed starts of one engine, alike, are enough, if all others of its role have failed so at least once."""


@dataclass(frozen=True)
class _FailedStart:
    process: str
    starts: int
    error: str


class FailedStarts:
    """Remembers which roles have served in this attempt, and judges those that have not.

    Args:
        processes: all of the Plan.
    """

    def __init__(self, processes: Iterable[Process]) -> None:
        self._roles: dict[str, list[Process]] = defaultdict(list)
        for process in processes:
            if process.role in VLLM_ROLES:
                self._roles[process.role].append(process)

    def look(self, report: Callable[[str], ProcessReport | None], lost: Collection[str]) -> Ending | None:
        """Tell why the attempt ends, or None.

        Args:
            report: what is known of a process, by its name.
            lost: those that were given up.
        """
        for role, processes in list(self._roles.items()):
            known = [(process, report(process.name)) for process in processes if process.name not in lost]
            if any(found is not None and found.state == ProcessState.READY for _, found in known):
                del self._roles[role]  # one that works shows that the role can
            elif failed := _all_alike(known):
                reason = (
                    f"{failed.process} cannot start: {failed.starts} starts in a row ended with the same error, and "
                    f"no process of role {role} has been ready: {failed.error}"
                )
                return Ending(Outcome.FAILED, reason, failed.process, error=failed.error)
        return None


def _all_alike(known: Iterable[tuple[Process, ProcessReport | None]]) -> _FailedStart | None:
    """The worst of those that fail alike, if all do; engines that are restarted as one count as one."""
    found: dict[str, dict[str, _FailedStart]] = {}
    """By engine and kind of error."""
    for process, report in known:
        errors = found.setdefault(process.unit or process.name, {})
        if report is None or not report.failed_starts or is_transient(report.start_error):
            continue
        failed = _FailedStart(process.name, report.failed_starts, report.start_error)
        alike = signature(failed.error)
        errors[alike] = max(failed, errors.get(alike, failed), key=lambda each: each.starts)
    for alike in set.intersection(*map(set, found.values())) if found else ():
        worst = max((errors[alike] for errors in found.values()), key=lambda each: each.starts)
        if worst.starts >= STARTS_ALIKE:
            return worst
    return None
