"""Predict how many tokens engines sample per second. Pure.

A decode step reads the weights and the KV cache once. Its constants are from three recorded engines of 12 layers of
Qwen3-30B-A3B with 64 requests each (`wide_ep_h100x2.json`, `wide_ep_h100x4.json`), which they match within 25 %. Other
models, long contexts, full batches, and prefill engines beside decode engines were not measured.
"""

from __future__ import annotations

from primeslurm.models.shape import ModelShape
from primeslurm.plan.estimates.engine_memory import EngineLayout, kv_bytes_per_token, weight_bytes
from primeslurm.plan.estimates.parameters import count
from primeslurm.plan.gpus import Gpu

# Share of the memory's bandwidth that a decode step reaches, and its further time per layer, and per layer whose
# experts are on several GPUs [s]. Fitted.
DECODE_SHARE, LAYER_S, DISPATCH_S = 0.7, 8e-5, 2e-4


def decode_seconds(shape: ModelShape, layout: EngineLayout, gpu: Gpu, at_once: float, context: float) -> float:
    """Predict the time in which an engine samples a token of each sequence. `context` is their mean length [tokens]."""
    experts, read = shape.experts, float(weight_bytes(shape, layout))
    if experts:  # those to which no token is routed are not read
        held = count(shape).experts * layout.weight_bytes / max(layout.ep, layout.tp)
        tokens = at_once * max(1, layout.ep // layout.tp)
        read -= held * (1 - experts.top_k / experts.count) ** tokens
    keys = min(context, shape.indexer.top_k) if shape.indexer else context
    scored = shape.indexer.layers * shape.indexer.dim * context if shape.indexer else 0
    read += at_once * (kv_bytes_per_token(shape, layout) * keys + scored)
    fixed = shape.layers * LAYER_S + (shape.moe_layers * DISPATCH_S if layout.ep > 1 else 0)
    return read / (gpu.memory_tb_s * 1e12 * DECODE_SHARE) + fixed
