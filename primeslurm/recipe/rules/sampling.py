"""Rules for sampling parameters: training refuses those that make importance ratios wrong.

The trainer computes log-probabilities over the whole vocabulary, from the model's logits and the temperature. With
top_p, for example, an engine samples from a part of the vocabulary and reports log-probabilities of that distribution
(`processed_logprobs` of vLLM). Even on policy, the importance ratio is then the kept probability mass instead of 1.
Log-probabilities from before the cut would not help, because the tokens would still come from another policy than the
one whose gradient is computed. Evaluation computes no ratios and allows these parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from primeslurm.base.errors import Violation
from primeslurm.recipe.recipe import Recipe
from primeslurm.recipe.rules.sandboxes import ENV_KEY
from primeslurm.recipe.sections.orchestrator import Environment

# Parameters that never change the distribution: they end a sequence, label it, or are read before sampling.
EXACT = frozenset(
    {
        *("max_tokens", "max_completion_tokens", "stop", "stop_token_ids", "ignore_eos", "seed"),
        *("cache_salt", "chat_template_kwargs", "reasoning_effort", "logprobs", "skip_special_tokens"),
    }
)
# Values that turn a parameter off. Other parameters are off if they are 0, false or empty. `thinking_token_budget` has
# no such value: a budget of 0 makes the engine end the thinking block at once.
OFF: Mapping[str, tuple[float, ...]] = {
    "top_p": (1,),
    "top_k": (0, -1),
    "repetition_penalty": (1,),
    "n": (1,),
    "thinking_token_budget": (),
}
_WHY = "the trainer scores tokens over the whole vocabulary, so importance ratios would be wrong"
_FIX = "leave it out; evaluation may use it"


def violations(recipe: Recipe) -> list[Violation]:
    """Return sampling parameters of training environments that change the distribution."""
    problems: list[Violation] = []
    defaults = recipe.orchestrator.sampling
    for name in ("top_p", "top_k"):
        is_inherited = any(getattr(each.sampling, name) is None for each in recipe.environments)
        if is_inherited and not is_off(name, getattr(defaults, name)):
            problems.append(_violation("orchestrator.sampling", name, getattr(defaults, name)))
    for i, environment in enumerate(recipe.environments):
        field = f"environments.{i}"
        for name in ("top_p", "top_k"):
            if not is_off(name, getattr(environment.sampling, name)):
                problems.append(_violation(f"{field}.sampling", name, getattr(environment.sampling, name)))
        problems += _agent_sampling(recipe, environment, field)
    return problems


def _agent_sampling(recipe: Recipe, environment: Environment, field: str) -> Iterator[Violation]:
    """Check `args.env.agent.sampling`."""
    # Agents with other names are checked when their rollouts arrive, because they may not be trained.
    options: object = environment.args
    for key in (ENV_KEY, "agent", "sampling"):
        options = options.get(key) if isinstance(options, Mapping) else None
    if not isinstance(options, Mapping):
        return
    extra_body = options.get("extra_body")
    merged = {**(extra_body if isinstance(extra_body, Mapping) else {}), **options}
    merged.pop("extra_body", None)
    trained = recipe.sampling(environment).model_dump(exclude_none=True)
    for name in changes(trained | merged, trained):
        where = f"{field}.args.{ENV_KEY}.agent.sampling"
        if name == "temperature":
            why = f"the trainer divides logits by {trained[name]:g}, the temperature of the environment"
            yield Violation(f"{where}.{name}", str(merged[name]), why, f"set {field}.sampling.temperature instead")
        else:
            yield _violation(where, name, merged[name])


def _violation(field: str, name: str, value: object) -> Violation:
    return Violation(f"{field}.{name}", str(value), _WHY, _FIX)


def is_off(name: str, value: object) -> bool:
    """Return whether a sampling parameter with this value does not change the distribution."""
    return value is None or (value in OFF[name] if name in OFF else not value)


def changes(requested: Mapping[str, object], trained: Mapping[str, object]) -> list[str]:
    """List the sampling parameters of a request whose distribution differs from the trained one.

    Args:
        requested: parameters of the request, by vLLM's names. vLLM uses its defaults for missing ones.
        trained: parameters of the recipe for this environment.
    """
    temperature = requested.get("temperature")
    names = ["temperature"] if (1.0 if temperature is None else temperature) != trained["temperature"] else []
    return names + [
        name
        for name, value in requested.items()
        if name != "temperature" and name not in EXACT and value != trained.get(name) and not is_off(name, value)
    ]
