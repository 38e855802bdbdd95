"""Requests of the Tinker API, and the checks that need no model."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, field_validator

from primeslurm.recipe.sections.tenant_deployment import BATCH_TOKENS

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")
_CLIP = ("clip_low_threshold", "clip_high_threshold")
_SAMPLED = ("target_tokens", "logprobs", "advantages")
# Inputs of each loss. All have one value per target token.
LOSS_INPUTS = {
    "cross_entropy": ("target_tokens", "weights"),
    "importance_sampling": _SAMPLED,
    "ppo": _SAMPLED,
    "cispo": _SAMPLED,
}
# End of the error of an optimizer step whose gradient is not finite
NOT_FINITE = "the weights are unchanged"
# Key of a session's metadata, with the share of a tenant
WEIGHT = "primeslurm_weight"
# Tinker's default clip thresholds of the ratio.
CLIP = {"ppo": (0.8, 1.2), "cispo": (0.0, 4.0)}
# A pass may have as many tokens as this number of the longest sequences.
PASS_SEQUENCES = 8
# Targets of a token in a pass. The input of the head is repeated for each, which takes memory.
MOST_TARGETS = 32
Config = Mapping[str, float | str]
# One hour to ten years. None: a checkpoint never expires.
Ttl = Annotated[int, Field(ge=3600, le=315_360_000)] | None


class RequestError(Exception):
    """A request that this service refuses: field, value, reason, and HTTP status."""

    def __init__(self, field: str, value: object, why: str, status: int = 400) -> None:
        super().__init__(f"{field} = {value}: {why}" if value != "" else f"{field}: {why}")
        self.status = status


@dataclass(frozen=True)
class Datum:
    """One sequence of a pass."""

    tokens: NDArray[np.int32]
    inputs: dict[str, NDArray[Any]]
    """Inputs of the loss [tokens], or [tokens, targets per token]."""


@dataclass(frozen=True)
class ModelLimits:
    """The service's model, and the largest requests that it accepts."""

    model: str
    vocabulary: int
    length: int
    """Longest sequence [tokens]."""
    rank: int
    """Largest rank of an adapter."""

    @property
    def pass_tokens(self) -> int:
        """Return the most tokens of one pass. Other clients wait while it is computed."""
        return max(PASS_SEQUENCES * self.length, BATCH_TOKENS)


class CreateSession(BaseModel):
    """Begins a client's session."""

    user_metadata: dict[str, Any] | None = None
    display_name: str | None = None


class LoraConfig(BaseModel):
    """Shape and initialization of an adapter."""

    rank: PositiveInt
    seed: int | None = None
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerConfig(BaseModel):
    """Kind of optimizer."""

    type: Literal["adamw"] = "adamw"


class CreateModel(BaseModel):
    """Creates a training run."""

    session_id: str
    model_seq_id: NonNegativeInt
    base_model: str
    lora_config: LoraConfig
    optimizer_config: OptimizerConfig = OptimizerConfig()
    user_metadata: dict[str, Any] | None = None


class AdamParams(BaseModel):
    """Settings of one step of AdamW."""

    learning_rate: NonNegativeFloat = 1e-4
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: PositiveFloat = 1e-12
    weight_decay: NonNegativeFloat = 0.0
    grad_clip_norm: NonNegativeFloat = 0.0


class OptimStep(BaseModel):
    """Updates an adapter."""

    model_id: str
    seq_id: PositiveInt
    adam_params: AdamParams


class SaveWeights(BaseModel):
    """Saves an adapter: with its optimizer, for sampling or for download under a name, or for one sampling session."""

    model_id: str
    seq_id: PositiveInt
    path: str | None = None
    overwrite: bool = False
    sampling_session_seq_id: NonNegativeInt | None = None
    kind: Literal["snapshot"] = "snapshot"
    ttl_seconds: Ttl = None
    user_metadata: dict[str, str] | None = None
    age_encryption_recipients: None = None  # not supported: a client that asks for it must not get a plain file


class LoadWeights(BaseModel):
    """Loads a checkpoint into a training run (`model_id`, `seq_id`), or into a new one (`session_id`, ...)."""

    path: str
    optimizer: bool
    model_id: str | None = None
    seq_id: PositiveInt | None = None
    session_id: str | None = None
    model_seq_id: NonNegativeInt | None = None
    optimizer_config: OptimizerConfig | None = None
    user_metadata: dict[str, Any] | None = None


class CopyWeights(BaseModel):
    """Copies a checkpoint. The copy belongs to a training run of its own. Clients name a project; there are none."""

    source_path: str
    ttl_seconds: Ttl = None


class SamplingSession(BaseModel):
    """Creates a sampling session for a checkpoint, or for the base model."""

    session_id: str
    sampling_session_seq_id: NonNegativeInt
    base_model: str | None = None
    model_path: str | None = None


class TextChunk(BaseModel):
    """A part of a prompt."""

    tokens: list[int]
    type: Literal["encoded_text"] = "encoded_text"


class Prompt(BaseModel):
    """The tokens before the samples."""

    chunks: list[TextChunk]


class SamplingParams(BaseModel):
    """How to sample. `stop` None: stop at the model's end tokens. An empty list: never stop."""

    max_tokens: PositiveInt | None = None
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None
    temperature: NonNegativeFloat = 1.0
    top_k: int = -1
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0

    @field_validator("stop")
    @classmethod
    def _no_empty_string(cls, stop: str | list[str] | list[int] | None) -> str | list[str] | list[int] | None:
        if stop == "" or (isinstance(stop, list) and "" in stop):
            raise ValueError("an empty string would stop at the first token; use [] to never stop")
        return stop


