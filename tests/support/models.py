"""Tiny models with real architectures and tokenizer files, without downloads."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

from primeslurm.wire.weight_transfer import deltas, filesystem
from tests.support.generate import logprobs, tokens

VOCABULARY = ["<pad>", "<eos>", "<bos>", *"abcdefghijklmnopqrstuvwxyz", *" .,:-0123456789"]
VOCAB_SIZE = 64  # padded, because engines need round sizes


def token_id(character: str) -> int:
    """Return the id of a one-character token."""
    return VOCABULARY.index(character)


def make_tokenizer(directory: Path) -> None:
    """Write a character tokenizer with a chat template."""
    core = Tokenizer(WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token="<pad>"))
    core.pre_tokenizer = Split(Regex("."), "isolated")
    core.decoder = Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>", unk_token="<pad>"
    )
    fast.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    fast.save_pretrained(directory)


def make_model(directory: Path, seed: int = 0, tied: bool = False) -> Path:
    """Write a random Qwen3-MoE in float32, with large weights, so that its predictions differ clearly from uniform."""
    model = _random_model(seed, tied)
    _save(model, directory)
    return directory


def make_constant_model(directory: Path, character: str) -> Path:
    """Write a model of the same architecture that always predicts one character."""
    model = _random_model(seed=0, tied=False)
    make_constant(model, character)
    _save(model, directory)
    return directory


def make_constant(model: Any, character: str) -> None:
    """Make a model always predict one character."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(projection in name for projection in ("o_proj", "out_proj", "down_proj")):
                parameter.zero_()  # layers add nothing, so that the embedding reaches the head
        model.model.embed_tokens.weight.fill_(1.0)
        model.lm_head.weight.zero_()
        model.lm_head.weight[token_id(character)] = 1.0


def publish(source: Path, run_dir: Path, version: int) -> Path:
    """Publish the weights of a model directory as a policy version with its manifest."""
    directory = filesystem.version_dir(run_dir, version)
    directory.mkdir(parents=True)
    for file in source.glob("*.safetensors"):
        shutil.copy(file, directory)
    filesystem.complete(directory, version, "float32")
    return directory


def publish_delta(run_dir: Path, version: int, base: int, changed: Path) -> Path:
    """Publish a version that differs from `base` in each seventh element, also as the whole model in `changed`."""
    directory, source = filesystem.version_dir(run_dir, version), filesystem.version_dir(run_dir, base)
    directory.mkdir(parents=True)
    (file,) = source.glob("*.safetensors")
    before = load_file(file)
    after = {name: tensor.clone() for name, tensor in before.items()}
    for tensor in after.values():
        tensor.view(-1)[::7] *= 1.5
    stored = {key: part for name in after for key, part in deltas.changes(name, after[name], before[name]).items()}
    save_file(stored, directory / file.name, {name: deltas.digest(tensor) for name, tensor in after.items()})
    save_file(after, changed / file.name)
    filesystem.complete(directory, version, "float32", layout="delta", base=base)
    return directory


def reference_logprobs(directory: Path, token_ids: list[int]) -> list[float]:
    """Return the log-probability of every token but the first, computed by transformers in float32."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    ids = torch.tensor([token_ids])
    with torch.no_grad():
        logprobs = model(ids).logits[0].log_softmax(-1)
    return logprobs[:-1].gather(1, ids[0, 1:, None]).squeeze(1).tolist()


def check_sampled_by(directory: Path, prompt: list[int], answer: dict[str, Any], tolerance: float = 1e-4) -> None:
    """Check that the log-probabilities of an engine's answer are those of the weights in a model directory."""
    expected = reference_logprobs(directory, prompt + tokens(answer))[len(prompt) - 1 :]
    assert logprobs(answer) == pytest.approx(expected, abs=tolerance)


def _random_model(seed: int, tied: bool) -> Qwen3MoeForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=8192,
        initializer_range=0.2,
        tie_word_embeddings=tied,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
    )
    return Qwen3MoeForCausalLM(config).to(torch.float32)


def _save(model: Qwen3MoeForCausalLM, directory: Path) -> None:
    model.save_pretrained(directory)
    make_tokenizer(directory)
