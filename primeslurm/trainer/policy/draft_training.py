"""Training of the draft layer (MTP): it learns the policy's tokens from the policy's hidden states.

The policy gets no gradient from it: hidden states, embeddings and head are inputs without gradient.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from primeslurm.recipe import Recipe
from primeslurm.trainer.components.logprobs import next_token_loss
from primeslurm.trainer.distributed.world import World, to_device
from primeslurm.trainer.optimizers import optimizers
from primeslurm.trainer.policy.policy_model import PolicyModel


class DraftTraining:
    """The draft layer of a policy, with its own optimizer, schedule, and gradient clipping."""

    def __init__(self, policy: PolicyModel, layer: PolicyModel, recipe: Recipe, world: World) -> None:
        optimizer, memory, settings = recipe.trainer.optimizer, recipe.trainer.memory, recipe.trainer.draft_layer
        if settings is not None and settings.lr is not None:
            optimizer = optimizer.model_copy(update={"lr": settings.lr})
        self.layer = layer
        self._world = world
        self._max_norm = optimizer.max_norm
        self.optimizer = optimizers.build(optimizer, layer.model, layer.dtype, memory.optimizer_state_offload)
        self.scheduler = optimizers.schedule(optimizer, recipe.max_steps, self.optimizer)
        self._head = policy.model.lm_head
        self._sums = torch.zeros(3, device=world.device)
        policy.model.tok_embeddings.register_forward_hook(self._take_embeddings)
        self._head.register_forward_pre_hook(self._take_hidden)

    def _take_embeddings(self, _: Any, __: Any, embeddings: torch.Tensor) -> None:
        self._embeddings = embeddings.detach()

    def _take_hidden(self, head: Any, inputs: tuple[torch.Tensor]) -> None:
        self._hidden = inputs[0].detach()
        # FSDP gathers the head for its forward pass, and frees it in its backward pass.
        self._weight = head.weight.detach()

    def hidden(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the draft layer's output [rows, length, dim] for the micro batch that the policy has just computed.

        `positions` [rows, length] are on the device. The logits of a position predict the token after the next one.
        """
        following = torch.cat([self._embeddings[:, 1:], torch.zeros_like(self._embeddings[:, :1])], dim=1)
        if not self.layer.adapter.format.sees_first_embedding:
            following = torch.where(positions.unsqueeze(-1) == 0, 0, following)
        # Without a head, the model returns its normalized hidden states in the place of logits.
        (outputs,) = self.layer.logits(torch.cat([following, self._hidden], dim=-1), positions)
        return outputs

    def add(self, token_ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> None:
        """Add the gradients of the micro batch that the policy has just computed, before its backward pass.

        All arguments are [rows, length], in host memory. `mask` marks sampled tokens.
        """
        # A token at position 2 or later has the two tokens that it is predicted from before it in its document.
        wanted = (mask & (positions >= 2))[:, 2:]
        rows, columns = np.nonzero(wanted.numpy())
        places = to_device(torch.from_numpy(rows * positions.shape[1] + columns), self._world.device)
        labels = to_device(token_ids[:, 2:][wanted], self._world.device).long()
        outputs = self.hidden(to_device(positions, self._world.device).long()).flatten(0, 1).index_select(0, places)
        loss, hits, gradient = next_token_loss(outputs, self._weight, labels, self._head.chunk, self._head.dtype)
        # The gradient is scaled in `update`, when the token count of all ranks is known.
        outputs.backward(gradient)
        self._sums += torch.stack([loss, hits, loss.new_full((), len(labels))])
        del self._embeddings, self._hidden, self._weight

    def drop(self) -> None:
        """Drop the draft layer's gradients and metric sums of all micro batches since the last update."""
        self.optimizer.zero_grad()
        self._sums.zero_()

    def update(self) -> dict[str, float]:
        """Update the draft layer, unless its gradient is not finite. Return metrics of the batch. A collective."""
        loss, hits, count = self._world.sum(self._sums).tolist()
        count = max(1.0, count)
        for parameter in self.layer.model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(count)
        ep_enabled = self.layer.dims.ep_enabled
        norm, updated = optimizers.step(self.optimizer, self.layer.model, self._max_norm, ep_enabled, self._world)
        self.scheduler.step()
        self._sums.zero_()
        return {
            "draft_loss": loss / count,
            "draft_acceptance": hits / count,
            "draft_grad_norm": norm,
            "draft_skipped": float(not updated),
        }
