"""The ways from messages to tokens, by the names that the package `renderers` gives them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection

from primeslurm.models.family import RendererTraits
from primeslurm.models.registry import families, family_of

AUTO = "auto"
"""That of the model's family, if it does what the model's own chat template does."""
DEFAULT = "default"
"""The model's own chat template. It knows no tools, and renders the whole conversation each turn."""
RENDERERS = (
    "deepseek-r1",
    "deepseek-v3",
    "deepseek-v4",
    DEFAULT,
    "gemma4",
    "glm-4.5",
    "glm-5",
    "glm-5.1",
    "glm-5.3",
    "gpt-oss",
    "hy3",
    "inkling",
    "kimi-k2",
    "kimi-k2.5",
    "laguna-m.1",
    "laguna-s-2.1",
    "laguna-xs-2.1",
    "laguna-xs.2",
    "llama-3",
    "minimax-m2",
    "nemotron-3",
    "nemotron-3-ultra",
    "nemotron-3.5",
    "prime-qwen3",
    "qwen3",
    "qwen3-vl",
    "qwen3.5",
    "qwen3.6",
    "qwen3.8",
)
"""All of `renderers` 0.1.12; it is not installed where recipes are checked."""


def is_import_path(name: str) -> bool:
    """Tell whether a name means a renderer of one's own, as `package.module:Class`."""
    return re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", name) is not None


def nearest_renderer(name: str) -> str:
    """Find the name that is most like one that does not exist."""
    return difflib.get_close_matches(name.lower(), (AUTO, *RENDERERS), n=1, cutoff=0)[0]


def renderers_of(model_type: str, model: str) -> tuple[str, ...]:
    """List the renderers of a model's family, the likeliest first.

    Args:
        model_type: of config.json.
        model: its path or hub id. Of two patterns in its last part the longer one holds.
    """
    family = family_of(model_type)
    if family is None or family.renderer is None:
        return ()
    name = model.rstrip("/").rpartition("/")[2].lower()
    named = sorted(
        (match.end() - match.start(), renderer)
        for pattern, renderer in family.renderers.items()
        if (match := re.search(pattern, name))
    )
    first = [renderer for _, renderer in reversed(named)]
    return tuple(dict.fromkeys([*first, family.renderer, *family.renderers.values()]))


def renderer_traits(name: str) -> RendererTraits:
    """Find what is to be known of a renderer, by its name or import path; families say it."""
    found = (family.renderer_traits[name] for family in families() if name in family.renderer_traits)
    return next(found, RendererTraits())


def tools_unsupported_reason(model_type: str | None, model: str, asked: str, options: Collection[str]) -> str:
    """Say why a model cannot be offered tools, as far as its type and the recipe tell; empty if it may be able to.

    Args:
        model_type: of config.json.
        model: its path or hub id.
        asked: `model.renderer` of the recipe.
        options: names of `model.renderer_options`.
    """
    if asked == DEFAULT and "tool_parser" not in options:
        return f"tools cannot be rendered by model.renderer: {DEFAULT} without a tool_parser in model.renderer_options"
    if asked != AUTO or renderers_of(model_type or "", model):
        return ""
    able = ", ".join(families_with_renderers())
    why = f"there is no renderer for model type {model_type} ({able} have one)"
    return f"tools cannot be rendered for {model}: {why}; name one that fits in model.renderer"


def families_with_renderers() -> tuple[str, ...]:
    """List the families that have a renderer."""
    return tuple(family.name for family in families() if family.renderer)
