"""The environment's side of an emulated rollout: a conversation of several turns between the policy and tools.

Prompts, tool outputs and numbers of turns are drawn with seeds from task and job, so the same job gives the same
rollout. Lengths have a long tail, as in agentic coding.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

# Median length of a prompt.
PROMPT_TOKENS = 48.0
# Median length of a tool's output.
TOOL_TOKENS = 32.0
MEAN_TURNS = 3.0
# Fraction of rollouts that fail.
FAILURES = 0.01
# Number of policy versions in which the distance to a perfect reward shrinks by a factor of e.
LEARNING_VERSIONS = 8.0
_FIRST_TOKEN, _VOCABULARY = 3, 1000


@dataclass(frozen=True)
class Script:
    """The tokens that the environment contributes to one rollout."""

    prompt: list[int]
    tool_outputs: list[list[int]]
    """One output between each two turns."""
    fails: bool


def script(seed: int, environment: str, example: int, job: str) -> Script:
    """Draw the script of a job. All rollouts of one example have the same prompt."""
    of_task, of_job = random.Random(f"{seed}/{environment}/{example}"), random.Random(f"{seed}/{job}")
    prompt = _text(of_task, PROMPT_TOKENS)
    more_turns = min(int(of_job.expovariate(1 / (MEAN_TURNS - 1))), 20)
    return Script(prompt, [_text(of_job, TOOL_TOKENS) for _ in range(more_turns)], of_job.random() < FAILURES)


def reward(job: str, version: float) -> float:
    """Return 0 or 1. The chance of 1 grows with the mean policy version of the sampled tokens."""
    chance = 1.0 - 0.8 * math.exp(-version / LEARNING_VERSIONS)
    return float(random.Random(f"reward/{job}").random() < chance)


def _text(source: random.Random, median: float) -> list[int]:
    length = max(1, round(median * source.lognormvariate(0.0, 0.7)))
    return [source.randrange(_FIRST_TOKEN, _VOCABULARY) for _ in range(length)]
