"""Build the policy: Hugging Face config -> converted model on the meta device -> sharded model -> loaded weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast

import torch
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import utils as dist_utils
from torchtitan.models.common.param_init import skip_param_init

from primeslurm.base.model_files import locate
from primeslurm.models import model_builder
from primeslurm.nn import compat
from primeslurm.nn.checkpoint_names import adapter_for_checkpoint
from primeslurm.nn.layers.parallelize import configure_compiler
from primeslurm.nn.layers.sparse_attention import SparseAttention
from primeslurm.recipe import Recipe
from primeslurm.recipe.sections.trainer import Memory
from primeslurm.trainer.assembly import generic_model
from primeslurm.trainer.assembly.converters import CONVERTERS
from primeslurm.trainer.base.model_draft import ModelDraft
from primeslurm.trainer.components import activation_checkpointing, draft_layer, fp8_gather, lora
from primeslurm.trainer.components.activation_offload import ActivationOffload
from primeslurm.trainer.distributed.context_parallel import ContextParallel, Dims
from primeslurm.trainer.distributed.world import World
from primeslurm.trainer.policy.policy_model import PolicyModel
from primeslurm.trainer.weights import model_directory
from primeslurm.trainer.weights.export import by_layer
from primeslurm.trainer.weights.loading import Loader
from primeslurm.trainer.weights.tensor_files import OpenFiles, TensorFiles
from primeslurm.wire.weight_transfer.tensor_names import FP8_SCALE, layers_ahead

# Suffixes of tensors in some checkpoints that the model computes itself
_DERIVED = ("rotary_emb.inv_freq",)


def build(recipe: Recipe, world: World, attention: Literal["varlen", "flex"] | None = None) -> PolicyModel:
    """Build the recipe's model, sharded over `world`, with the weights of `recipe.model.path`.

    `attention` None selects a kernel for the dtype and device. Raises FileNotFoundError if there is no such model, and
    ValueError if model, parallelism and checkpoint do not fit together.
    """
    source = locate(recipe.model.path)
    config = model_directory.load_config(source)
    files = TensorFiles.shared(source, world)
    stored, stored_draft = _trained_names(config, files)
    policy = _with_unchanged(assemble(config, source, recipe, world, attention, files), files, world)
    _load(policy, stored, files)
    if recipe.trainer.draft_layer is None:
        return policy
    layer = _draft_layer(policy, config, recipe, world, attention, files)
    copies = layer.adapter.copies(stored_draft)
    _load(layer, stored_draft - set(copies.values()), files)
    names = policy.hf_names | layer.hf_names | set(copies.values())
    return replace(policy, hf_names=names, draft_layer=layer, copies=copies)


def assemble(
    config: Any,
    source: Path,
    recipe: Recipe,
    world: World,
    attention: Literal["varlen", "flex"] | None = None,
    files: TensorFiles | None = None,
) -> PolicyModel:
    """Build the sharded model of a transformers config, without reading weights. Raises as `build`.

    If weights will be loaded from `files`, they are not initialized.
    """
    layout, settings = recipe.trainer.parallelism, _settings(recipe)
    dtype = getattr(torch, recipe.model.dtype)
    dims = Dims.of(layout, world.size, settings.parallelism.spmd_backend)
    dist_utils.set_spmd_backend(settings.parallelism.spmd_backend)
    if model_builder.is_generic(recipe.model.impl, config):
        model, adapter, hf_names = generic_model.build(config, dims, recipe, world.device)
        return PolicyModel(model, adapter, dims, hf_names, source, dtype, world.device)
    spec = model_builder.spec(config, recipe.seq_len, attention or _fitting_attention(recipe))
    stored = files.fp8_names() if files and model_directory.is_quantized(config) else frozenset()
    draft = ModelDraft(recipe, spec, settings, stored)
    for convert in CONVERTERS:
        convert(draft)
    # List the names before sharding. Afterwards the adapter sees only this rank's experts.
    hf_names = set(draft.adapter.to_hf(lora.base_weights(draft.model)))
    shared = ContextParallel(layout.cp_style, dims.get_mesh("cp").get_group()) if layout.cp > 1 else None
    if shared:
        shared.attach(draft.model)
    return PolicyModel(
        _allocated(draft, dims, world, is_loaded=files is not None),
        draft.adapter,
        dims,
        hf_names,
        source,
        dtype,
        world.device,
        shared,
        recipe.trainer.lora,
        stored_fp8=stored,
        compiled=bool(recipe.trainer.compile),
    )


def _draft_layer(
    policy: PolicyModel,
    config: Any,
    recipe: Recipe,
    world: World,
    attention: Literal["varlen", "flex"] | None,
    files: TensorFiles,
) -> PolicyModel:
    """Build the draft layer of a policy as a model of its own, without reading weights."""
    if policy.shared or policy.lora or recipe.model.vlm or model_builder.is_generic(recipe.model.impl, config):
        raise ValueError(
            "trainer.draft_layer needs all weights trained, cp: 1, no images, and the trainer's own implementation"
        )
    # Engines report the experts of the policy's layers only.
    recipe = recipe.model_copy(update={"trainer": recipe.trainer.model_copy(update={"router_replay": False})})
    spec = draft_layer.spec(config, recipe.seq_len, attention or _fitting_attention(recipe))
    number = config.get_text_config().num_hidden_layers
    draft = ModelDraft(recipe, spec, _settings(recipe), policy.stored_fp8, number)
    for convert in CONVERTERS:
        convert(draft)
    hf_names = set(draft.adapter.to_hf(draft.model.state_dict()))
    model = _allocated(draft, policy.dims, world, is_loaded=True)
    return replace(policy, model=model, adapter=draft.adapter, hf_names=hf_names, unchanged={})


def _allocated(draft: ModelDraft, dims: Dims, world: World, *, is_loaded: bool) -> Any:
    """Shard a converted model and allocate it. `is_loaded`: the caller loads weights, so they are not initialized."""
    trainer = draft.recipe.trainer
    model = _shard(draft, dims)
    if is_loaded:
        _leave_to_files(model)
    _initialise(model, trainer.memory, world)
    # After the allocation, because the FP8 gather hooks into FSDP's sharded tensors.
    if trainer.fp8:
        fp8_gather.install(model)
    return model


def _settings(recipe: Recipe) -> SimpleNamespace:
    return SimpleNamespace(parallelism=_parallelism(recipe), training=_training(recipe))


def _parallelism(recipe: Recipe) -> ParallelismConfig:
    """Return torchtitan's parallelism config. It omits context parallelism, which `context_parallel` adds."""
    layout = recipe.trainer.parallelism
    return ParallelismConfig(
        data_parallel_replicate_degree=layout.dp_replicate,
        expert_parallel_degree=layout.ep,
        fsdp_reshard_after_forward="default" if layout.reshard_after_forward else "never",
        # torchtitan's default backend needs a newer torch if there is more than one rank.
        spmd_backend="partial_dtensor",
    )


