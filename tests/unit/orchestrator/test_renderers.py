"""The way from messages to tokens is that of the model's family."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from renderers import config_from_name
from renderers.configs import Qwen3VLRendererConfig, Qwen35RendererConfig

from primeslurm.families import Family, bundled, model_types
from primeslurm.orchestrator.rollouts import token_client

VISION = {
    "qwen3_5": Qwen35RendererConfig,
    "qwen3_5_moe": Qwen35RendererConfig,
    "qwen3_vl": Qwen3VLRendererConfig,
    "qwen3_vl_moe": Qwen3VLRendererConfig,
}


def vision_renderer(directory: Path, model_type: str) -> object:
    """How messages with images are rendered for a model of this type."""
    (directory / "config.json").write_text(json.dumps({"model_type": model_type}))
    return token_client._vision_renderer(directory)


@pytest.mark.parametrize("family", [f for f in bundled() if f.renderer], ids=lambda family: family.name)
def test_renderers_has_what_families_name(family: Family) -> None:
    config = config_from_name(family.renderer)
    assert config is not None and config.name == family.renderer


@pytest.mark.parametrize("model_type", sorted(VISION))
def test_messages_with_images_are_rendered_as_the_family_says(model_type: str, tmp_path: Path) -> None:
    assert isinstance(vision_renderer(tmp_path, model_type), VISION[model_type])


@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_5_text", "kimi_k25", "unheard_of"])
def test_models_that_are_not_trained_on_images_are_shown_none(model_type: str, tmp_path: Path) -> None:
    names = ", ".join(name for name, able in model_types().items() if able.images)
    assert set(names.split(", ")) == set(VISION)
    with pytest.raises(ValueError, match=f"rendered for {names}, not for {model_type}"):
        vision_renderer(tmp_path, model_type)
