"""The policy on this rank: its shards, how rows are run through them, and what is known of its checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from primeslurm.nn.layers.vision import VisionInput
from primeslurm.recipe.sections.trainer import Lora, Parallelism
from primeslurm.trainer.components import lora, router_replay
from primeslurm.trainer.components.loss import Targets
from primeslurm.trainer.distributed.context_parallel import ContextParallel, Dims
from primeslurm.trainer.distributed.world import to_device


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
    layout: Parallelism = field(kw_only=True)
    """How its ranks are arranged."""
    micro_batch_tokens: int = field(kw_only=True)
    """Tokens that a rank computes at once."""
    compiled: bool = field(default=False, kw_only=True)
    """Its layers are compiled."""
    host_states: bool = field(default=False, kw_only=True)
    """The state of its optimizer is in host memory."""

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the model's own tensors, without adapters."""
        return lora.base_weights(self.model)

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

    @property
    def cp_rank(self) -> int:
        """Which piece of each row this rank has."""
        return self.shared.group.rank() if self.shared else 0

    @property
    def cp_world(self) -> int:
        """Into how many pieces rows are cut."""
        return self.shared.group.size() if self.shared else 1

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
            routed: experts to replay, [rows, seq_len, layers, top_k] as in `wire.batches.routed_experts`.
            images: what is in the rows of them. All ranks give some, or none does.

        Returns:
            Logits [rows, local_len, vocab], then `beside` as [rows, local_len].
        """
        replayed = None if routed is None else self.piece(router_replay.narrow(routed))
        inputs = self._inputs(self.piece(tokens), positions, replayed, images)
        return (self.model(**inputs), *(self.piece(tensor) for tensor in beside))

    def score(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor,
        targets: Targets,
        routed: torch.Tensor | None = None,
        images: VisionInput | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, Targets]:
        """Run the model on this rank's pieces of packed rows, and return what a loss takes.

        Args:
            tokens: [rows, local_len].
            positions: of whole rows, as for `logits`.
            mask: whether the token that a position predicts is trained, [rows, local_len], in host memory: a device
                would have to be waited for to know how many are.
            targets: of shape [rows, local_len], in host memory.
            routed: experts to replay, [rows, local_len, layers, top_k].
            images: of whole rows, as for `logits`.

        Returns:
            Log-probabilities, entropies and targets [trained tokens] of this rank's part of the rows.
        """
        replayed = None if routed is None else router_replay.narrow(routed)
        inputs = self._inputs(tokens, positions, replayed, images)
        places = to_device(torch.from_numpy(np.flatnonzero(mask.numpy())), self.device)
        local = targets.apply(lambda tensor: to_device(tensor, self.device))
        trained = local.apply(lambda tensor: tensor.flatten().index_select(0, places))
        if self.shared:
            trained = replace(trained, documents=replace(trained.documents, group=self.shared.group))
        with self.model.lm_head.scoring(trained.labels, trained.temperatures, places):
            return (*self.model(**inputs), trained)

    def piece(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this context-parallel rank's part of a tensor [rows, seq_len, ...]."""
        return self.shared.piece(tensor) if self.shared else tensor

    def _inputs(
        self, tokens: torch.Tensor, positions: torch.Tensor, routed: torch.Tensor | None, images: VisionInput | None
    ) -> dict[str, Any]:
        """What the model is called with; routers get theirs. Of this rank's pieces, but for positions and images."""
        masks = self.model.get_attention_masks(positions)  # needs whole rows
        if self.shared:
            masks = self.shared.masks(masks, positions.shape[1])
        router_replay.assign(self.model, routed)
        inputs = {"tokens": tokens, "positions": self.piece(positions), "attention_masks": masks}
        if images is not None:
            features, coordinates = self.piece(images.features), self.piece(images.coordinates)
            inputs["images"] = replace(images, features=features, coordinates=coordinates)
        return inputs
