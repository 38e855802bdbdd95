"""Make a tiny, randomly initialised Qwen3 or Qwen3-MoE model with a character tokenizer, and data to warm it up.

    python -m scripts.models.tiny_model model DIR [--family qwen3_moe|qwen3] [--hidden 64] [--head-dim 32] [--layers 2]
        [--phrases]
    python -m scripts.models.tiny_model demonstrations FILE [--n 30000] [--noise 0.6] [--seed 0]

Nothing is downloaded. The model is for demonstrations and tests on CPUs.
"""

from __future__ import annotations

import argparse
import json
import random
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCABULARY = 128
PAD, START, END = "<|pad|>", "<|im_start|>", "<|im_end|>"
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""What sets thoughts and tools apart, as in Qwen3: tokens of their own, but no special ones."""
PHRASES = (
    "system",
    "user",
    "assistant",
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n",
    '{"type": "function", "function": {"name": "',
    '", "description": "',
    '", "parameters": {"type": "object", "properties": {"',
    '": {"type": "string"}}, "required": ["',
    '"]}}}',
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within <tool_call>"
    '</tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>',
    '{"name": "',
    '", "arguments": {"',
    "command",
    '": "',
    '"}}',
)
"""What conversations with a shell always say. As tokens of their own, they make a prompt eight times shorter."""
CHAT_TEMPLATE = """
{%- set answered = namespace(upto=-1) %}
{%- for message in messages %}
    {%- if message.role == "user" %}{% set answered.upto = loop.index0 %}{% endif %}
{%- endfor %}
{%- if tools %}
    {{- "<|im_start|>system\n" }}
    {%- if messages[0].role == "system" %}{{ messages[0].content + "\n\n" }}{% endif %}
    {{- "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n" }}
    {{- "You are provided with function signatures within <tools></tools> XML tags:\n<tools>" }}
    {%- for tool in tools %}{{ "\n" + (tool | tojson) }}{% endfor %}
    {{- "\n</tools>\n\nFor each function call, return a json object with function name and arguments " }}
    {{- 'within <tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, ' }}
    {{- '"arguments": <args-json-object>}\n</tool_call><|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else "" %}
    {%- if message.role == "tool" %}
        {%- if loop.first or loop.previtem.role != "tool" %}{{ "<|im_start|>user" }}{% endif %}
        {{- "\n<tool_response>\n" + content + "\n</tool_response>" }}
        {%- if loop.last or loop.nextitem.role != "tool" %}{{ "<|im_end|>\n" }}{% endif %}
    {%- elif not (loop.first and message.role == "system" and tools) %}
        {{- "<|im_start|>" + message.role + "\n" }}
        {%- if message.role == "assistant" and message.reasoning_content and loop.index0 > answered.upto %}
            {{- "<think>\n" + message.reasoning_content.strip("\n") + "\n</think>\n\n" + content.lstrip("\n") }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- "\n" if content or not loop.first }}
            {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
            {{- "}\n</tool_call>" }}
        {%- endfor %}
        {{- "<|im_end|>\n" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\n" }}{% endif %}
"""
"""Renders what Qwen3's does, with tools. Like that of its Instruct models, it adds no empty thoughts to an answer."""
GIVEN_UP = "x"
"""The letter of wrong demonstrations. Being constant, it costs the model no capacity and adds no noise to gradients."""
PROMPT = "Reverse: "
"""What precedes the text in a reverse-text prompt; the bundled environment asks in the same words."""


def tokenizer(phrases: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """One token per printable ASCII character, newline, mark of Qwen3 and phrase; reserved ones up to VOCABULARY."""
    special = [PAD, START, END]
    characters = ["\n", *(chr(code) for code in range(32, 127))]
    more = ["<|endoftext|>", *MARKS, *phrases]
    reserved = [f"<|reserved_{i}|>" for i in range(VOCABULARY - len(special) - len(characters) - len(more))]
    vocabulary = {token: index for index, token in enumerate([*special, *characters, *more, *reserved])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))  # no merges: every character stays alone
    core.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=END, pad_token=PAD)
    fast.add_special_tokens({"additional_special_tokens": [START, "<|endoftext|>", *reserved]})
    fast.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in (*MARKS, *phrases)])
    fast.chat_template = CHAT_TEMPLATE
    return fast


def model(family: str, hidden: int, layers: int, seed: int, head_dim: int = 32) -> Any:
    """A randomly initialised float32 transformers model."""
    torch.manual_seed(seed)
    common: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": head_dim,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "pad_token_id": 0,
        "eos_token_id": 2,
        "initializer_range": 0.05,
    }
    if family == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**common))
    config = Qwen3MoeConfig(
        **common,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=hidden,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    )
    moe = Qwen3MoeForCausalLM(config)
    for name, parameter in moe.named_parameters():
        if name.endswith("mlp.gate.weight"):
            # Well separated expert scores: rounding then does not change which experts the engines choose.
            torch.nn.init.normal_(parameter, std=0.5)
    return moe


def write_model(
    out: Path,
    family: str = "qwen3_moe",
    hidden: int = 64,
    layers: int = 2,
    seed: int = 0,
    phrases: Sequence[str] = (),
    head_dim: int = 32,
) -> None:
    """Write model, tokenizer and generation config to `out` in Hugging Face format."""
    model(family, hidden, layers, seed, head_dim).save_pretrained(out)
    tokenizer(phrases).save_pretrained(out)
    GenerationConfig(eos_token_id=2, pad_token_id=0).save_pretrained(out)


def demonstrations(n: int, noise: float, seed: int) -> list[dict[str, Any]]:
    """Chats that reverse a word; with probability `noise` the answer gives up: only `x`, as many as letters.

    A model warmed up on them can reverse, but does so only in a share 1 - noise of its samples: RL has to make it
    choose.
    """
    rng = random.Random(seed)
    chats = []
    for _ in range(n):
        text = "".join(rng.choices(string.ascii_lowercase, k=rng.randint(4, 8)))
        answer = text[::-1]
        if rng.random() < noise:
            answer = GIVEN_UP * len(text)
        messages = [{"role": "user", "content": PROMPT + text}, {"role": "assistant", "content": answer}]
        chats.append({"messages": messages})
    return chats


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.models.tiny_model", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("model", help="write a tiny model")
    make.add_argument("out", type=Path)
    make.add_argument("--family", choices=("qwen3_moe", "qwen3"), default="qwen3_moe")
    make.add_argument("--hidden", type=int, default=64)
    make.add_argument("--head-dim", type=int, default=32)
    make.add_argument("--layers", type=int, default=2)
    make.add_argument("--seed", type=int, default=0)
    make.add_argument("--phrases", action="store_true", help="a token for each phrase of conversations with a shell")
    reverse = commands.add_parser("demonstrations", help="write demonstrations of reversing words")
    reverse.add_argument("out", type=Path)
    reverse.add_argument("--n", type=int, default=30000)
    reverse.add_argument("--noise", type=float, default=0.6)
    reverse.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.command == "model":
        phrases = PHRASES if arguments.phrases else ()
        shape = (arguments.family, arguments.hidden, arguments.layers, arguments.seed)
        write_model(arguments.out, *shape, phrases, arguments.head_dim)
    else:
        chats = demonstrations(arguments.n, arguments.noise, arguments.seed)
        arguments.out.write_text("".join(json.dumps(chat) + "\n" for chat in chats))


if __name__ == "__main__":
    main()
