"""How a family of models writes tool calls and thoughts: vLLM's parser of each, by the model's name.

Training does not need them: rollouts are token ids in and out. They serve clients that send messages.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Parsers(NamedTuple):
    """vLLM's names of a family's parsers; None where it has none."""

    tool_call: str | None = None
    reasoning: str | None = None


FAMILIES: dict[str, Parsers] = {
    r"glm-?(4\.7|5)": Parsers("glm47", "glm45"),
    r"glm-?4\.[56]": Parsers("glm45", "glm45"),
    r"qwen3-?coder": Parsers("qwen3_coder"),
    r"qwen3\.[5-9]": Parsers("qwen3_coder", "qwen3"),
    r"qwen3": Parsers("hermes", "qwen3"),
    r"kimi-?k2": Parsers("kimi_k2", "kimi_k2"),
    r"deepseek-?v3\.2": Parsers("deepseek_v32", "deepseek_v3"),
    r"deepseek-?v3\.1": Parsers("deepseek_v31", "deepseek_v3"),
    r"deepseek-?v3": Parsers("deepseek_v3"),
    r"deepseek-?r1": Parsers("deepseek_v3", "deepseek_r1"),
    r"minimax-?m2": Parsers("minimax_m2", "minimax_m2"),
    r"gpt-?oss": Parsers("openai", "openai_gptoss"),
    r"nemotron-?3": Parsers("qwen3_coder", "nemotron_v3"),
    r"intellect-?3": Parsers("qwen3_coder", "deepseek_r1"),
}
"""Pattern in the last part of a model's path to parsers; the first match holds."""


def parsers_of(model: str) -> Parsers:
    """The parsers of a model, by the last part of its path."""
    name = model.rstrip("/").rpartition("/")[2].lower()
    return next((parsers for pattern, parsers in FAMILIES.items() if re.search(pattern, name)), Parsers())
