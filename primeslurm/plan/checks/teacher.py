"""Check the teacher as a served model, and that its tokenizer matches the policy's."""

from __future__ import annotations

from dataclasses import replace

from primeslurm.base.errors import Violation
from primeslurm.base.model_files import model_directory
from primeslurm.plan.checks.capacity import capacity
from primeslurm.plan.checks.checkpoint_tensors import UNREADABLE_TOKENIZER, token_ids
from primeslurm.plan.checks.compatibility import conflicts
from primeslurm.plan.checks.files import ModelFiles
from primeslurm.plan.checks.rule import RuleContext
from primeslurm.plan.estimates.estimate import engine_role
from primeslurm.plan.forecast import Estimate, RoleMemory
from primeslurm.plan.gpus import gpu_of
from primeslurm.plan.model import Finding
from primeslurm.plan.placement.inference import teacher_recipe
from primeslurm.plan.placement.resources import ResourceRequest
from primeslurm.recipe import Recipe, Site

# Fields of the recipe that would serve the teacher, and the fields of the run that set them. The first match counts.
_FIELDS = (("inference.parallel.tp", "teacher.tp"), ("inference", "teacher"), ("model", "teacher"))
_MORE_MEMORY = "raise teacher.tp, or set teacher.quantization: fp8"


def teacher_findings(
    recipe: Recipe, site: Site, requests: list[ResourceRequest], model: ModelFiles | None
) -> tuple[list[Finding], RoleMemory | None]:
    """Return findings about the teacher's engines, and the memory of one of their GPUs if model and GPU are known."""
    serving = teacher_recipe(recipe)
    if serving is None or model is None:
        return [], None
    # As a recipe of its own, the teacher's nodes are its one inference replica.
    engine_requests = [
        replace(request, role="inference", nodes_per_replica=request.nodes)
        for request in requests
        if request.role == "teacher"
    ]
    findings = conflicts(RuleContext(serving, site, engine_requests, model.shape))
    if model.absent:
        findings.append(model.absent)
    gpu = gpu_of(engine_requests[0].kind) if engine_requests and site.device == "cuda" else None
    memory = None
    if gpu is not None and model.shape is not None:
        memory = engine_role(serving, engine_requests[0], model.shape, gpu, prompt_logprobs=True)
        findings += [
            finding.model_copy(update={"fix": _MORE_MEMORY})
            for finding in capacity(serving, site, engine_requests, Estimate(source=model.source, roles=(memory,)))
        ]
        memory = memory.model_copy(update={"role": "teacher"})
    return [finding.model_copy(update={"field": _here(finding.field)}) for finding in findings], memory


def teacher_problems(recipe: Recipe, model: ModelFiles | None) -> list[Violation]:
    serving = teacher_recipe(recipe)
    if serving is None or model is None:
        return []
    problems = [
        Violation("seq_len", str(recipe.seq_len), f"the teacher: {p.why}", f"nearest: {_limit(p.fix)}")
        if p.field == "seq_len"
        else Violation(_here(p.field), p.value, p.why, p.fix)
        for p in model.problems
    ]
    return problems + _tokenizer_problems(recipe.model.path, serving.model.path)


def _limit(fix: str) -> int:
    """Return the longest seq_len that leaves one token to generate."""
    return int(fix.removeprefix("nearest: ")) - 1


def _here(field: str) -> str:
    for theirs, ours in _FIELDS:
        if field == theirs or field.startswith(f"{theirs}."):
            return ours + field.removeprefix(theirs)
    return field


def _tokenizer_problems(policy: str, teacher: str) -> list[Violation]:
    """Check that token ids mean the same to policy and teacher, if both tokenizers exist here."""
    policy_ids, teacher_ids = (_vocabulary(path) for path in (policy, teacher))
    if policy_ids is None or teacher_ids is None or policy_ids == teacher_ids:
        return []
    differing = sum(teacher_ids.get(token) != number for token, number in policy_ids.items())
    differing += sum(token not in policy_ids for token in teacher_ids)
    why = f"its tokenizer differs from the policy's in {differing} tokens"
    return [Violation("teacher.path", teacher, why, "use a model with the vocabulary of model.path")]


def _vocabulary(path: str) -> dict[str, int] | None:
    """Return the ids of a tokenizer by token; None if there is no such file, or it has another format."""
    directory = model_directory(path)
    try:
        return {token: number for number, token in token_ids(directory).items()} or None if directory else None
    except UNREADABLE_TOKENIZER:
        return None
