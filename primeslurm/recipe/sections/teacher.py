"""The teacher: a model whose log-probabilities of sampled tokens the policy is trained towards, or held to."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from primeslurm.recipe.fields.section import Section
from primeslurm.recipe.fields.slurm_syntax import EnvironmentName, HttpUrl, Json, OptionName
from primeslurm.recipe.sections.trainer import Dtype


class _Asked(Section):
    """What holds wherever the teacher runs."""

    concurrency: PositiveInt = 64
    """Sequences that it is asked about at once."""


class TeacherEngines(_Asked):
    """vLLM engines of the run's own. They keep the weights they load, and restart without anything else."""

    type: Literal["engines"] = "engines"
    path: str
    """Directory in Hugging Face format, or a hub id cached on the cluster. Its tokenizer must be the policy's."""
    dtype: Dtype = "bfloat16"
    nodes: PositiveInt = 1
    """Nodes on top of those of `deployment`; of the site's kind `teacher`, else `inference`."""
    gpus_per_node: PositiveInt | None = None
    """GPUs used on each node. Default: all that the site says a node has."""
    tp: PositiveInt = 1
    """GPUs per engine."""
    quantization: Literal["fp8"] | None = None
    """fp8: weights are quantised as they are loaded, in blocks of 128 x 128."""
    gpu_memory_utilization: float | None = Field(None, gt=0, le=1)
    """Share of a GPU's memory that an engine may use. Default: 0.9."""
    kv_cache_bytes: PositiveInt | None = None
    """KV cache per GPU in bytes. Default: what gpu_memory_utilization leaves; on CPU 256 MiB."""
    max_num_batched_tokens: PositiveInt = 2048
    """Tokens of one engine step. However many they are, vLLM has the logits of 1,024 of them at once, and of 1,024
    before these."""
    env: dict[EnvironmentName, str] = {}
    """Environment variables."""
    vllm_extra: dict[OptionName, Json] = {}
    """Any other vLLM option, by its long name with underscores."""


class ServedTeacher(_Asked):
    """A teacher that somebody serves already, with vLLM: `/v1/completions` must know `prompt_logprobs`."""

    type: Literal["served"] = "served"
    base_url: HttpUrl
    """For example http://teacher:8000/v1."""
    model: str
    """The name that it is served by."""
    key_env: EnvironmentName | None = None
    """Variable of whoever submits that holds the API key; its value is written nowhere."""


class PolicyTeacher(_Asked):
    """The policy as it is now, on the run's own engines, with a hint in its prompt that it samples without.

    On-policy self-distillation (OPSD, arXiv 2601.18734): with `advantages: opd`, the policy is drawn towards what it
    would have said had it known the hint.
    """

    type: Literal["policy"] = "policy"
    hint: str = Field(min_length=1)
    """Field of the task's data, or entry of its `info`, that the teacher is told: for example `answer`."""
    template: str = "For your orientation, a correct answer to what you are asked: {hint}"
    """What it is told, with the field in place of {hint}."""
    into: Literal["system", "user"] = "system"
    """The first message of this role gets it at its end. A system message is made if there is none."""


Teacher = Annotated[TeacherEngines | ServedTeacher | PolicyTeacher, Field(discriminator="type")]
