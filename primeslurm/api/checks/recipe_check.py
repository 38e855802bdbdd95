"""Plan a recipe, and report all findings in one pass, even if parts of the recipe are wrong.

An error must not hide other errors, and its consequences must not be reported as further errors. Therefore a wrong
recipe is planned in several variants (`recipe.reading.valid_variants`), and findings count if all variants have them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from primeslurm.api.sites import with_python
from primeslurm.base.errors import UsageError, Violation
from primeslurm.plan.checks.files import (
    absent_data,
    absent_engine_models,
    engine_checkpoint_problems,
    model_files,
    with_absolute_paths,
)
from primeslurm.plan.checks.sft_files import data_problems
from primeslurm.plan.checks.teacher import teacher_problems
from primeslurm.plan.model import Finding, Plan, as_findings
from primeslurm.plan.placement.inference import teacher_recipe
from primeslurm.plan.planner import Planned, RecipeFiles, make_emulated_plan, refusals, try_plan
from primeslurm.recipe import Recipe, Site
from primeslurm.recipe.reading.recipe_files import Draft, independent, is_below
from primeslurm.recipe.reading.valid_variants import path_of
from primeslurm.recipe.site import NodeKind

# Levels of findings, the most severe first.
LEVELS = ("error", "blocked", "warning", "note")
# Nodes to plan with if there is no site file. Findings on both kinds do not depend on the site.
_ASSUMED_NODES = (
    NodeKind(partition="unknown", gpus=8, cpus=192, gpu="h200", memory_gib=2000),
    NodeKind(partition="unknown", gpus=8, cpus=64, gpu="b200", memory_gib=4000),
)
# Fields of an environment that loading it needs.
_LOADED = frozenset(("id", "args", "harness", "runtime", "load_timeout_s"))


def read_file_metadata(recipe: Recipe) -> RecipeFiles:
    """Read the metadata of the recipe's models and data, as far as they exist on this machine."""
    model, teacher = model_files(recipe), teacher_recipe(recipe)
    of_teacher = model_files(teacher) if teacher else None
    located = with_absolute_paths(recipe)
    absent = (absent_data(located), *absent_engine_models(located))
    own = engine_checkpoint_problems(recipe, model.shape)
    problems = (*model.problems, *own, *teacher_problems(recipe, of_teacher), *data_problems(located))
    return RecipeFiles(located, model, of_teacher, problems, tuple(finding for finding in absent if finding))


def plan_emulated(recipe: Recipe, site: Site) -> Planned:
    return make_emulated_plan(recipe, site, Path(site.runs) / recipe.name, model_files(recipe).shape)


def with_warnings(planned: Planned, violations: Sequence[Violation]) -> Planned:
    """Return the plan with violations added to its findings, as warnings."""
    findings = (*planned.plan.findings, *as_findings(violations, "warning"))
    return replace(planned, plan=planned.plan.model_copy(update={"findings": findings}))


@dataclass(frozen=True)
class Check:
    """Findings about a recipe on a site."""

    plan: Plan | None  # None if there are errors that prevent a plan, or that would end the run
    findings: tuple[Finding, ...] = ()  # all findings, the most severe first
    details: tuple[str, ...] = ()  # output of Slurm commands that failed

    @property
    def errors(self) -> tuple[Violation, ...]:
        """Findings that refuse the recipe on every machine."""
        return tuple(refusals(self.findings, "error"))

    @property
    def violations(self) -> tuple[Violation, ...]:
        return () if self.plan is not None else self.errors

    @property
    def ok(self) -> bool:
        """True if the recipe has no errors. It may still be blocked on this machine."""
        return not self.errors

    @property
    def blocked(self) -> bool:
        """True if `submit` would refuse the recipe on this machine, for reasons that may not hold elsewhere."""
        return any(finding.level == "blocked" for finding in self.findings)


@dataclass(frozen=True)
class Examination:
    """Plan and findings of a recipe."""

    planned: Planned | None  # None if reading, planning or loading the recipe found an error
    errors: tuple[Violation, ...]
    others: tuple[Finding, ...]
    details: tuple[str, ...] = ()

    def refuse(self) -> Planned:
        """Return the plan. Raises UsageError with all errors and blockers if there is none."""
        if self.planned is None:
            raise UsageError([*self.errors, *refusals(self.others, "blocked")])
        return self.planned

    def check(self) -> Check:
        findings = by_severity((*as_findings(self.errors, "error"), *self.others))
        if self.planned is None:
            return Check(None, findings, self.details)
        return Check(self.planned.plan.model_copy(update={"findings": findings}), findings, self.details)


