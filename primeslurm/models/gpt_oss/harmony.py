"""gpt-oss without internet: `openai_harmony` renders it by a vocabulary that it fetches, and its tokenizer has."""

from __future__ import annotations

import base64
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BASE = "TIKTOKEN_ENCODINGS_BASE"
"""Environment variable: where `openai_harmony` looks for its vocabularies."""
FILE = "o200k_base.tiktoken"


@contextmanager
def vocabulary_of(tokenizer: Any) -> Iterator[None]:
    """While this is open, the vocabulary is read from a file made of a tokenizer's, unless one has been put on disk.

    `openai_harmony` compares the file's digest with the one that it knows: another vocabulary is refused.
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
    """Write the vocabulary of a byte-level tokenizer, without special tokens, as tiktoken has it: token, rank."""
    ranks = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["vocab"]
    byte_of = {char: value for value, char in enumerate(_alphabet())}
    special = {token.content for token in tokenizer.added_tokens_decoder.values()}
    lines = (
        base64.b64encode(bytes(byte_of[char] for char in token)) + b" %d\n" % rank
        for token, rank in sorted(ranks.items(), key=lambda pair: pair[1])
        if token not in special
    )
    return b"".join(lines)


def _alphabet() -> list[str]:
    """What stands for each byte in byte-level vocabularies: itself if it can be seen, else a character from 256 on."""
    seen = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = iter(range(256, 512))
    return [chr(value) if value in seen else chr(next(hidden)) for value in range(256)]
