"""The benchmark of KV offload, as far as possible without an engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.kv_offload import load_for, recipe, report
from primeslurm.plan.commands.engine import ALONE, Engines


def test_conversations_outgrow_the_gpu_and_fit_into_host_memory() -> None:
    gpu, host = 87_381, 349_525  # 8 and 32 GiB of Qwen3-30B-A3B's KV cache
    load = load_for(8192, 0, 3, gpu, host)
    assert load.longest == 8192 + 2 * 512 + 3 * 128
    assert 2 * gpu < load.conversations * load.longest < host
    # other conversations have filled the GPU's cache since a conversation's last turn
    assert (load.conversations - 2 * load.at_once) * load.prompt > gpu > load.at_once * load.longest
    with pytest.raises(ValueError, match="raise --kv-gib"):
        load_for(8192, 0, 3, 8192, host)
    with pytest.raises(ValueError, match="raise --host-gib"):
        load_for(8192, 0, 3, gpu, 2 * gpu)


def test_engine_has_the_offload_tier_of_its_cell(tmp_path: Path) -> None:
    def argv(host_bytes: int | None) -> list[str]:
        offloading = recipe(tmp_path, "bfloat16", 10_240, 2**33, host_bytes)
        return list(Engines(offloading, "cuda", "engine", "python").command(ALONE).argv)

    with_tier, without = argv(2**35), argv(None)
    transfer = json.loads(with_tier[with_tier.index("--kv-transfer-config") + 1])
    assert transfer["kv_connector_extra_config"] == {"cpu_bytes_to_use": 2**35}
    assert "--kv-transfer-config" not in without and without[without.index("--kv-cache-memory-bytes") + 1] == str(2**33)


def test_a_report_sums_turns() -> None:
    counted = {"prompted": 100, "prefix_hits": 10, "external_hits": 70, "computed": 20, "generated": 30}
    moved = {"load_bytes": 2e9, "load_time": 0.1, "store_bytes": 0.0, "store_time": 0.0, "preemptions": 0.0}
    summary = report([{"seconds": seconds, "answers": [seconds], **counted, **moved} for seconds in (1.0, 2.0)])
    assert summary["sampled_tokens_per_s"] == 20 and summary["answer_seconds"] == {"median": 1.5, "max": 2.0}
    assert summary["shares"] == {"gpu": 0.1, "host": 0.7, "computed": 0.2}
    assert summary["load"] == {"gb": 4.0, "gb_per_s": 20.0} and summary["store"] == {"gb": 0.0, "gb_per_s": 0.0}
