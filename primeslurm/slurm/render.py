"""Render the batch script of a Plan. The template only loops: decisions are in plan or here."""

from __future__ import annotations

import shlex
from pathlib import Path

from primeslurm.base.templating import environment
from primeslurm.base.units import count
from primeslurm.plan.model import JOB_OUTPUT, HetGroup, Plan
from primeslurm.records.job_output import MARK
from primeslurm.slurm.launch_failures import START

# Module that a job starts on every node. It gets the folder of the pickled agent.
AGENT_MODULE = "primeslurm.node.start_agent"


def submitit_folder(plan: Plan) -> Path:
    """Return submitit's folder: the pickled agent, its results and its logs."""
    return Path(plan.run_dir) / "submitit"


def render(plan: Plan) -> str:
    """Return the batch script of a Plan."""
    templates = environment(autoescape=False)
    templates.filters["quote"] = lambda value: shlex.quote(str(value))
    templates.filters["counted"] = count
    python = (*plan.job.launcher, plan.python)
    return templates.get_template("job.sbatch.j2").render(
        plan=plan,
        components=[(group, sbatch_lines(plan, group)) for group in plan.groups],
        environment=exports(plan),
        srun=(*_step_options(plan), *plan.job.srun),
        mark=MARK,
        start=START,
        command=(*python, "-u", "-m", AGENT_MODULE, submitit_folder(plan)),
        setup_failure=(*python, "-m", "primeslurm.node.attempt.setup_failure", plan.run_dir),
        batch_epilogue=(*python, "-m", "primeslurm.node.attempt.batch_epilogue", plan.run_dir),
    )


def _step_options(plan: Plan) -> list[str]:
    # Without --het-group, srun would use the first component only. A job of one component has no het groups.
    groups = ",".join(str(group.index) for group in plan.groups)
    het = [f"--het-group={groups}"] if len(plan.groups) > 1 else []
    keep = ["--kill-on-bad-exit=0", *(["--no-kill"] if plan.survives_nodes else [])]
    # Agents need the variables of the batch script, and a site's cli_filter may have set SLURM_EXPORT_ENV=NONE for it.
    return [*het, "--ntasks-per-node=1", "--export=ALL", "--cpu-bind=none", *keep, "--label", "--unbuffered"]


def exports(plan: Plan) -> dict[str, str]:
    """Return the variables of the agents. The agent fills in those with placeholders on the node."""
    return {name: value for name, value in plan.env.items() if "${" not in value}


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
