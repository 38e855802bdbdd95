"""The benchmark of demo runs on GPUs, as far as possible without GPUs: its runs have valid plans."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu_run
from benchmarks.gpu_run import CELLS, RECIPES, idle, in_order
from tests.support.planning import plan_on_gpus

TINY = {
    **{"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 128, "hidden_size": 640},
    **{"intermediate_size": 1280, "moe_intermediate_size": 640, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 128, "num_experts": 8, "num_experts_per_tok": 2},
    **{"max_position_embeddings": 8192, "tie_word_embeddings": False},
}


@pytest.mark.parametrize("name", CELLS)
def test_every_cell_is_planned_on_its_gpus(name: str, tmp_path: Path) -> None:
    cell, chats = CELLS[name], tmp_path / "chats.jsonl"
    chats.touch()
    start = {} if cell.after else {"sft.data.path": chats}
    plan = plan_on_gpus(tmp_path, cell.gpus, RECIPES / cell.recipe, TINY, **cell.settings, **start)
    assert plan.totals.gpus == cell.gpus


def test_a_warm_start_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_run, "MODELS", tmp_path)
    cells = ["tool-use-fp8", "tool-use-fp8-replay"]
    assert in_order(cells) == ["tool-use-sft", *cells]
    (tmp_path / "tool-use-sft" / "model").mkdir(parents=True)
    assert in_order(cells) == cells


def test_idle_share_is_the_rest_of_the_time() -> None:
    steps = [
        {"trainer/seconds/wait": 1.0, "trainer/seconds/publish": 1.0, "engines/decode/busy_mean": busy}
        for busy in (1.0, 0.5)
    ]
    assert idle(steps) == {"trainer": 0.5, "decode": 0.25} and idle([]) == {}


def test_a_run_is_cancelled_when_the_benchmark_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []

    def python(*words: str, **_: object) -> int:
        called.append(words[2])
        return sys.exit(143) if words[2] == "submit" else 0  # as `timeout` does

    monkeypatch.setattr(gpu_run, "python", python)
    monkeypatch.setattr(gpu_run, "start", lambda *_: {})
    with pytest.raises(SystemExit):
        gpu_run.run("tool-use-fp8", CELLS["tool-use-fp8"], (), tmp_path / "archive", None)
    assert called == ["submit", "cancel"]


def test_ended_benchmark_ends_its_processes() -> None:
    code = "import time; print('up', flush=True); time.sleep(600)"
    imports = "from benchmarks.__main__ import end_in_order; from benchmarks.gpu_run import python"
    words = [sys.executable, "-c", f"{imports}; end_in_order(); python('-c', {code!r})"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    process.terminate()
    assert process.wait() == 143
    assert process.stdout.read() == ""  # the end of the output, so nobody holds the pipe
