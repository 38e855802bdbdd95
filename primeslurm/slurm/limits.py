"""Find limits of time, accounts and QOS that a Plan alone exceeds, so that its job would pend forever. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from primeslurm.base.errors import Violation
from primeslurm.plan.model import HetGroup, Plan
from primeslurm.recipe.fields.suggestions import suggestion
from primeslurm.recipe.fields.types import bytes_of, minutes
from primeslurm.slurm.accounting import Accounting, TresLimits
from primeslurm.slurm.partitions import Partition, parse_gres

Kind = Literal["per_job", "per_node", "per_user", "total", "least"]
_WHOM = {"per_job": "a job", "per_user": "a user", "total": "all jobs together"}


def limit_problems(plan: Plan, partitions: Mapping[str, Partition], accounting: Accounting) -> list[Violation]:
    """Return limits that the job exceeds, and accounts and QOS that this user may not use."""
    problems = [*_account_problems(plan, accounting), *_time_problems(plan, partitions, accounting)]
    if "limits" not in accounting.enforced:
        return problems
    return list(dict.fromkeys([*problems, *_size_problems(plan, partitions, accounting)]))


def qos_of(plan: Plan, partition: Partition, accounting: Accounting) -> str:
    """Return the QOS of the job in a partition; empty if unknown."""
    association = accounting.association(plan.job.account, partition.name)
    if plan.job.qos or association is None:
        return (plan.job.qos or "").lower()
    only = next(iter(association.qos_names)) if len(association.qos_names) == 1 else "normal"
    return association.default_qos or only


def memory_mib(group: HetGroup) -> int:
    """Return the memory per node that a component requests [MiB]; 0 if it requests none or all of it."""
    if group.mem_per_cpu:
        return bytes_of(group.mem_per_cpu) * group.cpus_per_task // 2**20
    return bytes_of(group.mem or "0") // 2**20


def clock(total: int) -> str:
    """Return minutes in Slurm's format, for example 1-02:30:00."""
    days, rest = divmod(total, 1440)
    text = f"{rest // 60:02d}:{rest % 60:02d}:00"
    return f"{days}-{text}" if days else text


@dataclass(frozen=True)
class _Source:
    """A QOS or account that sets limits."""

    kind: Literal["qos", "account"]
    name: str
    limits: TresLimits
    flags: frozenset[str] = frozenset()

    def problem(self, why: str, fix: str = "") -> Violation:
        other = f"use another {self.kind.replace('qos', 'QOS')}"
        return Violation(f"slurm.{self.kind}", self.name, why, f"{fix}, or {other}" if fix else other)


def _sources(plan: Plan, group: HetGroup, partitions: Mapping[str, Partition], accounting: Accounting) -> list[_Source]:
    """Return the sources of a component's limits. Slurm takes each limit from the first one that sets it."""
    partition = partitions.get(group.partition)
    if partition is None or "limits" not in accounting.enforced:
        return []
    of_job, of_partition = accounting.qos.get(qos_of(plan, partition, accounting)), accounting.qos.get(partition.qos)
    both = [of_partition, of_job]
    if of_job is not None and "OverPartQOS" in of_job.flags:
        both.reverse()
    sources = [_Source("qos", each.name, each.limits, each.flags) for each in both if each is not None]
    association = accounting.association(plan.job.account, partition.name)
    return [*sources, *([_Source("account", association.account, association.limits)] if association else [])]


def _in_force(sources: Sequence[_Source], kind: Kind) -> dict[str, tuple[int, _Source]]:
    """Return the effective limit of each TRES, and its source."""
    limits: dict[str, tuple[int, _Source]] = {}
    for source in sources:
        amounts: Mapping[str, int] = getattr(source.limits, kind)
        for tres, limit in amounts.items():
            limits.setdefault(tres, (limit, source))
    return limits


def _account_problems(plan: Plan, accounting: Accounting) -> Iterator[Violation]:
    account, qos = plan.job.account, (plan.job.qos or "").lower()
    if "associations" not in accounting.enforced or not accounting.associations:
        return
    accounts = sorted({each.account for each in accounting.associations})
    if account is not None and account.lower() not in accounts:
        yield Violation("slurm.account", account, "this user has no such account", suggestion(account, accounts))
        return
    for partition in dict.fromkeys(group.partition for group in plan.groups):
        association = accounting.association(account, partition)
        if association is None:
            if account is not None:
                why = f"this user may not use partition {partition} with this account"
                yield Violation("slurm.account", account, why, suggestion("", accounts))
            continue
        names = sorted(association.qos_names)
        if qos and names and qos not in names and "qos" in accounting.enforced:
            why = f"account {association.account} may not use this QOS"
            yield Violation("slurm.qos", qos, why, suggestion(qos, names))
            return