class SampleRequest(BaseModel):
    """Samples from a prompt."""

    sampling_session_id: str
    seq_id: NonNegativeInt
    num_samples: Annotated[int, Field(ge=1, le=1024)] = 1
    prompt: Prompt
    sampling_params: SamplingParams
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: PositiveInt | None = None
    # Not supported. A client that asks for these must not get an answer without them.
    topk_prompt_logprobs: Literal[0] = 0
    topk_sample_logprobs: Literal[0] = 0
    target_prompt_logprobs: None = None
    prompt_alt_tokens_k: Literal[0] = 0
    record_stability_info: bool | None = None

    @field_validator("record_stability_info")
    @classmethod
    def _no_stability(cls, wanted: bool | None) -> bool | None:
        if wanted:
            raise ValueError("loss stable_reinforce, which needs it, is not supported; use importance_sampling")
        return wanted


def check_base_model(name: str, limits: ModelLimits) -> None:
    if name != limits.model:
        raise RequestError("base_model", name, f"this service has only {limits.model}")


def check_lora(config: LoraConfig, limits: ModelLimits) -> None:
    if config.rank > limits.rank:
        why = f"the largest rank of this service is {limits.rank} (primeslurm tinker serve --max-rank)"
        raise RequestError("lora_config.rank", config.rank, why)
    if not (config.train_mlp or config.train_attn):
        raise RequestError("lora_config.train_unembed", True, "has no effect alone; set train_mlp or train_attn")


def check_name(name: str | None) -> None:
    if not _NAME.fullmatch(name or ""):
        raise RequestError(
            "path", name, "a name has 1 to 100 letters, digits, '.', '_' and '-', and starts with no '.'"
        )


def check_tokens(where: str, tokens: Sequence[int] | NDArray[Any], limits: ModelLimits, more: int = 0) -> None:
    """Raise RequestError unless these tokens, and `more` sampled after them, fit the model."""
    if len(tokens) == 0:
        raise RequestError(where, "", "has no tokens")
    if len(tokens) + max(0, more - 1) > limits.length:  # the model does not read the last sampled token
        sampled = f" and {more} to sample" if more else ""
        raise RequestError(where, f"{len(tokens)} tokens{sampled}", f"the model's longest sequence has {limits.length}")
    _check_range(where, np.asarray(tokens), limits)


def _check_range(where: str, tokens: NDArray[Any], limits: ModelLimits) -> None:
    outside = tokens[(tokens < 0) | (tokens >= limits.vocabulary)]
    if outside.size:
        raise RequestError(where, int(outside[0]), f"is no token of the model, which has {limits.vocabulary}")


def check_size(lengths: Sequence[int], limits: ModelLimits) -> None:
    """Raise RequestError if sequences have more tokens than one pass may have."""
    if (tokens := sum(lengths)) > limits.pass_tokens:
        why = f"one pass may have {limits.pass_tokens} tokens; send the data in several passes"
        raise RequestError("data", f"{tokens} tokens", why)


def check_pass(data: Sequence[Datum], loss: str, config: Config, limits: ModelLimits) -> None:
    """Raise RequestError if a pass cannot be computed: its loss, the loss's settings, or a tensor of its data."""
    if loss not in LOSS_INPUTS:
        raise RequestError("loss_fn", loss, f"is not supported; supported: {', '.join(LOSS_INPUTS)}")
    for key, value in config.items():
        if key not in _CLIP or loss not in CLIP:
            why = f"loss {loss} takes {' and '.join(_CLIP) if loss in CLIP else 'no settings'}"
            raise RequestError("loss_fn_config", key, why)
        if isinstance(value, str) or not value >= 0:
            raise RequestError(f"loss_fn_config.{key}", value, "must be a number of at least 0")
    if loss in CLIP:
        low, high = thresholds(loss, config)
        if low > high:
            raise RequestError("loss_fn_config.clip_low_threshold", low, f"is above clip_high_threshold = {high}")
    if not data:
        raise RequestError("data", "", "is empty")
    for index, datum in enumerate(data):
        _check_datum(f"data[{index}]", datum, loss, limits)


def thresholds(loss: str, config: Config) -> tuple[float, float]:
    low, high = (float(config.get(key, default)) for key, default in zip(_CLIP, CLIP[loss], strict=True))
    return low, high


def _check_datum(where: str, datum: Datum, loss: str, limits: ModelLimits) -> None:
    check_tokens(f"{where}.model_input", datum.tokens, limits)
    expected, where = LOSS_INPUTS[loss], f"{where}.loss_fn_inputs"
    for name in sorted(datum.inputs.keys() ^ set(expected)):
        why = "is missing" if name in expected else f"is no input of loss {loss}, which takes {', '.join(expected)}"
        raise RequestError(f"{where}.{name}", "", why)
    length, shape = len(datum.tokens), datum.inputs["target_tokens"].shape
    for name, array in datum.inputs.items():
        dtype = "int64" if name == "target_tokens" else "float32"
        if array.dtype != dtype:
            raise RequestError(f"{where}.{name}.dtype", array.dtype, f"must be {dtype}")
        several = loss == "cross_entropy" and array.ndim == 2 and array.shape[1] > 0
        if array.shape[:1] != (length,) or not (array.ndim == 1 or several) or array.shape != shape:
            right = f"[{length}]" + (f" or [{length}, K], as target_tokens" if loss == "cross_entropy" else "")
            raise RequestError(f"{where}.{name}.shape", list(array.shape), f"must be {right}")
        if several and array.shape[1] > MOST_TARGETS:
            why = f"a token may have {MOST_TARGETS} targets"
            raise RequestError(f"{where}.{name}.shape", list(array.shape), why)
        if not np.isfinite(array).all():
            raise RequestError(f"{where}.{name}", "", "has a value that is not finite")
    _check_range(f"{where}.target_tokens", datum.inputs["target_tokens"], limits)
