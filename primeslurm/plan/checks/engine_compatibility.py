"""Rules for engines: expert parallelism, all2all backends, CUDA graphs, quantisation, vLLM options."""

from __future__ import annotations

from collections.abc import Iterator

from primeslurm.plan.checks.rule import Rule, RuleContext, when
from primeslurm.plan.commands.command import ENGINE_ROLES
from primeslurm.plan.commands.engine_defaults import DEEPEP_BUFFERS, tokens_per_request
from primeslurm.plan.estimates.engine_memory import DEFAULT_BATCHED_TOKENS, low_latency_bytes
from primeslurm.plan.gpus import GIB
from primeslurm.recipe.sections.inference import EngineSettings
from primeslurm.recipe.sections.speculation import Speculation

DBO_BACKENDS = ("deepep_low_latency", "deepep_high_throughput", "nixl_ep")
# Largest batch for which vLLM captures a CUDA graph by default below SM100
GRAPH_SIZES = 512
LOW_LATENCY_TOKENS = 512
# Most steps that a decode engine should need to compute a preempted request again
RECOMPUTE_STEPS = 2048
# Model types whose checkpoints may have draft layers although the config does not give their number
MTP_TYPES = (
    *("deepseek_v3", "deepseek_v32", "glm4_moe", "glm_moe_dsa", "nemotron_h", "qwen3_next"),
    *("qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text"),
)


def _ep_alone(context: RuleContext) -> str:
    if not context.recipe.inference.expert_parallel:
        return ""
    alone = [request.role for request, _, ranks in context.expert_groups() if ranks == 1]
    return f"a group of {alone[0]} nodes has one GPU" if alone else ""


def _ep_divides(context: RuleContext) -> str:
    for request, settings, ranks in context.expert_groups():
        if ranks > 1 and str(settings.all2all).startswith("deepep") and (uneven := context.uneven_experts(ranks)):
            return f"{uneven}, which a group of {request.role} nodes has"
    return ""


def _deepep_nodes(context: RuleContext) -> str:
    for request, settings, ranks in context.expert_groups():
        if str(settings.all2all).startswith("deepep") and ranks > request.gpus and request.gpus != 8:
            return f"a group of {request.role} engines spans several nodes, and each node has {request.gpus} GPUs"
    return ""


def _all2all_without_ep(context: RuleContext) -> str:
    backends = [settings.all2all for _, settings in context.engines() if settings.all2all]
    if not backends or context.recipe.inference.expert_parallel:
        return ""
    return f"all2all is {backends[0]}, but expert_parallel is false"


def _low_latency_tokens(context: RuleContext) -> str:
    for request, settings, ranks in context.expert_groups():
        tokens = settings.max_num_batched_tokens or DEFAULT_BATCHED_TOKENS
        if settings.all2all == "deepep_low_latency" and ranks > 1 and tokens > LOW_LATENCY_TOKENS:
            size = f", {low_latency_bytes(context.shape, tokens) / GIB:.0f} GiB per GPU" if context.shape else ""
            return f"{request.role} engines allocate buffers for {tokens} tokens at every expert{size}"
    return ""


def _low_latency_prefill(context: RuleContext) -> str:
    roles = [r.role for r, s in context.engines() if r.role != "decode" and s.all2all == "deepep_low_latency"]
    return f"{roles[0]} engines compute long prompts, which it is slow for" if roles else ""


def _graphs_high_throughput(context: RuleContext) -> str:
    slow = any(
        request.role == "decode" and settings.all2all == "deepep_high_throughput" and ranks > 1
        for request, settings, ranks in context.expert_groups()
    )
    return "decode engines run without CUDA graphs, which makes them slow" if slow else ""


def _graphs_eager(context: RuleContext) -> str:
    inference = context.recipe.inference
    modes = [settings.cuda_graphs for settings in (inference, inference.prefill, inference.decode)]
    graphs = [mode for mode in modes if mode not in (None, "NONE")]
    return f"cuda_graphs is {graphs[0]}" if graphs and inference.enforce_eager else ""


