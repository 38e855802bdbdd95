"""Build the policy: HF config -> torchtitan model on the meta device -> sharded over ranks -> HF weights."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import utils as dist_utils

from primeslurm.recipe import Recipe
from primeslurm.recipe.training import Lora
from primeslurm.trainer import compat, deepep, fp8, huggingface, logprobs, lora, models, recompute, replay, varlen
from primeslurm.trainer.activation_offload import ActivationOffload
from primeslurm.trainer.context_parallel import ContextParallel, Dims
from primeslurm.trainer.loss import Targets
from primeslurm.trainer.models import generic, vision
from primeslurm.trainer.models.stacked import as_stored
from primeslurm.trainer.models.vision import VisionInput
from primeslurm.trainer.world import World, to_device
from primeslurm.wire.weight_transfer.tensor_names import FP8_SCALE, layers_ahead

# Derived from other weights; some checkpoints carry them.
_DERIVED = ("rotary_emb.inv_freq",)


MICRO_BATCH_TOKENS = 16384
"""A micro batch is as many rows as fit into this many tokens, and at least one."""


def micro_batch_rows(seq_len: int) -> int:
    """Rows of `seq_len` tokens in a micro batch."""
    return max(1, MICRO_BATCH_TOKENS // seq_len)


@dataclass(frozen=True)
class PolicyModel:
    """The sharded model and what is needed to feed, load and export it."""

    model: Any
    adapter: Any
    dims: Dims
    hf_names: set[str]
    """Every tensor name of the checkpoint in Hugging Face format, over all ranks."""
    source: Path
    """The directory the model was built from."""
    dtype: torch.dtype
    """Compute dtype; the parameters are float32."""
    device: torch.device
    """Where it computes; the parameters may be in host memory."""
    shared: ContextParallel | None = None
    """Who shares rows with this rank, if anyone does."""
    lora: Lora | None = None
    """How adapters are scaled, if adapters are all that is trained."""
    unchanged: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """What the checkpoint has beside the model, and engines insist on; on rank 0 alone."""
    stored_fp8: frozenset[str] = frozenset()
    """Names of the weights that the source stores in FP8."""

    def weights(self) -> dict[str, Any]:
        """The model's own tensors, without adapters."""
        return {name: tensor for name, tensor in self.model.state_dict().items() if not lora.is_adapter(name)}

    @property
    def dp_rank(self) -> int:
        """Which share of the batch this rank trains on; context-parallel ranks have the same."""
        mesh = self.dims.get_optional_mesh("batch")
        return 0 if mesh is None else int(mesh.get_local_rank())

    @property
    def dp_world(self) -> int:
        """Into how many shares a batch is split."""
        mesh = self.dims.get_optional_mesh("batch")
        return 1 if mesh is None else int(mesh.size())

    def logits(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        *beside: torch.Tensor,
        routed: torch.Tensor | None = None,
        images: VisionInput | None = None,
    ) -> tuple[Any, ...]:
        """Run the model on packed rows.

        Args:
            tokens: [rows, seq_len].
            positions: [rows, seq_len], restarting at 0 with every document.
            beside: more tensors of that shape, to be split over context-parallel ranks in the same way.
            routed: experts to replay, [rows, seq_len, layers, top_k] as in `wire.routed_experts`.
            images: what is in the rows of them. All ranks give some, or none does.

        Returns:
            Logits [rows, local_len, vocab], then `beside` as [rows, local_len].
        """
        inputs, beside_local = self._local(routed, images, tokens, positions, *beside)
        return (self.model(**inputs), *beside_local)

    def score(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor,
        targets: Targets,
        routed: torch.Tensor | None = None,
        images: VisionInput | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, Targets]:
        """Run the model on packed rows, and return what a loss takes.

        Args:
            tokens, positions, routed, images: as for `logits`.
            mask: whether the token that a position predicts is trained, [rows, seq_len], in host memory: a device would
                have to be waited for to know how many are.
            targets: of shape [rows, seq_len], in host memory.

        Returns:
            Log-probabilities, entropies and targets [trained tokens] of this rank's part of the rows.
        """
        inputs, (mask,) = self._local(routed, images, tokens, positions, mask)
        places = to_device(torch.from_numpy(np.flatnonzero(mask.numpy())), self.device)
        local = targets.apply(lambda tensor: to_device(self._piece(tensor), self.device))
        trained = local.apply(lambda tensor: tensor.flatten().index_select(0, places))
        with self.model.lm_head.scoring(trained.labels, trained.temperatures, places):
            return (*self.model(**inputs), trained)

    def _piece(self, tensor: torch.Tensor) -> torch.Tensor:
        """This context-parallel rank's part of a tensor [rows, seq_len, ...]."""
        return self.shared.piece(tensor) if self.shared else tensor

    def _local(
        self,
        routed: torch.Tensor | None,
        images: VisionInput | None,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        *beside: torch.Tensor,
    ) -> tuple[dict[str, Any], list[torch.Tensor]]:
        """What the model is called with, and `beside`, of this context-parallel rank's part of the rows.

        Routers get their part of `routed`.
        """
        masks = self.model.get_attention_masks(positions)  # needs whole rows, so before they are split
        if self.shared:
            masks = self.shared.masks(masks, tokens.shape[1])
        replay.assign(self.model, None if routed is None else self._piece(replay.narrow(routed)))
        inputs = {"tokens": self._piece(tokens), "positions": self._piece(positions), "attention_masks": masks}
        if images is not None:
            features, coordinates = self._piece(images.features), self._piece(images.coordinates)
            inputs["images"] = replace(images, features=features, coordinates=coordinates)
        return inputs, [self._piece(tensor) for tensor in beside]


