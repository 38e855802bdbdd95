"""A tiny model that plays Hangman, a letter in brackets a turn, and has to learn which letters pay."""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from scripts.models import tiny_model

GUESSES = "eatrilxzqjvkbfw"
"""Some are in many words, more are in few: games come to an end."""
SAID = """You are a competitive game player. Read the instructions carefully and always use the exact format of moves. \
Give your move as the only square-bracketed token in your reply.
[GAME] You are playing Hangman. The objective is to guess the word by one letter guesses or the entire word.
Each column is numbered. The cells that need to be populated with letters are represented by '_'.
You can answer with one letter in the format of '[L]', or guess the entire word in the format of '[LIGHT]'.
C00 C01 C02 C03 C04
  _   _   A   _   _
You have 6 tries left.
Guessed letters: A, E
Your guess of Z is not in the word. You have 5 lives left."""
"""What the game and verifiers' taskset say, in short."""
STEPS = 80


def write_model(directory: Path) -> None:
    """Write a model that answers whatever it is asked with a random letter in brackets. It takes seconds of a core.

    Args:
        directory: of the model, in Hugging Face format.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several wait for one another, where other work has the cores
    try:
        _train().save_pretrained(directory)
    finally:
        torch.set_num_threads(threads)
    tiny_model.tokenizer().save_pretrained(directory)


def _train() -> Any:
    tokenizer, rng = tiny_model.tokenizer(), random.Random(0)
    model = tiny_model.model("qwen3_moe", 64, 2, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(STEPS):
        length = rng.choice((20, 60, 200, 400))  # what the game says at first is longer still
        rows = []
        for _ in range(8):
            chat = [{"role": role, "content": _part(rng, length)} for role in ("system", "user")]
            prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
            answer = tokenizer.encode(f"[{rng.choice(GUESSES)}]{tiny_model.END}")
            rows.append([*prompt, *answer])
        ids = torch.tensor(rows)
        scores = model(input_ids=ids).logits[:, -len(answer) - 1 : -1]
        functional.cross_entropy(scores.flatten(0, 1), ids[:, -len(answer) :].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model


def _part(rng: random.Random, length: int) -> str:
    start = rng.randrange(len(SAID) - length)
    return SAID[start : start + length]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m scripts.models.hangman_model", description=__doc__)
    parser.add_argument("out", type=Path, help="the model's directory")
    write_model(parser.parse_args().out)


if __name__ == "__main__":
    main()