def by_severity(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Sort findings, the most severe first, and remove duplicates."""
    return tuple(sorted(dict.fromkeys(findings), key=lambda finding: LEVELS.index(finding.level)))


def no_query(plans: Sequence[Plan], complete: bool) -> SlurmAnswer:
    """Return an empty answer: an `AskSlurm` that does not query Slurm."""
    return SlurmAnswer()


@dataclass(frozen=True)
class SlurmAnswer:
    """Slurm's objections to a plan."""

    problems: tuple[Violation, ...] = ()  # reasons why the job could never start
    note: str = ""  # reason why Slurm could not be queried; empty if it answered
    details: str = ""  # output of the Slurm command that failed


# Takes variants of one recipe's plan, and whether the first one is final. Returns problems that all variants have.
AskSlurm = Callable[[Sequence[Plan], bool], SlurmAnswer]


def examine(
    recipe: Draft[Recipe],
    site: Draft[Site],
    *,
    local: bool,
    environments: bool = True,
    ask: AskSlurm = no_query,
    files: RecipeFiles | None = None,
) -> Examination:
    """Find all errors and warnings of a recipe in one pass.

    A first round finds errors. A second round plans variants with other values in the wrong fields. It finds errors
    that the first ones hid: nothing is compared with a placement that failed, for example.

    With `environments`, environments are loaded, data is rendered, and unusable files are errors instead of blockers.
    `files` holds the metadata of a valid recipe's files, if they have been read.
    """
    faulty = [fault.path for fault in (*recipe.faults, *site.faults)]
    reading_errors = [*recipe.violations, *site.violations]
    sites = [with_python(each) for each in site.variants() or map(_assumed_site, _ASSUMED_NODES)]
    local = local and site.value is not None

    def plan_variants(suspects: Sequence[Violation] = ()) -> list[_PlannedVariant]:
        recipes = recipe.variants(suspects)
        pairs = [(each, sites[i % len(sites)]) for i, each in enumerate(recipes)]
        pairs += [(recipes[i % len(recipes)], sites[i]) for i in range(len(recipes), len(sites)) if recipes]
        given = files if recipe.value is not None and not suspects else None
        return [
            _plan_variant(*pair, given or read_file_metadata(pair[0]), local=local, strict=environments)
            for pair in pairs
        ]

    first = plan_variants()
    errors = independent([each.errors for each in first], faulty)
    representative = first
    if errors:
        # A wrong field may hide errors. Other values in the wrong fields uncover them.
        second = plan_variants(errors)
        wrong_fields = [*faulty, *(path_of(each.field) for each in errors)]
        errors += independent([each.errors for each in second], wrong_fields)
        errors = _causes(errors, lambda error: [each.errors for each in plan_variants([error])])
        if not all(each.planned for each in first):
            representative = second
    deprecations = (*recipe.deprecations, *site.deprecations)
    others = as_findings(deprecations, "warning") + _common([each.others for each in representative], faulty)
    # Loading environments is slow, and the variants differ only in wrong fields: one variant is enough.
    load_findings = _load_environments(first[0], faulty, local=local) if environments and first else _LoadFindings()
    errors += [each for each in load_findings.errors if each not in errors]
    errors = [each for each in errors if not _is_repeated(each, load_findings.errors)]
    plans = [each.planned.plan for each in representative if each.planned]
    # Only a valid recipe gets a batch script, which sbatch can test.
    valid = recipe.value is not None and site.value is not None
    answer = SlurmAnswer()
    if plans and site.value is not None and not local:
        answer = ask(plans, valid and not errors)
        errors += independent([answer.problems], [*faulty, *(path_of(each.field) for each in errors)])
        if answer.note:
            others.append(Finding(level="note", field="slurm", text=answer.note))
    fatal = bool(reading_errors or not first or not first[0].planned or first[0].unusable or load_findings.errors)
    planned = None if fatal else first[0].planned
    return Examination(
        with_warnings(planned, deprecations) if planned else None,
        tuple(dict.fromkeys((*reading_errors, *errors))),
        (*others, *load_findings.others),
        (answer.details,) if answer.details else (),
    )


@dataclass(frozen=True)
class _PlannedVariant:
    """One variant of a recipe, planned on one site."""

    recipe: Recipe
    site: Site
    files: RecipeFiles
    errors: list[Violation]
    others: list[Finding]
    planned: Planned | None
    unusable: bool  # files exist here but cannot be used


def _plan_variant(recipe: Recipe, site: Site, files: RecipeFiles, *, local: bool, strict: bool) -> _PlannedVariant:
    problems, findings, planned = try_plan(recipe, site, Path(site.runs) / recipe.name, files, local=local)
    if strict:
        findings = [each for each in findings if each not in as_findings(files.problems, "blocked")]
        problems = [*files.problems, *problems]
    more = [each for each in refusals(findings, "error") if not _is_repeated(each, problems)]
    others = [each for each in findings if each.level != "error"]
    errors = _merged([*problems, *more])
    return _PlannedVariant(recipe, site, files, errors, others, planned, strict and bool(files.problems))


def _merged(errors: Iterable[Violation]) -> list[Violation]:
    """Merge errors about the same value of a field."""
    by_field: dict[str, list[Violation]] = {}
    merged: list[Violation] = []
    for error in errors:
        same = [each for each in by_field.get(error.field, []) if each.value == error.value or not error.value]
        by_field.setdefault(error.field, []).append(error)
        if not same:
            merged.append(error)
            continue
        at = next(i for i, each in enumerate(merged) if each.field == error.field and each.value == same[0].value)
        if error.why not in merged[at].why:
            merged[at] = replace(merged[at], why=f"{merged[at].why}; {error.why}", fix=merged[at].fix or error.fix)
    return merged


def _is_repeated(violation: Violation, others: Iterable[Violation]) -> bool:
    """True if another violation of the same field says the same."""
    return any(each != violation and each.field == violation.field and each.why in violation.why for each in others)


def _common(findings: Sequence[Sequence[Finding]], faulty: Sequence[Sequence[str]]) -> list[Finding]:
    """Return the findings that all variants have, except those about wrong fields."""
    if not findings:
        return []
    everywhere = set.intersection(*({(each.level, each.field) for each in some} for some in findings))
    common = [each for each in findings[0] if (each.level, each.field) in everywhere]
    return [each for each in common if not is_below(each.field, faulty)]


def _causes(
    errors: list[Violation], errors_without: Callable[[Violation], Sequence[Sequence[Violation]]]
) -> list[Violation]:
    """Remove errors that are consequences of others.

    An error is a consequence if it disappears when the other error's field gets another value, and the reverse is not
    true. If both disappear, the first one counts as the cause. `errors_without` returns the errors of all variants in
    which one error's field has another value.
    """
    if len(errors) < 2:
        return errors
    remaining_without: dict[Violation, set[tuple[str, str]]] = {}
    for error in errors:
        variants = errors_without(error)
        remaining = set.intersection(*({(v.field, v.value) for v in some} for some in variants)) if variants else None
        remaining_without[error] = {(v.field, v.value) for v in errors} if remaining is None else remaining
    causes: list[Violation] = []
    for i, error in enumerate(errors):
        follows = [
            other
            for j, other in enumerate(errors)
            if not _within(error.field, other.field)
            and (error.field, error.value) not in remaining_without[other]
            and (j < i or (other.field, other.value) in remaining_without[error])
        ]
        if not follows:
            causes.append(error)
    return causes


def _within(field: str, other: str) -> bool:
    """True if two fields are the same, or one contains the other. Errors in both have separate causes."""
    one, two = path_of(field), path_of(other)
    return one[: len(two)] == two or two[: len(one)] == one


@dataclass(frozen=True)
class _LoadFindings:
    errors: tuple[Violation, ...] = ()
    others: tuple[Finding, ...] = ()


def _load_environments(look: _PlannedVariant, faulty: Sequence[Sequence[str]], *, local: bool) -> _LoadFindings:
    """Load environments and render data, unless their fields are wrong."""
    from primeslurm.api.checks import environments

    skip = {".".join(path[:at]) for path in faulty for at in (2, 3) if _prevents_loading(path, at)}
    located = look.files.located
    wrong, notes = environments.environment_problems(located, look.site, local=local, skip=skip)
    if not look.files.blocked:
        unrendered, noted = environments.data_rendering_problems(located, look.site, local=local)
        wrong, notes = [*wrong, *unrendered], [*notes, *noted]
    wrong = independent([wrong], faulty)
    if look.files.blocked:  # this machine has not all that the run needs, perhaps not what its environments need
        return _LoadFindings((), (*as_findings(wrong, "blocked"), *notes))
    return _LoadFindings(tuple(wrong), tuple(notes))


def _prevents_loading(path: Sequence[str], at: int) -> bool:
    return len(path) >= at and path[at - 2] == "environments" and (len(path) == at or path[at] in _LOADED)


def _assumed_site(nodes: NodeKind) -> Site:
    # Environment nodes get cores for any number of workers, because only a site can have too few.
    control = NodeKind(partition="unknown", cpus=2**20)
    return Site(schema=1, name="unknown", device="cuda", runs="runs", nodes={"default": nodes, "control": control})
