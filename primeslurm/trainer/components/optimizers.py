"""Optimizers and learning rate schedules, as the recipe names them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.components.optimizer import LRSchedulersContainer
from torchtitan.components.optimizer.utils import (
    get_flat_optim_state_dict,
    init_optim_state,
    load_flat_optim_state_dict,
)

from primeslurm.recipe.sections.trainer import Optimizer
from primeslurm.trainer.components.muon import Muon

Named = Iterable[tuple[str, torch.Tensor]]
_IN_A_LAYER = re.compile(r"(^|\.)layers\.\d+\.")
# Routers choose, biases and convolutions are stored as matrices without being any.
_NO_MATRIX = re.compile(r"\b(router|gate|conv1d)\.|bias")


class SignSGD(torch.optim.Optimizer):
    """Every weight moves by the learning rate against the sign of its gradient. It has no state."""

    def __init__(self, named: Named, lr: float, weight_decay: float) -> None:
        super().__init__(named, {"lr": lr, "weight_decay": weight_decay})

    def step(self, closure: Any = None) -> Any:
        """Update every parameter that has a gradient; it calls no closure and returns None."""
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.mul_(1 - group["lr"] * group["weight_decay"])
                        parameter.sub_(parameter.grad.sign(), alpha=group["lr"])


class Optimizers:
    """The optimizers of one model as one, whose state is saved by parameter name and thus fits any number of ranks."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers

    def __iter__(self) -> Iterator[torch.optim.Optimizer]:
        return iter(self._optimizers)

    def __len__(self) -> int:
        return len(self._optimizers)

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return float(self._optimizers[0].param_groups[0]["lr"])

    def step(self) -> None:
        """Update all parameters."""
        for optimizer in self._optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for optimizer in self._optimizers:
            optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """Return state and settings by parameter name."""
        result: dict[str, Any] = {}
        for optimizer in self._optimizers:
            init_optim_state(optimizer)
            result |= get_flat_optim_state_dict(optimizer)
        return result

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` returned."""
        for optimizer in self._optimizers:
            init_optim_state(optimizer)  # says which state is expected
            load_flat_optim_state_dict(optimizer, state)


def build(config: Optimizer, model: torch.nn.Module, dtype: torch.dtype) -> Optimizers:
    """Build the recipe's optimizer over all trained parameters.

    Args:
        config: the recipe's.
        model: whose trained parameters are given to it by name.
        dtype: in which Muon orthogonalizes.
    """
    trained = [(canonical_fqn(name), p) for name, p in model.named_parameters() if p.requires_grad]
    if config.type == "sgd":
        sgd = torch.optim.SGD(
            trained, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay, foreach=False
        )
        return Optimizers([sgd])
    if config.type == "sign_sgd":
        return Optimizers([SignSGD(trained, config.lr, config.weight_decay)])
    if config.type == "muon":
        matrices = [(name, p) for name, p in trained if is_matrix(name, p)]
        rest = [(name, p) for name, p in trained if not is_matrix(name, p)]
        muon = Muon(matrices, config.lr, config.momentum, config.weight_decay, dtype)
        return Optimizers([muon, *([_adamw(config, rest)] if rest else [])])
    return Optimizers([_adamw(config, trained)])


def is_matrix(name: str, parameter: torch.Tensor) -> bool:
    """Whether Muon trains a parameter: the matrices of layers, and the stacked ones of experts.

    Embedding, head, norms, biases and routers are AdamW's.
    """
    return parameter.ndim > 1 and bool(_IN_A_LAYER.search(name)) and not _NO_MATRIX.search(name)


def schedule(config: Optimizer, max_steps: int, optimizers: Optimizers) -> Any:
    """Build the learning rate's schedule: linear warm-up, then constant, or falling to its floor at the last step."""
    constant = config.schedule == "constant"
    return LRSchedulersContainer.Config(
        warmup_steps=config.warmup_steps,
        decay_ratio=0.0 if constant else None,
        decay_type="linear" if constant else config.schedule,
        min_lr_factor=config.min_lr_ratio,
    ).build(optimizers=optimizers, training_steps=max_steps)


def _adamw(config: Optimizer, named: Named) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        named, lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay, fused=True
    )
