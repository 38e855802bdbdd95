"""Engines that serve adapters by name, and random adapters for them."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from primeslurm.plan.commands.command import Command
from primeslurm.recipe import Recipe
from primeslurm.tinker.backbone import Adapter, Backbone
from primeslurm.tinker.requests import LoraConfig
from primeslurm.wire.names import ADAPTERS
from tests.support.engine_commands import engine_command


def adapter_engine(
    model: Path, adapters: Path, loras: int = 2, rank: int = 16, seq_len: int = 512, kv_cache_bytes: int = 2**26
) -> Command:
    """Return the command of a CPU engine whose requests may name the adapters in a directory."""
    recipe = Recipe.model_validate(
        {
            "name": "adapters",
            "task": "serve",
            "seq_len": seq_len,
            "model": {"path": str(model), "dtype": "float32"},
            "inference": {"kv_cache_bytes": kv_cache_bytes},
        }
    )
    command = engine_command(recipe, "cpu", "engine", sys.executable)
    options = ("--enable-lora", "--max-loras", str(loras), "--max-lora-rank", str(rank))
    return command._replace(argv=(*command.argv, *options), env={**command.env, ADAPTERS: str(adapters)})


def random_adapter(backbone: Backbone, seed: int, rank: int = 8, std: float = 0.2) -> Adapter:
    """Return an adapter that changes what the model predicts."""
    adapter = backbone.adapter(LoraConfig(rank=rank, seed=seed))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in adapter.parameters.values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
    return adapter
