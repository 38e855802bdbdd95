"""One object that steps, saves and loads all optimizers of a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torchtitan.components.optimizer.utils import get_flat_optim_state_dict, load_flat_optim_state_dict

from primeslurm.trainer.optimizers.muon import Muon

# A parameter with its name
Named = tuple[str, torch.Tensor]


class Optimizers:
    """The optimizers of one model. State is saved by parameter name, so that any number of ranks can load it."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers

    def __iter__(self) -> Iterator[torch.optim.Optimizer]:
        return iter(self._optimizers)

    def __len__(self) -> int:
        return len(self._optimizers)

    @property
    def lr(self) -> float:
        return float(self._optimizers[0].param_groups[0]["lr"])

    def step(self) -> None:
        for optimizer in self._optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for optimizer in self._optimizers:
            add_missing_state(optimizer)
            result |= get_flat_optim_state_dict(optimizer)
        return result

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for optimizer in self._optimizers:
            self._load(optimizer, state)

    @staticmethod
    def _load(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        add_missing_state(optimizer)  # load_flat_optim_state_dict loads only into existing state
        load_flat_optim_state_dict(optimizer, state)


def add_missing_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the initial optimizer state of each parameter that has none, so that checkpoints hold all state."""
    # Optimizers create a parameter's state with its first gradient, which may come late: a vision encoder gets none
    # from batches without images. torchtitan's `init_optim_state` does nothing if any parameter has state. It also
    # counts a step, so that AdamW's bias correction of the first gradient would be that of the second.
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state.get(parameter) and (state := _initial_state(optimizer, group, parameter)):
                optimizer.state[parameter] = state


def _initial_state(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: torch.Tensor
) -> dict[str, torch.Tensor]:
    if isinstance(optimizer, torch.optim.AdamW):
        # Fused AdamW, which recipes use, counts steps on the parameter's device.
        step = torch.zeros((), dtype=torch.float32, device=parameter.device)
        return {"step": step, "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
    if isinstance(optimizer, Muon) or group.get("momentum"):
        return {"momentum_buffer": torch.zeros_like(parameter)}
    return {}
