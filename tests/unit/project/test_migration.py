"""The migration pages name the keys of other tools."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from primeslurm.recipe.reading.aliases import keys_of, tools
from scripts import migration

PAGES = Path(__file__).resolve().parents[3] / "docs" / "migration"
PRIME_RL_EXAMPLES = """
ckpt.interval deployment.gpus_per_node deployment.num_infer_nodes deployment.num_infer_replicas
deployment.num_train_nodes deployment.type inference.deployment.decode_nodes_per_replica
inference.deployment.prefill_nodes_per_replica inference.deployment.type inference.use_deep_gemm
inference.vllm.enable_eplb inference.vllm.enable_expert_parallel inference.vllm.gpu_memory_utilization
inference.vllm.model inference.vllm.tensor_parallel_size inference.vllm.tool_call_parser log.level model.name
monitors.wandb.project orchestrator.batch_size orchestrator.concurrency.initial_inflight
orchestrator.concurrency.max_inflight orchestrator.eval.interval orchestrator.eval.source.env.agent.harness.id
orchestrator.eval.source.env.agent.runtime.labels orchestrator.eval.source.env.agent.runtime.type
orchestrator.eval.source.env.taskset.id orchestrator.eval.source.name orchestrator.group_size
orchestrator.max_off_policy_steps orchestrator.model.name orchestrator.train.sampling.max_completion_tokens
orchestrator.train.source.env.agent.harness.id orchestrator.train.source.env.agent.runtime.type
orchestrator.train.source.env.taskset.id orchestrator.train.source.name seq_len slurm.job_name
trainer.ckpt.skip_optimizer trainer.dist_timeout_seconds trainer.model.ac.freq
trainer.model.ac_offloading.max_inflight_activations trainer.model.attn trainer.model.compile trainer.model.ep
trainer.model.fused_lm_head_token_chunk_size trainer.model.impl trainer.model.name trainer.optim.lr trainer.optim.type
trainer.optim.weight_decay weight_broadcast.port weight_broadcast.quantize_in_weight_transfer weight_broadcast.timeout
weight_broadcast.type
"""
"""All keys of prime-rl's examples/advanced/glm-5.2/swe.toml and qwen3-30b-a3b/math.toml (August 2026)."""


@pytest.mark.parametrize("path", sorted(PAGES.glob("*.md")), ids=lambda path: path.stem)
def test_a_page_has_every_key_that_messages_explain(path: Path) -> None:
    text = path.read_text()
    assert [block.group(2, 3) for block in migration.BLOCK.finditer(text)] == [
        ("keys", path.stem),
        ("values", path.stem),
    ]
    (tool,) = [tool for tool in tools() if tool == path.stem]
    assert [key for key, _ in keys_of(tool) if f"`{key}`" not in text] == []


def test_every_key_of_large_prime_rl_examples_is_found() -> None:
    rows = "\n".join(line for line in (PAGES / "prime-rl.md").read_text().splitlines() if line.startswith("| `"))
    named = set(re.findall(r"`([\w.]+)`", "\n".join(row.split("|")[1] for row in rows.splitlines())))
    missing = [
        key for key in PRIME_RL_EXAMPLES.split() if not any(key == name or key.endswith(f".{name}") for name in named)
    ]
    assert missing == []
