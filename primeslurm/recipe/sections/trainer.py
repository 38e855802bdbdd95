"""Model, optimizer, parallelism, memory, checkpoints and SFT data of the trainer."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from primeslurm.recipe.fields.section import Section
from primeslurm.recipe.fields.types import Json, SearchPath
from primeslurm.recipe.sections.losses import DppoLoss, Loss

Dtype = Literal["float32", "bfloat16"]
# Least values of the time limits that the planner derives [s]
RANK_HANG_S, BATCH_WAIT_S, WEIGHT_LOAD_S = 300, 3600, 600
# Memory of a trainer GPU for the CUDA context and NCCL communicators. Torch does not report it as reserved.
CONTEXT_BYTES = 2 * 2**30
# Memory of an engine outside its fraction of a GPU: vLLM creates its CUDA context before it measures free memory.
ENGINE_CONTEXT_BYTES = 2**30
# With `optimizer_state_offload`, one update covers this many bytes of parameter shards. A larger shard is not split.
STATE_CHUNK_BYTES = 128 << 20
# One buffer each for arriving, updated and departing state, because PCIe transfers in both directions at once.
STATE_BUFFERS = 3
# Consecutive steps without a finite gradient after which training fails. One may be a bad batch; more mean that the
# weights are broken.
MAX_SKIPPED = 3


def micro_batch_rows(tokens: int, cp: int, seq_len: int) -> int:
    """Return the number of rows of a micro batch, if each rank computes `tokens` and `cp` ranks share a row."""
    return max(1, tokens * cp // seq_len)


class Vlm(Section):
    """Training on images, for a model that has a vision encoder."""

    freeze_vision_encoder: bool = True
    """true: the vision encoder keeps its weights and only the language model is trained. false: the encoder is trained
    as well."""
    vision_encoder: str | None = None
    """Attribute path of the vision encoder, for example `model.visual`. Only for models that use the transformers
    implementation. Default: found by its usual name; the trainer lists the attributes if that fails."""
    language_model: str | None = None
    """Attribute path of the language model, for example `model.language_model`. Only for models that use the
    transformers implementation. Default: found by its usual name."""


class Model(Section):
    """The policy model."""

    path: str
    """Directory in Hugging Face format (config.json, safetensors, tokenizer), for example `/shared/models/Qwen3-8B`, or
    a hub id that is already in the cluster's Hugging Face cache, for example `Qwen/Qwen3-8B`."""
    dtype: Dtype = "bfloat16"
    """Compute dtype of trainer and engines. Master weights and optimizer state are always float32."""
    head_dtype: Literal["model", "float32"] = "model"
    """Dtype of logits in the trainer and in the engines. float32: logits are not rounded to `dtype`, so the
    log-probabilities of trainer and engines differ less. With SmolLM2 on CPUs, 38 % of the trainer's KL to exact
    results came from this rounding; not yet run on GPUs. model: `dtype`."""
    impl: Literal["auto", "custom", "hf"] = "auto"
    """Implementation of the model. custom: the trainer's own implementation. hf: the implementation of transformers,
    which supports more models, but is slower, needs memory quadratic in seq_len and supports FSDP only. auto: custom
    where it supports the model type, else hf."""
    max_len: PositiveInt | None = None
    """Longest sequence that an engine accepts, in tokens. Default: `seq_len`."""
    vlm: Vlm | None = None
    """Train on images as well as text. Default: train on text only, even if the model could read images."""
    renderer: str = "auto"
    """Converts messages to tokens and back: a name from the package `renderers`, or your own as
    `my_package.module:Class`. auto: the renderer of the model's family, if it reproduces the model's own chat
    template."""
    renderer_options: dict[str, Json] = {}
    """Options of the renderer. For example `{enable_thinking: false}` switches thinking off, and `{thinking_retention:
    all}` keeps thoughts that the template would drop from earlier turns."""

    @property
    def trains_encoder(self) -> bool:
        """True if the vision encoder is trained."""
        return self.vlm is not None and not self.vlm.freeze_vision_encoder


