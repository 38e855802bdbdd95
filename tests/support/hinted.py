"""A tiny model that uses hints: with a hint it gives the answer, without one it mostly gives up."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from primeslurm.orchestrator.environments.reverse_text import PROMPT, words

STEPS = 100
_IGNORED = -100


def write_model(warm: Path, directory: Path) -> None:
    """Fine-tune the demo's warm start on hints, which takes some CPU seconds."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    tokenizer, model = AutoTokenizer.from_pretrained(warm), AutoModelForCausalLM.from_pretrained(warm)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    shown, rng = words(20 * STEPS, seed=7), random.Random(0)
    for _ in range(STEPS):
        rows = []
        for _ in range(20):
            word = next(shown)
            answer, question = word[::-1], {"role": "user", "content": PROMPT + word}
            hinted = [{"role": "system", "content": answer}, question]
            given_up = "x" * len(answer)
            for prompt, reply in ((hinted, answer), ([question], rng.choice((answer, given_up, given_up)))):
                before = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
                rows.append((before, tokenizer.encode(reply + "<|im_end|>")))
        longest = max(len(before) + len(reply) for before, reply in rows)
        ids, labels = torch.zeros(len(rows), longest, dtype=torch.long), torch.full((len(rows), longest), _IGNORED)
        for row, (before, reply) in enumerate(rows):
            end = len(before) + len(reply)
            ids[row, :end] = torch.tensor([*before, *reply])
            labels[row, len(before) : end] = torch.tensor(reply)
        logits = model(input_ids=ids).logits[:, :-1]
        functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=_IGNORED).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    torch.set_num_threads(threads)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
