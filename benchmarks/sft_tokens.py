"""Cost of tokenising the conversations of agents for SFT: `python -m benchmarks sft_tokens [--write]`.

Conversations have 40 messages with tools and 30,000 tokens, and every answer is trained, with tokenizer and template of
the tiny model. Some are tokenised, in as many parts as there would be ranks, and the cost of a hundred thousand is
extrapolated. Then a later attempt and a batch read the stored tokens.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from benchmarks.support.machine import machine, versions
from primeslurm.trainer.data import sft_data, token_files
from scripts.models import tiny_model

RESULT = Path(__file__).resolve().parent / "results" / "sft_tokens.json"
TURNS = 20
WORDS = "the tests of this module fail since its last change, which "
TOOL = {"name": "sh", "description": "Run a command.", "parameters": {"type": "object", "properties": {}}}
RANKS = 96
BATCH = 256


def conversation(number: int) -> dict[str, Any]:
    """Return an agent's conversation of about 30,000 characters, each a token."""
    call = {"type": "function", "function": {"name": "sh", "arguments": {"command": f"grep -rn {number} src"}}}
    messages: list[dict[str, Any]] = [{"role": "user", "content": WORDS * 10}]
    for _ in range(TURNS - 1):
        messages.append({"role": "assistant", "content": WORDS * 6, "tool_calls": [call]})
        messages.append({"role": "tool", "content": WORDS * 18})
    messages.append({"role": "assistant", "content": WORDS})
    return {"messages": messages, "tools": [{"type": "function", "function": TOOL}]}


def measure(count: int) -> dict[str, Any]:
    """Tokenise this many conversations in parts, and read them."""
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made)
        tiny_model.write_model(directory / "model")
        path = directory / "data.jsonl"
        path.write_text("".join(json.dumps(conversation(i)) + "\n" for i in range(count)))
        tokenizer = AutoTokenizer.from_pretrained(directory / "model")
        conversations = sft_data.Conversations(path, tokenizer, 65536, every=True)
        began = time.process_time()
        parts = tuple(token_files.write_part(directory, conversations, i, RANKS) for i in range(RANKS))
        made_s = time.process_time() - began
        tokens = sum(part.tokens for part in parts)
        began = time.perf_counter()
        examples = token_files.TokenFiles(directory, parts)
        opened_s = time.perf_counter() - began
        began = time.perf_counter()
        sft_data.batch(examples, 1, min(BATCH, count), 65536, 0, 0, RANKS)
        batch_s = time.perf_counter() - began
    each = made_s / count
    return {
        "conversations": count,
        "tokens_of_each": tokens // count,
        "cpu_s_of_each": round(each, 4),
        "of_100_000": {
            "minutes_of_one_process": round(1e5 * each / 60, 1),
            f"minutes_of_{RANKS}_ranks": round(1e5 * each / 60 / RANKS, 2),
            "gb_in_memory_of_each_rank": round(5e5 * tokens / count / 1e9, 1),
            "gb_in_files": round(4e5 * tokens / count / 1e9, 1),
        },
        "opened_s": round(opened_s, 3),
        "rows_of_a_rank_s": round(batch_s, 3),
    }


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks sft_tokens", description=__doc__)
    parser.add_argument("--conversations", type=int, default=BATCH)
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    options = parser.parse_args(words)
    result = {
        "command": " ".join(["python -m benchmarks sft_tokens", *words]),
        "machine": machine(),
        "versions": versions("transformers", "tokenizers"),
        **measure(options.conversations),
    }
    print(json.dumps(result, indent=2))
    if options.write:
        RESULT.write_text(json.dumps(result, indent=2) + "\n")