class Optimizer(Section):
    """The optimizer, with linear warm-up and a constant, linear or cosine schedule.

    Muon trains the matrices of layers and experts, adapters included; AdamW then trains the rest: embedding, head,
    norms, convolutions, routers and biases.
    """

    type: Literal["adamw", "muon", "sgd", "sign_sgd"] = "adamw"
    """Optimizer algorithm. adamw needs two moments per parameter, muon and sgd one, sign_sgd none."""
    lr: PositiveFloat = 1e-6
    """Peak learning rate, reached after warm-up. RL of large models usually takes 1e-6, LoRA 1e-5 to 1e-4, SFT about
    1e-5."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of the two moments of AdamW."""
    eps: PositiveFloat = 1e-8
    """Term that AdamW adds to the denominator for numerical stability."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Momentum of Muon and SGD, at least 0 and below 1."""
    weight_decay: float = 0.0
    """Decoupled weight decay, applied to every parameter. 0: none."""
    max_norm: PositiveFloat | None = 1.0
    """The global gradient norm is clipped to this value. null: no clipping."""
    warmup_steps: NonNegativeInt = 0
    """Number of steps over which the learning rate rises linearly from 0 to `lr`."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after warm-up, until `max_steps`."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Final learning rate of the linear and cosine schedules, as a fraction of `lr`. The step after the last one would
    have this rate."""


class Parallelism(Section):
    """Arrangement of the trainer's GPUs.

    FSDP shards over all GPUs that `dp_replicate` leaves; `ep` and `cp` reuse those ranks.
    """

    dp_replicate: PositiveInt = 1
    """Number of full copies of the model (HSDP). Gradients are summed over the copies. 1: FSDP shards over all trainer
    GPUs."""
    cp: PositiveInt = 1
    """Context parallelism: number of ranks that share each row of tokens. Must divide `seq_len`."""
    cp_style: Literal["ulysses", "allgather"] = "ulysses"
    """Exchange of tokens between ranks for attention. ulysses: ranks exchange heads for tokens; `cp` must divide the
    number of heads. allgather: each rank gathers all keys and values (often called ring attention); not for models with
    recurrent layers."""
    ep: PositiveInt = 1
    """Expert parallelism: number of ranks that share the experts of a layer. Must divide the number of experts. 1:
    every rank gathers all experts."""
    ep_backend: Literal["torch", "deepep"] = "torch"
    """Method that sends tokens to their experts. torch: all-to-all of NCCL. deepep: DeepEP, made for several nodes; it
    needs the package `deep_ep`."""
    deepep_num_sms: PositiveInt | None = None
    """Streaming multiprocessors that DeepEP's kernels use; expert computation cannot use these. Default: DeepEP's own
    estimate."""
    deepep_token_chunk: PositiveInt | None = None
    """Tokens per rank that DeepEP sends at once. A smaller chunk needs less memory and more messages. Default: all
    tokens of a micro batch."""
    reshard_after_forward: bool = True
    """true: free a layer's gathered weights after its forward pass and gather them again for the backward pass. false:
    keep them, which needs more memory and less communication."""
    reduce_gradients: Literal["micro_batch", "step"] = "micro_batch"
    """When gradients are summed over ranks. micro_batch: after each micro batch. step: once per step, which sends less
    but needs 4 bytes per parameter on each GPU (for experts divided by `ep`)."""
    gradient_dtype: Dtype = "float32"
    """Dtype in which gradients are summed over ranks; with `reduce_gradients: step` also the dtype in which micro
    batches are added up. bfloat16 halves the bytes and rounds each sum to 2^-9 of its value. Sharded gradients are
    always float32."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """none: keep all activations. selective: recompute cheap operations in the backward pass. full: keep only the input
    of each layer and recompute the rest."""


class Memory(Section):
    """Options that save GPU memory by using host memory or by computing in chunks."""

    renamed = {"keep_selected_keys": "keep_dsa_indices"}

    optimizer_offload: bool = False
    """Keep master weights, gradients and optimizer state in host memory and run the optimizer on the CPU. Saves the
    most GPU memory and costs the most time. Not for Muon."""
    optimizer_state_offload: bool = False
    """Keep only the optimizer state in host memory and copy it to the GPU in chunks during the update. Works with
    every optimizer and gives bit-identical results."""
    activation_offload: bool = False
    """Keep saved activations in host memory until the backward pass. With full checkpointing these are the layer
    inputs."""
    keep_dsa_indices: bool = True
    """With full checkpointing, keep the indices of the keys that sparse attention (DSA) selected: 8 KB per token and
    layer for GLM-5. false: select the keys again in the backward pass."""
    lm_head_chunk: PositiveInt | None = None
    """Number of tokens whose logits exist at once, for example 1024. Default: all tokens of a micro batch."""


class Lora(Section):
    """Low-rank adapters instead of full training.

    Engines must not quantise the model, because FP8 rounds by more than an adapter changes.
    """

    rank: PositiveInt = Field(16, multiple_of=8)
    """Rank of the adapters. It must be a multiple of 8 because the experts' grouped matrix products need that."""
    alpha: PositiveFloat = 32.0
    """Scale of the adapters: a weight changes by alpha / rank times the product of the adapter's two factors."""
    targets: tuple[str, ...] | None = Field(None, min_length=1)
    """Linear layers that get adapters, named as in the checkpoint, and `experts`. For example `[q_proj, v_proj,
    experts]`. Default: all linear layers of the model."""
    engines: Literal["auto", "adapter", "merged"] = "auto"
    """What engines get in a weight update. adapter: only the adapter, which vLLM applies beside the weights of the
    model. merged: the whole model, with the adapter merged into its weights. auto: adapter if vLLM can apply it to all
    targets, else merged. `plan` shows the choice, its reason, and the sizes of adapter and model."""
    save_adapter: bool = False
    """With merged weights, also write the adapter alone, in PEFT format, to `adapter/` of each published version. If
    vLLM wants the adapters of experts stacked (Qwen3-VL-MoE, Qwen3.5-MoE with images), the adapter of gate and up has
    twice the rank."""


