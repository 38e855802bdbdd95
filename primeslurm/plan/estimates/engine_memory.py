"""Memory of one GPU of an inference engine: weights, working memory, and the rest for the KV cache."""

from __future__ import annotations

from dataclasses import dataclass

from primeslurm.models.shape import Mla, ModelShape
from primeslurm.nn.block_sizes import FP8_BLOCK
from primeslurm.plan.estimates.parameters import count
from primeslurm.plan.gpus import GIB

# CUDA context, NCCL communicators and other memory outside of torch's allocator
CONTEXT_BYTES = int(1.5 * GIB)
# CUDA graphs. vLLM reports 0.5 to 2 GiB, depending on the model and the number of captured sizes.
GRAPH_BYTES = GIB
# vLLM's max_num_batched_tokens for an API server on a GPU with 70 GiB or more
DEFAULT_BATCHED_TOKENS = 8192
# Prompt tokens whose logits vLLM's GPU runner computes at once for prompt log-probabilities
PROMPT_TOKENS = 1024
# DeepEP's high-throughput buffers: NVLink and RDMA, 1 GiB each (VLLM_DEEPEP_BUFFER_SIZE_MB)
DEEPEP_BUFFER_BYTES = 2 * GIB


@dataclass(frozen=True)
class EngineLayout:
    """Settings of an engine that determine its memory."""

    tp: int
    ep: int  # GPUs that share the experts: tp x data-parallel ranks with expert parallelism, else 1
    weight_bytes: float  # bytes per parameter of linear layers and experts: 2 for bfloat16, 1 for FP8
    dtype_bytes: int  # bytes per element of everything else
    fp8_kv: bool
    batched_tokens: int
    cuda_graphs: bool
    all2all: str | None
    adapter_bytes: int = 0  # bytes of the LoRA adapter that vLLM applies at run time
    prompt_logprobs: bool = False  # whether requests ask for log-probabilities of prompt tokens


@dataclass(frozen=True)
class EngineMemory:
    """Bytes on one GPU of an engine."""

    weights: int
    reserve: int  # activations, CUDA graphs, communication buffers and CUDA context
    kv: int  # Rest of `gpu_memory_utilization` for the KV cache. Negative if nothing is left.
    kv_per_token: int
    state_per_sequence: int  # state per sequence of any length: Mamba states and the windows of sliding-window layers

    @property
    def kv_tokens(self) -> int:
        """Return the tokens that fit into the KV cache, without per-sequence state."""
        return max(0, self.kv) // self.kv_per_token if self.kv_per_token else 0

    def sequences(self, length: int) -> float:
        """Return how many sequences of `length` tokens fit at once."""
        return max(0, self.kv) / (self.kv_per_token * length + self.state_per_sequence)


def engine_memory(shape: ModelShape, layout: EngineLayout, gpu_bytes: float, utilization: float) -> EngineMemory:
    """Return the memory of one GPU of an engine. `utilization` is the share that vLLM may use, 0 to 1."""
    weights = weight_bytes(shape, layout) + layout.adapter_bytes
    reserve = _reserve(shape, layout)
    return EngineMemory(
        weights=weights,
        reserve=reserve,
        kv=int(gpu_bytes * utilization) - weights - reserve,
        kv_per_token=kv_bytes_per_token(shape, layout),
        state_per_sequence=_state(shape, layout),
    )


def weight_bytes(shape: ModelShape, layout: EngineLayout) -> int:
    # Tensor parallelism splits linear layers, except the down-projections of MLA and the indexer, which every rank
    # holds. Experts are split over the expert-parallel ranks, or by tensor parallelism without them. Embedding, output,
    # routers, norms and vision encoder are never quantised. vLLM keeps a second, absorbed copy of MLA's up-projections.
    p = count(shape)
    replicated, absorbed = _mla_parts(shape)
    scale = 4 / FP8_BLOCK**2 if layout.weight_bytes == 1 else 0
    linear = (p.attention - replicated + p.dense) / layout.tp + replicated
    experts = p.experts / (layout.ep if layout.ep > 1 else layout.tp)
    plain = (p.embedding + p.head + absorbed + p.vision) / layout.tp + p.routers + p.norms
    return int((linear + experts) * (layout.weight_bytes + scale) + plain * layout.dtype_bytes)


def kv_bytes_per_token(shape: ModelShape, layout: EngineLayout) -> int:
    """Return the bytes of KV cache per token on one GPU.

    GQA: K and V of the rank's heads (at least one). MLA: compressed KV and RoPE key on every rank; in FP8 the sparse
    kernels take 656 bytes (512 FP8 + 4 scales + 64 bfloat16). DSA: the indexer's key in FP8 with its scales. Layers
    with a sliding window count as state of the sequence.
    """
    layers = shape.attention_layers - shape.window_layers
    if shape.mla:
        return layers * (_latent_bytes(shape, shape.mla, layout) + _indexer_bytes(shape))
    return layers * _gqa_bytes(shape, layout)


