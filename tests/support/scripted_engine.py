"""An engine that answers each turn of a rollout with the next line of a script."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tests.support.fake_engine import FakeEngine


def tool_call(name: str, **arguments: str) -> str:
    """Return a tool call as a model of the Qwen3 family writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class ScriptedEngine(FakeEngine):
    """A FakeEngine that gives the answers of `script` in order, whatever the prompt, and repeats the last one."""

    def __init__(self, tokenizer: Path, script: Sequence[str]) -> None:
        self._script = script
        self.prompts: list[str] = []
        super().__init__(tokenizer)

    def _sample(self, prompt: list[int], number: int) -> list[int]:
        self.prompts.append(self._tokenizer.decode(prompt, skip_special_tokens=False))
        answer = self._script[min(number, len(self._script)) - 1]
        eos = self._tokenizer.eos_token_id
        return [*self._tokenizer.encode(answer, add_special_tokens=False), eos]
