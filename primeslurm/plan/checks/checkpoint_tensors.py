"""Check head, embedding and tokenizer of a model's checkpoint, from the headers of its files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from primeslurm.base.errors import Violation
from primeslurm.base.model_files import INDEX, read_header, weight_files
from primeslurm.models import family_of
from primeslurm.models.shape import ModelShape

# Headers that are read in parallel, because the file system answers slowly
_HEADERS_AT_ONCE = 8
# Names that a message lists
_SHOWN = 5
_EMBEDDING = re.compile(r"(^|\.)(embed_tokens|embeddings?|word_embeddings|tok_embeddings|wte)\.weight$")
_HEAD = re.compile(r"(^|\.)(lm_head|output|embed_out|output_layer)\.")
_LAYER = re.compile(r"(^|\.)layers\.\d+\.")
# Tensors outside of the language model
_ELSEWHERE = re.compile(r"(^|\.)(visual|vision\w*|mtp|mm_projector|multi_modal_projector)\.")
_ENCODED = re.compile(r"image|audio|video|vision")

# Errors of `token_ids` if a file has another format
UNREADABLE_TOKENIZER = (KeyError, TypeError, ValueError, AttributeError, IndexError)
# Shape of each tensor by name
Shapes = Mapping[str, tuple[int, ...]]


def tensor_problems(directory: Path, config: Mapping[str, Any], shape: ModelShape | None) -> list[Violation]:
    """Return tensors that a checkpoint lacks, and tokens without an embedding."""
    where = str(directory)
    if "model_type" not in config:
        return []
    try:
        shapes = read_shapes(directory)
    except (OSError, ValueError) as error:
        return [Violation("model.path", where, f"its weights cannot be read: {error}")]
    problems = [
        Violation("model.path", where, why, fix) for why, fix in _tokens_without_embedding(directory, config, shapes)
    ]
    if shape is not None:
        fix = "download the model's files again"
        lacks = _embedding_problems(config, shapes, shape)
        problems += [Violation("model.path", where, f"its checkpoint {why}", fix) for why in lacks]
    return problems


def read_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors of a model, by name.

    Raises:
        OSError: a file is missing or cannot be read.
        ValueError: a file is not a safetensors file.
    """
    names = weight_files(directory)
    if absent := [name for name in names if not (directory / name).is_file()]:
        raise ValueError(f"{INDEX} names missing files: {', '.join(absent[:_SHOWN])}")
    with ThreadPoolExecutor(_HEADERS_AT_ONCE, "headers") as threads:
        headers = list(threads.map(lambda name: read_header(directory / name)[1], names))
    return {name: tensor.shape for header in headers for name, tensor in header.items()}


def token_ids(directory: Path) -> dict[int, str]:
    """Return the tokens of a model's tokenizer by id, from its JSON files; empty if it has none."""
    main, added, settings = (
        _object(directory / name) for name in ("tokenizer.json", "added_tokens.json", "tokenizer_config.json")
    )
    tokens: dict[int, str] = {}
    vocabulary = (main.get("model") or {}).get("vocab") or {}
    if isinstance(vocabulary, dict):
        tokens |= {number: token for token, number in vocabulary.items() if isinstance(number, int)}
    else:  # tokens of a Unigram are numbered in order
        tokens |= {number: str(entry[0]) for number, entry in enumerate(vocabulary)}
    tokens |= {entry["id"]: entry["content"] for entry in main.get("added_tokens") or ()}
    tokens |= {number: token for token, number in added.items() if isinstance(number, int)}
    decoder = settings.get("added_tokens_decoder") or {}
    return tokens | {int(number): str(entry["content"]) for number, entry in decoder.items()}


def _tokens_without_embedding(directory: Path, config: Mapping[str, Any], shapes: Shapes) -> list[tuple[str, str]]:
    text = config.get("text_config")
    text = text if isinstance(text, dict) else config
    rows = next((shape[0] for name, shape in shapes.items() if _is_embedding(name) and shape), text.get("vocab_size"))
    try:
        ids = token_ids(directory)
    except UNREADABLE_TOKENIZER:
        return [("its tokenizer's files are damaged", "download them again")]
    # Gemma 3 1B has no vision encoder, but its tokenizer has an image token after the last row of the embedding.
    sees = bool(config.get("vision_config") or config.get("audio_config"))
    ids = {number: token for number, token in ids.items() if sees or not _ENCODED.search(token)}
    if not isinstance(rows, int) or not ids or max(ids) < rows:
        return []
    beyond = [f"{ids[number]!r} is {number}" for number in sorted(ids) if number >= rows]
    why = f"its tokenizer has ids up to {max(ids)}, and its embedding has {rows} rows: {_first_names(beyond)}"
    return [(why, "resize the embedding, or use the tokenizer that the checkpoint was made with")]


def _embedding_problems(config: Mapping[str, Any], shapes: Shapes, shape: ModelShape) -> list[str]:
    is_known_family = family_of(shape.model_type) is not None
    ties = [part.get("tie_word_embeddings") for part in (config, config.get("text_config") or {})]
    mentions_tying = any(tie is not None for tie in ties)
    problems = []
    if not any(_HEAD.search(name) for name in shapes) and not shape.tied and (is_known_family or mentions_tying):
        problems.append("has no head (lm_head.weight), and its config does not tie it to the embedding")
    embeddings = {name: rows for name, rows in shapes.items() if _is_embedding(name)}
    if is_known_family and not embeddings:
        problems.append("has no embedding (model.embed_tokens.weight)")
    wrong = [f"{name} has {rows[0]} rows" for name, rows in embeddings.items() if rows and rows[0] != shape.vocab]
    if is_known_family and wrong:
        problems.append(f"does not match its config, whose vocab_size is {shape.vocab}: {_first_names(wrong)}")
    return problems


def _is_embedding(name: str) -> bool:
    return bool(_EMBEDDING.search(name)) and not _LAYER.search(name) and not _ELSEWHERE.search(name)


def _object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _first_names(names: Iterable[str]) -> str:
    every = list(names)
    more = f" and {len(every) - _SHOWN} more" if len(every) > _SHOWN else ""
    return ", ".join(every[:_SHOWN]) + more
