"""Rules for several parts of a run: router replay, KV offload, prefill and decode, weight transport, teacher."""

from __future__ import annotations

from primeslurm.plan.batch_job import is_exclusive
from primeslurm.plan.checks.rule import Rule, RuleContext
from primeslurm.plan.commands import kv_events
from primeslurm.plan.gpus import EXPANDABLE, GIB, alloc_conf
from primeslurm.plan.placement.resources import component_of
from primeslurm.recipe.fields.types import bytes_of
from primeslurm.recipe.sections.kv_offload import MooncakeOffload
from primeslurm.recipe.sections.routers import DynamoRouter, LlmdRouter
from primeslurm.recipe.sections.teacher import PolicyTeacher

# Share of a node's memory that KV cache may take
HOST_SHARE = 0.9


def _colocated_nccl(context: RuleContext) -> str:
    recipe = context.recipe
    refused = recipe.colocated and recipe.weights.transport == "nccl" and context.site.device == "cuda"
    return "trainer and engines share GPUs (deployment.colocated)" if refused else ""


def _deltas(context: RuleContext) -> str:
    recipe = context.recipe
    if recipe.task != "rl" or not recipe.weights.deltas:
        return ""
    if recipe.weights.transport == "nccl":
        return "weights.transport is nccl, which publishes no files"
    return "engines get LoRA adapters (trainer.lora.engines)" if recipe.sends_adapter else ""


def _replay(context: RuleContext) -> bool:
    return context.recipe.trainer.router_replay and context.recipe.task == "rl"


def _replay_router(context: RuleContext) -> str:
    llmd = isinstance(context.recipe.inference.router, LlmdRouter)
    return "its sidecar drops the routed experts of the prompt" if _replay(context) and llmd else ""


def _replay_dynamo(context: RuleContext) -> str:
    in_dynamo = isinstance(context.recipe.inference.router, DynamoRouter)
    return "its workers encode routed experts in another way than vLLM" if _replay(context) and in_dynamo else ""


def _dynamo_groups(context: RuleContext) -> str:
    inference = context.recipe.inference
    untested = isinstance(inference.router, DynamoRouter) and inference.expert_parallel
    return "its workers number data-parallel ranks themselves" if untested else ""


def _replay_workers(context: RuleContext) -> str:
    single = [environment.label for environment in context.recipe.environments if environment.workers == 1]
    long = context.recipe.seq_len >= 16384
    overloaded = single and long and _replay(context)
    return f"the one worker of {single[0]} has to decode all routed experts" if overloaded else ""


def _mooncake(context: RuleContext) -> MooncakeOffload | None:
    offload = context.recipe.inference.kv_offload
    return offload if isinstance(offload, MooncakeOffload) else None


def _mooncake_fabric(context: RuleContext) -> str:
    store = _mooncake(context)
    uses_rdma = store is not None and context.site.device == "cuda" and store.protocol != "tcp"
    return f"site {context.site.name} has no RDMA" if uses_rdma and not context.site.network.rdma else ""


def _mooncake_tcp(context: RuleContext) -> str:
    store = _mooncake(context)
    slow = store is not None and context.site.device == "cuda" and store.protocol == "tcp"
    return "every hit passes the TCP stacks of both hosts" if slow else ""


def _mooncake_alone(context: RuleContext) -> str:
    nodes = sum(request.nodes for request, _ in context.engines())
    return "there is one inference node" if _mooncake(context) and nodes == 1 else ""


def _offload_memory(context: RuleContext) -> str:
    offload = context.recipe.inference.kv_offload
    if offload is None:
        return ""
    for request, _ in context.engines():
        pools = 1 if _mooncake(context) else request.gpus // context.recipe.inference.parallel.tp
        needed, kind = offload.cpu.bytes * pools, request.kind
        memory = kind.memory_gib * GIB if kind.memory_gib else bytes_of(kind.mem) if kind.mem else 0
        if memory and needed > memory * HOST_SHARE:
            spare = memory * (1 - HOST_SHARE) / GIB
            text = f"each {request.role} node has {memory / GIB:.0f} GiB, of which {spare:.0f} must stay free"
            return f"it needs {needed / GIB:.0f} GiB, but {text}"
    return ""


