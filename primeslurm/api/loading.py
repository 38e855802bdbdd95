"""From a recipe file to something that can be planned, checked, rendered and submitted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from primeslurm.api.planning import (
    AskSlurm,
    Check,
    Examined,
    SlurmAnswer,
    ask_nobody,
    emulated_plan_of,
    examine,
    look_at_files,
    with_warnings,
)
from primeslurm.api.sites import draft_site, with_python
from primeslurm.base.errors import UsageError, Violation
from primeslurm.plan.model import Finding, Plan
from primeslurm.plan.planner import Planned, RecipeFiles, as_findings, refusals, refuse
from primeslurm.recipe import Recipe, Site
from primeslurm.recipe.reading.recipe_files import Draft, find_recipe, read_recipe

if TYPE_CHECKING:
    from primeslurm.api.runs import Run
    from primeslurm.api.submission import DryRun, Submitted
    from primeslurm.api.testbed import ClusterSpec

RECIPES = (".yaml", ".yml")
"""Endings of recipe files, where a run may be named instead."""
Overrides = Mapping[str, Any] | Sequence[str]
"""Values by dotted path, `{"orchestrator.batch_size": 64}`, or words as `--set` takes them, `["max_steps=3"]`."""


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
    draft: Draft[Recipe] | None = None
    """The recipe's data, by which a check tells causes from consequences."""

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
        return self.resolve().plan

    def resolve(self) -> Planned:
        """Work out the plan, and the recipe with everything filled in that it leaves open; raises as `plan` does."""
        return self.to_run() if self.files is None else self._examined(environments=False).refuse()

    def to_run(self) -> Planned:
        """Work out what is to run, and try it as far as it can be here. Raises UsageError for what cannot be used."""
        if self.planned is not None:
            return self.planned
        if self.files is None:
            deprecations = self.draft.deprecations if self.draft else ()
            return with_warnings(emulated_plan_of(self.recipe, self.site), deprecations)
        return self._examined().refuse()

    def check(self, *, slurm: bool = True) -> Check:
        """Say everything that is wrong or doubtful: placement, compatibility, memory, files, and what Slurm says.

        It raises nothing for what it finds.

        Args:
            slurm: ask Slurm, if it answers.
        """
        if self.files is not None:
            return self._examined(ask=self._ask_slurm if slurm else ask_nobody).check()
        try:
            planned = self.to_run()
        except UsageError as error:
            return Examined(None, error.violations, ()).check()
        answer = self._ask_slurm([planned.plan], True) if slurm else SlurmAnswer()
        notes = [Finding(level="note", field="slurm", text=answer.note)] if answer.note else []
        errors = (*refusals(planned.plan.findings, "error"), *answer.problems)
        others = [each for each in planned.plan.findings if each.level != "error"]
        return Examined(planned, errors, (*others, *notes), (answer.details,) if answer.details else ()).check()

    def _examined(self, *, environments: bool = True, ask: AskSlurm = ask_nobody) -> Examined:
        recipe = self.draft or Draft(Recipe, lambda _: (), {}, self.recipe)
        site = Draft(Site, lambda _: (), {}, self.site)
        return examine(recipe, site, local=self.local, environments=environments, ask=ask, files=self.files)

    def _ask_slurm(self, plans: Sequence[Plan], whole: bool) -> SlurmAnswer:
        """Ask Slurm, unless the run has none or its cluster is not up yet."""
        from primeslurm.api import submission

        asked = plans[0].executor == "slurm" and self.cluster is None
        return submission.ask_slurm(plans, self.site.slurm_conf, whole=whole) if asked else SlurmAnswer()

    def render(self) -> str:
        """Render the batch script, byte for byte as it would be submitted.

        Raises:
            UsageError: the recipe cannot be placed, or contradicts itself.
        """
        from primeslurm.slurm.render import render

        plan = self.plan()
        refuse(plan, "error")
        return render(plan)

    def dry_run(self, *, slurm: bool = True) -> DryRun:
        """Do all that `submit` does before it writes anything.

        What could not be asked, or is missing here, is said and is no failure.

        Args:
            slurm: ask Slurm, if it answers.

        Raises:
            UsageError: `submit` would refuse this anywhere; every reason at once.
        """
        from primeslurm.api import submission

        return submission.dry_run(self.plan(), self.site.slurm_conf, ask=slurm and self.cluster is None)

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

        def ask(plans: Sequence[Plan], whole: bool) -> SlurmAnswer:
            return SlurmAnswer() if whole else self._ask_slurm(plans, whole)  # the submission itself asks for the whole

        known = self.planned is not None or self.files is None
        planned = self.to_run() if known else self._examined(ask=ask).refuse()
        return submission.submit(planned, self.source, self.site.slurm_conf)

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
    site_file, words = Path(site) if site is not None else None, _words(overrides)
    if emulate:
        return _load_emulated(find_recipe(Path(recipe)), site_file, words, name, local)
    where = draft_site(site_file, local=local)
    source = _find_source(recipe, where)
    asked = read_recipe(source, words, name)
    if asked.value is None or where.value is None:
        raise UsageError(examine(asked, where, local=local, environments=False).errors)
    return LoadedRecipe(asked.value, with_python(where.value), source, local, look_at_files(asked.value), draft=asked)


