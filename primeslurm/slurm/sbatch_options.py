"""The `#SBATCH` options of a job: --time, --partition, --gres, --signal and the others.

`#SBATCH` lines use sbatch's own quoting. A component repeats the options of the first one, except those that Slurm
passes on (dependency, mail ...). Components have different names: with `--dependency=singleton`, components of one name
would wait for each other forever.
"""

from __future__ import annotations

from pathlib import Path

from primeslurm.plan.model import JOB_OUTPUT, HetGroup, Plan

# sbatch options by long name. None and False are left out. True is an option without value.
Options = dict[str, object]


def sbatch_lines(plan: Plan, group: HetGroup) -> list[str]:
    """Return the `#SBATCH` options of one component, one string per line."""
    lines = [_identity(plan, group), _resources(plan, group), _behaviour(plan)]
    if group.index == 0:
        lines.append(_once(plan))
    words = [
        " ".join(_word(name, value) for name, value in line.items() if value not in (None, False)) for line in lines
    ]
    return [word for word in [*words, " ".join(map(quote, plan.job.extra))] if word]


def quote(value: str) -> str:
    """Quote a word for sbatch, which treats backslashes as escapes even between single quotes."""
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
        "gpus-per-node": group.gpus_per_node,
        "mem": group.mem,
        "mem-per-cpu": group.mem_per_cpu,
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
        # Slurm expands % in file names; %% is a plain one.
        "output": str(Path(plan.run_dir.replace("%", "%%")) / JOB_OUTPUT.format("%j")),
    }


def _once(plan: Plan) -> Options:
    job = plan.job
    return {
        "comment": job.comment,
        "dependency": job.dependency,
        "licenses": job.licenses,
        "mail-user": job.mail_user,
        "mail-type": ",".join(job.mail_types) or None,
    }
