"""Plan to batch script. The templates loop over the Plan; whatever needs a decision is decided here or in plan/."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from primeslurm.errors import UsageError, Violation
from primeslurm.plan.model import Plan
from primeslurm.recipe.fields.section import Section
from primeslurm.slurm.launch_failures import MARK
from primeslurm.slurm.options import sbatch_lines
from primeslurm.templating import environment

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def submitit_folder(plan: Plan) -> Path:
    """Where submitit keeps the pickled agent, its results and its logs."""
    return Path(plan.run_dir) / "submitit"


def render(plan: Plan) -> str:
    """Render the batch script of a Plan.

    Raises:
        UsageError: it holds text that cannot stand in a script.
    """
    _check(plan)
    templates = environment(autoescape=False)
    templates.filters["quote"] = lambda value: shlex.quote(str(value))
    python = (*plan.job.launcher, plan.python)
    return templates.get_template("job.sbatch.j2").render(
        plan=plan,
        components=[(group, sbatch_lines(plan, group)) for group in plan.groups],
        environment=exports(plan),
        srun=(*_step_options(plan), *plan.job.srun),
        mark=MARK,
        command=(*python, "-u", "-m", "submitit.core._submit", submitit_folder(plan)),
        batch_epilogue=(*python, "-m", "primeslurm.node.attempt.batch_epilogue", plan.run_dir),
    )


def _step_options(plan: Plan) -> list[str]:
    # Without --het-group, srun would use the first component only. A job of one component has no het groups.
    groups = ",".join(str(group.index) for group in plan.groups)
    het = [f"--het-group={groups}"] if len(plan.groups) > 1 else []
    keep = ["--kill-on-bad-exit=0", *(["--no-kill"] if plan.survives_nodes else [])]
    return [*het, "--ntasks-per-node=1", "--cpu-bind=none", *keep, "--label", "--unbuffered"]


def exports(plan: Plan) -> dict[str, str]:
    """Return the variables of the agents. Those with placeholders are filled in on the node, by the agent itself."""
    return {name: value for name, value in plan.env.items() if "${" not in value}


def _check(plan: Plan) -> None:
    """A Plan made of a checked recipe and site passes; one that was changed on disk may not."""
    texts = {"run_dir": plan.run_dir, "python": plan.python}
    texts |= _texts("job", plan.job)
    texts |= {f"env.{name}": value for name, value in plan.env.items()}
    texts |= {f"library_path[{i}]": value for i, value in enumerate(plan.library_path)}
    for group in plan.groups:
        texts |= _texts(f"groups[{group.index}]", group)
    found = [
        Violation(field, repr(value), "must be one line of printable text")
        for field, value in texts.items()
        if not value.isprintable()
    ]
    found += [
        Violation(f"env.{name}", "", "is not a name of an environment variable")
        for name in plan.env
        if not _VARIABLE.fullmatch(name)
    ]
    if found:
        raise UsageError(found)


def _texts(path: str, section: Section) -> dict[str, str]:
    found = {}
    for name, value in section:
        if isinstance(value, str):
            found[f"{path}.{name}"] = value
        elif isinstance(value, tuple):
            found |= {f"{path}.{name}[{i}]": item for i, item in enumerate(value)}
    return found
