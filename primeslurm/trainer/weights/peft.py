"""Write LoRA adapters in the format of Hugging Face's PEFT, which transformers and vLLM load.

Tensors are `base_model.model.<module>.lora_A.weight` [rank, in] and `lora_B.weight` [out, rank]. Experts have one
adapter each. In families whose checkpoints may stack experts, adapters are stacked, too, with A [experts * rank, in]
and B [out, rank * experts]: one of gate and up together at `<experts>.base_layer`, and one of down at `<experts>`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from primeslurm.base import files
from primeslurm.nn.checkpoint_names import DOWN, GATE_UP, stacked_adapter
from primeslurm.trainer.components import lora as adapters
from primeslurm.trainer.policy.policy_model import PolicyModel

_GATE, _DOWN, _UP = adapters.EXPERT_WEIGHTS
_STACKS = f"experts.{GATE_UP}", f"experts.{DOWN}"
# A [..., in, rank] and B [..., out, rank]
Factors = tuple[torch.Tensor, torch.Tensor]


def tensors(
    policy: PolicyModel, dtype: torch.dtype, own: Mapping[str, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """Return adapters by PEFT name, on the CPU of every rank: those of the policy, or `own`. A collective."""
    state = policy.model.state_dict() if own is None else {**adapters.base_weights(policy.model), **own}
    return {name: tensor.to(dtype).cpu().contiguous() for name, tensor in _named(policy, state)}


def write(directory: Path, named: dict[str, torch.Tensor], rank: int, alpha: float, base: Path) -> None:
    files.make_directory(directory)
    save_file(named, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    modules = {name.split(".")[-3] for name in named}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(modules - {"experts", "base_layer"}),
        "inference_mode": True,
    }
    if "experts" in modules:
        gate_up, _ = _STACKS
        config |= {
            "target_parameters": _STACKS,
            "rank_pattern": {gate_up: 2 * rank},
            "alpha_pattern": {gate_up: 2 * alpha},
        }
    files.write_json(directory / "adapter_config.json", config)


def _named(policy: PolicyModel, state: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    stacks = stacked_adapter(policy.adapter)
    for name in state:
        if name + adapters.A not in state:
            continue
        if stacks and name.endswith(adapters.EXPERT_WEIGHTS):
            yield from _stacked_adapter(policy, state, name, stacks.experts.format(name.split(".")[1]))
            continue
        a, b = _factors(policy, state, name)
        for hf_name, part in policy.adapter.to_hf({name: b}).items():
            yield _name(hf_name, "B"), part
            if a.ndim == 2:
                yield _name(hf_name, "A"), a.mT
        if a.ndim == 3:
            for hf_name, part in policy.adapter.to_hf({name: a.mT}).items():
                yield _name(hf_name, "A"), part


def _stacked_adapter(
    policy: PolicyModel, state: dict[str, torch.Tensor], name: str, module: str
) -> Iterator[tuple[str, torch.Tensor]]:
    if name.endswith(_UP):
        return
    a, b = _factors(policy, state, name)
    if name.endswith(_GATE):
        module += ".base_layer"
        a, b = _combined((a, b), _factors(policy, state, name.removesuffix(_GATE) + _UP))
    yield _name(module, "A"), a.mT.flatten(0, 1)
    yield _name(module, "B"), b.permute(1, 2, 0).flatten(1)


def _combined(first: Factors, second: Factors) -> Factors:
    """Combine the adapters of two weights with the same input into one of twice the rank, with concatenated outputs."""
    rank = first[0].shape[-1]
    outputs = F.pad(first[1], (0, rank)), F.pad(second[1], (rank, 0))
    return torch.cat([first[0], second[0]], -1), torch.cat(outputs, -2)


def _factors(policy: PolicyModel, state: dict[str, torch.Tensor], name: str) -> Factors:
    a, b = (adapters.whole(state[name + suffix].to(policy.device)) for suffix in (adapters.A, adapters.B))
    return a, b


def _name(hf_name: str, factor: str) -> str:
    return f"base_model.model.{hf_name.removesuffix('.weight')}.lora_{factor}.weight"
