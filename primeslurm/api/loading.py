"""From a recipe file to something that can be planned, checked, rendered and submitted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from primeslurm.api.planning import emulated_plan_of, look_at_files, plan_of, strict_plan_of
from primeslurm.api.sites import find_site, with_python
from primeslurm.errors import UsageError, Violation
from primeslurm.plan.model import Finding, Plan
from primeslurm.plan.planner import Planned, RecipeFiles, as_findings, refusals, refuse
from primeslurm.recipe import Recipe, Site
from primeslurm.recipe.reading.recipe_files import find_recipe, load_recipe

if TYPE_CHECKING:
    from primeslurm.api.runs import Run
    from primeslurm.api.submission import DryRun, Submitted
    from primeslurm.slurm.embedded.config import ClusterSpec

RECIPES = (".yaml", ".yml")
"""Endings of recipe files, where a run may be named instead."""
Overrides = Mapping[str, Any] | Sequence[str]
"""Values by dotted path, `{"orchestrator.batch_size": 64}`, or words as `--set` takes them, `["max_steps=3"]`."""


@dataclass(frozen=True)
class Check:
    """What is to be said about a recipe on a site before it runs."""

    plan: Plan | None
    """None if there are violations."""
    violations: tuple[Violation, ...] = ()
    """Why there is no plan that could run."""

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All of it, violations too."""
        return self.plan.findings if self.plan else tuple(as_findings(self.violations, "error"))

    @property
    def errors(self) -> tuple[Violation, ...]:
        """What is refused everywhere."""
        return self.violations or tuple(refusals(self.findings, "error"))

    @property
    def ok(self) -> bool:
        """Whether the recipe is sound. It may still be blocked here."""
        return not self.errors

    @property
    def blocked(self) -> bool:
        """Whether a real submission would be refused here and now, for what may be different elsewhere."""
        return any(finding.level == "blocked" for finding in self.findings)


@dataclass(frozen=True)
class LoadedRecipe:
    """A valid recipe and the site that it is to run on."""

    recipe: Recipe
    site: Site
    source: Path
    """The recipe's file."""
    local: bool
    """Run on this machine without Slurm."""
    files: RecipeFiles | None
    """What is known of the recipe's files; None for an emulated run, which needs none."""
    cluster: ClusterSpec | None = None
    """The embedded cluster that an emulated run needs, if it was given no site."""
    planned: Planned | None = None
    """What was worked out before its embedded cluster was up."""

    @property
    def emulated(self) -> bool:
        """Whether light stand-ins run in place of engines, trainer and environments."""
        return self.files is None

    def plan(self) -> Plan:
        """Work out which node does what, with findings and, where the model is known, an estimate of memory.

        Neither Slurm nor the model's files are needed: what is missing is among the findings.

        Raises:
            UsageError: the recipe cannot be placed on this site; every reason at once.
        """
        if self.files is None:
            return self.to_run().plan
        return plan_of(self.recipe, self.site, self.files, local=self.local).plan

    def to_run(self) -> Planned:
        """Work out what is to run, and try it as far as it can be here. Raises UsageError for what cannot be used."""
        if self.planned is not None:
            return self.planned
        if self.files is None:
            return emulated_plan_of(self.recipe, self.site)
        return strict_plan_of(self.recipe, self.site, self.files, local=self.local)

    def check(self) -> Check:
        """Say everything that is wrong or doubtful: placement, compatibility, memory, files, and what Slurm says.

        Raises nothing for it. Slurm is asked if it answers.
        """
        violations: tuple[Violation, ...] = ()
        try:
            plan = self.to_run().plan
        except UsageError as error:
            violations = error.violations
            try:
                plan = self.plan()
            except UsageError:  # these are among the violations
                return Check(None, violations)
        problems, unasked = self._ask_slurm(plan)
        if violations:
            return Check(None, (*violations, *problems))
        notes = [Finding(level="note", field="slurm", text=unasked)] if unasked else []
        findings = (*plan.findings, *as_findings(problems, "error"), *notes)
        return Check(plan.model_copy(update={"findings": findings}))

    def _ask_slurm(self, plan: Plan) -> tuple[list[Violation], str]:
        """What Slurm has against the plan, and why it could not be asked; nothing where no cluster is there yet."""
        from primeslurm.api import submission

        asked = plan.executor == "slurm" and self.cluster is None
        return submission.ask_slurm(plan, self.site.slurm_conf) if asked else ([], "")

    def render(self) -> str:
        """Render the batch script, byte for byte as it would be submitted.

        Raises:
            UsageError: the recipe cannot be placed, or contradicts itself.
        """
        from primeslurm.slurm.render import render

        plan = self.plan()
        refuse(plan, "error")
        return render(plan)

    def dry_run(self) -> DryRun:
        """Do all that `submit` does before it writes anything.

        Slurm is asked if it answers. What could not be asked, or is missing here, is said and is no failure.

        Raises:
            UsageError: `submit` would refuse this anywhere; every reason at once.
        """
        from primeslurm.api import submission

        return submission.dry_run(self.plan(), self.site.slurm_conf, ask=self.cluster is None)

    def submit(self) -> Run:
        """Make the run directory and submit the job. An emulated run's cluster is started first, and stays.

        Raises:
            UsageError: something is wrong with the recipe, its files or its name; every reason at once.
            ClusterError: Slurm refused the job or did not answer. Nothing is left of the run then.
        """
        from primeslurm.api.runs import Run

        with self.on_cluster(keep=True) as ready:
            return Run(Path(ready.start().plan.run_dir))

    def start(self) -> Submitted:
        """Make the run directory and submit the job, on a cluster that is up. Raises as `submit`."""
        from primeslurm.api import submission

        return submission.submit(self.to_run(), self.source, self.site.slurm_conf)

    @contextmanager
    def on_cluster(
        self, *, keep: bool = False, starting: Callable[[ClusterSpec], None] = lambda _: None
    ) -> Iterator[LoadedRecipe]:
        """Start the embedded cluster that an emulated run needs, if any; yields the same recipe on its site.

        Args:
            keep: leave the cluster when the block ends without an error.
            starting: is called before the cluster starts, once nothing that is known speaks against the run.

        Raises:
            UsageError: `submit` would refuse the recipe.
            ClusterError: the cluster does not start.
        """
        if self.cluster is None:
            yield self
            return
        from primeslurm.api import emulation, submission

        planned = self.to_run()
        submission.refuse_unfit(planned.plan)
        emulation.refuse_too_large(planned.plan, merged=self.cluster.merge_pages)
        starting(self.cluster)
        with emulation.running(self.cluster, keep=keep) as site:
            placed = planned.listening_at(site.network.addresses)
            yield replace(self, site=with_python(site), cluster=None, planned=placed)


