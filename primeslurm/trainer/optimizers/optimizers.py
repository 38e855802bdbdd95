"""Build the optimizers and the learning rate schedule of a recipe."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.components.optimizer import LRSchedulersContainer
from torchtitan.distributed import utils as dist_utils
from torchtitan.models.common.moe import GroupedExperts, TokenChoiceTopKRouter

from primeslurm.recipe.sections.trainer import Optimizer
from primeslurm.trainer.distributed.world import World
from primeslurm.trainer.optimizers.container import Named, Optimizers
from primeslurm.trainer.optimizers.host_states import HostStates, chunks
from primeslurm.trainer.optimizers.muon import Muon, bunches

_IN_A_LAYER = re.compile(r"(^|\.)layers\.\d+\.")


class SignSGD(torch.optim.Optimizer):
    """SGD that uses only the sign of the gradient. It has no state."""

    def __init__(self, named: Iterable[Named], lr: float, weight_decay: float) -> None:
        super().__init__(named, {"lr": lr, "weight_decay": weight_decay})

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.mul_(1 - group["lr"] * group["weight_decay"])
                        parameter.sub_(parameter.grad.sign(), alpha=group["lr"])


def build(config: Optimizer, model: torch.nn.Module, dtype: torch.dtype, host_states: bool = False) -> Optimizers:
    """Build the recipe's optimizers over all trained parameters, with their state in host memory if `host_states`."""
    trained: list[Named] = [(canonical_fqn(name), p) for name, p in model.named_parameters() if p.requires_grad]
    parts = _parts(config, model, trained, dtype)
    if not host_states:
        return Optimizers([make(named) for make, named in parts])
    pairs = [(make, chunk) for make, named in parts for chunk in (bunches if make.func is Muon else chunks)(named)]
    return HostStates([make(chunk) for make, chunk in pairs], trained[0][1].device)


def _parts(
    config: Optimizer, model: torch.nn.Module, trained: list[Named], dtype: torch.dtype
) -> list[tuple[partial[Any], list[Named]]]:
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
    for_muon = [(name, p) for name, p in trained if p in multiplied]
    rest = [(name, p) for name, p in trained if p not in multiplied]
    return [(make, named) for make, named in ((muon, for_muon), (adamw, rest)) if named]


def matrices(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield the parameters that Muon trains: matrices of linear layers and experts within layers, and their adapters.

    AdamW trains everything else: embedding, head, norms, biases, convolutions, routers, and single rows or columns.
    """
    modules = dict(model.named_modules())
    routers = tuple(f"{name}." for name in modules if _is_router(modules, name))
    for name, module in modules.items():
        if not _IN_A_LAYER.search(name) or f"{name}.".startswith(routers):
            continue
        # transformers has one experts class per model, but the module is always called "experts".
        experts = isinstance(module, GroupedExperts) or name.endswith(".experts")
        dimensions = 3 if experts else 2 if isinstance(module, torch.nn.Linear) else 0
        for parameter in module.parameters(recurse=False):
            if parameter.ndim == dimensions and min(parameter.shape[-2:]) > 1:
                yield parameter


def _is_router(modules: Mapping[str, torch.nn.Module], name: str) -> bool:
    # Attention has modules called "gate", too, so a router must also have experts beside it.
    parent, _, leaf = name.rpartition(".")
    beside_experts = leaf in ("gate", "router") and hasattr(modules[parent], "experts")
    return beside_experts or isinstance(modules[name], TokenChoiceTopKRouter)


def step(
    optimizer: Optimizers, model: torch.nn.Module, max_norm: float | None, ep_enabled: bool, world: World
) -> tuple[float, bool]:
    """Clip gradients to `max_norm`, update the weights if they are finite, and clear them. A collective.

    Returns the norm before clipping, and whether the weights were updated.
    """
    parameters = list(model.parameters())
    norm = dist_utils.clip_grad_norm_(parameters, max_norm or math.inf, foreach=True, ep_enabled=ep_enabled)
    norm = norm.to(world.device)
    # All ranks compute the same norm, but they still vote: a rank that skipped alone would leave the others waiting in
    # a collective.
    bad_ranks = world.sum((~norm.isfinite()).float())
    is_finite = not bad_ranks.item()
    if is_finite:
        optimizer.step()
    optimizer.zero_grad()
    return norm.item(), is_finite


def schedule(config: Optimizer, max_steps: int, optimizers: Optimizers) -> Any:
    """Build the learning rate schedule: linear warm-up, then constant or decaying."""
    # As in torchtitan and transformers, the decay ends one step after the last. With a minimum of 0, the last step
    # would train nothing otherwise.
    constant = config.schedule == "constant"
    return LRSchedulersContainer.Config(
        warmup_steps=config.warmup_steps,
        decay_ratio=0.0 if constant else None,
        decay_type="linear" if constant else config.schedule,
        min_lr_factor=config.min_lr_ratio,
    ).build(optimizers=optimizers, training_steps=max_steps)
