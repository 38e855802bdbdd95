"""Load a recipe file; then plan, check, render or submit it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from primeslurm.api.checks.recipe_check import (
    AskSlurm,
    Check,
    Examination,
    SlurmAnswer,
    examine,
    no_query,
    plan_emulated,
    read_file_metadata,
    with_warnings,
)
from primeslurm.api.sites import draft_site, with_python
from primeslurm.base.errors import UsageError, Violation
from primeslurm.plan.model import Finding, Plan, as_findings
from primeslurm.plan.planner import Planned, RecipeFiles, refusals, refuse
from primeslurm.recipe import Recipe, Site
from primeslurm.recipe.reading.recipe_files import Draft, find_recipe, read_recipe

if TYPE_CHECKING:
    from primeslurm.api.runs.run import Run
    from primeslurm.api.submission import DryRun, Submitted
    from primeslurm.api.testbed import ClusterSpec

# Suffixes that tell a recipe file from the name of a run.
RECIPES = (".yaml", ".yml")
# Values by dotted path, `{"orchestrator.batch_size": 64}`, or words as for `--set`, `["max_steps=3"]`.
Overrides = Mapping[str, Any] | Sequence[str]


@dataclass(frozen=True)
class LoadedRecipe:
    """A valid recipe and its site."""

    recipe: Recipe
    site: Site
    source: Path
    local: bool
    files: RecipeFiles | None  # metadata of the recipe's files; None for an emulated run, which does not need them
    cluster: ClusterSpec | None = None  # embedded cluster of an emulated run without a site
    planned: Planned | None = None  # plan that was made before the embedded cluster started
    draft: Draft[Recipe] | None = None
    """The recipe's raw data, which tells a check the causes of errors from their consequences."""

    @property
    def emulated(self) -> bool:
        """True if stand-ins replace engines, trainer and environments."""
        return self.files is None

    def plan(self) -> Plan:
        """Assign nodes and processes. The plan has findings and, if the model is known, a memory estimate.

        Neither Slurm nor the model's files are needed; missing files are findings. Raises UsageError with all reasons
        if the recipe cannot be placed on this site.
        """
        return self.resolve().plan

    def resolve(self) -> Planned:
        """Return the plan, and the recipe with all defaults filled in. Raises as `plan`."""
        return self.to_run() if self.files is None else self._examined(environments=False).refuse()

    def to_run(self) -> Planned:
        """Plan the recipe, and also load its environments. Raises UsageError as `submit`."""
        if self.planned is not None:
            return self.planned
        if self.files is None:
            deprecations = self.draft.deprecations if self.draft else ()
            return with_warnings(plan_emulated(self.recipe, self.site), deprecations)
        return self._examined().refuse()

    def check(self, *, slurm: bool = True) -> Check:
        """Return all findings about placement, memory and files, and, with `slurm`, Slurm's objections."""
        if self.files is not None:
            return self._examined(ask=self._ask_slurm if slurm else no_query).check()
        try:
            planned = self.to_run()
        except UsageError as error:
            return Examination(None, error.violations, ()).check()
        answer = self._ask_slurm([planned.plan], True) if slurm else SlurmAnswer()
        notes = [Finding(level="note", field="slurm", text=answer.note)] if answer.note else []
        errors = (*refusals(planned.plan.findings, "error"), *answer.problems)
        others = [each for each in planned.plan.findings if each.level != "error"]
        return Examination(planned, errors, (*others, *notes), (answer.details,) if answer.details else ()).check()

    def _examined(self, *, environments: bool = True, ask: AskSlurm = no_query) -> Examination:
        recipe = self.draft or Draft(Recipe, lambda _: (), {}, self.recipe)
        site = Draft(Site, lambda _: (), {}, self.site)
        return examine(recipe, site, local=self.local, environments=environments, ask=ask, files=self.files)

    def _ask_slurm(self, plans: Sequence[Plan], whole: bool) -> SlurmAnswer:
        from primeslurm.api import submission

        applies = plans[0].executor == "slurm" and self.cluster is None
        return submission.ask_slurm(plans, self.site.slurm_conf, whole=whole) if applies else SlurmAnswer()

    def render(self) -> str:
        """Return the batch script exactly as `submit` passes it to Slurm. Raises UsageError."""
        from primeslurm.slurm.render import render

        plan = self.plan()
        refuse(plan, "error")
        return render(plan)

    def dry_run(self, *, slurm: bool = True) -> DryRun:
        """Make all checks of `submit`, and write nothing. Checks that are impossible here are listed as such.

        Raises UsageError with all reasons why `submit` would refuse the recipe on any machine.
        """
        from primeslurm.api import submission

        return submission.dry_run(self.plan(), self.site.slurm_conf, ask=slurm and self.cluster is None)

    def submit(self) -> Run:
        """Create the run directory and submit the job. An emulated run's cluster is started first, and stays up.

        Raises UsageError with all reasons if the recipe, its files or its name are wrong. Raises ClusterError if Slurm
        refused the job or did not answer; the run directory is then removed.
        """
        from primeslurm.api.runs.run import Run

        with self.on_cluster(keep=True) as ready:
            return Run(Path(ready.start().plan.run_dir))

    def start(self) -> Submitted:
        """Submit the job to a cluster that is up. Raises as `submit`."""
        from primeslurm.api import submission

        def ask(plans: Sequence[Plan], whole: bool) -> SlurmAnswer:
            return SlurmAnswer() if whole else self._ask_slurm(plans, whole)  # the submission itself asks for the whole

        final = self.planned is not None or self.files is None
        planned = self.to_run() if final else self._examined(ask=ask).refuse()
        return submission.submit(planned, self.source, self.site.slurm_conf)

    @contextmanager
    def on_cluster(
        self, *, keep: bool = False, starting: Callable[[ClusterSpec], None] = lambda _: None
    ) -> Iterator[LoadedRecipe]:
        """Start the embedded cluster of an emulated run, if it needs one, and yield the recipe on the cluster's site.

        `starting` is called before the cluster starts, after all other checks. With `keep`, the cluster stays up when
        the block ends without an error. Raises UsageError if `submit` would refuse the recipe, and ClusterError.
        """
        if self.cluster is None:
            yield self
            return
        from primeslurm.api import submission
        from primeslurm.api.recipes import emulation

        # Refuse the run before the cluster starts, which takes longer than all checks.
        planned = self.to_run()
        submission.refuse_unfit(planned.plan)
        emulation.refuse_too_large(planned.plan, merged=self.cluster.merge_pages)
        starting(self.cluster)
        with emulation.running(self.cluster, keep=keep) as site:
            # The cluster's addresses are known only now. Nothing else of the plan changes.
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
    """Read and validate a recipe and its site.

    Args:
        recipe: a YAML file, or the name of a ready recipe.
        site: a site file; by default ./site.yaml or ~/.primeslurm/site.yaml.
        overrides: fields to change, see `Overrides`.
        name: name of the run; by default the recipe's.
        local: run on this machine without Slurm.
        emulate: replace engines, trainer and environments by stand-ins. Without a site, they run on an
            embedded cluster.

    Raises:
        UsageError: the recipe or the site is wrong; with all reasons.
    """
    site_file, words = Path(site) if site is not None else None, _words(overrides)
    if emulate:
        return _load_emulated(find_recipe(Path(recipe)), site_file, words, name, local)
    site_draft = draft_site(site_file, local=local)
    source = _find_source(recipe, site_draft)
    draft = read_recipe(source, words, name)
    if draft.value is None or site_draft.value is None:
        raise UsageError(examine(draft, site_draft, local=local, environments=False).errors)
    return LoadedRecipe(
        draft.value, with_python(site_draft.value), source, local, read_file_metadata(draft.value), draft=draft
    )


