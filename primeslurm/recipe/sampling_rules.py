"""Sampling parameters that training allows: those that leave importance ratios right.

The trainer computes a token's log-probability over the whole vocabulary, from the model's logits and the temperature.
An engine that draws from a part of the vocabulary, or from changed logits, reports log-probabilities of that
distribution (vLLM's `processed_logprobs`). Importance ratios are then wrong even on policy: with top_p they are the
kept probability mass instead of 1. Log-probabilities from before the cut would make them 1, but the tokens would still
be drawn from another policy than the one whose gradient is taken. So training refuses such parameters; evaluation,
which computes no ratios, does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from primeslurm.base.errors import Violation
from primeslurm.recipe.recipe import Recipe
from primeslurm.recipe.sandbox_rules import ENV_KEY
from primeslurm.recipe.sections.orchestrator import Environment

EXACT = frozenset(
    {
        *("max_tokens", "max_completion_tokens", "stop", "stop_token_ids", "ignore_eos", "seed"),
        *("cache_salt", "chat_template_kwargs", "reasoning_effort", "logprobs", "skip_special_tokens"),
    }
)
"""Parameters that end a sequence, label it, or are read before sampling: any value leaves the distribution alone."""
OFF: Mapping[str, tuple[float, ...]] = {
    "top_p": (1,),
    "top_k": (0, -1),
    "repetition_penalty": (1,),
    "n": (1,),
    "thinking_token_budget": (),
}
"""Values that turn a parameter off. All others are off if they are 0, false or empty. A budget of 0 is none: it makes
the engine end the thoughts at once."""
_WHY = "the trainer scores tokens over the whole vocabulary, so importance ratios would be wrong"
_FIX = "leave it out; evaluation may use it"


def violations(recipe: Recipe) -> list[Violation]:
    """Find sampling parameters of training environments that change the distribution."""
    found: list[Violation] = []
    common = recipe.orchestrator.sampling
    for name in ("top_p", "top_k"):
        inherited = any(getattr(each.sampling, name) is None for each in recipe.environments)
        if inherited and not is_off(name, getattr(common, name)):
            found.append(_violation("orchestrator.sampling", name, getattr(common, name)))
    for i, environment in enumerate(recipe.environments):
        field = f"environments.{i}"
        for name in ("top_p", "top_k"):
            if not is_off(name, getattr(environment.sampling, name)):
                found.append(_violation(f"{field}.sampling", name, getattr(environment.sampling, name)))
        found += _of_agent(recipe, environment, field)
    return found


def _of_agent(recipe: Recipe, environment: Environment, field: str) -> Iterator[Violation]:
    """Find what `args.env.agent.sampling` changes. Agents of other names may not be trained: rollouts tell."""
    part: object = environment.args
    for key in (ENV_KEY, "agent", "sampling"):
        part = part.get(key) if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping):
        return
    beside = part.get("extra_body")
    merged = {**(beside if isinstance(beside, Mapping) else {}), **part}
    merged.pop("extra_body", None)
    trained = recipe.sampling(environment).model_dump(exclude_none=True)
    for name in changes(trained | merged, trained):
        where = f"{field}.args.{ENV_KEY}.agent.sampling"
        if name == "temperature":
            why = f"the trainer divides logits by {trained[name]:g}, the environment's own"
            yield Violation(f"{where}.{name}", str(merged[name]), why, f"set {field}.sampling.temperature")
        else:
            yield _violation(where, name, merged[name])


def _violation(field: str, name: str, value: object) -> Violation:
    return Violation(f"{field}.{name}", str(value), _WHY, _FIX)


def is_off(name: str, value: object) -> bool:
    """Tell whether a value of a sampling parameter leaves the distribution alone."""
    return value is None or (value in OFF[name] if name in OFF else not value)


def changes(asked: Mapping[str, object], trained: Mapping[str, object]) -> list[str]:
    """List the sampling parameters of a request that make its distribution another one than is trained.

    Args:
        asked: of the request, by vLLM's names. vLLM's own defaults hold for what is not there.
        trained: of the recipe, for this environment.
    """
    temperature = asked.get("temperature")
    names = ["temperature"] if (1.0 if temperature is None else temperature) != trained["temperature"] else []
    return names + [
        name
        for name, value in asked.items()
        if name != "temperature" and name not in EXACT and value != trained.get(name) and not is_off(name, value)
    ]
