"""Write demonstrations of the environment `tool-use`, for a supervised warm start.

python -m scripts.models.tool_use_demonstrations FILE [--n 10000] [--noise 0.35] [--seed 1]
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from primeslurm.chat import ChatMessage
from primeslurm.orchestrator.environments.shell import NAME, TOOL
from primeslurm.orchestrator.environments.tool_use import PROMPT, chains

# The answer of wrong demonstrations, which is never right. It is constant, so it costs the model no capacity.
GUESS = "000"


def demonstrations(n: int, noise: float, seed: int, links: int = 2) -> Iterator[dict[str, Any]]:
    """Yield `n` conversations to train on. With probability `noise`, a turn guesses an answer."""
    # A guess ends the conversation. A model trained on these reaches the end of a chain with probability (1 - noise) **
    # links, which RL improves.
    rng = random.Random(f"{seed}/guesses")
    for names, answer in chains(n, seed, links):
        messages: list[ChatMessage] = [{"role": "user", "content": PROMPT + names[0]}]
        for name, content in zip(names, [*names[1:], answer], strict=True):
            if rng.random() < noise:
                messages.append({"role": "assistant", "content": GUESS})
                break
            messages += [_call(name), {"role": "tool", "tool_call_id": "call", "content": content}]
        else:
            messages.append({"role": "assistant", "content": answer})
        yield {"messages": messages, "tools": [TOOL]}


def _call(name: str) -> ChatMessage:
    function = {"name": NAME, "arguments": json.dumps({"command": f"cat {name}"})}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call", "type": "function", "function": function}],
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.models.tool_use_demonstrations", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--n", type=int, default=10000)
    parser.add_argument("--noise", type=float, default=0.35)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    chats = demonstrations(options.n, options.noise, options.seed)
    options.out.write_text("".join(json.dumps(chat) + "\n" for chat in chats))


if __name__ == "__main__":
    main()
