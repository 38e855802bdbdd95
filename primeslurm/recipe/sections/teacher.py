"""The teacher: a model that returns log-probabilities of the tokens that the policy sampled."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from primeslurm.recipe.fields.section import Section
from primeslurm.recipe.fields.types import EnvironmentName, HttpUrl, Json, OptionName
from primeslurm.recipe.sections.trainer import Dtype


class _TeacherOptions(Section):
    """Options of all teachers."""

    concurrency: PositiveInt = 64
    """Largest number of sequences that are sent to the teacher at once."""


class TeacherEngines(_TeacherOptions):
    """A teacher on vLLM engines of the run itself. Its weights never change."""

    type: Literal["engines"] = "engines"
    path: str
    """Directory in Hugging Face format, or a hub id in the cluster's cache. It must have the same tokenizer as the
    policy."""
    dtype: Dtype = "bfloat16"
    """Compute dtype of the teacher's engines."""
    nodes: PositiveInt = 1
    """Nodes for the teacher, in addition to those of `deployment`. They are nodes of the site's kind `teacher`, else
    `inference`."""
    gpus_per_node: PositiveInt | None = None
    """GPUs that the teacher uses on each node. Default: all GPUs of the node."""
    tp: PositiveInt = 1
    """Tensor parallelism: number of GPUs of each teacher engine."""
    quantization: Literal["fp8"] | None = None
    """fp8: quantise weights to FP8 in blocks of 128 x 128 when they are loaded. Default: the checkpoint's own dtype."""
    gpu_memory_utilization: float | None = Field(None, gt=0, le=1)
    """Fraction of a GPU's memory that an engine may use. Default: 0.9."""
    kv_cache_bytes: PositiveInt | None = None
    """Size of the KV cache per GPU in bytes. Default: the memory that `gpu_memory_utilization` leaves; on CPUs 256
    MiB."""
    max_num_batched_tokens: PositiveInt = 2048
    """Largest number of tokens that an engine computes in one step."""
    env: dict[EnvironmentName, str] = {}
    """Environment variables of the teacher's engines."""
    vllm_extra: dict[OptionName, Json] = {}
    """Any other vLLM option by its long name with underscores."""


class ServedTeacher(_TeacherOptions):
    """A teacher that already runs elsewhere in vLLM. Its `/v1/completions` must support `prompt_logprobs`."""

    type: Literal["served"] = "served"
    base_url: HttpUrl
    """URL of the server, for example `http://teacher:8000/v1`."""
    model: str
    """Name under which the server offers the model."""
    key_env: EnvironmentName | None = None
    """Name of the environment variable that holds the API key. Its value is never written to a file. Default: no
    key."""


class PolicyTeacher(_TeacherOptions):
    """The current policy on the engines of the run, with a hint in its prompt.

    This is on-policy self-distillation (OPSD, arXiv 2601.18734): with `advantages: opd`, the policy learns what it
    would have answered if it had known the hint.
    """

    type: Literal["policy"] = "policy"
    renamed = {"into": "message_role"}

    hint: str = Field(min_length=1)
    """Field of the task's data, or entry of its `info`, that holds the hint, for example `answer`."""
    template: str = "For your orientation, a correct answer to what you are asked: {hint}"
    """Text that the teacher receives, with the hint in place of {hint}."""
    message_role: Literal["system", "user"] = "system"
    """Role of the message that receives the text: its first message. A system message is added if there is none."""


Teacher = Annotated[TeacherEngines | ServedTeacher | PolicyTeacher, Field(discriminator="type")]
