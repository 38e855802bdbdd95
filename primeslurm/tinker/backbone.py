"""One frozen model, and the adapters that clients train on it.

The model is the trainer's own, with LoRA adapters of the largest rank. Each client has its own parameters, gradients
and optimizer. For a pass, they are copied into the model, padded with zeros, and its gradients are copied back.
Therefore, no client's numbers depend on another client. Padding changes nothing: with A and B of an adapter padded by
zeros, both the change of the weight and the gradients of the padding are zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load, save
from torch import nn

from primeslurm.base import durable, files
from primeslurm.base.errors import UsageError, Violation
from primeslurm.base.model_files import locate
from primeslurm.recipe import Recipe
from primeslurm.tinker.losses import per_token
from primeslurm.tinker.requests import LOSS_INPUTS, AdamParams, Config, Datum, LoraConfig, ModelLimits, RequestError
from primeslurm.trainer.assembly.build import build
from primeslurm.trainer.components import lora
from primeslurm.trainer.distributed.world import World
from primeslurm.trainer.optimizers.container import Optimizers
from primeslurm.trainer.weights import model_directory

# Tinker's scale of adapters: a weight changes by ALPHA / rank times B A^T.
ALPHA = 32.0
# Tokens that one forward pass computes. A longer sequence is computed alone.
BATCH_TOKENS = 8192
_OPTIMIZER = "optimizer."


@dataclass(frozen=True)
class Adapter:
    """One client's adapter: parameters and their gradients, and the optimizer."""

    rank: int
    parameters: dict[str, nn.Parameter]
    optimizer: Optimizers

    @classmethod
    def of(cls, rank: int, tensors: Mapping[str, torch.Tensor]) -> Adapter:
        parameters = {name: nn.Parameter(tensor) for name, tensor in tensors.items()}
        return cls(rank, parameters, Optimizers([torch.optim.AdamW(list(parameters.items()), fused=True)]))

    def step(self, params: AdamParams) -> dict[str, float]:
        """Update the parameters, and clear their gradients. Return metrics."""
        trained = list(self.parameters.values())
        norm = nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None])
        try:
            if not norm.isfinite():
                raise RequestError("optim_step", "", f"the gradient norm is {norm}; the weights are unchanged")
            if params.grad_clip_norm:
                nn.utils.clip_grads_with_norm_(trained, params.grad_clip_norm, norm)
            settings = {"lr": params.learning_rate, "betas": (params.beta1, params.beta2), "eps": params.eps}
            for optimizer in self.optimizer:
                for group in optimizer.param_groups:
                    group |= settings | {"weight_decay": params.weight_decay}
            self.optimizer.step()
        finally:
            self.optimizer.zero_grad()
        return {"grad_norm": norm.item()}

    def save(self, path: Path, optimizer: bool) -> None:
        """Write the parameters, and with `optimizer` its state. On return they are on disk."""
        tensors = {name: parameter.detach() for name, parameter in self.parameters.items()}
        if optimizer:
            state = self.optimizer.state_dict()
            tensors |= {_OPTIMIZER + name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
        durable.make_directory(path.parent)
        durable.write(path, save({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}))

    def load(self, path: Path, optimizer: bool) -> None:
        """Replace the parameters by saved ones of the same shapes. The optimizer is reset, or gets the saved state."""
        tensors = read(path)
        state = {n.removeprefix(_OPTIMIZER): t for n, t in tensors.items() if n.startswith(_OPTIMIZER)}
        if optimizer and not state:
            raise RequestError("optimizer", True, "these weights were saved for sampling, without an optimizer")
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(tensors[name])
        for each in self.optimizer:
            each.state.clear()
        if optimizer:
            self.optimizer.load_state_dict(self.optimizer.state_dict() | state)
        self.optimizer.zero_grad()


def read(path: Path) -> dict[str, torch.Tensor]:
    """Read what `Adapter.save` wrote."""
    tensors: dict[str, torch.Tensor] = load(files.read_bytes(path))
    return tensors


class Backbone:
    """The model. Only one thread may use it at a time."""

    def __init__(self, model: str, max_rank: int, world: World) -> None:
        """Load the model.

        Raises FileNotFoundError if there is none, ValueError if it cannot be trained, and UsageError for `max_rank`.
        """
        directory = locate(model)
        self.config = model_directory.load_config(directory)
        text = self.config.get_text_config()
        if max_rank > text.hidden_size:
            why = f"is above the model's hidden size, {text.hidden_size}; use a smaller rank"
            raise UsageError([Violation("--max-rank", str(max_rank), why)])
        self.limits = ModelLimits(str(directory), text.vocab_size, text.max_position_embeddings, max_rank)
        rank = -(-max_rank // 8) * 8  # a recipe's rank is a multiple of 8
        recipe = Recipe.model_validate(
            {
                "name": "tinker",
                "seq_len": self.limits.length,
                "model": {"path": str(directory), "dtype": "float32" if world.device.type == "cpu" else "bfloat16"},
                "trainer": {"lora": {"rank": rank, "alpha": ALPHA}, "memory": {"lm_head_chunk": 1024}},
            }
        )
        self.policy = build(recipe, world)
        self.slots = {name: p for name, p in self.policy.model.named_parameters() if lora.is_adapter(name)}
        if not self.slots:
            raise ValueError("the trainer has no LoRA for this model type")
        self._adapted = [self.policy.model.get_submodule(name.rpartition(".")[0]) for name in self.slots]

    def adapter(self, config: LoraConfig) -> Adapter:
        """Return a new adapter, which changes nothing before its first step."""
        tensors: dict[str, torch.Tensor] = {}
        for name, slot in self.slots.items():
            if config.train_mlp if _in_mlp(name) else config.train_attn:
                tensors[name] = torch.zeros(*slot.shape[:-1], config.rank, device=slot.device)
                if name.endswith(lora.A):
                    # As in the trainer: a client's seed draws the same values as a recipe's.
                    lora.draw(tensors[name], f"{config.seed}:{name.removesuffix(lora.A)}")
        return Adapter.of(config.rank, tensors)

    def score(
        self,
        adapter: Adapter,
        data: Sequence[Datum],
        loss: str,
        config: Config,
        backward: bool,
        check: Callable[[], object] = lambda: None,
    ) -> tuple[list[NDArray[np.float32]], float]:
        """Return the log-probabilities of each datum's targets, and the loss. `backward` adds to the gradients.

        `check` is called before each batch, and ends the pass if it raises. If the pass fails, the gradients are
        unchanged.
        """
        self.use(adapter.rank, adapter.parameters)
        logprobs: list[NDArray[np.float32]] = []
        total = 0.0
        try:
            for batch in _batches(data):
                check()
                targets = [datum.inputs["target_tokens"] for datum in batch]
                with torch.set_grad_enabled(backward):
                    scores = self.logprobs([datum.tokens for datum in batch], targets)
                    terms = per_token(loss, config, scores, self._inputs(batch, loss))
                total += terms.detach().double().sum().item()
                if backward:
                    terms.sum().backward()
                parts = scores.detach().cpu().numpy()
                for target in targets:
                    logprobs.append(parts[: target.size].reshape(target.shape))
                    parts = parts[target.size :]
            if backward:
                self._add_gradients(adapter)
        finally:
            for slot in self.slots.values():
                slot.grad = None
        return logprobs, total

    def use(self, rank: int, parameters: Mapping[str, torch.Tensor]) -> None:
        """Make the model compute with an adapter. No parameters: the model itself."""
        with torch.no_grad():
            for name, slot in self.slots.items():
                local = slot.to_local()
                local.zero_()
                if name in parameters:
                    local[..., :rank].copy_(parameters[name])
        for module in self._adapted:
            module.scale = ALPHA / rank

    def logprobs(self, sequences: Sequence[NDArray[Any]], targets: Sequence[NDArray[Any]]) -> torch.Tensor:
        """Return the log-probabilities of targets, float32 [targets of all sequences].

        The targets of a sequence are [tokens] or [tokens, targets per token].
        """
        sizes = np.concatenate([np.full(len(target), target[:1].size) for target in targets])
        labels = self._tensor(np.concatenate([target.ravel() for target in targets]))
        places = self._tensor(np.repeat(np.arange(len(sizes)), sizes))
        tokens = self._tensor(np.concatenate(sequences))[None].long()
        positions = self._tensor(np.concatenate([np.arange(len(sequence)) for sequence in sequences]))[None]
        with self.policy.model.lm_head.scoring(labels, torch.ones_like(labels, dtype=torch.float32), places):
            (scores,) = self.policy.logits(tokens, positions)
        return scores[0]

    def next_logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits after rows of tokens [rows, length], float32 [rows, vocabulary], without gradient."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        # Logits of all positions would need gigabytes for a large vocabulary.
        last = self.policy.model.lm_head.register_forward_pre_hook(lambda _, inputs: (inputs[0][:, -1:],))
        try:
            with torch.no_grad():
                chunks = tokens.split(max(1, BATCH_TOKENS // tokens.shape[1]))
                logits = [self.policy.logits(chunk, positions.expand(chunk.shape))[0] for chunk in chunks]
        finally:
            last.remove()
        return torch.cat(logits)[:, 0].float()

    def _tensor(self, array: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self.policy.device)

    def _inputs(self, batch: Sequence[Datum], loss: str) -> dict[str, torch.Tensor]:
        values = {name: [d.inputs[name].ravel() for d in batch] for name in LOSS_INPUTS[loss][1:]}
        return {name: self._tensor(np.concatenate(arrays)) for name, arrays in values.items()}

    def _add_gradients(self, adapter: Adapter) -> None:
        for name, parameter in adapter.parameters.items():
            gradient = self.slots[name].grad.to_local()[..., : adapter.rank]
            parameter.grad = gradient.clone() if parameter.grad is None else parameter.grad + gradient


def _in_mlp(name: str) -> bool:
    return ".feed_forward." in name or ".moe." in name


def _batches(data: Sequence[Datum]) -> Iterator[list[Datum]]:
    """Yield sequences to compute together: BATCH_TOKENS, or one longer sequence."""
    batch: list[Datum] = []
    for datum in data:
        if batch and sum(len(each.tokens) for each in [*batch, datum]) > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(datum)
    yield batch
