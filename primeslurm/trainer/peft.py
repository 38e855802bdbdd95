"""Adapters in the format of Hugging Face's PEFT, which transformers and vLLM load.

Tensors are `base_model.model.<module>.lora_A.weight` [rank, in] and `lora_B.weight` [out, rank]; experts are named one
by one, as in the model's checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from primeslurm.recipe.training import Lora
from primeslurm.trainer import lora as adapters
from primeslurm.trainer.parallel import Policy


def tensors(policy: Policy, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The policy's adapters under PEFT's names, on CPU, on every rank. A collective."""
    return {name: tensor.to(dtype).cpu().contiguous() for name, tensor in _named(policy)}


def write(directory: Path, named: dict[str, torch.Tensor], lora: Lora, base: Path) -> None:
    """Write an adapter directory. Raises OSError."""
    directory.mkdir()
    save_file(named, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({name.split(".")[-3] for name in named}),
        "inference_mode": True,
    }
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _named(policy: Policy) -> Iterator[tuple[str, torch.Tensor]]:
    state = policy.model.state_dict()
    for name in state:
        if name + adapters.A not in state:
            continue
        a, b = (adapters.whole(state[name + suffix].to(policy.device)) for suffix in (adapters.A, adapters.B))
        for hf_name, part in policy.adapter.to_hf({name: b}).items():
            yield _name(hf_name, "B"), part
            if a.ndim == 2:
                yield _name(hf_name, "A"), a.mT
        if a.ndim == 3:
            for hf_name, part in policy.adapter.to_hf({name: a.mT}).items():
                yield _name(hf_name, "A"), part


def _name(hf_name: str, factor: str) -> str:
    return f"base_model.model.{hf_name.removesuffix('.weight')}.lora_{factor}.weight"