def _gqa_bytes(shape: ModelShape, layout: EngineLayout) -> int:
    return 2 * max(1, shape.kv_heads // layout.tp) * shape.head_dim * (1 if layout.fp8_kv else layout.dtype_bytes)


def _latent_bytes(shape: ModelShape, mla: Mla, layout: EngineLayout) -> int:
    if not layout.fp8_kv:
        return (mla.kv_rank + mla.rope) * layout.dtype_bytes
    return mla.kv_rank + mla.kv_rank // 128 * 4 + mla.rope * 2 if shape.indexer else mla.kv_rank + mla.rope


def _indexer_bytes(shape: ModelShape) -> int:
    return shape.indexer.dim + shape.indexer.dim // 128 * 4 if shape.indexer else 0


def _state(shape: ModelShape, layout: EngineLayout) -> int:
    windows = shape.window_layers * (shape.window or 0) * _gqa_bytes(shape, layout)
    recurrent = 0
    if shape.mamba:
        m = shape.mamba
        ssm = m.heads * m.head_dim * m.state * 4
        conv = (m.heads * m.head_dim + 2 * m.groups * m.state) * (m.conv - 1) * 2
        recurrent += m.layers * (ssm + conv)
    if shape.delta_nets:
        d = shape.delta_nets
        memory = d.value_heads * d.value_dim * d.key_dim * 4
        conv = (2 * d.key_heads * d.key_dim + d.value_heads * d.value_dim) * (d.conv - 1) * 2
        recurrent += d.layers * (memory + conv)
    return windows + recurrent // layout.tp


def _mla_parts(shape: ModelShape) -> tuple[int, int]:
    """Return the parameters that every tensor-parallel rank holds, and those of the absorbed copies."""
    if shape.mla is None:
        return 0, 0
    mla, layers = shape.mla, shape.attention_layers
    replicated = shape.hidden * (mla.q_rank + mla.kv_rank + mla.rope)
    if shape.indexer:
        i = shape.indexer
        replicated += mla.q_rank * i.heads * i.dim + shape.hidden * (i.dim + i.heads)
    return layers * replicated, layers * mla.kv_rank * shape.heads * (mla.nope + mla.value)


def _reserve(shape: ModelShape, layout: EngineLayout) -> int:
    graphs = GRAPH_BYTES if layout.cuda_graphs else 0
    return CONTEXT_BYTES + _activations(shape, layout) + graphs + _buffers(shape, layout)


def _activations(shape: ModelShape, layout: EngineLayout) -> int:
    """Return the peak of a forward pass over the largest batch: tensors of one layer, and logits."""
    # A token of a MoE layer exists top_k times: its input, two intermediate results and its output.
    widest = 3 * shape.dense_width / layout.tp
    if shape.experts:
        e = shape.experts
        widest = max(widest, e.top_k * (2 * (e.latent or shape.hidden) + 3 * e.width))
    attention = 3 * shape.heads * shape.head_dim / layout.tp
    tensors = layout.batched_tokens * (4 * shape.hidden + max(widest, attention)) * layout.dtype_bytes
    logits = min(layout.batched_tokens, 1024) * shape.vocab * 4 * 2
    return int(tensors + max(logits, prompt_logit_bytes(shape, layout) if layout.prompt_logprobs else 0))


def prompt_logit_bytes(shape: ModelShape, layout: EngineLayout) -> int:
    # Logits of one step still exist while the next ones are computed. With tensor parallelism, each rank has its own
    # shard, all gathered shards, and their concatenation.
    copies = 2 if layout.tp == 1 else 3 + 1 / layout.tp
    return int(min(layout.batched_tokens, PROMPT_TOKENS) * shape.vocab * layout.dtype_bytes * copies)


def _buffers(shape: ModelShape, layout: EngineLayout) -> int:
    if layout.ep == 1 or layout.all2all is None:
        return 0
    if layout.all2all == "deepep_low_latency":
        return low_latency_bytes(shape, layout.batched_tokens)
    return DEEPEP_BUFFER_BYTES if layout.all2all.startswith("deepep") else 0


def low_latency_bytes(shape: ModelShape, tokens: int) -> int:
    """Return the bytes of DeepEP's low-latency buffer."""
    # It has a slot for every rank's tokens at every expert, for sending and receiving, double buffered.
    if shape.experts is None:
        return 0
    return 4 * shape.experts.count * tokens * (shape.experts.latent or shape.hidden) * 2