def _pinned_memory(context: RuleContext) -> str:
    inference = context.recipe.inference
    environments = (context.site.env, inference.env, inference.prefill.env, inference.decode.env)
    moving = any(EXPANDABLE in alloc_conf(env) for env in environments)
    pinned = context.disaggregated or inference.kv_offload is not None
    return "torch would move KV memory that is registered with the NIC" if moving and pinned else ""


def _hybrid_disaggregated(context: RuleContext) -> str:
    untested = context.mamba and context.disaggregated
    return "Mamba state must move with the KV, which has not been tested" if untested else ""


def _hybrid_offload(context: RuleContext) -> str:
    untested = context.mamba and context.recipe.inference.kv_offload
    return "a hit needs the Mamba state, too, which has not been tested" if untested else ""


def _kv_aware(context: RuleContext, applies: object, finding: str) -> str:
    return finding if applies and kv_events.are_read(context.recipe) else ""


def _shared_engine_nodes(context: RuleContext) -> bool:
    requests = [request for request, _ in context.engines()]
    return not all(is_exclusive(component_of(context.recipe, each.role), each) for each in requests)


def _teacher_temperature(context: RuleContext) -> str:
    recipe = context.recipe
    differs = any(recipe.sampling(environment).temperature != 1 for environment in recipe.environments)
    return "the policy samples at another temperature" if recipe.teacher is not None and differs else ""


def _teacher_images(context: RuleContext) -> str:
    return "the teacher gets token ids only" if context.recipe.teacher and context.recipe.model.vlm else ""


def _teacher_room(context: RuleContext) -> str:
    recipe = context.recipe
    tight = isinstance(recipe.teacher, PolicyTeacher) and recipe.max_len <= recipe.seq_len
    return "max_len is not larger than seq_len, so the ends of long sequences would not be scored" if tight else ""


