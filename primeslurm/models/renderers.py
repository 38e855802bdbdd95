"""Names of renderers, which turn messages into token ids, and the renderers of each model family."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection

from primeslurm.models.family import RendererTraits
from primeslurm.models.registry import families, family_of

# Selects the family's renderer if it renders as the model's chat template does, else the template
AUTO = "auto"
# The model's own chat template. It supports no tools, and renders the whole conversation in every turn.
DEFAULT = "default"
# A copy: the package `renderers` (0.1.12) is not installed where recipes are checked.
RENDERERS = (
    "deepseek-r1", "deepseek-v3", "deepseek-v4", "default", "gemma4", "glm-4.5", "glm-5", "glm-5.1", "glm-5.3",
    "gpt-oss", "hy3", "inkling", "kimi-k2", "kimi-k2.5", "laguna-m.1", "laguna-s-2.1", "laguna-xs-2.1",
    "laguna-xs.2", "llama-3", "minimax-m2", "nemotron-3", "nemotron-3-ultra", "nemotron-3.5", "prime-qwen3",
    "qwen3", "qwen3-vl", "qwen3.5", "qwen3.6", "qwen3.8",
)  # fmt: skip


def is_import_path(name: str) -> bool:
    """Return whether a name is a custom renderer, `package.module:Class`."""
    return re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", name) is not None


def nearest_renderer(name: str) -> str:
    """Return the existing name that is most similar to a misspelled one."""
    return difflib.get_close_matches(name.lower(), (AUTO, *RENDERERS), n=1, cutoff=0)[0]


def renderers_of(model_type: str, model: str) -> tuple[str, ...]:
    """Return the renderers of a model's family, the most likely first. `model` is its path or hub id."""
    family = family_of(model_type)
    if family is None or family.renderer is None:
        return ()
    name = model.rstrip("/").rpartition("/")[2].lower()
    matches = sorted(
        (match.end() - match.start(), renderer)
        for pattern, renderer in family.renderers.items()
        if (match := re.search(pattern, name))
    )
    # The longest match is the most specific.
    by_name = [renderer for _, renderer in reversed(matches)]
    return tuple(dict.fromkeys([*by_name, family.renderer, *family.renderers.values()]))


def renderer_traits(name: str) -> RendererTraits:
    declared = (family.renderer_traits[name] for family in families() if name in family.renderer_traits)
    return next(declared, RendererTraits())


def tools_unsupported_reason(model_type: str | None, model: str, renderer: str, options: Collection[str]) -> str:
    """Return why a model cannot be offered tools, or "" if its type and the recipe do not rule it out.

    `renderer` and `options` are `model.renderer` and the names in `model.renderer_options` of the recipe.
    """
    if renderer == DEFAULT and "tool_parser" not in options:
        return f"tools cannot be rendered by model.renderer: {DEFAULT} without a tool_parser in model.renderer_options"
    # A renderer that the recipe names is trusted.
    if renderer != AUTO or renderers_of(model_type or "", model):
        return ""
    names = ", ".join(family.name for family in families() if family.renderer)
    why = f"there is no renderer for model type {model_type} ({names} have one)"
    return f"tools cannot be rendered for {model}: {why}; name one that fits in model.renderer"
