"""The tiny model's tokenizer and the demonstrations made for it."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer

from scripts.models import tiny_model


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


def test_demonstrations_are_right_but_for_the_noise() -> None:
    def right(noise: float) -> float:
        chats = tiny_model.demonstrations(500, noise, 1)
        pairs = [(chat["messages"][0]["content"], chat["messages"][1]["content"]) for chat in chats]
        assert all(prompt.startswith("Reverse: ") for prompt, _ in pairs)
        return sum(prompt.removeprefix("Reverse: ") == answer[::-1] for prompt, answer in pairs) / len(pairs)

    assert right(0.0) == 1
    assert 0.4 < right(0.5) < 0.6
