"""The policy on this rank: its sharded model, and how packed rows are run through it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from primeslurm.nn.layers.vision import VisionInput
from primeslurm.recipe.sections.trainer import Lora
from primeslurm.trainer.components import lora, router_replay
from primeslurm.trainer.components.loss import Targets
from primeslurm.trainer.distributed.context_parallel import ContextParallel, Dims
from primeslurm.trainer.distributed.world import to_device


@dataclass(frozen=True)
class PolicyModel:
    """The sharded model, and everything needed to feed, load and export it."""

    model: Any
    adapter: Any
    dims: Dims
    hf_names: set[str]
    """All tensor names of the checkpoint in Hugging Face format, over all ranks."""
    source: Path
    """Model directory that the model was built from."""
    dtype: torch.dtype
    """Compute dtype. Parameters are float32."""
    device: torch.device
    """Compute device. Parameters may be in host memory."""
    shared: ContextParallel | None = None
    """Context parallelism. None: this rank has whole rows."""
    lora: Lora | None = None
    """LoRA settings. None: all weights are trained."""
    unchanged: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Tensors of the checkpoint that are not trained, but that engines expect. On rank 0 only."""
    stored_fp8: frozenset[str] = frozenset()
    """Names of the weights that the source checkpoint stores in FP8."""
    compiled: bool = False
    """Whether layers are compiled."""
    draft_layer: PolicyModel | None = None
    """The draft layer (MTP) if it is trained: a model of its own, with its own parameters and names."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """Names of the model's tensors that the checkpoint's draft layer repeats, and their names there."""

    def weights(self) -> dict[str, torch.Tensor]:
        return lora.base_weights(self.model)

    @property
    def parts(self) -> list[PolicyModel]:
        """The policy without its draft layer, and the draft layer if it is trained."""
        return [self, *filter(None, [self.draft_layer])]

    @property
    def dp_rank(self) -> int:
        """Index of this rank's shard of the batch. Ranks of one context-parallel group share it."""
        mesh = self.dims.get_optional_mesh("batch")
        return 0 if mesh is None else int(mesh.get_local_rank())

    @property
    def dp_world(self) -> int:
        mesh = self.dims.get_optional_mesh("batch")
        return 1 if mesh is None else int(mesh.size())

    @property
    def cp_rank(self) -> int:
        """Index of this rank's shard of each row."""
        return self.shared.group.rank() if self.shared else 0

    @property
    def cp_world(self) -> int:
        return self.shared.group.size() if self.shared else 1

    def logits(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        *beside: torch.Tensor,
        routed: torch.Tensor | None = None,
        images: VisionInput | None = None,
    ) -> tuple[Any, ...]:
        """Return logits [rows, local_len, vocab] of packed rows, and the shards of `beside` [rows, local_len].

        `tokens`, `positions` and `beside` are [rows, seq_len]; `routed` are experts to replay [rows, seq_len, layers,
        top_k]. Either all ranks pass `images`, or none does.
        """
        replayed = None if routed is None else self.shard(router_replay.narrow(routed))
        inputs = self._inputs(self.shard(tokens), positions, replayed, images)
        return (self.model(**inputs), *(self.shard(tensor) for tensor in beside))

    def score(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor,
        targets: Targets,
        routed: torch.Tensor | None = None,
        images: VisionInput | None = None,
        branches: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, Targets]:
        """Run the model on this rank's shards of packed rows, and return the inputs of a loss.

        `tokens`, `mask` and `targets` are [rows, local_len], the latter two in host memory. `mask` marks the positions
        that predict trained tokens. `positions`, `images` and `branches` are those of whole rows. `branches` None: no
        documents share a prefix. Returns log-probabilities, entropies and targets [trained tokens].
        """
        replayed = None if routed is None else router_replay.narrow(routed)
        inputs = self._inputs(tokens, positions, replayed, images, branches)
        # The mask is in host memory, so that the number of trained tokens is known without waiting for the device.
        places = to_device(torch.from_numpy(np.flatnonzero(mask.numpy())), self.device)
        local = targets.apply(lambda tensor: to_device(tensor, self.device))
        trained = local.apply(lambda tensor: tensor.flatten().index_select(0, places))
        if self.shared:
            # Sequence-level losses sum over all ranks that share the sequence.
            trained = replace(trained, documents=replace(trained.documents, group=self.shared.group))
        with self.model.lm_head.scoring(trained.labels, trained.temperatures, places):
            return (*self.model(**inputs), trained)

    def shard(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.shared.shard(tensor) if self.shared else tensor

    def _inputs(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        routed: torch.Tensor | None,
        images: VisionInput | None,
        branches: torch.Tensor | None = None,
    ) -> dict[str, Any]:
        """Set the routers' replay, and return the model's arguments. `positions` and `images` cover whole rows."""
        # Masks are built from whole rows and then reduced to this rank's queries.
        masks = self.model.get_attention_masks(*(each for each in (positions, branches) if each is not None))
        if self.shared:
            masks = self.shared.masks(masks, positions.shape[1])
        router_replay.assign(self.model, routed)
        inputs = {"tokens": tokens, "positions": self.shard(positions), "attention_masks": masks}
        if images is not None:
            features, coordinates = self.shard(images.features), self.shard(images.coordinates)
            inputs["images"] = replace(images, features=features, coordinates=coordinates)
        return inputs
