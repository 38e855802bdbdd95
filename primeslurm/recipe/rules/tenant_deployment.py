"""Rules of a deployment that several tenants share."""

from __future__ import annotations

from primeslurm.base.errors import Violation
from primeslurm.recipe.recipe import Recipe
from primeslurm.recipe.sections.deployment import Disaggregated

_OF_TENANT = "each tenant's recipe has its own (primeslurm tenant add)"
_LEAVE_OUT = "leave it out"


def violations(recipe: Recipe) -> list[Violation]:
    """Return what the recipe of a deployment lacks, and every setting that does not work with adapters of tenants."""
    inference, parallelism = recipe.inference, recipe.trainer.parallelism
    router, shape = inference.router, recipe.deployment.inference
    problems = []
    if recipe.tenants is None:
        fix = "add `tenants: {max_tenants: 4, max_rank: 32}`"
        problems.append(Violation("tenants", "", "task tenants needs this section", fix))
    if recipe.environments:
        labels = ", ".join(environment.label for environment in recipe.environments)
        problems.append(Violation("environments", labels, _OF_TENANT, _LEAVE_OUT))
    if recipe.trainer.lora is not None:
        problems.append(Violation("trainer.lora", f"rank {recipe.trainer.lora.rank}", _OF_TENANT, _LEAVE_OUT))
    if parallelism.ep_backend != "torch":
        why = "it does not send the adapter of a token"
        problems.append(Violation("trainer.parallelism.ep_backend", parallelism.ep_backend, why, "use torch"))
    if isinstance(shape, Disaggregated):
        why = "adapters of tenants were not tested with prefill and decode engines"
        problems.append(Violation("deployment.inference.type", shape.type, why, "use single_node or multi_node"))
    elif shape.num_replicas > 1:
        why = "all tenants share one router"
        problems.append(Violation("deployment.inference.num_replicas", str(shape.num_replicas), why, "use 1"))
    if router.type != "vllm-router":
        why = "adapters of tenants were not tested behind it"
        problems.append(Violation("inference.router.type", router.type, why, "use vllm-router"))
    refused = {
        "quantization": "adapters of tenants were not tested on FP8 weights",
        "expert_parallel": "vLLM drops adapters if an engine of an expert-parallel group is idle",
        "speculative": "adapters were not tested with speculative decoding",
        "batch_invariant": "vLLM's kernels for adapters are not batch-invariant",
    }
    for name, why in refused.items():
        if value := getattr(inference, name):
            text = value if isinstance(value, str) else "true" if value is True else ""
            problems.append(Violation(f"inference.{name}", text, why, _LEAVE_OUT))
    if inference.reads_kv_events:
        why = "it gives no credit for cached blocks to requests for an adapter"
        problems.append(Violation("inference.router.policy", "kv_aware", why, "use consistent_hash or round_robin"))
    return problems
