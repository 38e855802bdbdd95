"""A checkpoint that lacks something, or a tokenizer that is larger than the embedding, is refused by `check`."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from primeslurm.base.model_files import INDEX
from primeslurm.models.hf_config import shape_of
from primeslurm.plan.checks.files import engine_checkpoint_problems, model_files
from primeslurm.recipe import Recipe
from tests.support.recipes import recipe_data

LAYERS, EXPERTS, HIDDEN, VOCABULARY = 4, 3, 8, 100
CONFIG: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "num_attention_heads": 2,
    "num_hidden_layers": LAYERS,
    "vocab_size": VOCABULARY,
    "intermediate_size": 16,
    "tie_word_embeddings": False,
}
QWEN = CONFIG | {"model_type": "qwen3"}
GLM = CONFIG | {
    "model_type": "glm4_moe",
    "first_k_dense_replace": 1,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 4,
    "n_shared_experts": 1,
    "num_nextn_predict_layers": 1,
}
ATTENTION = [f"self_attn.{name}_proj.weight" for name in "qkvo"]
NORMS = ["input_layernorm.weight", "post_attention_layernorm.weight"]
MLP = [f"{name}_proj.weight" for name in ("gate", "up", "down")]
AROUND = {
    "model.embed_tokens.weight": [VOCABULARY, HIDDEN],
    "model.norm.weight": [HIDDEN],
    "lm_head.weight": [VOCABULARY, HIDDEN],
}


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"quantization_config": FP8}, ""),
        ({}, "is not stored in FP8 blocks of 128 x 128"),
        ({"quantization_config": FP8 | {"scale_fmt": "ue8m0"}}, "its scales are powers of two"),
        ({"quantization_config": FP8, "num_hidden_layers": 5}, "has other layers than m"),
        ({"num_hidden_layers": "many"}, "has no readable config.json"),
    ],
)
def test_own_checkpoint_of_engines_is_the_policy_in_fp8(tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN | changes))
    inference = {"quantization": "fp8", "model": str(tmp_path)}
    recipe = Recipe.model_validate(recipe_data(model={"path": "m"}, inference=inference))
    problems = engine_checkpoint_problems(recipe, shape_of(QWEN))
    assert [problem.field for problem in problems] == ["inference.model"] * bool(why)
    assert not why or problems[0].why.startswith(why)


def dense(number: int) -> list[str]:
    return [f"model.layers.{number}.{name}" for name in (*ATTENTION, *NORMS, *(f"mlp.{part}" for part in MLP))]


def sparse(number: int) -> list[str]:
    experts = [f"mlp.experts.{expert}.{part}" for expert in range(EXPERTS) for part in MLP]
    beside = [f"mlp.shared_experts.{part}" for part in MLP] + ["mlp.gate.weight", "mlp.gate.e_score_correction_bias"]
    return [f"model.layers.{number}.{name}" for name in (*ATTENTION, *NORMS, *experts, *beside)]


def of_qwen() -> dict[str, list[int]]:
    return AROUND | {name: [HIDDEN, HIDDEN] for number in range(LAYERS) for name in dense(number)}


def of_glm() -> dict[str, list[int]]:
    numbers = range(1, LAYERS + 1)  # the last layer is a draft layer
    layers = [*dense(0), *(name for number in numbers for name in sparse(number))]
    return AROUND | {name: [HIDDEN, HIDDEN] for name in layers}


def write_file(path: Path, shapes: dict[str, list[int]]) -> None:
    """Write a safetensors file whose tensors are holes of a sparse file."""
    end, header = 0, {}
    for name, shape in shapes.items():
        size = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def problems(
    directory: Path, config: dict[str, Any], shapes: dict[str, list[int]], without: Iterable[str] = (), **files: Any
) -> list[str]:
    (directory / "config.json").write_text(json.dumps(config))
    write_file(directory / "model.safetensors", {name: shape for name, shape in shapes.items() if name not in without})
    for name, value in files.items():
        (directory / f"{name}.json").write_text(json.dumps(value))
    return said(directory)


def said(directory: Path) -> list[str]:
    recipe = Recipe.model_validate(recipe_data(model={"path": str(directory)}))
    found = model_files(recipe).problems
    assert {each.field for each in found} <= {"model.path", "seq_len"}
    return [f"{each.why} ({each.fix})" for each in found]


def test_complete_checkpoint_has_no_problems(tmp_path: Path) -> None:
    assert problems(tmp_path, QWEN, of_qwen()) == []
    assert problems(tmp_path, GLM, of_glm()) == []
    tied = {**QWEN, "tie_word_embeddings": True}
    assert problems(tmp_path, tied, of_qwen(), ["lm_head.weight"]) == []
    unknown = CONFIG | {"model_type": "unheard_of", "tie_word_embeddings": None}
    assert problems(tmp_path, unknown, of_qwen(), ["lm_head.weight", "model.layers.2.input_layernorm.weight"]) == []


@pytest.mark.parametrize(
    ("config", "missing", "text"),
    [
        (QWEN, ["lm_head.weight"], "its checkpoint has no head (lm_head.weight), and its config does not tie it"),
        ({**QWEN, "tie_word_embeddings": None}, ["lm_head.weight"], "its checkpoint has no head"),
        ({**QWEN, "model_type": "unheard_of"}, ["lm_head.weight"], "its checkpoint has no head"),
        (QWEN, ["model.embed_tokens.weight"], "its checkpoint has no embedding (model.embed_tokens.weight)"),
    ],
)  # fmt: skip
def test_missing_tensors_are_named(config: dict[str, Any], missing: list[str], text: str, tmp_path: Path) -> None:
    shapes = of_glm() if config["model_type"] == "glm4_moe" else of_qwen()
    (found,) = problems(tmp_path, config, shapes, missing)
    assert text in found


def test_embedding_rows_must_match_vocab_size(tmp_path: Path) -> None:
    shapes = {**of_qwen(), "model.embed_tokens.weight": [96, HIDDEN]}
    (found,) = problems(tmp_path, QWEN, shapes)
    assert "whose vocab_size is 100: model.embed_tokens.weight has 96 rows" in found


def test_index_with_a_missing_file_is_refused(tmp_path: Path) -> None:
    assert problems(tmp_path, QWEN, of_qwen()) == []
    weights = dict.fromkeys(of_qwen(), "model.safetensors") | {"model.norm.weight": "model-2.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weights}))
    (found,) = said(tmp_path)
    assert f"its weights cannot be read: {INDEX} names missing files: model-2.safetensors" in found
    (tmp_path / INDEX).write_text("{")
    assert f"{INDEX} is damaged" in said(tmp_path)[0]


@pytest.mark.parametrize("size", [0, 4, 400, -1])
def test_truncated_file_is_refused(size: int, tmp_path: Path) -> None:
    problems(tmp_path, QWEN, of_qwen())
    file = tmp_path / "model.safetensors"
    with file.open("rb+") as opened:
        opened.truncate(size if size >= 0 else file.stat().st_size - 1)
    (found,) = said(tmp_path)
    assert "model.safetensors: " in found and "truncated" in found


def tokens(count: int, **added: int) -> dict[str, Any]:
    entries = [{"id": number, "content": token} for token, number in added.items()]
    return {"model": {"vocab": {f"t{i}": i for i in range(count)}}, "added_tokens": entries}


def test_a_tokenizer_may_have_as_many_ids_as_the_embedding_has_rows(tmp_path: Path) -> None:
    assert problems(tmp_path, QWEN, of_qwen(), tokenizer=tokens(VOCABULARY)) == []
    assert problems(tmp_path, QWEN, of_qwen(), tokenizer=tokens(90, end=99)) == []


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer": tokens(VOCABULARY, new=100)},
        {"tokenizer": {"model": {"vocab": [[f"t{i}", -1.0] for i in range(100)] + [["new", 0.0]]}}},
        {"tokenizer": tokens(90), "added_tokens": {"new": 100}},
        {"tokenizer": tokens(90), "tokenizer_config": {"added_tokens_decoder": {"100": {"content": "new"}}}},
    ],
)
def test_token_beyond_the_embedding_is_refused_with_both_numbers(files: dict[str, Any], tmp_path: Path) -> None:
    (found,) = problems(tmp_path, QWEN, of_qwen(), **files)
    assert found.startswith("its tokenizer has ids up to 100, and its embedding has 100 rows: 'new' is 100 (resize")


def test_image_token_of_a_text_model_needs_no_embedding_row(tmp_path: Path) -> None:
    files = {"tokenizer": tokens(VOCABULARY, **{"<image_soft_token>": 100})}
    assert problems(tmp_path, QWEN, of_qwen(), **files) == []


def test_all_problems_are_reported_in_one_pass(tmp_path: Path) -> None:
    missing = ["lm_head.weight"]
    config = {**QWEN, "max_position_embeddings": 16}
    found = problems(tmp_path, config, of_qwen(), missing, tokenizer=tokens(120))
    assert len(found) == 3 and "'t100' is 100, 't101' is 101" in found[1] and "and 15 more" in found[1]
