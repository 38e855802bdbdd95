"""The model of the game's warm start."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts.models import hangman_model, tiny_model

FEW = 8
"""Steps: it has learned in which form to answer, and not yet to answer so always."""


def test_it_comes_to_answer_with_a_letter_in_brackets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
