"""Rules for the trainer: parallelism, FP8, LoRA, images, offload."""

from __future__ import annotations

from difflib import get_close_matches
from math import gcd, lcm

from primeslurm.models import bundled, capabilities, lora_targets
from primeslurm.models.expert_sharding import unshardable_stack
from primeslurm.plan import lora_engines
from primeslurm.plan.checks.rule import Rule, RuleContext, when


def _deepep_clips(context: RuleContext) -> str:
    max_norm = context.recipe.trainer.optimizer.max_norm
    return f"gradients are clipped to {max_norm:g}" if context.deepep and max_norm is not None else ""


def _deepep_gpu(context: RuleContext) -> str:
    if not context.deepep:
        return ""
    return "there is no DeepEP for CPUs" if context.on_cpus else context.older_gpu(90)


def _deepep_chunk(context: RuleContext) -> str:
    trainer = context.recipe.trainer
    chunk, p = trainer.parallelism.deepep_token_chunk, trainer.parallelism
    if chunk is None:
        return ""
    if not context.deepep:
        return "ep_backend is torch"
    tokens = trainer.rows_at_once(context.recipe.seq_len) * context.recipe.seq_len // p.cp
    if chunk >= tokens:
        return f"a rank has only {tokens} tokens at once, so there is nothing to split"
    least = context.shape.experts.count if context.shape and context.shape.experts else 1
    return f"a chunk has fewer tokens than the model has experts ({least})" if chunk < least else ""


def _single_products(context: RuleContext) -> str:
    trainer = context.recipe.trainer
    if trainer.grouped_mm:
        return ""
    if context.dense:
        return "the model has no experts"
    lora = trainer.lora
    on_experts = lora is not None and "experts" in (lora.targets or ("experts",))
    features = {"compile": trainer.compile, "fp8": trainer.fp8, "lora on experts": on_experts}
    used = [name for name, is_on in features.items() if is_on]
    return f"the recipe also uses {' and '.join(used)}" if used else ""


