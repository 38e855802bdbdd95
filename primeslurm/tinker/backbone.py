"""One frozen model, and the adapters that clients train on it.

The model is the trainer's own. Each client has its own parameters, gradients and optimizer. Clients share passes: each
row of a batch has sequences of one client, and layers add the change of the row's adapter. For a pass, adapters are
copied into stacks, padded with zeros to the largest rank, and gradients are copied back. Padding changes nothing: with
A and B of an adapter padded by zeros, both the change of the weight and the gradients of the padding are zero. Rows do
not see each other, so that a NaN stays with its client.

Several ranks share the model as those of a run's trainer do. Adapters and optimizers are on rank 0, which sends the
stacks to the others and gets the sums of their gradients. A pass moves the same bytes as an all-reduce would.
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
from torchtitan.components.checkpointer.utils import canonical_fqn

from primeslurm.base import durable, files
from primeslurm.base.errors import UsageError, Violation
from primeslurm.base.model_files import locate
from primeslurm.recipe import Recipe
from primeslurm.recipe.sections.tenant import ALPHA
from primeslurm.recipe.sections.tenant_deployment import BATCH_TOKENS, LOGIT_TOKENS
from primeslurm.recipe.sections.trainer import Parallelism
from primeslurm.tinker import rows as packing
from primeslurm.tinker.losses import per_token
from primeslurm.tinker.ranks import SharedCalls
from primeslurm.tinker.requests import (
    LOSS_INPUTS,
    NOT_FINITE,
    AdamParams,
    Config,
    Datum,
    LoraConfig,
    ModelLimits,
    RequestError,
)
from primeslurm.tinker.rows import RANK_STEP, Row
from primeslurm.trainer.assembly.build import build
from primeslurm.trainer.components import lora
from primeslurm.trainer.distributed.world import World
from primeslurm.trainer.optimizers.container import Optimizers
from primeslurm.trainer.weights import model_directory, peft

_OPTIMIZER = "optimizer."


@dataclass(frozen=True)
class Adapter:
    """One client's adapter: parameters and their gradients, and the optimizer."""

    parameters: dict[str, nn.Parameter]
    optimizer: Optimizers

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> Adapter:
        parameters = {name: nn.Parameter(tensor) for name, tensor in tensors.items()}
        return cls(parameters, Optimizers([torch.optim.AdamW(list(parameters.items()), fused=True)]))

    def step(self, params: AdamParams) -> dict[str, float]:
        """Update the parameters, and clear their gradients. Return metrics."""
        trained = list(self.parameters.values())
        norm = nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None])
        try:
            if not norm.isfinite():
                raise RequestError("optim_step", "", f"the gradient norm is {norm}; {NOT_FINITE}")
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


def saved(path: Path) -> Adapter:
    """Return the adapter that `Adapter.save` wrote, with a new optimizer."""
    return Adapter.of({name: tensor for name, tensor in read(path).items() if not name.startswith(_OPTIMIZER)})


@dataclass(frozen=True)
class Pass:
    """A forward pass of an adapter over data. `backward` adds to the adapter's gradients.

    `check` is called before each batch, and ends the pass if it raises.
    """

    adapter: Adapter
    data: Sequence[Datum]
    loss: str
    config: Config
    backward: bool
    check: Callable[[], object] = lambda: None


Scores = tuple[list[NDArray[np.float32]], float]
"""Log-probabilities of each datum's targets, and the loss."""
_Terms = tuple[str, Config, bool]
"""Loss of a pass, its settings, and whether there is a backward pass."""


