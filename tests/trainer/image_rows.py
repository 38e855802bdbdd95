"""Models with vision, and packed rows of random text with random images in it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

from primeslurm.trainer.data.image_positions import Images
from primeslurm.wire.batches.batch import Row
from scripts.models.tiny_model import tokenizer
from tests.trainer.conftest import SEQ_LEN
from tests.trainer.families import BY_NAME, IMAGES, write

START, IMAGE, END = tokenizer().convert_ids_to_tokens(
    [IMAGES[name] for name in ("vision_start_token_id", "image_token_id", "vision_end_token_id")]
)
"""The tokens of IMAGES as the tiny tokenizer spells them."""
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    f"{{% if part.type == 'image' %}}{START}{IMAGE}{END}{{% else %}}{{{{ part.text }}}}{{% endif %}}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MERGE, PATCH_VALUES = 2, 3 * 2 * 4 * 4
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "patch_size": 4,
    "temporal_patch_size": 2,
    "merge_size": MERGE,
    "size": {"shortest_edge": 64, "longest_edge": 1024},
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}
Grid = tuple[int, int]
DOCUMENTS: tuple[tuple[Grid, ...], ...] = (((4, 6), (2, 2)), (), ((6, 4),))
"""Patches in height and width of the images of each document: two, none and one."""


def write_vision_model(name: str, directory: Path) -> Path:
    """A checkpoint of a case with what reads its images and renders its conversations."""
    path = write(BY_NAME[name], directory)
    words = AutoTokenizer.from_pretrained(path)
    words.chat_template = TEMPLATE
    words.save_pretrained(path)
    (path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return path


def document(grids: tuple[Grid, ...], seed: int) -> tuple[np.ndarray, Images]:
    """Random text with random images in it."""
    rng = np.random.default_rng(seed)
    tokens, starts = list(rng.integers(3, 100, 3)), []
    for height, width in grids:
        tokens.append(IMAGES["vision_start_token_id"])
        starts.append(len(tokens))
        tokens += [IMAGES["image_token_id"]] * (height * width // MERGE**2)
        tokens += [IMAGES["vision_end_token_id"], *rng.integers(3, 100, 4)]
    patches = sum(height * width for height, width in grids)
    pixels = rng.normal(size=(patches, PATCH_VALUES)).astype(np.float32)
    grid_array = np.array([(1, *grid) for grid in grids], np.int32).reshape(-1, 3)
    return np.array(tokens, np.int32), Images(pixels, grid_array, np.array(starts, np.int32))


def packed(documents: tuple[tuple[Grid, ...], ...], seed: int = 0) -> tuple[Row, Images | None]:
    """Documents in a row, and padding."""
    parts = [document(grids, seed + index) for index, grids in enumerate(documents)]
    lengths = [len(tokens) for tokens, _ in parts]
    padding = SEQ_LEN - sum(lengths)
    firsts = np.cumsum([0, *lengths[:-1]])
    images = Images(
        np.concatenate([images.pixels for _, images in parts]),
        np.concatenate([images.grids for _, images in parts]),
        np.concatenate([images.starts + first for (_, images), first in zip(parts, firsts, strict=True)]),
    )
    zeros = np.zeros(SEQ_LEN, np.float32)
    mask = np.arange(SEQ_LEN) < SEQ_LEN - padding
    tokens = np.concatenate([*(tokens for tokens, _ in parts), np.zeros(padding, np.int32)])
    row = Row(
        token_ids=tokens,
        positions=np.concatenate([np.arange(length, dtype=np.int32) for length in (*lengths, padding)]),
        mask=mask & (tokens < 100),
        logprobs=zeros,
        advantages=zeros,
        temperatures=zeros + 1,
        on_policy=zeros.astype(bool),
    )
    return row, images if any(documents) else None
