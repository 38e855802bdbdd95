"""Router replay on a GPU follows the given experts, forward and backward."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.support.ports import free_port
from benchmarks.support.servers import rank_environment
from primeslurm.trainer.assembly.build import build
from primeslurm.trainer.base.interrupt import Interrupt
from primeslurm.trainer.components.router_replay import ReplayRouter
from primeslurm.trainer.distributed.world import join
from scripts.models import tiny_model
from tests.trainer.conftest import make_recipe

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
SEQ_LEN = 256


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16], ids=["uint8", "uint16"])
def test_given_experts_are_followed(dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in rank_environment(0, 1, free_port()).items():
        monkeypatch.setenv(name, value)
    tiny_model.write_model(tmp_path / "model", "qwen3_moe", hidden=128)
    world = join(Interrupt(), timeout_s=60)
    try:
        trainer = {"router_replay": True, "parallelism": {"activation_checkpointing": "full"}}
        recipe = make_recipe(tmp_path / "model", seq_len=SEQ_LEN, trainer=trainer)
        model = {"path": str(tmp_path / "model"), "dtype": "bfloat16"}
        policy = build(recipe.model_copy(update={"model": type(recipe.model)(**model)}), world)
        routers = [module for module in policy.model.modules() if isinstance(module, ReplayRouter)]
        taken: list[torch.Tensor] = []
        for router in routers:
            router.register_forward_hook(lambda _, __, output: taken.append(output[1]))
        tokens = torch.randint(3, tiny_model.VOCABULARY, (1, SEQ_LEN), device="cuda")
        positions = torch.arange(SEQ_LEN, device="cuda")[None]
        choices = torch.rand(1, SEQ_LEN, 2, 8, device="cuda").argsort(-1)[..., :2]
        choices[:, ::4] = torch.iinfo(dtype).max
        logits = policy.logits(tokens, positions, routed=choices.to(dtype))[0]
        logits.float().square().mean().backward()
        torch.cuda.synchronize()
    finally:
        world.close()
    known = torch.arange(SEQ_LEN, device="cuda") % 4 > 0
    assert len(taken) == 4, "two layers, forwards and again in the backward pass"
    for layer, ids in zip((0, 1, 1, 0), taken, strict=True):
        assert torch.equal(ids[:, known], choices[:, known, layer])
        assert ids.max() < 8
    assert all(router.gate.weight.grad is not None for router in routers)
