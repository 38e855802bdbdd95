"""DeepEP as the dispatcher of tokens, as far as machines without it can tell."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from transformers import AutoConfig

from primeslurm.trainer import models
from primeslurm.trainer.assembly.build import build
from primeslurm.trainer.assembly.draft import ModelDraft
from primeslurm.trainer.distributed.deepep import convert
from primeslurm.trainer.distributed.world import World
from tests.trainer.conftest import SEQ_LEN, make_recipe


def parallelism(**settings: Any) -> dict[str, Any]:
    return {"parallelism": {"ep_backend": "deepep"} | settings}


class FakeDeepEp(ModuleType):
    """Has the one name by which version 2 is known."""

    ElasticBuffer = object


def test_without_the_package_the_trainer_says_what_is_missing(moe_model: Path, world: World) -> None:
    with pytest.raises(ValueError, match=r"ep_backend = deepep: .* package deep_ep, 2\.0 or newer"):
        build(make_recipe(moe_model, trainer=parallelism()), world)


def test_every_layer_dispatches_with_it(moe_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, DeepEPTokenDispatcher

    monkeypatch.setitem(sys.modules, "deep_ep", FakeDeepEp("deep_ep"))
    spec = models.spec(AutoConfig.from_pretrained(moe_model), SEQ_LEN, "flex")
    config = spec.model
    before = list(config.traverse(AllToAllTokenDispatcher.Config))
    convert(ModelDraft(make_recipe(moe_model, trainer=parallelism(deepep_num_sms=24)), spec))
    after = [found for _, found, _, _ in config.traverse(DeepEPTokenDispatcher.Config)]
    assert [(c.num_experts, c.top_k) for c in after] == [(c.num_experts, c.top_k) for _, c, _, _ in before]
    assert after and not list(config.traverse(AllToAllTokenDispatcher.Config))

    from torchtitan.distributed.deepep import deepep

    assert deepep._resolve_dispatch_num_sms(None, 8, 2) == 24
