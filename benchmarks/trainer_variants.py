"""The trainer's forward pass with one part changed, and transformers' in float32, for `benchmarks agreement`."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM

from primeslurm.nn import compat
from primeslurm.nn.layers.rotary import Rotary
from primeslurm.orchestrator.batching.packing import Document
from primeslurm.recipe import Recipe
from primeslurm.trainer.assembly.build import build
from primeslurm.trainer.components import logprobs
from primeslurm.trainer.components.loss import Documents, Targets
from primeslurm.trainer.distributed.world import World
from primeslurm.trainer.policy.policy_model import PolicyModel
from primeslurm.wire.batches.batch import Row, stack

# isort: split
# After primeslurm.trainer, which patches torchtitan.
from torchtitan.models.common import Embedding
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.rope import CosSinRoPE

Changes = Callable[[PolicyModel], list[AbstractContextManager[Any]]]
Array = np.ndarray[Any, Any]
# Rows of the reference that are computed at once
REFERENCE_ROWS = 32


def reference(model: Path, documents: Sequence[Document], device: torch.device) -> list[Array]:
    """Return transformers' float32 log-probabilities of each document's tokens; 0 for the first token."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").to(device)
    results = []
    for first in range(0, len(documents), REFERENCE_ROWS):
        tokens = [torch.from_numpy(d.token_ids).long() for d in documents[first : first + REFERENCE_ROWS]]
        ids = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True).to(device)
        with torch.no_grad():
            # Tokens are padded on the right, where causal attention does not see them.
            logits = network(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[:, :-1]
        chosen = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        scores = F.pad(chosen, (1, 0)).cpu().numpy()
        results += [row[: len(t)] for row, t in zip(scores, tokens, strict=True)]
    return results


@dataclass
class Models:
    """The trainer's model of one build at a time."""

    recipe: Callable[[Mapping[str, Mapping[str, Any]]], Recipe]
    world: World
    name: str | None = None
    policy: PolicyModel | None = None

    def get(self, name: str) -> PolicyModel:
        """Return the model of a build. Drop that of another build first."""
        if self.policy is None or self.name != name:
            self.policy = None
            gc.collect()
            torch.cuda.empty_cache()
            attention, changes = _BUILDS[name]
            self.name, self.policy = name, build(self.recipe(changes), self.world, attention)
        return self.policy


def scores(policy: PolicyModel, rows: Sequence[Row], variant: Variant) -> tuple[Array, Array, Array | None, float]:
    """Return log-probabilities [trained tokens] of variant, engine and reference, and the forward pass's seconds."""
    arrays = {name: torch.from_numpy(array) for name, array in stack(rows).items()}
    after = {name: F.pad(a[:, 1:], (0, 1)) for name, a in arrays.items() if a.ndim == 2}
    scored = after.get("ref_logprobs")
    targets = Targets(
        labels=after["token_ids"].long(),
        documents=Documents.of(arrays["positions"]),
        ref_logprobs=after["logprobs"] if scored is None else scored,
        **{name: after[name] for name in ("logprobs", "advantages", "temperatures", "on_policy")},
    )
    tokens, positions = (arrays[name].long().to(policy.device) for name in ("token_ids", "positions"))
    routed = arrays["routed_experts"].to(policy.device) if variant.replay else None
    with ExitStack() as stacked, torch.no_grad():
        for change in variant.changes:
            for context in change(policy):
                stacked.enter_context(context)
        for _ in range(1 if compat.ON_CPU else 2):  # the first pass on a GPU loads kernels
            began = time.perf_counter()
            trained, _, known = policy.score(tokens, positions, after["mask"], targets, routed)
            ours, engine, reference = (v.float().cpu().numpy() for v in (trained, known.logprobs, known.ref_logprobs))
            seconds = round(time.perf_counter() - began, 3)
    return ours, engine, None if scored is None else reference, seconds


def _modules(policy: PolicyModel, kind: type) -> list[Any]:
    modules = [module for module in policy.model.modules() if isinstance(module, kind)]
    if not modules:
        raise ValueError(f"the model has no {kind.__name__}")
    return modules


def _float32_head(policy: PolicyModel) -> list[AbstractContextManager[Any]]:
    return [patch.object(policy.model.lm_head, "dtype", torch.float32)]


def _bfloat16_log_softmax(policy: PolicyModel) -> list[AbstractContextManager[Any]]:
    def score(logits: torch.Tensor, labels: torch.Tensor, temperatures: torch.Tensor) -> logprobs.Scores:
        log_p = logits.bfloat16().log_softmax(-1).gather(-1, labels[:, None])[:, 0]
        return log_p.float(), torch.zeros_like(temperatures)

    return [patch.object(logprobs, "logit_scores", score)]


def _norm_rounded_twice(policy: PolicyModel) -> list[AbstractContextManager[Any]]:
    """Round normalized values before they are multiplied by the weight, as vLLM and transformers do."""
    _modules(policy, RMSNorm)

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        normalized = F.rms_norm(x.float(), self.normalized_shape, eps=self.eps).to(x.dtype)
        return torch.mul(normalized, self.weight)

    return [patch.object(RMSNorm, "forward", forward)]


def _bfloat16_rope(policy: PolicyModel) -> list[AbstractContextManager[Any]]:
    """Rotate in the model's dtype, with sine and cosine rounded to it, as vLLM does."""
    _modules(policy, Rotary)

    def apply(query: torch.Tensor, key: torch.Tensor, table: torch.Tensor) -> list[torch.Tensor]:
        cos, sin = table.to(query.dtype).chunk(2, -1)
        return [heads * cos + CosSinRoPE._rotate_half(heads) * sin for heads in (query, key)]

    return [patch.object(CosSinRoPE, "apply_rotary_emb", staticmethod(apply))]


def _sdpa(dtype: torch.dtype, policy: PolicyModel) -> list[AbstractContextManager[Any]]:
    """Compute attention by torch's SDPA in a dtype."""

    def forward(module: Any, *heads: torch.Tensor, **options: Any) -> Any:
        wide = (tensor.to(dtype) for tensor in heads)
        return compat.DenseAttention.forward(module, *wide, **options).to(heads[0].dtype)

    return [patch.object(m, "forward", partial(forward, m)) for m in _modules(policy, FlexAttention)]


def _float32_residual(policy: PolicyModel) -> list[AbstractContextManager[Any]]:
    """Keep the sums between layers in float32. Norms round to bfloat16 what goes into layers."""
    states = [module._get_fsdp_state() for module in policy.model.modules() if isinstance(module, FSDPModule)]
    uncast = [(state, replace(state._mp_policy, cast_forward_inputs=False)) for state in states]
    embed = Embedding.forward

    def norm(self: Any, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), self.normalized_shape, self.weight.float(), self.eps).bfloat16()

    return [
        patch.object(Embedding, "forward", lambda self, tokens: embed(self, tokens).float()),
        patch.object(RMSNorm, "forward", norm),
        *(patch.object(state, "_mp_policy", policy_) for state, policy_ in uncast),
    ]