def build(recipe: Recipe, world: World, attention: Literal["varlen", "flex"] | None = None) -> PolicyModel:
    """The recipe's model, sharded over `world`, with the weights of `recipe.model.path`.

    Args:
        attention: the kernel of attention layers, instead of the one that fits dtype and device.

    Raises:
        FileNotFoundError: there is no such model.
        ValueError: the model, the parallelism or the checkpoint does not fit.
    """
    source = huggingface.locate(recipe.model.path)
    config = huggingface.load_config(source)
    policy = _with_unchanged(assemble(config, source, recipe, world, attention), world)
    _load(policy, config)
    return policy


def assemble(
    config: Any, source: Path, recipe: Recipe, world: World, attention: Literal["varlen", "flex"] | None = None
) -> PolicyModel:
    """The model of a transformers config, sharded over `world`; no weights are read from `source`.

    Args:
        attention: as for `build`.

    Raises:
        ValueError: the model or the parallelism does not fit.
    """
    layout = recipe.trainer.parallelism
    # Context parallelism is ours: to torchtitan's model code a piece of a row is a row.
    parallelism = ParallelismConfig(
        data_parallel_replicate_degree=layout.dp_replicate,
        expert_parallel_degree=layout.ep,
        fsdp_reshard_after_forward="default" if layout.reshard_after_forward else "never",
        # torchtitan's default backend needs a newer torch for more than one rank.
        spmd_backend="partial_dtensor",
    )
    memory = recipe.trainer.memory
    training = TrainingConfig(
        seq_len=recipe.seq_len // layout.cp,
        local_batch_size=micro_batch_rows(recipe.seq_len),
        mixed_precision_param=recipe.model.dtype,
        enable_cpu_offload=memory.optimizer_offload,
    )
    dtype = getattr(torch, recipe.model.dtype)
    dims = Dims.of(layout, world.size, parallelism.spmd_backend)
    dist_utils.set_spmd_backend(parallelism.spmd_backend)

    if models.is_generic(recipe.model.impl, config):
        model, adapter, hf_names = generic.build(config, dims, recipe, world.device)
        return PolicyModel(model, adapter, dims, hf_names, source, dtype, world.device)
    # Varlen kernels are bfloat16 only.
    fitting = "flex" if compat.ON_CPU or recipe.model.dtype != "bfloat16" else "varlen"
    spec = models.spec(config, recipe.seq_len, attention or fitting)
    compat.adapt(spec.model)
    varlen.convert(spec.model)
    deepep.convert(spec.model, recipe)
    logprobs.convert(spec.model, recipe)
    replay.convert(spec.model, recipe)
    vision.convert(spec.model, recipe)
    spec.model.update_from_config(config=SimpleNamespace(parallelism=parallelism, training=training))
    adapter = spec.state_dict_adapter(spec.model, None)
    with torch.device("meta"):
        model = spec.model.build()
    stored = huggingface.fp8_names(source) if huggingface.is_quantized(config) else frozenset()
    if recipe.trainer.fp8:
        fp8.adapt(model, adapter, stored)
    lora.adapt(model, adapter, recipe)
    hf_names = set(adapter.to_hf({name: t for name, t in model.state_dict().items() if not lora.is_adapter(name)}))
    shared = ContextParallel(layout.cp_style, dims.get_mesh("cp").get_group()) if layout.cp > 1 else None
    if shared:
        shared.attach(model)
    model = spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=training,
        parallelism=parallelism,
        compile_config=CompileConfig(enable=False),
        ac_config=recompute.POLICIES[layout.activation_checkpointing],
        dump_folder="",
    )
    model.to_empty(device="cpu" if memory.optimizer_offload else world.device.type)
    with torch.no_grad():
        model.init_weights(buffer_device=world.device)  # computes the RoPE tables, draws adapters
    model.train()
    if memory.activation_offload:
        ActivationOffload(world.device).install(model)
    return PolicyModel(
        model,
        adapter,
        dims,
        hf_names,
        source,
        dtype,
        world.device,
        shared,
        recipe.trainer.lora,
        stored_fp8=stored,
    )


