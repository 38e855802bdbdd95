"""A tiny vision-language model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from tests.support.models import VOCAB_SIZE, make_tokenizer

TEXT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 8192,
    "initializer_range": 0.2,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [8, 4, 4],
        "mrope_interleaved": True,
    },
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
VISION = {
    "depth": 1,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
SPECIAL = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
CHAT = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
CHAT += ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "</think>")
_PATCHES = {
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}
_SIZE = {"size": {"shortest_edge": 1024, "longest_edge": 16384}}
PROCESSORS = {
    "preprocessor_config.json": _PATCHES
    | _SIZE
    | {"image_processor_type": "Qwen2VLImageProcessorFast", "processor_class": "Qwen3VLProcessor"},
    "video_preprocessor_config.json": _PATCHES
    | _SIZE
    | {"video_processor_type": "Qwen3VLVideoProcessor", "processor_class": "Qwen3VLProcessor"},
}


def make_vision_model(directory: Path, seed: int) -> Path:
    """Write a random Qwen3-VL in float32."""
    torch.manual_seed(seed)
    make_tokenizer(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.add_special_tokens({"additional_special_tokens": [*SPECIAL.values(), *CHAT]})
    tokenizer.chat_template = None  # the template of text models is not the one that the family renders
    (directory / "chat_template.jinja").unlink()
    tokenizer.save_pretrained(directory)
    special = {name: tokenizer.convert_tokens_to_ids(token) for name, token in SPECIAL.items()}
    config = Qwen3VLConfig(text_config=dict(TEXT), vision_config=dict(VISION), **special)
    Qwen3VLForConditionalGeneration(config).to(torch.float32).save_pretrained(directory)
    for name, settings in PROCESSORS.items():
        (directory / name).write_text(json.dumps(settings))
    return directory


def image_token(directory: Path) -> int:
    """Return the token that stands for an image."""
    return int(AutoConfig.from_pretrained(directory).image_token_id)


def reference_logprobs(directory: Path, token_ids: list[int], pixels: Any = None, grid: Any = None) -> list[float]:
    """Return the log-probability of each token but the first, by transformers, optionally with one image."""
    model = Qwen3VLForConditionalGeneration.from_pretrained(directory, dtype=torch.float32).eval()
    ids = torch.tensor([token_ids])
    image: dict[str, Any] = {}
    if pixels is not None:
        kinds = (ids == model.config.image_token_id).int()
        image = {"pixel_values": torch.tensor(pixels), "image_grid_thw": torch.tensor([grid.tolist()])}
        image["mm_token_type_ids"] = kinds
    with torch.no_grad():
        logprobs = model(ids, **image).logits[0].log_softmax(-1)
    return [float(logprobs[i, token]) for i, token in enumerate(token_ids[1:])]
