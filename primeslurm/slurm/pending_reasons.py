"""Explain why a job does not start: Slurm's reason for each component, and what to do if waiting does not help. Pure.

The names of reasons are those of Slurm 20.11 to 25.05. scontrol writes underscores for spaces in their details.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from primeslurm.records.attempt import Obstacle
from primeslurm.slurm.client import JobComponent, JobState, Shared
from primeslurm.slurm.partitions import Reservation

_AMOUNT = r"(Cpu|CPU|Mem|Memory|Node|GRES|Energy|Lic|License|BB|Billing|Unknown|WallDuration)"
_LESS = "ask for less, or use another slurm.qos or slurm.account"
# Pattern of a reason, its meaning, and what to do. None of these ends unless somebody acts.
_NEVER = (
    (r"PartitionTimeLimit", "asks for more time than its partition allows", "set a shorter slurm.time and resume"),
    (
        r"PartitionNodeLimit",
        "asks for more or fewer nodes than its partition gives to a job, or for nodes that are down",
        "compare `scontrol show partition` and `sinfo -R` with the recipe",
    ),
    (
        r"PartitionDown|PartitionInactive",
        "its partition is closed",
        "use another partition, or wait until an administrator opens this one",
    ),
    (
        r"PartitionConfig|BadConstraints|Constraints|MaxMemPerLimit",
        "no node of its partition has what it asks for",
        "correct GPUs, cores, memory or constraint: `primeslurm check` compares them with the nodes",
    ),
    (r"InvalidAccount|AccountNotAllowed", "its account is not valid there", "set another slurm.account"),
    (r"InvalidQOS|QOSNotAllowed", "its QOS is not valid there", "set another slurm.qos"),
    (
        r"DependencyNeverSatisfied",
        "it waits for a job that has ended otherwise than slurm.dependency asks for",
        "cancel it, and submit it without the dependency",
    ),
    (r"JobHeldUser", "it is held", "`scontrol release {job}` lets it start"),
    (r"JobHeldAdmin", "an administrator holds it", "ask an administrator"),
    (r"JobHoldMaxRequeue|launch_failed_requeued_held", "Slurm holds it", "`scontrol release {job}` lets it start"),
    (r"ReservationDeleted|ReservationInvalid", "its reservation is gone", "set another slurm.reservation, or none"),
    (r"DeadLine", "its deadline is over", "submit it without the deadline"),
    (r"AssociationTimeLimit|QOSTimeLimit|(QOS|Assoc)MaxWallDurationPerJobLimit",
     "asks for more time than its QOS or account allows", "set a shorter slurm.time and resume"),
    (rf"(QOS|Assoc)Max{_AMOUNT}(Minutes)?PerJob(Limit)?|(QOS|Assoc)Max{_AMOUNT}PerNode(Limit)?|AccountingPolicy",
     "asks for more than its QOS or account allows to a job", _LESS),
    (rf"QOSMin({_AMOUNT}|CpuNotSatisfied)", "asks for less than its QOS requires", "use another slurm.qos"),
    (rf"(QOS|Assoc)Grp{_AMOUNT}Minutes(Limit)?|(QOS|Assoc)GrpWall(Limit)?|QOSUsageThreshold",
     "the budget of its QOS or account is used up", "use another slurm.qos or slurm.account, or ask for more time"),
)  # fmt: skip
# Limits for all jobs of a user, account or QOS together
_SHARED = re.compile(r"(QOS|Assoc)(Grp|Max)\w+|Max\w+PerAccount|Association(Job|Resource)Limit|QOS(Job|Resource)Limit")


def pending_reason(job: JobState, names: Mapping[int, str]) -> str:
    """Return the reason of the leading component, and those of other components if they differ."""
    of_others: dict[str, list[str]] = {}
    for component in job.components:
        if component.state == "PENDING" and component.reason not in ("", job.reason):
            of_others.setdefault(component.reason, []).append(names.get(component.offset, f"+{component.offset}"))
    words = [f"{', '.join(who)}: {reason}" for reason, who in of_others.items()]
    return "; ".join([job.reason] * bool(job.reason) + words)


def depends_on_others(job: JobState) -> bool:
    """Return whether the job waits for a limit that other jobs count against."""
    return any(_never(component.reason) is None and _SHARED.fullmatch(_name(component)) for component in job.components)


def is_reserved(job: JobState) -> bool:
    """Return whether the job waits for nodes that a reservation may hold."""
    return any("maintenance" in component.reason for component in job.components)


def obstacles(
    job: JobState,
    names: Mapping[int, str],
    maintenance: Sequence[Reservation] = (),
    rivals: Collection[Shared] = ("user", "account", "qos"),
) -> list[Obstacle]:
    """Return the reasons why waiting alone does not start a pending job.

    `names` has the components by offset, and `maintenance` the reservations of nodes that the job might get. `rivals`
    is what other running jobs share with this one: they count against its limits, and may end.
    """
    obstacles = []
    for component in job.components:
        if component.state != "PENDING":
            continue
        explanation = _never(component.reason) or _temporary(component.reason, maintenance)
        if explanation is None and _SHARED.fullmatch(_name(component)) and not _counted(_name(component)) & set(rivals):
            explanation = "alone requests more than all jobs of its user, account or QOS may have", _LESS, True
        if explanation is not None:
            text, fix, never = explanation
            who = names.get(component.offset, f"+{component.offset}") if len(job.components) > 1 else ""
            obstacles.append(Obstacle(who, component.reason, text, fix.format(job=job.job_id), never))
    return _joined(obstacles)


def _counted(reason: str) -> set[Shared]:
    if "PerUser" in reason or reason.startswith("AssocMax"):
        return {"user"}
    if reason.startswith("QOSGrp"):
        return {"qos"}
    return {"account"} if "PerAccount" in reason else {"user", "account", "qos"}


def _name(component: JobComponent) -> str:
    return component.reason.partition(",")[0]


def _never(reason: str) -> tuple[str, str, bool] | None:
    name = reason.partition(",")[0]
    return next(((text, fix, True) for pattern, text, fix in _NEVER if re.fullmatch(pattern, name)), None)


def _temporary(reason: str, maintenance: Sequence[Reservation]) -> tuple[str, str, bool] | None:
    if "maintenance" in reason:
        if not maintenance:
            return "its nodes are reserved for maintenance", "`scontrol show reservation` says until when", False
        first = min(maintenance, key=lambda each: each.start)
        what = f"maintenance {first.name} of {first.nodes or 'its nodes'}"
        if first.active:
            return f"waits for the end of {what}, at {first.end}", "wait, or use other nodes", False
        fix = f"a slurm.time that ends before {first.start}, or wait"
        return f"cannot end before {what}, from {first.start} to {first.end}", fix, False
    if unavailable := re.search(r"UnavailableNodes:(\S+)", reason):
        text = f"the nodes that it needs are down, drained or reserved: {unavailable[1]}"
        return text, "`sinfo -R` says why", False
    return None


def _joined(obstacles: Sequence[Obstacle]) -> list[Obstacle]:
    by_text: dict[tuple[str, str, str, bool], list[str]] = {}
    for each in obstacles:
        by_text.setdefault((each.reason, each.text, each.fix, each.never), []).append(each.component)
    return [Obstacle(", ".join(who), *rest) for rest, who in by_text.items()]
