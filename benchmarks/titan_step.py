"""torchtitan's own training step and model, for comparison.

Create the `World` of `primeslurm.trainer` first, because it must be imported before torchtitan.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing, SelectiveAC
from torchtitan.models.qwen3 import model_registry
from torchtitan.trainer import Trainer

from primeslurm.nn import compat
from primeslurm.recipe import Recipe
from primeslurm.trainer.components import activation_checkpointing
from primeslurm.trainer.distributed.world import World

Sample = tuple[dict[str, torch.Tensor], torch.Tensor]


class TitanStep(Trainer):
    """A torchtitan `Trainer` that is set up only for `train_step`: without data, checkpoints or metrics."""

    def __init__(self, flavor: str, config: Any, recipe: Recipe, rows: int, world: World) -> None:
        """Build the model and its optimizer.

        Args:
            config: number of layers and size of the vocabulary.
            recipe: dtype, lengths, layout and loss chunks; its model is ignored.
        """
        layout = recipe.trainer.parallelism
        self.device = world.device
        per_pass = min(rows, recipe.trainer.rows_at_once(recipe.seq_len))
        training = TrainingConfig(
            seq_len=recipe.seq_len,
            local_batch_size=per_pass,
            mixed_precision_param=recipe.model.dtype,
            max_norm=recipe.trainer.optimizer.max_norm or float("inf"),
            disable_cuda_graphs=True,
        )
        parallelism = ParallelismConfig(
            data_parallel_replicate_degree=layout.dp_replicate,
            context_parallel_degree=layout.cp,
            expert_parallel_degree=layout.ep,
            fsdp_reshard_after_forward="default" if layout.reshard_after_forward else "never",
            spmd_backend="partial_dtensor",
        )
        dist_utils.set_spmd_backend(parallelism.spmd_backend)  # as torchtitan's trainer does before it makes meshes
        self.config = SimpleNamespace(training=training, parallelism=parallelism)
        self.parallel_dims = ParallelDims.from_config(parallelism, world.size)
        self.gradient_accumulation_steps = rows // per_pass
        self.num_pipeline_parallel_microbatches = 1
        self.model_parts = [self._model(flavor, config, recipe)]
        self.loss_fn = _loss(recipe, per_pass, self.model_parts[0])
        self.optimizers = default_adamw(lr=recipe.trainer.optimizer.lr).build(model_parts=self.model_parts)
        schedule = LRSchedulersContainer.Config(warmup_steps=0)
        self.lr_schedulers = schedule.build(optimizers=self.optimizers, training_steps=10_000)
        self.train_context = dist_utils.get_spmd_context(parallel_dims=self.parallel_dims)
        self.fwd_bwd_fn = self._forward_backward_body
        self.step = self.ntokens_seen = 0
        self.metrics_processor = SimpleNamespace(should_log=lambda step: False)
        self.checkpointer = SimpleNamespace(maybe_wait_for_staging=lambda: None)

    def _model(self, flavor: str, config: Any, recipe: Recipe) -> Any:
        layout = recipe.trainer.parallelism
        spec = model_registry(flavor, attn_backend=attention(layout.cp))
        spec.model.layers = spec.model.layers[: config.num_hidden_layers]
        spec.model.vocab_size = config.vocab_size
        spec.model.tok_embeddings.num_embeddings = spec.model.lm_head.out_features = config.vocab_size
        for layer in spec.model.layers:  # torchtitan's flavors end at 40,960 positions
            layer.attention.rope = replace(layer.attention.rope, max_seq_len=recipe.seq_len)
        if compat.ON_CPU:
            compat.replace_modules(spec.model)
        spec.model.update_from_config(config=self.config)
        self.model_config = spec.model
        with torch.device("meta"):
            model = spec.model.build()
        model = spec.parallelize_fn(
            model,
            parallel_dims=self.parallel_dims,
            training=self.config.training,
            parallelism=self.config.parallelism,
            compile_config=CompileConfig(enable=bool(recipe.trainer.compile)),
            ac_config=_checkpointing(layout.activation_checkpointing, bool(recipe.trainer.compile)),
            dump_folder="",
        )
        model.to_empty(device=self.device.type)
        with torch.no_grad():
            model.init_weights(buffer_device=None)
        return model.train()

    def train(self, samples: Iterator[Sample]) -> None:
        """Run one optimizer step on the next samples, each with as many rows as are computed at a time."""
        self.step += 1
        self.train_step(samples)


def attention(cp: int) -> Literal["flex", "varlen"]:
    """Return the attention that torchtitan supports here: varlen needs bfloat16 on GPUs, and no context parallelism."""
    return "flex" if compat.ON_CPU or cp > 1 else "varlen"


def _checkpointing(name: str, compiled: bool) -> ActivationCheckpointing.Config | None:
    """Return torchtitan's checkpointing. Compiled `full` is ours, because re-routed tokens fail an assertion there."""
    return SelectiveAC.Config() if name == "selective" else activation_checkpointing.policy(name, compiled)


def _loss(recipe: Recipe, rows: int, model: Any) -> Any:
    chunk = recipe.trainer.memory.lm_head_chunk
    if chunk is None:
        return CrossEntropyLoss.Config().build()
    tokens = rows * recipe.seq_len // recipe.trainer.parallelism.cp
    loss = ChunkedLossWrapper.Config(num_chunks=max(1, tokens // chunk)).build()
    loss.set_lm_head(model.lm_head)
    model._skip_lm_head = True
    return loss
