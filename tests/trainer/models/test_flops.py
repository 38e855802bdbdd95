"""The FLOP formula of every family against torch's FlopCounterMode.

torch counts matrix products alone, and what a kernel computes in its place depends on the kernel: fused attention on
CPUs is not counted, and chunked recurrences compute more than token by token. So the tests replace attention, key
selection and recurrences by their definitions, one query or token at a time, and count those. Everything else is the
trainer's code.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from primeslurm.models.nemotron_h import mamba
from primeslurm.models.qwen3_5 import delta_net
from primeslurm.nn import compat
from primeslurm.nn.layers import scan, sparse_attention
from primeslurm.recipe import Recipe
from primeslurm.recipe.sections.trainer import Model
from primeslurm.trainer.assembly.build import build
from primeslurm.trainer.data.image_positions import vision_input
from primeslurm.trainer.distributed.world import World
from primeslurm.trainer.policy.flops_meter import FlopsMeter
from primeslurm.trainer.policy.train_step import TrainStep
from primeslurm.trainer.weights import model_directory
from primeslurm.wire.batches.batch import Batch, BatchInfo, Row
from tests.trainer.conftest import SEQ_LEN, make_batch, make_recipe, make_timer
from tests.trainer.families import BY_NAME, CASES, Case, write, write_drafting
from tests.trainer.image_rows import packed, write_vision_model

TOLERANCE = 0.02


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: list[torch.Tensor], scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs [heads, queries, values] and log-sum-exps; query i sees the keys `seen[i]`."""
    outputs, sums = [], []
    for query, keys in enumerate(seen):
        scores = q[:, query, None] @ k[:, keys].mT * scale
        outputs.append(scores.softmax(-1) @ v[:, keys])
        sums.append(scores.logsumexp(-1))
    return torch.cat(outputs, 1), torch.cat(sums, 1)


def dense_attention(
    self: Any, q: Any, k: Any, v: Any, *, attention_masks: Any, scale: Any = None, **options: Any
) -> Any:
    (q,), (k,), (v,) = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
    mask = compat.dense(attention_masks.mask_mod, 1, q.shape[1], k.shape[1], q.device)[0, 0]
    out, sums = attend(q, k, v, [row.nonzero().flatten() for row in mask], scale or q.shape[-1] ** -0.5)
    out = out.transpose(0, 1)[None]
    transform = options.get("out_transform")
    return transform(out, sums.T[None]) if transform else out


def sparse_mla(query: Any, keys: Any, indices: Any, rank: int, scale: float) -> torch.Tensor:
    heads = query.shape[2]
    shared = keys[0].expand(heads, -1, -1)
    out, _ = attend(query[0].transpose(0, 1), shared, shared[..., :rank], [i[i >= 0].long() for i in indices[0]], scale)
    return out.transpose(0, 1)[None]


def select_keys(query: Any, keys: Any, weight: Any, first: Any, last: Any, offset: int, top_k: int, group: str) -> Any:
    selected = torch.full((1, query.shape[1], min(top_k, keys.shape[1])), -1, dtype=torch.int32)
    for index, (begin, end) in enumerate(zip(first[0].tolist(), last[0].tolist(), strict=True)):
        scores = (query[0, index] @ keys[0, begin : end + 1].T).relu()
        best = (scores * weight[0, index, :, None]).sum(0).topk(min(top_k, scores.shape[1])).indices + begin
        selected[0, index, : len(best)] = best
    return selected


def delta_rule(q: Any, k: Any, v: Any, log_decay: Any, beta: Any, positions: Any, state: Any, size: int) -> Any:
    outputs = []
    for t in range(v.shape[1]):
        state = state * (log_decay[:, t].exp() * (positions[:, t] != 0)[:, None])[..., None, None]
        key = k[:, t, :, None]
        state = state + key.mT @ ((v[:, t, :, None] - key @ state) * beta[:, t, :, None, None])
        outputs.append(q[:, t, :, None] @ state)
    return torch.cat(outputs, 2).transpose(1, 2), state


