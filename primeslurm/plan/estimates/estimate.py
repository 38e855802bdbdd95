"""Estimate a run: memory per role, KV cache tokens, seconds of a weight update, GPU-hours. Pure."""

from __future__ import annotations

import math
from dataclasses import replace

from primeslurm.base import units
from primeslurm.models.shape import ModelShape
from primeslurm.nn.block_sizes import ONE_RANK_COPY_BYTES
from primeslurm.plan.batch_job import cpus_per_gpu
from primeslurm.plan.commands.command import ENGINE_ROLES, EngineRole
from primeslurm.plan.commands.engine import GPU_MEMORY_UTILIZATION, settings_of
from primeslurm.plan.estimates.engine_memory import (
    DEFAULT_BATCHED_TOKENS,
    EngineLayout,
    EngineMemory,
    engine_memory,
    kv_bytes_per_token,
)
from primeslurm.plan.estimates.orchestrator_memory import orchestrator_memory
from primeslurm.plan.estimates.parameters import count
from primeslurm.plan.estimates.rates import line_rate, rate_sources, rated_gpu
from primeslurm.plan.estimates.rollout_rate import decode_seconds
from primeslurm.plan.estimates.step_time import SPREAD, StepTime, moving_state, step_time
from primeslurm.plan.estimates.trainer_memory import (
    ELEMENT_BYTES,
    STATE_BYTES,
    TrainerLayout,
    checkpoint_bytes,
    experts_in_fp8,
    in_memory,
    local_amounts,
    local_bytes,
    lora_parameters,
    trained_parameters,
    trainer_memory,
)
from primeslurm.plan.forecast import Estimate, Quantity, RoleMemory
from primeslurm.plan.gpus import GIB, Gpu, gpu_of
from primeslurm.plan.placement.resources import ResourceRequest, count_gpus, expert_ranks
from primeslurm.recipe import Recipe, Site
from primeslurm.recipe.fields.types import minutes
from primeslurm.recipe.sections.kv_offload import NativeOffload
from primeslurm.recipe.sections.slurm import DEFAULT_TIME
from primeslurm.recipe.sections.teacher import PolicyTeacher
from primeslurm.recipe.sections.tenant_deployment import BATCH_TOKENS, LOGIT_TOKENS
from primeslurm.recipe.sections.trainer import ENGINE_CONTEXT_BYTES

# Share of the line rate that a weight update reaches, as in a published broadcast of GLM-5 (58 s)
LINE_SHARE = 0.5
# Typical rollouts have 1/4 of the longest length
TYPICAL = 4
# Bytes per parameter of a quantised checkpoint, including scales. Trained policies are bfloat16, except for FP8-block
# checkpoints.
STORED_BYTES = {"fp8": 1.0, "mxfp4": 0.53, "int4": 0.56}
# Bytes per token of a batch without routed experts: id, mask, log-probability, advantage, temperature, on-policy
BATCH_BYTES = 18


def estimate(recipe: Recipe, site: Site, requests: list[ResourceRequest], shape: ModelShape, source: str) -> Estimate:
    """Estimate the memory of every role with known GPUs, and quantities of the whole run."""
    trained = shape.with_draft_layer if recipe.trainer.draft_layer else shape
    roles: list[RoleMemory] = []
    for request in requests:
        gpu = gpu_of(request.kind) if site.device == "cuda" else None
        if gpu is None or not request.gpus:
            continue
        if request.role == "train":
            roles.append(_trainer_role(recipe, request, trained, gpu))
        elif request.role in ENGINE_ROLES:
            scores_prompts = isinstance(recipe.teacher, PolicyTeacher) and request.role != "decode"
            roles.append(engine_role(recipe, request, shape, gpu, prompt_logprobs=scores_prompts))
    train = next((request for request in requests if request.role == "train"), None)
    rates = rate_sources(site, train.kind) if train else []
    amounts = _amounts(recipe, site, requests, trained)
    return Estimate(source=source, roles=tuple(roles), amounts=tuple(amounts), rates=tuple(rates))


def engine_layout(recipe: Recipe, role: EngineRole, ep: int, shape: ModelShape) -> EngineLayout:
    """Return the layout of a role's engines if the experts are spread over `ep` GPUs."""
    settings, inference = settings_of(recipe, role), recipe.inference
    element = 2 if recipe.model.dtype == "bfloat16" else 4
    as_stored = recipe.task in ("serve", "eval") or shape.fp8_blocks
    stored = STORED_BYTES.get(shape.quantization or "", element) if as_stored else element
    return EngineLayout(
        tp=inference.parallel.tp,
        ep=ep,
        weight_bytes=1.0 if inference.quantization == "fp8" else stored,
        dtype_bytes=element,
        fp8_kv=inference.kv_cache_dtype == "fp8",
        batched_tokens=settings.max_num_batched_tokens or DEFAULT_BATCHED_TOKENS,
        cuda_graphs=not inference.enforce_eager,
        all2all=settings.all2all,
        adapter_bytes=element * _engine_adapter_parameters(recipe, shape),
    )


