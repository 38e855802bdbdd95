"""What processes on nodes load of a recipe: models, and environments, which are tried."""

from __future__ import annotations

import sys
from pathlib import Path

from pydantic import BaseModel

from primeslurm.base.files import read_json
from primeslurm.plan.checks.environments import Interpreter, places, try_all
from primeslurm.recipe.sections.evaluation import Evaluation
from primeslurm.recipe.sections.orchestrator import Environment
from primeslurm.recipe.sections.teacher import Teacher, TeacherEngines
from primeslurm.recipe.sections.trainer import Model
from primeslurm.records import resolved_recipe as recipe_record


class LoadedOnNodes(BaseModel):
    """`recipe.resolved.json`, whose other sections are passed over."""

    model: Model
    teacher: Teacher | None = None
    environments: tuple[Environment, ...] = ()
    evaluation: Evaluation | None = None

    @property
    def models(self) -> list[str]:
        """Paths of the models that trainers and engines load."""
        teachers = [self.teacher.path] if isinstance(self.teacher, TeacherEngines) else []
        return [self.model.path, *teachers]

    def tried(self, task: str, tmp: Path) -> tuple[list[str], list[str]]:
        """Load the environments with this Python.

        Args:
            task: of the plan.
            tmp: directory for what they leave, which is removed.

        Returns:
            Their labels, and what is wrong.
        """
        trained = self.environments if task == "rl" else ()
        evaluated = self.evaluation.environments if self.evaluation else ()
        found = try_all(places(trained, evaluated), self.model, Interpreter(sys.executable, {}), tmp)
        problems = [*map(str, found.violations), *map(str, found.missing)]
        if found.unprepared:
            problems = [f"{sys.executable} has no {found.unprepared}"]
        return [each.label for each in (*trained, *evaluated)], problems


def read(run_dir: Path) -> LoadedOnNodes | None:
    """Read what a run's processes load. None if its recipe is not there."""
    found = read_json(run_dir / recipe_record.FILE)
    return None if found is None else LoadedOnNodes.model_validate(found)