def _training(recipe: Recipe) -> TrainingConfig:
    return TrainingConfig(
        seq_len=recipe.seq_len // recipe.trainer.parallelism.cp,
        local_batch_size=recipe.trainer.rows_at_once(recipe.seq_len),
        mixed_precision_param=recipe.model.dtype,
        # torchtitan's own recipes have float32 alone; its models, and ours, take what FSDP takes.
        mixed_precision_reduce=cast(Any, recipe.trainer.parallelism.gradient_dtype),
        enable_cpu_offload=recipe.trainer.memory.optimizer_offload,
    )


def _fitting_attention(recipe: Recipe) -> str:
    # Kernels of varlen attention support bfloat16 on GPUs only.
    return "flex" if compat.ON_CPU or recipe.model.dtype != "bfloat16" else "varlen"


def _shard(draft: ModelDraft, dims: Dims) -> Any:
    trainer = draft.recipe.trainer
    checkpointing = trainer.parallelism.activation_checkpointing
    sparse = [module for module in draft.model.modules() if isinstance(module, SparseAttention)]
    for attention in sparse:
        attention.keeps_selection = checkpointing == "full" and trainer.memory.keep_dsa_indices
    if trainer.compile:
        configure_compiler(any_length=trainer.joined_rows(draft.recipe.seq_len) > 1)
    return draft.spec.parallelize_fn(
        draft.model,
        parallel_dims=dims,
        training=draft.settings.training,
        parallelism=draft.settings.parallelism,
        compile_config=CompileConfig(enable=bool(trainer.compile)),
        ac_config=activation_checkpointing.policy(checkpointing, bool(trainer.compile) and not sparse),
        dump_folder="",
    )


