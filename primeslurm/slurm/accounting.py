"""Accounts, QOS and their limits, parsed from sacctmgr and scontrol. Pure.

Slurm ignores case in names of accounts and QOS. Here they are in lower case.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from primeslurm.recipe.fields.types import bytes_of
from primeslurm.slurm.partitions import parse_minutes

ASSOCIATION_FORMAT = "account,partition,qos,defaultqos,maxwall,maxtres,maxtrespernode,grptres,maxjobs,grpjobs"
QOS_FORMAT = "name,flags,maxwall,maxtres,maxtrespernode,maxtresperuser,grptres,mintres,maxjobsperuser,grpjobs"
_MIB = 2**20
# First major version of Slurm whose partitions may list subaccounts implicitly
_SUBACCOUNTS = 23


@dataclass(frozen=True)
class TresLimits:
    """Limits of a QOS or an association. Amounts are by TRES: cpu, node, mem [MiB], gres/gpu, gres/gpu:h100."""

    minutes: int | None = None
    per_job: Mapping[str, int] = field(default_factory=dict)
    per_node: Mapping[str, int] = field(default_factory=dict)
    per_user: Mapping[str, int] = field(default_factory=dict)
    total: Mapping[str, int] = field(default_factory=dict)  # limit for all jobs of the QOS or association together
    least: Mapping[str, int] = field(default_factory=dict)  # smallest amount that a job must request
    jobs: int | None = None  # Jobs that may run at a time. Each component of a heterogeneous job counts.


@dataclass(frozen=True)
class Qos:
    """A quality of service."""

    name: str
    limits: TresLimits = TresLimits()
    flags: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Association:
    """Membership of the user in an account, for all partitions or one."""

    account: str
    partition: str  # empty: all partitions
    qos_names: frozenset[str]
    default_qos: str
    limits: TresLimits = TresLimits()


@dataclass(frozen=True)
class Accounting:
    """Accounts, QOS and limits that the accounting enforces for this user."""

    enforced: frozenset[str] = frozenset()
    """Words of AccountingStorageEnforce: associations, limits, qos, ... Empty: nothing."""
    default_account: str = ""
    associations: tuple[Association, ...] = ()
    qos: Mapping[str, Qos] = field(default_factory=dict)
    subaccounts: bool = False  # Whether a partition's account lists include subaccounts. Only Slurm knows those.

    def association(self, account: str | None, partition: str) -> Association | None:
        """Return the association of a job. One for its partition takes precedence."""
        account = (account or self.default_account).lower()
        matching = [each for each in self.associations if each.account == account and each.partition in ("", partition)]
        return max(matching, key=lambda each: each.partition, default=None)


NO_ACCOUNTING = Accounting()


def parse_enforced(config: str) -> frozenset[str]:
    words = frozenset(config_value(config, "AccountingStorageEnforce").lower().split(",")) - {"", "none", "(null)"}
    if "all" in words:
        words |= {"associations", "limits", "qos"}
    # Slurm's own rule: safe needs limits, and all of these need associations.
    words |= {"limits"} if "safe" in words else frozenset()
    return words | ({"associations"} if words & {"limits", "safe", "qos", "wckeys"} else frozenset())


def lists_subaccounts(config: str) -> bool:
    """Return whether a partition's account lists also apply to subaccounts, from `scontrol show config`."""
    # In releases after 22.05. The first one is not documented; 23.02 is assumed.
    version = re.match(r"(\d+)\.", config_value(config, "SLURM_VERSION"))
    return version is None or int(version[1]) >= _SUBACCOUNTS


def config_value(config: str, name: str) -> str:
    match = re.search(rf"^{name}\s*=\s*(\S+)", config, re.MULTILINE)
    return match[1] if match else ""


def parse_associations(rows: Iterable[Sequence[str]]) -> tuple[Association, ...]:
    associations = []
    for account, partition, qos, default_qos, wall, per_job, per_node, total, max_jobs, group_jobs in rows:
        limits = TresLimits(
            minutes=parse_minutes(wall),
            per_job=parse_tres(per_job),
            per_node=parse_tres(per_node),
            total=parse_tres(total),
            jobs=_least(max_jobs, group_jobs),
        )
        names = frozenset(qos.lower().split(",")) - {""}
        associations.append(Association(account.lower(), partition, names, default_qos.lower(), limits))
    return tuple(associations)


def parse_qos(rows: Iterable[Sequence[str]]) -> dict[str, Qos]:
    qos_by_name = {}
    for name, flags, wall, per_job, per_node, per_user, total, least, jobs_per_user, group_jobs in rows:
        limits = TresLimits(
            minutes=parse_minutes(wall),
            per_job=parse_tres(per_job),
            per_node=parse_tres(per_node),
            per_user=parse_tres(per_user),
            total=parse_tres(total),
            least=parse_tres(least),
            jobs=_least(jobs_per_user, group_jobs),
        )
        qos_by_name[name.lower()] = Qos(name, limits, frozenset(flags.split(",")) - {""})
    return qos_by_name


def parse_tres(text: str) -> dict[str, int]:
    """Parse amounts such as cpu=16,gres/gpu=4,mem=1.50T."""
    amounts = {}
    for entry in text.split(","):
        name, _, value = entry.partition("=")
        if (match := re.fullmatch(r"(\d+)(\.\d+)?([KMGTP]?)", value)) and name:
            number = float(match[1] + (match[2] or ""))
            if name == "mem":
                unit = match[3] or "M"
                size = bytes_of("1T") * 1024 if unit == "P" else bytes_of(f"1{unit}")
                number = number * size / _MIB
            amounts[name] = int(number)
    return amounts


def _least(*numbers: str) -> int | None:
    return min((int(number) for number in numbers if number.isdigit()), default=None)
