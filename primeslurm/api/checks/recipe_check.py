"""Plan a recipe, and find everything that can be said about it in one pass, although parts of it are faulty.

A fault must not hide other faults, and its consequences must not be reported as further faults. Therefore the checks
look at several variants of a faulty recipe (`recipe.reading.valid_variants`), and keep the findings that all variants
have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from primeslurm.api.sites import with_python
from primeslurm.base.errors import UsageError, Violation
from primeslurm.plan.checks.files import absent_data, model_files, with_absolute_paths
from primeslurm.plan.checks.sft_files import data_problems
from primeslurm.plan.checks.teacher import teacher_problems
from primeslurm.plan.model import Finding, Plan
from primeslurm.plan.placement.inference import teacher_recipe
from primeslurm.plan.planner import Planned, RecipeFiles, as_findings, make_emulated_plan, refusals, try_plan
from primeslurm.recipe import Recipe, Site
from primeslurm.recipe.reading.recipe_files import Draft, independent, is_below
from primeslurm.recipe.reading.valid_variants import path_of
from primeslurm.recipe.site import NodeKind

LEVELS = ("error", "blocked", "warning", "note")
"""In the order in which findings are shown."""
_ASSUMED_NODES = (
    NodeKind(partition="unknown", gpus=8, cpus=192, gpu="h200", memory_gib=2000),
    NodeKind(partition="unknown", gpus=8, cpus=64, gpu="b200", memory_gib=4000),
)
"""Nodes to plan with if there is no site file. What is found on both does not depend on the site."""
_LOADED = frozenset(("id", "args", "harness", "runtime", "load_timeout_s"))
"""Fields of an environment without which it cannot be tried."""


def look_at_files(recipe: Recipe) -> RecipeFiles:
    """Look at the recipe's models and data, as far as they are here."""
    model, teacher = model_files(recipe), teacher_recipe(recipe)
    of_teacher = model_files(teacher) if teacher else None
    located = with_absolute_paths(recipe)
    data = absent_data(located)
    problems = (*model.problems, *teacher_problems(recipe, of_teacher), *data_problems(located))
    return RecipeFiles(located, model, of_teacher, problems, (data,) if data else ())


def emulated_plan_of(recipe: Recipe, site: Site) -> Planned:
    """Work out the plan of an emulated run; its files need not be there. Raises UsageError."""
    return make_emulated_plan(recipe, site, Path(site.runs) / recipe.name, model_files(recipe).shape)


def with_warnings(planned: Planned, violations: Sequence[Violation]) -> Planned:
    """Return the same plan with violations among its findings, as warnings."""
    findings = (*planned.plan.findings, *as_findings(violations, "warning"))
    return replace(planned, plan=planned.plan.model_copy(update={"findings": findings}))


@dataclass(frozen=True)
class Check:
    """What is to be said about a recipe on a site before it runs."""

    plan: Plan | None
    """None if the recipe cannot be planned, or would fail although it can."""
    findings: tuple[Finding, ...] = ()
    """Everything, the most severe first."""
    details: tuple[str, ...] = ()
    """More about notes: what a command of Slurm answered."""

    @property
    def errors(self) -> tuple[Violation, ...]:
        """What is refused everywhere."""
        return tuple(refusals(self.findings, "error"))

    @property
    def violations(self) -> tuple[Violation, ...]:
        """Why there is no plan that could run."""
        return () if self.plan is not None else self.errors

    @property
    def ok(self) -> bool:
        """Whether the recipe is sound. It may still be blocked here."""
        return not self.errors

    @property
    def blocked(self) -> bool:
        """Whether a real submission would be refused here and now, for reasons that may not hold elsewhere."""
        return any(finding.level == "blocked" for finding in self.findings)


@dataclass(frozen=True)
class Examined:
    """A recipe on a site, looked at as far as possible."""

    planned: Planned | None
    """None if reading, placing or trying it found an error."""
    errors: tuple[Violation, ...]
    others: tuple[Finding, ...]
    """Findings that are no errors."""
    details: tuple[str, ...] = ()

    def refuse(self) -> Planned:
        """Return what was planned. Raises UsageError with errors and blockers if there are errors."""
        if self.planned is None:
            raise UsageError([*self.errors, *refusals(self.others, "blocked")])
        return self.planned

    def check(self) -> Check:
        """Return findings and plan as a check."""
        findings = by_severity((*as_findings(self.errors, "error"), *self.others))
        if self.planned is None:
            return Check(None, findings, self.details)
        return Check(self.planned.plan.model_copy(update={"findings": findings}), findings, self.details)