_REPLAY = "trainer.router_replay"
_OFFLOAD = "inference.kv_offload"
_POLICY = "inference.router.policy"
JOINT_RULES = (
    Rule("replay-llm-d", "error", _REPLAY, "Router replay does not work with the llm-d router", _replay_router,
         "set inference.router.type: vllm-router", "llm-d-router#1473"),
    Rule("replay-dynamo", "error", _REPLAY, "Router replay does not work with the dynamo router", _replay_dynamo,
         "set inference.router.type: vllm-router", "ai-dynamo 1.6.1 vllm/handlers.py:769"),
    Rule("replay-dense", "error", _REPLAY, "Router replay needs a model with experts",
         lambda c: c.no_experts(c.recipe.trainer.router_replay),
         "set trainer.router_replay: false", "arXiv 2510.11370"),
    Rule("replay-workers", "warning", _REPLAY, "Router replay needs several environment workers", _replay_workers,
         "raise environments.workers", "prime-rl 0.6.0 docs, router replay"),
    Rule("mooncake-rdma", "error", f"{_OFFLOAD}.protocol", "Mooncake with protocol rdma needs nodes with RDMA",
         _mooncake_fabric, "set type: native, or protocol: tcp", "prime-rl 0.6.0 docs, KV offload"),
    Rule("mooncake-tcp", "warning", f"{_OFFLOAD}.protocol", "Mooncake over TCP is slow", _mooncake_tcp,
         "set protocol: rdma", "Mooncake 0.3"),
    Rule("mooncake-alone", "warning", f"{_OFFLOAD}.type", "A Mooncake pool is useful only with several inference nodes",
         _mooncake_alone, "set type: native, which holds the same KV cache without extra processes", "Mooncake 0.3"),
    Rule("offload-memory", "error", f"{_OFFLOAD}.cpu.bytes",
         "The KV offload memory must fit into the host memory of the nodes", _offload_memory,
         "lower it; native counts once per engine of a node, mooncake once per node", "site file"),
    Rule("pinned-memory", "error", "inference.env",
         "KV transfer between engines does not work with expandable segments", _pinned_memory,
         f"remove {EXPANDABLE} from PYTORCH_ALLOC_CONF", "vLLM 0.32 config/vllm.py; vllm#40812"),
    Rule("hybrid-disaggregated", "warning", "deployment.inference.type",
         "Separate prefill and decode engines are untested for models with Mamba layers", _hybrid_disaggregated,
         "to be safe, set type: multi_node", "not tried"),
    Rule("hybrid-offload", "warning", _OFFLOAD, "KV offload is untested for models with Mamba layers", _hybrid_offload,
         "to be safe, remove it", "not tried"),
    Rule("dynamo-groups", "warning", "inference.router.type", "Dynamo is untested with groups of data-parallel engines",
         _dynamo_groups, "to be safe, set type: vllm-router", "not tried"),
    Rule("kv-aware-mamba", "error", _POLICY, "Policy kv_aware does not work for models with Mamba layers",
         lambda c: _kv_aware(c, c.mamba, "vLLM chooses their block size itself, and the router must know it"),
         "set policy: consistent_hash", "vLLM 0.32 platforms/interface.py"),
    Rule("kv-aware-mla", "error", _POLICY, "Policy kv_aware with prefill engines does not work for models with MLA",
         lambda c: _kv_aware(c, c.disaggregated and c.shape and c.shape.mla, "vllm-router rejects their KV events"),
         "set policy: consistent_hash", "vllm-router 0.1.17 kv_index/admit.rs"),
    Rule("kv-aware-offload", "warning", _POLICY, "Policy kv_aware is untested with KV offload",
         lambda c: _kv_aware(c, c.recipe.inference.kv_offload, "offloaded blocks have events of their own"),
         "to be safe, set policy: consistent_hash", "not tried"),
    Rule("kv-aware-images", "warning", _POLICY, "Policy kv_aware ignores what is cached for prompts with images",
         lambda c: _kv_aware(c, c.recipe.model.vlm, "vllm-router balances their load only, so prefixes are lost"),
         "set policy: consistent_hash", "vllm-router 0.1.17 backend/preprocess.rs"),
    Rule("kv-aware-readers", "warning", _POLICY, "Policy kv_aware publishes KV events without encryption",
         lambda c: _kv_aware(c, _shared_engine_nodes(c), "other users of a router's node could read prompts"),
         "set exclusive: true for the nodes of engines, in slurm", "vLLM 0.32 distributed/kv_events.py"),
    Rule("colocated-nccl", "error", "weights.transport", "NCCL cannot connect two processes on one GPU",
         _colocated_nccl, "set transport: filesystem", "NCCL 2.29: 'Duplicate GPU detected'"),
    Rule("weight-deltas", "error", "weights.deltas", "Deltas need whole models in files that engines load", _deltas,
         "set deltas: false, or transport: filesystem and, with LoRA, trainer.lora.engines: merged",
         "a delta is the difference of two published models"),
    Rule("teacher-temperature", "warning", "orchestrator.sampling", "A teacher always answers at temperature 1",
         _teacher_temperature, "set temperature: 1", "vLLM 0.32: prompt_logprobs"),
    Rule("teacher-room", "warning", "model.max_len", "Engines need room for the hint of a policy teacher",
         _teacher_room, "set it to seq_len plus the length of the hint", "the hint is added to the prompt"),
    Rule("teacher-images", "error", "teacher", "A teacher cannot be used when training on images", _teacher_images,
         "remove teacher or model.vlm", "the teacher receives token ids only"),
)  # fmt: skip
