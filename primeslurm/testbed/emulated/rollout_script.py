"""What an emulated rollout is: a conversation of several turns between the policy and tools. Pure.

Prompts, tool outputs and numbers of turns are drawn from the task and the job, so the same job is the same rollout; the
policy's answers come from the engine. Lengths have a long tail, as in agentic coding.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

PROMPT_TOKENS = 48.0
"""Median length of a prompt."""
TOOL_TOKENS = 32.0
"""Median length of a tool's output."""
MEAN_TURNS = 3.0
FAILURES = 0.01
"""Share of the rollouts whose environment fails."""
LEARNING_VERSIONS = 8.0
"""Policy versions in which the distance to a perfect reward shrinks by a factor of e."""
_FIRST_TOKEN, _VOCABULARY = 3, 1000


@dataclass(frozen=True)
class Script:
    """What the environment's side of one rollout says."""

    prompt: list[int]
    tool_outputs: list[list[int]]
    """One between any two turns."""
    fails: bool


def script(seed: int, environment: str, example: int, job: str) -> Script:
    """Draw the rollout of a job. All rollouts of one example have the same prompt.

    Args:
        seed: of the run.
        environment: its name.
        example: index of the task in the environment's data.
        job: id of the rollout.
    """
    task, own = random.Random(f"{seed}/{environment}/{example}"), random.Random(f"{seed}/{job}")
    prompt = _text(task, PROMPT_TOKENS)
    more_turns = min(int(own.expovariate(1 / (MEAN_TURNS - 1))), 20)
    return Script(prompt, [_text(own, TOOL_TOKENS) for _ in range(more_turns)], own.random() < FAILURES)


def reward(job: str, version: float) -> float:
    """0 or 1, more often 1 the newer the policy (mean version of the sampled tokens)."""
    chance = 1.0 - 0.8 * math.exp(-version / LEARNING_VERSIONS)
    return float(random.Random(f"reward/{job}").random() < chance)


def _text(source: random.Random, median: float) -> list[int]:
    length = max(1, round(median * source.lognormvariate(0.0, 0.7)))
    return [source.randrange(_FIRST_TOKEN, _VOCABULARY) for _ in range(length)]
