"""Each memory-saving switch saves memory on a GPU, and leaves the loss unchanged."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3Config, Qwen3ForCausalLM

from scripts.models import tiny_model
from tests.trainer.conftest import finish, make_recipe, printed, start_fresh_ranks

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.gpus(memory_gb=30, lane="parameters", minutes=3),
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
SEQ_LEN = 16384
SWITCHES: dict[str, dict[str, Any]] = {
    "selective": {"parallelism": {"activation_checkpointing": "selective"}},
    "full": {"parallelism": {"activation_checkpointing": "full"}},
    "full and activation_offload": {
        "parallelism": {"activation_checkpointing": "full"},
        "memory": {"activation_offload": True},
    },
    "lm_head_chunk": {"memory": {"lm_head_chunk": 1024}},
    "optimizer_offload": {"memory": {"optimizer_offload": True}},
    "optimizer_state_offload": {"memory": {"optimizer_state_offload": True}},
    "sgd": {"optimizer": {"type": "sgd", "lr": 1e-6}},
    "muon": {"optimizer": {"type": "muon", "lr": 1e-6}},
}


def measure(model: Path, directory: Path, **trainer: Any) -> dict[str, Any]:
    """Return peak memory, seconds per step and losses of one process."""
    directory.mkdir()
    config = {"path": str(model), "dtype": "bfloat16"}
    recipe = make_recipe(
        model, model=config, max_steps=9, seq_len=SEQ_LEN, trainer={"optimizer": {"lr": 1e-6}, **trainer}
    )
    path = directory / "recipe.json"
    path.write_text(recipe.model_dump_json(by_alias=True))
    (output,) = finish(start_fresh_ranks(1, "tests.gpu.memory_rank", str(path)))
    result: dict[str, Any] = printed(output, "RESULT")[0]
    return result


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """Return the measurements of each switch, by name; "none" is without any."""
    root = tmp_path_factory.mktemp("memory")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=65536,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=24,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=SEQ_LEN,
        tie_word_embeddings=False,
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(root / "model")
    tiny_model.tokenizer().save_pretrained(root / "model")

    @functools.cache
    def row(name: str) -> dict[str, Any]:
        actual = measure(root / "model", root / name.replace(" ", "-"), **SWITCHES.get(name, {}))
        print(
            f"\n{name:28} {actual['gb']:8.2f} GB {actual['seconds']:8.3f} s/step  losses {actual['losses']}", flush=True
        )
        return actual

    return row


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_saves_memory(name: str, measured: Callable[[str], dict[str, Any]]) -> None:
    plain, actual = measured("none"), measured(name)
    assert actual["losses"][0] == pytest.approx(plain["losses"][0], rel=2e-2, abs=2e-3)
    assert actual["gb"] < plain["gb"]


@pytest.mark.parametrize(("less", "more"), [("full", "selective"), ("full and activation_offload", "full")])
def test_a_switch_saves_more_than_another(less: str, more: str, measured: Callable[[str], dict[str, Any]]) -> None:
    assert measured(less)["gb"] < measured(more)["gb"]