def check(
    recipe: str | Path,
    *,
    site: str | Path | None = None,
    overrides: Overrides = (),
    name: str | None = None,
    local: bool = False,
    slurm: bool = True,
) -> Check:
    """Return all findings about a recipe, even if it cannot be loaded. Arguments are as for `load`."""
    from primeslurm.api import submission

    site_draft = draft_site(Path(site) if site is not None else None, local=local)
    try:
        source = _find_source(recipe, site_draft)
    except UsageError as error:
        return Check(None, tuple(as_findings(error.violations, "error")))
    draft = read_recipe(source, _words(overrides), name)
    conf = site_draft.value.slurm_conf if site_draft.value else None

    def ask(plans: Sequence[Plan], whole: bool) -> SlurmAnswer:
        return submission.ask_slurm(plans, conf, whole=whole)

    return examine(draft, site_draft, local=local, ask=ask if slurm else no_query).check()


def _find_source(recipe: str | Path, site_draft: Draft[Site]) -> Path:
    """Return the recipe file. Raises UsageError, which then also has the errors of the site."""
    try:
        return find_recipe(Path(recipe))
    except UsageError as error:
        raise UsageError([*error.violations, *site_draft.violations]) from None


def _load_emulated(
    source: Path, site_file: Path | None, words: Sequence[str], name: str | None, local: bool
) -> LoadedRecipe:
    if local:
        why = "an emulated run is a Slurm job on an embedded cluster"
        raise UsageError([Violation("--local", "", why, "leave it out")])
    from primeslurm.api.recipes import emulation

    draft = read_recipe(source, words, name)
    site_draft = draft_site(site_file) if site_file is not None else None
    if problems := [*draft.violations, *(site_draft.violations if site_draft else ())]:
        raise UsageError(problems)
    recipe = emulation.for_emulation(draft.valid_value())
    if site_draft is not None:
        return LoadedRecipe(recipe, with_python(site_draft.valid_value()), source, False, None, draft=draft)
    emulation.refuse_without_packages()
    spec = emulation.cluster_for(recipe)
    return LoadedRecipe(recipe, with_python(emulation.site_of(spec)), source, False, None, spec, draft=draft)


def _words(overrides: Overrides) -> Sequence[str]:
    if not isinstance(overrides, Mapping):
        return overrides
    return [f"{path}={yaml.safe_dump(value, default_flow_style=True)}" for path, value in overrides.items()]