def _graphs_batch(context: RuleContext) -> str:
    for request, settings in context.engines():
        seqs = settings.max_num_seqs or 0
        if request.role == "decode" and seqs > GRAPH_SIZES and settings.cuda_graphs != "NONE":
            return f"batches of {GRAPH_SIZES + 1} to {seqs} requests run without a CUDA graph"
    return ""


def _seqs_tokens(context: RuleContext) -> str:
    for request, settings in context.engines():
        seqs, tokens = settings.max_num_seqs, settings.max_num_batched_tokens
        if seqs and tokens and seqs > tokens:
            return f"{seqs} {request.role} requests need {seqs} tokens per step, but max_num_batched_tokens is {tokens}"
    return ""


def _dbo_backend(context: RuleContext) -> str:
    for _, settings in context.engines():
        if settings.dbo and settings.all2all not in DBO_BACKENDS:
            return f"all2all is {settings.all2all or 'not set'}"
    return ""


def _warmup_skipped(context: RuleContext) -> str:
    for request, settings, ranks in context.expert_groups():
        skipped = settings.env.get("VLLM_DEEP_GEMM_WARMUP") == "skip"
        if skipped and ranks > 1 and settings.all2all in DEEPEP_BUFFERS:
            return f"{request.role} engines would compile kernels while the other ranks wait inside DeepEP"
    return ""


def _warmup_skipped_fp8(context: RuleContext) -> str:
    if context.recipe.inference.quantization != "fp8" or context.on_cpus:
        return ""
    for request, settings in context.engines():
        if settings.env.get("VLLM_DEEP_GEMM_WARMUP") == "skip":
            return f"{request.role} engines would compile kernels during their first requests and count as unresponsive"
    return ""