def _ep_shards(context: RuleContext) -> str:
    p = context.recipe.trainer.parallelism
    ranks = context.trainer_gpus // p.dp_replicate
    if not ranks or ranks % p.ep or context.uneven_experts(p.ep) or (stack := _undivided(context, ranks)) is None:
        return ""
    train = next(request for request in context.requests if request.role == "train")
    step = p.dp_replicate * lcm(p.cp, p.ep)
    fitting = [
        nodes
        for nodes in range(1, 2 * train.nodes + 1)
        if nodes * train.gpus % step == 0 and _undivided(context, nodes * train.gpus // p.dp_replicate) is None
    ]
    near = [*[n for n in fitting if n < train.nodes][-1:], *[n for n in fitting if n > train.nodes][:1]]
    nearest = f"; nearest: deployment.train.nodes: {' or '.join(map(str, near))}" if near else ""
    return (
        f"with ep: {p.ep} on {context.trainer_gpus} GPUs, {ranks // p.ep} of them share the same {stack[0]} experts, "
        f"and {ranks // p.ep} divides no dimension of their {' x '.join(map(str, stack))} weights{nearest}"
    )


def _undivided(context: RuleContext, ranks: int) -> tuple[int, ...] | None:
    """Return the shape of an expert stack that cannot be split over `ranks` with the recipe's EP; None if all can."""
    trainer, shape = context.recipe.trainer, context.shape
    if shape is None:
        return None
    lora = trainer.lora
    adapters = lora.rank if lora and "experts" in (lora.targets or ("experts",)) else None
    return unshardable_stack(shape, context.recipe.model.impl, ranks, trainer.parallelism.ep, adapters)


def _cp_heads(context: RuleContext) -> str:
    p = context.recipe.trainer.parallelism
    # Sparse attention is always split over queries. Recurrent layers have their own rule.
    if context.shape is None or context.shape.indexer or _recurrent_heads(context):
        return ""
    if p.cp_style != "ulysses" or context.shape.heads % p.cp == 0:
        return ""
    return f"{context.shape.heads} attention heads cannot be spread evenly over cp: {p.cp}"


def _recurrent_heads(context: RuleContext) -> int:
    """Return the heads of Mamba-2 layers or delta nets; 0 if there are none."""
    if context.shape is None:
        return 0
    nets, mamba = context.shape.delta_nets, context.shape.mamba
    return nets.value_heads if nets else mamba.heads if mamba else 0


def _cp_recurrent_heads(context: RuleContext) -> str:
    p, heads = context.recipe.trainer.parallelism, _recurrent_heads(context)
    if context.shape is None or not heads or p.cp_style != "ulysses":
        return ""
    both = gcd(heads, context.shape.heads)
    if both % p.cp == 0:
        return ""
    nearest = max(divisor for divisor in range(1, p.cp) if both % divisor == 0)
    return (
        f"{context.shape.heads} heads of attention and {heads} of recurrent layers cannot both be spread evenly over "
        f"cp: {p.cp}; nearest: {nearest}"
    )


def _cp_recurrent_style(context: RuleContext) -> str:
    p = context.recipe.trainer.parallelism
    broken = _recurrent_heads(context) and p.cp > 1 and p.cp_style == "allgather"
    return "recurrent layers have no keys to gather, only a state of the whole sequence" if broken else ""


def _compile(context: RuleContext) -> str:
    trainer, model = context.recipe.trainer, context.recipe.model
    if not trainer.compile:
        return ""
    if model.dtype != "bfloat16":
        return f"model.dtype is {model.dtype}"
    return "model.vlm is set, and compiled layers have not been tested with images" if model.vlm else ""


def _prefix_sharing(context: RuleContext) -> str:
    recipe = context.recipe
    if not recipe.trainer.prefix_sharing:
        return ""
    if recipe.task != "rl":
        return f"task is {recipe.task}, which has no groups of rollouts"
    obstacles = {
        f"cp: {(cp := recipe.trainer.parallelism.cp)}": cp > 1,
        "draft_layer": recipe.trainer.draft_layer,
        "vlm": recipe.model.vlm,
    }
    used = [name for name, is_on in obstacles.items() if is_on]
    return f"the recipe also uses {' and '.join(used)}" if used else ""


def _fp8_gpu(context: RuleContext) -> str:
    if not context.recipe.trainer.fp8:
        return ""
    if context.on_cpus:
        return "CPUs have no FP8 kernels"
    return next((f"{gpu.name} is SM{gpu.sm}" for gpu in context.gpus() if gpu.sm != 90), "")


def _fp8_match(context: RuleContext) -> str:
    recipe = context.recipe
    stored = context.shape.quantization if context.shape else None
    if recipe.task != "rl" or recipe.trainer.fp8 == (recipe.inference.quantization == "fp8" or stored == "fp8"):
        return ""
    if recipe.trainer.fp8:
        return "the trainer computes in FP8, but the engines do not"
    return "the engines compute in FP8, but the trainer does not"


def _lora_quantised(context: RuleContext) -> str:
    recipe = context.recipe
    if recipe.task != "rl" or recipe.trainer.lora is None:
        return ""
    stored = "fp8" if context.shape and context.shape.quantization == "fp8" else None
    quantised = recipe.inference.quantization or stored
    return f"engines quantise merged weights to {quantised}, and the trainer does not" if quantised else ""


def _lora_targets(context: RuleContext) -> str:
    lora = context.recipe.trainer.lora
    valid = lora_targets()
    unknown = [name for name in lora.targets or () if name not in valid] if lora else []
    near = [match for name in unknown for match in get_close_matches(name, valid, n=1)]
    hint = f"; did you mean {', '.join(near)}?" if near else ""
    return f"no model has {', '.join(unknown)}{hint}" if unknown else ""


def _draft_layer_used(context: RuleContext) -> str:
    recipe = context.recipe
    if recipe.task != "rl" or recipe.trainer.draft_layer is None:
        return ""
    speculation = recipe.inference.speculative
    if speculation is None:
        return "inference.speculative is not set"
    return f"engines draft by method {speculation.method}" if speculation.method != "mtp" else ""


def _draft_layer_count(context: RuleContext) -> str:
    layers = context.shape.draft_layers if context.shape else None
    broken = context.recipe.trainer.draft_layer is not None and layers not in (None, 1)
    return f"the model has {layers} draft layers" if broken else ""


def _draft_layer_alone(context: RuleContext) -> str:
    recipe, trainer = context.recipe, context.recipe.trainer
    if trainer.draft_layer is None:
        return ""
    features = {
        "trainer.parallelism.cp": trainer.parallelism.cp > 1,
        "trainer.lora": trainer.lora,
        "trainer.fp8": trainer.fp8,
        "model.vlm": recipe.model.vlm,
        "inference.quantization": recipe.inference.quantization,
        "inference.model": recipe.inference.model,  # always in FP8
        "a quantised checkpoint": context.shape and context.shape.quantization,
    }
    used = [name for name, is_on in features.items() if is_on]
    return f"the recipe also uses {' and '.join(used)}" if used else ""


def _vision_dtype(context: RuleContext) -> str:
    family = capabilities(context.shape.model_type, "custom") if context.shape else None
    broken = family is not None and family.images and context.recipe.model.dtype != "bfloat16"
    return f"model.dtype is {context.recipe.model.dtype}" if broken else ""


_EP = "trainer.parallelism.ep"
_CP = "trainer.parallelism.cp"
_CP_STYLE = "trainer.parallelism.cp_style"
# Fields whose rules also hold for the ranks of a Tinker service
SHARED_WORK = (_EP, _CP, _CP_STYLE)
TRAINER_RULES = (
    Rule("deepep-without-ep", "error", "trainer.parallelism.ep_backend", "ep_backend deepep needs expert parallelism",
         lambda c: when(c.deepep and c.recipe.trainer.parallelism.ep == 1, "ep is 1"),
         "set ep, or ep_backend: torch", "prime-rl 0.6.0 validator"),
    Rule("deepep-clipping", "error", "trainer.optimizer.max_norm",
         "ep_backend deepep does not work with gradient clipping", _deepep_clips, "set max_norm: null",
         "prime-rl 0.6.0 docs, advanced"),
    Rule("deepep-gpu", "error", "trainer.parallelism.ep_backend", "ep_backend deepep needs GPUs with SM90 or newer",
         _deepep_gpu, "set ep_backend: torch", "DeepEP README"),
    Rule("deepep-compile", "error", "trainer.compile", "ep_backend deepep does not work with compiled layers",
         lambda c: when(c.deepep and c.recipe.trainer.compile, "torch.compile cannot trace DeepEP's operations"),
         "set compile: false, or ep_backend: torch", "torchtitan 0.3: deepep.dispatch has no fake implementation"),
    Rule("deepep-dtype", "error", "model.dtype", "ep_backend deepep needs bfloat16",
         lambda c: when(c.deepep and c.recipe.model.dtype != "bfloat16", f"model.dtype is {c.recipe.model.dtype}"),
         "set dtype: bfloat16, or ep_backend: torch", "DeepEP 2.1: ElasticBuffer.dispatch"),
    Rule("deepep-sms", "error", "trainer.parallelism.deepep_num_sms", "deepep_num_sms needs ep_backend deepep",
         lambda c: when(c.recipe.trainer.parallelism.deepep_num_sms and not c.deepep, "ep_backend is torch"),
         "remove it, or set ep_backend: deepep", "torchtitan 0.3"),
    Rule("deepep-chunk", "error", "trainer.parallelism.deepep_token_chunk",
         "deepep_token_chunk needs ep_backend deepep and a size below a rank's tokens", _deepep_chunk,
         "remove it, or use a value between the number of experts and a rank's tokens, with ep_backend: deepep",
         "every chunk is a dispatch and a combine of all ranks"),
    Rule("grouped-products", "error", "trainer.grouped_mm",
         "grouped_mm false does not work with compile, FP8 or LoRA on experts", _single_products,
         "set grouped_mm: true", "torch 2.13: grouped_mm"),
    Rule("trainer-ep-dense", "error", _EP, "Expert parallelism needs a model with experts",
         lambda c: c.no_experts(c.recipe.trainer.parallelism.ep > 1), "set ep: 1",
         "torchtitan 0.3"),
    Rule("trainer-ep-divides", "error", _EP, "ep must divide the number of experts",
         lambda c: c.uneven_experts(c.recipe.trainer.parallelism.ep),
         "use a divisor of the number of experts", "torchtitan 0.3, expert parallelism shards dimension 0"),
    Rule("trainer-ep-shards", "error", _EP, "Ranks that hold the same experts must split them evenly", _ep_shards,
         "use another number of nodes, or another ep", "torch 2.13: FSDP fills up between experts alone"),
    Rule("trainer-cp-divides", "error", _CP, "cp must divide seq_len",
         lambda c: when(c.recipe.seq_len % (cp := c.recipe.trainer.parallelism.cp),
                        f"{c.recipe.seq_len} tokens cannot be split into {cp} equal pieces"),
         "use a divisor of seq_len", "every rank holds an equal piece of each row"),
    Rule("trainer-cp-heads", "error", _CP, "cp with cp_style ulysses must divide the number of attention heads",
         _cp_heads, "use a divisor of the number of heads, or cp_style: allgather",
         "Ulysses exchanges tokens for heads"),
    Rule("trainer-cp-recurrent-heads", "error", _CP, "cp must divide the number of heads of recurrent layers as well",
         _cp_recurrent_heads, "use a divisor of both numbers of heads", "Ulysses exchanges tokens for heads"),
    Rule("trainer-cp-recurrent-style", "error", _CP_STYLE,
         "Models with recurrent layers need cp_style ulysses", _cp_recurrent_style, "set cp_style: ulysses",
         "a state depends on all tokens before it"),
    Rule("trainer-compile", "error", "trainer.compile", "compile needs bfloat16", _compile, "set compile: false",
         "torch 2.13: grouped products of bfloat16 only can be traced"),
    Rule("prefix-sharing", "error", "trainer.prefix_sharing",
         "prefix_sharing does not work with cp, draft_layer or images, and only in RL", _prefix_sharing,
         "set prefix_sharing: false", "branches of a prompt are neither rows nor documents"),
    Rule("trainer-fp8-gpu", "error", "trainer.fp8", "FP8 training needs GPUs with SM90", _fp8_gpu, "set fp8: false",
         "DeepGEMM README: Blackwell's kernels want power-of-two scales"),
    Rule("fp8-both", "warning", "trainer.fp8", "Trainer and engines should use the same precision", _fp8_match,
         "set trainer.fp8 and inference.quantization alike, because a mismatch raises the KL between them",
         "prime-rl 0.6.0 announcement"),
    Rule("lora-files", "error", "trainer.lora.save_adapter", "save_adapter needs weight updates through files",
         lambda c: when((lora := c.recipe.trainer.lora) and lora.save_adapter and c.recipe.weights.transport == "nccl",
                        "weights.transport is nccl"),
         "set save_adapter: false, or weights.transport: filesystem",
         "engines get the merged policy, over any transport"),
    Rule("lora-quantised", "error", "trainer.lora", "LoRA needs engines that do not quantise", _lora_quantised,
         "use a checkpoint in bfloat16 without inference.quantization, or remove lora",
         "FP8 rounds by more than an adapter changes: engines would sample from another policy than is trained"),
    Rule("lora-engines", "error", "trainer.lora.engines", "engines adapter needs layers and engines that support it",
         lambda c: lora_engines.obstacle(c.recipe, c.shape) if c.recipe.sends_adapter else "",
         "set engines: auto, or merged", "vLLM 0.32 vllm/lora"),
    Rule("lora-targets", "error", "trainer.lora.targets", "LoRA targets must be layers of the model", _lora_targets,
         f"valid: {', '.join(sorted(lora_targets(bundled())))}", "prime-rl 0.6.0 ignores unknown names silently"),
    Rule("lora-absorbed", "error", "trainer.lora.targets",
         "LoRA on kv_b_proj has no effect with sparse attention (DSA)",
         lambda c: when(c.sparse and (lora := c.recipe.trainer.lora) and "kv_b_proj" in (lora.targets or ()),
                        "sparse attention never calls kv_b_proj"),
         "remove kv_b_proj", "its weight is absorbed, so an adapter beside it would learn nothing"),
    Rule("draft-layer-used", "error", "trainer.draft_layer", "Engines must draft with the trained draft layer",
         _draft_layer_used, "set inference.speculative: {method: mtp, num_tokens: 1}, or remove draft_layer",
         "other engines ignore the layer"),
    Rule("draft-layer-count", "error", "trainer.draft_layer", "Training needs exactly one draft layer",
         _draft_layer_count, "remove it", "vLLM 0.32: later layers read the hidden states of earlier ones"),
    Rule("draft-layer-alone", "error", "trainer.draft_layer", "draft_layer does not work with cp, LoRA, FP8 or images",
         _draft_layer_alone,
         "set cp: 1, remove lora and vlm, and use bfloat16 (`primeslurm convert` for the checkpoint), or remove "
         "draft_layer",
         "a rank needs each token's successor, and drafts in FP8 or after images were not tried"),
    Rule("vision-dtype", "error", "model.dtype", "Training on images needs bfloat16", _vision_dtype,
         "set dtype: bfloat16", "prime-rl 0.6.0 docs, VLM"),
    Rule("vision-lora", "error", "model.vlm.freeze_vision_encoder", "LoRA needs a frozen vision encoder",
         lambda c: when((vlm := c.recipe.model.vlm) and not vlm.freeze_vision_encoder and c.recipe.trainer.lora,
                        "freeze_vision_encoder is false, but LoRA trains only adapters"),
         "set freeze_vision_encoder: true, or remove lora", "prime-rl 0.6.0 validator"),
    Rule("offload-optimizer", "error", "trainer.memory.optimizer_offload", "optimizer_offload does not work with Muon",
         lambda c: when(c.recipe.trainer.optimizer.type == "muon" and c.recipe.trainer.memory.optimizer_offload,
                        "Muon needs the GPU for its matrix products"),
         "set optimizer.type: adamw, sgd or sign_sgd", "prime-rl 0.6.0 validator (AdamW and SignSGD alone there)"),
    Rule("offload-once", "error", "trainer.memory.optimizer_state_offload",
         "optimizer_offload already includes optimizer_state_offload",
         lambda c: when((memory := c.recipe.trainer.memory).optimizer_offload and memory.optimizer_state_offload,
                        "both are set"),
         "remove one of the two", "optimizer_offload takes it there, too"),
)  # fmt: skip