def _with_unchanged(policy: PolicyModel, world: World) -> PolicyModel:
    """With what the checkpoint has beside the model, if anybody insists on it."""
    beginnings: tuple[str, ...] = getattr(policy.adapter, "unchanged", ())
    if not beginnings:
        return policy
    names = {name for name in huggingface.tensor_names(policy.source) if name.startswith(beginnings)}
    unchanged = huggingface.tensors_beginning(policy.source, beginnings) if world.is_main else {}
    return replace(policy, hf_names=policy.hf_names | names, unchanged=unchanged)


def _load(policy: PolicyModel, hf_config: Any) -> None:
    """Read this rank's shards from the HF files, and insist that files and model have the same tensors."""
    ignored = _ignored(hf_config)
    found = {name for name in huggingface.tensor_names(policy.source) if not ignored.fullmatch(name)}
    adapter = as_stored(policy.adapter, found)
    tensors = adapter.to_hf(policy.weights())
    _check_names(policy, policy.hf_names if adapter is policy.adapter else set(tensors), found)
    dcp.load(tensors, storage_reader=huggingface.reader(policy.source, hf_config))
    loaded = adapter.from_hf(tensors)
    missing = set(policy.weights()) - set(loaded)
    if missing:
        raise ValueError(f"{policy.source}: nothing was loaded for {', '.join(sorted(missing))}")
    unknown = policy.model.load_state_dict(loaded, strict=False).unexpected_keys
    if unknown:
        raise ValueError(f"{policy.source}: the model has no {', '.join(sorted(unknown))}")


def _ignored(hf_config: Any) -> re.Pattern[str]:
    """Names of tensors that are no weights of the model, and of layers that predict further ahead."""
    text = hf_config.get_text_config()
    ahead = layers_ahead(text.num_hidden_layers, getattr(text, "num_nextn_predict_layers", None) or 0).pattern
    endings = _DERIVED + ((FP8_SCALE,) if huggingface.is_quantized(hf_config) else ())
    return re.compile("|".join([ahead, *(rf".*{re.escape(ending)}" for ending in endings)]))


def _check_names(policy: PolicyModel, names: set[str], found: set[str]) -> None:
    if policy.model.enable_weight_tying:
        found.discard("lm_head.weight")
    missing, unknown = names - found, found - names
    if missing or unknown:
        raise ValueError(
            f"{policy.source}: the checkpoint does not match its config; "
            f"missing: {', '.join(sorted(missing)[:5]) or 'none'}; unknown: {', '.join(sorted(unknown)[:5]) or 'none'}"
        )
