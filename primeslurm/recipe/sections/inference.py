"""Settings of the vLLM engines, for all of them and for prefill and decode engines separately."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from primeslurm.recipe.fields.section import Section
from primeslurm.recipe.fields.types import EnvironmentName, Json, OptionName
from primeslurm.recipe.sections.kv_offload import KvOffload
from primeslurm.recipe.sections.routers import Router, VllmRouter
from primeslurm.recipe.sections.speculation import Speculation

# vLLM's ways to move tokens between expert-parallel ranks.
All2All = Literal[
    "allgather_reducescatter",
    "deepep_high_throughput",
    "deepep_low_latency",
    "deepep_v2",
    "mori_high_throughput",
    "mori_low_latency",
    "nixl_ep",
    "flashinfer_nvlink_one_sided",
    "flashinfer_nvlink_two_sided",
]

CudaGraphs = Literal["NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"]


class EngineParallel(Section):
    """Parallelism of the engines. One engine is one data-parallel rank on `tp` GPUs."""

    tp: PositiveInt = 1
    """Tensor parallelism: number of GPUs of each engine."""
    dp: PositiveInt | None = None
    """Number of engines that share the experts; only with `expert_parallel`. Default: all engines of a group of
    nodes."""


class EngineSettings(Section):
    """Settings that can differ between prefill and decode engines.

    An unset field keeps the value from `inference`, or else vLLM's default.
    """

    all2all: All2All | None = None
    """Method that sends tokens to their experts. Default with `expert_parallel`: deepep_high_throughput for prefill
    engines, deepep_low_latency for decode engines, allgather_reducescatter for engines that do both and always on
    CPUs."""
    cuda_graphs: CudaGraphs | None = None
    """CUDA graph mode of vLLM. Default: FULL_DECODE_ONLY for decode engines, vLLM's default for others."""
    dbo: bool | None = None
    """Dual batch overlap: split each batch in two and overlap the communication of one half with the computation of the
    other."""
    eplb: bool | None = None
    """Expert-parallel load balancing: move experts between ranks as their load changes. Only for `task: serve`."""
    max_num_seqs: PositiveInt | None = None
    """Largest number of requests that an engine runs at once."""
    max_num_batched_tokens: PositiveInt | None = None
    """Largest number of tokens that an engine computes in one step."""
    gpu_memory_utilization: float | None = Field(None, gt=0, le=1)
    """Fraction of a GPU's memory that an engine may use. Default: 0.9."""
    kv_cache_bytes: PositiveInt | None = None
    """Size of the KV cache per GPU in bytes. Default: the memory that `gpu_memory_utilization` leaves; on CPUs 256
    MiB."""
    env: dict[EnvironmentName, str] = {}
    """Environment variables of the engines, for example `{VLLM_LOGGING_LEVEL: DEBUG}`."""
    vllm_extra: dict[OptionName, Json] = {}
    """Any other vLLM option by its long name with underscores, for example `{enable_chunked_prefill: false}`. `check`
    refuses what vLLM does not know, and options that the plan or another field sets."""


class Inference(EngineSettings):
    """The vLLM engines. `prefill` and `decode` override single settings for their role."""

    parallel: EngineParallel = EngineParallel()
    """Tensor parallelism and the size of expert-parallel groups."""
    expert_parallel: bool = False
    """true: spread the experts over the engines of a group (wide EP). false: every engine holds all experts."""
    router: Annotated[Router, Field(discriminator="type")] = VllmRouter()
    """The router in front of each inference replica."""
    kv_offload: Annotated[KvOffload, Field(discriminator="type")] | None = None
    """Further tiers of KV cache: host memory, then disk. Default: GPU memory only."""
    quantization: Literal["fp8"] | None = None
    """fp8: quantise weights to FP8 in blocks of 128 x 128 when they are loaded; weight updates are sent in FP8. Leave
    it out for a checkpoint that is already quantised."""
    model: str | None = None
    """Checkpoint that engines load instead of `model.path`, as a directory or hub id: the same model in FP8 blocks of
    128 x 128, for example `zai-org/GLM-5-FP8`. Engines then read half the bytes and quantise nothing. Needs
    `quantization: fp8`. Weight updates are sent in FP8 for the weights that this checkpoint stores in FP8."""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """Dtype of the KV cache. auto: the model's dtype. fp8: half the bytes of bfloat16, but engines differ more from the
    trainer (docs/measurements/inference.md)."""
    speculative: Speculation | None = None
    """Speculative decoding. Default: off."""
    deep_gemm: bool = False
    """Use DeepGEMM kernels for FP8 layers and experts. Needs SM90 or newer."""
    batch_invariant: bool = False
    """Use vLLM's batch-invariant kernels, so that a token's log-probability does not depend on the other requests of
    the batch. Needs GPUs with SM80 or newer. Slower."""
    enforce_eager: bool = False
    """Neither compile the model nor capture CUDA graphs. Starts faster and runs slower."""
    tool_call_parser: str | None = None
    """vLLM's parser of tool calls, for example `hermes`. Default: with `task: serve` the parser of the model's family,
    if known. Rollouts need none."""
    reasoning_parser: str | None = None
    """vLLM's parser of thinking blocks, for example `qwen3`. Default: with `task: serve` the parser of the model's
    family, if known. Rollouts need none."""
    start_timeout_s: PositiveInt | None = None
    """Seconds that an engine, or a teacher's engine, may take from start to its first answer. Default: one hour plus
    the time that a node's engines need to read their weights at a tenth of the site's `network.storage_gbytes_per_s`.
    `plan` shows it."""
    hang_timeout_s: PositiveInt = 60
    """Seconds without any answer after which an engine that was ready counts as hung and is restarted."""
    prefill: EngineSettings = EngineSettings()
    """Settings that differ for prefill engines."""
    decode: EngineSettings = EngineSettings()
    """Settings that differ for decode engines."""

    @property
    def reads_kv_events(self) -> bool:
        """True if the router reads the engines' KV events."""
        return isinstance(self.router, VllmRouter) and self.router.policy == "kv_aware"
