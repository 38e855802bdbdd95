"""Models and environments of a run's recipe, which preflight tries to load."""

from __future__ import annotations

import sys
from pathlib import Path

from pydantic import BaseModel

from primeslurm.base.files import read_json
from primeslurm.plan.checks.environments import Interpreter, environments_by_field, probe_environments
from primeslurm.recipe.sections.evaluation import Evaluation
from primeslurm.recipe.sections.inference import Inference
from primeslurm.recipe.sections.orchestrator import Environment
from primeslurm.recipe.sections.teacher import Teacher, TeacherEngines
from primeslurm.recipe.sections.trainer import Model
from primeslurm.records import resolved_recipe


class RecipeInputs(BaseModel):
    """`recipe.resolved.json`. Its other sections are ignored."""

    model: Model
    inference: Inference = Inference()
    teacher: Teacher | None = None
    environments: tuple[Environment, ...] = ()
    evaluation: Evaluation | None = None

    @property
    def models(self) -> list[str]:
        teachers = [self.teacher.path] if isinstance(self.teacher, TeacherEngines) else []
        return [self.model.path, *filter(None, [self.inference.model]), *teachers]

    def load_environments(self, task: str, tmp: Path) -> tuple[list[str], list[str]]:
        """Load the environments with this Python, and return their labels and the problems."""
        trained = self.environments if task == "rl" else ()
        evaluated = self.evaluation.environments if self.evaluation else ()
        result = probe_environments(
            environments_by_field(trained, evaluated), self.model, Interpreter(sys.executable, {}), tmp
        )
        problems = [*map(str, result.violations), *map(str, result.missing)]
        if result.missing_package:
            problems = [f"{sys.executable} has no {result.missing_package}"]
        return [each.label for each in (*trained, *evaluated)], problems


def read(run_dir: Path) -> RecipeInputs | None:
    value = read_json(run_dir / resolved_recipe.FILE)
    return None if value is None else RecipeInputs.model_validate(value)
