"""Check that a model can be shown the tools of an environment, as far as the model type and the recipe determine it.

`checks.environments` asks the environment's code and the model's chat template.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from primeslurm.base.errors import Violation
from primeslurm.models.renderers import AUTO, tools_unsupported_reason
from primeslurm.plan.model import Finding, as_findings
from primeslurm.recipe import Recipe
from primeslurm.recipe.rules.sandboxes import ENV_KEY, offers_tools
from primeslurm.recipe.sections.orchestrator import AnyEnvironment

# Harnesses with tools that bundled tasksets use if the recipe names none
OWN_HARNESS = {"harbor-local": "bash", "tool-use": "shell"}
_FIX = "a harness without tools, such as `harness: {id: chat}`, or another model or model.renderer"


def unrenderable(field: str, harness: str, why: str) -> Violation:
    """Return the problem of a harness that offers tools to a model which cannot be shown them."""
    return Violation(field, harness, f"it offers the model tools, but {why}", _FIX)


def tool_rendering(recipe: Recipe, model_type: str | None) -> list[Finding]:
    """Return findings for environments whose harness offers tools, if the model's family cannot render them."""
    model = recipe.model
    why = tools_unsupported_reason(model_type, model.path, model.renderer, model.renderer_options)
    if not why or model.vlm is not None or (model_type is None and model.renderer == AUTO):
        return []
    sampled = {"environments": recipe.trained_environments, "evaluation.environments": recipe.evaluation_environments}
    findings = [
        unrenderable(f"{field}.{index}.{part}", harness, why)
        for field, environments in sampled.items()
        for index, environment in enumerate(environments)
        for part, harness in _harnesses(environment)
        if offers_tools(harness)
    ]
    return as_findings(findings, "error")


def _harnesses(environment: AnyEnvironment) -> Iterator[tuple[str, str]]:
    """Yield the known harnesses of an environment: the field that sets each one, and its name."""
    raw = environment.args.get(ENV_KEY)
    roles = raw.items() if isinstance(raw, Mapping) else ()
    by_role = {role: options.get("harness") for role, options in roles if isinstance(options, Mapping)}
    names = {role: str(harness.get("id")) for role, harness in by_role.items() if isinstance(harness, Mapping)}
    yield from ((f"args.{ENV_KEY}.{role}.harness", name) for role, name in names.items())
    if environment.harness is not None:
        yield "harness", environment.harness.id
    elif not names and environment.id in OWN_HARNESS:
        yield "harness", OWN_HARNESS[environment.id]