class DraftLayer(Section):
    """Train the draft layer (MTP) of the model's checkpoint, so that it keeps predicting what the policy samples.

    The policy is trained exactly as without it: the draft layer has its own optimizer state, and its gradient is
    clipped separately, to `trainer.optimizer.max_norm`.
    """

    lr: PositiveFloat | None = None
    """Peak learning rate of the draft layer. Default: `trainer.optimizer.lr`."""


class Trainer(Section):
    """The torchtitan trainer."""

    renamed = {"grouped_products": "grouped_mm"}

    optimizer: Optimizer = Optimizer()
    """Optimizer, learning rate and schedule."""
    loss: Annotated[Loss, Field(discriminator="type")] = DppoLoss()
    """The RL loss. Default: `{type: dppo}`."""
    parallelism: Parallelism = Parallelism()
    """Split of parameters, experts and sequences over the trainer's GPUs."""
    memory: Memory = Memory()
    """Options that save GPU memory and cost speed."""
    lora: Lora | None = None
    """Train low-rank adapters instead of all weights. Default: train all weights."""
    draft_layer: DraftLayer | None = None
    """Train the draft layer that engines use with `inference.speculative.method: mtp`. `{}` trains it with the
    policy's settings. Default: it stays as in the checkpoint."""
    fp8: bool = False
    """Compute linear layers and experts in block-scaled FP8, as FP8 engines do. Needs GPUs with SM90."""
    grouped_mm: bool = True
    """true: compute all experts of a layer in one grouped matrix product. false: compute them one by one, for
    debugging; this is slower and excludes compile and FP8."""
    router_replay: bool = False
    """Use the experts that the engines chose for each token instead of the trainer's own routing. Engines then return
    the routed experts of every token. Only for models with experts. From Mooncake or a disk tier, engines load only KV
    of earlier turns, because routed experts of other KV would be missing."""
    prefix_sharing: bool = False
    """Compute the prompt of rollouts with the same prompt once, without its last token, where that makes the batch
    cheaper. Loss and gradients are the same but for rounding. With `router_replay`, a shared prompt gets the experts of
    its first rollout. Only for RL on text, with `cp: 1`; not for latent, sparse or linear attention. The estimate of
    `plan` ignores it."""
    micro_batch_tokens: PositiveInt = 16384
    """Tokens that a rank computes at once. The trainer takes as many rows as fit, at least one. Ranks that share rows
    (`cp`) count together."""
    compile: bool | None = None
    """Compile each layer with torch.compile; bfloat16 only. That takes about a minute, in RL while engines start. null:
    compile on GPUs for the model families and modes that were measured to be faster."""
    hang_timeout_s: PositiveInt | None = None
    """Seconds without progress within a step after which a rank counts as hung. The attempt then ends. A single torch
    collective may take twice as long. Default: 1.5 times the estimate of the longest micro batch, at least 5
    minutes."""
    long_phase_timeout_s: PositiveInt | None = None
    """The same limit in seconds for loading, the first step, publishing and checkpoints. Default: two hours plus the
    time that a node needs to read its shards of model and checkpoint at a tenth of the site's
    `network.storage_gbytes_per_s`. `plan` shows the value."""
    batch_timeout_s: PositiveInt | None = None
    """Seconds that the trainer waits for a batch. After that the attempt ends and the job is requeued. Default: ten
    times the estimate of sampling a batch, at least an hour."""

    @property
    def hang_s(self) -> int:
        """Seconds without progress within a step after which a rank counts as hung."""
        return self.hang_timeout_s or RANK_HANG_S

    @property
    def batch_wait_s(self) -> int:
        """Seconds that the trainer waits for a batch."""
        return self.batch_timeout_s or BATCH_WAIT_S

    def rows_at_once(self, seq_len: int) -> int:
        """Return the number of rows of a micro batch, if rows have `seq_len` tokens."""
        return micro_batch_rows(self.micro_batch_tokens, self.parallelism.cp, seq_len)

    def joined_rows(self, seq_len: int) -> int:
        """Return the number of rows of `seq_len` tokens that are joined to one row, which is a micro batch."""
        # One long row has less padding than stacked rows, and a small model's micro batch takes the same time with any
        # content. It also holds a whole group that shares a prompt. Layers are then compiled for any length. Other
        # layers may compute more in longer rows. Rows that several ranks share are long already.
        joins = (self.compile or self.prefix_sharing) and self.parallelism.cp == 1
        return self.rows_at_once(seq_len) if joins else 1