def load(
    recipe: str | Path,
    *,
    site: str | Path | None = None,
    overrides: Overrides = (),
    name: str | None = None,
    local: bool = False,
    emulate: bool = False,
) -> LoadedRecipe:
    """Read and validate a recipe and the site that it is for.

    Args:
        recipe: its YAML file, or the bare name of a ready recipe.
        site: a site file; by default ./site.yaml or ~/.primeslurm/site.yaml.
        overrides: fields to set, as a mapping of dotted paths to values or as words `path=value`.
        name: name of the run in place of the recipe's.
        local: run on this machine without Slurm.
        emulate: run the whole job with light stand-ins, on an embedded cluster unless a site is given.

    Raises:
        UsageError: recipe or site are wrong; everything that is, at once.
    """
    source, site_file, words = find_recipe(Path(recipe)), Path(site) if site is not None else None, _words(overrides)
    if emulate:
        return _load_emulated(source, site_file, words, name, local)
    problems: list[Violation] = []
    asked: Recipe | None = None
    where: Site | None = None
    try:
        asked = load_recipe(source, words, name)
    except UsageError as error:
        problems += error.violations
    try:
        where = find_site(site_file, local=local)
    except UsageError as error:
        problems += error.violations
    if asked is None or where is None:
        raise UsageError(problems)
    return LoadedRecipe(asked, with_python(where), source, local, look_at_files(asked))


def _load_emulated(
    source: Path, site_file: Path | None, words: Sequence[str], name: str | None, local: bool
) -> LoadedRecipe:
    if local:
        why = "an emulated run is a real Slurm job, on an embedded cluster"
        raise UsageError([Violation("--local", "", why, "leave it out")])
    from primeslurm.api import emulation

    recipe = emulation.for_emulation(load_recipe(source, words, name))
    if site_file is not None:
        return LoadedRecipe(recipe, with_python(find_site(site_file)), source, False, None)
    spec = emulation.cluster_for(recipe)
    return LoadedRecipe(recipe, with_python(emulation.site_of(spec)), source, False, None, spec)


def _words(overrides: Overrides) -> Sequence[str]:
    """Overrides as `--set` takes them."""
    if not isinstance(overrides, Mapping):
        return overrides
    return [f"{path}={yaml.safe_dump(value, default_flow_style=True)}" for path, value in overrides.items()]
