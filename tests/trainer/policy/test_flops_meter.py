"""The meter of operations: padding, context parallelism, unknown models and peak rates."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from primeslurm.models.catalog import catalog
from primeslurm.models.flops import Work, flops
from primeslurm.trainer.distributed.world import World
from primeslurm.trainer.policy.flops_meter import FlopsMeter, peak_tflops
from primeslurm.wire.batches.batch import Row
from tests.trainer.conftest import SEQ_LEN, make_recipe, make_row

SHAPE = catalog()["Qwen/Qwen3-30B-A3B"].shape
DOCUMENTS = (40, 16)


@pytest.fixture
def row() -> Row:
    """Two documents and padding."""
    row = make_row(np.random.default_rng(0))
    assert list(row.positions).count(0) == 3
    used = sum(DOCUMENTS)
    return replace(row, token_ids=np.where(np.arange(SEQ_LEN) < used, row.token_ids, 0))


def test_padding_is_not_counted(row: Row, world: World) -> None:
    meter = FlopsMeter(SHAPE, world)
    meter.add([row], 10, None)
    metrics = meter.take(2.0)
    documents = np.concatenate([np.arange(length) for length in DOCUMENTS])
    assert metrics["forwarded_tokens"] == sum(DOCUMENTS)
    assert metrics["tokens_per_s_per_gpu"] == sum(DOCUMENTS) / 2
    assert metrics["tflops_per_gpu"] == pytest.approx(flops(SHAPE, Work.of(documents, SHAPE, 10)).step / 2e12)
    assert "mfu" not in metrics


def test_row_without_documents_is_not_counted(row: Row, world: World) -> None:
    nothing = replace(
        row,
        positions=np.arange(SEQ_LEN, dtype=np.int32),
        token_ids=np.zeros_like(row.token_ids),
        mask=np.zeros_like(row.mask),
    )
    meter = FlopsMeter(SHAPE, world)
    meter.add([nothing], 0, None)
    assert meter.take(1.0) == {"forwarded_tokens": 0, "tokens_per_s_per_gpu": 0, "tflops_per_gpu": 0}


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_share_rows_count_them_once(ranks: int, row: Row, world: World) -> None:
    whole = FlopsMeter(SHAPE, world, peak_tflops=100.0)
    whole.add([row], 12, None)
    expected = whole.take(1.0)
    sums = dict.fromkeys(expected, 0.0)
    for rank in range(ranks):
        shard = FlopsMeter(SHAPE, world, peak_tflops=100.0, cp=(rank, ranks))
        shard.add([row.cp_shard(rank, ranks)], 12 // ranks, None)
        sums = {name: sums[name] + value for name, value in shard.take(1.0).items()}
    assert sums == pytest.approx(expected)


def test_unknown_model_has_no_operations(row: Row, world: World) -> None:
    meter = FlopsMeter(None, world, peak_tflops=989.0)
    meter.add([row], 12, None)
    assert set(meter.take(1.0)) == {"forwarded_tokens", "tokens_per_s_per_gpu"}


def test_mfu_is_the_used_fraction_of_the_peak(row: Row, world: World) -> None:
    meter = FlopsMeter(SHAPE, world, peak_tflops=50.0)
    meter.add([row], 12, None)
    metrics = meter.take(1.0)
    assert metrics["mfu"] == pytest.approx(metrics["tflops_per_gpu"] / 50)


def test_peak_of_the_recipe_wins_and_cpus_have_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bfloat16 = make_recipe(tmp_path, model={"path": str(tmp_path)})
    assert peak_tflops(bfloat16, torch.device("cpu")) is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    gpu = torch.device("cuda")
    assert peak_tflops(bfloat16, gpu) == 989
    assert peak_tflops(make_recipe(tmp_path, model={"path": str(tmp_path)}, trainer={"fp8": True}), gpu) == 1979
    assert peak_tflops(make_recipe(tmp_path), gpu) is None, "float32"
    chosen = make_recipe(tmp_path, model={"path": str(tmp_path)}, monitor={"peak_tflops": 400})
    assert peak_tflops(chosen, gpu) == 400
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    assert peak_tflops(bfloat16, gpu) is None
