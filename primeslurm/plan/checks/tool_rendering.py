"""Whether a model can be shown the tools of an environment, as far as its type and the recipe tell.

What only the environment's code or the model's chat template tells is asked of them in `checks.environments`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from primeslurm.base.errors import Violation
from primeslurm.models.renderers import AUTO, tools_unsupported_reason
from primeslurm.plan.model import Finding
from primeslurm.recipe import Recipe
from primeslurm.recipe.rules.sandboxes import ENV_KEY, offers_tools
from primeslurm.recipe.sections.orchestrator import AnyEnvironment

OWN_HARNESS = {"harbor-local": "bash", "tool-use": "shell"}
"""Harnesses of bundled tasksets that offer tools, where the recipe names none."""
_FIX = "a harness without tools, such as `harness: {id: chat}`, or another model or model.renderer"


def unrenderable(field: str, harness: str, why: str) -> Violation:
    """Say that a harness offers tools to a model that cannot be shown them.

    Args:
        field: where the recipe says the harness.
        harness: its name.
        why: tools cannot be rendered.
    """
    return Violation(field, harness, f"it offers the model tools, but {why}", _FIX)


def tool_rendering(recipe: Recipe, model_type: str | None) -> list[Finding]:
    """Find environments whose harness is known to offer tools, where the model's family has no way to show them.

    Args:
        recipe: what is asked for.
        model_type: of the model's config, where it is known.
    """
    model = recipe.model
    why = tools_unsupported_reason(model_type, model.path, model.renderer, model.renderer_options)
    if not why or model.vlm is not None or (model_type is None and model.renderer == AUTO):
        return []
    sampled = {"environments": recipe.trained_environments, "evaluation.environments": recipe.evaluation_environments}
    found = [
        unrenderable(f"{field}.{index}.{part}", harness, why)
        for field, environments in sampled.items()
        for index, environment in enumerate(environments)
        for part, harness in _harnesses(environment)
        if offers_tools(harness)
    ]
    return [Finding(level="error", field=each.field, value=each.value, text=each.why, fix=each.fix) for each in found]


def _harnesses(environment: AnyEnvironment) -> Iterator[tuple[str, str]]:
    """The harnesses that an environment is known to have: the field that says it, or may, and its name."""
    raw = environment.args.get(ENV_KEY)
    roles = raw.items() if isinstance(raw, Mapping) else ()
    said = {role: options.get("harness") for role, options in roles if isinstance(options, Mapping)}
    own = {role: str(harness.get("id")) for role, harness in said.items() if isinstance(harness, Mapping)}
    yield from ((f"args.{ENV_KEY}.{role}.harness", name) for role, name in own.items())
    if environment.harness is not None:
        yield "harness", environment.harness.id
    elif not own and environment.id in OWN_HARNESS:
        yield "harness", OWN_HARNESS[environment.id]