class Checkpoint(Section):
    """Joint checkpoints of trainer and orchestrator.

    A checkpoint counts only once its COMMITTED manifest is written.
    """

    interval: PositiveInt = 10
    """Steps between checkpoints. The last step is always saved."""
    keep: PositiveInt = 2
    """Number of newest checkpoints to keep. Older ones are deleted, except the best one if `evaluation.keep_best` is
    set."""
    asynchronous: bool | None = None
    """true: copy the state to host memory and write it while training continues. false: training waits. Default: true
    if ranks have GPUs and each node's free host memory holds the copies with a third to spare."""
    moments: Dtype = "float32"
    """Dtype in which optimizer moments are stored. bfloat16 makes an AdamW checkpoint a third smaller; weights stay
    exact and moments are rounded to within 2^-8."""
    local: SearchPath | None = None
    """Directory on each train node's own disk or in its memory (`/dev/shm/primeslurm`) for a second copy of the newest
    checkpoint. Each node also keeps the copy of another node. Ranks that restart within an attempt read these copies
    instead of the shared file system. Default: no local copies."""


class Weights(Section):
    """Transport of new weights to the engines."""

    transport: Literal["auto", "filesystem", "nccl"] = "auto"
    """filesystem: trainer ranks write the weights in parallel and engines read them. nccl: trainer ranks send the
    weights to the engines (with gloo on CPUs); only the last step's version is written to disk. auto: nccl if trainer
    and engines have separate GPUs, unless the run uses LoRA or `inference.batch_invariant`, or sets `keep`; else
    filesystem. `plan` shows the choice."""
    keep: PositiveInt = 3
    """Number of published versions to keep on disk. Versions that engines still need are always kept."""
    deltas: bool = False
    """true: between checkpoints, `filesystem` publishes only the elements that differ from the last whole version, bit
    by bit. Engines read both versions and check all tensors. A version is also whole if the deltas since the last whole
    version take as many bytes. For slow file systems: engines pause longer to load deltas. Works with FP8, but not if
    engines get adapters."""
    timeout_s: PositiveInt | None = None
    """Seconds that an engine may take to load new weights. After that it is restarted. Default: ten times the estimate
    of a weight update, at least 10 minutes."""

    @property
    def load_s(self) -> int:
        """Seconds that an engine may take to load new weights."""
        return self.timeout_s or WEIGHT_LOAD_S


class JsonlData(Section):
    """A file with one JSON object per line.

    Each is {"messages": [...]}, or {"prompt": ..., "completion": ...}. Next to `messages`, `tools` may list the
    functions that the conversation can call, in OpenAI's format. With `model.vlm`, the content of a message may be a
    list of {"type": "text", "text": ...} and {"type": "image", "image": ...}. An image is a path relative to the file,
    or a data URI.
    """

    type: Literal["jsonl"] = "jsonl"
    path: str
    """JSON-lines file on the shared file system, for example `/shared/data/chat.jsonl`."""
    train: Literal["last", "all"] = "last"
    """Which assistant messages are trained: the last one, or all of them. For `all`, the model's chat template must
    render each turn as a prefix of the next."""


class Sft(Section):
    """Supervised fine-tuning: only the trainer runs, with cross-entropy on completions."""

    data: JsonlData
    """The conversations to train on."""
    batch_size: PositiveInt = 64
    """Sequences per step over all ranks."""