def by_severity(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Sort findings, the most severe first; those of one level stay in their order."""
    return tuple(sorted(dict.fromkeys(findings), key=lambda finding: LEVELS.index(finding.level)))


def ask_nobody(plans: Sequence[Plan], complete: bool) -> SlurmAnswer:
    """Answer in place of Slurm if it is not asked."""
    return SlurmAnswer()


@dataclass(frozen=True)
class SlurmAnswer:
    """What Slurm says about a plan."""

    problems: tuple[Violation, ...] = ()
    """Why its job could never start."""
    note: str = ""
    """Why Slurm could not be asked; empty if it could."""
    details: str = ""
    """What its command answered then."""


AskSlurm = Callable[[Sequence[Plan], bool], SlurmAnswer]
"""Takes plans of one recipe, and whether the first is what would be submitted. Says what all of them have in common."""


def examine(
    recipe: Draft[Recipe],
    site: Draft[Site],
    *,
    local: bool,
    environments: bool = True,
    ask: AskSlurm = ask_nobody,
    files: RecipeFiles | None = None,
) -> Examined:
    """Find everything that can be found in one pass.

    The first look finds errors. A second look, at variants with other values in the fields of these errors, finds the
    errors that the first ones hid: nothing is compared with a placement that failed, for example.

    Args:
        recipe: as it was read.
        site: as it was read.
        local: without Slurm.
        environments: try environments and data, and take files that cannot be used for errors. Otherwise such files
            block.
        ask: asks Slurm about plans.
        files: what is known of a sound recipe's files, if somebody has looked already.
    """
    faulty = [fault.path for fault in (*recipe.faults, *site.faults)]
    given = [*recipe.violations, *site.violations]
    sites = [with_python(each) for each in site.variants() or map(_assumed_site, _ASSUMED_NODES)]
    local = local and site.value is not None

    def looks(doubted: Sequence[Violation] = ()) -> list[_Look]:
        recipes = recipe.variants(doubted)
        pairs = [(each, sites[i % len(sites)]) for i, each in enumerate(recipes)]
        pairs += [(recipes[i % len(recipes)], sites[i]) for i in range(len(recipes), len(sites)) if recipes]
        known = files if recipe.value is not None and not doubted else None
        return [_look(*pair, known or look_at_files(pair[0]), local=local, strict=environments) for pair in pairs]

    first = looks()
    errors = independent([each.errors for each in first], faulty)
    plans_from = first
    if errors:
        again = looks(errors)
        known = [*faulty, *(path_of(each.field) for each in errors)]
        errors += independent([each.errors for each in again], known)
        errors = _causes(errors, lambda error: [each.errors for each in looks([error])])
        if not all(each.planned for each in first):
            plans_from = again
    deprecations = (*recipe.deprecations, *site.deprecations)
    others = as_findings(deprecations, "warning") + _common([each.others for each in plans_from], faulty)
    tried = _try(first[0], faulty, local=local) if environments and first else _Tried()
    errors += [each for each in tried.errors if each not in errors]
    errors = [each for each in errors if not _said(each, tried.errors)]
    plans = [each.planned.plan for each in plans_from if each.planned]
    sound = recipe.value is not None and site.value is not None
    answer = SlurmAnswer()
    if plans and site.value is not None and not local:
        answer = ask(plans, sound and not errors)
        errors += independent([answer.problems], [*faulty, *(path_of(each.field) for each in errors)])
        if answer.note:
            others.append(Finding(level="note", field="slurm", text=answer.note))
    fatal = bool(given or not first or not first[0].planned or first[0].unusable or tried.errors)
    planned = None if fatal else first[0].planned
    return Examined(
        with_warnings(planned, deprecations) if planned else None,
        tuple(dict.fromkeys((*given, *errors))),
        (*others, *tried.others),
        (answer.details,) if answer.details else (),
    )


@dataclass(frozen=True)
class _Look:
    """One recipe on one site, planned."""

    recipe: Recipe
    site: Site
    files: RecipeFiles
    errors: list[Violation]
    others: list[Finding]
    planned: Planned | None
    unusable: bool
    """Files that are here cannot be used."""


def _look(recipe: Recipe, site: Site, files: RecipeFiles, *, local: bool, strict: bool) -> _Look:
    problems, findings, planned = try_plan(recipe, site, Path(site.runs) / recipe.name, files, local=local)
    if strict:
        findings = [each for each in findings if each not in as_findings(files.problems, "blocked")]
        problems = [*files.problems, *problems]
    more = [each for each in refusals(findings, "error") if not _said(each, problems)]
    others = [each for each in findings if each.level != "error"]
    errors = _merged([*problems, *more])
    return _Look(recipe, site, files, errors, others, planned, strict and bool(files.problems))


def _merged(errors: Iterable[Violation]) -> list[Violation]:
    """Make one error of all that is wrong with one value of a field."""
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


def _said(violation: Violation, others: Iterable[Violation]) -> bool:
    """Whether somebody who looked closer has said the same."""
    return any(each != violation and each.field == violation.field and each.why in violation.why for each in others)


def _common(findings: Sequence[Sequence[Finding]], faulty: Sequence[Sequence[str]]) -> list[Finding]:
    """Return the findings that all looks have, outside of faulty fields."""
    if not findings:
        return []
    everywhere = set.intersection(*({(each.level, each.field) for each in some} for some in findings))
    found = [each for each in findings[0] if (each.level, each.field) in everywhere]
    return [each for each in found if not is_below(each.field, faulty)]


def _causes(
    errors: list[Violation], found_without: Callable[[Violation], Sequence[Sequence[Violation]]]
) -> list[Violation]:
    """Leave out errors that are consequences of others.

    An error follows from another if it goes away once the other's field has another value, and not the other way round.
    Of two that both do so, the first stays.
    """
    if len(errors) < 2:
        return errors
    stays: dict[Violation, set[tuple[str, str]]] = {}
    for error in errors:
        looks = found_without(error)
        kept = set.intersection(*({(v.field, v.value) for v in some} for some in looks)) if looks else None
        stays[error] = {(v.field, v.value) for v in errors} if kept is None else kept
    causes: list[Violation] = []
    for i, error in enumerate(errors):
        follows = [
            other
            for j, other in enumerate(errors)
            if not _within(error.field, other.field)
            and (error.field, error.value) not in stays[other]
            and (j < i or (other.field, other.value) in stays[error])
        ]
        if not follows:
            causes.append(error)
    return causes


def _within(field: str, other: str) -> bool:
    """Whether a field is another one, or lies below or above it: what is wrong in both has two causes."""
    one, two = path_of(field), path_of(other)
    return one[: len(two)] == two or two[: len(one)] == one


@dataclass(frozen=True)
class _Tried:
    errors: tuple[Violation, ...] = ()
    others: tuple[Finding, ...] = ()


def _try(look: _Look, faulty: Sequence[Sequence[str]], *, local: bool) -> _Tried:
    """Try environments, and render data, as far as their fields are sound."""
    from primeslurm.api.checks import environments

    skip = {".".join(path[:at]) for path in faulty for at in (2, 3) if _spoils(path, at)}
    located = look.files.located
    wrong, notes = environments.environment_problems(located, look.site, local=local, skip=skip)
    if not look.files.blocked:
        unrendered, noted = environments.data_rendering_problems(located, look.site, local=local)
        wrong, notes = [*wrong, *unrendered], [*notes, *noted]
    wrong = independent([wrong], faulty)
    if look.files.blocked:  # this machine has not all that the run needs, perhaps not what its environments need
        return _Tried((), (*as_findings(wrong, "blocked"), *notes))
    return _Tried(tuple(wrong), tuple(notes))


def _spoils(path: Sequence[str], at: int) -> bool:
    """Whether a fault lies in a field that an environment needs to load. `at`: parts of the environment's own path."""
    return len(path) >= at and path[at - 2] == "environments" and (len(path) == at or path[at] in _LOADED)


def _assumed_site(nodes: NodeKind) -> Site:
    control = NodeKind(partition="unknown", cpus=64)
    return Site(schema=1, name="unknown", device="cuda", runs="runs", nodes={"default": nodes, "control": control})
