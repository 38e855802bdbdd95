"""Findings of each level in check, plan, render and submit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from primeslurm.plan.model import Plan
from tests.support.cli import primeslurm
from tests.support.recipes import recipe_data, site

GLM = {"model": {"path": "zai-org/GLM-5.1", "dtype": "bfloat16"}}
FITS = {"inference": {"quantization": "fp8", "expert_parallel": True}, "deployment": {"train": {"nodes": 24}}}
FITS |= {"trainer": {"parallelism": {"ep": 8, "activation_checkpointing": "full"}, "memory": {"lm_head_chunk": 2048}}}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a site of H200 nodes, and an empty Hugging Face cache."""
    where = site(runs="runs", nodes={"default": {"gres": "gpu:h200"}})
    (tmp_path / "site.yaml").write_text(yaml.safe_dump(where.model_dump(mode="json", by_alias=True)))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path


def write(place: Path, *parts: dict[str, Any]) -> None:
    data = recipe_data(**GLM)
    for part in parts:
        data |= {key: {**data.get(key, {}), **value} for key, value in part.items()}
    (place / "r.yaml").write_text(yaml.safe_dump(data))


def test_missing_catalogued_model_is_blocked_but_valid(place: Path) -> None:
    write(place, FITS)
    result = primeslurm("check", "r.yaml", cwd=place)
    assert (result.code, result.out) == (0, ""), result.err
    assert (
        "blocked: model.path = zai-org/GLM-5.1: is not in the Hugging Face cache on this machine (`hf download"
        in result.err
    )
    verdict = "test-run: recipe is valid; not submittable from this machine (1 blocker: model.path is not in the "
    assert verdict in result.err
    assert result.err.endswith(". 26 nodes: 24 train, 1 inference, 1 control.\n")


def test_submit_refuses_blockers_and_dry_run_shows_them(place: Path) -> None:
    write(place, FITS)
    shown = primeslurm("submit", "r.yaml", "--dry-run", "--local", cwd=place)
    assert shown.code == 2  # this machine has too few GPUs, which is an error and no blocker
    shown = primeslurm("plan", "r.yaml", cwd=place)
    assert shown.code == 0
    refused = primeslurm("submit", "r.yaml", cwd=place)
    assert refused.code == 2
    assert "model.path = zai-org/GLM-5.1: is not in the Hugging Face cache on this machine (`hf download" in refused.err
    assert not (place / "runs").exists()


def test_served_model_needs_no_trainer(place: Path) -> None:
    write(place, FITS)
    data = yaml.safe_load((place / "r.yaml").read_text()) | {"task": "serve", "environments": []}
    (place / "r.yaml").write_text(yaml.safe_dump(data))
    result = primeslurm("check", "r.yaml", "--json", cwd=place)
    assert result.code == 0
    assert [f["value"] for f in json.loads(result.out) if f["level"] == "blocked"] == ["zai-org/GLM-5.1"]


def test_unknown_model_shape_and_groups_of_one_are_notes(place: Path) -> None:
    write(place, FITS, {"model": {"path": "some/model"}, "orchestrator": {"group_size": 1}})
    result = primeslurm("check", "r.yaml", cwd=place)
    assert "note: model.path = some/model: memory is not estimated" in result.err
    assert "warning: orchestrator.group_size = 1: advantages: grpo compares the rollouts of a group" in result.err
    write(place, FITS, {"model": {"path": "zai-org/GLM-5"}})
    assert "not estimated" not in primeslurm("check", "r.yaml", cwd=place).err


def test_contradiction_fails_check_and_render_and_is_shown_by_plan(place: Path) -> None:
    even = {"deployment": {"train": {"nodes": 32}}}  # adapters of experts are divisible, too
    write(place, FITS, even, {"weights": {"transport": "nccl"}, "trainer": {"lora": {"save_adapter": True}}})
    checked = primeslurm("check", "r.yaml", cwd=place)
    assert checked.code == 2
    assert "error: trainer.lora.save_adapter = true: save_adapter needs weight updates through files" in checked.err
    assert "error: trainer.lora: " in checked.err, "engines that quantise would sample from another policy"
    assert "test-run: 2 errors, 1 blocker" in checked.err
    as_json = primeslurm("check", "r.yaml", "--json", cwd=place)
    assert as_json.code == 2
    assert "error" in {finding["level"] for finding in json.loads(as_json.out)}
    assert primeslurm("render", "r.yaml", cwd=place).code == 2
    assert primeslurm("plan", "r.yaml", cwd=place).code == 0


def test_plan_prints_memory_and_amounts_and_keeps_them_in_the_plan(place: Path) -> None:
    write(place, FITS)
    shown = primeslurm("plan", "r.yaml", "--verbose", cwd=place)
    for text in ("memory of one GPU", "KV tokens", "GPU-hours", "parameters: 743.91 billion", "model: catalog: "):
        assert text in shown.out
    estimate = Plan.model_validate_json(primeslurm("plan", "r.yaml", "--json", cwd=place).out).estimate
    assert estimate is not None
    assert {role.role for role in estimate.roles} == {"train", "inference"}


def test_missing_training_data_blocks(place: Path) -> None:
    write(place, {"model": {"path": "Qwen/Qwen3-8B"}})
    data = yaml.safe_load((place / "r.yaml").read_text()) | {"task": "sft", "environments": []}
    data["sft"] = {"data": {"type": "jsonl", "path": "none.jsonl"}}
    (place / "r.yaml").write_text(yaml.safe_dump(data))
    result = primeslurm("check", "r.yaml", cwd=place)
    assert result.code == 0
    assert f"blocked: sft.data.path = {place}/none.jsonl: does not exist" in result.err
    (place / "none.jsonl").write_text('{"text": "x"}\n')
    result = primeslurm("check", "r.yaml", cwd=place)
    assert (result.code, result.out) == (2, "")
    assert f"sft.data.path = {place}/none.jsonl: line 1: has text, but neither `messages` nor" in result.err