@contextmanager
def _reductions_in_float32() -> Iterator[None]:
    settings = torch.backends.cuda.matmul
    before = settings.allow_bf16_reduced_precision_reduction
    settings.allow_bf16_reduced_precision_reduction = False
    try:
        yield
    finally:
        settings.allow_bf16_reduced_precision_reduction = before


@dataclass(frozen=True)
class Variant:
    """The trainer with some parts changed."""

    changes: tuple[Changes, ...] = ()
    build: str = "plain"
    gpu_only: bool = False
    replay: bool = False
    """Use the experts that the engine chose."""
    head: bool = True
    """Whether the head is float32 if that of the engine is."""
    main: bool = False
    """Whether to compare the variant with batch-invariant engines, too."""


# By build: kernel of attention (None: the trainer's choice), and changes of the recipe
_BUILDS: dict[str, tuple[Literal["varlen", "flex"] | None, dict[str, dict[str, Any]]]] = {
    "plain": (None, {}),
    "flex": ("flex", {}),
    "float32": (None, {"model": {"dtype": "float32"}}),
    "compiled": (None, {"trainer": {"compile": True}}),
}
VARIANTS = {
    "bfloat16": Variant(head=False, main=True),
    "float32_head": Variant((_float32_head,), main=True),
    "bfloat16_log_softmax": Variant((_bfloat16_log_softmax,)),
    "norm_rounded_twice": Variant((_norm_rounded_twice,)),
    "rope_bfloat16": Variant((_bfloat16_rope,)),
    "residual_float32": Variant((_float32_residual,)),
    "reductions_float32": Variant((lambda _: [_reductions_in_float32()],), gpu_only=True),
    "as_engine": Variant((_norm_rounded_twice, _bfloat16_rope), main=True),
    "router_replay": Variant(replay=True),
    "attention_flex": Variant(build="flex", gpu_only=True),
    "attention_sdpa": Variant((partial(_sdpa, torch.bfloat16),), build="flex", gpu_only=True),
    "attention_float32": Variant((partial(_sdpa, torch.float32),), build="flex"),
    "float32": Variant(build="float32", main=True),
    "compiled": Variant(build="compiled", gpu_only=True),
}


def comparisons(engines: Sequence[str], replay: bool) -> Iterator[tuple[str, str, Variant]]:
    """Yield the engine, name and variant of each comparison, those of one build together."""
    for variant_name, variant in VARIANTS.items():
        if (variant.gpu_only and compat.ON_CPU) or (variant.replay and not replay):
            continue
        for engine in engines:
            if (engine == "float32" and variant_name != "float32") or ("invariant" in engine and not variant.main):
                continue
            wide = variant.head and engine.startswith("float32_head") and _float32_head not in variant.changes
            yield engine, variant_name, replace(variant, changes=(*variant.changes, *([_float32_head] if wide else [])))
