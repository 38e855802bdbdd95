"""Vocabulary for `openai_harmony`, the encoder of gpt-oss, made from the model's tokenizer.

`openai_harmony` would download the vocabulary, and compute nodes may have no internet.
"""

from __future__ import annotations

import base64
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Environment variable: directory in which `openai_harmony` looks for vocabularies
BASE = "TIKTOKEN_ENCODINGS_BASE"
FILE = "o200k_base.tiktoken"


@contextmanager
def vocabulary_of(tokenizer: Any) -> Iterator[None]:
    """Let `openai_harmony` read the tokenizer's vocabulary within the body, unless the user has set `BASE`.

    `openai_harmony` checks the file's digest, and refuses any vocabulary but its own.
    """
    if BASE in os.environ:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="primeslurm-harmony-") as directory:
        Path(directory, FILE).write_bytes(tiktoken_file(tokenizer))
        os.environ[BASE] = directory
        try:
            yield
        finally:
            del os.environ[BASE]


def tiktoken_file(tokenizer: Any) -> bytes:
    """Return the vocabulary of a byte-level tokenizer, without special tokens, in tiktoken's format: token, rank."""
    ranks = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["vocab"]
    byte_of = {char: value for value, char in enumerate(byte_alphabet())}
    special = {token.content for token in tokenizer.added_tokens_decoder.values()}
    lines = (
        base64.b64encode(bytes(byte_of[char] for char in token)) + b" %d\n" % rank
        for token, rank in sorted(ranks.items(), key=lambda pair: pair[1])
        if token not in special
    )
    return b"".join(lines)


def byte_alphabet() -> list[str]:
    """Return the character that stands for each byte in byte-level vocabularies."""
    # Printable bytes stand for themselves. The others are numbered from 256 on (GPT-2's `bytes_to_unicode`).
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(value) if value in printable else chr(next(others)) for value in range(256)]
