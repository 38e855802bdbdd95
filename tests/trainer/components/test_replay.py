"""Router replay follows given choices in values and gradients, and changes nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from primeslurm.models import model_types
from primeslurm.models.hf_config import shape_of
from primeslurm.nn.layers.common import linear
from primeslurm.trainer.assembly.build import build
from primeslurm.trainer.components.router_replay import ReplayRouter
from primeslurm.trainer.distributed.world import World
from primeslurm.trainer.policy.policy_model import PolicyModel
from tests.trainer.conftest import SEQ_LEN, make_choices, make_recipe
from tests.trainer.families import CASES, Case, write

REPLAYING = [case for case in CASES if model_types()[case.config().model_type].router_replay]
TOKENS = torch.randint(3, 128, (1, SEQ_LEN), generator=torch.Generator().manual_seed(1))
POSITIONS = torch.arange(SEQ_LEN)[None]


def policy_of(path: Path, world: World, checkpointing: str = "none") -> PolicyModel:
    parallelism = {"activation_checkpointing": checkpointing}
    return build(make_recipe(path, trainer={"router_replay": True, "parallelism": parallelism}), world)


def run(policy: PolicyModel, routed: torch.Tensor | None = None) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """Return logits, and the experts [1, len, top_k] of each MoE layer."""
    taken: dict[int, torch.Tensor] = {}

    def note(router: Any, _: Any, output: tuple[torch.Tensor, ...]) -> None:
        taken[router.layer] = output[1]

    routers = [module for module in policy.model.modules() if isinstance(module, ReplayRouter)]
    hooks = [router.register_forward_hook(note) for router in routers]
    with torch.no_grad():
        logits = policy.logits(TOKENS, POSITIONS, routed=routed)[0]
    for hook in hooks:
        hook.remove()
    return logits, taken


@pytest.mark.parametrize("case", REPLAYING, ids=lambda case: case.name)
def test_replayed_own_choices_change_nothing_and_others_are_followed(case: Case, world: World, tmp_path: Path) -> None:
    policy = policy_of(write(case, tmp_path), world)
    logits, own = run(policy)
    routers = [module for module in policy.model.modules() if isinstance(module, ReplayRouter)]
    layers, top_k, experts = len(policy.model.layers), routers[0].top_k, routers[0].num_experts
    routed = torch.full((1, SEQ_LEN, layers, top_k), 77, dtype=torch.uint8)  # layers without experts are not looked at
    for layer, ids in own.items():
        routed[:, :, layer] = ids
    assert torch.equal(run(policy, routed)[0], logits)

    others = torch.rand(1, SEQ_LEN, layers, experts).argsort(-1)[..., :top_k].to(torch.uint8)
    unknown = torch.rand(1, SEQ_LEN) < 0.3
    others[unknown] = 255
    changed, taken = run(policy, others)
    assert (changed - logits).abs().max() > 1e-3
    for layer, ids in taken.items():
        assert torch.equal(ids[~unknown], others[:, :, layer][~unknown].long())
    first = min(taken)
    assert torch.equal(taken[first][unknown], own[first][unknown])
    wide = torch.where(others == 255, 65535, others.int()).to(torch.uint16)
    assert torch.equal(run(policy, wide)[0], changed)
    assert torch.equal(run(policy)[0], logits), "nothing is replayed that was not given"
    assert shape_of(case.config().to_dict()).expert_layers == tuple(sorted(own)), "rollouts are checked in these layers"


@pytest.mark.parametrize("wrong", [(0, 0), (3, 3), (9, 1), (255, 1), (1, 255)])
def test_invalid_experts_are_not_replayed(wrong: tuple[int, int], moe_model: Path, world: World) -> None:
    """Each token is its own document, so that tokens are independent."""
    policy = policy_of(moe_model, world)
    positions = torch.zeros_like(POSITIONS)
    routed = torch.rand(1, SEQ_LEN, 2, 8, generator=torch.Generator().manual_seed(2)).argsort(-1)[..., :2]
    routed = routed.to(torch.uint8)
    unknown, repeated = routed.clone(), routed.clone()
    unknown[:, 10], repeated[:, 10] = 255, torch.tensor(wrong)
    with torch.no_grad():
        replayed, expected, actual = (
            policy.logits(TOKENS, positions, routed=r)[0] for r in (routed, unknown, repeated)
        )
    assert torch.equal(actual, expected)
    others = torch.arange(SEQ_LEN) != 10
    assert torch.equal(actual[:, others], replayed[:, others])


def test_router_with_top_k_1_replays_expert_0(world: World) -> None:
    config = ReplayRouter.Config(num_experts=4, top_k=1, gate=linear(8, 4), layer=0)
    router = ReplayRouter(config)
    torch.nn.init.normal_(router.gate.weight)
    rows = torch.randn(1, 3, 8)
    _, own, _ = router(rows)
    router.replayed = torch.tensor([[[0], [3], [255]]], dtype=torch.uint8)
    assert router(rows)[1].flatten().tolist() == [0, 3, int(own[0, 2, 0])]


def test_replay_matches_outputs_and_gate_gradients_of_transformers(moe_model: Path, world: World) -> None:
    policy = policy_of(moe_model, world, "full")  # the backward pass recomputes the routing
    choices = make_choices(np.random.default_rng(0), SEQ_LEN)
    logits = policy.logits(TOKENS, POSITIONS, routed=torch.from_numpy(choices)[None])[0]
    logits.square().mean().backward()

    reference = AutoModelForCausalLM.from_pretrained(moe_model, dtype=torch.float32)
    for layer, block in enumerate(reference.model.layers):
        force(block.mlp.gate, torch.from_numpy(choices[:, layer]))
    expected = reference(TOKENS).logits
    expected.square().mean().backward()
    torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-4)
    for layer, block in enumerate(reference.model.layers):
        (weight,) = policy.model.layers[str(layer)].moe.router.gate.parameters()
        gradient = weight.grad
        gradient = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        assert block.mlp.gate.weight.grad.abs().max() > 1e-5
        torch.testing.assert_close(gradient, block.mlp.gate.weight.grad, atol=1e-7, rtol=1e-3)


def force(gate: Any, choices: torch.Tensor) -> None:
    """Make a gate of transformers choose given experts where they are known."""

    def forward(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = hidden.reshape(-1, gate.hidden_dim) @ gate.weight.t()
        own = logits.topk(gate.top_k).indices
        repeated = (choices[:, :1] == choices[:, 1:]).all(-1, keepdim=True)  # or unknown
        ids = torch.where(repeated, own, choices.long())
        weights = logits.softmax(-1).gather(-1, ids)
        return logits, weights / weights.sum(-1, keepdim=True), ids

    gate.forward = forward


def test_choices_of_another_model_are_rejected(moe_model: Path, dense_model: Path, world: World) -> None:
    policy = policy_of(moe_model, world)
    for shape in ((1, SEQ_LEN, 1, 2), (1, SEQ_LEN, 2, 4)):
        with pytest.raises(ValueError, match=f"routed experts of {shape[2]} layers x {shape[3]}"):
            policy.logits(TOKENS, POSITIONS, routed=torch.zeros(shape, dtype=torch.uint8))
    with pytest.raises(ValueError, match="no router"):
        policy_of(dense_model, world)
