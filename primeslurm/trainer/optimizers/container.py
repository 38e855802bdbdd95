"""Several optimizers of one model as one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torchtitan.components.optimizer.utils import get_flat_optim_state_dict, load_flat_optim_state_dict

from primeslurm.trainer.optimizers.muon import Muon

Named = tuple[str, torch.Tensor]
"""A parameter with its name."""


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
            add_missing_state(optimizer)
            result |= get_flat_optim_state_dict(optimizer)
        return result

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` returned."""
        for optimizer in self._optimizers:
            self._load(optimizer, state)

    @staticmethod
    def _load(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        add_missing_state(optimizer)  # load_flat_optim_state_dict loads only into state that exists
        load_flat_optim_state_dict(optimizer, state)


def add_missing_state(optimizer: torch.optim.Optimizer) -> None:
    """Give each parameter without optimizer state the state in which the optimizer would begin to train it.

    Optimizers create the state of a parameter with its first gradient, which may never come: a vision encoder has none
    in batches without images. Checkpoints hold the state of every parameter, so that every process can load them.
    torchtitan's `init_optim_state` would not do: it does nothing if any parameter has state, and it counts a step,
    which makes AdamW's bias correction of the first gradient that of a second one.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state.get(parameter) and (state := _initial_state(optimizer, group, parameter)):
                optimizer.state[parameter] = state


def _initial_state(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: torch.Tensor
) -> dict[str, torch.Tensor]:
    if isinstance(optimizer, torch.optim.AdamW):
        # Fused, as the recipe's is, it counts steps on the parameter's device.
        step = torch.zeros((), dtype=torch.float32, device=parameter.device)
        return {"step": step, "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
    if isinstance(optimizer, Muon) or group.get("momentum"):
        return {"momentum_buffer": torch.zeros_like(parameter)}
    return {}
