"""Rules for several parts of a run: router replay, KV offload, prefill and decode, weight transport, teacher."""

from __future__ import annotations

from primeslurm.plan.batch_job import is_exclusive
from primeslurm.plan.checks.rule import Rule, RuleContext, when
from primeslurm.plan.commands import kv_events
from primeslurm.plan.gpus import EXPANDABLE, GIB, alloc_conf
from primeslurm.plan.placement.resources import component_of
from primeslurm.recipe.fields.types import bytes_of
from primeslurm.recipe.sections.kv_offload import MooncakeOffload
from primeslurm.recipe.sections.routers import DynamoRouter, LlmdRouter
from primeslurm.recipe.sections.teacher import PolicyTeacher

# Share of a node's memory that KV cache may take
HOST_SHARE = 0.9


def _deltas(context: RuleContext) -> str:
    recipe = context.recipe
    if recipe.task != "rl" or not recipe.weights.deltas:
        return ""
    if recipe.weights.transport == "nccl":
        return "weights.transport is nccl, which publishes no files"
    return "engines get LoRA adapters (trainer.lora.engines)" if recipe.sends_adapter else ""


def _replay(context: RuleContext) -> bool:
    return context.recipe.trainer.router_replay and context.recipe.task == "rl"


def _replay_workers(context: RuleContext) -> str:
    single = [environment.label for environment in context.recipe.environments if environment.workers == 1]
    long = context.recipe.seq_len >= 16384
    overloaded = single and long and _replay(context)
    return f"the one worker of {single[0]} has to decode all routed experts" if overloaded else ""


def _mooncake(context: RuleContext) -> MooncakeOffload | None:
    offload = context.recipe.inference.kv_offload
    return offload if isinstance(offload, MooncakeOffload) else None


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


def _kv_aware(context: RuleContext, applies: object, finding: str) -> str:
    return finding if applies and kv_events.are_read(context.recipe) else ""


def _shared_engine_nodes(context: RuleContext) -> bool:
    requests = [request for request, _ in context.engines()]
    return not all(is_exclusive(component_of(context.recipe, each.role), each) for each in requests)


_REPLAY = "trainer.router_replay"
_OFFLOAD = "inference.kv_offload"
_POLICY = "inference.router.policy"
JOINT_RULES = (
    Rule("replay-llm-d", "error", _REPLAY, "Router replay does not work with the llm-d router",
         lambda c: when(_replay(c) and isinstance(c.recipe.inference.router, LlmdRouter),
                        "its sidecar drops the routed experts of the prompt"),
         "set inference.router.type: vllm-router", "llm-d-router#1473"),
    Rule("replay-dynamo", "error", _REPLAY, "Router replay does not work with the dynamo router",
         lambda c: when(_replay(c) and isinstance(c.recipe.inference.router, DynamoRouter),
                        "its workers encode routed experts in another way than vLLM"),
         "set inference.router.type: vllm-router", "ai-dynamo 1.6.1 vllm/handlers.py:769"),
    Rule("replay-dense", "error", _REPLAY, "Router replay needs a model with experts",
         lambda c: c.no_experts(c.recipe.trainer.router_replay),
         "set trainer.router_replay: false", "arXiv 2510.11370"),
    Rule("replay-workers", "warning", _REPLAY, "Router replay needs several environment workers", _replay_workers,
         "raise environments.workers", "prime-rl 0.6.0 docs, router replay"),
    Rule("mooncake-rdma", "error", f"{_OFFLOAD}.protocol", "Mooncake with protocol rdma needs nodes with RDMA",
         lambda c: when((store := _mooncake(c)) and store.protocol != "tcp" and not (c.on_cpus or c.site.network.rdma),
                        f"site {c.site.name} has no RDMA"),
         "set type: native, or protocol: tcp", "prime-rl 0.6.0 docs, KV offload"),
    Rule("mooncake-tcp", "warning", f"{_OFFLOAD}.protocol", "Mooncake over TCP is slow",
         lambda c: when((store := _mooncake(c)) and store.protocol == "tcp" and not c.on_cpus,
                        "every hit passes the TCP stacks of both hosts"),
         "set protocol: rdma", "Mooncake 0.3"),
    Rule("mooncake-alone", "warning", f"{_OFFLOAD}.type", "A Mooncake pool is useful only with several inference nodes",
         lambda c: when(_mooncake(c) and sum(request.nodes for request, _ in c.engines()) == 1,
                        "there is one inference node"),
         "set type: native, which holds the same KV cache without extra processes", "Mooncake 0.3"),
    Rule("offload-memory", "error", f"{_OFFLOAD}.cpu.bytes",
         "The KV offload memory must fit into the host memory of the nodes", _offload_memory,
         "lower it; native counts once per engine of a node, mooncake once per node", "site file"),
    Rule("pinned-memory", "error", "inference.env",
         "KV transfer between engines does not work with expandable segments", _pinned_memory,
         f"remove {EXPANDABLE} from PYTORCH_ALLOC_CONF", "vLLM 0.32 config/vllm.py; vllm#40812"),
    Rule("hybrid-disaggregated", "warning", "deployment.inference.type",
         "Separate prefill and decode engines are untested for models with Mamba layers",
         lambda c: when(c.mamba and c.disaggregated,
                        "Mamba state must move with the KV, which has not been tested"),
         "to be safe, set type: multi_node", "not tried"),
    Rule("hybrid-offload", "warning", _OFFLOAD, "KV offload is untested for models with Mamba layers",
         lambda c: when(c.mamba and c.recipe.inference.kv_offload,
                        "a hit needs the Mamba state, too, which has not been tested"),
         "to be safe, remove it", "not tried"),
    Rule("dynamo-groups", "warning", "inference.router.type", "Dynamo is untested with groups of data-parallel engines",
         lambda c: when(isinstance(c.recipe.inference.router, DynamoRouter) and c.recipe.inference.expert_parallel,
                        "its workers number data-parallel ranks themselves"),
         "to be safe, set type: vllm-router", "not tried"),
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
         lambda c: when(c.recipe.colocated and c.recipe.weights.transport == "nccl" and not c.on_cpus,
                        "trainer and engines share GPUs (deployment.colocated)"),
         "set transport: filesystem", "NCCL 2.29: 'Duplicate GPU detected'"),
    Rule("weight-deltas", "error", "weights.deltas", "Deltas need whole models in files that engines load", _deltas,
         "set deltas: false, or transport: filesystem and, with LoRA, trainer.lora.engines: merged",
         "a delta is the difference of two published models"),
    Rule("teacher-temperature", "warning", "orchestrator.sampling", "A teacher always answers at temperature 1",
         lambda c: when(c.recipe.teacher and any(c.recipe.sampling(e).temperature != 1 for e in c.recipe.environments),
                        "the policy samples at another temperature"),
         "set temperature: 1", "vLLM 0.32: prompt_logprobs"),
    Rule("teacher-room", "warning", "model.max_len", "Engines need room for the hint of a policy teacher",
         lambda c: when(isinstance(c.recipe.teacher, PolicyTeacher) and c.recipe.max_len <= c.recipe.seq_len,
                        "max_len is not larger than seq_len, so the ends of long sequences would not be scored"),
         "set it to seq_len plus the length of the hint", "the hint is added to the prompt"),
    Rule("teacher-images", "error", "teacher", "A teacher cannot be used when training on images",
         lambda c: when(c.recipe.teacher and c.recipe.model.vlm, "the teacher gets token ids only"),
         "remove teacher or model.vlm", "the teacher receives token ids only"),
)  # fmt: skip
