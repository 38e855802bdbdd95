"""The `#SBATCH` lines of a job, in Slurm's own quoting.

A component repeats what the first one said, except for what Slurm hands on by itself (dependency, mail ...).
Components have names of their own: with `--dependency=singleton`, those of one name would wait for one another forever.
"""

from __future__ import annotations

from pathlib import Path

from primeslurm.plan.model import JOB_OUTPUT, HetGroup, Plan

Options = dict[str, object]
"""Long name of an option to its value. None or False: left out. True: an option without a value."""


def sbatch_lines(plan: Plan, group: HetGroup) -> list[str]:
    """Return what follows `#SBATCH ` on the lines of one component."""
    lines = [_identity(plan, group), _resources(plan, group), _behaviour(plan)]
    if group.index == 0:
        lines.append(_once(plan))
    words = [
        " ".join(_word(name, value) for name, value in line.items() if value not in (None, False)) for line in lines
    ]
    return [word for word in [*words, " ".join(map(quote, plan.job.extra))] if word]


def quote(value: str) -> str:
    """Quote a word for sbatch: it takes backslashes as escapes even between single quotes, unlike a shell."""
    if value and all(character.isalnum() or character in "-_=./,:@%+" for character in value):
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _word(name: str, value: object) -> str:
    return f"--{name}" if value is True else f"--{name}={quote(str(value))}"


def _identity(plan: Plan, group: HetGroup) -> Options:
    job = plan.job
    return {
        "job-name": job.name if group.index == 0 else f"{job.name}/{group.name}",
        "time": job.time,
        "time-min": job.time_min,
        "account": job.account,
        "qos": job.qos,
        "reservation": job.reservation,
        "nice": job.nice,
        "priority": job.priority,
    }


def _resources(plan: Plan, group: HetGroup) -> Options:
    return {
        "partition": group.partition,
        "nodes": group.nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": group.cpus_per_task,
        "gres": group.gres,
        "mem": group.mem,
        "constraint": group.constraint,
        "nodelist": group.nodelist,
        "exclude": plan.job.excluded,
        "switches": group.switches,
        "exclusive": group.exclusive,
        "no-kill": plan.survives_nodes,
    }


def _behaviour(plan: Plan) -> Options:
    job = plan.job
    return {
        "signal": f"USR2@{job.signal_s}",
        "requeue" if job.requeue else "no-requeue": True,
        "open-mode": "append",
        "output": _output_pattern(plan),
    }


def _output_pattern(plan: Plan) -> str:
    """The file of the job's output, with Slurm's %j for the job id."""
    # Slurm expands % in file names; %% is a plain one.
    return str(Path(plan.run_dir.replace("%", "%%")) / JOB_OUTPUT.format("%j"))


def _once(plan: Plan) -> Options:
    job = plan.job
    return {
        "comment": job.comment,
        "dependency": job.dependency,
        "licenses": job.licenses,
        "mail-user": job.mail_user,
        "mail-type": ",".join(job.mail_types) or None,
    }
