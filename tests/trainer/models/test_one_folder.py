"""A family is one folder: it is found there, and the model is planned, built and rendered with nothing else."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from renderers import create_renderer
from renderers.base import load_tokenizer

import primeslurm.models
from primeslurm.models.registry import bundled, families, family_of
from primeslurm.orchestrator.rendering.renderer_selection import select_renderer
from primeslurm.recipe import Recipe
from primeslurm.trainer.assembly.build import build
from primeslurm.trainer.distributed.world import World
from scripts.models import tiny_model
from tests.support.planning import make_plan
from tests.support.recipes import recipe_data, site
from tests.trainer.conftest import SEQ_LEN, make_recipe

FOLDER = {
    "__init__": "",
    "spec": """
from primeslurm.models.family import ATTENTION, DENSE, SWIGLU, Family, Parsers, Traits

FAMILY = Family(
    name="aspen",
    model_types={"aspen": DENSE},
    traits=Traits(qk_norm=True),
    parsers={"aspen": Parsers("hermes", "qwen3")},
    renderer="primeslurm.models.aspen.renderer:AspenRenderer",
    lora_targets=ATTENTION | SWIGLU,
)
""",
    "model": """
from primeslurm.models.qwen3.model import spec
from transformers import AutoConfig, Qwen3Config

class AspenConfig(Qwen3Config):
    model_type = "aspen"

AutoConfig.register("aspen", AspenConfig)
""",
    "renderer": """
from typing import Literal

from renderers.configs import BaseRendererConfig, Qwen3RendererConfig
from renderers.qwen3 import Qwen3Renderer

class AspenConfig(BaseRendererConfig):
    name: Literal["custom"] = "custom"

class AspenRenderer:
    config_class = AspenConfig

    def __new__(cls, tokenizer, config):
        return Qwen3Renderer(tokenizer, Qwen3RendererConfig())
""",
}


@pytest.fixture
def aspen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A family's folder outside the repository, and a model of it. Returns the model's directory."""
    packages, model = tmp_path / "packages", tmp_path / "aspen-1b"
    (packages / "aspen").mkdir(parents=True)
    for name, source in FOLDER.items():
        (packages / "aspen" / f"{name}.py").write_text(source)
    monkeypatch.setattr(primeslurm.models, "__path__", [*primeslurm.models.__path__, str(packages)])
    tiny_model.write_model(model, family="qwen3")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"model_type": "aspen"}))
    for cache in (bundled, families):
        cache.cache_clear()
    yield model
    for cache in (bundled, families):
        cache.cache_clear()
    for name in [name for name in sys.modules if name.startswith("primeslurm.models.aspen")]:
        del sys.modules[name]


def test_a_made_up_family_in_one_folder_is_planned_built_and_rendered(
    aspen: Path, world: World, tmp_path: Path
) -> None:
    assert family_of("aspen") in bundled()

    recipe = Recipe.model_validate(recipe_data(model={"path": str(aspen), "impl": "custom"}, trainer={"fp8": False}))
    plan = make_plan(recipe, site(), tmp_path / "run").plan
    assert not [finding for finding in plan.findings if "aspen" in finding.text]
    assert plan.process("engine-r0-0").argv

    model = build(make_recipe(aspen), world)
    config = json.loads((aspen / "config.json").read_text())
    (aspen / "config.json").write_text(json.dumps(config | {"model_type": "qwen3"}))
    reference = build(make_recipe(aspen), world)
    (aspen / "config.json").write_text(json.dumps(config))
    tokens, positions = torch.arange(SEQ_LEN)[None] % 100, torch.arange(SEQ_LEN)[None]
    with torch.no_grad():
        logits, expected = (policy.logits(tokens, positions)[0] for policy in (model, reference))
        assert torch.equal(logits, expected)

    rendering = select_renderer(str(aspen))
    tokenizer, messages = load_tokenizer(str(aspen)), [{"role": "user", "content": "Hi."}]
    rendered = create_renderer(tokenizer, rendering.config).render_ids(messages, add_generation_prompt=True)
    assert rendering.config.import_path == "primeslurm.models.aspen.renderer.AspenRenderer" and not rendering.no_tools
    assert rendered == tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
