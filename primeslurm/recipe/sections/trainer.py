"""What the trainer does: model, optimizer, loss, parallelism, checkpoints, SFT data."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from primeslurm.recipe.fields.section import Section
from primeslurm.recipe.fields.slurm_syntax import Json, SearchPath
from primeslurm.recipe.sections.losses import DppoLoss, Loss

Dtype = Literal["float32", "bfloat16"]
CONTEXT_BYTES = 2 * 2**30
"""Memory of a trainer GPU for the CUDA context and NCCL communicators. Torch does not report it as reserved."""
ENGINE_CONTEXT_BYTES = 2**30
"""Memory that an engine takes outside its share of a GPU: vLLM makes its CUDA context before it measures."""
STATE_PIECE_BYTES = 128 << 20
"""Of a rank's shards of parameters that are updated together with `optimizer_state_offload`, unless one has more."""
STATE_BUFFERS = 3
"""One for state that arrives, one for what is updated, one for what leaves: a link carries both ways at once."""


def micro_batch_rows(tokens: int, cp: int, seq_len: int) -> int:
    """Count the rows of a micro batch.

    Args:
        tokens: that a rank computes at once.
        cp: ranks that share each row.
        seq_len: tokens of a row.
    """
    return max(1, tokens * cp // seq_len)


class Vlm(Section):
    """Training on images, of a model that has a vision encoder."""

    freeze_vision_encoder: bool = True
    """The encoder stays as the checkpoint has it; only the language model is trained."""
    vision_encoder: str | None = None
    """For a model that only transformers has code for: the attribute that is its encoder, for example `model.visual`.
    Default: found by its name. The trainer lists the attributes where none, or more than one, has a usual name."""
    language_model: str | None = None
    """The same of its language model, for example `model.language_model`."""


class Model(Section):
    """The policy model."""

    path: str
    """Directory in Hugging Face format (config.json, safetensors, tokenizer), or a hub id cached on the cluster."""
    dtype: Dtype = "bfloat16"
    """Compute dtype of trainer and engines. Masters and optimizer state are always float32."""
    impl: Literal["auto", "custom", "hf"] = "auto"
    """Whose code trains it: our own (`custom`), or that of transformers (`hf`), which has more models, but is slower,
    needs memory quadratic in seq_len and has FSDP alone. `auto`: our own where it has the model type."""
    max_len: PositiveInt | None = None
    """Longest sequence an engine accepts. Default: seq_len."""
    vlm: Vlm | None = None
    """Train on images, too. Default: on text alone, whatever the model could see."""
    renderer: str = "auto"
    """The way from messages to tokens and back, by its name in the package `renderers`, or one of your own as
    my_package.module:Class. `auto`: that of the model's family, if it does what the model's own chat template does."""
    renderer_options: dict[str, Json] = {}
    """Options of the renderer, for example `enable_thinking: false`, or `thinking_retention: all`: keep thoughts that
    the template drops when a user asks on."""

    @property
    def trains_encoder(self) -> bool:
        """Whether the encoder of images changes."""
        return self.vlm is not None and not self.vlm.freeze_vision_encoder


class Optimizer(Section):
    """The optimizer, with linear warm-up and a constant, linear or cosine schedule.

    Muon trains the matrices of layers and experts, adapters included. AdamW trains the rest: embedding, head, norms,
    convolutions, routers and biases.
    """

    type: Literal["adamw", "muon", "sgd", "sign_sgd"] = "adamw"
    lr: PositiveFloat = 1e-6
    betas: tuple[float, float] = (0.9, 0.95)
    """Of AdamW."""
    eps: PositiveFloat = 1e-8
    """Of AdamW."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Of Muon and SGD."""
    weight_decay: float = 0.0
    max_norm: PositiveFloat | None = 1.0
    """Global gradient norm is clipped to this; null = no clipping."""
    warmup_steps: NonNegativeInt = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """The learning rate that linear and cosine schedules fall to, as a part of lr. The step after the last one would
    have it, so that a ratio of 0 wastes no step."""


class Parallelism(Section):
    """How the trainer's ranks are arranged: FSDP shards over what EP and CP leave."""

    dp_replicate: PositiveInt = 1
    cp: PositiveInt = 1
    """How many ranks share each row of tokens."""
    cp_style: Literal["ulysses", "allgather"] = "ulysses"
    """How attention sees the other ranks' tokens: by exchanging heads for tokens, or by gathering all keys and values
    (often called ring attention), which models with recurrent layers do not have."""
    ep: PositiveInt = 1
    ep_backend: Literal["torch", "deepep"] = "torch"
    """How tokens reach their experts: torch's all-to-all, or DeepEP, which is better across nodes."""
    deepep_num_sms: PositiveInt | None = None
    """Streaming multiprocessors for DeepEP's kernels; experts lack what it takes. Default: DeepEP's estimate."""
    deepep_token_chunk: PositiveInt | None = None
    """Tokens of a rank that DeepEP sends at once. Its buffers, and what experts make of tokens, are as large as one
    chunk needs; each is a dispatch and a combine more. Default: all of a micro batch."""
    reshard_after_forward: bool = True
    """Give up a layer's gathered weights after its forward pass, and gather them again for the backward pass."""
    reduce_gradients: Literal["micro_batch", "step"] = "micro_batch"
    """When gradients are summed over ranks: after each micro batch, or once a step. The latter sends less, and needs 4
    bytes for each parameter (experts: divided by ep), as gradients are not split until then."""
    gradient_dtype: Dtype = "float32"
    """In which gradients are summed over ranks; with `reduce_gradients: step`, micro batches are added up in it,
    too. bfloat16 is half the bytes, and rounds each sum to 2^-9 of itself; what is split is always float32."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"


class Memory(Section):
    """What is kept in host memory, or computed in pieces, so that a model fits."""

    optimizer_offload: bool = False
    """Masters, gradients and optimizer state live in host memory, where the step is made. Not for Muon."""
    optimizer_state_offload: bool = False
    """Optimizer state alone lives in host memory, and is on the GPU, piece by piece, while its parameters are updated.
    Any optimizer; the step is that of a run without it, bit for bit."""
    activation_offload: bool = False
    """What layers save waits in host memory for the backward pass; with full checkpointing that is their input."""
    keep_selected_keys: bool = True
    """Full checkpointing keeps the keys that sparse attention selected: 4 bytes each, 8 KB of a token in each layer of
    GLM-5. false: they are selected again."""
    lm_head_chunk: PositiveInt | None = None
    """Tokens whose logits exist at once. Default: all of them."""


class Lora(Section):
    """Low-rank adapters instead of full training. Engines get the model with its adapters added.

    Engines must not quantise the model, because FP8 rounds by more than an adapter changes.
    """

    rank: PositiveInt = Field(16, multiple_of=8)
    """A multiple of 8: the experts' grouped products need it."""
    alpha: PositiveFloat = 32.0
    """A weight changes by alpha / rank times the product of its adapter's factors."""
    targets: tuple[str, ...] | None = Field(None, min_length=1)
    """Linear layers as the checkpoint names them (q_proj, down_proj ...), and `experts`. Default: all the model has."""
    save_adapter: bool = False
    """Also write the adapter alone, in PEFT's format, to `adapter/` within each published version. Where vLLM wants the
    adapters of experts stacked (Qwen3-VL-MoE, Qwen3.5-MoE with images), that of gate and up has twice the rank."""


class Trainer(Section):
    """The torchtitan trainer."""

    optimizer: Optimizer = Optimizer()
    loss: Annotated[Loss, Field(discriminator="type")] = DppoLoss()
    parallelism: Parallelism = Parallelism()
    memory: Memory = Memory()
    lora: Lora | None = None
    fp8: bool = False
    """Linear layers and experts compute in block-scaled FP8, as FP8 engines do."""
    grouped_products: bool = True
    """The products of a layer's experts are one call. false: one after the other, to look for a fault: slower, and
    neither compiled nor in FP8."""
    router_replay: bool = False
    """Train with the experts that the engines chose. Engines then return the routed experts of every token."""
    micro_batch_tokens: PositiveInt = 16384
    """Tokens that a rank computes at once: ranks that share rows (cp) take as many rows together as make so many for
    each of them, and at least one."""
    compile: bool | None = None
    """Compile each layer by torch.compile: bfloat16 only. The first step takes a minute longer, the others less. null:
    on GPUs, for families and modes that have been faster with it there."""
    hang_timeout_s: PositiveInt = 300
    """A rank that the others wait for and that is silent for this long within a step hangs, which ends the attempt. Of
    torch's collectives, any takes twice as long at most."""
    long_phase_timeout_s: PositiveInt | None = None
    """The same for loading, the first step (which compiles), publishing and checkpoints; and how long ranks wait for
    one another to load. Default: two hours, and the time in which a node reads its part of model and checkpoint at a
    tenth of the site's `network.storage_gbytes_per_s`; `plan` shows it."""
    batch_timeout_s: PositiveInt = 3600
    """The trainer gives up (attempt ends, is requeued) if no batch arrives for this long."""

    def rows_at_once(self, seq_len: int) -> int:
        """Count the rows of a micro batch, if rows have `seq_len` tokens."""
        return micro_batch_rows(self.micro_batch_tokens, self.parallelism.cp, seq_len)


class Checkpoint(Section):
    """Joint checkpoints of trainer and orchestrator; complete only with a COMMITTED manifest."""

    interval: PositiveInt = 10
    """Steps between checkpoints. The last step is always saved."""
    keep: PositiveInt = 2
    asynchronous: bool | None = None
    """Training goes on while a copy in host memory is written. Default: where ranks have GPUs, and every node's free
    host memory holds their copies and a third as much again."""
    moments: Dtype = "float32"
    """How optimizer moments are stored. In bfloat16 a checkpoint with AdamW's is two thirds of its size; weights stay
    exact, and a moment comes back within 2^-8 of what it was. Those of a run that goes on are never rounded."""
    local: SearchPath | None = None
    """Directory of every train node, on its own disk or in its memory (/dev/shm), for copies of the newest checkpoint:
    of the node's ranks, and of those of another node. Ranks that start again within an attempt, because a spare has
    replaced a node, read these, and from the shared file system what is not there as it was written."""


class Weights(Section):
    """How a new policy reaches the engines."""

    transport: Literal["filesystem", "nccl"] = "filesystem"
    """filesystem: trainer ranks write it side by side, engines read it. nccl: trainer ranks send it to the engines
    between two steps (by gloo where there are only CPUs); only the last version is written."""
    keep: PositiveInt = 3
    """Published versions kept on disk (never fewer than engines still need)."""
    timeout_s: PositiveInt = 600
    """Longest wait for one engine to take a new policy; then the engine is restarted."""


class JsonlData(Section):
    """Chat or prompt/completion pairs, one JSON object a line: {"messages": [...]} or {"prompt", "completion"}.

    Beside `messages`, `tools` may list what the conversation can call, as OpenAI's chat completions do.

    With `model.vlm`, a message's content may be a list of {"type": "text", "text"} and {"type": "image", "image"}; an
    image is a path relative to the file, or a data URI.
    """

    type: Literal["jsonl"] = "jsonl"
    path: str
    train: Literal["last", "all"] = "last"
    """Which of a conversation's messages are learned: the last, or all of the assistant. For `all`, the model's chat
    template must render each turn as the beginning of the next."""


class Sft(Section):
    """Supervised fine-tuning: the trainer alone, cross-entropy on completions."""

    data: JsonlData
    batch_size: PositiveInt = 64
    """Sequences per step, over all ranks."""
