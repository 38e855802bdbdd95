"""The demo models: the tiny model's tokenizer and demonstrations, and the Hangman model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts.models import hangman_model, tiny_model

FEW = 8
"""Steps after which the model has the format of an answer, but does not always use it."""


def test_every_character_is_one_token(moe_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(moe_model)
    assert len(tokenizer) == tiny_model.VOCABULARY
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Reverse: abc"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>user\nReverse: abc<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == len("user\nReverse: abc\nassistant\n") + 3
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token_id == 2 and tokenizer.pad_token_id == 0


def test_demonstrations_are_right_up_to_noise() -> None:
    def right(noise: float) -> float:
        chats = tiny_model.demonstrations(500, noise, 1)
        pairs = [(chat["messages"][0]["content"], chat["messages"][1]["content"]) for chat in chats]
        assert all(prompt.startswith("Reverse: ") for prompt, _ in pairs)
        return sum(prompt.removeprefix("Reverse: ") == answer[::-1] for prompt, answer in pairs) / len(pairs)

    assert right(0.0) == 1
    assert 0.4 < right(0.5) < 0.6


def test_hangman_model_learns_to_answer_in_brackets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def bracket_after(steps: int) -> float:
        monkeypatch.setattr(hangman_model, "STEPS", steps)
        monkeypatch.setattr("sys.argv", ["hangman", str(tmp_path / str(steps))])
        hangman_model.main()
        model = AutoModelForCausalLM.from_pretrained(tmp_path / str(steps), dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / str(steps))
        chat = [{"role": "user", "content": "Guess a letter."}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt])).logits[0, -1]
        return float(logits.softmax(-1)[tokenizer.encode("[")[0]])

    threads = torch.get_num_threads()
    assert bracket_after(FEW) > 5 * bracket_after(0)
    assert torch.get_num_threads() == threads
    assert len(AutoTokenizer.from_pretrained(tmp_path / "0")) == tiny_model.VOCABULARY
