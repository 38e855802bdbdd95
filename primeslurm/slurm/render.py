"""Plan to batch script. The templates loop over the Plan; whatever needs a decision is decided here or in plan/."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import jinja2

from primeslurm.errors import UsageError, Violation
from primeslurm.plan.model import Plan

_VARIABLE = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")


def submitit_folder(plan: Plan) -> Path:
    """Where submitit keeps the pickled agent, its results and its logs."""
    return Path(plan.run_dir) / "submitit"


def output_pattern(plan: Plan) -> str:
    """Output of the batch script and of all agents, with Slurm's %j for the job id."""
    # Slurm expands % in file names; %% is a plain one.
    return str(Path(plan.run_dir)).replace("%", "%%") + "/slurm-%j.out"


def render(plan: Plan) -> str:
    """The batch script of a Plan. Raises UsageError for text that cannot stand in a script."""
    _check(plan)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(templates_directory()),
        undefined=jinja2.StrictUndefined,
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["quote"] = lambda value: shlex.quote(str(value))
    return environment.get_template("job.sbatch.j2").render(
        plan=plan,
        folder=submitit_folder(plan),
        output=output_pattern(plan),
        environment=exports(plan),
        het_option=_het_option(plan),
    )


def templates_directory() -> Path:
    """The templates: inside the package when installed from a wheel, at the root of a checkout."""
    package = Path(__file__).parents[1]
    installed = package / "templates"
    return installed if installed.is_dir() else package.parent / "templates"


def _het_option(plan: Plan) -> str:
    """Without --het-group, srun would use the first component only. A job of one component has no het groups."""
    if len(plan.groups) == 1:
        return ""
    return f"--het-group={','.join(str(group.index) for group in plan.groups)} "


def exports(plan: Plan) -> dict[str, str]:
    """Variables of the agents. Those with placeholders can only be filled in on the node, by the agent itself."""
    return {name: value for name, value in plan.env.items() if "${" not in value}


def _check(plan: Plan) -> None:
    texts = {"run_dir": plan.run_dir, "python": plan.python}
    texts |= {f"job.{name}": value for name, value in plan.job if isinstance(value, str)}
    texts |= {f"job.modules[{i}]": value for i, value in enumerate(plan.job.modules)}
    texts |= {f"job.prologue[{i}]": value for i, value in enumerate(plan.job.prologue)}
    texts |= {f"env.{name}": value for name, value in plan.env.items()}
    texts |= {f"library_path[{i}]": value for i, value in enumerate(plan.library_path)}
    for group in plan.groups:
        texts |= {f"groups[{group.index}].{name}": value for name, value in group if isinstance(value, str)}
    found = [
        Violation(field, repr(value), "must be one line of printable text")
        for field, value in texts.items()
        if not value.isprintable()
    ]
    found += [
        Violation(f"env.{name}", "", "is not a name of an environment variable")
        for name in plan.env
        if not _VARIABLE.match(name)
    ]
    if found:
        raise UsageError(found)