def _decode_recompute(context: RuleContext) -> str:
    for request, settings, ranks in context.expert_groups():
        tokens, seqs = settings.max_num_batched_tokens, settings.max_num_seqs
        if request.role != "decode" or ranks == 1 or tokens is None or seqs is None:
            continue
        free = max(1, tokens - seqs * tokens_per_request(context.recipe))
        if (steps := context.recipe.max_len // free) > RECOMPUTE_STEPS:
            return f"a preempted request of {context.recipe.max_len} tokens is computed again in {steps} steps"
    return ""


def _fp8_gpu(context: RuleContext) -> str:
    inference = context.recipe.inference
    if context.on_cpus:
        return "CPUs have no FP8 kernels" if inference.quantization else ""
    uses_fp8 = "fp8" in (inference.quantization, inference.kv_cache_dtype)
    return context.older_gpu(89) if uses_fp8 else ""


def _quantised_twice(context: RuleContext) -> str:
    # If the model is trained, engines get what the trainer can read: a bfloat16 policy, unless it is in FP8 blocks.
    stored = context.shape.quantization if context.shape and (context.shape.fp8_blocks or not context.trains) else None
    return f"the checkpoint is already {stored}" if stored and context.recipe.inference.quantization else ""


def _deep_gemm_fp8(context: RuleContext) -> str:
    stored = context.shape.quantization if context.shape else None
    fp8 = context.recipe.inference.quantization == "fp8" or stored == "fp8"
    if fp8 or not context.recipe.inference.deep_gemm:
        return ""
    return "neither the checkpoint nor inference.quantization is FP8"


def _batch_invariant_gpu(context: RuleContext) -> str:
    if not context.recipe.inference.batch_invariant:
        return ""
    return "vLLM ignores it on CPUs" if context.on_cpus else context.older_gpu(80)


def _tp_heads(context: RuleContext) -> str:
    tp = context.recipe.inference.parallel.tp
    uneven = context.shape and context.shape.heads % tp
    return f"{tp} does not divide {context.shape.heads} heads" if context.shape and uneven else ""


def _drafters(context: RuleContext) -> Iterator[tuple[Speculation, EngineSettings]]:
    """Yield the settings of each role whose engines draft tokens."""
    speculation = context.recipe.inference.speculative
    for request, settings in context.engines():
        if speculation is not None and speculation.is_used_by(ENGINE_ROLES[request.role]):
            yield speculation, settings


def _mtp_layers(context: RuleContext) -> str:
    speculation, shape = context.recipe.inference.speculative, context.shape
    if speculation is None or speculation.method != "mtp" or shape is None or shape.draft_layers:
        return ""
    if shape.draft_layers is None and shape.model_type in MTP_TYPES:
        return ""
    return f"this model of type {shape.model_type} has none"


def _mtp_multiple(context: RuleContext) -> str:
    speculation, layers = context.recipe.inference.speculative, context.shape.draft_layers if context.shape else None
    if speculation is None or speculation.method != "mtp" or not layers or speculation.num_tokens <= layers:
        return ""
    return f"the model has {layers} draft layers" if speculation.num_tokens % layers else ""


def _speculative_dbo(context: RuleContext) -> str:
    used = any(settings.dbo for _, settings in _drafters(context))
    return "vLLM's model runner with dbo drafts no tokens" if used else ""


def _speculative_async(context: RuleContext) -> str:
    for speculation, settings in _drafters(context):
        extra = {name.replace("-", "_"): value for name, value in settings.vllm_extra.items()}
        if speculation.method == "ngram" and extra.get("async_scheduling"):
            return "method is ngram, which reads the tokens of the last step on the CPU"
    return ""


def _delta_nets_on_cpus(context: RuleContext) -> bool:
    return bool(context.on_cpus and context.engines() and context.shape and context.shape.delta_nets)


def _speculative_delta_nets(context: RuleContext) -> str:
    drafts = _delta_nets_on_cpus(context) and any(_drafters(context))
    return when(drafts, "to cache prefixes, vLLM copies the state of delta nets with Triton, which needs GPUs")


_EP = "inference.expert_parallel"
ENGINE_RULES = (
    Rule("ep-dense", "error", _EP, "Expert parallelism needs a model with experts",
         lambda c: c.no_experts(c.recipe.inference.expert_parallel),
         "set expert_parallel: false", "vLLM 0.32"),
    Rule("ep-alone", "error", _EP, "Expert parallelism of engines needs more than one GPU", _ep_alone,
         "use more GPUs per group, or expert_parallel: false", "vLLM 0.32, expert maps"),
    Rule("ep-divides", "error", "deployment.inference", "DeepEP needs a number of experts that the group's GPUs divide",
         _ep_divides, "use 1, 2, 4 or 8 nodes in a group", "DeepEP buffers: num_experts % num_ranks == 0"),
    Rule("deepep-nodes", "error", "deployment.inference", "DeepEP across nodes needs 8 GPUs on each node",
         _deepep_nodes, "set gpus_per_node: 8, or all2all: allgather_reducescatter",
         "vLLM 0.32: DeepEP ranks [0,7] share a node"),
    Rule("all2all-without-ep", "error", "inference.all2all", "all2all needs expert parallelism", _all2all_without_ep,
         "set expert_parallel: true", "vLLM 0.32 config/parallel.py"),
    Rule("low-latency-tokens", "warning", "inference.decode.max_num_batched_tokens",
         "deepep_low_latency needs a small max_num_batched_tokens", _low_latency_tokens,
         "leave it out: the default is max_num_seqs + 256",
         "DeepEP low-latency buffers; prime-rl 0.6.0 GLM-5 configuration"),
    Rule("low-latency-prefill", "warning", "inference.all2all", "deepep_low_latency is for decode engines",
         _low_latency_prefill, "set deepep_high_throughput", "DeepEP README"),
    Rule("graphs-high-throughput", "warning", "inference.decode.all2all",
         "deepep_high_throughput does not work with CUDA graphs", _graphs_high_throughput, "set deepep_low_latency",
         "vLLM 0.32 config/compilation.py"),
    Rule("graphs-eager", "error", "inference.enforce_eager", "enforce_eager and cuda_graphs contradict each other",
         _graphs_eager, "remove one of the two", "vLLM 0.32"),
    Rule("graphs-batch", "warning", "inference.decode.max_num_seqs",
         "A decode batch should not exceed the largest CUDA graph", _graphs_batch,
         f"use at most {GRAPH_SIZES}, or raise max_cudagraph_capture_size", "vLLM 0.32 config/vllm.py"),
    Rule("seqs-tokens", "error", "inference.max_num_seqs", "max_num_batched_tokens must be at least max_num_seqs",
         _seqs_tokens, "raise max_num_batched_tokens", "vLLM 0.32 config/scheduler.py"),
    Rule("dbo-backend", "error", "inference.dbo", "dbo needs all2all with DeepEP or nixl_ep", _dbo_backend,
         "set all2all: deepep_high_throughput", "vLLM 0.32 config/vllm.py: microbatching"),
    Rule("dbo-cpu", "warning", "inference.dbo", "dbo needs GPUs",
         lambda c: when(c.uses("dbo") and c.on_cpus, "vLLM ignores it on CPUs"),
         "remove it", "vLLM 0.32"),
    Rule("dbo-unfinished", "warning", "inference.dbo", "dbo is unfinished in vLLM 0.32",
         lambda c: when(c.uses("dbo"), "it runs on vLLM's second model runner only, where vLLM calls it unfinished"),
         "remove it", "vLLM 0.32 config/vllm.py: 'DBO with model runner V2 is under development'"),
    Rule("warmup-skipped", "warning", "inference.env", "DeepGEMM must be warmed up under DeepEP", _warmup_skipped,
         "remove VLLM_DEEP_GEMM_WARMUP", "DeepEP aborts after 100 s: vllm#53282"),
    Rule("warmup-skipped-fp8", "warning", "inference.env", "DeepGEMM must be warmed up before the first requests",
         _warmup_skipped_fp8, "remove VLLM_DEEP_GEMM_WARMUP",
         "seen on 2 H200: a prefill engine of 0.6 billion parameters did not answer for 45 s and counted as down"),
    Rule("decode-recompute", "warning", "inference.decode.max_num_batched_tokens",
         "A decode engine needs tokens for preempted requests", _decode_recompute,
         "leave it out, or set it to max_num_seqs + 256", "vLLM 0.32: preemption recomputes the whole request"),
    Rule("eplb-ep", "error", "inference.eplb", "eplb needs expert parallelism",
         lambda c: when(c.uses("eplb") and not c.recipe.inference.expert_parallel, "expert_parallel is false"),
         "set expert_parallel: true", "vLLM 0.32 config/parallel.py"),
    Rule("eplb-cpu", "error", "inference.eplb", "eplb needs GPUs",
         lambda c: when(c.uses("eplb") and c.on_cpus, "vLLM moves experts only between GPUs"),
         "remove it", "vLLM 0.32 config/parallel.py"),
    Rule("eplb-updates", "error", "inference.eplb", "eplb does not work with weight updates",
         lambda c: when(c.uses("eplb") and c.recipe.task == "rl",
                        "a weight update would overwrite experts that EPLB has moved"),
         "remove it, or set task: serve", "prime-rl 0.6.0: EPLB needs updates in kernel layout with inverted maps"),
    Rule("engine-fp8-gpu", "error", "inference.quantization", "FP8 engines need GPUs with SM89 or newer", _fp8_gpu,
         "remove it", "vLLM 0.32"),
    Rule("quantised-twice", "error", "inference.quantization", "A quantised checkpoint must not be quantised again",
         _quantised_twice, "remove it", "vLLM 0.32"),
    Rule("engine-model", "error", "inference.model", "The engines' own checkpoint must be in FP8",
         lambda c: when(c.recipe.inference.model and c.recipe.inference.quantization is None,
                        "quantization is not set"),
         "set inference.quantization: fp8, or remove model", "vLLM 0.32"),
    Rule("deep-gemm-fp8", "warning", "inference.deep_gemm", "deep_gemm has an effect with FP8 only", _deep_gemm_fp8,
         "set quantization: fp8", "DeepGEMM README"),
    Rule("deep-gemm-gpu", "error", "inference.deep_gemm", "deep_gemm needs GPUs with SM90 or newer",
         lambda c: c.older_gpu(90) if c.recipe.inference.deep_gemm else "",
         "remove it", "DeepGEMM README"),
    Rule("batch-invariant-gpu", "error", "inference.batch_invariant",
         "batch_invariant needs GPUs with SM80 or newer", _batch_invariant_gpu, "remove it",
         "vLLM 0.32 model_executor/determinism"),
    Rule("batch-invariant-dsa", "error", "inference.batch_invariant",
         "No batch-invariant kernel exists for sparse attention",
         lambda c: when(c.sparse and c.recipe.inference.batch_invariant, "the model has sparse attention"),
         "remove it", "vLLM 0.32 v1/attention: supports_batch_invariance"),
    Rule("batch-invariant-nccl", "error", "inference.batch_invariant",
         "Batch-invariant engines use other NCCL settings than the trainer",
         lambda c: when(c.recipe.inference.batch_invariant and c.recipe.samples and c.trains
                        and c.recipe.weights.transport == "nccl", "weights.transport is nccl"),
         "set weights.transport: filesystem", "vLLM 0.32 utils/nccl.py"),
    Rule("tp-heads", "error", "inference.parallel.tp", "tp must divide the number of attention heads", _tp_heads,
         "use a divisor of the number of heads", "vLLM 0.32"),
    Rule("tp-latent", "warning", "inference.parallel.tp", "tp does not split the KV cache of models with MLA",
         lambda c: when(c.shape and c.shape.mla and c.recipe.inference.parallel.tp > 1,
                        f"all {c.recipe.inference.parallel.tp} GPUs hold the same compressed KV"),
         "set tp: 1 and expert_parallel: true, which hold tp times as many tokens", "vLLM 0.32, MLA backends"),
    Rule("speculative-mtp", "error", "inference.speculative.method", "mtp needs a checkpoint with draft layers",
         _mtp_layers, "use method: ngram", "vLLM 0.32 config/speculative.py"),
    Rule("speculative-mtp-multiple", "error", "inference.speculative.num_tokens",
         "More tokens than draft layers must be a multiple of them", _mtp_multiple,
         "use a multiple of the number of draft layers", "vLLM 0.32 config/speculative.py"),
    Rule("speculative-dbo", "error", "inference.dbo", "dbo does not work with speculative decoding", _speculative_dbo,
         "remove inference.dbo or inference.speculative", "vLLM 0.32 config/vllm.py"),
    Rule("speculative-async", "error", "inference.vllm_extra", "ngram does not work with async_scheduling",
         _speculative_async, "remove async_scheduling", "vLLM 0.32 config/vllm.py"),
    Rule("speculative-delta-nets", "error", "inference.speculative",
         "On CPUs, engines with a prefix cache cannot draft for models with delta nets", _speculative_delta_nets,
         "remove inference.speculative", "vLLM 0.32 v1/worker/mamba_utils.py"),
    Rule("delta-nets-dtype", "error", "model.dtype", "On CPUs, engines compute delta nets only in bfloat16",
         lambda c: when(_delta_nets_on_cpus(c) and c.recipe.model.dtype != "bfloat16",
                        f"model.dtype is {c.recipe.model.dtype}"),
         "set dtype: bfloat16", "vLLM 0.32 mamba/ops/cpu/gdn_attention.py"),
)  # fmt: skip