def _time_problems(plan: Plan, partitions: Mapping[str, Partition], accounting: Accounting) -> Iterator[Violation]:
    # A partition takes a job whose time_min it allows; QOS and accounts compare the time itself (seen with 22.05).
    least = ("time_min", plan.job.time_min) if plan.job.time_min else ("time", plan.job.time)
    limits: list[tuple[int, str, str, str]] = []
    for group in plan.groups:
        partition = partitions.get(group.partition)
        if partition is None:
            continue
        qos = accounting.qos.get(qos_of(plan, partition, accounting))
        if partition.max_minutes is not None and not (qos and "PartitionTimeLimit" in qos.flags):
            limits.append((partition.max_minutes, f"partition {partition.name}", *least))
        for source in _sources(plan, group, partitions, accounting):
            if source.limits.minutes is not None:
                name = f"{source.kind.replace('qos', 'QOS')} {source.name}"
                limits.append((source.limits.minutes, name, "time", plan.job.time))
                break
    for option in ("time", "time_min"):
        exceeded = [each for each in limits if each[2] == option and minutes(each[3]) > each[0]]
        if exceeded:
            most, name, _, requested = min(exceeded)
            yield Violation(f"slurm.{option}", requested, f"{name} allows {clock(most)}", f'nearest: "{clock(most)}"')


def _size_problems(plan: Plan, partitions: Mapping[str, Partition], accounting: Accounting) -> Iterator[Violation]:
    sums: Counter[tuple[str, str, str]] = Counter()
    in_sum: dict[tuple[str, str, str], tuple[int, _Source]] = {}
    for group in plan.groups:
        sources, requested = _sources(plan, group, partitions, accounting), _tres(group)
        # With DenyOnLimit, sbatch compares the limits of a job with all components together (seen with 22.05).
        denies = any("DenyOnLimit" in source.flags for source in sources)
        for tres, (limit, source) in _in_force(sources, "per_job").items():
            if requested[tres] > limit:
                why = f"allows {tres}={limit} per component, but {group.name} requests {requested[tres]}"
                yield source.problem(why, "ask for less")
            elif denies:
                sums["per_job", source.name, tres] += requested[tres]
                in_sum["per_job", source.name, tres] = limit, source
        for tres, (limit, source) in _in_force(sources, "per_node").items():
            if requested[tres] > limit * group.nodes:
                why = f"allows {tres}={limit} per node, but {group.name} requests {requested[tres] // group.nodes}"
                yield source.problem(why, "ask for less")
        for tres, (limit, source) in _in_force(sources, "least").items():
            if requested[tres] < limit and (requested[tres] or tres.startswith("gres/")):
                why = f"requires {tres}={limit} per component, but {group.name} requests {requested[tres]}"
                yield source.problem(why)
        kinds: tuple[Kind, ...] = ("per_user", "total")
        for kind in kinds:
            for tres, (limit, source) in _in_force(sources, kind).items():
                sums[kind, source.name, tres] += requested[tres]
                in_sum[kind, source.name, tres] = limit, source
        if (counted := next((each for each in sources if each.limits.jobs is not None), None)) is not None:
            sums["jobs", counted.name, "jobs"] += 1
            in_sum["jobs", counted.name, "jobs"] = counted.limits.jobs or 0, counted
    for (kind_of_sum, _, tres), (limit, source) in in_sum.items():
        amount = sums[kind_of_sum, source.name, tres]
        if amount > limit and tres == "jobs":
            why = f"runs {limit} jobs at a time, but each of the {amount} components counts as one"
            yield source.problem(why, "set deployment.layout: single")
        elif amount > limit:
            yield source.problem(
                f"allows {tres}={limit} for {_WHOM[kind_of_sum]}, but the recipe requests {amount}", "ask for less"
            )


def _tres(group: HetGroup) -> Counter[str]:
    amounts = Counter({"node": group.nodes, "cpu": group.nodes * group.cpus_per_task})
    amounts["mem"] = group.nodes * memory_mib(group)
    for each in parse_gres(group.requested_gres or ""):
        amounts[f"gres/{each.name}"] += group.nodes * each.count
        if each.type:
            amounts[f"gres/{each.name}:{each.type}"] += group.nodes * each.count
    return amounts
