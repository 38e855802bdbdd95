"""Of ranks on two GPUs one hangs while the other waits in NCCL's collectives, and the head names the first one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from scripts.models import tiny_model
from tests.trainer.distributed.test_stopped_ranks import Ranks, is_named_when_stopped_in, training

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.gpus(2, minutes=4),
    pytest.mark.timeout(900),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@pytest.fixture(scope="module", params=[{"ep": 2}, {"cp": 2}], ids=["ep", "cp"])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    directory = tmp_path_factory.mktemp("stopped")
    tiny_model.write_model(directory / "model", "qwen3_moe", hidden=64)
    model = {"path": str(directory / "model"), "dtype": "bfloat16"}
    trainer = {"optimizer": {"lr": 1e-5}, "parallelism": request.param, "micro_batch_tokens": 64}
    with training(directory / "model", directory, 2, model=model, trainer=trainer) as actual:
        yield actual


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("phase", ["forward_backward", "optimizer", "publish", "checkpoint"])
def test_hanging_rank_is_named(ranks: Ranks, phase: str, victim: int) -> None:
    is_named_when_stopped_in(phase, ranks, victim)