def state_space(x: Any, dt: Any, decay: Any, b: Any, c: Any, positions: Any, state: Any, size: int) -> Any:
    outputs = []
    b, c = (values.repeat_interleave(x.shape[2] // values.shape[2], 2) for values in (b, c))
    for t in range(x.shape[1]):
        state = state * ((dt[:, t] * decay).exp() * (positions[:, t] != 0)[:, None])[..., None, None]
        state = state + b[:, t, :, None].mT @ (x[:, t] * dt[:, t, :, None])[:, :, None]
        outputs.append(c[:, t, :, None] @ state)
    return torch.cat(outputs, 2).transpose(1, 2), state


def grouped_flops(a: torch.Size, b: torch.Size, *_: Any, **__: Any) -> int:
    """Return the operations of `_grouped_mm`, which torch does not count. Rows belong to one group each."""
    return 2 * a[-2] * a[-1] * b[-1]


@pytest.fixture
def definitions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace kernels by definitions, and compute nothing again in the backward pass."""
    monkeypatch.setattr(compat.DenseAttention, "forward", dense_attention)
    monkeypatch.setattr(sparse_attention, "sparse_mla", sparse_mla)
    monkeypatch.setattr(sparse_attention, "dense_mla", sparse_mla)
    monkeypatch.setattr(sparse_attention, "_select_keys", select_keys)
    monkeypatch.setattr(delta_net, "gated_delta_rule", delta_rule)
    monkeypatch.setattr(mamba, "state_space", state_space)
    monkeypatch.setattr(scan, "checkpoint", lambda run, *tensors, **_: run(*tensors))


def recipe_of(path: Path, **trainer: Any) -> Recipe:
    plain: dict[str, Any] = {
        "optimizer": {"lr": 1e-3},
        "parallelism": {"activation_checkpointing": "none"},
    }
    return make_recipe(path, trainer=plain | trainer)


def ratio(step: TrainStep, batch: Batch, directory: Path) -> float:
    """Train a step. Return our operations / torch's."""
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten._grouped_mm: grouped_flops}) as counter:
        metrics = step.train(batch, make_timer(directory))
    seconds = metrics["tokens"] / metrics["tokens_per_s"]
    return metrics["tflops_per_gpu"] * 1e12 * seconds / counter.get_total_flops()


def step_of(recipe: Recipe, world: World) -> TrainStep:
    policy = build(recipe, world)
    meter = FlopsMeter.of(policy, model_directory.load_config(policy.source), recipe, world)
    return TrainStep(policy, recipe, world, meter=meter)


@pytest.mark.usefixtures("definitions")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_formula_matches_what_torch_counts(case: Case, world: World, tmp_path: Path) -> None:
    step = step_of(recipe_of(write(case, tmp_path)), world)
    batch = make_batch(1, rows=1, seq_len=SEQ_LEN)
    assert ratio(step, batch, tmp_path) == pytest.approx(1, abs=TOLERANCE)


@pytest.mark.usefixtures("definitions")
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v32", "nemotron_h-latent"])
def test_frozen_weights_have_no_gradient(name: str, world: World, tmp_path: Path) -> None:
    step = step_of(recipe_of(write(BY_NAME[name], tmp_path), lora={"rank": 8, "alpha": 16.0}), world)
    # The formula counts the first layer like the others, although its inputs need no gradient with LoRA.
    embedding = next(module for module in step.policy.model.modules() if isinstance(module, torch.nn.Embedding))
    embedding.register_forward_hook(lambda module, inputs, output: output.requires_grad_())
    batch = make_batch(1, rows=1, seq_len=SEQ_LEN)
    assert ratio(step, batch, tmp_path) == pytest.approx(1, abs=TOLERANCE)


@pytest.mark.usefixtures("definitions")
@pytest.mark.parametrize("name", ["glm_moe_dsa", "qwen3_5_moe"])
def test_draft_layer_is_counted(name: str, world: World, tmp_path: Path) -> None:
    step = step_of(recipe_of(write_drafting(BY_NAME[name], tmp_path), draft_layer={}), world)
    assert ratio(step, make_batch(1, rows=1, seq_len=SEQ_LEN), tmp_path) == pytest.approx(1, abs=TOLERANCE)


@pytest.mark.usefixtures("definitions")
@pytest.mark.parametrize(("name", "frozen"), [("qwen3_vl", True), ("qwen3_5", False)])
def test_vision_encoder_is_counted_per_patch(
    name: str, frozen: bool, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_vision_model(name, tmp_path / "model")
    vlm = {"path": str(path), "dtype": "float32", "vlm": {"freeze_vision_encoder": frozen}}
    step = step_of(recipe_of(path).model_copy(update={"model": Model.model_validate(vlm)}), world)
    vision = step.policy.model.vision
    vision.encoder.config._attn_implementation = "eager"  # torch does not count the fused attention of CPUs
    row, images = packed((((8, 12),), ((2, 2),)))
    monkeypatch.setattr(step, "_images", lambda rows: vision_input(rows, [images], vision, world.device))
    info = BatchInfo(step=1, dp_rank=0, dp_world=1, loss_tokens=int(row.mask.sum()), has_images=True)
    assert ratio(step, Batch(info, [without_padding(row)]), tmp_path) == pytest.approx(1, abs=TOLERANCE)


def without_padding(row: Row) -> Row:
    """Give the padding of a row random tokens. torch counts padding, and the formula does not."""
    return replace(row, token_ids=np.where(row.token_ids == 0, 5, row.token_ids))