def check(
    recipe: str | Path,
    *,
    site: str | Path | None = None,
    overrides: Overrides = (),
    name: str | None = None,
    local: bool = False,
    slurm: bool = True,
) -> Check:
    """Say everything that is wrong or doubtful about a recipe, although it cannot be loaded.

    Arguments are those of `load` and `LoadedRecipe.check`. It raises nothing for what it finds.
    """
    from primeslurm.api import submission

    where = draft_site(Path(site) if site is not None else None, local=local)
    try:
        source = _find_source(recipe, where)
    except UsageError as error:
        return Check(None, tuple(as_findings(error.violations, "error")))
    asked = read_recipe(source, _words(overrides), name)
    conf = where.value.slurm_conf if where.value else None

    def ask(plans: Sequence[Plan], whole: bool) -> SlurmAnswer:
        return submission.ask_slurm(plans, conf, whole=whole)

    return examine(asked, where, local=local, ask=ask if slurm else ask_nobody).check()


def _find_source(recipe: str | Path, where: Draft[Site]) -> Path:
    """Find the file of a recipe. Raises UsageError, also with what is wrong with the site, if there is none."""
    try:
        return find_recipe(Path(recipe))
    except UsageError as error:
        raise UsageError([*error.violations, *where.violations]) from None


def _load_emulated(
    source: Path, site_file: Path | None, words: Sequence[str], name: str | None, local: bool
) -> LoadedRecipe:
    if local:
        why = "an emulated run is a real Slurm job, on an embedded cluster"
        raise UsageError([Violation("--local", "", why, "leave it out")])
    from primeslurm.api import emulation

    asked = read_recipe(source, words, name)
    where = draft_site(site_file) if site_file is not None else None
    if problems := [*asked.violations, *(where.violations if where else ())]:
        raise UsageError(problems)
    recipe = emulation.for_emulation(asked.valid_value())
    if where is not None:
        return LoadedRecipe(recipe, with_python(where.valid_value()), source, False, None, draft=asked)
    emulation.refuse_without_packages()
    spec = emulation.cluster_for(recipe)
    return LoadedRecipe(recipe, with_python(emulation.site_of(spec)), source, False, None, spec, draft=asked)


def _words(overrides: Overrides) -> Sequence[str]:
    """Overrides as `--set` takes them."""
    if not isinstance(overrides, Mapping):
        return overrides
    return [f"{path}={yaml.safe_dump(value, default_flow_style=True)}" for path, value in overrides.items()]
