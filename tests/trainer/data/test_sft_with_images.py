"""SFT on conversations with images: reading, truncation and learning."""

from __future__ import annotations

import base64
import json
from math import log
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoTokenizer

from primeslurm.recipe import Recipe
from primeslurm.trainer.assembly.build import build
from primeslurm.trainer.data import sft_data, token_files
from primeslurm.trainer.data.image_positions import read
from primeslurm.trainer.data.image_reader import ImageReader
from primeslurm.trainer.distributed.world import World
from primeslurm.wire.batches.batch import Batch
from tests.support.conversations_read import loaded
from tests.trainer.conftest import SEQ_LEN, make_recipe, published
from tests.trainer.families import IMAGES
from tests.trainer.image_rows import END, IMAGE, START, write_vision_model
from tests.trainer.loops.test_sft import sft_recipe, train

COLOURS = {"r": (250, 30, 20), "b": (20, 30, 250)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_model("qwen3_vl", tmp_path_factory.mktemp("qwen3_vl"))


@pytest.fixture(scope="module")
def reader(model: Path) -> ImageReader:
    return ImageReader(model, IMAGES["image_token_id"])


def conversation(answer: str, *sources: str) -> dict[str, Any]:
    """Conversations that ask for the colour of images in several forms."""
    images: list[dict[str, Any]] = [
        {"type": "image", "image": source} if index % 2 == 0 else {"type": "image_url", "image_url": {"url": source}}
        for index, source in enumerate(sources)
    ]
    content = [{"type": "text", "text": "?"}, *images, {"type": "text", "text": "!"}]
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]}


def write_lines(directory: Path, *lines: dict[str, Any]) -> Path:
    """Write a data file, and images `r.png` and `b.png` beside it."""
    for name, colour in COLOURS.items():
        Image.new("RGB", (16, 8), colour).save(directory / f"{name}.png")
    path = directory / "data.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def load(path: Path, model: Path, reader: ImageReader | None, seq_len: int = SEQ_LEN) -> list[sft_data.Example]:
    return loaded(sft_data.Conversations(path, AutoTokenizer.from_pretrained(model), seq_len, reader))


def test_placeholders_are_repeated_per_image_token(model: Path, reader: ImageReader, tmp_path: Path) -> None:
    path = write_lines(tmp_path)
    inline = "data:image/png;base64," + base64.b64encode((tmp_path / "b.png").read_bytes()).decode()
    path = write_lines(tmp_path, conversation("x", "r.png", inline), {"prompt": "ab", "completion": "cd"})
    seeing, blind = load(path, model, reader)
    text = AutoTokenizer.from_pretrained(model).decode(seeing.token_ids)
    assert text.count(f"{START}{IMAGE * 2}{END}") == 2 and not blind.images
    assert AutoTokenizer.from_pretrained(model).decode(seeing.token_ids[seeing.mask]) == "x<|im_end|>"

    batch = sft_data.batch([blind, seeing], 1, 2, SEQ_LEN, 0, 0, 1)
    (row,) = Batch.decode(batch.encode()).rows
    images = read(row, reader)
    assert batch.info.has_images and images is not None
    assert images.grids.tolist() == [[1, 2, 4]] * 2
    for start in images.starts:
        assert (row.token_ids[start - 1 : start + 3] == [122, 120, 120, 123]).all()
    red, blue = np.split(images.pixels.reshape(16, 3, -1), 2)
    for pixels, colour in ((red, "r"), (blue, "b")):
        np.testing.assert_allclose(pixels.mean((0, 2)), np.array(COLOURS[colour]) / 127.5 - 1, atol=1e-5)


def test_token_files_store_image_spans(model: Path, reader: ImageReader, tmp_path: Path) -> None:
    path = write_lines(tmp_path, conversation("x", "r.png", "b.png"), {"prompt": "ab", "completion": "cd"})
    conversations = sft_data.Conversations(path, AutoTokenizer.from_pretrained(model), SEQ_LEN, reader)
    parts = tuple(token_files.write_part(tmp_path, conversations, rank, 2) for rank in range(2))
    actual = token_files.TokenFiles(tmp_path, parts)
    wanted = loaded(conversations)
    assert [actual[i].images for i in range(len(actual))] == [example.images for example in wanted]
    assert [len(example.images) for example in wanted] == [2, 0]


def test_images_are_not_cut(model: Path, reader: ImageReader, tmp_path: Path) -> None:
    (example,) = load(write_lines(tmp_path, conversation("x", "r.png", "b.png", "r.png")), model, reader)
    assert len(example.images) == 3
    for length in range(len(example.token_ids) + 1):
        shorter = example.cut(length)
        placeholders = np.flatnonzero(shorter.token_ids == IMAGES["image_token_id"])
        assert placeholders.tolist() == [i for p in shorter.images for i in range(p.start, p.end)]
        assert length - 2 < len(shorter.token_ids) <= length  # an image has two tokens
        assert len(shorter.mask) == len(shorter.token_ids)


