"""Training of the draft layer: the formula of vLLM's draft layers, and a policy that does not notice it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from primeslurm.recipe import Recipe
from primeslurm.trainer.assembly.build import build
from primeslurm.trainer.checkpoints.checkpoint import Checkpoints
from primeslurm.trainer.checkpoints.export import export
from primeslurm.trainer.components.logprobs import next_token_loss
from primeslurm.trainer.distributed.world import World
from primeslurm.trainer.policy import draft_training
from primeslurm.trainer.policy.train_step import TrainStep
from primeslurm.trainer.weight_senders.filesystem_sender import Publisher
from primeslurm.trainer.weights.export import Encoding
from primeslurm.wire.stored import checkpoints
from tests.trainer.as_released import stack_experts
from tests.trainer.conftest import SEQ_LEN, make_batch, make_recipe, make_timer, published, tensors
from tests.trainer.families import BY_NAME, reference_of, with_layers, write_drafting
from tests.trainer.ranks import train, train_on_ranks

QWEN = ("qwen3_5_text-tied", "qwen3_5_moe_text", "qwen3_5", "qwen3_5_moe")
FAMILIES = ("glm4_moe", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", *QWEN)
LAYER = 2
DRAFT = f"model.layers.{LAYER}."
COPIES = {
    DRAFT + "embed_tokens.weight": "model.embed_tokens.weight",
    DRAFT + "shared_head.head.weight": "lm_head.weight",
}


def draft_recipe(path: Path, draft_layer: dict[str, float] | None, **sections: Any) -> Recipe:
    trainer = {"optimizer": {"lr": 1e-3}, "draft_layer": draft_layer, **sections.pop("trainer", {})}
    return make_recipe(path, trainer=trainer, **sections)


def reference(family: str, path: Path, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits of the draft layer for one document [1, length], computed by transformers' layers."""
    case, stored, is_qwen = BY_NAME[family], tensors(path), family in QWEN
    longer = with_layers(case, LAYER + 1)
    layers = f"model.{'language_model.' if hasattr(longer, 'vision_config') else ''}layers.{LAYER}."
    names = {r"^mtp\.layers\.0\.": layers} if is_qwen else None
    model: Any = reference_of(case).from_pretrained(path, config=longer, dtype=torch.float32, key_mapping=names)
    decoder = getattr(model.model, "language_model", model.model)

    def norm(name: str, qwen: str) -> Any:
        layer = type(decoder.norm)(decoder.config.hidden_size, eps=decoder.config.rms_norm_eps)
        layer.weight.data = stored[f"mtp.{qwen}.weight" if is_qwen else f"{DRAFT}{name}.weight"]
        return layer

    *others, last = decoder.layers
    decoder.layers = nn.ModuleList(others)
    hidden = decoder(tokens, use_cache=False).last_hidden_state
    embeddings = decoder.embed_tokens(tokens.roll(-1, 1))
    if not is_qwen:
        embeddings[:, 0] = 0
    halves = norm("enorm", "pre_fc_norm_embedding")(embeddings), norm("hnorm", "pre_fc_norm_hidden")(hidden)
    joined = torch.cat(halves, -1) @ stored["mtp.fc.weight" if is_qwen else f"{DRAFT}eh_proj.weight"].T
    last.self_attn.layer_idx = 0
    decoder.layers, decoder.norm = nn.ModuleList([last]), norm("shared_head.norm", "norm")
    decoder.config.layer_types = ["full_attention"]
    return model.lm_head(decoder(inputs_embeds=joined, use_cache=False).last_hidden_state)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_logits_equal_the_reference_in_each_document(family: str, world: World, tmp_path: Path) -> None:
    path = write_drafting(BY_NAME[family], tmp_path)
    recipe = draft_recipe(path, {})
    step = TrainStep(build(recipe, world), recipe, world)
    assert step.draft_training is not None
    lengths = (40, SEQ_LEN - 40)
    tokens = torch.randint(3, 128, (1, SEQ_LEN), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    step.policy.logits(tokens, positions)
    stored = tensors(path)
    head = stored["lm_head.weight" if "lm_head.weight" in stored else "model.embed_tokens.weight"]
    logits = step.draft_training.hidden(positions) @ head.T
    for ours, document in zip(logits.split(lengths, 1), tokens.split(lengths, 1), strict=True):
        expected = reference(family, path, document)
        # The last position has no next token.
        torch.testing.assert_close(ours[:, :-1], expected[:, :-1], atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_5_text-tied"])
def test_policy_is_trained_as_without_draft_layer(family: str, world: World, tmp_path: Path) -> None:
    path = write_drafting(BY_NAME[family], tmp_path / "model")
    runs = {}
    for name, option in (("keep", None), ("train", {"lr": 1e-2})):
        recipe = draft_recipe(path, option, max_steps=6)
        step, out = TrainStep(build(recipe, world), recipe, world), tmp_path / name
        metrics = [step.train(make_batch(1), make_timer(out)) for _ in range(recipe.max_steps)]
        Publisher(step.policy, out, Encoding(torch.float32), 1, world).publish(1)
        runs[name] = metrics, published(out, 1)
    (metrics, policy), (with_drafts, both) = runs.values()
    for without, beside in zip(metrics, with_drafts, strict=True):
        assert (without["loss"], without["grad_norm"]) == (beside["loss"], beside["grad_norm"])
        assert not any(name.startswith("draft") for name in without)
    for name, tensor in policy.items():
        assert torch.equal(both[name], tensor), name

    losses = [step["draft_loss"] for step in with_drafts]
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.8 * losses[0]
    assert with_drafts[-1]["draft_acceptance"] > with_drafts[0]["draft_acceptance"]
    stored = tensors(path)
    assert set(both) == set(stored) and not any(name.startswith((DRAFT, "mtp.")) for name in policy)
    copies = COPIES.keys() & stored
    assert len(copies) == (0 if family in QWEN else 2)
    assert all(torch.equal(both[copy], both[COPIES[copy]]) for copy in copies)
    changed = {name for name, tensor in both.items() if name not in copies and not torch.equal(tensor, stored[name])}
    frozen = {name for name in stored if name.endswith("e_score_correction_bias")} | copies
    assert set(stored) - changed <= frozen


def test_labels_are_sampled_tokens_with_two_tokens_before_them(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = draft_recipe(write_drafting(BY_NAME["glm4_moe"], tmp_path), {})
    step, batch, labels = TrainStep(build(recipe, world), recipe, world), make_batch(1), list[torch.Tensor]()

    def note(hidden: torch.Tensor, weight: torch.Tensor, wanted: torch.Tensor, *rest: Any) -> Any:
        labels.append(wanted)
        return next_token_loss(hidden, weight, wanted, *rest)

    monkeypatch.setattr(draft_training, "next_token_loss", note)
    step.train(batch, make_timer(tmp_path))
    expected = np.concatenate([row.token_ids[row.mask & (row.positions >= 2)] for row in batch.rows])
    np.testing.assert_array_equal(torch.cat(labels), expected)


@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_5_moe"])
def test_resumed_draft_layer_continues_equally_and_is_exported(family: str, world: World, tmp_path: Path) -> None:
    path = write_drafting(BY_NAME[family], tmp_path / "model")
    stored = stack_experts(path) if family in QWEN else tensors(path)
    recipe = draft_recipe(path, {"lr": 1e-2}, checkpoint={"interval": 1})

    def run(attempt: int) -> tuple[TrainStep, Checkpoints]:
        step = TrainStep(build(recipe, world), recipe, world)
        return step, Checkpoints(tmp_path, attempt, recipe.checkpoint, world, None)

    first, saver = run(1)
    timer = make_timer(tmp_path)
    first.train(make_batch(1), timer)
    saver.after(1, first, timer)
    expected = first.train(make_batch(2), timer)
    resumed, saver = run(2)
    assert saver.restore(resumed) == 1
    actual = resumed.train(make_batch(2), timer)
    assert {n: v for n, v in actual.items() if n.startswith("draft")} == {
        n: v for n, v in expected.items() if n.startswith("draft")
    }
    saver.finish(2, resumed, timer)
    export(recipe, checkpoints.step_dir(tmp_path, 2), tmp_path / "exported")
    Publisher(first.policy, tmp_path, Encoding(torch.float32), 1, world).publish(2)
    exported = tensors(tmp_path / "exported")
    assert set(exported) == set(stored)
    for name, tensor in published(tmp_path, 2).items():
        assert torch.equal(exported[name], tensor), name


@pytest.mark.usefixtures("unmeasured")
def test_two_ranks_match_one_with_experts_in_parallel_and_with_a_tied_head(world: World, tmp_path: Path) -> None:
    families = ("glm4_moe", "qwen3_5_moe", "qwen3_5_text-tied")
    models = {family: write_drafting(BY_NAME[family], tmp_path / family) for family in families}

    def recipe(family: str, size: int) -> Recipe:
        experts = "tied" not in family
        checkpointing = "none" if size == 1 else "full"
        ep = size if experts else 1
        parallelism = {"ep": ep, "activation_checkpointing": checkpointing, "reduce_gradients": "step"}
        memory = {} if size == 1 else {"lm_head_chunk": 16, "optimizer_state_offload": True}
        trainer = {
            "parallelism": parallelism,
            "memory": memory,
            "micro_batch_tokens": SEQ_LEN,
            "router_replay": experts,
        }
        return draft_recipe(models[family], {"lr": 1e-3}, max_steps=2, trainer=trainer)

    runs = train_on_ranks(2, {tmp_path / f"{family}-two": recipe(family, 2) for family in families})
    for family, ranks in zip(families, runs, strict=True):
        expected = train(recipe(family, 1), tmp_path / f"{family}-one", world)
        for step, metrics in enumerate(expected):
            for name in ("loss", "grad_norm", "draft_loss", "draft_acceptance", "draft_grad_norm"):
                assert ranks[0][step][name] == pytest.approx(metrics[name], rel=1e-4, abs=1e-6), name
        two, one = (published(tmp_path / f"{family}-{size}", 2) for size in ("two", "one"))
        assert set(two) == set(one)
        for name, tensor in two.items():
            torch.testing.assert_close(tensor, one[name], atol=5e-4, rtol=1e-3, msg=name)
