"""Speculative decoding: draft layers in a model's config, and the files of a draft model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from primeslurm.models.hf_config import shape_of
from primeslurm.plan.checks.files import absent_engine_models, with_absolute_paths
from primeslurm.recipe import Recipe
from tests.support.recipes import recipe_data

CONFIG = {
    **{"model_type": "x", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"vocab_size": 128, "intermediate_size": 128},
}


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, None),
        ({"num_nextn_predict_layers": None}, None),
        ({"num_nextn_predict_layers": 0}, 0),
        ({"num_nextn_predict_layers": 1}, 1),
        ({"text_config": CONFIG | {"mtp_num_hidden_layers": 2}}, 2),
    ],
)
def test_draft_layers_are_read_from_the_config(changes: dict[str, Any], layers: int | None) -> None:
    assert shape_of(CONFIG | changes).draft_layers == layers


def test_draft_model_must_exist_when_the_job_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    drafts = {"method": "eagle3", "model": "./drafts", "num_tokens": 3}
    recipe = Recipe.model_validate(recipe_data(inference={"speculative": drafts}))
    (finding,) = absent_engine_models(recipe)
    assert (finding.level, finding.field, finding.value) == ("blocked", "inference.speculative.model", "./drafts")
    (tmp_path / "drafts").mkdir()
    assert not list(absent_engine_models(recipe))
    located = with_absolute_paths(recipe).inference.speculative
    assert located is not None and located.model == str(tmp_path.resolve() / "drafts")
