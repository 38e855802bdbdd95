"""Recipes and sites as plain data, which tests modify."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from primeslurm.recipe import Site
from primeslurm.recipe.reading.recipe_files import merge


def model_dir(root: Path, **config: Any) -> Path:
    """Make a directory that the checks accept as a model: config.json and one safetensors file without tensors."""
    directory = root / "model"
    directory.mkdir(parents=True, exist_ok=True)
    content = {"model_type": "qwen3_moe", "max_position_embeddings": 4096, **config}
    (directory / "config.json").write_text(json.dumps(content))
    (directory / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return directory


def recipe_data(**changes: Any) -> dict[str, Any]:
    """Return a small valid RL recipe, with `changes` merged in."""
    base = {
        "schema": 1,
        "name": "test-run",
        "max_steps": 4,
        "seq_len": 128,
        "model": {"path": "/models/tiny", "dtype": "float32"},
        "environments": [{"id": "reverse-text"}],
        "orchestrator": {"batch_size": 16, "group_size": 4},
        "deployment": {"train": {"nodes": 1}, "inference": {"type": "multi_node"}},
    }
    return merge(base, changes)


def write_recipe(path: Path, **changes: Any) -> Path:
    """Write `recipe_data` as YAML."""
    path.write_text(yaml.safe_dump(recipe_data(**changes)))
    return path


def site(**changes: Any) -> Site:
    """Return a site with CPU control nodes and 8-GPU nodes."""
    base = {
        "schema": 1,
        "name": "test-site",
        "device": "cuda",
        "runs": "/shared/runs",
        "nodes": {
            "control": {"partition": "cpu", "cpus": 8},
            "default": {"partition": "gpu", "gpus": 8, "cpus": 96},
        },
    }
    return Site.model_validate(merge(base, changes))