def test_truncated_example_without_trained_tokens_is_dropped(model: Path, reader: ImageReader, tmp_path: Path) -> None:
    path = write_lines(tmp_path, conversation("x" * 40, "r.png"), conversation("y", "r.png"))
    prompt = int((~load(path, model, reader)[0].mask).sum())
    assert [len(example.token_ids) for example in load(path, model, reader, prompt + 1)] == [prompt + 1] * 2
    assert load(path, model, reader, prompt) == []


@pytest.mark.parametrize(
    ("line", "sees", "why"),
    [
        (conversation("x", "r.png"), False, "model.vlm"),
        (conversation("x", "absent.png"), True, "absent.png"),
        (conversation("x", "data:image/png;base64,***"), True, r"png;base64,\*\*\*: an image has invalid base64"),
        (conversation("x", "data:image/png;base64,AAAA"), True, "image data:image/png;base64,AAAA: not an image"),
        (conversation("x" + IMAGE, "r.png"), True, "1 images, but the chat template renders placeholders for 2"),
        ({"messages": [{"role": "user", "content": [{"type": "video", "video": "v"}]}]}, True, "'video'"),
    ],
)
def test_unusable_image_is_named(
    line: dict[str, Any], sees: bool, why: str, model: Path, reader: ImageReader, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=rf"line 1: .*{why}"):
        load(write_lines(tmp_path, line), model, reader if sees else None)


def colours_recipe(model: Path, path: Path, freeze: bool = True, **sections: Any) -> Recipe:
    vlm = {"path": str(model), "dtype": "float32", "vlm": {"freeze_vision_encoder": freeze}}
    trainer = {"optimizer": {"lr": 2e-2}}
    return sft_recipe(model, path, model=vlm, trainer=trainer, **sections)


@pytest.fixture
def colours(tmp_path: Path) -> Path:
    return write_lines(tmp_path, *[conversation(name, f"{name}.png") for name in COLOURS] * 4)


def test_frozen_encoder_stays_unchanged(
    model: Path, reader: ImageReader, colours: Path, world: World, tmp_path: Path
) -> None:
    metrics = train(colours_recipe(model, colours, max_steps=12), tmp_path / "whole", world, reader=reader)
    # An answer is a letter and the end; without the image the letter is one of two.
    assert metrics[-1]["loss"] < log(2) / 2 / 2
    train(colours_recipe(model, colours, max_steps=6), tmp_path / "parts", world, reader=reader)
    resumed = train(colours_recipe(model, colours, max_steps=12), tmp_path / "parts", world, 2, reader)
    assert resumed[-1]["loss"] == metrics[-1]["loss"]

    before, after = load_file(model / "model.safetensors"), published(tmp_path / "parts", 12)
    assert set(after) == set(before)
    for name, tensor in after.items():
        assert torch.equal(tensor, before[name]) == name.startswith("model.visual."), name
    assert (tmp_path / "parts" / "weights" / "v000012" / "preprocessor_config.json").exists()


@pytest.mark.parametrize("freeze", [True, False])
def test_generic_model_trains_on_images(freeze: bool, colours: Path, world: World, tmp_path: Path) -> None:
    model = write_vision_model("qwen2_5_vl", tmp_path / "model")
    reader = ImageReader(model, IMAGES["image_token_id"])
    (metrics,) = train(colours_recipe(model, colours, freeze, max_steps=1), tmp_path, world, reader=reader)
    assert metrics["grad_norm"] > 0
    before, after = load_file(model / "model.safetensors"), published(tmp_path, 1)
    same = {name for name in after if torch.equal(after[name], before[name])}
    assert set(after) == set(before)
    assert same == ({name for name in after if name.startswith("visual.")} if freeze else set())


def test_unfrozen_encoder_is_trained(
    model: Path, reader: ImageReader, colours: Path, world: World, tmp_path: Path
) -> None:
    train(colours_recipe(model, colours, freeze=False, max_steps=1), tmp_path, world, reader=reader)
    before, after = load_file(model / "model.safetensors"), published(tmp_path, 1)
    # Additions to images after the last layer do not reach the logits.
    assert {name.split(".")[3] for name in after if torch.equal(after[name], before[name])} == {"0"}
    assert all("deepstack_merger_list" in name for name in after if torch.equal(after[name], before[name]))


def test_images_need_a_vision_model(dense_model: Path, world: World) -> None:
    with pytest.raises(ValueError, match=r"model\.vlm: the model has no vision encoder"):
        build(make_recipe(dense_model, model={"path": str(dense_model), "dtype": "float32", "vlm": {}}), world)