def _engine_adapter_parameters(recipe: Recipe, shape: ModelShape) -> int:
    if recipe.tenants is not None:
        return lora_parameters(shape, recipe.tenants.max_rank, None) * recipe.tenants.engine_adapters
    return _adapter_parameters(recipe, shape) if recipe.sends_adapter else 0


def _adapter_parameters(recipe: Recipe, shape: ModelShape) -> int:
    if recipe.tenants is not None:
        return lora_parameters(shape, recipe.tenants.max_rank, None) * recipe.tenants.max_tenants
    lora = recipe.trainer.lora
    return lora_parameters(shape, lora.rank, lora.targets) if lora else 0


def trainer_layout(recipe: Recipe, gpus: int, shape: ModelShape) -> TrainerLayout:
    trainer = recipe.trainer
    p = trainer.parallelism
    dtype_bytes = ELEMENT_BYTES[recipe.model.dtype]
    # Copies of all weights replace FSDP.
    copied = gpus == 1 and not trainer.memory.optimizer_offload
    copied &= count(shape).total * dtype_bytes <= ONE_RANK_COPY_BYTES
    tokens, logits = trainer.rows_at_once(recipe.seq_len) * recipe.seq_len // p.cp, trainer.memory.lm_head_chunk
    if recipe.tenants is not None:
        tokens, logits = max(BATCH_TOKENS, recipe.seq_len // p.cp), LOGIT_TOKENS
    return TrainerLayout(
        shard=gpus // p.dp_replicate,
        ep=p.ep,
        tokens=tokens,
        checkpointing=p.activation_checkpointing,
        optimizer_offload=trainer.memory.optimizer_offload,
        activation_offload=trainer.memory.activation_offload,
        keeps_selection=trainer.memory.keep_dsa_indices,
        logit_tokens=logits,
        lora_parameters=_adapter_parameters(recipe, shape),
        whole_adapters=recipe.tenants is not None,
        dtype_bytes=dtype_bytes,
        state_bytes=STATE_BYTES[trainer.optimizer.type],
        reshard=p.reshard_after_forward and not copied,
        reduced_once=p.reduce_gradients == "step",
        staged=recipe.checkpoint.asynchronous is True,
        cp=p.cp,
        images=recipe.model.vlm is not None,
        frozen_vision=_frozen_vision(recipe),
        state_offload=trainer.memory.optimizer_state_offload,
        gradient_bytes=ELEMENT_BYTES[p.gradient_dtype],
        experts_in_fp8=not copied and experts_in_fp8(recipe, gpus // p.dp_replicate, shape),
        draft_layer=trainer.draft_layer is not None,
    )


def _frozen_vision(recipe: Recipe) -> bool:
    return recipe.model.vlm is None or recipe.model.vlm.freeze_vision_encoder


def engine_role(
    recipe: Recipe, request: ResourceRequest, shape: ModelShape, gpu: Gpu, prompt_logprobs: bool = False
) -> RoleMemory:
    """Estimate the memory of one GPU of a role that runs engines."""
    role = ENGINE_ROLES[request.role]
    settings = settings_of(recipe, role)
    share = settings.gpu_memory_utilization or GPU_MEMORY_UTILIZATION
    layout = engine_layout(recipe, role, expert_ranks(recipe, request), shape)
    layout = replace(layout, prompt_logprobs=prompt_logprobs)
    memory = engine_memory(shape, layout, gpu.memory_gib * GIB, share)
    kv = settings.kv_cache_bytes or memory.kv
    memory = EngineMemory(memory.weights, memory.reserve, kv, memory.kv_per_token, memory.state_per_sequence)
    engines = request.nodes * request.gpus // layout.tp
    return RoleMemory(
        role=request.role,
        gpu=gpu.name,
        gpu_gib=gpu.memory_gib,
        limit_gib=round(gpu.memory_gib * share, 1),
        parts={"weights": _gib(memory.weights), "reserve": _gib(memory.reserve), "KV": _gib(max(0, memory.kv))},
        needed_gib=_gib(memory.weights + memory.reserve),
        kv_bytes_per_token=memory.kv_per_token,
        kv_tokens=memory.kv_tokens,
        longest=round(memory.sequences(recipe.max_len) * engines, 1),
        typical=round(memory.sequences(recipe.max_len // TYPICAL or 1) * engines, 1),
    )


def _trainer_role(recipe: Recipe, request: ResourceRequest, shape: ModelShape, gpu: Gpu) -> RoleMemory:
    layout = trainer_layout(recipe, request.nodes * request.gpus, shape)
    memory = trainer_memory(shape, layout)
    trained = trained_parameters(shape, layout.lora_parameters, layout.frozen_vision)
    saved = checkpoint_bytes(recipe, trained, layout.state_bytes)
    copies = local_bytes(recipe, saved, request.nodes) if in_memory(recipe) else 0
    limit = gpu.memory_gib * recipe.trainer_memory_share - (ENGINE_CONTEXT_BYTES / GIB if recipe.colocated else 0)
    parts = {
        "weights": memory.weights,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "gathered": memory.gathered,
        "activations": memory.activations,
        "images": memory.images,
        "logits": memory.logits,
    }
    return RoleMemory(
        role="train",
        gpu=gpu.name,
        gpu_gib=gpu.memory_gib,
        limit_gib=round(limit, 1),
        parts={name: _gib(size) for name, size in parts.items()},
        needed_gib=_gib(memory.total),
        host_gib_per_node=_gib(memory.host * request.gpus + copies),
    )


def _amounts(recipe: Recipe, site: Site, requests: list[ResourceRequest], shape: ModelShape) -> list[Quantity]:
    p = count(shape)
    gpus = count_gpus(requests)
    time = recipe.slurm.over(site.slurm).time or DEFAULT_TIME
    hours = gpus * minutes(time) / 60
    quantities = [
        Quantity(name="parameters", value=round(p.total / 1e9, 2), unit="billion", how="from the model's shape")
    ]
    train = next((request for request in requests if request.role == "train"), None)
    if train and recipe.task != "tenants":
        quantities += _training(recipe, site, train, cpus_per_gpu(recipe, requests), shape)
    if recipe.task == "rl" and train:
        quantities += _update(recipe, site, train, requests, shape)
        quantities += _rollouts(recipe, site, requests, shape, quantities)
        quantities += _replay(recipe, shape)
        quantities += _batch_files(recipe, site, shape)
        quantities.append(orchestrator_memory(recipe, _routed_bytes(recipe, shape), BATCH_BYTES, TYPICAL))
    quantities += _offload_tiers(recipe, requests, shape)
    quantities.append(Quantity(name="GPU-hours", value=round(hours), unit="h", how=f"{gpus} GPUs for {time}"))
    return quantities


def _training(recipe: Recipe, site: Site, train: ResourceRequest, cores: int, shape: ModelShape) -> list[Quantity]:
    trained = trained_parameters(shape, _adapter_parameters(recipe, shape), _frozen_vision(recipe))
    moments = recipe.checkpoint.moments
    size = checkpoint_bytes(recipe, trained, STATE_BYTES[recipe.trainer.optimizer.type])
    how = "float32 masters and optimizer state" + (" in bfloat16" if moments == "bfloat16" else "")
    saved = [Quantity(name="checkpoint", value=round(size / 1e9, 1), unit="GB", how=how)]
    saved += local_amounts(recipe, size, train.nodes)
    gpu = rated_gpu(site, train.kind)
    if gpu is None:
        return saved
    shared = f"each of the {train.gpus} ranks of a node uses the cores nearest to its GPU, with one thread per core"
    quantities = [*saved, Quantity(name="cores", value=cores, unit="per trainer rank", how=shared)]
    if recipe.trainer.memory.optimizer_state_offload:
        quantities.append(_moved_state(recipe, train, trained, gpu.host_bytes_s))
    rollouts = recipe.orchestrator.batch_size if recipe.task == "rl" else (recipe.sft.batch_size if recipe.sft else 1)
    nic = line_rate(site, train.kind) or (1.0 if train.nodes == 1 else None)  # one node sends nothing to others
    if nic is None:
        return quantities
    most = math.ceil(rollouts * recipe.trainer.parallelism.cp / (train.nodes * train.gpus))
    times = [
        step_time(recipe, shape, gpu, nodes=train.nodes, gpus=train.gpus, gbps=nic, tokens=most * length, length=length)
        for length in (recipe.seq_len, max(1, recipe.seq_len // TYPICAL))
    ]
    quantities.append(_micro_batch(times[0], math.ceil(most / recipe.trainer.rows_at_once(recipe.seq_len))))
    return [*quantities, *(_step(time, how) for time, how in zip(times, (LONGEST_STEP, TYPICAL_STEP), strict=True))]


def _moved_state(recipe: Recipe, train: ResourceRequest, trained: int, link_bytes_s: float) -> Quantity:
    """Return the optimizer state that a step moves between a GPU and host memory."""
    parameters = trained // (train.nodes * train.gpus // recipe.trainer.parallelism.dp_replicate)
    moved = parameters * STATE_BYTES[recipe.trainer.optimizer.type]
    seconds = moving_state(moved, train.gpus, link_bytes_s)
    how = f"to each GPU and back during the optimizer update, {units.duration(seconds)} at the end of a step"
    return Quantity(name="optimizer state moved", value=round(moved / 1e9, 1), unit="GB per step", how=how)


SAMPLED = "rollouts"
TOKEN = "token of a rollout"
MICRO_BATCH = "micro batch"
LONGEST_STEP = "trainer step, sequences of seq_len"
TYPICAL_STEP = "trainer step, of a quarter of that"


def _micro_batch(time: StepTime, passes: int) -> Quantity:
    """Return the longest time between two signs of progress of a rank in a step."""
    seconds = (time.longest - time.optimizer) / passes + time.optimizer
    how = f"the last of {passes} of the longest step, with the optimizer's update and without network overlap"
    return Quantity(name=MICRO_BATCH, value=round(seconds, 1), unit="s", how=how)


def _step(time: StepTime, name: str) -> Quantity:
    parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in time.parts.items())
    how = [f"{parts} s, within {SPREAD:.0%}"]
    if time.network < 0.05:
        return Quantity(name=name, value=round(time.shortest, 1), unit="s", how=how[0])
    how.append(f"network {time.network:.1f} s (not measured), {units.duration(time.longest)} in total without overlap")
    return Quantity(name=name, value=round(time.shortest, 1), unit="s", how="; ".join(how), most=round(time.longest, 1))


def _rollouts(
    recipe: Recipe, site: Site, requests: list[ResourceRequest], shape: ModelShape, quantities: list[Quantity]
) -> list[Quantity]:
    """Return the rate at which engines sample rollouts of a typical length, and what the bottleneck is."""
    request = next((each for each in requests if each.role in ("decode", "inference")), None)
    gpu = rated_gpu(site, request.kind) if request and gpu_of(request.kind) and site.device == "cuda" else None
    step = next((quantity for quantity in quantities if quantity.name == TYPICAL_STEP), None)
    if request is None or gpu is None or step is None or recipe.inference.model:
        return []
    role = ENGINE_ROLES[request.role]
    layout = engine_layout(recipe, role, expert_ranks(recipe, request), shape)
    engines, length = request.nodes * request.gpus // layout.tp, max(1, recipe.max_len // TYPICAL)
    context = length / 2  # of a rollout that grows from nothing
    room = engine_role(recipe, request, shape, gpu).kv_tokens / context
    at_once = min(room, recipe.max_inflight / engines, settings_of(recipe, role).max_num_seqs or math.inf)
    if at_once < 1:
        return []
    token_s = decode_seconds(shape, layout, gpu, at_once, context)
    rate = engines * at_once / token_s
    share = rate * step.value / (recipe.orchestrator.batch_size * length)
    limit = f"they are the bottleneck if they sample more than {share:.0%} of a rollout's tokens"
    how = f"{engines} engines with {at_once:.0f} rollouts of {units.tokens(length)} tokens each, never measured for "
    how += f"this model; {limit if share < 1 else 'the trainer is the bottleneck'}"
    token = Quantity(name=TOKEN, value=round(1e3 * token_s, 1), unit="ms", how="the time of a decode step")
    return [Quantity(name=SAMPLED, value=round(rate, -2), unit="tokens/s", how=how), token]


def _update(
    recipe: Recipe, site: Site, train: ResourceRequest, requests: list[ResourceRequest], shape: ModelShape
) -> list[Quantity]:
    element = 2 if recipe.model.dtype == "bfloat16" else 4
    fp8 = recipe.inference.quantization == "fp8" or shape.fp8_blocks
    parameters = count(shape)
    experts = float(parameters.experts * (1 if fp8 else element))
    projections = (parameters.attention + parameters.dense) * (1 if fp8 else element)
    common = projections + (parameters.total - parameters.experts - parameters.attention - parameters.dense) * element
    size = experts + common
    form = "FP8" if fp8 else recipe.model.dtype
    quantities = [Quantity(name="policy", value=round(size / 1e9, 1), unit="GB", how=f"in {form}")]
    if adapter := element * _adapter_parameters(recipe, shape):
        sent = "sent to engines instead of the policy" if recipe.sends_adapter else "merged into the policy"
        quantities.append(Quantity(name="adapter", value=round(adapter / 1e6, 1), unit="MB", how=sent))
        size = adapter if recipe.sends_adapter else size
    if recipe.weights.transport != "nccl":
        speed = site.storage_gbytes_per_s * train.nodes
        how = f"{train.nodes} nodes write it and engines read it, at {site.storage_gbytes_per_s:g} GB/s per node"
        return [*quantities, Quantity(name="weight update", value=round(2 * size / 1e9 / speed, 1), unit="s", how=how)]
    return [*quantities, *_sending(recipe, site, train, requests, common, experts)]


def _sending(
    recipe: Recipe, site: Site, train: ResourceRequest, requests: list[ResourceRequest], common: float, experts: float
) -> list[Quantity]:
    # Trainer GPUs share the sending. Each engine GPU takes its own experts, and everything else.
    gbps = line_rate(site, train.kind)
    if gbps is None:
        return []
    engines = [request for request in requests if request.role in ENGINE_ROLES]
    shares = [(request.nodes * request.gpus, common + experts / expert_ranks(recipe, request)) for request in engines]
    sent = sum(gpus * share for gpus, share in shares) / max(1, train.nodes * train.gpus)
    taken = max((share for _, share in shares), default=0.0)
    seconds = max(sent, taken) * 8 / (gbps * 1e9 * LINE_SHARE)
    speed = f"{LINE_SHARE:.0%} of {gbps:g} Gbit/s"
    how = f"{units.size(sent)} from a trainer GPU, {units.size(taken)} to an engine GPU, at {speed}"
    return [Quantity(name="weight update", value=round(seconds, 1), unit="s", how=how)]


def _replay(recipe: Recipe, shape: ModelShape) -> list[Quantity]:
    if not recipe.trainer.router_replay or shape.experts is None:
        return []
    per_token = _routed_bytes(recipe, shape)
    batch = per_token * recipe.seq_len * recipe.orchestrator.batch_size
    how = f"{per_token} bytes per token, {recipe.orchestrator.batch_size} rollouts of seq_len"
    return [Quantity(name="routed experts", value=round(batch / 1e9, 1), unit="GB per step", how=how)]


def _routed_bytes(recipe: Recipe, shape: ModelShape) -> int:
    """Return the bytes per token of routed experts that the trainer replays."""
    if not recipe.trainer.router_replay or shape.experts is None:
        return 0
    return shape.layers * shape.experts.top_k * (1 if shape.experts.count <= 256 else 2)


def _batch_files(recipe: Recipe, site: Site, shape: ModelShape) -> list[Quantity]:
    """Return the size of batches on the shared file system, if ranks read them there."""
    if recipe.orchestrator.rollout_transport != "filesystem":
        return []
    per_token = BATCH_BYTES + _routed_bytes(recipe, shape)
    batch = per_token * recipe.seq_len * recipe.orchestrator.batch_size / 1e9
    speed, steps = site.storage_gbytes_per_s, min(recipe.checkpoint.interval, recipe.max_steps)
    how = (
        f"{per_token} bytes per token; written in {units.duration(batch / speed)} at {speed:g} GB/s and kept until the "
    )
    how += f"next checkpoint: {units.size(batch * steps * 1e9)} after {steps} steps"
    return [Quantity(name="batch files", value=round(batch, 1), unit="GB per step", how=how)]


def _offload_tiers(recipe: Recipe, requests: list[ResourceRequest], shape: ModelShape) -> list[Quantity]:
    # Mooncake has one shared pool. With native offload, each engine has its own tier.
    offload = recipe.inference.kv_offload
    holders = [request for request in requests if request.role in ENGINE_ROLES]
    if offload is None or not holders:
        return []
    layout = engine_layout(recipe, "engine", 1, shape)
    pools = sum(request.nodes for request in holders)
    text = f"{pools} nodes share {{}} each"
    if isinstance(offload, NativeOffload):
        pools = sum(request.nodes * request.gpus // layout.tp for request in holders if request.role != "decode")
        text = f"each of {pools} engines has {{}} of its own"
    per_token = kv_bytes_per_token(shape, layout) * layout.tp
    sizes = {"KV in host memory": offload.cpu.bytes} | ({"KV on disk": offload.disk.bytes} if offload.disk else {})
    return [
        Quantity(
            name=name,
            value=round(pools * size / per_token / 1e6, 1),
            unit="million tokens",
            how=text.format(units.gib(size / GIB)),
        )
        for name, size in sizes.items()
    ]


def _gib(size: float) -> float:
    return round(size / GIB, 1)
