"""Random drafters: checkpoints with a draft layer (MTP), and EAGLE's draft models. transformers writes neither."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any


def write_checkpoint(path: Path, build: Callable[[int], Any], layers: int, dtype: str, device: str = "cpu") -> None:
    """Write a model with one draft layer in the format of GLM-4.5, DeepSeek-V3 and GLM-5.

    Args:
        build: returns the transformers config with a number of layers.
        layers: number of the model's layers, without the draft layer.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    longer = build(layers + 1)
    auto = AutoModelForImageTextToText if hasattr(longer, "vision_config") else AutoModelForCausalLM
    torch.manual_seed(0)
    with torch.device(device):
        # One layer more, which becomes the draft layer: it has the same parts, and a few tensors besides.
        model = auto.from_config(longer, dtype=getattr(torch, dtype))
        text = longer.get_text_config()
        width = text.hidden_size
        joined = torch.randn(width, 2 * width, dtype=model.dtype) * text.initializer_range
        ones = torch.ones(width, dtype=model.dtype)
    model.save_pretrained(path, max_shard_size="1TB")
    config = build(layers)
    config.architectures = [type(model).__name__]
    config.save_pretrained(path)
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    tensors = {"embed_tokens": embeddings.weight.data, "shared_head.head": head.weight.data}
    tensors |= {"eh_proj": joined, "enorm": ones, "hnorm": ones, "shared_head.norm": ones}
    named = {f"model.layers.{layers}.{name}.weight": tensor.cpu().clone() for name, tensor in tensors.items()}
    save_file(named, path / "draft-layer.safetensors", metadata={"format": "pt"})


def write_eagle(path: Path, target: Path) -> None:
    """Write a draft model for a Llama: one layer, and a projection of the last token's embedding and hidden state."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(target, num_hidden_layers=1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    weights = model.model.layers[0].state_dict(prefix="layers.0.")
    del weights["layers.0.input_layernorm.weight"]
    weights["fc.weight"] = torch.randn(config.hidden_size, 2 * config.hidden_size) * config.initializer_range
    config.save_pretrained(path)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
