"""Options and variables of engines for which the plan's default is not vLLM's, with the reasons. Pure.

The table of docs/reference/engine-defaults.md is generated from this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from primeslurm.plan.commands import kv_events
from primeslurm.plan.commands.command import Device, EngineRole
from primeslurm.recipe import Recipe
from primeslurm.recipe.sections.inference import EngineSettings

# Time for an engine to start, without reading its weights [s]: it compiles kernels and captures CUDA graphs
START_S = 3600
# Backends with DeepEP's Buffer, which communicates across nodes with NVSHMEM
DEEPEP_BUFFERS = ("deepep_high_throughput", "deepep_low_latency")
# Requests that a low-latency decode engine runs at once if the recipe does not say
LOW_LATENCY_SEQS = 256
# Tokens per step that a low-latency decode engine has for prompts, beyond those of its running requests. A preempted
# request of 131,072 tokens is then computed again within 512 steps.
RECOMPUTED_TOKENS = 256
# DeepEP's default. It requires NVSHMEM_QP_DEPTH >= (tokens + 1) * 2.
QUEUE_DEPTH = 1024


class EngineFacts(NamedTuple):
    """Facts about an engine that decide its defaults."""

    recipe: Recipe
    settings: EngineSettings
    device: Device
    role: EngineRole

    @property
    def experts(self) -> str | None:
        """Backend between the ranks of an expert-parallel group on GPUs."""
        return self.settings.all2all if self.recipe.inference.expert_parallel and self.device == "cuda" else None

    @property
    def deepep(self) -> bool:
        return self.experts in DEEPEP_BUFFERS

    @property
    def is_alone(self) -> bool:
        """Whether the engine is one process on a GPU, and exchanges no KV cache."""
        inference = self.recipe.inference
        alone = self.role == "engine" and inference.parallel.tp == 1 and not inference.expert_parallel
        return alone and self.device == "cuda"

    @property
    def start_s(self) -> int:
        return self.recipe.inference.start_timeout_s or START_S


class EngineDefault(NamedTuple):
    """A default of the plan."""

    name: str  # long option with underscores, or environment variable
    ours: str
    default: str  # the default of vLLM, or of the library that reads the variable
    why: str
    value: Callable[[EngineFacts], object | None]  # returns the value; None to keep the other default


def chosen(defaults: Sequence[EngineDefault], facts: EngineFacts) -> dict[str, object]:
    values = {default.name: default.value(facts) for default in defaults}
    return {name: value for name, value in values.items() if value is not None}


def batch_limits(recipe: Recipe, role: EngineRole, all2all: str | None, seqs: int | None) -> tuple[int, int] | None:
    """Return `max_num_seqs` and `max_num_batched_tokens` of an engine whose recipe leaves the latter open.

    None: vLLM's defaults. Only low-latency decode engines have other ones.
    """
    if role != "decode" or not recipe.inference.expert_parallel or all2all != "deepep_low_latency":
        return None
    seqs = seqs or LOW_LATENCY_SEQS
    return seqs, seqs * tokens_per_request(recipe) + RECOMPUTED_TOKENS


def tokens_per_request(recipe: Recipe) -> int:
    """Return the tokens that a running request of a decode engine takes in each step: its next one, and drafts."""
    speculation = recipe.inference.speculative
    return 1 if speculation is None else 1 + (speculation.num_tokens)


def kv_lease_s(recipe: Recipe) -> int | None:
    # A decode engine that is paused for a weight update does not renew its leases, but at least half of each is left.
    # KV that it reads after the end of a lease may belong to another prompt.
    return 2 * recipe.weights.load_s if recipe.task == "rl" else None


def _queue_depth(facts: EngineFacts) -> int | None:
    if facts.experts != "deepep_low_latency" or facts.settings.max_num_batched_tokens is None:
        return None
    return max(QUEUE_DEPTH, 1 << (2 * facts.settings.max_num_batched_tokens + 1).bit_length())


def _group_timeout(facts: EngineFacts) -> int | None:
    inference = facts.recipe.inference
    several = inference.expert_parallel or inference.parallel.tp > 1
    return facts.start_s if several and facts.device == "cuda" else None


_START = "start timeout"
_LOADING = "Ranks of a group load at different speeds, and the first waits for the last."
OPTIONS = (
    EngineDefault("distributed_timeout_seconds", _START, "None (NCCL: 600 s)", _LOADING, _group_timeout),
    EngineDefault("cpu_distributed_timeout_seconds", _START, "None (gloo: 1800 s)", _LOADING, _group_timeout),
    EngineDefault(
        "enable_ep_weight_filter", "true with `expert_parallel`", "false",
        "A rank reads only its own experts. With EPLB it may get any expert, so it reads all.",
        lambda it: True if it.recipe.inference.expert_parallel and not it.settings.eplb else None,
    ),
    EngineDefault(
        "safetensors_load_strategy", "lazy with `expert_parallel`", "None",
        "vLLM would read the whole checkpoint into the page cache of each node, if there is room.",
        lambda it: "lazy" if it.recipe.inference.expert_parallel and not it.settings.eplb else None,
    ),
    EngineDefault(
        "block_size", f"{kv_events.BLOCK_SIZE} with `policy: kv_aware`", "None (by attention backend)",
        "vllm-router finds cached blocks only if it knows how many tokens they have.",
        lambda it: kv_events.BLOCK_SIZE if kv_events.are_read(it.recipe) else None,
    ),
)  # fmt: skip
BATCHES = (
    EngineDefault(
        "max_num_seqs", f"{LOW_LATENCY_SEQS} for low-latency decode", "None (by GPU, 256 or 1024)",
        "DeepEP's buffer has a slot for each token of a step at every expert.", lambda it: it.settings.max_num_seqs,
    ),
    EngineDefault(
        "max_num_batched_tokens", f"running tokens + {RECOMPUTED_TOKENS} for low-latency decode",
        "None (by GPU, 2048 or 8192)",
        "A preempted request is computed again on the decode engine. Without free tokens it would take one step per"
        " token.",
        lambda it: it.settings.max_num_batched_tokens,
    ),
)  # fmt: skip
NIXL = (
    EngineDefault(
        "kv_lease_duration", "2 x `weights.timeout_s` for RL", "30",
        "A paused decode engine renews no lease. Blocks must outlast a weight update.",
        lambda it: kv_lease_s(it.recipe),
    ),
)  # fmt: skip
ENVIRONMENT = (
    EngineDefault(
        "VLLM_ENGINE_READY_TIMEOUT_S", _START, "600",
        "Loading takes longer. The plugin derives the handshake's five minutes and the coordinator's two from it, too.",
        lambda it: it.start_s,
    ),
    EngineDefault(
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "120", "5",
        "Routers reuse a connection for 90 s. If the engine closes it first, requests fail, and P/D retries nothing.",
        lambda it: 120,
    ),
    EngineDefault(
        "VLLM_WORKER_MULTIPROC_METHOD", "fork on one GPU", "fork (its command line: spawn)",
        "A spawned process imports vLLM again, for 30 s. vLLM spawns it all the same if CUDA has been used before.",
        lambda it: "fork" if it.is_alone else None,
    ),
    EngineDefault(
        "VLLM_DEEP_GEMM_WARMUP", "relax with DeepEP", "relax",
        "Kernels are compiled before the engine is healthy. In live traffic, other ranks would wait inside DeepEP,"
        " which aborts after 100 s.",
        lambda it: "relax" if it.deepep else None,
    ),
    EngineDefault(
        "VLLM_RANDOMIZE_DP_DUMMY_INPUTS", "1 with `expert_parallel`", "0",
        "Equal dummy tokens go to the same experts, so profiling would see more load on some ranks than on others.",
        lambda it: 1 if it.experts else None,
    ),
    EngineDefault(
        "NVSHMEM_QP_DEPTH", "power of two, at least 2 x (tokens per step + 1)", str(QUEUE_DEPTH),
        "DeepEP asserts it at the first low-latency dispatch, for 512 tokens or more.", _queue_depth,
    ),
    EngineDefault(
        "NVSHMEM_SYMMETRIC_SIZE", "16G with DeepEP", "1G",
        "Size of the heap where NVSHMEM cannot map memory as buffers grow. llm-d sets the same.",
        lambda it: "16G" if it.deepep else None,
    ),
)  # fmt: skip