def _leave_to_files(model: Any) -> None:
    # Initializing a large model takes as long as reading it, and loading overwrites the values anyway.
    for module in model.modules():
        names = [name for name, _ in module.named_parameters(recurse=False)]
        initializers = getattr(module, "_param_init", None) or {}
        if names:
            module._param_init = {n: initializers[n] if lora.is_adapter(n) else skip_param_init for n in names}


def _initialise(model: Any, memory: Memory, world: World) -> None:
    model.to_empty(device=world.host if memory.optimizer_offload else world.device.type)
    with torch.no_grad():
        model.init_weights(buffer_device=world.device)  # computes RoPE tables and initializes adapters
    model.train()
    if memory.activation_offload:
        ActivationOffload(world.device).install(model)


def _with_unchanged(policy: PolicyModel, files: TensorFiles, world: World) -> PolicyModel:
    prefixes: tuple[str, ...] = getattr(policy.adapter, "unchanged", ())
    if not prefixes:
        return policy
    names = {name for name in files.places if name.startswith(prefixes)}
    with OpenFiles(files) as opened:
        unchanged = {name: opened.tensor(name) for name in names} if world.is_main else {}
    return replace(policy, hf_names=policy.hf_names | names, unchanged=unchanged)


def _load(policy: PolicyModel, stored_names: set[str], files: TensorFiles) -> None:
    """Load this rank's shards from the model's files. Raise ValueError unless files and model have the same tensors."""
    adapter = adapter_for_checkpoint(policy.adapter, stored_names)
    weights = policy.weights()
    groups = _loaded_together(policy, weights)
    names = (
        policy.hf_names if adapter is policy.adapter else {name for group in groups for name in adapter.to_hf(group)}
    )
    _check_names(policy, names, stored_names)
    missing = set(weights)
    with Loader(files, policy.device) as loader:
        for group in groups:
            tensors = adapter.to_hf(group)
            loader.fill(tensors)
            loaded = adapter.from_hf(tensors)
            unknown = policy.model.load_state_dict(loaded, strict=False).unexpected_keys
            if unknown:
                raise ValueError(f"{policy.source}: the model has no {', '.join(sorted(unknown))}")
            missing -= set(loaded)
    if missing:
        raise ValueError(f"{policy.source}: nothing was loaded for {', '.join(sorted(missing))}")


def _loaded_together(policy: PolicyModel, weights: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    # Group the tensors to load together: by layer, so that the adapter's copies stay small.
    # Adapters need both tied weights at once, and the adapter of transformers' own models needs all tensors.
    if policy.model.enable_weight_tying or isinstance(policy.adapter, generic_model.GenericAdapter):
        return [weights]
    return [{name: weights[name] for name in names} for names in by_layer(weights)]


def _trained_names(hf_config: Any, files: TensorFiles) -> tuple[set[str], set[str]]:
    """Return the names of the policy's and of the draft layers' stored tensors, without derived tensors and scales."""
    text = hf_config.get_text_config()
    ahead = layers_ahead(text.num_hidden_layers, draft_layer.number_of_layers(hf_config))
    endings = _DERIVED + ((FP8_SCALE,) if model_directory.is_quantized(hf_config) else ())
    names = {name for name in files.places if not name.endswith(endings)}
    of_drafts = {name for name in names if ahead.fullmatch(name)}
    return names - of_drafts, of_drafts


def _check_names(policy: PolicyModel, names: set[str], stored_names: set[str]) -> None:
    if policy.model.enable_weight_tying:
        stored_names.discard("lm_head.weight")
    missing, unknown = names - stored_names, stored_names - names
    if missing or unknown:
        raise ValueError(
            f"{policy.source}: the checkpoint does not match its config; "
            f"missing: {', '.join(sorted(missing)[:5]) or 'none'}; unknown: {', '.join(sorted(unknown)[:5]) or 'none'}"
        )
