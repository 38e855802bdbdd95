"""An answer is tokenized as the model samples it: as a continuation of its prompt."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from primeslurm.chat.training_text import TrainingText
from tests.support.turn_templates import CHATML, tokenizer

ASKED, MORE = {"role": "user", "content": "Rain now?"}, {"role": "user", "content": "So?"}
SUNNY, RAIN = {"role": "assistant", "content": "Sunny."}, {"role": "assistant", "content": "Rain."}
LLAMA_2 = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<s>[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + ' </s>' }}{% endif %}{% endfor %}"
)
ROLES = (
    "{% for m in messages %}{{ '<s>' + m.role + '\\n' + m.content + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\\n' }}{% endif %}"
)


def sentencepiece(kind: str, template: str) -> Any:
    """Return a tokenizer like those converted from SentencePiece. Llama 2 and Mistral use "legacy"."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    merges: list[tuple[str, str]] = []
    for character in "abcdefghijklmnopqrstuvwxyzINSTR.?[]/▁\n":
        vocabulary.setdefault(character, len(vocabulary))
    for word in ("▁Sunny", "Sunny", "▁Rain", "Rain"):
        piece = word[0]
        for character in word[1:]:
            if (piece, character) not in merges:
                merges.append((piece, character))
            piece += character
            vocabulary.setdefault(piece, len(vocabulary))
    made = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>"))
    if kind == "legacy":
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=kind, split=False)
    made.decoder = decoders.Replace("▁", " ")
    fast = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    fast.chat_template = template
    return fast


@pytest.mark.parametrize("kind", ["legacy", "first", "always"])
@pytest.mark.parametrize(
    ("template", "answers"),
    [
        (LLAMA_2, [["▁Sunny", ".", "▁", "</s>"], ["▁Rain", ".", "▁", "</s>"]]),
        (ROLES, [["Sunny", ".", "</s>"], ["Rain", ".", "</s>"]]),
    ],
    ids=["blank before", "line break before"],
)
def test_sentencepiece_adds_no_space_before_an_answer(kind: str, template: str, answers: list[list[str]]) -> None:
    text = TrainingText(sentencepiece(kind, template), every=True)
    parts = text.parts({"messages": [ASKED, SUNNY, MORE, RAIN]})
    ids = text.token_ids([part for part, _ in parts])
    of_tokens = text.template.tokenizer.convert_ids_to_tokens
    assert [of_tokens(each) for each, (_, is_trained) in zip(ids, parts, strict=True) if is_trained] == answers
    whole = text.template.tokenizer(text.template.render([ASKED, SUNNY, MORE, RAIN]), add_special_tokens=False)
    assert [token for each in ids for token in each] == whole["input_ids"]


def test_no_token_spans_prompt_and_answer() -> None:
    text = TrainingText(sentencepiece("legacy", LLAMA_2))
    parts = text.token_ids(["a", "Sun", "ny", ""])
    assert text.template.tokenizer.convert_ids_to_tokens(parts[2]) == ["n", "y"] and parts[3] == []


def test_byte_level_tokenizers_encode_each_part_alone() -> None:
    text = TrainingText(tokenizer(CHATML, "<|im_end|>"), every=True)
    texts = ["a b", " c", "\nd"]
    assert text.token_ids(texts) == text.template.tokenizer(texts, add_special_tokens=False)["input_ids"]