class Backbone:
    """The model on this rank. Only one thread of rank 0 may use it at a time."""

    def __init__(self, model: str, max_rank: int, world: World, parallelism: Parallelism | None = None) -> None:
        """Load the model, sharded over all ranks. The public methods are for rank 0; the others call `ranks.follow`.

        Raises FileNotFoundError if there is none, ValueError if it cannot be trained, and UsageError for `max_rank`.
        """
        directory = locate(model)
        self.config = model_directory.load_config(directory)
        text = self.config.get_text_config()
        if max_rank > text.hidden_size:
            why = f"is above the model's hidden size, {text.hidden_size}; use a smaller rank"
            raise UsageError([Violation("--max-rank", str(max_rank), why)])
        self.limits = ModelLimits(str(directory), text.vocab_size, text.max_position_embeddings, max_rank)
        recipe = Recipe.model_validate(
            {
                "name": "tinker",
                "seq_len": self.limits.length,
                "model": {"path": str(directory), "dtype": "float32" if world.device.type == "cpu" else "bfloat16"},
                "trainer": {
                    "lora": {"rank": RANK_STEP, "alpha": ALPHA},
                    "memory": {"lm_head_chunk": LOGIT_TOKENS},
                    "parallelism": (parallelism or Parallelism()).model_dump(),
                },
            }
        )
        self.policy = build(recipe, world)
        self.ranks = SharedCalls(world, self)
        self._stacks: dict[str, torch.Tensor] = {}
        """Stacks of adapters in use, for the experts of this rank."""
        # Without the wrappers of activation checkpointing, because values, files and exports depend on the names.
        named = [(canonical_fqn(name), parameter) for name, parameter in self.policy.model.named_parameters()]
        self._shapes = {name: parameter.shape[:-1] for name, parameter in named if lora.is_adapter(name)}
        """Shapes of adapters' parameters, without the rank."""
        if not self._shapes:
            raise ValueError("the trainer has no LoRA for this model type")
        self._owners = lora.RowOwners()
        lora.adapt_rows(self.policy.model, self._owners)

    def fits(self, lengths: Sequence[Sequence[int]], ranks: Sequence[int]) -> bool:
        """Return whether one batch has room for passes with the given lengths of sequences and ranks of adapters."""
        cp = self.policy.cp_world
        return packing.fit(lengths, ranks, self.ranks.world.size // cp, cp)

    def adapter(self, config: LoraConfig) -> Adapter:
        """Return a new adapter, which changes nothing before its first step."""
        tensors: dict[str, torch.Tensor] = {}
        for name, shape in self._shapes.items():
            if config.train_mlp if _in_mlp(name) else config.train_attn:
                tensors[name] = torch.zeros(*shape, config.rank, device=self.policy.device)
                if name.endswith(lora.A):
                    # As in the trainer: a client's seed draws the same values as a recipe's.
                    lora.draw(tensors[name], f"{config.seed}:{name.removesuffix(lora.A)}")
        return Adapter.of(tensors)

    def score(self, passes: Sequence[Pass]) -> list[Scores]:
        """Compute passes of different adapters. If one of them fails, all gradients are unchanged."""
        self.use([each.adapter.parameters for each in passes])
        terms = [(each.loss, each.config, each.backward) for each in passes]
        logprobs: list[list[NDArray[np.float32]]] = [[] for _ in passes]
        totals = [0.0] * len(passes)
        try:
            for batch in packing.batches([each.data for each in passes], self.policy.dp_world, self.policy.cp_world):
                for each in passes:
                    each.check()
                scores = self.ranks.execute("_compute", batch, terms)
                for (owner, data), (values, total) in zip((row for rows in batch for row in rows), scores, strict=True):
                    totals[owner] += total
                    if values.size:
                        logprobs[owner] += packing.by_datum(values, data)
            sums = self.ranks.execute("_sum_gradients") if any(each.backward for each in passes) else {}
            backward = [(index, each.adapter) for index, each in enumerate(passes) if each.backward]
            # Copies can run out of memory. All are made before any gradient changes. Adding in place needs no memory.
            gradients = [pair for index, adapter in backward for pair in _gradients(adapter, sums, index)]
            for parameter, gradient in gradients:
                if parameter.grad is None:
                    parameter.grad = gradient
                else:
                    parameter.grad.add_(gradient)
        finally:
            self.use([])  # frees the stacks
        return list(zip(logprobs, totals, strict=True))

    def _compute(
        self, batch: Sequence[Sequence[Row]], terms: Sequence[_Terms]
    ) -> list[tuple[NDArray[np.float32], float]]:
        """Compute this rank's rows of a batch. Return the log-probabilities and the loss of each row of all ranks."""
        rows = batch[self.policy.dp_rank]
        self._assign([owner for owner, _ in rows])
        computed = []
        with torch.set_grad_enabled(any(terms[owner][2] for each in batch for owner, _ in each)):
            scores = self.logprobs([data for _, data in rows])
            loss = scores[:0].sum()  # in the graph, because a backward pass needs all ranks
            parts = [part for _, part in self._shards([data for _, data in rows])]
            by_row = scores.split([part.stop - part.start for part in parts])
            for (owner, data), part, values in zip(rows, parts, by_row, strict=True):
                name, config, backward = terms[owner]
                inputs = {each: self._tensor(packing.joined(data, each)[part]) for each in LOSS_INPUTS[name][1:]}
                losses = per_token(name, config, values, inputs)
                if backward:
                    loss = loss + losses.sum()
                computed.append((values.detach().cpu().numpy(), losses.detach().double().sum().item()))
        if loss.requires_grad:
            loss.backward()
        place = (self.policy.dp_rank, self.policy.cp_rank)
        by_place = dict(self.ranks.collect((place, computed)))
        shards_of_rows = [
            [by_place[dp, cp][index] for cp in range(self.policy.cp_world)]
            for dp, rows in enumerate(batch)
            for index in range(len(rows))
        ]
        return [(np.concatenate([v for v, _ in shards]), sum(t for _, t in shards)) for shards in shards_of_rows]

    def _sum_gradients(self) -> dict[str, torch.Tensor]:
        """Return the gradients of whole stacks, summed over all ranks. Only those on rank 0 are complete."""
        sums = {}
        for name, stack in self._stacks.items():
            gradient = torch.zeros_like(stack) if stack.grad is None else stack.grad
            if (experts := self._experts(name)) != slice(None):
                whole = gradient.new_zeros(self._shapes[name][0], *gradient.shape[1:])
                whole[experts] = gradient
                gradient = whole
            self.ranks.sum(gradient)
            if self.ranks.world.is_main:
                sums[name] = gradient
        return sums

    def use(self, adapters: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Make the model compute with the parameters of adapters. No adapters: the model itself.

        If there are several, `_assign` selects one for each row.
        """
        stacks: dict[str, torch.Tensor] = {}
        for name, shape in self._shapes.items():
            holders = {i: each[name].detach() for i, each in enumerate(adapters) if name in each}
            if holders:
                rank = packing.padded_rank(tensor.shape[-1] for tensor in holders.values())
                stack = torch.zeros(*shape[:-1], len(adapters), shape[-1], rank, device=self.policy.device)
                for index, tensor in holders.items():
                    _own(stack, index, tensor).copy_(tensor).mul_(_scale(name, tensor))
                stacks[name] = stack
        self._stacks = stacks
        self.ranks.execute("_attach", len(adapters), {name: stack.shape for name, stack in stacks.items()})

    def _attach(self, adapters: int, shapes: Mapping[str, Sequence[int]]) -> None:
        """Get stacks of these shapes from rank 0, which has them already, and let the model compute with them."""
        whole, self._stacks = self._stacks if self.ranks.world.is_main else {}, {}
        for name, shape in shapes.items():
            stack = whole.pop(name, None)
            if stack is None:
                stack = torch.empty(*shape, device=self.policy.device)
            self.ranks.broadcast(stack)
            experts = self._experts(name)
            self._stacks[name] = (stack if experts == slice(None) else stack[experts].clone()).requires_grad_()
        self._owners.adapters = adapters
        self._assign([])
        for name in self._shapes:
            if name.endswith(lora.A):
                weight = name.removesuffix(lora.A)
                path, _, attribute = weight.rpartition(".")
                pairs = self.policy.model.get_submodule(path).row_adapters
                pairs.pop(attribute, None)
                if name in shapes:
                    pairs[attribute] = lora.RowAdapters(self._stacks[name], self._stacks[weight + lora.B], self._owners)

    def _experts(self, name: str) -> slice:
        """Return the experts of a parameter that this rank computes: all without expert parallelism."""
        mesh = self.policy.dims.get_optional_mesh("ep")
        if mesh is None or not lora.is_experts(name):
            return slice(None)
        count = self._shapes[name][0] // mesh.size()
        return slice(mesh.get_local_rank() * count, (mesh.get_local_rank() + 1) * count)

    def _assign(self, owners: Sequence[int]) -> None:
        """Set the adapter of each row, by its index in `use`."""
        counts = np.bincount(np.array(owners, np.int64), minlength=self._owners.adapters)
        self._owners.index = self._tensor(np.array(owners)) if self._owners.adapters > 1 and owners else None
        self._owners.even = len(set(counts.tolist())) == 1

    def logprobs(self, rows: Sequence[Sequence[Datum]]) -> torch.Tensor:
        """Return the log-probabilities of the targets of rows of sequences, float32 [targets of all rows].

        The targets of a sequence are [tokens] or [tokens, targets per token]. With context parallelism, the result has
        those in this rank's shard of each row.
        """
        width, shards = packing.width(rows, self.policy.cp_world), self._shards(rows)
        tokens, positions = np.zeros((2, len(rows), width), np.int64)
        for index, row in enumerate(rows):
            start = 0
            for datum in row:
                end = start + len(datum.tokens)
                tokens[index, start:end], positions[index, start:end] = datum.tokens, np.arange(end - start)
                start = end
            positions[index, start:] = np.arange(width - start)  # padding is a sequence of its own
        local = width // self.policy.cp_world
        places = np.concatenate([index * local + places for index, (places, _) in enumerate(shards)])
        chosen = [packing.joined(row, "target_tokens")[part] for row, (_, part) in zip(rows, shards, strict=True)]
        labels = self._tensor(np.concatenate(chosen))
        ones = torch.ones_like(labels, dtype=torch.float32)
        with self.policy.model.lm_head.scoring(labels, ones, self._tensor(places)):
            (scores,) = self.policy.logits(self._tensor(tokens), self._tensor(positions))
        return scores[0]

    def _shards(self, rows: Sequence[Sequence[Datum]]) -> list[tuple[NDArray[np.int64], slice]]:
        """Return where each row has targets in this rank's shard of it, and which ones."""
        size = packing.width(rows, self.policy.cp_world) // self.policy.cp_world
        return [packing.shard(row, self.policy.cp_rank * size, size) for row in rows]

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

    def export(self, adapter: Adapter, directory: Path) -> None:
        """Write an adapter in PEFT format. On return it is on disk."""
        own = {name: parameter.detach() for name, parameter in adapter.parameters.items()}
        tensors = peft.tensors(self.policy, torch.float32, own)
        partial = directory.with_name(f"{directory.name}.tmp")
        durable.make_directory(directory.parent)
        try:
            durable.make_anew(partial)
            rank = next(iter(own.values())).shape[-1]
            peft.write(partial, tensors, rank, ALPHA, Path(self.limits.model))
            durable.sync_tree(partial)
        except BaseException:
            files.remove_tree(partial)
            raise
        files.remove_tree(directory)  # an earlier adapter of this name, which remained until now
        durable.rename(partial, directory)

    def _tensor(self, array: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self.policy.device)


def _own(stack: torch.Tensor, index: int, parameter: torch.Tensor) -> torch.Tensor:
    """Return a parameter's part of a stack [..., adapters, size, rank]."""
    return stack.select(-3, index)[..., : parameter.shape[-1]]


def _scale(name: str, parameter: torch.Tensor) -> float:
    return ALPHA / parameter.shape[-1] if name.endswith(lora.B) else 1.0


def _gradients(
    adapter: Adapter, sums: Mapping[str, torch.Tensor], index: int
) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    """Yield the adapter's parameters, and what this pass adds to their gradients."""
    for name, parameter in adapter.parameters.items():
        part = _own(sums[name], index, parameter).mul_(_scale(name, parameter))
        # A first gradient is a copy, because a view would keep the stack in memory.
        yield parameter, part.clone() if parameter.grad is None else part


def _in_mlp(name: str) -> bool:
    return ".feed_forward." in name or ".moe." in name
