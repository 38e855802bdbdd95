"""Optimizers and learning rate schedules, as the recipe names them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.components.optimizer import LRSchedulersContainer
from torchtitan.models.common.moe import GroupedExperts, TokenChoiceTopKRouter

from primeslurm.recipe.sections.trainer import Optimizer
from primeslurm.trainer.optimizers.container import Named, Optimizers
from primeslurm.trainer.optimizers.host_states import HostStates, pieces
from primeslurm.trainer.optimizers.muon import Muon, bunches

_IN_A_LAYER = re.compile(r"(^|\.)layers\.\d+\.")


class SignSGD(torch.optim.Optimizer):
    """Every weight moves by the learning rate against the sign of its gradient. It has no state."""

    def __init__(self, named: Iterable[Named], lr: float, weight_decay: float) -> None:
        super().__init__(named, {"lr": lr, "weight_decay": weight_decay})

    def step(self, closure: Any = None) -> Any:
        """Update every parameter that has a gradient; it calls no closure and returns None."""
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.mul_(1 - group["lr"] * group["weight_decay"])
                        parameter.sub_(parameter.grad.sign(), alpha=group["lr"])


def build(config: Optimizer, model: torch.nn.Module, dtype: torch.dtype, host_states: bool = False) -> Optimizers:
    """Build the recipe's optimizer over all trained parameters.

    Args:
        config: the recipe's.
        model: whose trained parameters are given to it by name.
        dtype: in which Muon orthogonalizes.
        host_states: whether its state is in host memory.
    """
    trained: list[Named] = [(canonical_fqn(name), p) for name, p in model.named_parameters() if p.requires_grad]
    parts = _parts(config, model, trained, dtype)
    if not host_states:
        return Optimizers([make(named) for make, named in parts])
    cut = [(make, piece) for make, named in parts for piece in (bunches if make.func is Muon else pieces)(named)]
    return HostStates([make(piece) for make, piece in cut], trained[0][1].device)


def _parts(
    config: Optimizer, model: torch.nn.Module, trained: list[Named], dtype: torch.dtype
) -> list[tuple[partial[Any], list[Named]]]:
    """What makes an optimizer of parameters, and of which."""
    lr, decay = config.lr, config.weight_decay
    adamw = partial(torch.optim.AdamW, lr=lr, weight_decay=decay, betas=config.betas, eps=config.eps, fused=True)
    if config.type == "adamw":
        return [(adamw, trained)]
    if config.type == "sgd":
        sgd = partial(torch.optim.SGD, lr=lr, weight_decay=decay, momentum=config.momentum, foreach=False)
        return [(sgd, trained)]
    if config.type == "sign_sgd":
        return [(partial(SignSGD, lr=lr, weight_decay=decay), trained)]
    multiplied = set(matrices(model))
    muon = partial(Muon, lr=lr, weight_decay=decay, momentum=config.momentum, dtype=dtype)
    ours = [(name, p) for name, p in trained if p in multiplied]
    rest = [(name, p) for name, p in trained if p not in multiplied]
    return [(make, named) for make, named in ((muon, ours), (adamw, rest)) if named]


def matrices(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield the parameters that Muon trains: what layers multiply by, adapters included.

    These are weights of linear modules and stacks of them in modules of experts. Everything else is AdamW's: embedding,
    head, norms, biases, convolutions, routers, and whatever has one row or one column.
    """
    modules = dict(model.named_modules())
    routers = tuple(f"{name}." for name in modules if _is_router(modules, name))
    for name, module in modules.items():
        if not _IN_A_LAYER.search(name) or f"{name}.".startswith(routers):
            continue
        # transformers has a class of experts for each model, all of them under one name
        experts = isinstance(module, GroupedExperts) or name.endswith(".experts")
        dimensions = 3 if experts else 2 if isinstance(module, torch.nn.Linear) else 0
        for parameter in module.parameters(recurse=False):
            if parameter.ndim == dimensions and min(parameter.shape[-2:]) > 1:
                yield parameter


def _is_router(modules: Mapping[str, torch.nn.Module], name: str) -> bool:
    """Whether a module chooses experts. Attention has gates, too."""
    parent, _, leaf = name.rpartition(".")
    beside_experts = leaf in ("gate", "router") and hasattr(modules[parent], "experts")
    return beside_experts or isinstance(modules[name], TokenChoiceTopKRouter)


def schedule(config: Optimizer, max_steps: int, optimizers: Optimizers) -> Any:
    """Build the learning rate's schedule: linear warm-up, then constant or falling.

    A schedule that falls would reach its floor one step after the last, as torchtitan and transformers have it: with a
    floor of 0, the last step would train nothing otherwise.
    """
    constant = config.schedule == "constant"
    return LRSchedulersContainer.Config(
        warmup_steps=config.warmup_steps,
        decay_ratio=0.0 if constant else None,
        decay_type="linear" if constant else config.schedule,
        min_lr_factor=config.min_lr_ratio,
    ).build(optimizers=optimizers, training_steps=max_steps)
